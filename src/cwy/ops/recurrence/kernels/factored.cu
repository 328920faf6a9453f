// The same recurrence with Q = diag(d) - A B^T of few columns, on tensor cores: a cluster of CLUSTER blocks runs
// SEQUENCES <= 8 sequences.
//
// A block owns ROW_TILES tiles of 16 rows of A and B and of the states; c = B^T h has FACTOR_TILES tiles. A warp
// multiplies a tile of the block's part of c and sends it, as it is, to one block, which adds up what came from all and
// sends the sum to all, as the operand of A c; a warp finishes 16 rows of d h - A c there. MODE as in block.cu, with A
// and B exchanged.
//
// Buffers are single: whatever overwrites one was made from sums that all blocks, and all warps, had a part in after
// reading it. The c that a step multiplies, forward or in the adjoint, is kept in `inner`, if there is one.
//
//   CLUSTER       blocks of a cluster
//   SEQUENCES     sequences of a cluster
//   ROW_TILES     tiles of 16 rows of A and B of a block
//   FACTOR_TILES  tiles of 16 columns of A and B
//   KEPT_DOWN     tiles of a warp's part of B^T, of ROW_TILES, that are in registers
//   KEPT_UP       tiles of a warp's part of A, of FACTOR_TILES, that are in registers
//   WARP_TILES    tiles of c that a warp multiplies
//   OWNED_TILES   tiles of c, at most, that a block adds up
//   PAIRS         pairs of sequences
//   PART_BYTES    bytes of a tile of c of one block, as it is sent
//   WHOLE_BYTES   bytes of a tile of c of all blocks, as it is sent
#include "split_fp16.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int WARP_TILES = (FACTOR_TILES + WARPS - 1) / WARPS;
constexpr int OWNED_TILES = (FACTOR_TILES + CLUSTER - 1) / CLUSTER;
constexpr int PAIRS = (SEQUENCES + 1) / 2;
constexpr int PART_BYTES = 8 * PAIRS * 16;
constexpr int WHOLE_BYTES = SEQUENCES * 64 + PAIRS * 8;
static_assert(ROW_TILES <= WARPS && OWNED_TILES <= WARPS && SEQUENCES <= 8 && CLUSTER <= 16, "a warp for each tile");
static_assert(4 + (ROW_TILES + FACTOR_TILES) * (16 * SEQUENCES + 8) + OWNED_TILES * CLUSTER * 128 + Units<4>::shared +
                      Fragments<WARP_TILES, ROW_TILES, KEPT_DOWN>::spilled +
                      Fragments<1, FACTOR_TILES, KEPT_UP>::spilled ==
                  SHARED_FLOATS,
              "shared memory");

// The four numbers that the tensor cores leave in a lane, rows group and group + 8 of sequences 2 within and 2 within +
// 1, as its words of an operand, columns 2 within, + 1, + 8 and + 9 of sequence `group`; and the scales of those two
// sequences.
struct Operand {
  uint4 words;
  float2 scale;

