// What the kernels share: blocks that meet between phases, sums over columns, products cut into tiles.
//
// Macros, apart from those of sums.cuh:
//   COLUMNS         columns that a block sums at once
//   RESIDENT        blocks that a multiprocessor holds at least
//   WATCHED_BLOCKS  the most blocks that watch each other's flags
// Template parameters:
//   BLOCK_COLUMNS, BLOCK_THREADS  COLUMNS and THREADS, or those of a kernel that only sums columns
//   LEFT_ALONG, RIGHT_ALONG       as in sums.cuh
//   T                             the type of an entry, const or not
//   Term, Make, Finish, Each, Range, Left, Right, Put  functions, as the comments describe them
#pragma once
#include "sums.cuh"

static_assert(WATCHED_BLOCKS <= THREADS, "a thread watches the flag of one block");

typedef unsigned long long Ticket;

__device__ __forceinline__ void set(Ticket* to, Ticket ticket) {
  asm volatile("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(ticket) : "memory");
}
__device__ __forceinline__ Ticket get(const Ticket* from) {
  Ticket ticket;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(ticket) : "l"(from) : "memory");
  return ticket;
}

// The size and the barrier of a cluster. Capability 9 and above have clusters.
__device__ __forceinline__ int cluster_size() {
  int size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}
__device__ __forceinline__ void meet_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

// The blocks of one group, which take the tiles of a phase in turn. Tickets are new at each call, so flags need not be
// cleared. A replayed graph brings the same tickets again. A kernel must therefore meet at least twice, which leaves
// later tickets in the flags.
struct Grid {
  const int group, size, index;
  const bool clustered;  // a cluster is a group: flags are not needed
  Ticket* const flags;   // one per block. With more than WATCHED_BLOCKS, the first reports that all have come
  Ticket ticket;
  int turn;

  __device__ Grid(Ticket* flags, Ticket ticket, int groups = 1)
      : group(blockIdx.x / (gridDim.x / groups)),
        size(gridDim.x / groups),
        index(blockIdx.x % size),
        clustered(cluster_size() > 1),
        flags(flags + group * size),
        ticket(ticket),
        turn(index) {}
  __device__ ~Grid() {  // leaves
    if (flags && !clustered && size > 1 && size <= WATCHED_BLOCKS && threadIdx.x == 0) set(flags + index, ticket);
  }

  // Waits for all blocks of the group, and sees what they wrote.
  __device__ void meet() {
    if (clustered)
      meet_in_cluster();
    else
      meet_by_flags();
    ticket++, turn = index;
  }
  __device__ void meet_by_flags() {
    __syncthreads();
    if (size == 1) return;
    if (size <= WATCHED_BLOCKS) {  // each watches all others, which may have gone on to the next meeting, or left
      if (threadIdx.x == 0) set(flags + index, ticket);
      if (threadIdx.x < size)
        while (get(flags + threadIdx.x) - ticket > 1) {
        }
    } else if (index == 0) {
      for (int i = 1 + threadIdx.x; i < size; i += THREADS)
        while (get(flags + i) != ticket) {
        }
      __syncthreads();
      if (threadIdx.x == 0) set(flags, ticket);
    } else if (threadIdx.x == 0) {
      set(flags + index, ticket);
      while (get(flags) != ticket) {
      }
    }
    __syncthreads();
  }
};

// x[i], for fewer than 2^30 entries. A place is x and one short number. The compiler may not compute x again at each
// use, which it does when registers are short. Loops then spend more on places than on sums.
template <class T>
struct View {
  T* x;
  __device__ __forceinline__ explicit View(T* x) : x(x) {
    asm("" : "+l"(this->x));
    __builtin_assume(__isGlobal(this->x));
  }
  __device__ __forceinline__ T& operator[](int i) const { return *(T*)((char*)x + 4u * i); }
};

// The first of the matrices of a group.
__device__ __forceinline__ int share(int group, int groups, int batch) {
  return (int)((long)group * batch / groups);
}

