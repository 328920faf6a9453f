// A GPU for simple kernels, on a CPU: threads of a block are fibers, and blocks run one after another.
//
// Between two barriers the threads run in a random order, another one in each launch. So a kernel that lacks a barrier
// does not repeat its results. Shared memory is NaN at first. A barrier that not all threads reach is an error.
//
//   SHARED_FLOATS  the size of the shared memory that kernels declare as `shared`
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(most)

using std::max;
using std::min;

struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace gpu {
constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

enum class State { Runs, AtWarpBarrier, AtBlockBarrier, Done };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK_BYTES);
  State state = State::Runs;
  float exchanged = 0.f;  // what it gives other lanes
};

inline std::vector<Thread> threads;
inline ucontext_t scheduler;
inline std::mt19937 random_order;
inline std::function<void()> body;

inline Thread& current() {
  return threads[threadIdx.x];
}

inline void wait(State state) {
  Thread& own = current();
  own.state = state;
  swapcontext(&own.context, &scheduler);
}

inline void begin() {
  body();
  wait(State::Done);
}

inline void start(int count) {
  threads = std::vector<Thread>(count);
  for (Thread& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, begin, 0);
  }
}

// Whether all of some threads wait at a barrier. If so, they go on.
inline bool released(int first, int last, State barrier) {
  for (int i = first; i < last; i++) {
    if (threads[i].state != barrier) return false;
  }
  for (int i = first; i < last; i++) threads[i].state = State::Runs;
  return true;
}

inline bool released() {
  const int count = threads.size();
  bool any = released(0, count, State::AtBlockBarrier);
  for (int first = 0; first < count; first += WARP) any |= released(first, first + WARP, State::AtWarpBarrier);
  return any;
}

// Runs all threads of a block to their end. Returns whether they got there.
inline bool run_block(int count) {
  start(count);
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  do {
    std::shuffle(order.begin(), order.end(), random_order);
    for (int i : order) {
      if (threads[i].state != State::Runs) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &threads[i].context);
    }
  } while (released());
  return std::all_of(threads.begin(), threads.end(), [](const Thread& one) { return one.state == State::Done; });
}

// Runs a kernel. Returns 0, or 1 if threads wait at different barriers.
inline int launch(std::function<void()> kernel, float* shared, int shared_floats, int blocks, int count) {
  body = kernel;
  gridDim.x = blocks;
  blockDim.x = count;
  for (int block = 0; block < blocks; block++) {
    blockIdx.x = block;
    std::fill(shared, shared + shared_floats, std::numeric_limits<float>::quiet_NaN());
    if (!run_block(count)) return 1;
  }
  return 0;
}
}  // namespace gpu

inline void __syncthreads() {
  gpu::wait(gpu::State::AtBlockBarrier);
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  gpu::current().exchanged = value;
  gpu::wait(gpu::State::AtWarpBarrier);
  const float found = gpu::threads[threadIdx.x ^ mask].exchanged;
  gpu::wait(gpu::State::AtWarpBarrier);
  return found;
}

template <class To, class From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To made;
  std::memcpy(&made, &value, sizeof made);
  return made;
}
inline float __uint_as_float(unsigned bits) {
  return same_bits<float>(bits);
}
// Rounds to nearest, to even in a tie.
inline unsigned short bfloat16_bits(float value) {
  const unsigned bits = same_bits<unsigned>(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
