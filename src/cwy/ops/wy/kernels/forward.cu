// From vectors to factors, and to Q = I - U T U^T or its first columns, in one launch. README.md has the derivation.
//
// Macros, apart from those of solve.cuh:
//   RECIPROCAL  the exponent of the power of two that bounds reciprocal norms
// The header structures.cuh is generated from `Forward` in fused.py, which describes its fields.
#include "structures.cuh"
#include "solve.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) forward(const Forward of) {
  Grid grid(of.flags, of.ticket, of.groups);
  const int n = of.n, l = of.l, splits = of.splits, chunks = of.chunks, rows = of.truncated ? l : n;
  const int first = share(grid.group, of.groups, of.batch), batch = share(grid.group + 1, of.groups, of.batch) - first;
  const long nl = (long)n * l, ll = (long)l * l, area = (long)padded(l) * padded(l);
  const float* const v = of.v + first * nl;
  float *const u = of.u + first * nl, *const reciprocal = of.reciprocal + (long)first * l;
  float *const t = of.t ? of.t + first * ll : nullptr, *const y = of.y ? of.y + (long)first * rows * l : nullptr;
  double *const s = of.s + first * area, *const parts = of.parts + (long)first * of.part_size;

  // In float64 squares neither vanish nor overflow.
  over_columns(
      grid, batch, n, l, chunks, parts,
      [=](int b, int i, int j) {
        const double x = v[b * nl + (long)i * l + j];
        return x * x;
      },
      [=](int b, int j, double square) {
        const double r = square == 0 ? 0 : 1 / sqrt(square);
        reciprocal[(long)b * l + j] = (float)min(r, ldexp(1., RECIPROCAL));
        return r;
      },
      [=](int b, int i, int j, double r) { u[b * nl + (long)i * l + j] = (float)(v[b * nl + (long)i * l + j] * r); });

  grid.meet();
  gram(grid, batch, splits, n, l, u, [=](int b, int i, int j, double x) {
    if (max(i, j) >= padded(l)) return;
    if (splits == 1)
      s[b * area + place(l, i, j)] = entry(i, j, x);
    else
      parts[b * area + place(l, i, j)] = x;
  });
  for (int row = grid.index * WARPS + threadIdx.x / 32; t && row < batch * l; row += grid.size * WARPS)
    for (int j = threadIdx.x % 32; j < row % l; j += 32) t[(long)row * l + j] = 0;
  if (splits > 1) {
    grid.meet();
    over_entries(grid, batch, padded(l), padded(l), [=](int b, int i, int j) {
      if (i > j) return;
      double x = 0;
      for (int p = 0; p < splits; p++) x += parts[((long)b * splits + p) * area + place(l, i, j)];
      s[b * area + place(l, i, j)] = entry(i, j, x);
    });
  }

  grid.meet();
  const int across = t ? padded(l) / SIDE : 0, down = y ? (rows + SIDE - 1) / SIDE : 0;  // panels of T and of Y^T
  solve(
      grid, batch, l, across + down, s, [=](int p) { return p < across ? p : padded(l) / SIDE - 1; },
      [=](int b, int p, int j) {
        const int column = p * SIDE + j, row = column - across * SIDE;
        if (p < across) return Column{nullptr, column, t + b * ll + column, l, column < l ? column + 1 : 0};
        const long at = ((long)b * rows + row) * l;
        return row < rows ? Column{u + b * nl + (long)row * l, 0, y + at, 1, l} : Column{nullptr, -1, nullptr, 0, 0};
      });

  if (!of.out) return;
  float* const out = of.out + (long)first * n * rows;
  const float* const signs = of.signs ? of.signs + (long)first * rows : nullptr;
  grid.meet();
  product<true, true>(
      grid, batch, n, rows, [=](int, int, int) { return make_int2(0, l); },
      [=](int b) {
        const View<const float> of(u + b * nl);
        return [=](int i, int k) { return of[i * l + k]; };
      },
      [=](int b) {
        const View<const float> of(y + (long)b * rows * l);
        return [=](int k, int j) { return of[j * l + k]; };
      },
      [=](int b) {
        const View<float> to(out + (long)b * n * rows);
        return
            [=](int i, int j, float x) { to[i * rows + j] = ((i == j) - x) * (signs ? signs[(long)b * rows + j] : 1); };
      });
}
