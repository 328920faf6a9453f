// h_t = f(Q h_{t-1} + x_t + b) with Q held on chip by a cluster of C blocks, which runs S sequences over all steps.
//
// A block owns ROWS rows of Q, in registers and shared memory, and all states of its sequences, in shared memory. A step
// multiplies, sums over lanes, finishes each unit in one lane, and hands the new states to every block of the cluster.
// MODE FORWARD goes up in time; ADJOINT and RECOVER, with Q^T, go down and end with one product more.
#include "common.cuh"

constexpr int ROWS = R * THREADS / G, COLUMNS = J * G * W, PASSES = S / SG, OWN = left_after(SG * R, G / 2);
constexpr int QUADS = ROWS / 4;

extern "C" __global__ void __launch_bounds__(THREADS, 1) rollout(const float* __restrict__ matrix, const Tensors of) {
  extern __shared__ __align__(16) float memory[];
  float* const vectors = memory;                               // 2 x S x COLUMNS
  float* const stage = vectors + 2 * S * COLUMNS;              // S x ROWS, before they are sent
  float* const ring = stage + (C > 1 ? S * ROWS : 0);
  float* const rest = ring + Units<PASSES * OWN>::shared;
  __shared__ unsigned long long barriers[2];

  const unsigned rank = C > 1 ? cluster_rank() : 0;
  const int sequence = blockIdx.x / C * S, group = threadIdx.x / G, lane = threadIdx.x % G;
  Held<R, J, JR, W, G> q;
  q.load(matrix + (long)rank * ROWS * of.n, of.n, 1, of.n - (int)rank * ROWS, of.n, rest);

  Units<PASSES * OWN> units(of, sequence, ring);
  int first = 0, count = SG * R, slot[PASSES * OWN];
  folded<SG * R, G / 2>(lane, first, count);
  #pragma unroll
  for (int u = 0; u < PASSES * OWN; u++) {
    const int i = u % OWN, s = u / OWN * SG + (first + i) / R, local = group * R + (first + i) % R;
    units.set(u, i < count, sequence + s, rank * ROWS + local);
    slot[u] = i < count ? (C > 1 ? s * ROWS : s * COLUMNS) + local : -1;
  }
  units.begin();

  for (int i = threadIdx.x; i < 2 * S * COLUMNS; i += THREADS) {
    const int s = i / COLUMNS, m = i % COLUMNS;
    const bool live = MODE == FORWARD && s < S && m < of.n && sequence + s < of.batch;
    vectors[i] = live ? of.start[(long)(sequence + s) * of.n + m] : 0.f;
  }
  const unsigned barrier[2] = {shared_address(&barriers[0]), shared_address(&barriers[1])};
  if (C > 1) barriers_init(barrier[0], barrier[1]);
  else __syncthreads();

  const int total = units.longest + (MODE != FORWARD);
  float* now = vectors;
  float* next = vectors + S * COLUMNS;
  for (int it = 0; it < total; it++) {
    const bool more = it + 1 < total;
    if (C > 1) {
      if (threadIdx.x == 0 && more) barrier_expect(barrier[~it & 1], C * ROWS * S * 4);
      if (it > 0) barrier_wait(barrier[it & 1], (it - 1) >> 1 & 1);
    }
    #pragma unroll
    for (int p = 0; p < PASSES; p++) {
      float sums[SG * R];
      q.template multiply<SG>(now + p * SG * COLUMNS, COLUMNS, sums);
      if (p == 0) units.turn(it);
      fold<SG * R, G / 2>(sums, lane);
      #pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int u = p * OWN + i;
        if (MODE != FORWARD && !more) {
          units.close(u, sums[i]);
          continue;
        }
        const float value = units.finish(u, it, sums[i]);
        if (slot[u] >= 0) (C > 1 ? stage : next)[slot[u]] = value;
      }
    }
    __syncthreads();
    if (C > 1 && more) {
      const unsigned to = shared_address(next + rank * ROWS);
      #pragma unroll
      for (int e = threadIdx.x; e < C * S * QUADS; e += THREADS) {
        const int r = e / (S * QUADS), s = e % (S * QUADS) / QUADS, j = e % QUADS;
        send(remote(to + (s * COLUMNS + 4 * j) * 4, r), reinterpret_cast<float4*>(stage)[s * QUADS + j], remote(barrier[~it & 1], r));
      }
    }
    float* const swap = now;
    now = next, next = swap;
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < PASSES * OWN; u++) units.close(u, 0.f);
  }
  arrived<0>();
  if (C > 1) cluster_sync();
}
