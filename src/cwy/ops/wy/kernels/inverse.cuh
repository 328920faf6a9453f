// The inverse T of upper-triangular matrices S, in float64: blocks of 64 at once, then by halves, T12 = -T11 S12 T22.
#include "grid.cuh"

constexpr int BLOCK = 64, HALF = 32;

// Inverts a block of 64 in shared memory, in place. A lane has a column of a half of it in registers.
__device__ void invert_block(double (*s)[BLOCK + 1], double* reciprocals) {
  if (threadIdx.x < BLOCK) reciprocals[threadIdx.x] = 1 / s[threadIdx.x][threadIdx.x];
  __syncthreads();
  if (threadIdx.x < BLOCK) {
    const int at = threadIdx.x & HALF, j = threadIdx.x % HALF;
    double column[HALF];
    #pragma unroll
    for (int i = 0; i < HALF; i++) column[i] = i == j;
    #pragma unroll
    for (int k = HALF - 1; k >= 0; k--) {
      column[k] *= reciprocals[at + k];
      #pragma unroll
      for (int i = 0; i < k; i++) column[i] -= s[at + i][at + k] * column[k];
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < HALF; i++) s[at + i][at + j] = column[i];
  }
  __syncthreads();
  const int row = threadIdx.x / HALF, column = HALF + threadIdx.x % HALF;
  #pragma unroll
  for (int step = 0; step < 2; step++) {  // S12 T22, then -T11 times that
    double sums[4] = {};
    #pragma unroll 8
    for (int k = 0; k < HALF; k++)
      #pragma unroll
      for (int e = 0; e < 4; e++)
        sums[e] += step ? -s[row + 8 * e][k] * s[k][column] : s[row + 8 * e][HALF + k] * s[HALF + k][column];
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < 4; e++) s[row + 8 * e][column] = sums[e];
    __syncthreads();
  }
}

// T of `count` matrices S(b, i, j), of which only i <= j is asked; below its diagonal T has intermediate results.
template <class S> __device__ void invert(Grid& grid, int count, int l, double* t, S s) {
  const long ll = (long)l * l;
  const int blocks = (l + BLOCK - 1) / BLOCK;
  double (*const block)[BLOCK + 1] = reinterpret_cast<double (*)[BLOCK + 1]>(memory);
  for (; grid.turn < count * blocks; grid.turn += grid.size) {
    const int b = grid.turn / blocks, at = grid.turn % blocks * BLOCK;
    __syncthreads();
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += THREADS) {
      const int i = e / BLOCK, j = e % BLOCK;
      block[i][j] = at + j >= l || i > j ? i == j : s(b, at + i, at + j);
    }
    __syncthreads();
    invert_block(block, block[BLOCK]);
    for (int e = threadIdx.x; e < BLOCK * BLOCK; e += THREADS) {
      const int i = e / BLOCK, j = e % BLOCK;
      if (at + j < l && i <= j) t[b * ll + (long)(at + i) * l + at + j] = block[i][j];
    }
  }
  for (int h = BLOCK; h < l; h *= 2) {
    const int pairs = (l + h - 1) / (2 * h);
    auto first = [=](int p) { return p % pairs * 2 * h; };
    auto width = [=](int p) { return min(h, l - first(p) - h); };
    auto of = [=](int p) { return t + p / pairs * ll + (long)first(p) * (l + 1); };  // T11
    grid.meet();
    product<double, true, false>(
        grid, count * pairs, h, h, [=](int p, int i, int j) { return make_int2(0, min(j + TILE, width(p))); },
        [=](int p, int i, int k) { return s(p / pairs, first(p) + i, first(p) + h + k); },
        [=](int p, int k, int j) { return k <= j && j < width(p) ? of(p)[(long)(h + k) * l + h + j] : 0; },
        [=](int p, int i, int j, double x) { if (j < width(p)) of(p)[(long)(h + j) * l + i] = x; });
    grid.meet();
    product<double, true, true>(
        grid, count * pairs, h, h, [=](int p, int i, int j) { return make_int2(i, h); },
        [=](int p, int i, int k) { return i <= k ? of(p)[(long)i * l + k] : 0; },
        [=](int p, int k, int j) { return j < width(p) ? of(p)[(long)(h + j) * l + k] : 0; },
        [=](int p, int i, int j, double x) { if (j < width(p)) of(p)[(long)i * l + h + j] = -x; });
  }
}
