// A float32 as two fp16, hi + lo, for tensor cores.
//
// A power of two brings the largest of a row of the matrix, or of 16 states of a sequence, to [2^14, 2^15), where lo is
// normal; hi hi + hi lo + lo hi is then as exact as a float32 product. The tensor cores sum over 16 columns; sums over
// more are float32, with the scale of the states. A scale of NaN carries NaN and Inf.
#pragma once
#include "common.cuh"
#include "fp16.cuh"

// The tensor cores round to zero, which makes sums of many terms smaller by this, on average (measured on an H200).
constexpr float ROUNDING_LOSS = 3.9e-8f;

// Two words of hi, two of lo; lo makes the whole larger by `grow`.
__device__ __forceinline__ uint4 split(float4 v, float grow = 0.f) {
  const uint2 hi = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
  const float2 a = unpack(hi.x), b = unpack(hi.y);
  float4 lo = make_float4(v.x - a.x, v.y - a.y, v.z - b.x, v.w - b.y);
  if (grow != 0.f)
    lo = make_float4(fmaf(v.x, grow, lo.x), fmaf(v.y, grow, lo.y), fmaf(v.z, grow, lo.z), fmaf(v.w, grow, lo.w));
  return make_uint4(hi.x, hi.y, pack(lo.x, lo.y), pack(lo.z, lo.w));
}
__device__ __forceinline__ float4 times(float4 v, float by) {
  return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
// Sizes are compared as integers, so that NaN is the largest. The exponent of the largest, 255 for NaN and Inf:
__device__ __forceinline__ unsigned size(float v) {
  return __float_as_uint(v) & 0x7fffffff;
}
__device__ __forceinline__ unsigned largest(float4 v) {
  return max(max(size(v.x), size(v.y)), max(size(v.z), size(v.w)));
}
__device__ __forceinline__ unsigned largest_of_four_lanes(unsigned s) {
  s = max(s, __shfl_xor_sync(~0u, s, 1));
  return max(s, __shfl_xor_sync(~0u, s, 2));
}
__device__ __forceinline__ unsigned exponent(unsigned size) {
  return max(size >> 23, 29u);
}
__device__ __forceinline__ float lift(unsigned e) {
  return __uint_as_float((268 - e) << 23);
}
__device__ __forceinline__ float power(unsigned e, unsigned less) {
  return __uint_as_float(e == 255 ? ~0u : (e - less) << 23);
}

__device__ __forceinline__ void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Tiles of 16 x 16 of a matrix that a warp holds.
//   M     tiles from top to bottom
//   K     tiles from left to right
//   Kept  those of the K that are in registers. The others are in shared memory
//
// Lane (group, within) = (lane / 4, lane % 4) has four columns of rows group and group + 8 of a tile, and of the
// operand those four of sequence `group`. The order of columns inside a product is free, so that it's the caller's.
template <int M, int K, int Kept>
struct Fragments {
  uint4 kept[M][Kept][2];
  uint4* rest;

  static constexpr int spilled = M * (K - Kept) * 2 * THREADS * 4;  // floats of shared memory

  __device__ __forceinline__ uint4* at(int m, int j, int half) {
    return j < Kept ? &kept[m][j < Kept ? j : 0][half] : rest + ((m * (K - Kept) + j - Kept) * 2 + half) * THREADS;
  }
  // Takes source(m, half, j, c), c < 4; `peaks` are the largest sizes of the rows.
  //   Source  the function that returns each number
  template <typename Source>
  __device__ __forceinline__ void load(float* room, const Source& source, unsigned (*peaks)[2]) {
    rest = reinterpret_cast<uint4*>(room) + threadIdx.x;
    #pragma unroll
    for (int m = 0; m < M; m++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        unsigned peak = 0;
        #pragma unroll
        for (int j = 0; j < K; j++) {
          const float4 v =
              make_float4(source(m, half, j, 0), source(m, half, j, 1), source(m, half, j, 2), source(m, half, j, 3));
          peak = max(peak, largest(v));
          *reinterpret_cast<float4*>(at(m, j, half)) = v;
        }
        peaks[m][half] = largest_of_four_lanes(peak);
      }
  }
  // Splits what was taken into fp16, by the exponents of the rows.
  __device__ __forceinline__ void split_all(const unsigned (*exponents)[2]) {
    #pragma unroll
    for (int m = 0; m < M; m++)
      #pragma unroll
      for (int half = 0; half < 2; half++)
        #pragma unroll
        for (int j = 0; j < K; j++) {
          const float4 v = *reinterpret_cast<float4*>(at(m, j, half));
          int terms = (v.x != 0.f) + (v.y != 0.f) + (v.z != 0.f) + (v.w != 0.f);
          terms += __shfl_xor_sync(~0u, terms, 1);
          terms += __shfl_xor_sync(~0u, terms, 2);
          *at(m, j, half) = split(times(v, lift(exponents[m][half])), terms > 2 ? ROUNDING_LOSS : 0.f);
        }
  }
  // Adds the product of tile (m, j) with states of that scale, in the order of the tensor cores.
  __device__ __forceinline__ void multiply(int m, int j, uint4 b, float2 scale, float* sums) {
    const uint4 top = *at(m, j, 0), low = *at(m, j, 1);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    mma(sum, top.z, low.z, top.w, low.w, b.x, b.y);
    mma(sum, top.x, low.x, top.y, low.y, b.z, b.w);
    mma(sum, top.x, low.x, top.y, low.y, b.x, b.y);
    #pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = fmaf(i & 1 ? scale.y : scale.x, sum[i], sums[i]);
  }
};
