// h_t = f(Q h_{t-1} + x_t + b) with Q in the registers of one block, which runs S sequences over all steps.
//
// A step multiplies the states, in shared memory, sums over lanes, finishes each unit in one lane, and writes the new states.
// MODE FORWARD goes up in time; ADJOINT and RECOVER, with Q^T, go down and end with one product more.
#include "common.cuh"

constexpr int COLUMNS = J * G * W, OWN = left_after(S * R, G / 2);

extern "C" __global__ void __launch_bounds__(THREADS, 1) rollout(const float* __restrict__ matrix, const Tensors of) {
  extern __shared__ __align__(16) float memory[];
  float* const vectors = memory;  // 2 x S x COLUMNS
  float* const ring = vectors + 2 * S * COLUMNS;
  float* const rest = ring + Units<OWN>::shared;

  const int sequence = blockIdx.x * S, group = threadIdx.x / G, lane = threadIdx.x % G;
  Held<R, J, JR, W, G> q;
  q.load(matrix, of.n, 1, of.n, of.n, rest);

  Units<OWN> units(of, sequence, ring);
  int first = 0, count = S * R, slot[OWN];
  folded<S * R, G / 2>(lane, first, count);
  #pragma unroll
  for (int u = 0; u < OWN; u++) {
    const int s = (first + u) / R, row = group * R + (first + u) % R;
    units.set(u, u < count, sequence + s, row);
    slot[u] = u < count ? s * COLUMNS + row : -1;
  }
  units.begin();

  for (int i = threadIdx.x; i < 2 * S * COLUMNS; i += THREADS) {
    const int s = i / COLUMNS, m = i % COLUMNS;
    const bool live = MODE == FORWARD && s < S && m < of.n && sequence + s < of.batch;
    vectors[i] = live ? of.start[(long)(sequence + s) * of.n + m] : 0.f;
  }
  __syncthreads();

  const int total = units.longest + (MODE != FORWARD);
  float* now = vectors;
  float* next = vectors + S * COLUMNS;
  for (int it = 0; it < total; it++) {
    float sums[S * R];
    q.template multiply<S>(now, COLUMNS, sums);
    units.turn(it);
    fold<S * R, G / 2>(sums, lane);
    #pragma unroll
    for (int u = 0; u < OWN; u++) {
      if (MODE != FORWARD && it + 1 == total) {
        units.close(u, sums[u]);
        continue;
      }
      const float value = units.finish(u, it, sums[u]);
      if (slot[u] >= 0) next[slot[u]] = value;
    }
    __syncthreads();
    float* const swap = now;
    now = next, next = swap;
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < OWN; u++) units.close(u, 0.f);
  }
  arrived<0>();
}
