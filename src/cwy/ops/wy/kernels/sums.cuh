// A tile of a product while it is added up, slab by slab of its k.
//
// Python defines every macro of the kernels and passes it to the compiler (cooperative.py):
//   THREADS  threads of a block
//   MANY     whether the batch is so large that tiles of 64 x 64 keep all blocks busy
//   TILE     rows and columns of a tile
//   SLAB     terms, along k, that shared memory holds
// Template parameters:
//   LEFT_ALONG, RIGHT_ALONG  whether neighbors in memory of that operand are neighbors along k
#pragma once
#include "fp16.cuh"

constexpr int PITCH = TILE + (MANY ? 8 : 4);  // of a row of a tile in shared memory, without bank conflicts
constexpr int LOADS = TILE * SLAB / THREADS;  // of each operand, by a thread

extern __shared__ __align__(16) unsigned char memory[];

#if MANY

static_assert(THREADS == 8 * 32 && TILE == 2 * 32 && SLAB == 2 * 16, "place and depth cover no other tile");

// c = a b and c += a b, 16 x 8 with 16 terms, of fp16.
__device__ __forceinline__ void start(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// On tensor cores: a float32 is the sum of two fp16 numbers, after the largest of the slab was scaled to between 2^13
// and 2^14, and three products of those have the accuracy of one in float32. Every sixteen terms are added to the sums
// in float32, for tensor cores round toward zero. Two neighbors along k share a word. A warp has 16 x 32 of the tile.
struct Sums {
  static constexpr int PARTS = 1;                // sums of an entry
  static constexpr int ALIKE = SLAB;             // terms that share a scale
  static constexpr int REST = SLAB / 2 * PITCH;  // words from the high parts to the low ones
  static constexpr int LARGEST = 140;            // the exponent of the largest, as a float32 has it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, y = warp / 2 * 16, x = warp % 2 * 32;
  unsigned* const lefts = reinterpret_cast<unsigned*>(memory);
  unsigned* const rights = lefts + 2 * REST;
  unsigned* const largest = rights + 2 * REST;  // of each warp: left, then right
  float scale = 0, sums[4][4] = {};

  // Which of a tile, and which k, a thread loads: pairs along k, by 16 lanes along k or 32 across.
  static __device__ __forceinline__ int place(bool along, int e) {
    return along ? threadIdx.x / 16 + 16 * (e / 2) : threadIdx.x % 32 + 32 * (e / 2 % 2);
  }
  static __device__ __forceinline__ int depth(bool along, int e) {
    return along ? threadIdx.x % 16 * 2 + e % 2 : threadIdx.x / 32 * 2 + e % 2 + 16 * (e / 4);
  }

  // Before the block meets: the largest entries.
  __device__ __forceinline__ void measure(const float (&l)[LOADS], const float (&r)[LOADS]) const {
    float left = 0, right = 0;
    #pragma unroll
    for (int e = 0; e < LOADS; e++) left = fmaxf(left, fabsf(l[e])), right = fmaxf(right, fabsf(r[e]));
    const unsigned a = __reduce_max_sync(~0u, __float_as_uint(left)),
                   b = __reduce_max_sync(~0u, __float_as_uint(right));
    if (lane == 0) largest[warp] = a, largest[8 + warp] = b;
  }
  // Its exponent, of eight warps.
  static __device__ __forceinline__ int exponent(const unsigned* largest) {
    const uint4 p = *reinterpret_cast<const uint4*>(largest), q = *reinterpret_cast<const uint4*>(largest + 4);
    return max(max(max(max(p.x, p.y), max(p.z, p.w)), max(max(q.x, q.y), max(q.z, q.w))) >> 23, 14u);
  }
  static __device__ __forceinline__ float power(int exponent) {
    return __uint_as_float((unsigned)min(max(exponent, 1), 254) << 23);
  }

  template <bool LEFT_ALONG, bool RIGHT_ALONG>
  __device__ __forceinline__ void keep(const float (&l)[LOADS], const float (&r)[LOADS]) {
    // Not so small both that the scale of their product would be no float.
    const int right = exponent(largest + 8), left = max(exponent(largest), 2 * LARGEST - 126 - right);
    const float a = power(127 + LARGEST - left), b = power(127 + LARGEST - right);
    scale = power(127 + left + right - 2 * LARGEST);
    auto cut = [](unsigned* to, float x, float y) {
      const float2 whole = unpack(to[0] = pack(x, y));
      to[REST] = pack(x - whole.x, y - whole.y);
    };
    #pragma unroll
    for (int e = 0; e < LOADS; e += 2) {
      cut(lefts + depth(LEFT_ALONG, e) / 2 * PITCH + place(LEFT_ALONG, e), l[e] * a, l[e + 1] * a);
      cut(rights + depth(RIGHT_ALONG, e) / 2 * PITCH + place(RIGHT_ALONG, e), r[e] * b, r[e + 1] * b);
    }
  }

  __device__ __forceinline__ void add() {
    #pragma unroll 1
    for (int s = 0; s < SLAB / 2; s += 8) {
      const unsigned* const ls = lefts + (s + lane % 4) * PITCH + y + lane / 4;
      const unsigned* const rs = rights + (s + lane % 4) * PITCH + x + lane / 4;
      unsigned a[4], a_rest[4];
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        a[e] = ls[e / 2 * 4 * PITCH + e % 2 * 8];
        a_rest[e] = ls[REST + e / 2 * 4 * PITCH + e % 2 * 8];
      }
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned b[2], b_rest[2];
        #pragma unroll
        for (int e = 0; e < 2; e++) b[e] = rs[e * 4 * PITCH + j * 8], b_rest[e] = rs[REST + e * 4 * PITCH + j * 8];
        float c[4];
        start(c, a_rest, b), multiply(c, a, b_rest), multiply(c, a, b);
        #pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] += c[e] * scale;
      }
    }
  }

  __device__ __forceinline__ void stage(float* to) const {
    #pragma unroll
    for (int j = 0; j < 4; j++)
      #pragma unroll
      for (int e = 0; e < 4; e += 2)
        *reinterpret_cast<float2*>(to + (y + e * 4 + lane / 4) * PITCH + x + j * 8 + lane % 4 * 2) =
            make_float2(sums[j][e], sums[j][e + 1]);
  }
};

