// The gradient of the vectors in one launch, with the letters of README.md. Z is the gradient of the result.
//
// Macros, apart from those of grid.cuh:
//   KIND       what the gradient is of, one of the next five
//   NARROW     a matrix, L < N
//   WIDE       a matrix, L >= N
//   TRUNCATED  the first columns of a matrix
//   ENDING     a matrix, L < N, from given W, A and B
//   FACTORS    U and T
// The header structures.cuh is generated from `Backward` in fused.py, which describes its fields.
#include "structures.cuh"
#include "grid.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) backward(const Backward of) {
  Grid grid(of.flags, of.ticket, of.groups);
  const int n = of.n, l = of.l, splits = of.splits, chunks = of.chunks;
  const int first = share(grid.group, of.groups, of.batch), batch = share(grid.group + 1, of.groups, of.batch) - first;
  const long nl = (long)n * l, ll = (long)l * l, nn = (long)n * n;
  const float *const u = of.u + first * nl, *const t = of.factor + first * ll,
                     *const reciprocal = of.reciprocal + (long)first * l;
  const float* const z = of.z + first * (KIND == TRUNCATED ? nl : nn);
  float* const dv = of.dv + first * nl;
  double* const columns = of.parts + (long)first * of.part_size;
  float* const parts = reinterpret_cast<float*>(columns);

  auto all = [=](int size) { return [=](int, int, int) { return make_int2(0, size); }; };
  auto matrix = [=](const float* x, int rows, int columns) {
    return [=](int b) {
      const View<const float> of(x + (long)b * rows * columns);
      return [=](int i, int j) { return of[i * columns + j]; };
    };
  };
  auto transposed = [=](const float* x, int rows, int columns) {
    return [=](int b) {
      const View<const float> of(x + (long)b * rows * columns);
      return [=](int i, int j) { return of[j * columns + i]; };
    };
  };
  auto into = [=](float* x, int rows, int columns) {
    return [=](int b) {
      const View<float> to(x + (long)b * rows * columns);
      return [=](int i, int j, float value) { to[i * columns + j] = value; };
    };
  };
  // l x l. If `upper`, D + D^T from only what is above the diagonal of D
  auto into_square = [=](float* x, bool upper) {
    return [=](int b) {
      const View<float> to(x + b * ll);
      return [=](int i, int j, float value) {
        if (!upper || i < j) to[i * l + j] = value;
        if (upper && i < j) to[j * l + i] = value;
      };
    };
  };
  const int across = KIND == TRUNCATED ? l : n;
  const float* const signs = of.signs ? of.signs + (long)first * across : nullptr;
  auto sign = [=](int b, int j) { return signs ? signs[(long)b * across + j] : 1.f; };
  auto into_signed = [=](float* x, int rows, int columns) {
    return [=](int b) {
      const View<float> to(x + (long)b * rows * columns);
      return [=](int i, int j, float value) { to[i * columns + j] = value * sign(b, i); };
    };
  };
  auto both = [=](const float* x) {
    return [=](int b) {
      const View<const float> of(x + b * ll);
      return [=](int k, int j) { return k == j ? 0.f : of[k * l + j]; };
    };
  };

  // x = left^T right, both n x l, summed over all rows, as into_square puts it.
  auto over_rows = [&](const float* left, const float* right, float* x, bool upper) {
    product<false, false>(
        grid, batch * splits, l, l,
        [=](int b, int i, int j) { return !upper || i < j + TILE ? split(b, splits, n) : make_int2(0, 0); },
        transposed(left, n, l), matrix(right, n, l), into_square(splits > 1 ? parts : x, upper && splits == 1), splits);
  };
  auto add_up = [&](float* x, bool upper) {
    if (splits == 1) return;
    grid.meet();
    over_entries(grid, batch, l, l, [=](int b, int i, int j) {
      float sum = 0;
      for (int p = 0; p < splits; p++) sum += parts[((long)b * splits + p) * ll + (long)i * l + j];
      into_square(x, upper)(b)(i, j, sum);
    });
  };

  if constexpr (KIND == NARROW || KIND == ENDING) {
    float* const d = of.d + first * ll;
    float *const w = of.w + first * nl, *const a = of.a + first * nl, *const z_w = of.b + first * nl;
    if constexpr (KIND == NARROW) {
      float* const y = of.y + first * nl;
      product<true, true>(
          grid, batch, n, l, [=](int, int, int j) { return make_int2(j, l); }, matrix(u, n, l), transposed(t, l, l),
          into_signed(y, n, l));
      product<true, false>(
          grid, batch, n, l, [=](int, int, int j) { return make_int2(0, min(j + TILE, l)); }, matrix(u, n, l),
          matrix(t, l, l), into(w, n, l));
      grid.meet();
      product<true, false>(grid, batch, n, l, all(n), matrix(z, n, n), matrix(y, n, l), into(a, n, l));
      product<false, false>(grid, batch, n, l, all(n), transposed(z, n, n), matrix(w, n, l), into_signed(z_w, n, l));
      grid.meet();
    }
    over_rows(w, a, d, true);
    add_up(d, true);
    grid.meet();
    product<true, false>(grid, batch, n, l, all(l), matrix(u, n, l), both(d), [=](int b) {
      return [=](int i, int j, float x) {
        const long at = b * nl + i * l + j;
        dv[at] = x - a[at] - z_w[at];
      };
    });
  } else if constexpr (KIND == WIDE) {
    const float* const y = of.factor + first * nl;
    float *const k = of.k + first * ll, *const x = of.x + first * nl, *const omega = of.omega + first * nn;
    product<false, false>(grid, batch, n, n, all(n), transposed(of.q + first * nn, n, n), matrix(z, n, n), [=](int b) {
      const View<float> to(omega + b * nn);
      return [=](int i, int j, float value) { to[i * n + j] = value * sign(b, i) * sign(b, j); };
    });
    grid.meet();
    product<true, false>(
        grid, batch, n, l, all(n),
        [=](int b) {
          const View<const float> of(omega + b * nn);
          return [=](int i, int j) { return (of[i * n + j] - of[j * n + i]) / 2; };
        },
        matrix(y, n, l), into(x, n, l));
    grid.meet();
    product<false, false>(
        grid, batch, l, l, [=](int, int i, int j) { return make_int2(0, j < i + TILE ? n : 0); }, transposed(y, n, l),
        matrix(x, n, l), into(k, l, l));
    grid.meet();
    product<true, false>(
        grid, batch, n, l, [=](int, int, int j) { return make_int2(j, l); }, matrix(u, n, l),
        [=](int b) {
          const View<const float> of(k + b * ll);
          return [=](int i, int j) { return i > j ? 2 * of[i * l + j] : 0.f; };
        },
        [=](int b) {
          return [=](int i, int j, float value) {
            const long at = b * nl + i * l + j;
            dv[at] = value - 2 * x[at];
          };
        });
  } else if constexpr (KIND == FACTORS) {
    const float *const du = of.a ? of.a + first * nl : nullptr, *const dt = of.b + first * ll;
    float *const e = of.e + first * ll, *const d = of.d + first * ll;
    product<false, false>(
        grid, batch, l, l, [=](int, int i, int) { return make_int2(0, min(i + TILE, l)); }, transposed(t, l, l),
        matrix(dt, l, l), into(e, l, l));
    grid.meet();
    product<true, true>(
        grid, batch, l, l, [=](int, int i, int j) { return make_int2(j, i < j + TILE ? l : 0); }, matrix(e, l, l),
        transposed(t, l, l), into_square(d, true));
    grid.meet();
    product<true, false>(grid, batch, n, l, all(l), matrix(u, n, l), both(d), [=](int b) {
      return [=](int i, int j, float x) {
        const long at = b * nl + i * l + j;
        dv[at] = du ? du[at] - x : -x;
      };
    });
  } else {
    float *const c = of.c + first * ll, *const y = of.y + first * ll, *const e = of.e + first * ll,
                 *const top = of.top + first * ll, *const d = of.d + first * ll;
    over_rows(u, z, c, false);
    product<true, true>(
        grid, batch, l, l, [=](int, int, int j) { return make_int2(j, l); }, matrix(u, n, l), transposed(t, l, l),
        into(y, l, l));
    add_up(c, false);
    grid.meet();
    product<false, false>(
        grid, batch, l, l, [=](int, int i, int) { return make_int2(0, min(i + TILE, l)); }, transposed(t, l, l),
        matrix(c, l, l),
        [=](int b) {
          const View<float> to(e + b * ll);
          return [=](int i, int j, float value) { to[i * l + j] = value * sign(b, j); };
        });
    product<false, false>(
        grid, batch, l, l, [=](int, int, int j) { return make_int2(0, min(j + TILE, l)); }, transposed(c, l, l),
        matrix(t, l, l), into_signed(top, l, l));
    grid.meet();
    product<true, false>(
        grid, batch, l, l, [=](int, int i, int j) { return make_int2(0, i < j + TILE ? l : 0); }, matrix(e, l, l),
        matrix(y, l, l), into_square(d, true));
    grid.meet();
    auto symmetric = both(d);
    // First U (D + D^T), then Z Y, from here on: Z may be of any size, so no scale is shared.
    const int second = (l + Sums::ALIKE - 1) / Sums::ALIKE * Sums::ALIKE;
    product<true, false>(
        grid, batch, n, l, all(second + l),
        [=](int b) {
          const float *const one = u + b * nl, *const two = z + b * nl - second;
          return [=](int i, int k) { return k < l ? one[i * l + k] : k < second ? 0.f : two[i * l + k]; };
        },
        [=](int b) {
          const auto one = symmetric(b);
          const float* const two = y + b * ll;
          return [=](int k, int j) {
            return k < l ? one(k, j) : k < second ? 0.f : -sign(b, k - second) * two[(k - second) * l + j];
          };
        },
        [=](int b) {
          return [=](int i, int j, float x) { dv[b * nl + i * l + j] = i < l ? x - top[b * ll + i * l + j] : x; };
        });
  }

  grid.meet();
  over_columns(
      grid, batch, n, l, chunks, columns,
      [=](int b, int i, int j) {
        const long at = b * nl + (long)i * l + j;
        return (double)u[at] * dv[at];
      },
      [=](int b, int j, double along) { return along; },
      [=](int b, int i, int j, double along) {
        const long at = b * nl + (long)i * l + j;
        dv[at] = (float)(dv[at] - u[at] * along) * reciprocal[(long)b * l + j];
      });
}
