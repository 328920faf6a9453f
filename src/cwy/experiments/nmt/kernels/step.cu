// One step of a recurrence after its product with the state: attention to the source, then the cell, and the adjoint of
// both. A block has one sentence, and a thread some of its units.
//
// Python defines every macro (fused.py, and pointwise.py for the four counts):
//   PLAIN, GATED, THIN, GRU, LSTM  the values of CELL
//   CELL          which cell it is
//   NONLINEARITY  that of PLAIN, GATED and THIN. MODRELU, ABS, … are its values, and SLOPE is that of leaky ReLU
//   INPUTS        numbers of each unit in x
//   CONTEXTS      those that attention adds to the first of them. An encoder has none, and does not attend
//   PRODUCTS      numbers of each unit in the product with the state
//   KEPT          numbers of each unit that forward keeps for backward
//   TYPE          that of products and entries: FLOAT32, BFLOAT16 or FLOAT16
//   MOST_THREADS  the largest number of threads per block
// The header structures.cuh is generated from `StepTensors` in fused.py, which describes its fields.
#include "structures.cuh"
#include "nonlinearities.cuh"
#include "numbers.cuh"

constexpr bool ATTENDS = CONTEXTS > 0;
constexpr int AT_ONCE = 4;  // positions whose loads are under way at the same time

extern __shared__ float shared[];

__device__ __forceinline__ float number(const void* numbers, long index) {
  if (TYPE == FLOAT32) return static_cast<const float*>(numbers)[index];
  return widened<TYPE>(static_cast<const unsigned short*>(numbers)[index]);
}
__device__ __forceinline__ void store(void* numbers, long index, float value) {
  if (TYPE == FLOAT32)
    static_cast<float*>(numbers)[index] = value;
  else
    store_rounded<TYPE>(numbers, index, value);
}

__device__ __forceinline__ float sigmoid(float a) {
  return 1.f / (1.f + expf(-a));
}

// The sum over the lanes of a warp, for each of them.
__device__ __forceinline__ float sum_of_lanes(float a) {
  #pragma unroll
  for (int half = 16; half > 0; half /= 2) a += __shfl_xor_sync(~0u, a, half);
  return a;
}

// Where the numbers of a sentence lie.
struct Places {
  long unit_numbers;  // of tensors with one number for each unit
  long input, product, recurrent, entry, kept;
  long stride;  // from an entry of the source to the next

  __device__ __forceinline__ Places(const StepTensors& of, long sentence) {
    const long n = of.n;
    unit_numbers = sentence * n;
    input = sentence * INPUTS * n;
    product = sentence * (ATTENDS + PRODUCTS) * n;
    recurrent = product + ATTENDS * n;  // the query comes before it
    entry = sentence * (1 + CONTEXTS) * n;
    stride = (long)gridDim.x * (1 + CONTEXTS) * n;
    kept = sentence * KEPT * n;
  }
};

// Sums term(position, i) over i for each position of the source. All threads call it. If there are more warps than
// positions, several of them share one.
template <class Term>
__device__ __forceinline__ void sum_by_position(int length, int count, float* sums, float* partial, Term term) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int parts = max(1, warps / max(1, length));
  for (int task = warp; task < length * parts; task += warps) {
    const int position = task / parts;
    float sum = 0.f;
    #pragma unroll 4
    for (int i = task % parts * 32 + lane; i < count; i += 32 * parts) sum += term(position, i);
    sum = sum_of_lanes(sum);
    if (lane == 0) partial[task] = sum;
  }
  __syncthreads();
  for (int position = threadIdx.x; position < length; position += blockDim.x) {
    float sum = 0.f;
    for (int part = 0; part < parts; part++) sum += partial[position * parts + part];
    sums[position] = sum;
  }
  __syncthreads();
}

