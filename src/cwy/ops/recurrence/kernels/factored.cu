// The same recurrence with Q = diag(d) - A B^T of few columns, on tensor cores: a cluster of C blocks runs S <= 8 sequences.
//
// A block owns RT tiles of 16 rows of A and B and of the states; c = B^T h has LT tiles. A warp multiplies a tile of the
// block's part of c and sends it, as it is, to one block, which adds up what came from all and sends the sum to all, as the
// operand of A c; a warp finishes 16 rows of d h - A c there. MODE as in block.cu, with A and B exchanged.
//
// Buffers are single: whatever overwrites one was made from sums that all blocks, and all warps, had a part in after reading
// it. In the adjoint, c of each step is kept in `inner`, if there is one.
#include "halves.cuh"

constexpr int WARPS = THREADS / 32, M = (LT + WARPS - 1) / WARPS, OWNED = (LT + C - 1) / C, PAIRS = (S + 1) / 2;
constexpr int PART = 8 * PAIRS * 16, TILE = S * 64 + PAIRS * 8;  // bytes of a tile that are sent: a part, and the whole
static_assert(RT <= WARPS && OWNED <= WARPS && S <= 8 && C <= 8, "a warp for each tile");

// The four numbers that the tensor cores leave in a lane, rows group and group + 8 of sequences 2 within and 2 within + 1, as
// its words of an operand, columns 2 within, + 1, + 8 and + 9 of sequence `group`; and the scales of those two sequences.
struct Operand {
  uint4 words;
  float2 scale;

