// For many vectors: columns normalized, and the inverses of blocks along the diagonal of S. The rest is products.
//
// Macros, apart from those of solve.cuh:
//   RECIPROCAL      the exponent of the power of two that bounds reciprocal norms
//   COLUMN_THREADS  threads of a block that takes nothing but columns
//   COLUMN_WIDTH    columns of such a block
// The header structures.cuh is generated from `Blocks` in blocked.py, which describes its fields.
#include "structures.cuh"
#include "solve.cuh"

// u = v with unit columns, for `batch` matrices n x l, a copy of it in float64 unless that is null, and what each was
// divided by.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    normalize(const float* v, float* u, double* wide, float* reciprocal, int batch, int n, int l) {
  Grid grid(nullptr, 0);
  const long nl = (long)n * l;
  over_columns<COLUMN_WIDTH, COLUMN_THREADS>(
      grid, batch, n, l, 1, nullptr,
      [=](int b, int i, int j) {
        const double x = v[b * nl + (long)i * l + j];
        return x * x;
      },
      [=](int b, int j, double square) {
        const double r = square == 0 ? 0 : 1 / sqrt(square);
        reciprocal[(long)b * l + j] = (float)min(r, ldexp(1., RECIPROCAL));
        return r;
      },
      [=](int b, int i, int j, double r) {
        const long at = b * nl + (long)i * l + j;
        u[at] = (float)(v[at] * r);
        if (wide) wide[at] = u[at];
      });
}

// dv = (du - u diag(u^T du)) / |v|, in place; du came divided by the power of two that the norm, if any, is just below.
extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    project(const float* u, const float* reciprocal, float* dv, const double* norm, int batch, int n, int l) {
  const int power = norm && *norm > 0 && *norm < 1e300 ? ilogb(*norm) + 1 : 0;
  Grid grid(nullptr, 0);
  const long nl = (long)n * l;
  over_columns<COLUMN_WIDTH, COLUMN_THREADS>(
      grid, batch, n, l, 1, nullptr,
      [=](int b, int i, int j) {
        const long at = b * nl + (long)i * l + j;
        return (double)u[at] * dv[at];
      },
      [=](int b, int j, double along) { return along; },
      [=](int b, int i, int j, double along) {
        const long at = b * nl + (long)i * l + j;
        dv[at] = scalbnf((float)(dv[at] - u[at] * along), power) * reciprocal[(long)b * l + j];
      });
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) invert_blocks(const Blocks of) {
  Grid grid(of.flags, of.ticket);
  const int l = of.l, width = of.width, blocks = (l + width - 1) / width;
  const long ll = (long)l * l, area = (long)width * width;
  over_entries(grid, of.batch * blocks, width, width, [=](int b, int i, int j) {
    const int at = b % blocks * width;
    if (i > j) return;
    of.work[b * area + place(width, i, j)] =
        entry(i, j, at + j < l ? of.gram[b / blocks * ll + (long)(at + i) * l + at + j] : 0);
  });
  over_entries(grid, of.batch, l, l, [=](int b, int i, int j) {
    if (i > j) of.t[b * ll + (long)i * l + j] = 0;
  });
  grid.meet();
  solve(
      grid, of.batch * blocks, width, width / SIDE, of.work, [=](int p) { return p; },
      [=](int b, int p, int j) {
        const int at = b % blocks * width, column = p * SIDE + j;
        return Column{nullptr, column, of.t + b / blocks * ll + (long)at * l + at + column, l,
                      at + column < l ? column + 1 : 0};
      });
  grid.meet();  // or a replay would find the first meeting over before it began
}
