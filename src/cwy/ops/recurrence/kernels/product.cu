// The transition's gradient: part s of sum_k a_k b_k^T over all rows k of two tall matrices, on tensor cores.
//
// Each float32 is a sum of two tf32 numbers, hi + lo, and lo lo' is left out: float32 accuracy at three products.
// Tensor cores round towards zero when they add, so each product of STEP_ROWS rows starts from zero, small terms first,
// and is added to the sum outside.
//
// A block has WARPGROUPS warpgroups, each with 64 columns of a, and WIDTH columns of b. a goes from memory to registers
// in the order in which the instruction wants it; b is split into shared memory, a swizzled row of STEP_ROWS numbers a
// column.
//
//   WARPGROUPS            warpgroups of a block
//   WIDTH                 columns of b of a block
//   LOAD_WIDTH            numbers of a that a thread loads at once, 1 or 2
//   BLOCKS_PER_PROCESSOR  blocks that run at once on a multiprocessor
//   STEP_ROWS             rows of a and b of a step
//   STAGES                steps of b that shared memory holds
//   LIST, SUMS, OPERANDS, ADD  the registers of wgmma, by their places in its text
constexpr int THREADS = 128 * WARPGROUPS;
constexpr int TILE_BYTES = WIDTH * STEP_ROWS * 4;           // of hi, or of lo, of b in one step
constexpr int UNITS = (4 * WIDTH + THREADS - 1) / THREADS;  // runs of 8 rows of a column of b that a thread fetches

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
// clang-format off
#define LIST8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), \
  "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#if WIDTH == 64
#define SUMS \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define OPERANDS "{%32, %33, %34, %35}, %36"
#define ADD "%37"
#define LIST(c) \
  LIST8(c, 0), LIST8(c, 8), LIST8(c, 16), LIST8(c, 24)
#elif WIDTH == 96
#define SUMS \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define OPERANDS "{%48, %49, %50, %51}, %52"
#define ADD "%53"
#define LIST(c) \
  LIST8(c, 0), LIST8(c, 8), LIST8(c, 16), LIST8(c, 24), \
  LIST8(c, 32), LIST8(c, 40)
#elif WIDTH == 128
#define SUMS \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define OPERANDS "{%64, %65, %66, %67}, %68"
#define ADD "%69"
#define LIST(c) \
  LIST8(c, 0), LIST8(c, 8), LIST8(c, 16), LIST8(c, 24), \
  LIST8(c, 32), LIST8(c, 40), LIST8(c, 48), LIST8(c, 56)
#endif
// clang-format on

// Loads numbers, zero if outside. The compiler keeps these loads ahead of their use, other ones not.
//   Count  numbers to load, 1 or 2
template <int Count>
__device__ __forceinline__ void load(float* to, const float* from, bool inside) {
  to[0] = to[Count - 1] = 0.f;
  if (Count == 2)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.v2.f32 {%0, %1}, [%2];}"
                 : "+f"(to[0]), "+f"(to[Count - 1])
                 : "l"(from), "r"((int)inside));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.f32 %0, [%1];}"
                 : "+f"(to[0])
                 : "l"(from), "r"((int)inside));
}
__device__ __forceinline__ void split(float x, unsigned& hi, unsigned& lo) {
  hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  lo = __float_as_uint(x - __uint_as_float(hi));
}
// c = a b or c += a b, once the group is committed and waited for; b is at a shared address.
__device__ __forceinline__ void multiply(float (&c)[WIDTH / 2], const unsigned* a, unsigned b, int add) {
  const unsigned long long operand = 1ull << 62 | 64ull << 32 | b >> 4;  // blocks of 8 rows of 128 bytes, swizzled
  asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD
               ", 0; wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) "k8.f32.tf32.tf32 {" SUMS "}, " OPERANDS
                                                                    ", p, 1, 1;}"
               : LIST(c)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand), "r"(add));
}

