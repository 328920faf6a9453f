// Float32 split into two fp16 numbers, hi + lo, for tensor cores: copies of either, side by side or below each other.
//
// Python defines every macro of this file and passes it to the compiler (split_fp16.py):
//   PLAIN      a value of `kind`: x
//   SKEW       x - x^T
//   LOWER      what is below the diagonal of x
//   BOTH       what is above the diagonal of x, and its transpose
//   TILE       rows and columns of a block
//   TILE_ROWS  rows of it at once; a thread has four neighbors
#include "fp16.cuh"

// Copy c of x, times 2^power, or if there is a norm times the power of two that brings it below 1 too, is hi if bit c
// of `order` is set. Columns are a multiple of four, and x begins at a multiple of 16 bytes.
extern "C" __global__ void __launch_bounds__(TILE / 4 * TILE_ROWS)
    split_fp16(const float* x, uint2* out, const double* norm, int rows, int columns, int kind, int copies, int order,
               int below, int power) {
  __shared__ float mirror[TILE][TILE + 1];
  const int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE, j = threadIdx.x % (TILE / 4) * 4, column = j0 + j;
  auto load = [=](int i, int j) { return *reinterpret_cast<const float4*>(x + (long)i * columns + j); };
  if (kind == SKEW || kind == BOTH) {
    for (int i = threadIdx.x / (TILE / 4); i < TILE; i += TILE_ROWS)
      if (j0 + i < rows && i0 + j < columns) {
        const float4 value = load(j0 + i, i0 + j);
        mirror[i][j] = value.x, mirror[i][j + 1] = value.y, mirror[i][j + 2] = value.z, mirror[i][j + 3] = value.w;
      }
    __syncthreads();
  }
  if (norm && *norm > 0 && *norm < 1e300) power -= ilogb(*norm) + 1;
  #pragma unroll
  for (int i = threadIdx.x / (TILE / 4); i < TILE; i += TILE_ROWS) {
    const int row = i0 + i;
    if (row >= rows || column >= columns) continue;
    const float4 value = load(row, column);
    float v[4] = {value.x, value.y, value.z, value.w};
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      if (kind == LOWER && row <= column + e) v[e] = 0;
      if (kind == SKEW) v[e] -= mirror[j + e][i];
      if (kind == BOTH && row >= column + e) v[e] = row > column + e ? mirror[j + e][i] : 0;
      v[e] = scalbnf(v[e], power);
    }
    uint2 hi, lo;
    hi.x = pack(v[0], v[1]), hi.y = pack(v[2], v[3]);
    const float2 one = unpack(hi.x), two = unpack(hi.y);
    lo.x = pack(v[0] - one.x, v[1] - one.y), lo.y = pack(v[2] - two.x, v[3] - two.y);
    for (int c = 0; c < copies; c++)
      out[((below ? (long)c * rows + row : (long)row * copies + c) * columns + column) / 4] = order >> c & 1 ? hi : lo;
  }
}
