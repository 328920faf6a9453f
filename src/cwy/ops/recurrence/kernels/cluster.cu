// block.cu's recurrence on tensor cores: a cluster of CLUSTER blocks holds Q and runs PASSES x PASS_TILES tiles of
// TILE_SEQUENCES <= 8 sequences.
//
// A block owns 64 rows. Its warps multiply: 2 groups of rows x 4 quarters of the columns. Four warps finish a tile, one
// for 16 rows, and send it to every block of the cluster, as the operand of the next product. Passes take turns: the
// states of one travel while another is multiplied. MODE as in block.cu.
//
//   CLUSTER         blocks of a cluster
//   PASSES          passes that take turns
//   PASS_TILES      tiles of sequences of a pass
//   TILE_SEQUENCES  sequences of a tile
//   KEPT_TILES      tiles of Q, of a warp's CLUSTER, that are in registers
//   BLOCK_ROWS      rows of Q of a block
//   TILES           tiles of sequences of a cluster
//   SEQUENCES       sequences of a cluster
//   COLUMN_TILES    tiles of 16 columns of Q
//   PASS_BYTES      bytes that reach a block in a pass
#include "split_fp16.cuh"

constexpr int TILES = PASSES * PASS_TILES;
constexpr int SEQUENCES = TILES * TILE_SEQUENCES;
constexpr int COLUMN_TILES = 4 * CLUSTER;
constexpr int PASS_BYTES = PASS_TILES * COLUMN_TILES * TILE_SEQUENCES * (64 + 4);
static_assert(THREADS == 256 && TILES <= 2 && TILE_SEQUENCES <= 8, "eight warps, of which four finish a tile");
static_assert(2 * TILES * COLUMN_TILES * (16 * TILE_SEQUENCES + 8) + 4 * TILES * 4 * 128 + Units<4>::shared +
                      Fragments<2, CLUSTER, KEPT_TILES>::spilled ==
                  SHARED_FLOATS,
              "shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, 1) rollout(const float* __restrict__ matrix, const Tensors of) {
  extern __shared__ __align__(16) float memory[];
  uint4* const states = reinterpret_cast<uint4*>(memory);  // 2 x TILES x COLUMN_TILES x TILE_SEQUENCES x 4
  float* const scales =
      reinterpret_cast<float*>(states + 2 * TILES * COLUMN_TILES * TILE_SEQUENCES * 4);  // 2 x TILES x COLUMN_TILES x 8
  float* const parts = scales + 2 * TILES * COLUMN_TILES * 8;                            // 4 x TILES x 4 x 128
  float* const ring = parts + 4 * TILES * 4 * 128;
  float* const rest = ring + Units<4>::shared;
  __shared__ unsigned long long barriers[2 * PASSES];

  const unsigned rank = cluster_rank();
  const int sequence = blockIdx.x / CLUSTER * SEQUENCES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, within = lane % 4;
  const int tile = warp / 4, quarter = warp / 2,
            row = 32 * (warp % 2);  // finishes 16 rows of a tile; multiplies 32 rows
  // A lane has four columns in a row, so that one that finishes four states has its words of the next operand.
  Fragments<2, CLUSTER, KEPT_TILES> q;
  unsigned* const peaks = reinterpret_cast<unsigned*>(parts);  // 4 x BLOCK_ROWS
  const auto row_exponent = [&](int i) {
    return exponent(
        max(max(peaks[i], peaks[BLOCK_ROWS + i]), max(peaks[2 * BLOCK_ROWS + i], peaks[3 * BLOCK_ROWS + i])));
  };
  {
    unsigned own[2][2];
    q.load(
        rest,
        [&](int m, int half, int j, int c) {
          const int i = rank * BLOCK_ROWS + row + 16 * m + 8 * half + group, k = 64 * j + 16 * quarter + 4 * within + c;
          return i < of.n && k < of.n ? matrix[(long)i * of.n + k] : 0.f;
        },
        own);
    #pragma unroll
    for (int i = 0; i < 4; i++)
      if (within == 0) peaks[quarter * BLOCK_ROWS + row + 8 * i + group] = own[i / 2][i % 2];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 4; i++) own[i / 2][i % 2] = row_exponent(row + 8 * i + group);
    q.split_all(own);
  }

  Units<4> units(of, sequence, ring);
  const int own = 16 * (warp % 4) + 4 * within;
  float power_of[4];
  #pragma unroll
  for (int u = 0; u < 4; u++) {
    units.set(u, tile < TILES && group < TILE_SEQUENCES, sequence + tile * TILE_SEQUENCES + group,
              rank * BLOCK_ROWS + own + u);
    power_of[u] = power(row_exponent(own + u), 0);
  }
  units.begin();
  const unsigned barrier = shared_address(barriers);
  #pragma unroll
  for (int p = 0; p < PASSES; p++) barriers_init(barrier + 16 * p, barrier + 16 * p + 8);

  // Sends the four states of each lane to all blocks, as step `it` reads them.
  const auto share = [&](int it) {
    const float4 v = make_float4(units.value[0], units.value[1], units.value[2], units.value[3]);
    const unsigned e = exponent(largest_of_four_lanes(largest(v)));
    const int k = ((it & 1) * TILES + tile) * COLUMN_TILES + 4 * (int)rank + warp % 4;
    const unsigned to = shared_address(states + k * TILE_SEQUENCES * 4 + lane),
                   scale = shared_address(scales + k * 8 + group);
    const unsigned full = barrier + 16 * (tile / PASS_TILES) + 8 * (it & 1);
    const uint4 words = split(times(v, lift(e)));
    if (group < TILE_SEQUENCES) {
      #pragma unroll
      for (int i = 0; i < CLUSTER; i++) {
        const unsigned r = rank + i < CLUSTER ? rank + i : rank + i - CLUSTER;
        send(remote(to, r), words, remote(full, r));
      }
      for (int r = within; r < CLUSTER; r += 4) send(remote(scale, r), power(e, 28), remote(full, r));
    }
  };
  const int total = units.longest + (MODE != FORWARD);
  if (threadIdx.x == 0)
    for (int p = 0; p < PASSES; p++) barrier_expect(barrier + 16 * p, PASS_BYTES);
  if (tile < TILES) {
    share(0);
    units.turn(0);
  }

  const int column = group < TILE_SEQUENCES ? group : TILE_SEQUENCES - 1;  // lanes of no sequence read another's
  const int slot = group / 2 * 32 + 8 * ((within / 2 * 2 + group % 2) ^ (group / 2)) + 4 * (within % 2);
  for (int it = 0; it < total; it++) {
    const bool more = it + 1 < total;
    #pragma unroll
    for (int p = 0; p < PASSES; p++) {
      if (threadIdx.x == 0 && more) barrier_expect(barrier + 16 * p + 8 * (~it & 1), PASS_BYTES);
      barrier_wait(barrier + 16 * p + 8 * (it & 1), it >> 1 & 1);
      const int k = ((it & 1) * TILES + p * PASS_TILES) * COLUMN_TILES + quarter;
      float sums[PASS_TILES][2][4] = {};
      #pragma unroll
      for (int j = 0; j < CLUSTER; j++)
        #pragma unroll
        for (int t = 0; t < PASS_TILES; t++) {
          const int from = k + t * COLUMN_TILES + 4 * j;
          const uint4 words = states[from * TILE_SEQUENCES * 4 + column * 4 + within];
          const float2 scale = reinterpret_cast<float2*>(scales)[from * 4 + within];
          q.multiply(0, j, words, scale, sums[t][0]);
          q.multiply(1, j, words, scale, sums[t][1]);
        }
      #pragma unroll
      for (int t = 0; t < PASS_TILES; t++)
        #pragma unroll
        for (int m = 0; m < 2; m++) {
          float* const part =
              parts + ((quarter * TILES + p * PASS_TILES + t) * 4 + row / 16 + m) * 128 + within * 32 + group;
          #pragma unroll
          for (int i = 0; i < 4; i++) part[8 * (i ^ within)] = sums[t][m][i];
        }
      if (tile / PASS_TILES != p) {
        asm volatile("bar.arrive %0, %1;" ::"r"(p + 1), "n"(THREADS) : "memory");
        continue;
      }
      asm volatile("bar.sync %0, %1;" ::"r"(p + 1), "n"(THREADS) : "memory");
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int s = 0; s < 4; s++) {
        const float4 part = *reinterpret_cast<float4*>(parts + ((s * TILES + tile) * 4 + warp % 4) * 128 + slot);
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
      }
      #pragma unroll
      for (int u = 0; u < 4; u++)
        if (MODE != FORWARD && !more)
          units.close(u, v[u] * power_of[u]);
        else
          units.finish(u, it, v[u] * power_of[u]);
      if (more) {
        share(it + 1);
        units.turn(it + 1);
      }
    }
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < 4; u++) units.close(u, 0.f);
  }
  arrived<0>();
  cluster_sync();
}
