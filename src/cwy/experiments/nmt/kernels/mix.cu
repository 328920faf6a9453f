// The pointwise part of a gated cell, h + z (f - h) with f = f(x + context + r) and z = sigmoid(x_gate + factor r), and
// its adjoint. A row of x has the n inputs of the cell, and then those of its gate. Rows of r are r_row entries apart.
// An encoder has no context.
//
//   NONLINEARITY  that of the cell, one of TANH, RELU and LEAKY_RELU
//   SLOPE         that of leaky_relu

__device__ __forceinline__ float value(float a) {
  if (NONLINEARITY == TANH) return tanhf(a);
  if (NONLINEARITY == RELU) return a < 0.f ? 0.f : a;
  return a < 0.f ? SLOPE * a : a;
}

// The derivative, from the value.
__device__ __forceinline__ float slope(float f) {
  if (NONLINEARITY == TANH) return 1.f - f * f;
  if (NONLINEARITY == RELU) return f > 0.f ? 1.f : 0.f;
  return f > 0.f ? 1.f : SLOPE;
}

extern "C" __global__ void forward(const float* __restrict__ x, const float* __restrict__ context,
                                   const float* __restrict__ r, const float* __restrict__ factors,
                                   const float* __restrict__ h, float* out, float* values, float* gates, int n,
                                   int r_row, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int row = i / n, unit = i % n;
  const float product = r[row * r_row + unit];
  const float input = x[2 * row * n + unit] + (context ? context[i] : 0.f);
  const float f = value(input + product);
  const float z = 1.f / (1.f + expf(-(x[(2 * row + 1) * n + unit] + factors[unit] * product)));
  out[i] = h[i] + z * (f - h[i]);
  values[i] = f;
  gates[i] = z;
}

extern "C" __global__ void backward(const float* __restrict__ d, const float* __restrict__ h,
                                    const float* __restrict__ values, const float* __restrict__ gates,
                                    const float* __restrict__ r, const float* __restrict__ factors, float* to_x,
                                    float* to_r, float* to_factors, float* to_h, int n, int r_row, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int row = i / n, unit = i % n;
  const float f = values[i], z = gates[i];
  const float to_cell = d[i] * z * slope(f);
  const float to_gate = d[i] * (f - h[i]) * z * (1.f - z);
  to_x[2 * row * n + unit] = to_cell;
  to_x[(2 * row + 1) * n + unit] = to_gate;
  to_r[i] = to_cell + factors[unit] * to_gate;
  to_factors[i] = r[row * r_row + unit] * to_gate;
  to_h[i] = d[i] * (1.f - z);
}
