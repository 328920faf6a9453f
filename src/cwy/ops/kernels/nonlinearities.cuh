// Nonlinearities, and their derivatives.
//
//   MODRELU, ABS, RELU, LEAKY_RELU, TANH, IDENTITY  the values of NONLINEARITY
//   NONLINEARITY  which one is applied
//   SLOPE         the slope of leaky ReLU below zero
#pragma once

// 1, or 0 for zero. A choice would take one of the few predicates, and units would wait for each other.
__device__ __forceinline__ float nonzero(float z) {
  float one;
  asm("set.neu.f32.f32 %0, %1, 0f00000000;" : "=f"(one) : "f"(z));
  return one;
}
// The bias is modReLU's threshold. For the others it was added to z. Comparisons are such that NaN stays NaN.
__device__ __forceinline__ float apply(float z, float bias) {
  if (NONLINEARITY == MODRELU) {
    const float size = fabsf(z) + bias;
    return nonzero(z) * copysignf(size <= 0.f ? 0.f : size, z);
  }
  if (NONLINEARITY == ABS) return fabsf(z);
  if (NONLINEARITY == RELU) return z <= 0.f ? 0.f : z;
  if (NONLINEARITY == LEAKY_RELU) return z > 0.f ? z : float(SLOPE) * z;
  if (NONLINEARITY == TANH) return tanhf(z);
  return z;
}
// The derivative, computed from h, or for abs from z.
__device__ __forceinline__ float derivative(float h) {
  if (NONLINEARITY == MODRELU) return nonzero(h);
  if (NONLINEARITY == ABS) return h > 0.f ? 1.f : h < 0.f ? -1.f : 0.f;
  if (NONLINEARITY == RELU) return h > 0.f ? 1.f : 0.f;
  if (NONLINEARITY == LEAKY_RELU) return h > 0.f ? 1.f : float(SLOPE);
  if (NONLINEARITY == TANH) return 1.f - h * h;
  return 1.f;
}
