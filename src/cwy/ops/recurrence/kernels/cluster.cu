// block.cu's recurrence on tensor cores: a cluster of C blocks holds Q and runs PASSES x NT tiles of SP <= 8 sequences.
//
// A float32 is two fp16, hi + lo, after a power of two has brought the largest of its row of Q, or of 16 states of a
// sequence, to [2^14, 2^15), where lo is normal; hi hi + hi lo + lo hi is then as exact as a float32 product. The tensor
// cores sum over 16 columns; sums over more are float32, with the scale of the states. A scale of NaN carries NaN and Inf.
//
// A block owns 64 rows. Its warps multiply: 2 groups of rows x 4 quarters of the columns. Four warps finish a tile, one for
// 16 rows, and send it to every block of the cluster, as the operand of the next product. Passes take turns: the states of
// one travel while another is multiplied. MODE as in block.cu.
#include "common.cuh"

constexpr int ROWS = 64, TILES = PASSES * NT, S = TILES * SP, KT = 4 * C;
constexpr int BYTES = NT * KT * SP * (64 + 4);  // that reach a block in a pass
// The tensor cores round to zero, which makes sums of many terms smaller by this, on average (measured on an H200).
constexpr float GROW = 3.9e-8f;
static_assert(THREADS == 256 && TILES <= 2 && SP <= 8, "eight warps, of which four finish a tile");

// ---- two fp16 for a float32 ----------------------------------------------------------------------------------------------
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float2 unpack(unsigned both) {
  float2 v;
  asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(v.x), "=f"(v.y) : "r"(both));
  return v;
}
// Two words of hi, two of lo; lo makes the whole larger by `grow`.
__device__ __forceinline__ uint4 split(float4 v, float lift, float grow = 0.f) {
  v.x *= lift, v.y *= lift, v.z *= lift, v.w *= lift;
  const uint2 hi = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
  const float2 a = unpack(hi.x), b = unpack(hi.y);
  float4 lo = make_float4(v.x - a.x, v.y - a.y, v.z - b.x, v.w - b.y);
  if (grow != 0.f) lo = make_float4(fmaf(v.x, grow, lo.x), fmaf(v.y, grow, lo.y), fmaf(v.z, grow, lo.z), fmaf(v.w, grow, lo.w));
  return make_uint4(hi.x, hi.y, pack(lo.x, lo.y), pack(lo.z, lo.w));
}
// Sizes are compared as integers, so that NaN is the largest. The exponent of the largest, 255 for NaN and Inf:
__device__ __forceinline__ unsigned size(float v) { return __float_as_uint(v) & 0x7fffffff; }
__device__ __forceinline__ unsigned largest(float4 v) { return max(max(size(v.x), size(v.y)), max(size(v.z), size(v.w))); }
__device__ __forceinline__ unsigned largest_of_four_lanes(unsigned s) {
  s = max(s, __shfl_xor_sync(~0u, s, 1));
  return max(s, __shfl_xor_sync(~0u, s, 2));
}
__device__ __forceinline__ unsigned exponent(unsigned size) { return max(size >> 23, 29u); }
__device__ __forceinline__ float lift(unsigned e) { return __uint_as_float((268 - e) << 23); }
__device__ __forceinline__ float power(unsigned e, unsigned less) { return __uint_as_float(e == 255 ? ~0u : (e - less) << 23); }

__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- 32 rows of Q, a quarter of the columns -------------------------------------------------------------------------------
// Lane (group, within) = (lane / 4, lane % 4) has columns 4 within .. + 3 of rows group and group + 8 of each 16 x 16: the
// order of columns inside a product is free, so that these are two words of an operand, and a lane that finishes four
// states in a row has its words of the next one. KR column tiles are in registers, the others in shared memory.
struct Fragments {
  uint4 kept[2][KR][2];
  uint4* rest;

  static constexpr int spilled = 2 * (C - KR) * 2 * THREADS * 4;  // floats of shared memory

