// What the kernels share: blocks that meet between phases, sums over columns, products cut into tiles.
#pragma once

typedef unsigned long long Token;
constexpr int THREADS = 256, SLAB = 32, EACH = TILE / 16, PITCH = TILE + 2, COLUMNS = 8, ROWS = THREADS / COLUMNS;
constexpr int RESIDENT = 64 / TILE;  // blocks that a processor is to hold

extern __shared__ __align__(16) unsigned char memory[];

__device__ __forceinline__ void set(Token* to, Token token) {
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(token) : "memory");
}
__device__ __forceinline__ Token get(const Token* from) {
  Token token;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(token) : "l"(from) : "memory");
  return token;
}

// All blocks of a launch, which take the tiles of a phase in turn. Tokens are new at each call, so that flags need not be
// cleared first; the two rows of flags take turns, so that no block can run ahead over a flag that is still read.
struct Grid {
  Token* const flags;  // 2 x blocks
  Token token;
  int turn;

  __device__ Grid(Token* flags, Token token) : flags(flags), token(token), turn(blockIdx.x) {}

  // Waits for all blocks, and sees what they wrote.
  __device__ void meet() {
    Token* const row = flags + (token & 1) * gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) set(row + blockIdx.x, token);
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS)
      while (get(row + i) != token) {}
    __syncthreads();
    token++, turn = blockIdx.x;
  }
  // A graph replayed comes with the same tokens. After three meetings or more, what is left is none of the first two.
  __device__ void leave() {
    if (threadIdx.x == 0) set(flags + (token & 1) * gridDim.x + blockIdx.x, 0);
  }
};

// finish(b, i, j, make(b, j, sum over i of term(b, i, j))) for every entry of `count` matrices. With more than one chunk of rows the
// blocks meet once, and `parts` holds count x chunks x columns.
template <class Term, class Make, class Finish>
__device__ void over_columns(Grid& grid, int count, int rows, int columns, int chunks, double* parts, Term term, Make make, Finish finish) {
  const int across = (columns + COLUMNS - 1) / COLUMNS, total = count * chunks * across, each = (rows + chunks - 1) / chunks;
  const int row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
  double* const sums = reinterpret_cast<double*>(memory);
  for (int pass = chunks == 1; pass < 2; pass++) {
    for (; grid.turn < total; grid.turn += gridDim.x) {
      const int b = grid.turn / across / chunks, chunk = grid.turn / across % chunks, j = grid.turn % across * COLUMNS + column;
      const int from = chunk * each, to = j < columns ? min(from + each, rows) : from;
      double sum = 0;
      if (pass == 0 || chunks == 1) {
        #pragma unroll 8
        for (int i = from + row; i < to; i += ROWS) sum += term(b, i, j);
        __syncthreads();
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum = 0;
        #pragma unroll
        for (int i = 0; i < ROWS; i++) sum += sums[i * COLUMNS + column];
      } else if (j < columns) {
        for (int i = 0; i < chunks; i++) sum += parts[((long)b * chunks + i) * columns + j];
      }
      if (pass == 0) {
        if (row == 0 && j < columns) parts[((long)b * chunks + chunk) * columns + j] = sum;
      } else if (j < columns) {
        const double made = make(b, j, sum);
        #pragma unroll 8
        for (int i = from + row; i < to; i += ROWS) finish(b, i, j, made);
      }
    }
    grid.turn -= total;
    if (pass == 0) grid.meet();
  }
}

// each(b, i, j) for every entry of `count` matrices.
template <class Each> __device__ void over_entries(Grid& grid, int count, int rows, int columns, Each each) {
  const long size = (long)rows * columns, total = (count * size + THREADS - 1) / THREADS;
  for (; grid.turn < total; grid.turn += gridDim.x) {
    const long entry = (long)grid.turn * THREADS + threadIdx.x;
    if (entry < count * size) each((int)(entry / size), (int)(entry % size / columns), (int)(entry % columns));
  }
  grid.turn -= total;
}

// put(b, i, j, sum over k of left(b, i, k) right(b, k, j)) for every entry of `count` matrices. range(b, i, j) says over which k the
// tile at (i, j) runs; a tile without any is left out. Each operand says whether its neighbours in memory are along k.
template <typename Sum, bool LEFT_ALONG, bool RIGHT_ALONG, class Range, class Left, class Right, class Put>
__device__ void product(Grid& grid, int count, int rows, int columns, Range range, Left left, Right right, Put put) {
  constexpr int LOADS = TILE * SLAB / THREADS;
  const int down = (rows + TILE - 1) / TILE, across = (columns + TILE - 1) / TILE, total = count * down * across;
  const int y = threadIdx.x / 16 * EACH, x = threadIdx.x % 16 * EACH;
  Sum* const lefts = reinterpret_cast<Sum*>(memory);
  Sum* const rights = lefts + SLAB * PITCH;
  for (; grid.turn < total; grid.turn += gridDim.x) {
    const int b = grid.turn / across / down, i0 = grid.turn / across % down * TILE, j0 = grid.turn % across * TILE;
    const int2 k = range(b, i0, j0);
    if (k.x >= k.y) continue;
    decltype(left(0, 0, 0)) l[LOADS];
    decltype(right(0, 0, 0)) r[LOADS];
    auto fetch = [&](int k0) {
      #pragma unroll
      for (int e = 0; e < LOADS; e++) {
        const int m = threadIdx.x + e * THREADS;
        const int i = i0 + (LEFT_ALONG ? m / SLAB : m % TILE), ki = k0 + (LEFT_ALONG ? m % SLAB : m / TILE);
        const int j = j0 + (RIGHT_ALONG ? m / SLAB : m % TILE), kj = k0 + (RIGHT_ALONG ? m % SLAB : m / TILE);
        l[e] = i < rows && ki < k.y ? left(b, i, ki) : 0;
        r[e] = j < columns && kj < k.y ? right(b, kj, j) : 0;
      }
    };
    Sum sums[EACH][EACH] = {};
    fetch(k.x);
    for (int k0 = k.x; k0 < k.y; k0 += SLAB) {
      __syncthreads();
      #pragma unroll
      for (int e = 0; e < LOADS; e++) {
        const int m = threadIdx.x + e * THREADS;
        lefts[LEFT_ALONG ? m % SLAB * PITCH + m / SLAB : m / TILE * PITCH + m % TILE] = (Sum)l[e];
        rights[RIGHT_ALONG ? m % SLAB * PITCH + m / SLAB : m / TILE * PITCH + m % TILE] = (Sum)r[e];
      }
      __syncthreads();
      if (k0 + SLAB < k.y) fetch(k0 + SLAB);
      #pragma unroll 8
      for (int s = 0; s < SLAB; s++) {
        #pragma unroll
        for (int i = 0; i < EACH; i++)
          #pragma unroll
          for (int j = 0; j < EACH; j++) sums[i][j] += lefts[s * PITCH + y + i] * rights[s * PITCH + x + j];
      }
    }
    #pragma unroll
    for (int i = 0; i < EACH; i++)
      #pragma unroll
      for (int j = 0; j < EACH; j++)
        if (i0 + y + i < rows && j0 + x + j < columns) put(b, i0 + y + i, j0 + x + j, sums[i][j]);
  }
  grid.turn -= total;
}

// The part of `rows` that split number b % splits has.
__device__ __forceinline__ int2 split(int b, int splits, int rows) {
  const int each = (rows + splits - 1) / splits, from = b % splits * each;
  return make_int2(from, min(from + each, rows));
}
