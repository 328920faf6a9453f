// Numbers of 2 bytes, to float32 and back.
//
//   BFLOAT16, FLOAT16  the values of Type
#pragma once

template <int Type>
__device__ __forceinline__ float widened(unsigned short bits) {
  if (Type == BFLOAT16) return __uint_as_float((unsigned)bits << 16);
  float number;
  asm("{\n.reg .f16 h;\nmov.b16 h, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(number) : "h"(bits));
  return number;
}
template <int Type>
__device__ __forceinline__ void store_rounded(void* numbers, long index, float value) {
  unsigned short bits;
  if (Type == BFLOAT16)
    asm("{\n.reg .b16 h;\ncvt.rn.bf16.f32 h, %1;\nmov.b16 %0, h;\n}" : "=h"(bits) : "f"(value));
  else
    asm("{\n.reg .f16 h;\ncvt.rn.f16.f32 h, %1;\nmov.b16 %0, h;\n}" : "=h"(bits) : "f"(value));
  static_cast<unsigned short*>(numbers)[index] = bits;
}
