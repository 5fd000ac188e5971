// Float conversions, base-2 exponential and logarithm, tanh, integer helpers. Scope of every function: thread.
#pragma once

#include "device/core/arch.cuh"
#include "device/core/types.cuh"

namespace flashtile {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargestFloat = 3.4028234663852886e38f;

FT_DEVICE float infinity() { return __int_as_float(0x7f800000); }

FT_DEVICE float to_float(float x) { return x; }
FT_DEVICE float to_float(bf16_t x) { return __int_as_float(static_cast<u32>(x.bits) << 16); }
FT_DEVICE float to_float(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <typename T>
FT_DEVICE T from_float(float x);
template <>
FT_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
FT_DEVICE half_t from_float<half_t>(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
FT_DEVICE bf16_t from_float<bf16_t>(float x) {
  bf16_t y;
  if constexpr (kHasBf16Convert) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  } else {
    // Round to nearest even; keep NaN
    u32 bits = __float_as_int(x);
    u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    y.bits = static_cast<u16>(x != x ? 0x7fffu : rounded);
  }
  return y;
}

// 2^x with denormals flushed to zero; 2^-inf = 0. (PTX ISA: ex2)
FT_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x); log2(0) = -inf. (PTX ISA: lg2)
FT_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; 1 / inf = 0. (PTX ISA: rcp)
FT_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh with float32 relative accuracy. The softcap multiplies the result by the cap, so an absolute error of one ulp of
// 1 would grow with the cap.
FT_DEVICE float tanh_by_exp2(float x) {
  // Below 0.55, where 1 - 2 / (e^2x + 1) cancels, use x + x^3 P(x^2); P is the minimax polynomial (relative error
  // 3.5e-8)
  float z = x * x;
  float p = fmaf(fmaf(fmaf(0.0164587628f, z, -0.0526841469f), z, 0.133209422f), z, -0.333329588f);
  float a = x < 0.0f ? -x : x;
  float t = 1.0f - 2.0f / (exp2_approx(2.0f * kLog2e * a) + 1.0f);
  return a < 0.55f ? fmaf(p * z, x, x) : (x < 0.0f ? -t : t);
}

// tanh with a relative error below 2^-11: less than the rounding of bfloat16. (PTX ISA: tanh)
FT_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The smaller of both; NaN if either is. (PTX ISA: min)
FT_DEVICE float min_with_nan(float a, float b) {
  if constexpr (!kHasNanMinimum) return b < a || b != b ? b : a;
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

FT_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
FT_DEVICE i32 min_of(i32 a, i32 b) { return a < b ? a : b; }
FT_DEVICE i32 max_of(i32 a, i32 b) { return a > b ? a : b; }
template <typename T>
FT_DEVICE T clamp(T x, T low, T high) {
  return x < low ? low : (x > high ? high : x);
}

FT_DEVICE constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

}  // namespace flashtile
