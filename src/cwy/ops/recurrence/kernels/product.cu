// The transition's gradient: part s of sum_k a_k b_k^T over all rows k of two tall matrices, on tensor cores.
//
// Each float32 is a sum of two tf32 numbers, hi + lo, and lo lo' is left out: float32 accuracy at three products. Tensor
// cores round towards zero when they add, so each product of 8 rows starts from zero and is added to the sum outside.
constexpr int WARPS = THREADS / 128, BM = WARPS * 16 * MI, BN = 32 * NI, LDA = BM + 8, LDB = BN + 8, KB = 32;

__device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = inside ? VEC * 4 : 0;
  if (VEC == 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  if (VEC == 2) asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  if (VEC == 1) asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
struct Split { unsigned hi, lo; };
__device__ __forceinline__ Split split(float x) {
  const unsigned hi = __float_as_uint(x) & 0xffffe000u;
  return {hi, __float_as_uint(x - __uint_as_float(hi)) + 0x1000u};
}
__device__ __forceinline__ void mma_first(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Row k of b is heads[k] for k < headed, else b[k - headed].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
product(const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ heads, float* __restrict__ out,
        int m, int n, int rows, int headed, int each) {
  extern __shared__ __align__(16) float memory[];
  const int tiles = (n + BN - 1) / BN, tm = blockIdx.x / tiles * BM, tn = blockIdx.x % tiles * BN;
  const int from = blockIdx.y * each, to = min(from + each, rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp / 4 * 16 * MI, wn = warp % 4 * 8 * NI;
  const int quad = lane / 4, within = lane % 4;
  float* const as = memory;
  float* const bs = memory + STAGES * KB * LDA;

  auto fetch = [&](int stage, int k0) {
    for (int i = threadIdx.x; i < KB * (BM / VEC); i += THREADS) {
      const int k = i / (BM / VEC), j = i % (BM / VEC) * VEC;
      const bool inside = k0 + k < to && tm + j < m;
      copy_async(as + (stage * KB + k) * LDA + j, inside ? a + (long)(k0 + k) * m + tm + j : a, inside);
    }
    for (int i = threadIdx.x; i < KB * (BN / VEC); i += THREADS) {
      const int k = i / (BN / VEC), j = i % (BN / VEC) * VEC, r = k0 + k;
      const bool inside = r < to && tn + j < n;
      const float* const source = r < headed ? heads + (long)r * n : b + (long)(r - headed) * n;
      copy_async(bs + (stage * KB + k) * LDB + j, inside ? source + tn + j : b, inside);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  float sums[MI][NI][4] = {};
  #pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch(s, from + s * KB);
  int stage = 0;
  for (int k0 = from; k0 < to; k0 += KB) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    const int filled = (stage + STAGES - 1) % STAGES;
    fetch(filled, k0 + (STAGES - 1) * KB);
    const float* const ap = as + stage * KB * LDA + wm + quad;
    const float* const bp = bs + stage * KB * LDB + wn + quad;
    #pragma unroll UNROLL
    for (int k = 0; k < KB; k += 8) {
      Split right[NI][2];
      #pragma unroll
      for (int j = 0; j < NI; j++) {
        right[j][0] = split(bp[(k + within) * LDB + 8 * j]);
        right[j][1] = split(bp[(k + within + 4) * LDB + 8 * j]);
      }
      #pragma unroll
      for (int i = 0; i < MI; i++) {
        Split left[4];
        #pragma unroll
        for (int e = 0; e < 4; e++) left[e] = split(ap[(k + within + e / 2 * 4) * LDA + 16 * i + e % 2 * 8]);
        float part[NI][4];
        #pragma unroll
        for (int j = 0; j < NI; j++) mma_first(part[j], left[0].lo, left[1].lo, left[2].lo, left[3].lo, right[j][0].hi, right[j][1].hi);
        #pragma unroll
        for (int j = 0; j < NI; j++) mma(part[j], left[0].hi, left[1].hi, left[2].hi, left[3].hi, right[j][0].lo, right[j][1].lo);
        #pragma unroll
        for (int j = 0; j < NI; j++) mma(part[j], left[0].hi, left[1].hi, left[2].hi, left[3].hi, right[j][0].hi, right[j][1].hi);
        #pragma unroll
        for (int j = 0; j < NI; j++)
          #pragma unroll
          for (int e = 0; e < 4; e++) sums[i][j][e] += part[j][e];
      }
    }
    stage = (stage + 1) % STAGES;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  float* const part = out + (long)blockIdx.y * m * n;
  #pragma unroll
  for (int i = 0; i < MI; i++)
    #pragma unroll
    for (int j = 0; j < NI; j++)
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = tm + wm + 16 * i + quad + e / 2 * 8, column = tn + wn + 8 * j + within * 2 + e % 2;
        if (row < m && column < n) part[(long)row * n + column] = sums[i][j][e];
      }
}
