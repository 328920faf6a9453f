// Float32 as a sum of two fp16 numbers, hi + lo, for tensor cores: copies of either, side by side or below each other.

enum { PLAIN, SKEW, LOWER };  // x; x - x^T; what is below its diagonal
constexpr int TILE = 32, STEP = 8;

__device__ __forceinline__ unsigned short half(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float whole(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
// The power of two that a norm is just below.
__device__ __forceinline__ int exponent(const double* norm) { return norm && *norm > 0 && *norm < 1e300 ? ilogb(*norm) + 1 : 0; }

// Copy c of x, times 2^power, or if there is a norm times the power of two that brings it below 1 too, is hi if bit c of `order` is set.
extern "C" __global__ void __launch_bounds__(TILE * STEP)
halves(const float* x, unsigned short* out, const double* norm, int rows, int columns, int kind, int copies, int order, int below, int power) {
  __shared__ float mirror[TILE][TILE + 1];
  const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, j = threadIdx.x % TILE;
  if (kind == SKEW) {
    for (int i = threadIdx.x / TILE; i < TILE; i += STEP)
      if (j0 + i < rows && i0 + j < columns) mirror[i][j] = x[(long)(j0 + i) * columns + i0 + j];
    __syncthreads();
  }
  for (int i = threadIdx.x / TILE; i < TILE; i += STEP) {
    const int row = i0 + i, column = j0 + j;
    if (row >= rows || column >= columns) continue;
    float value = kind == LOWER && row <= column ? 0.f : x[(long)row * columns + column];
    if (kind == SKEW) value -= mirror[j][i];
    value = scalbnf(value, power - exponent(norm));
    const unsigned short hi = half(value), lo = half(value - whole(hi));
    for (int c = 0; c < copies; c++)
      out[(below ? (long)c * rows + row : (long)row * copies + c) * columns + column] = order >> c & 1 ? hi : lo;
  }
}
