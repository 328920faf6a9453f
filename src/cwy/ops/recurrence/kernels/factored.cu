// The same recurrence with Q = diag(d) - A B^T of few columns L, held by a cluster of C blocks that runs S sequences.
//
// A block owns ROWS rows of A and B and of the states. A step takes its part of c = B^T h, sends it to every block of the
// cluster, sums what came from all, and finishes its rows of d h - A c. MODE as in block.cu, with A and B exchanged.
#include "common.cuh"

constexpr int ROWS = R2 * THREADS / G, LP = R1 * THREADS / G, COLUMNS = J1 * G * W, QUADS = S * LP / 4;
constexpr int OWN1 = left_after(S * R1, G / 2), OWN = left_after(S * R2, G / 2);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rollout(const float* __restrict__ A, const float* __restrict__ B, const float* __restrict__ d, const Tensors of, const int l) {
  extern __shared__ __align__(16) float memory[];
  float* const vectors = memory;             // S x COLUMNS
  float* const c = vectors + S * COLUMNS;    // S x LP, this block's part and then the whole
  float* const parts = c + S * LP;           // 2 x C x S x LP
  float* const ring = parts + 2 * C * S * LP;
  float* const rest = ring + Units<OWN>::shared;
  __shared__ unsigned long long barriers[2];

  const unsigned rank = cluster_rank();
  const int sequence = blockIdx.x / C * S, group = threadIdx.x / G, lane = threadIdx.x % G;
  const int rows = of.n - (int)rank * ROWS;
  typedef Held<R1, J1, JR1, W, G> First;
  First down;
  Held<R2, J2, JR2, W, G> up;
  down.load(B + (long)rank * ROWS * l, 1, l, l, rows < ROWS ? rows : ROWS, rest);
  up.load(A + (long)rank * ROWS * l, l, 1, rows, l, rest + First::spilled);

  Units<OWN> units(of, sequence, ring);
  int first1 = 0, count1 = S * R1, first = 0, count = S * R2, slot1[OWN1], slot[OWN];
  float diagonal[OWN];
  folded<S * R1, G / 2>(lane, first1, count1);
  folded<S * R2, G / 2>(lane, first, count);
  #pragma unroll
  for (int i = 0; i < OWN1; i++) slot1[i] = i < count1 ? (first1 + i) / R1 * LP + group * R1 + (first1 + i) % R1 : -1;
  #pragma unroll
  for (int u = 0; u < OWN; u++) {
    const int s = (first + u) / R2, local = group * R2 + (first + u) % R2;
    units.set(u, u < count, sequence + s, rank * ROWS + local);
    slot[u] = u < count ? s * COLUMNS + local : -1;
    diagonal[u] = local < rows ? d[rank * ROWS + local] : 0.f;
  }
  units.begin();

  for (int i = threadIdx.x; i < S * COLUMNS; i += THREADS) {
    const int s = i / COLUMNS, m = i % COLUMNS;
    const bool live = MODE == FORWARD && m < ROWS && m < rows && sequence + s < of.batch;
    vectors[i] = live ? of.start[(long)(sequence + s) * of.n + rank * ROWS + m] : 0.f;
  }
  const unsigned barrier[2] = {shared_address(&barriers[0]), shared_address(&barriers[1])};
  barriers_init(barrier[0], barrier[1]);

  const int total = units.longest + (MODE != FORWARD);
  for (int it = 0; it < total; it++) {
    float* const part = parts + (it & 1) * C * S * LP;
    if (threadIdx.x == 0) barrier_expect(barrier[it & 1], C * S * LP * 4);
    {
      float sums[S * R1];
      down.template multiply<S>(vectors, COLUMNS, sums);
      fold<S * R1, G / 2>(sums, lane);
      #pragma unroll
      for (int i = 0; i < OWN1; i++)
        if (slot1[i] >= 0) c[slot1[i]] = sums[i];
    }
    __syncthreads();
    {
      const unsigned to = shared_address(part + rank * S * LP);
      #pragma unroll
      for (int e = threadIdx.x; e < C * QUADS; e += THREADS)
        send(remote(to + e % QUADS * 16, e / QUADS), reinterpret_cast<float4*>(c)[e % QUADS], remote(barrier[it & 1], e / QUADS));
    }
    units.turn(it);
    barrier_wait(barrier[it & 1], it >> 1 & 1);
    __syncthreads();  // the barrier counts what came here: parts for other blocks may still be read from c
    #pragma unroll
    for (int e = threadIdx.x; e < QUADS; e += THREADS) {
      float4 whole = make_float4(0.f, 0.f, 0.f, 0.f);
      #pragma unroll
      for (int r = 0; r < C; r++) {
        const float4 p = reinterpret_cast<float4*>(part)[r * QUADS + e];
        whole.x += p.x, whole.y += p.y, whole.z += p.z, whole.w += p.w;
      }
      reinterpret_cast<float4*>(c)[e] = whole;
    }
    __syncthreads();
    float sums[S * R2];
    up.template multiply<S>(c, LP, sums);
    fold<S * R2, G / 2>(sums, lane);
    #pragma unroll
    for (int u = 0; u < OWN; u++) {
      const float v = diagonal[u] * units.value[u] - sums[u];
      if (MODE != FORWARD && it + 1 == total) {
        units.close(u, v);
        continue;
      }
      const float value = units.finish(u, it, v);
      if (slot[u] >= 0) vectors[slot[u]] = value;
    }
    __syncthreads();
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < OWN; u++) units.close(u, 0.f);
  }
  arrived<0>();
  cluster_sync();
}
