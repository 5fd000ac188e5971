// Vectors of real numbers for one instruction set: loads, stores, reductions, 2^x and tanh. `real` is float32, or
// float64 where FT_DOUBLE is defined.
//
// Every engine_*.cpp compiles these headers for its own instruction set, in an unnamed namespace. With external linkage
// the linker could replace a function by its copy for a newer processor. For the same reason these headers do not
// include the C++ standard library.
#pragma once

#include "../old_symbols.h"
#include "device/attn/params.cuh"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // of functions that are inlined everywhere
#endif

#define FT_INLINE inline __attribute__((always_inline))

namespace flashtile {
namespace {

#if defined(FT_DOUBLE)
using real = double;
using real_bits = i64;
#else
using real = float;
using real_bits = i32;
#endif

#if defined(__AVX512F__)
constexpr i32 kVectorBytes = 64;
constexpr i32 kVectors = 4;  // vectors per row of the micro-kernel: 6 x 4 sums and 4 + 1 operands in 32 registers
#elif defined(__AVX2__)
constexpr i32 kVectorBytes = 32;
constexpr i32 kVectors = 2;  // 6 x 2 sums and 2 + 1 operands in 16 registers
#elif defined(FT_DOUBLE)
constexpr i32 kVectorBytes = 32;  // two registers: a vector has at least 4 elements
constexpr i32 kVectors = 1;
#else
constexpr i32 kVectorBytes = 16;
constexpr i32 kVectors = 2;
#endif
constexpr i32 kLanes = kVectorBytes / static_cast<i32>(sizeof(real));
constexpr i32 kPanel = kLanes * kVectors;  // columns of a packed panel

constexpr real kLog2e = static_cast<real>(1.4426950408889634074);
constexpr real kLn2 = static_cast<real>(0.69314718055994530942);
constexpr real kInfinity = __builtin_inff();
#if defined(FT_DOUBLE)
constexpr real kLargest = __DBL_MAX__, kSmallestNormal = __DBL_MIN__;
#else
constexpr real kLargest = __FLT_MAX__, kSmallestNormal = __FLT_MIN__;
#endif

typedef real vf __attribute__((vector_size(kVectorBytes)));
typedef real_bits vi __attribute__((vector_size(kVectorBytes)));
typedef real vf_unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(real)), may_alias));

FT_INLINE vf load(const real* x) { return *reinterpret_cast<const vf_unaligned*>(x); }
FT_INLINE void store(real* x, vf y) { *reinterpret_cast<vf_unaligned*>(x) = y; }
FT_INLINE vf splat(real x) { return x - vf{}; }

// Params declares these tensors as float; those of float64 calls are float64.
FT_INLINE real* reals(float* x) { return reinterpret_cast<real*>(x); }
FT_INLINE const real* reals(const float* x) { return reinterpret_cast<const real*>(x); }

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

#if defined(FT_DOUBLE)

FT_INLINE vf max_vectors(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_max_pd(a, b);
#elif defined(__AVX2__)
  return _mm256_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}

// min(x, 0); NaN stays NaN.
FT_INLINE vf at_most_zero(vf x) {
#if defined(__AVX512F__)
  return _mm512_min_pd(vf{}, x);
#elif defined(__AVX2__)
  return _mm256_min_pd(vf{}, x);
#else
  return x > 0.0 ? vf{} : x;
#endif
}

// 2^f for -0.5 <= f <= 0.5: the relative error of the polynomial is below 1e-17; exact at 0.
FT_INLINE vf exp2_fraction(vf f) {
  vf y = splat(0x1.e9d3fe3962af4p-32);
  y = y * f + 0x1.e6063f722b310p-28;
  y = y * f + 0x1.b524fae6277afp-24;
  y = y * f + 0x1.62bfd477732b8p-20;
  y = y * f + 0x1.ffcbfc670dcd4p-17;
  y = y * f + 0x1.430913096fd9fp-13;
  y = y * f + 0x1.5d87fe78a5276p-10;
  y = y * f + 0x1.3b2ab6fba1ddap-7;
  y = y * f + 0x1.c6b08d704a0c2p-5;
  y = y * f + 0x1.ebfbdff82c598p-3;
  y = y * f + 0x1.62e42fefa39efp-1;
  return y * f + 1.0;
}

// 2^x; 0 for -inf.
FT_INLINE vf exp2_of(vf x) {
#if defined(__AVX512F__)
  // VREDUCE gives x - round(x), VSCALEF multiplies by 2^round(x)
  return _mm512_scalef_pd(exp2_fraction(_mm512_reduce_pd(x, 0)), _mm512_roundscale_pd(x, 0));
#else
  // Adding 1.5 * 2^52 leaves the integer part in the low bits. Results below 2^-1021 are 0; NaN stays NaN
  constexpr double kMagic = 6755399441055744.0;
  vf shifted = x + kMagic;
  vf y = exp2_fraction(x - (shifted - kMagic));
  vi bits = reinterpret_cast<vi>(y) + (reinterpret_cast<vi>(shifted) << 52);
  return reinterpret_cast<vf>(bits & ~reinterpret_cast<vi>(x < -1021.0));
#endif
}

FT_INLINE vf tanh_of(vf x) {
  for (i32 l = 0; l < kLanes; ++l) x[l] = __builtin_tanh(x[l]);
  return x;
}

FT_INLINE double log_of(double x) { return __builtin_log(x); }

#else

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

FT_INLINE float log_of(float x) { return __builtin_logf(x); }

#endif

FT_INLINE real exp2_of(real x) { return exp2_of(splat(x))[0]; }

FT_INLINE real horizontal_max(vf x) {
#if defined(__AVX512F__) && defined(FT_DOUBLE)
  return _mm512_reduce_max_pd(x);
#elif defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  real m = x[0];
  for (i32 l = 1; l < kLanes; ++l) m = max_of(m, x[l]);
  return m;
#endif
}

FT_INLINE real horizontal_sum(vf x) {
  real sum = 0.0f;
  for (i32 l = 0; l < kLanes; ++l) sum += x[l];
  return sum;
}

// Flushes denormals to zero during its lifetime: the tail of a softmax has many of them, and they are slow. Not where
// a factor of the scores is one.
struct FlushDenormals {
#if defined(__x86_64__)
  u32 saved = _mm_getcsr();
  explicit FlushDenormals(bool has_normal_factors) {
    if (has_normal_factors) _mm_setcsr(saved | 0x8040u);
  }
  ~FlushDenormals() { _mm_setcsr(saved); }
#else
  explicit FlushDenormals(bool) {}
#endif
};

}  // namespace
}  // namespace flashtile