  __device__ __forceinline__ uint4* at(int m, int j, int half) {
    return j < KR ? &kept[m][j < KR ? j : 0][half] : rest + ((m * (C - KR) + j - KR) * 2 + half) * THREADS;
  }
  // Rows and columns count from the first of the block and of the quarter. `peaks` is room for 4 x ROWS.
  __device__ __forceinline__ void load(
      const float* matrix, int n, int rows, int row, int quarter, unsigned* peaks, float* room) {
    rest = reinterpret_cast<uint4*>(room) + threadIdx.x;
    const int group = threadIdx.x % 32 / 4, within = threadIdx.x % 4;
    #pragma unroll
    for (int m = 0; m < 2; m++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = row + 16 * m + 8 * half + group;
        unsigned peak = 0;
        #pragma unroll
        for (int j = 0; j < C; j++) {
          const int k = 64 * j + 16 * quarter + 4 * within;
          float v[4];
          #pragma unroll
          for (int c = 0; c < 4; c++) v[c] = i < rows && k + c < n ? matrix[(long)i * n + k + c] : 0.f;
          const float4 four = make_float4(v[0], v[1], v[2], v[3]);
          peak = max(peak, largest(four));
          *reinterpret_cast<float4*>(at(m, j, half)) = four;
        }
        peak = largest_of_four_lanes(peak);
        if (within == 0) peaks[quarter * ROWS + i] = peak;
      }
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < 2; m++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const float up = lift(row_exponent(peaks, row + 16 * m + 8 * half + group));
        #pragma unroll
        for (int j = 0; j < C; j++) {
          const float4 v = *reinterpret_cast<float4*>(at(m, j, half));
          int terms = (v.x != 0.f) + (v.y != 0.f) + (v.z != 0.f) + (v.w != 0.f);
          terms += __shfl_xor_sync(~0u, terms, 1);
          terms += __shfl_xor_sync(~0u, terms, 2);
          *at(m, j, half) = split(v, up, terms > 2 ? GROW : 0.f);
        }
      }
  }
  static __device__ __forceinline__ unsigned row_exponent(const unsigned* peaks, int i) {
    return exponent(max(max(peaks[i], peaks[ROWS + i]), max(peaks[2 * ROWS + i], peaks[3 * ROWS + i])));
  }

  // Products with NT tiles of states, in the order of the tensor cores: [tile][rows of 16][4].
  __device__ __forceinline__ void multiply(const uint4* states, const float2* scales, float (*sums)[2][4]) {
    #pragma unroll
    for (int i = 0; i < NT * 8; i++) (&sums[0][0][0])[i] = 0.f;
    #pragma unroll
    for (int j = 0; j < C; j++)
      #pragma unroll
      for (int p = 0; p < NT; p++) {
        const uint4 b = states[(p * KT + 4 * j) * 4 * SP];
        const float2 scale = scales[(p * KT + 4 * j) * 4];
        #pragma unroll
        for (int m = 0; m < 2; m++) {
          const uint4 top = *at(m, j, 0), low = *at(m, j, 1);
          float sum[4] = {0.f, 0.f, 0.f, 0.f};
          mma(sum, top.z, low.z, top.w, low.w, b.x, b.y);
          mma(sum, top.x, low.x, top.y, low.y, b.z, b.w);
          mma(sum, top.x, low.x, top.y, low.y, b.x, b.y);
          #pragma unroll
          for (int i = 0; i < 4; i++) sums[p][m][i] = fmaf(i & 1 ? scale.y : scale.x, sum[i], sums[p][m][i]);
        }
      }
  }
};