// Row k of b is heads[k] for k < headed, else b[k - headed].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_PROCESSOR)
    product(const float* a, const float* b, const float* heads, float* out, int m, int n, int rows, int headed,
            int each) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned base = (unsigned)__cvta_generic_to_shared(memory);
  const int tiles = (n + WIDTH - 1) / WIDTH, tn = blockIdx.x % tiles * WIDTH;
  const int from = blockIdx.y * each - (-headed & 7), to = min(from + each, rows);  // heads end where 8 rows do
  const int within = threadIdx.x % 4,
            column = blockIdx.x / tiles * 64 * WARPGROUPS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;

  float left[16], right[UNITS][8];  // what comes next: two columns of a, 8 rows of a column of b a unit
  auto fetch_left = [&](int k0) {
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      const int k = k0 + 4 * i + within;
      #pragma unroll
      for (int e = 0; e < 2; e += LOAD_WIDTH)
        load<LOAD_WIDTH>(left + 2 * i + e, a + (long)k * m + column + e, (unsigned)k < to && column + e < m);
    }
  };
  auto fetch_right = [&](int k0) {
    #pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int unit = threadIdx.x + u * THREADS, j = tn + unit % WIDTH, k = k0 + unit / WIDTH * 8;
      const float* const source = (k < headed ? heads + (long)k * n : b + (long)(k - headed) * n) + j;
      const unsigned end = j < n && unit < 4 * WIDTH ? to : 0;
      #pragma unroll
      for (int i = 0; i < 8; i++) load<1>(right[u] + i, source + i * n, k + i < end);
    }
  };
  auto store_right = [&](int stage) {
    #pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const int unit = threadIdx.x + u * THREADS, j = unit % WIDTH, i = unit / WIDTH * 2;
      if (unit < 4 * WIDTH) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          uint4 hi, lo;
          split(right[u][4 * half], hi.x, lo.x), split(right[u][4 * half + 1], hi.y, lo.y);
          split(right[u][4 * half + 2], hi.z, lo.z), split(right[u][4 * half + 3], hi.w, lo.w);
          uint4* const row = (uint4*)(memory + stage * 2 * TILE_BYTES + j * 128) + (i + half ^ j % 8);
          row[0] = hi, row[TILE_BYTES / 16] = lo;
        }
      }
    }
  };

  fetch_right(from);
  store_right(0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  fetch_right(from + STEP_ROWS);
  fetch_left(from);
  __syncthreads();

  float sums[WIDTH / 2] = {};
  int stage = 0;
  for (int k0 = from; k0 < to; k0 += STEP_ROWS) {
    const int next = (stage + 1) % STAGES;
    unsigned hi[16], lo[16];
    #pragma unroll
    for (int i = 0; i < 16; i++) split(left[i], hi[i], lo[i]);
    const unsigned right_hi = base + stage * 2 * TILE_BYTES, right_lo = right_hi + TILE_BYTES;
    float part[WIDTH / 2];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int s = 0; s < 4; s++) multiply(part, lo + 4 * s, right_hi + 32 * s, s);
    #pragma unroll
    for (int s = 0; s < 4; s++) multiply(part, hi + 4 * s, right_lo + 32 * s, 1);
    #pragma unroll
    for (int s = 0; s < 4; s++) multiply(part, hi + 4 * s, right_hi + 32 * s, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    store_right(next);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    fetch_right(k0 + 2 * STEP_ROWS);
    fetch_left(k0 + STEP_ROWS);
    __syncthreads();
    asm volatile("wgmma.wait_group.sync.aligned 0;" : LIST(part)::"memory");
    #pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) sums[i] += part[i];
    stage = next;
  }

  #pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) {
    const int row = column + i / 2 % 2, j = tn + i / 4 * 8 + within * 2 + i % 2;
    if (row < m && j < n) out[((long)blockIdx.y * m + row) * n + j] = sums[i];
  }
}