  static __device__ __forceinline__ unsigned turned(unsigned pair) {
    unsigned other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(pair));
    return other;
  }
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    unsigned both;
    asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
  }
  __device__ __forceinline__ Operand(const float* v) {
    unsigned peaks = __byte_perm(max(size(v[0]), size(v[2])), max(size(v[1]), size(v[3])), 0x7632);  // the upper halves
    #pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) peaks = larger(peaks, __shfl_xor_sync(~0u, peaks, lanes));
    const unsigned a = exponent(peaks << 16), b = exponent(peaks);
    const uint4 w = split(make_float4(v[0] * lift(a), v[1] * lift(b), v[2] * lift(a), v[3] * lift(b)));
    words = make_uint4(turned(w.x), turned(w.y), turned(w.z), turned(w.w));
    scale = make_float2(power(a, 28), power(b, 28));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rollout(const float* __restrict__ A, const float* __restrict__ B, const float* __restrict__ d, const Tensors of, const int l,
        float* const inner) {
  extern __shared__ __align__(16) float memory[];
  unsigned long long* const barriers = reinterpret_cast<unsigned long long*>(memory);  // 2
  uint4* const states = reinterpret_cast<uint4*>(memory) + 1;             // RT x S x 4
  uint4* const wholes = states + RT * S * 4;                              // LT x S x 4, c as an operand
  float4* const parts = reinterpret_cast<float4*>(wholes + LT * S * 4);   // OWNED x C x 32
  float2* const scales = reinterpret_cast<float2*>(parts + OWNED * C * 32);  // (RT + LT) x 4
  float* const ring = reinterpret_cast<float*>(scales + (RT + LT) * 4);
  float* const rest = ring + Units<4>::shared;

  const unsigned rank = cluster_rank();
  const int sequence = blockIdx.x / C * S, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, within = lane % 4, first = rank * RT * 16, row = first + 16 * warp + group;
  Fragments<M, RT, KR1> down;
  Fragments<1, LT, KR2> up;
  unsigned peaks[M + 1][2];
  float powers[M + 1][2];
  const auto column = [&](int j, int c) { return 16 * j + 2 * within + c % 2 + 8 * (c / 2); };
  down.load(rest, [&](int m, int half, int j, int c) {
    const int i = first + column(j, c), k = 16 * (warp + WARPS * m) + 8 * half + group;
    return i < of.n && k < l ? B[(long)i * l + k] : 0.f;
  }, peaks);
  up.load(rest + down.spilled, [&](int, int half, int j, int c) {
    const int i = row + 8 * half, k = column(j, c);
    return warp < RT && i < of.n && k < l ? A[(long)i * l + k] : 0.f;
  }, peaks + M);
  #pragma unroll
  for (int i = 0; i < 2 * M + 2; i++) powers[i / 2][i % 2] = power(peaks[i / 2][i % 2] = exponent(peaks[i / 2][i % 2]), 0);
  down.halve(peaks);
  up.halve(peaks + M);

  Units<4> units(of, sequence, ring);
  float diagonal[2];
  #pragma unroll
  for (int u = 0; u < 4; u++) {
    const int s = 2 * within + u % 2, i = row + 8 * (u / 2);
    units.set(u, warp < RT && s < S, sequence + s, i);
    diagonal[u / 2] = i < of.n ? d[i] : 0.f;
  }
  units.begin();
  const auto publish = [&]() {
    const Operand h(units.value);
    if (group < S) states[warp * S * 4 + lane] = h.words;
    if (group == 0 && within < PAIRS) scales[warp * 4 + within] = h.scale;
  };
  if (warp < RT) publish();

  const int owned = WARPS - 1 - warp, mine = rank + C * owned;  // the tile of c that the warp adds up
  const unsigned partial = shared_address(&barriers[0]), whole = shared_address(&barriers[1]);
  barriers_init(partial, whole);
  if (threadIdx.x == 0) {
    barrier_expect(partial, (LT + C - 1 - rank) / C * C * PART);
    barrier_expect(whole, LT * TILE);
  }

  const int from = (group < S ? group : S - 1) * 4 + within;  // lanes of no sequence read another's
  const int total = units.longest + (MODE != FORWARD);
  for (int it = 0; it < total; it++) {
    #pragma unroll
    for (int m = 0; m < M; m++) {
      const int tile = warp + WARPS * m;
      if (tile >= LT) break;
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int j = 0; j < RT; j++) down.multiply(m, j, states[j * S * 4 + from], scales[j * 4 + within], c);
      const float4 part = make_float4(c[0] * powers[m][0], c[1] * powers[m][0], c[2] * powers[m][1], c[3] * powers[m][1]);
      const unsigned to = shared_address(parts + (tile / C * C + rank) * 32 + lane);
      if (within < PAIRS) send(remote(to, tile % C), part, remote(partial, tile % C));
    }
    units.turn(it);
    if (owned < OWNED && mine < LT) {
      barrier_wait(partial, it & 1);
      if (owned == 0 && lane == 0) barrier_expect(partial, (LT + C - 1 - rank) / C * C * PART);
      const float4 own = parts[owned * C * 32 + lane];
      float c[4] = {own.x, own.y, own.z, own.w};
      #pragma unroll
      for (int r = 1; r < C; r++) {
        const float4 part = parts[(owned * C + r) * 32 + lane];
        c[0] += part.x, c[1] += part.y, c[2] += part.z, c[3] += part.w;
      }
      const Operand sum(c);
      const unsigned to = shared_address(wholes + mine * S * 4 + lane), scale = shared_address(scales + (RT + mine) * 4 + within);
      if (group < S)
        #pragma unroll
        for (int r = 0; r < C; r++) send(remote(to, r), sum.words, remote(whole, r));
      if (group < C && within < PAIRS) send(remote(scale, group), sum.scale, remote(whole, group));
      if (MODE == ADJOINT && inner && it > 0) {
        const int t = units.time(it - 1);
        const long at = PACKED ? (long)of.offsets[t] : (long)t * of.batch;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int s = 2 * within + i % 2, k = 16 * mine + group + 8 * (i / 2);
          const bool live = s < S && sequence + s < of.batch && k < l;
          if (live && (!PACKED || t < of.lengths[sequence + s])) inner[(at + sequence + s) * l + k] = c[i];
        }
      }
    }
    barrier_wait(whole, it & 1);
    if (threadIdx.x == 0) barrier_expect(whole, LT * TILE);
    if (warp < RT) {
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      #pragma unroll
      for (int j = 0; j < LT; j++) up.multiply(0, j, wholes[j * S * 4 + from], scales[(RT + j) * 4 + within], v);
      #pragma unroll
      for (int u = 0; u < 4; u++) {
        v[u] = fmaf(-powers[M][u / 2], v[u], diagonal[u / 2] * units.value[u]);
        if (MODE != FORWARD && it + 1 == total) units.close(u, v[u]);
        else units.finish(u, it, v[u]);
      }
      publish();
    }
    __syncthreads();
  }
  if (MODE == FORWARD) {
    units.keep(total);
    #pragma unroll
    for (int u = 0; u < 4; u++) units.close(u, 0.f);
  }
  arrived<0>();
  cluster_sync();
}