  static __device__ __forceinline__ unsigned turned(unsigned pair) {
    unsigned other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
  }
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    unsigned both;
    asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
  }
  __device__ __forceinline__ Operand(const float* v) {
    unsigned peaks = __byte_perm(max(size(v[0]), size(v[2])), max(size(v[1]), size(v[3])), 0x7632);  // the upper halves
    #pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, lanes));
    const unsigned a = exponent(peaks << 16), b = exponent(peaks);
    const uint4 w = split(make_float4(v[0] * lift(a), v[1] * lift(b), v[2] * lift(a), v[3] * lift(b)));
    words = make_uint4(turned(w.x), turned(w.y), turned(w.z), turned(w.w));
    scale = make_float2(power(a, 28), power(b, 28));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    rollout(const float* __restrict__ A, const float* __restrict__ B, const float* __restrict__ d, const Tensors of,
            const int l, float* const inner) {
  extern __shared__ __align__(16) float memory[];
  unsigned long long* const barriers = reinterpret_cast<unsigned long long*>(memory);  // 2
  uint4* const states = reinterpret_cast<uint4*>(memory) + 1;                          // ROW_TILES x SEQUENCES x 4
  uint4* const wholes = states + ROW_TILES * SEQUENCES * 4;  // FACTOR_TILES x SEQUENCES x 4, c as an operand
  float4* const parts = reinterpret_cast<float4*>(wholes + FACTOR_TILES * SEQUENCES * 4);  // OWNED_TILES x CLUSTER x 32
  float2* const scales =
      reinterpret_cast<float2*>(parts + OWNED_TILES * CLUSTER * 32);  // (ROW_TILES + FACTOR_TILES) x 4
  float* const ring = reinterpret_cast<float*>(scales + (ROW_TILES + FACTOR_TILES) * 4);
  float* const rest = ring + Units<4>::shared;

  const unsigned rank = cluster_rank();
  const int sequence = blockIdx.x / CLUSTER * SEQUENCES, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, within = lane % 4, first = rank * ROW_TILES * 16, row = first + 16 * warp + group;
  Fragments<WARP_TILES, ROW_TILES, KEPT_DOWN> down;
  Fragments<1, FACTOR_TILES, KEPT_UP> up;
  unsigned peaks[WARP_TILES + 1][2];
  float powers[WARP_TILES + 1][2];
  const auto column = [&](int j, int c) { return 16 * j + 2 * within + c % 2 + 8 * (c / 2); };
  down.load(
      rest,
      [&](int m, int half, int j, int c) {
        const int i = first + column(j, c), k = 16 * (warp + WARPS * m) + 8 * half + group;
        return i < of.n && k < l ? B[(long)i * l + k] : 0.f;
      },
      peaks);
  up.load(
      rest + down.spilled,
      [&](int, int half, int j, int c) {
        const int i = row + 8 * half, k = column(j, c);
        return warp < ROW_TILES && i < of.n && k < l ? A[(long)i * l + k] : 0.f;
      },
      peaks + WARP_TILES);
  #pragma unroll
  for (int i = 0; i < 2 * WARP_TILES + 2; i++)
    powers[i / 2][i % 2] = power(peaks[i / 2][i % 2] = exponent(peaks[i / 2][i % 2]), 0);
  down.split_all(peaks);
  up.split_all(peaks + WARP_TILES);

  Units<4> units(of, sequence, ring);
  float diagonal[2];
  #pragma unroll
  for (int u = 0; u < 4; u++) {
    const int s = 2 * within + u % 2, i = row + 8 * (u / 2);
    units.set(u, warp < ROW_TILES && s < SEQUENCES, sequence + s, i);
    diagonal[u / 2] = i < of.n ? d[i] : 0.f;
  }
  units.begin();
  const auto publish = [&]() {
    const Operand h(units.value);
    if (group < SEQUENCES) states[warp * SEQUENCES * 4 + lane] = h.words;
    if (group == 0 && within < PAIRS) scales[warp * 4 + within] = h.scale;
  };
  if (warp < ROW_TILES) publish();

  const int owned = WARPS - 1 - warp, mine = rank + CLUSTER * owned;  // the tile of c that the warp adds up
  const unsigned partial = shared_address(&barriers[0]), whole = shared_address(&barriers[1]);
  barriers_init(partial, whole);
  if (threadIdx.x == 0) {
    barrier_expect(partial, (FACTOR_TILES + CLUSTER - 1 - rank) / CLUSTER * CLUSTER * PART_BYTES);
    barrier_expect(whole, FACTOR_TILES * WHOLE_BYTES);
  }

  const int from = (group < SEQUENCES ? group : SEQUENCES - 1) * 4 + within;  // lanes of no sequence read another's
  const int total = units.longest + (MODE != FORWARD);
  for (int it = 0; it < total; it++) {
    #pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
      const int tile = warp + WARPS * m;
      if (tile >= FACTOR_TILES) break;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int j = 0; j < ROW_TILES; j++)
        down.multiply(m, j, states[j * SEQUENCES * 4 + from], scales[j * 4 + within], c);
      const float4 part =
          make_float4(c[0] * powers[m][0], c[1] * powers[m][0], c[2] * powers[m][1], c[3] * powers[m][1]);
      const unsigned to = shared_address(parts + (tile / CLUSTER * CLUSTER + rank) * 32 + lane);
      if (within < PAIRS) send(remote(to, tile % CLUSTER), part, remote(partial, tile % CLUSTER));
    }
    units.turn(it);
    if (owned < OWNED_TILES && mine < FACTOR_TILES) {
      barrier_wait(partial, it & 1);
      if (owned == 0 && lane == 0)
        barrier_expect(partial, (FACTOR_TILES + CLUSTER - 1 - rank) / CLUSTER * CLUSTER * PART_BYTES);
      const float4 own = parts[owned * CLUSTER * 32 + lane];
      float c[4] = {own.x, own.y, own.z, own.w};
      #pragma unroll
      for (int r = 1; r < CLUSTER; r++) {
        const float4 part = parts[(owned * CLUSTER + r) * 32 + lane];
        c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
      }
      const Operand sum(c);
      const unsigned to = shared_address(wholes + mine * SEQUENCES * 4 + lane),
                     scale = shared_address(scales + (ROW_TILES + mine) * 4 + within);
      if (group < SEQUENCES)
        #pragma unroll
        for (int r = 0; r < CLUSTER; r++) send(remote(to, r), sum.words, remote(whole, r));
      if (within < PAIRS)
        #pragma unroll
        for (int r = group; r < CLUSTER; r += 8) send(remote(scale, r), sum.scale, remote(whole, r));
      if (inner && (MODE == FORWARD || it > 0)) {
        const int t = units.time(MODE == FORWARD ? it : it - 1);
        const long at = PACKED ? (long)of.offsets[t] : (long)t * of.batch;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int s = 2 * within + i % 2, k = 16 * mine + group + 8 * (i / 2);
          const bool live = s < SEQUENCES && sequence + s < of.batch && k < l;
          if (live && (!PACKED || t < of.lengths[sequence + s])) inner[(at + sequence + s) * l + k] = c[i];
        }
      }
    }
    barrier_wait(whole, it & 1);
    if (threadIdx.x == 0) barrier_expect(whole, FACTOR_TILES * WHOLE_BYTES);
    if (warp < ROW_TILES) {
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int j = 0; j < FACTOR_TILES; j++)
        up.multiply(0, j, wholes[j * SEQUENCES * 4 + from], scales[(ROW_TILES + j) * 4 + within], v);
      #pragma unroll
      for (int u = 0; u < 4; u++) {
        v[u] = fmaf(-powers[WARP_TILES][u / 2], v[u], diagonal[u / 2] * units.value[u]);
        if (MODE != FORWARD && it + 1 == total)
          units.close(u, v[u]);
        else
          units.finish(u, it, v[u]);
      }
      publish();
    }
    __syncthreads();
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < 4; u++) units.close(u, 0.f);
  }
  arrived<0>();
  cluster_sync();
}
