// What the kernels of the recurrence share: nonlinearities, products held on chip, sums over lanes, clusters.
//
// Python defines every macro of this file and passes it to the compiler (tiling.py):
//   FORWARD, ADJOINT, RECOVER  the values of MODE
//   MODRELU, ABS, RELU, LEAKY_RELU, TANH, IDENTITY  the values of NONLINEARITY
//   MODE          which way the recurrence runs
//   NONLINEARITY  which one is applied
//   SLOPE         the slope of leaky ReLU below zero
//   THREADS       threads of a block
//   DEPTH         steps of inputs that the ring in shared memory holds
//   PACKED        whether sequences differ in length
//   READS_TWO     whether each step reads `two`
//   WRITES_OUT    whether each step writes `out`
//   WRITES_EXTRA  whether each step writes `extra`
//   SHARED_FLOATS  floats of shared memory, which each kernel compares with those that it takes
//   FLOAT32, BFLOAT16, FLOAT16  the values of the three below
//   ONE_TYPE      the type of the numbers of `one`
//   TWO_TYPE      the type of the numbers of `two`
//   ROUNDED_TYPE  the type of the numbers of `rounded`. If it is FLOAT32, nothing is written there
// The header structures.cuh is generated from `Tensors` in tiling.py, which describes its fields.
#pragma once
#include "structures.cuh"
#include "nonlinearities.cuh"
#include "numbers.cuh"

constexpr float TINY = 1.17549435e-38f;  // the smallest normal float

// Sums over a group of lanes.
//
// Each lane has V partial sums; after fold, each has the whole of a few. Half of the values change hands at each level.
//
//   V     values of a lane at a level
//   HALF  how far apart lanes are that exchange values, half of that at the next level
template <int V, int HALF>
__device__ __forceinline__ void fold(float* a, int lane) {
  if constexpr (HALF > 0) {
    if constexpr (V == 1) {
      a[0] += __shfl_xor_sync(~0u, a[0], HALF);
      fold<1, HALF / 2>(a, lane);
    } else {
      constexpr int H = (V + 1) / 2;
      const bool high = lane & HALF;
      #pragma unroll
      for (int i = 0; i < H; i++) {
        const float upper = H + i < V ? a[H + i < V ? H + i : 0] : 0.f;
        const float keep = high ? upper : a[i], send = high ? a[i] : upper;
        a[i] = keep + __shfl_xor_sync(~0u, send, HALF);
      }
      fold<H, HALF / 2>(a, lane);
    }
  }
}
// Which values a lane has then: `count` of them from `first`.
template <int V, int HALF>
__device__ __forceinline__ void folded(int lane, int& first, int& count) {
  if constexpr (HALF > 0) {
    const bool high = lane & HALF;
    if constexpr (V == 1) {
      if (high) count = 0;
      folded<1, HALF / 2>(lane, first, count);
    } else {
      constexpr int H = (V + 1) / 2;
      first += high ? H : 0;
      count = high ? max(count - H, 0) : min(count, H);
      folded<H, HALF / 2>(lane, first, count);
    }
  }
}
__device__ constexpr int left_after(int v, int half) {
  return half == 0 ? v : left_after((v + 1) / 2, half / 2);
}

// A matrix held by the block.
//
//   Rows   rows of each thread
//   Count  vectors of four columns of each row
//   Kept   those that are in registers. The others are in shared memory
//   Lanes  threads that share rows and take columns in turn
template <int Rows, int Count, int Kept, int Lanes>
struct Held {
  typedef float4 vec;
  static constexpr int Width = 4;  // columns of a vector
  float q[Rows][Kept * Width];
  vec* rest;

  // Row i, column m of the block's part is element i*down + m*across of the source.
  __device__ __forceinline__ void load(const float* source, long down, long across, int rows, int columns,
                                       float* shared) {
    rest = reinterpret_cast<vec*>(shared) + threadIdx.x;
    const int group = threadIdx.x / Lanes, c = threadIdx.x % Lanes;
    #pragma unroll
    for (int r = 0; r < Rows; r++) {
      const int i = group * Rows + r;
      #pragma unroll
      for (int j = 0; j < Count; j++)
        #pragma unroll
        for (int k = 0; k < Width; k++) {
          const int m = (j * Lanes + c) * Width + k;
          const float value = i < rows && m < columns ? source[i * down + m * across] : 0.f;
          if (j < Kept)
            q[r][(j < Kept ? j : 0) * Width + k] = value;
          else
            reinterpret_cast<float*>(rest + (r * (Count - Kept) + j - Kept) * THREADS)[k] = value;
        }
    }
  }

