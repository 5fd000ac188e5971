// Copies between tensors and tiles. Rows of any element type and stride become rows of real numbers in scratch, padded
// with zeros to whole vectors, or transposed panels. Results are rounded when stored. Scope: thread.
#pragma once

#include "engine.h"
#include "simd.h"

namespace flashtile {
namespace {

#if defined(FT_DOUBLE)

// Tensors of a float64 call are float64 or float32.
constexpr Element kRealElement = Element::kFloat64;

FT_INLINE double to_real(double x) { return x; }
FT_INLINE double to_real(float x) { return static_cast<double>(x); }
FT_INLINE void from_real(double x, double& y) { y = x; }
FT_INLINE void from_real(double x, float& y) { y = static_cast<float>(x); }

FT_INLINE vf load_vector(const double* x) { return load(x); }
FT_INLINE vf load_vector(const float* x) {
  vf y;
  for (i32 l = 0; l < kLanes; ++l) y[l] = to_real(x[l]);
  return y;
}

// Calls f with a null pointer of the element's type.
template <class F>
FT_INLINE void with_element(Element element, F f) {
  if (element == Element::kFloat64) return f(static_cast<double*>(nullptr));
  f(static_cast<float*>(nullptr));
}

#else

constexpr Element kRealElement = Element::kFloat32;

FT_INLINE float float_of_bits(u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
FT_INLINE u32 bits_of_float(float x) {
  u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

FT_INLINE float to_real(float x) { return x; }
FT_INLINE float to_real(bf16_t x) { return float_of_bits(static_cast<u32>(x.bits) << 16); }
FT_INLINE float to_real(half_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // Move exponent and fraction to their place in float32 and add 112 to the exponent. A denormal is built with an
  // implicit leading 1, which is subtracted again; exponent 31 is infinity or NaN. No step has a denormal float32
  u32 magnitude = x.bits & 0x7fffu, sign = static_cast<u32>(x.bits & 0x8000u) << 16, moved = magnitude << 13;
  u32 bits = moved + 0x38000000u;
  if (magnitude < 0x400u) bits = bits_of_float(float_of_bits(moved + 0x38800000u) - 0x1p-14f);
  if (magnitude >= 0x7c00u) bits = moved | 0x7f800000u;
  return float_of_bits(bits | sign);
#endif
}

FT_INLINE void from_real(float x, float& y) { y = x; }
FT_INLINE void from_real(float x, bf16_t& y) {
  // Round to nearest even; NaN stays NaN
  u32 bits = bits_of_float(x);
  u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  y.bits = static_cast<u16>(x != x ? 0x7fffu : rounded);
}
FT_INLINE void from_real(float x, half_t& y) {
#if defined(__F16C__)
  y.bits = _cvtss_sh(x, 0);
#else
  u32 bits = bits_of_float(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu, rounded;
  if (magnitude >= 0x47800000u) {
    // 65536 and more, infinity, NaN
    rounded = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 leaves the rounded fraction in the low bits
    rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  y.bits = static_cast<u16>(sign | rounded);
#endif
}

FT_INLINE vf load_vector(const float* x) { return load(x); }
FT_INLINE vf load_vector(const bf16_t* x) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
#elif defined(__AVX2__)
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
#else
  vf y;
  for (i32 l = 0; l < kLanes; ++l) y[l] = to_real(x[l]);
  return y;
#endif
}
FT_INLINE vf load_vector(const half_t* x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#else
  vf y;
  for (i32 l = 0; l < kLanes; ++l) y[l] = to_real(x[l]);
  return y;
#endif
}

// Calls f with a null pointer of the element's type.
template <class F>
FT_INLINE void with_element(Element element, F f) {
  if (element == Element::kFloat32) return f(static_cast<float*>(nullptr));
  if (element == Element::kFloat16) return f(static_cast<half_t*>(nullptr));
  f(static_cast<bf16_t*>(nullptr));
}

#endif

FT_INLINE i64 bytes_of(Element element) {
  if (element == Element::kFloat64) return 8;
  return element == Element::kFloat32 ? 4 : 2;
}

// Loads one row of `count` elements, with zeros from `count` to `padded`.
void load_row(real* row, const void* source, Element element, i32 count, i32 padded) {
  with_element(element, [&](auto* type) {
    auto* from = static_cast<const decltype(type)>(const_cast<void*>(source));
    i32 c = 0;
    for (; c + kLanes <= count; c += kLanes) store(row + c, load_vector(from + c));
    for (; c < count; ++c) row[c] = to_real(from[c]);
    for (; c < padded; ++c) row[c] = 0.0f;
  });
}

void store_row(void* target, const real* row, Element element, i32 count, real factor) {
  with_element(element, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(target);
    for (i32 c = 0; c < count; ++c) from_real(row[c] * factor, to[c]);
  });
}

void add_row(real* target, const real* row, i32 count, real factor) {
  for (i32 c = 0; c < count; ++c) target[c] += row[c] * factor;
}

void fill(real* x, i64 count, real value) {
  for (i64 c = 0; c < count; ++c) x[c] = value;
}

// On input, group n of 4 lanes of vector v holds columns 0..3 of row 4 n + v. On output, vector v holds column v of all
// rows.
#if defined(FT_DOUBLE) && defined(__AVX512F__)
FT_INLINE vf load_quads(const double* x, i64 stride) {
  return _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_loadu_pd(x)), _mm256_loadu_pd(x + 4 * stride), 1);
}
FT_INLINE void transpose_quads(vf (&x)[4]) {
  __m512d a = _mm512_unpacklo_pd(x[0], x[1]), b = _mm512_unpackhi_pd(x[0], x[1]);
  __m512d c = _mm512_unpacklo_pd(x[2], x[3]), d = _mm512_unpackhi_pd(x[2], x[3]);
  // In each half: the first operand's chosen pair of lanes, then the second's
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  x[0] = _mm512_permutex2var_pd(a, low, c);
  x[1] = _mm512_permutex2var_pd(b, low, d);
  x[2] = _mm512_permutex2var_pd(a, high, c);
  x[3] = _mm512_permutex2var_pd(b, high, d);
}
#elif defined(FT_DOUBLE) && defined(__AVX2__)
FT_INLINE vf load_quads(const double* x, i64) { return load(x); }
FT_INLINE void transpose_quads(vf (&x)[4]) {
  __m256d a = _mm256_unpacklo_pd(x[0], x[1]), b = _mm256_unpackhi_pd(x[0], x[1]);
  __m256d c = _mm256_unpacklo_pd(x[2], x[3]), d = _mm256_unpackhi_pd(x[2], x[3]);
  x[0] = _mm256_permute2f128_pd(a, c, 0x20);
  x[1] = _mm256_permute2f128_pd(b, d, 0x20);
  x[2] = _mm256_permute2f128_pd(a, c, 0x31);
  x[3] = _mm256_permute2f128_pd(b, d, 0x31);
}
#elif defined(__AVX512F__)
FT_INLINE vf load_quads(const float* x, i64 stride) {
  __m512 y = _mm512_castps128_ps512(_mm_loadu_ps(x));
  y = _mm512_insertf32x4(y, _mm_loadu_ps(x + 4 * stride), 1);
  y = _mm512_insertf32x4(y, _mm_loadu_ps(x + 8 * stride), 2);
  return _mm512_insertf32x4(y, _mm_loadu_ps(x + 12 * stride), 3);
}
FT_INLINE void transpose_quads(vf (&x)[4]) {
  __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
  __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
  x[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  x[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  x[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  x[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}
#elif defined(__AVX2__)
FT_INLINE vf load_quads(const float* x, i64 stride) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x)), _mm_loadu_ps(x + 4 * stride), 1);
}
FT_INLINE void transpose_quads(vf (&x)[4]) {
  __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1])), b = _mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1]));
  __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3])), d = _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]));
  x[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
  x[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  x[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
  x[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}
#else
FT_INLINE vf load_quads(const real* x, i64) { return load(x); }
FT_INLINE void transpose_quads(vf (&x)[4]) {
  vf y[4] = {x[0], x[1], x[2], x[3]};
  for (i32 r = 0; r < 4; ++r)
    for (i32 c = 0; c < 4; ++c) x[c][r] = y[r][c];
}
#endif

// Transposes rows of numbers to panels: element (row, c) goes to
// panels[(row / kPanel) * panel_stride + c * kPanel + row % kPanel].
// num_rows is a multiple of kLanes, `columns` a multiple of 4.
void transpose_rows(real* panels, i64 panel_stride, const real* rows, i64 stride, i32 num_rows, i32 columns) {
  for (i32 row = 0; row < num_rows; row += kLanes) {
    real* to = panels + row / kPanel * panel_stride + row % kPanel;
    const real* from = rows + row * stride;
    for (i32 c = 0; c < columns; c += 4) {
      vf x[4];
#pragma GCC unroll 4
      for (i32 r = 0; r < 4; ++r) x[r] = load_quads(from + r * stride + c, stride);
      transpose_quads(x);
#pragma GCC unroll 4
      for (i32 n = 0; n < 4; ++n) store(to + (c + n) * kPanel, x[n]);
    }
  }
}

}  // namespace
}  // namespace flashtile