// finish(b, i, j, make(b, j, sum over i of term(b, i, j))) for every entry of `count` matrices. With more than one
// chunk of rows the blocks meet once, and `parts` holds count x chunks x columns. A block has so many threads, and
// columns at once.
template <int BLOCK_COLUMNS = COLUMNS, int BLOCK_THREADS = THREADS, class Term, class Make, class Finish>
__device__ void over_columns(Grid& grid, int count, int rows, int columns, int chunks, double* parts, Term term,
                             Make make, Finish finish) {
  constexpr int ROWS = BLOCK_THREADS / BLOCK_COLUMNS;
  const int across = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, total = count * chunks * across,
            each = (rows + chunks - 1) / chunks;
  const int row = threadIdx.x / BLOCK_COLUMNS, column = threadIdx.x % BLOCK_COLUMNS;
  double* const sums = reinterpret_cast<double*>(memory);
  for (int pass = chunks == 1; pass < 2; pass++) {
    for (; grid.turn < total; grid.turn += grid.size) {
      const int b = grid.turn / across / chunks, chunk = grid.turn / across % chunks,
                j = grid.turn % across * BLOCK_COLUMNS + column;
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
        for (int i = 0; i < ROWS; i++) sum += sums[i * BLOCK_COLUMNS + column];
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
template <class Each>
__device__ void over_entries(Grid& grid, int count, int rows, int columns, Each each) {
  const long size = (long)rows * columns;
  const int per = (int)((size + THREADS - 1) / THREADS);
  for (; grid.turn < count * per; grid.turn += grid.size) {
    const long entry = (long)(grid.turn % per) * THREADS + threadIdx.x;
    if (entry < size) each(grid.turn / per, (int)(entry / columns), (int)(entry % columns));
  }
  grid.turn -= count * per;
}

// put(b)(i, j, sum over k of left(b)(i, k) right(b)(k, j)) for every entry of `count` matrices. range(b, i, j) returns
// over which k the tile at (i, j) runs. A tile without any is left out. The operands are those of matrix b / splits.
template <bool LEFT_ALONG, bool RIGHT_ALONG, class Range, class Left, class Right, class Put>
__device__ void product(Grid& grid, int count, int rows, int columns, Range range, Left left, Right right, Put put,
                        int splits = 1) {
  const int down = (rows + TILE - 1) / TILE, across = (columns + TILE - 1) / TILE, total = count * down * across;
  float* const staged = reinterpret_cast<float*>(memory);
  for (; grid.turn < total; grid.turn += grid.size) {
    const int b = grid.turn / across / down, i0 = grid.turn / across % down * TILE, j0 = grid.turn % across * TILE;
    const int2 k = range(b, i0, j0);
    if (k.x >= k.y) continue;
    const auto l_of = left(b / splits);
    const auto r_of = right(b / splits);
    float l[LOADS], r[LOADS];
    Sums sums;
    for (int k0 = k.x;; k0 += SLAB) {  // loads one slab while it adds up the one before
      #pragma unroll
      for (int e = 0; e < LOADS; e++) {  // beyond the last row or column any will do: what becomes of it is not put
        const int i = min(i0 + Sums::place(LEFT_ALONG, e), rows - 1), ki = k0 + Sums::depth(LEFT_ALONG, e);
        const int j = min(j0 + Sums::place(RIGHT_ALONG, e), columns - 1), kj = k0 + Sums::depth(RIGHT_ALONG, e);
        l[e] = ki < k.y ? l_of(i, ki) : 0;
        r[e] = kj < k.y ? r_of(kj, j) : 0;
      }
      if (k0 > k.x) sums.add();
      sums.measure(l, r);
      __syncthreads();
      if (k0 >= k.y) break;
      sums.keep<LEFT_ALONG, RIGHT_ALONG>(l, r);
      __syncthreads();
    }
    sums.stage(staged);
    __syncthreads();
    const auto to = put(b);
    #pragma unroll
    for (int e = 0; e < TILE * TILE / THREADS; e++) {
      const int i = threadIdx.x / TILE + THREADS / TILE * e, j = threadIdx.x % TILE;
      float sum = 0;
      #pragma unroll
      for (int p = 0; p < Sums::PARTS; p++) sum += staged[(p * TILE + i) * PITCH + j];
      if (i0 + i < rows && j0 + j < columns) to(i0 + i, j0 + j, sum);
    }
  }
  grid.turn -= total;
}

// The part of `rows` that split number b % splits has: with as many rows as splits or more, none is empty.
__device__ __forceinline__ int2 split(int b, int splits, int rows) {
  return make_int2(share(b % splits, splits, rows), share(b % splits + 1, splits, rows));
}
