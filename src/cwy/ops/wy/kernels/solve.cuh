// Upper-triangular systems S X = B in float64. A team of warps solves eight columns of B at once and waits for no
// other.
//
// Macros, apart from those of gram.cuh:
//   SIDE        rows and columns of a tile of S, and columns of a panel
//   WARP_TILES  the most tiles of a panel that a warp holds
// Template parameters:
//   Last     the function that returns the last tile of a panel that is not zero
//   Columns  the function that returns a column of B
#pragma once
#include "gram.cuh"

constexpr int WARPS = THREADS / 32;

// S is kept by tiles of 8 x 8, with the reciprocals of its diagonal in place of the diagonal.
__device__ __forceinline__ int padded(int l) {
  return (l + SIDE - 1) / SIDE * SIDE;
}
__device__ __forceinline__ int place(int l, int i, int j) {
  return (i / SIDE * (padded(l) / SIDE) + j / SIDE) * SIDE * SIDE + i % SIDE * SIDE + j % SIDE;
}
__device__ __forceinline__ double entry(int i, int j, double gram) {
  return i != j ? gram : gram == 0 ? 2 : 2 / gram;
}

// Waits for the other warps of a team.
__device__ __forceinline__ void meet(int team, int width) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(32 * width) : "memory");
}

// A column of B, and where the first `size` entries of its solution go.
struct Column {
  const float* right;  // null for a unit vector
  int unit;            // which
  float* to;
  int stride, size;
};

// Solves for `panels` of eight columns, column(b, p, j), for each of `batch` matrices S, l x l. `last(p)` is the last
// tile of a panel that is not zero; solutions below it are zero, and not written.
//
// From the last tile X_r of X upwards: the warp that has it multiplies what is left of B_r by the inverse of S_rr, and
// all warps of the team subtract S_ir X_r from their B_i. They have them transposed, which makes a result of the tensor
// cores their next argument.
template <class Last, class Columns>
__device__ void solve(Grid& grid, int batch, int l, int panels, const double* s, Last last, Columns columns) {
  const int tiles = padded(l) / SIDE, lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = lane / 4, k = lane % 4 * 2;
  int width = 1;
  while (width * WARP_TILES < tiles) width *= 2;
  const int teams = WARPS / width, team = warp / width, own = warp % width;
  double2* const found = reinterpret_cast<double2*>(memory) + team * 64;  // -X_r for two r in turn
  double* const inverses = reinterpret_cast<double*>(memory) + WARPS * 128 + warp * WARP_TILES * SIDE * SIDE;
  int have = -1;
  for (int turn = grid.index + grid.size * team; turn < batch * panels; turn += grid.size * teams) {
    const int b = turn / panels, p = turn % panels, from = last(p);
    const Column column = columns(b, p, j);
    const double* const of = s + (long)b * tiles * tiles * SIDE * SIDE;
    auto tile = [=](int i, int r) { return reinterpret_cast<const double2*>(of)[(i * tiles + r) * 32 + lane]; };
    auto right = [=](int i) { return column.right ? i < l ? column.right[i] : 0.f : i == column.unit ? 1.f : 0.f; };
    double2 c[WARP_TILES], next[WARP_TILES];  // what is left of B, and S_ir of the next r
    #pragma unroll
    for (int m = 0; m < WARP_TILES; m++) {
      const int i = m * width + own;
      if (i < from) next[m] = tile(i, from);
      c[m] = i <= from ? make_double2(right(SIDE * i + k), right(SIDE * i + k + 1)) : make_double2(0, 0);
    }
    if (b != have) {
      __syncwarp();
      for (int m = lane / SIDE; m < WARP_TILES; m += 32 / SIDE) {
        const int i = m * width + own, column = lane % SIDE;
        if (i >= tiles) continue;
        const double* const diagonal = of + (i * tiles + i) * SIDE * SIDE;
        double x[SIDE];
        #pragma unroll
        for (int row = SIDE - 1; row >= 0; row--) {
          x[row] = row == column;
          #pragma unroll
          for (int e = row + 1; e < SIDE; e++) x[row] -= diagonal[row * SIDE + e] * x[e];
          x[row] *= diagonal[row * SIDE + row];
          inverses[(m * SIDE + row) * SIDE + column] = x[row];
        }
      }
      __syncwarp();
      have = b;
    }
    #pragma unroll
    for (int m = WARP_TILES - 1; m >= 0; m--) {
      for (int turn = width - 1; turn >= 0; turn--) {
        const int r = m * width + turn;
        if (r > from) continue;
        double2* const slot =
            found + (r & 1) * 32 + lane;  // nobody needs X_0, so that the next panel may write there at once
        double2 x = make_double2(0, 0);
        if (own == turn) {
          const double2 inverse = reinterpret_cast<const double2*>(inverses)[m * 32 + lane];
          multiply(x, c[m].x, inverse.x);
          multiply(x, c[m].y, inverse.y);
          *slot = x = make_double2(-x.x, -x.y);
        }
        meet(team, width);
        if (own != turn && r > 0) x = *slot;
        #pragma unroll
        for (int e = m; e >= 0; e--)
          if (e * width + own < r) multiply(c[e], x.x, next[e].x);
        #pragma unroll
        for (int e = m; e >= 0; e--)
          if (e * width + own < r) multiply(c[e], x.y, next[e].y);
        #pragma unroll
        for (int e = m; e >= 0; e--)
          if (e * width + own < r - 1) next[e] = tile(e * width + own, r - 1);
        if (own == turn) {
          const int i = SIDE * r + k;
          if (i < column.size) column.to[(long)i * column.stride] = -x.x;
          if (i + 1 < column.size) column.to[(long)(i + 1) * column.stride] = -x.y;
        }
      }
    }
  }
}