__device__ __forceinline__ void send(unsigned address, uint4 v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
               ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier));
}
__device__ __forceinline__ void send(unsigned address, float v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(address), "r"(__float_as_uint(v)), "r"(barrier));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rollout(const float* __restrict__ matrix, const Tensors of) {
  extern __shared__ __align__(16) float memory[];
  uint4* const states = reinterpret_cast<uint4*>(memory);                        // 2 x TILES x KT x SP x 4
  float* const scales = reinterpret_cast<float*>(states + 2 * TILES * KT * SP * 4);  // 2 x TILES x KT x 8
  float* const parts = scales + 2 * TILES * KT * 8;                              // 4 x TILES x 4 x 128
  float* const ring = parts + 4 * TILES * 4 * 128;
  float* const rest = ring + Units<4>::shared;
  __shared__ unsigned long long barriers[2 * PASSES];

  const unsigned rank = cluster_rank();
  const int sequence = blockIdx.x / C * S, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, within = lane % 4;
  const int tile = warp / 4, quarter = warp / 2, row = 32 * (warp % 2);  // finishes 16 rows of a tile; multiplies 32 rows
  Fragments q;
  unsigned* const peaks = reinterpret_cast<unsigned*>(parts);
  q.load(matrix + (long)rank * ROWS * of.n, of.n, of.n - (int)rank * ROWS, row, quarter, peaks, rest);

  Units<4> units(of, sequence, ring);
  const int own = 16 * (warp % 4) + 4 * within;
  float power_of[4];
  #pragma unroll
  for (int u = 0; u < 4; u++) {
    units.set(u, tile < TILES && group < SP, sequence + tile * SP + group, rank * ROWS + own + u);
    power_of[u] = power(Fragments::row_exponent(peaks, own + u), 0);
  }
  units.begin();
  const unsigned barrier = shared_address(barriers);
  #pragma unroll
  for (int p = 0; p < PASSES; p++) barriers_init(barrier + 16 * p, barrier + 16 * p + 8);

  // Sends the four states of each lane to all blocks, as step `it` reads them.
  const auto share = [&](int it) {
    const float4 v = make_float4(units.value[0], units.value[1], units.value[2], units.value[3]);
    const unsigned e = exponent(largest_of_four_lanes(largest(v)));
    const int k = ((it & 1) * TILES + tile) * KT + 4 * (int)rank + warp % 4;
    const unsigned to = shared_address(states + k * SP * 4 + lane), scale = shared_address(scales + k * 8 + group);
    const unsigned full = barrier + 16 * (tile / NT) + 8 * (it & 1);
    const uint4 words = split(v, lift(e));
    if (group < SP) {
      #pragma unroll
      for (int i = 0; i < C; i++) {
        const unsigned r = rank + i < C ? rank + i : rank + i - C;
        send(remote(to, r), words, remote(full, r));
      }
      for (int r = within; r < C; r += 4) send(remote(scale, r), power(e, 28), remote(full, r));
    }
  };
  const int total = units.longest + (MODE != FORWARD);
  if (threadIdx.x == 0)
    for (int p = 0; p < PASSES; p++) barrier_expect(barrier + 16 * p, BYTES);
  if (tile < TILES) {
    share(0);
    units.turn(0);
  }

  const int column = group < SP ? group : SP - 1;  // lanes of no sequence read another's
  const int slot = group / 2 * 32 + 8 * ((within / 2 * 2 + group % 2) ^ (group / 2)) + 4 * (within % 2);
  for (int it = 0; it < total; it++) {
    const bool more = it + 1 < total;
    #pragma unroll
    for (int p = 0; p < PASSES; p++) {
      if (threadIdx.x == 0 && more) barrier_expect(barrier + 16 * p + 8 * (~it & 1), BYTES);
      barrier_wait(barrier + 16 * p + 8 * (it & 1), it >> 1 & 1);
      const int k = ((it & 1) * TILES + p * NT) * KT + quarter;
      float sums[NT][2][4];
      q.multiply(states + k * SP * 4 + column * 4 + within, reinterpret_cast<float2*>(scales) + k * 4 + within, sums);
      #pragma unroll
      for (int t = 0; t < NT; t++)
        #pragma unroll
        for (int m = 0; m < 2; m++) {
          float* const part = parts + ((quarter * TILES + p * NT + t) * 4 + row / 16 + m) * 128 + within * 32 + group;
          #pragma unroll
          for (int i = 0; i < 4; i++) part[8 * (i ^ within)] = sums[t][m][i];
        }
      if (tile / NT != p) {
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
        if (MODE != FORWARD && !more) units.close(u, v[u] * power_of[u]);
        else units.finish(u, it, v[u] * power_of[u]);
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