#else

static_assert(THREADS == 8 * 32 && TILE == 32 && SLAB == 8 * 8, "place and depth cover no other tile");

// In float32, by four teams of threads, each of which has some of the k and 4 x 4 entries a thread.
struct Sums {
  static constexpr int OWN = 4;                           // rows and columns of a thread
  static constexpr int TEAM = TILE / OWN * (TILE / OWN);  // threads that cover the tile
  static constexpr int PARTS = THREADS / TEAM;            // teams, and sums of an entry
  static constexpr int DEPTH = SLAB / PARTS;              // terms of a slab that a team has
  static constexpr int ALIKE = 1;                         // terms that share a scale
  const int part = threadIdx.x / TEAM, y = threadIdx.x % TEAM / (TILE / OWN) * OWN,
            x = threadIdx.x % (TILE / OWN) * OWN;
  float* const lefts = reinterpret_cast<float*>(memory);
  float* const rights = lefts + SLAB * PITCH;
  float sums[OWN][OWN] = {};

  // Which of a tile, and which k, a thread loads: runs of 8 along k, or of 32 across.
  static __device__ __forceinline__ int place(bool along, int e) {
    return along ? threadIdx.x % 32 / 8 + 4 * e : threadIdx.x % 32;
  }
  static __device__ __forceinline__ int depth(bool along, int e) {
    return along ? threadIdx.x % 8 + threadIdx.x / 32 * 8 : threadIdx.x / 32 + 8 * e;
  }

  __device__ __forceinline__ void measure(const float (&)[LOADS], const float (&)[LOADS]) const {}

  template <bool LEFT_ALONG, bool RIGHT_ALONG>
  __device__ __forceinline__ void keep(const float (&l)[LOADS], const float (&r)[LOADS]) {
    #pragma unroll
    for (int e = 0; e < LOADS; e++) {
      lefts[depth(LEFT_ALONG, e) * PITCH + place(LEFT_ALONG, e)] = l[e];
      rights[depth(RIGHT_ALONG, e) * PITCH + place(RIGHT_ALONG, e)] = r[e];
    }
  }

  __device__ __forceinline__ void add() {
    #pragma unroll 4
    for (int s = part * DEPTH; s < (part + 1) * DEPTH; s++)
      #pragma unroll
      for (int i = 0; i < OWN; i++)
        #pragma unroll
        for (int j = 0; j < OWN; j++) sums[i][j] += lefts[s * PITCH + y + i] * rights[s * PITCH + x + j];
  }

  __device__ __forceinline__ void stage(float* to) const {
    #pragma unroll
    for (int i = 0; i < OWN; i++)
      #pragma unroll
      for (int j = 0; j < OWN; j++) to[(part * TILE + y + i) * PITCH + x + j] = sums[i][j];
  }
};

#endif
