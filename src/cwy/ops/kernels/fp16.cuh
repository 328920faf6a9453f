// Two float32 as two fp16 in a word, rounded to nearest, and back.
#pragma once

__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float2 unpack(unsigned both) {
  float2 v;
  asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(both));
  return v;
}