  // Partial products with vectors that stand `stride` apart; to be folded.
  //   Vectors  how many vectors there are
  template <int Vectors>
  __device__ __forceinline__ void multiply(const float* vectors, int stride, float* sums) const {
    const int c = threadIdx.x % Lanes;
    #pragma unroll
    for (int v = 0; v < Vectors * Rows; v++) sums[v] = 0.f;
    #pragma unroll
    for (int j = 0; j < Count; j++) {
      float own[Rows][Width];
      if (j >= Kept) {
        #pragma unroll
        for (int r = 0; r < Rows; r++)
          *reinterpret_cast<vec*>(own[r]) = rest[(r * (Count - Kept) + j - Kept) * THREADS];
      }
      #pragma unroll
      for (int s = 0; s < Vectors; s++) {
        float h[Width];
        *reinterpret_cast<vec*>(h) = reinterpret_cast<const vec*>(vectors + s * stride)[j * Lanes + c];
        #pragma unroll
        for (int k = 0; k < Width; k++)
          #pragma unroll
          for (int r = 0; r < Rows; r++) {
            const float left = j < Kept ? q[r][(j < Kept ? j : 0) * Width + k] : own[r][k];
            sums[s * Rows + r] = fmaf(left, h[k], sums[s * Rows + r]);
          }
      }
    }
  }
};

// A sum that keeps what rounding loses.
struct Sum {
  float whole = 0.f, lost = 0.f;
  __device__ __forceinline__ void add(float value) {
    const float corrected = value - lost, sum = whole + corrected;
    lost = (sum - whole) - corrected;
    whole = sum;
  }
};

// Copies in flight.
//
// A thread reads only what it copied itself. Volatile keeps these in order among themselves, and nothing else waits for
// them.
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return (unsigned)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;");
}
// Waits for the oldest copies.
//   Pending  groups of copies that may still be under way
template <int Pending>
__device__ __forceinline__ void arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
}
__device__ __forceinline__ float read(unsigned from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ void clear(unsigned at) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(0.f));
}

// Numbers of 4 or 2 bytes in global memory.
//
// A copy takes 4 bytes at least, so that a number of 2 bytes comes in the word that holds it.
//
//   Type  FLOAT32, BFLOAT16 or FLOAT16
template <int Type>
__device__ __forceinline__ const void* place_of(const void* numbers, long index) {
  return static_cast<const char*>(numbers) + index * (Type == FLOAT32 ? 4 : 2);
}
template <int Type>
__device__ __forceinline__ void copy_number(unsigned to, const void* numbers, long index) {
  const unsigned long long place = reinterpret_cast<unsigned long long>(place_of<Type>(numbers, index));
  copy_async(to, reinterpret_cast<const void*>(place & ~3ull));
}
// The number in the word that was copied for it.
template <int Type>
__device__ __forceinline__ float number_in(float word, const void* numbers, long index) {
  if (Type == FLOAT32) return word;
  const bool upper = reinterpret_cast<unsigned long long>(place_of<Type>(numbers, index)) & 2;
  const unsigned bits = upper ? __float_as_uint(word) >> 16 : __float_as_uint(word) & 0xffff;
  return widened<Type>((unsigned short)bits);
}

// The units that a lane finishes.
//
// Inputs are copied DEPTH - 1 steps ahead into a ring in shared memory, because a step is shorter than a trip to
// memory.
//
//   Count  units of a lane
template <int Count>
struct Units {
  const Tensors& of;
  int longest, place[Count], until[Count];
  long row, ahead;  // of the step that is kept next, and of the one that is fetched next
  unsigned ring;
  float bias[Count], tail[Count], given[Count], other[Count], value[Count], z[Count];
  Sum sum[Count];

  static constexpr int shared = DEPTH * (1 + READS_TWO) * Count * THREADS;  // floats of shared memory