// Replaces scores by their softmax. All threads call it, and one warp computes.
__device__ __forceinline__ void softmax(float* scores, int length) {
  if (threadIdx.x < 32) {
    float most = scores[0];
    for (int i = 1; i < length; i++) most = fmaxf(most, scores[i]);
    float total = 0.f;
    for (int i = threadIdx.x; i < length; i += 32) total += expf(scores[i] - most);
    total = sum_of_lanes(total);
    for (int i = threadIdx.x; i < length; i += 32) scores[i] = expf(scores[i] - most) / total;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS) forward(const StepTensors of) {
  const int n = of.n, sentence = blockIdx.x;
  const Places at(of, sentence);
  float* weights = shared;
  int length = 0;
  if (ATTENDS) {
    length = of.lengths[sentence];
    sum_by_position(length, n, weights, shared + of.positions, [&](int position, int unit) {
      const float key = number(of.entries, at.entry + position * at.stride + unit);
      return of.score[unit] * tanhf(key + number(of.product, at.product + unit));
    });
    softmax(weights, length);
    for (int i = threadIdx.x; i < of.positions; i += blockDim.x)
      of.weights[(long)sentence * of.positions + i] = i < length ? weights[i] : 0.f;
  }
  for (int unit = threadIdx.x; unit < n; unit += blockDim.x) {
    float x[INPUTS], r[PRODUCTS];
    #pragma unroll
    for (int k = 0; k < INPUTS; k++) x[k] = of.x[at.input + k * n + unit];
    #pragma unroll 4
    for (int position = 0; position < length; position++) {
      const long value = at.entry + position * at.stride + n + unit;
      #pragma unroll
      for (int k = 0; k < CONTEXTS; k++) x[k] += weights[position] * number(of.entries, value + k * n);
    }
    #pragma unroll
    for (int k = 0; k < PRODUCTS; k++) r[k] = number(of.product, at.recurrent + k * n + unit);
    const long own = at.unit_numbers + unit;
    float next, kept[KEPT];
    if constexpr (CELL == LSTM) {
      const float i = sigmoid(x[0] + r[0]), f = sigmoid(x[1] + r[1]), g = tanhf(x[2] + r[2]), o = sigmoid(x[3] + r[3]);
      const float c = f * of.c[own] + i * g;
      next = o * tanhf(c);
      of.next_c[own] = c;
      kept[0] = i;
      kept[1] = f;
      kept[2] = g;
      kept[3] = o;
    } else if constexpr (CELL == GRU) {
      const float reset = sigmoid(x[0] + r[0]), update = sigmoid(x[1] + r[1]);
      const float inner = r[2] + (of.vector ? of.vector[unit] : 0.f);
      const float value = tanhf(x[2] + reset * inner);
      next = value + update * (of.h[own] - value);
      kept[0] = reset;
      kept[1] = update;
      kept[2] = value;
      kept[3] = inner;
    } else {
      const float z = x[0] + r[0];
      const float value = apply(z, of.threshold ? of.threshold[unit] : 0.f);
      kept[0] = derivative(NONLINEARITY == ABS ? z : value);
      next = value;
      if constexpr (CELL != PLAIN) {
        const float gate = sigmoid(x[1] + (CELL == THIN ? of.vector[unit] * r[0] : r[PRODUCTS - 1]));
        next = of.h[own] + gate * (value - of.h[own]);
        kept[1] = value;
        kept[2] = gate;
      }
    }
    of.next[own] = next;
    if (TYPE != FLOAT32) store(of.rounded, own, next);
    if (of.kept) {
      #pragma unroll
      for (int k = 0; k < KEPT; k++) of.kept[at.kept + k * n + unit] = kept[k];
    }
  }
}

// Gradients of one step, from the last step to the first. Those that all steps share are added up.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) backward(const StepTensors of) {
  const int n = of.n, sentence = blockIdx.x;
  const Places at(of, sentence);
  for (int unit = threadIdx.x; unit < n; unit += blockDim.x) {
    const long own = at.unit_numbers + unit;
    float d = of.to_next[own] + number(of.through, own);
    if (CELL != LSTM) d += of.direct[own];
    float kept[KEPT], to_x[INPUTS], to_r[PRODUCTS];
    #pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = of.kept[at.kept + k * n + unit];
    if constexpr (CELL == LSTM) {
      const float i = kept[0], f = kept[1], g = kept[2], o = kept[3];
      const float outer = tanhf(of.next_c[own]);
      const float to_c = of.direct[own] + d * o * (1.f - outer * outer);
      to_r[0] = to_c * g * i * (1.f - i);
      to_r[1] = to_c * of.c[own] * f * (1.f - f);
      to_r[2] = to_c * i * (1.f - g * g);
      to_r[3] = d * outer * o * (1.f - o);
      of.direct[own] = to_c * f;
      #pragma unroll
      for (int k = 0; k < INPUTS; k++) to_x[k] = to_r[k];
    } else if constexpr (CELL == GRU) {
      const float reset = kept[0], update = kept[1], value = kept[2], inner = kept[3];
      const float to_value = d * (1.f - update) * (1.f - value * value);
      to_x[0] = to_r[0] = to_value * inner * reset * (1.f - reset);
      to_x[1] = to_r[1] = d * (of.h[own] - value) * update * (1.f - update);
      to_x[2] = to_value;
      to_r[2] = to_value * reset;
      of.direct[own] = d * update;
      if (of.to_vector) of.to_vector[own] += to_r[2];
    } else if constexpr (CELL == PLAIN) {
      to_x[0] = to_r[0] = d * kept[0];
      if (of.to_threshold) of.to_threshold[own] += copysignf(1.f, of.next[own]) * to_x[0];
    } else {
      const float value = kept[1], gate = kept[2];
      to_x[0] = to_r[0] = d * gate * kept[0];
      to_x[1] = d * (value - of.h[own]) * gate * (1.f - gate);
      if (CELL == THIN) {
        to_r[0] += of.vector[unit] * to_x[1];
        of.to_vector[own] += number(of.product, at.recurrent + unit) * to_x[1];
      } else {
        to_r[PRODUCTS - 1] = to_x[1];
      }
      of.direct[own] = d * (1.f - gate);
      if (of.to_threshold) of.to_threshold[own] += copysignf(1.f, value) * to_x[0];
    }
    #pragma unroll
    for (int k = 0; k < INPUTS; k++) of.to_x[at.input + k * n + unit] = to_x[k];
    #pragma unroll
    for (int k = 0; k < PRODUCTS; k++) store(of.to_product, at.recurrent + k * n + unit, to_r[k]);
  }
  if (ATTENDS) {
    __syncthreads();
    const int length = of.lengths[sentence];
    const float* weights = of.weights + (long)sentence * of.positions;
    float* slopes = shared;
    sum_by_position(length, CONTEXTS * n, slopes, shared + of.positions, [&](int position, int i) {
      return of.to_x[at.input + i] * number(of.entries, at.entry + position * at.stride + n + i);
    });
    // So far these are gradients of the weights. Now they become those of the scores, by the adjoint of softmax.
    float mean = 0.f;
    for (int i = 0; i < length; i++) mean += weights[i] * slopes[i];
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += blockDim.x) slopes[i] = weights[i] * (slopes[i] - mean);
    __syncthreads();
    for (int unit = threadIdx.x; unit < n; unit += blockDim.x) {
      const float query = number(of.product, at.product + unit), score = of.score[unit];
      float to_query = 0.f, to_score = 0.f;
      for (int first = 0; first < length; first += AT_ONCE) {
        const long place = at.entry + first * at.stride + unit;
        const int count = min(AT_ONCE, length - first);
        float keys[AT_ONCE], sums[AT_ONCE];
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          keys[i] = i < count ? number(of.entries, place + i * at.stride) : 0.f;
          sums[i] = i < count ? of.to_entries[place + i * at.stride] : 0.f;
        }
        #pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          if (i < count) {
            const float slope = slopes[first + i], matched = tanhf(keys[i] + query);
            const float to_key = slope * score * (1.f - matched * matched);
            of.to_entries[place + i * at.stride] = sums[i] + to_key;
            to_query += to_key;
            to_score += slope * matched;
          }
        }
      }
      store(of.to_product, at.product + unit, to_query);
      of.to_score[at.unit_numbers + unit] += to_score;
    }
  }
}
