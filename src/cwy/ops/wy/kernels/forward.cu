// From vectors to factors, and to Q = I - U T U^T or its first columns, in one launch. README.md has the derivation.
#include "inverse.cuh"

struct Forward {
  const float* v;                 // batch x n x l
  float *u, *reciprocal, *t, *w;  // w = U T, or T U_1^T if truncated; null if not wanted
  float* out;                     // null if not wanted
  double* work;                   // 2 batch x l x l, and the parts of sums, of each matrix its own
  Token* flags;
  Token token;
  int batch, n, l, truncated, chunks, splits, groups;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) forward(const Forward of) {
  Grid grid(of.flags, of.token, of.groups);
  const int n = of.n, l = of.l, splits = of.splits, chunks = of.chunks;
  const int first = share(grid.group, of.groups, of.batch), batch = share(grid.group + 1, of.groups, of.batch) - first;
  const long nl = (long)n * l, ll = (long)l * l, nn = (long)n * n;
  const float* const v = of.v + first * nl;
  float *const u = of.u + first * nl, *const reciprocal = of.reciprocal + (long)first * l, *const small = of.t + first * ll;
  float* const w = of.w ? of.w + first * (of.truncated ? ll : nl) : nullptr;
  float* const out = of.out ? of.out + first * (of.truncated ? nl : nn) : nullptr;
  double *const s = of.work + first * ll, *const t = s + of.batch * ll;
  double* const parts = of.work + 2 * of.batch * ll + first * max((long)chunks * l, splits > 1 ? splits * ll : 0);

  // In float64 squares neither vanish nor overflow.
  over_columns(
      grid, batch, n, l, chunks, parts, [=](int b, int i, int j) { const double x = v[b * nl + (long)i * l + j]; return x * x; },
      [=](int b, int j, double square) {
        const double r = square == 0 ? 0 : 1 / sqrt(square);
        reciprocal[(long)b * l + j] = (float)min(r, 3.4028234e38);
        return r;
      },
      [=](int b, int i, int j, double r) { u[b * nl + (long)i * l + j] = (float)(v[b * nl + (long)i * l + j] * r); });

  grid.meet();
  auto entry = [=](int i, int j, double x) { return i != j ? x : x == 0 ? .5 : x / 2; };
  product<double, false, false>(
      grid, batch * splits, l, l, [=](int b, int i, int j) { return i < j + TILE ? split(b, splits, n) : make_int2(0, 0); },
      [=](int b, int i, int k) { return u[b / splits * nl + (long)k * l + i]; },
      [=](int b, int k, int j) { return u[b / splits * nl + (long)k * l + j]; },
      [=](int b, int i, int j, double x) {
        if (splits == 1) s[b * ll + (long)i * l + j] = entry(i, j, x);
        else parts[b * ll + (long)i * l + j] = x;
      });
  if (splits > 1) {
    grid.meet();
    over_entries(grid, batch, l, l, [=](int b, int i, int j) {
      if (i > j) return;
      double x = 0;
      for (int p = 0; p < splits; p++) x += parts[((long)b * splits + p) * ll + (long)i * l + j];
      s[b * ll + (long)i * l + j] = entry(i, j, x);
    });
  }

  grid.meet();
  invert(grid, batch, l, t, [=](int b, int i, int j) { return s[b * ll + (long)i * l + j]; });

  grid.meet();
  auto inverse = [=](int b, int i, int j) { return i <= j ? (float)t[b * ll + (long)i * l + j] : 0.f; };
  if (w && of.truncated)
    product<float, true, true>(
        grid, batch, l, l, [=](int b, int i, int j) { return make_int2(i, l); }, inverse,
        [=](int b, int k, int j) { return u[b * nl + (long)j * l + k]; },
        [=](int b, int i, int j, float x) { w[b * ll + (long)i * l + j] = x; });
  else if (w)
    product<float, true, false>(
        grid, batch, n, l, [=](int b, int i, int j) { return make_int2(0, min(j + TILE, l)); },
        [=](int b, int i, int k) { return u[b * nl + (long)i * l + k]; }, inverse,
        [=](int b, int i, int j, float x) { w[b * nl + (long)i * l + j] = x; });
  over_entries(grid, batch, l, l, [=](int b, int i, int j) { small[b * ll + (long)i * l + j] = inverse(b, i, j); });

  if (out) grid.meet();
  if (out && of.truncated)
    product<float, true, false>(
        grid, batch, n, l, [=](int b, int i, int j) { return make_int2(0, l); },
        [=](int b, int i, int k) { return u[b * nl + (long)i * l + k]; },
        [=](int b, int k, int j) { return w[b * ll + (long)k * l + j]; },
        [=](int b, int i, int j, float x) { out[b * nl + (long)i * l + j] = (i == j) - x; });
  else if (out)
    product<float, true, true>(
        grid, batch, n, n, [=](int b, int i, int j) { return make_int2(0, l); },
        [=](int b, int i, int k) { return w[b * nl + (long)i * l + k]; },
        [=](int b, int k, int j) { return u[b * nl + (long)j * l + k]; },
        [=](int b, int i, int j, float x) { out[b * nn + (long)i * n + j] = (i == j) - x; });
}
