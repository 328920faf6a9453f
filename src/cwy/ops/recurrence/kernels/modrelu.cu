// Complex modReLU, u relu(|z| + b) with z = u |z|, and its adjoint: one pass where pointwise ops of torch take many.

extern "C" __global__ void forward(const float2* __restrict__ z, const float* __restrict__ bias, float2* out, int n,
                                   int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float2 v = z[i];
  const float size = hypotf(v.x, v.y), shifted = size + (bias ? bias[i % n] : 0.f);
  const float whole = shifted <= 0.f ? 0.f : shifted, by = size == 0.f ? 1.f : size;
  out[i] = make_float2(v.x / by * whole, v.y / by * whole);
  if (size == 0.f) out[i] = make_float2(0.f, 0.f);
}

// Along u the derivative is 1, across it (|z| + b)/|z|.
extern "C" __global__ void backward(float2* d, const float2* __restrict__ h, const float2* __restrict__ z,
                                    const float* __restrict__ bias, int n, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float2 v = z[i], state = h[i], g = d[i];
  const float size = hypotf(v.x, v.y);
  if ((state.x == 0.f && state.y == 0.f) || size == 0.f) {
    d[i] = make_float2(0.f, 0.f);
    return;
  }
  const float ratio = (size + (bias ? bias[i % n] : 0.f)) / size, ux = v.x / size, uy = v.y / size;
  const float along = ux * g.x + uy * g.y, ax = along * ux, ay = along * uy;
  d[i] = make_float2(ax + ratio * (g.x - ax), ay + ratio * (g.y - ay));
}
