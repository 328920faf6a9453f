// h_t = f(Q h_{t-1} + x_t + b) with Q in the registers of one block, which runs SEQUENCES sequences over all steps.
//
// A step multiplies the states, in shared memory, sums over lanes, finishes each unit in one lane, and writes the new
// states. MODE FORWARD goes up in time; ADJOINT and RECOVER, with Q^T, go down and end with one product more.
//
//   SEQUENCES     sequences of a block
//   ROWS          rows of Q of a thread
//   LANES         threads that share rows
//   VECTORS       vectors of four columns of a row that a thread has
//   KEPT_VECTORS  those of them that are in registers
//   COLUMNS       columns of Q, padded
//   UNITS         units that a lane finishes
#include "common.cuh"

constexpr int COLUMNS = VECTORS * LANES * 4;
constexpr int UNITS = left_after(SEQUENCES * ROWS, LANES / 2);
static_assert(2 * SEQUENCES * COLUMNS + Units<UNITS>::shared + ROWS * (VECTORS - KEPT_VECTORS) * 4 * THREADS ==
                  SHARED_FLOATS,
              "shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, 1) rollout(const float* __restrict__ matrix, const Tensors of) {
  extern __shared__ __align__(16) float memory[];
  float* const vectors = memory;  // 2 x SEQUENCES x COLUMNS
  float* const ring = vectors + 2 * SEQUENCES * COLUMNS;
  float* const rest = ring + Units<UNITS>::shared;

  const int sequence = blockIdx.x * SEQUENCES, group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  Held<ROWS, VECTORS, KEPT_VECTORS, LANES> q;
  q.load(matrix, of.n, 1, of.n, of.n, rest);

  Units<UNITS> units(of, sequence, ring);
  int first = 0, count = SEQUENCES * ROWS, slot[UNITS];
  folded<SEQUENCES * ROWS, LANES / 2>(lane, first, count);
  #pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int s = (first + u) / ROWS, row = group * ROWS + (first + u) % ROWS;
    units.set(u, u < count, sequence + s, row);
    slot[u] = u < count ? s * COLUMNS + row : -1;
  }
  units.begin();

  for (int i = threadIdx.x; i < 2 * SEQUENCES * COLUMNS; i += THREADS) {
    const int s = i / COLUMNS, m = i % COLUMNS;
    const bool live = MODE == FORWARD && s < SEQUENCES && m < of.n && sequence + s < of.batch;
    vectors[i] = live ? of.start[(long)(sequence + s) * of.n + m] : 0.f;
  }
  __syncthreads();

  const int total = units.longest + (MODE != FORWARD);
  float* now = vectors;
  float* next = vectors + SEQUENCES * COLUMNS;
  for (int it = 0; it < total; it++) {
    float sums[SEQUENCES * ROWS];
    q.template multiply<SEQUENCES>(now, COLUMNS, sums);
    units.turn(it);
    fold<SEQUENCES * ROWS, LANES / 2>(sums, lane);
    #pragma unroll
    for (int u = 0; u < UNITS; u++) {
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
    for (int u = 0; u < UNITS; u++) units.close(u, 0.f);
  }
  arrived<0>();
}
