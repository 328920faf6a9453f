// U^T U in float64, on tensor cores.
//
// Macros, apart from those of grid.cuh:
//   AHEAD  loads that are under way at once
// Template parameters:
//   Put  the function that gets each entry
#pragma once
#include "grid.cuh"

// c += a b for 8 x 8 matrices cut in two along k: a lane has c(r, 2q), c(r, 2q + 1), a(r, k) and b(k, r), with r = lane
// / 4, q = lane % 4, and k any number that is its own in the quad.
__device__ __forceinline__ void multiply(double2& c, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c.x), "+d"(c.y)
               : "d"(a), "d"(b));
}
// The same for two of a with one b: one instruction from capability 9 on.
__device__ __forceinline__ void multiply(double2& c, double2& d, double a, double e, double b) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(c.x), "+d"(c.y), "+d"(d.x), "+d"(d.y)
               : "d"(a), "d"(e), "d"(b));
#else
  multiply(c, a, b), multiply(d, e, b);
#endif
}

// put(b, i, j, sum over rows k of u(b, k, i) u(b, k, j)) for the tiles of `batch` matrices that are not below the
// diagonal; b counts the `splits` of the rows of each. A warp has 32 x 16 of a tile, and a part of the rows.
template <class Put>
__device__ void gram(Grid& grid, int batch, int splits, int n, int l, const float* u, Put put) {
  const int across = (l + TILE - 1) / TILE, tiles = across * (across + 1) / 2, each = (n + splits - 1) / splits;
  constexpr int ACROSS = TILE / 16, PLACES = TILE / 32 * ACROSS, SHARES = THREADS / 32 / PLACES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, q = lane % 4;
  const int part = warp / PLACES, row = warp % PLACES / ACROSS * 32, column = warp % ACROSS * 16;
  double* const parts = reinterpret_cast<double*>(memory);
  for (; grid.turn < batch * splits * tiles; grid.turn += grid.size) {
    const int b = grid.turn / tiles, from = b % splits * each, to = min(from + each, n);
    int i0 = grid.turn % tiles, j0 = 0;
    while (i0 > j0) i0 -= ++j0;
    i0 *= TILE, j0 *= TILE;
    const float* const of = u + (long)(b / splits) * n * l;
    double2 c[4][2] = {};
    float x[AHEAD][4], y[AHEAD][2];
    auto load = [&](int d, int k) {
      auto entry = [=](int i) { return k < to && i < l ? of[(long)k * l + i] : 0.f; };
      #pragma unroll
      for (int e = 0; e < 4; e++) x[d][e] = entry(i0 + row + 8 * e + r);
      #pragma unroll
      for (int e = 0; e < 2; e++) y[d][e] = entry(j0 + column + 8 * e + r);
    };
    const int begin = from + 4 * part;
    #pragma unroll
    for (int d = 0; d < AHEAD; d++) load(d, begin + 4 * SHARES * d + q);
    for (int k = begin; k < to; k += 4 * SHARES * AHEAD) {
      #pragma unroll
      for (int d = 0; d < AHEAD; d++) {
        #pragma unroll
        for (int e = 0; e < 4; e += 2)
          #pragma unroll
          for (int f = 0; f < 2; f++) multiply(c[e][f], c[e + 1][f], x[d][e], x[d][e + 1], y[d][f]);
        load(d, k + 4 * SHARES * (d + AHEAD) + q);
      }
    }
    __syncthreads();
    #pragma unroll
    for (int e = 0; e < 4; e++)
      #pragma unroll
      for (int f = 0; f < 2; f++)
        reinterpret_cast<double2*>(parts + (part * TILE + row + 8 * e + r) * TILE + column + 8 * f)[q] = c[e][f];
    __syncthreads();
    for (int at = threadIdx.x; at < TILE * TILE; at += THREADS) {
      double sum = 0;
      #pragma unroll
      for (int p = 0; p < SHARES; p++) sum += parts[p * TILE * TILE + at];
      put(b, i0 + at / TILE, j0 + at % TILE, sum);
    }
  }
  grid.turn -= batch * splits * tiles;
}
