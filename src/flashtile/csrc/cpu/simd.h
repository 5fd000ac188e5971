// Vectors of float32 for one instruction set: loads, stores, reductions, 2^x and tanh.
//
// Every engine_*.cpp compiles these headers for its own instruction set, in an unnamed namespace. With external linkage
// the linker could replace a function by its copy for a newer processor. For the same reason these headers do not
// include the C++ standard library.
#pragma once

#include "flashtile/attn/params.cuh"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FT_INLINE inline __attribute__((always_inline))

namespace flashtile {
namespace {

#if defined(__AVX512F__)
constexpr i32 kLanes = 16;
constexpr i32 kVectors = 4;  // vectors per row of the micro-kernel: 6 x 4 sums and 4 + 1 operands in 32 registers
#elif defined(__AVX2__)
constexpr i32 kLanes = 8;
constexpr i32 kVectors = 2;  // 6 x 2 sums and 2 + 1 operands in 16 registers
#else
constexpr i32 kLanes = 4;
constexpr i32 kVectors = 2;
#endif
constexpr i32 kPanel = kLanes * kVectors;  // columns of a packed panel

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargestFloat = __FLT_MAX__;

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef i32 vi __attribute__((vector_size(kLanes * 4)));
typedef float vf_unaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

FT_INLINE vf load(const float* x) { return *reinterpret_cast<const vf_unaligned*>(x); }
FT_INLINE void store(float* x, vf y) { *reinterpret_cast<vf_unaligned*>(x) = y; }
FT_INLINE vf splat(float x) { return x - vf{}; }

template <typename T>
FT_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
FT_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}
FT_INLINE constexpr i32 round_up(i32 x, i32 unit) { return (x + unit - 1) / unit * unit; }
FT_INLINE i32 round_down(i32 x, i32 unit) { return x / unit * unit; }
FT_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

FT_INLINE vf max_vectors(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// min(x, 0); NaN stays NaN.
FT_INLINE vf at_most_zero(vf x) {
#if defined(__AVX512F__)
  return _mm512_min_ps(vf{}, x);
#elif defined(__AVX2__)
  return _mm256_min_ps(vf{}, x);
#elif defined(__SSE2__)
  return _mm_min_ps(vf{}, x);
#else
  return x > 0.0f ? vf{} : x;
#endif
}

FT_INLINE float horizontal_max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float m = x[0];
  for (i32 l = 1; l < kLanes; ++l) m = max_of(m, x[l]);
  return m;
#endif
}

FT_INLINE float horizontal_sum(vf x) {
  float sum = 0.0f;
  for (i32 l = 0; l < kLanes; ++l) sum += x[l];
  return sum;
}

// 2^f for 0 <= f <= 1 by a minimax polynomial: relative error at most 1.6e-7, exact at 0.
FT_INLINE vf exp2_fraction(vf f) {
  vf y = splat(0x1.e97502p-10f);
  y = y * f + 0x1.277854p-7f;
  y = y * f + 0x1.c91ce6p-5f;
  y = y * f + 0x1.ebdb56p-3f;
  y = y * f + 0x1.62e4bap-1f;
  return y * f + 1.0f;
}

// 2^x; 0 for -inf.
FT_INLINE vf exp2_of(vf x) {
#if defined(__AVX512F__)
  // VREDUCE gives x - floor(x), VSCALEF multiplies by 2^floor(x)
  return _mm512_scalef_ps(exp2_fraction(_mm512_reduce_ps(x, 1)), x);
#else
  // Adding 1.5 * 2^23 leaves the integer part in the low bits. Results below 2^-126 are 0; NaN stays NaN
  constexpr float kMagic = 12582912.0f;
  vf shifted = (x - 0.5f) + kMagic;
  vf y = exp2_fraction(x - (shifted - kMagic));
  vi bits = reinterpret_cast<vi>(y) + (reinterpret_cast<vi>(shifted) << 23);
  return reinterpret_cast<vf>(bits & ~reinterpret_cast<vi>(x < -126.0f));
#endif
}

FT_INLINE float exp2_of(float x) { return exp2_of(splat(x))[0]; }

// tanh(x) with a relative error of a few float32 roundings: a polynomial below 0.625, 2^x above.
FT_INLINE vf tanh_of(vf x) {
  vf a = max_vectors(x, -x), z = x * x;
  vf e = exp2_of(a * (-2.0f * kLog2e));
  vf large = (1.0f - e) / (1.0f + e);
  vf small = splat(-0x1.75615cp-8f);
  small = small * z + 0x1.520afcp-6f;
  small = small * z - 0x1.b8384ep-5f;
  small = small * z + 0x1.11070ap-3f;
  small = small * z - 0x1.555532p-2f;
  small = a + a * z * small;
  vi is_small = a < 0.625f, sign = reinterpret_cast<vi>(x) & static_cast<i32>(0x80000000u);
  vi bits = (reinterpret_cast<vi>(small) & is_small) | (reinterpret_cast<vi>(large) & ~is_small);
  return reinterpret_cast<vf>(bits | sign);
}

// Flushes denormals to zero during its lifetime: the tail of a softmax has many of them, and they are slow.
struct FlushDenormals {
#if defined(__x86_64__)
  u32 saved = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(saved | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved); }
#endif
};

}  // namespace
}  // namespace flashtile