  __device__ __forceinline__ Units(const Tensors& of, int sequence, float* shared) : of(of) {
    longest = PACKED ? of.lengths[sequence] : of.steps;
    ring = shared_address(shared + threadIdx.x);
  }
  // Makes unit u that of a sequence and a row of Q, or of none.
  __device__ __forceinline__ void set(int u, bool live, int at, int unit) {
    live = live && unit < of.n && at < of.batch;
    place[u] = live ? at * of.n + unit : 0;
    until[u] = live ? (PACKED ? of.lengths[at] : of.steps) : 0;
    bias[u] = live && of.bias ? of.bias[unit] : 0.f;
    const float begin = live && of.start ? of.start[place[u]] : 0.f;
    value[u] = MODE == FORWARD ? begin : 0.f;
    tail[u] = MODE == FORWARD ? 0.f : begin;
    given[u] = other[u] = z[u] = 0.f;
    if (!live)  // a unit of none stays zero: nothing is copied for it
      for (int i = 0; i < DEPTH * (1 + READS_TWO); i++) clear(ring + (i * Count + u) * THREADS * 4);
  }
  __device__ __forceinline__ int time(int it) const { return MODE == FORWARD ? it : longest - 1 - it; }
  __device__ __forceinline__ bool active(int u, int it) const { return PACKED ? time(it) < until[u] : until[u] > 0; }
  __device__ __forceinline__ long row_of(int it) const {
    return it < longest ? (PACKED ? (long)of.offsets[time(it)] : (long)time(it) * of.batch) * of.n : 0;
  }
  __device__ __forceinline__ unsigned slot(int u, int it) const {
    return ring + ((it % DEPTH) * (1 + READS_TWO) * Count + u) * THREADS * 4;
  }
  __device__ __forceinline__ void fetch(int it) {
    #pragma unroll
    for (int u = 0; u < Count; u++)
      if (it < longest && active(u, it)) {
        copy_number<ONE_TYPE>(slot(u, it), of.one, ahead + place[u]);
        if (READS_TWO) copy_number<TWO_TYPE>(slot(u, it) + Count * THREADS * 4, of.two, ahead + place[u]);
      }
    commit();
    ahead = row_of(it + 1);
  }
  __device__ __forceinline__ void begin() {
    ahead = row = row_of(0);
    for (int it = 0; it < DEPTH - 1; it++) fetch(it);
  }
  // Writes what step it - 1 made.
  __device__ __forceinline__ void keep(int it) {
    #pragma unroll
    for (int u = 0; u < Count; u++)
      if (it > 0 && active(u, it - 1)) {
        if (WRITES_EXTRA) of.extra[row + place[u]] = z[u];
        if (WRITES_OUT) of.out[row + place[u]] = MODE == RECOVER ? z[u] : value[u];
        if (ROUNDED_TYPE != FLOAT32) store_rounded<ROUNDED_TYPE>(of.rounded, row + place[u], value[u]);
        if (PACKED && MODE == FORWARD && it == until[u]) of.end[place[u]] = value[u];
        if (MODE == ADJOINT) sum[u].add(NONLINEARITY == MODRELU ? copysignf(1.f, given[u]) * value[u] : value[u]);
      }
    row = row_of(it);
  }
  // Out of the path from state to state: keeps the last step, fetches for a later one, takes what came for this.
  __device__ __forceinline__ void turn(int it) {
    keep(it);
    fetch(it + DEPTH - 1);
    arrived<DEPTH - 1>();
    #pragma unroll
    for (int u = 0; u < Count; u++) {
      given[u] = number_in<ONE_TYPE>(read(slot(u, it)), of.one, row + place[u]);
      if (READS_TWO) other[u] = number_in<TWO_TYPE>(read(slot(u, it) + Count * THREADS * 4), of.two, row + place[u]);
    }
  }
  // The value that a unit hands on, from its product.
  __device__ __forceinline__ float finish(int u, int it, float v) {
    if (MODE != FORWARD) v += (PACKED ? time(it) == until[u] - 1 : it == 0) ? tail[u] : 0.f;
    if (MODE == FORWARD) {
      z[u] = NONLINEARITY == MODRELU ? v + given[u] : v + given[u] + bias[u];
      v = apply(z[u], bias[u]);
    } else if (MODE == ADJOINT) {
      v = derivative(given[u]) * (READS_TWO ? v + other[u] : v);
    } else {
      z[u] = READS_TWO ? other[u] * (v < TINY ? TINY : v) : v;
      v = z[u] - given[u] - bias[u];
    }
    return value[u] = !PACKED || active(u, it) ? v : 0.f;
  }
  // After the last step; v is one product more, of the modes that go down.
  __device__ __forceinline__ void close(int u, float v) {
    if (until[u] > 0) {
      if (MODE != FORWARD || !PACKED) of.end[place[u]] = MODE == FORWARD ? value[u] : v;
      if (MODE == ADJOINT && of.dbias) of.dbias[place[u]] = sum[u].whole;
    }
  }
};

// Clusters.
//
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ unsigned remote(unsigned address, unsigned rank) {
  unsigned a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(address), "r"(rank));
  return a;
}
// Stores into a block of the cluster that its barrier counts.
__device__ __forceinline__ void send(unsigned address, uint4 v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier));
}
__device__ __forceinline__ void send(unsigned address, float4 v, unsigned barrier) {
  send(address, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)),
       barrier);
}
__device__ __forceinline__ void send(unsigned address, float2 v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(barrier));
}
__device__ __forceinline__ void send(unsigned address, float v, unsigned barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(v),
               "r"(barrier));
}
__device__ __forceinline__ void barriers_init(unsigned first, unsigned second) {
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nmbarrier.init.shared::cta.b64 [%1], 1;" ::"r"(first),
                 "r"(second)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_sync();
}
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At the scope of the block, where what came lies: that of the cluster would empty the L1 cache.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
