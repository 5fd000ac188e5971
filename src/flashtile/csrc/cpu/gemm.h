// The one matrix product: C (+)= A B, a few rows of A at a time, sums in registers. Scope: thread.
//
// Rows of B stream by as vectors; elements of A are broadcast and may have any strides, so that A is also read transposed. All
// operands are float32 in scratch, B and C padded to whole vectors.
#pragma once

#include "simd.h"

namespace flashtile {
namespace {

constexpr i32 kRows = 6;        // rows of A at a time
constexpr i32 kGroupRows = 24;  // rows of A that use a panel of B while the first cache holds it
constexpr i32 kMaxTerms = 128;  // terms added one after the other; a longer sum is a sum of such sums, which rounds less

// C = A B;  C += A B;  C = factors * C + A B;  C = factors * A B;  C += factors * A B. There is one factor for each row
enum class Into { kStore, kAdd, kScaled, kTimes, kAddTimes };
constexpr bool has_factors(Into into) { return into == Into::kScaled || into == Into::kTimes || into == Into::kAddTimes; }

// Element (row, depth) of A stands at a[row * row_stride + depth * depth_stride].
struct Left {
  const float* a;
  i64 row_stride, depth_stride;
};

// Vector number n of row depth of B stands at b[depth * row_stride + n * kLanes], within a panel; panels follow each other.
struct Right {
  const float* b;
  i64 row_stride, panel_stride;
};

template <i32 kNumRows, i32 kNumVectors, Into kInto>
void multiply(i32 depth, Left a, const float* b, i64 b_stride, float* c, i64 c_stride, const float* factors) {
  vf sum[kNumRows][kNumVectors] = {};
  const float* at = a.a;
  for (i32 t = 0; t < depth; ++t) {
    vf row[kNumVectors];
#pragma GCC unroll 4
    for (i32 n = 0; n < kNumVectors; ++n) row[n] = load(b + n * kLanes);
#pragma GCC unroll 8
    for (i32 r = 0; r < kNumRows; ++r) {
      vf x = splat(at[r * a.row_stride]);
#pragma GCC unroll 4
      for (i32 n = 0; n < kNumVectors; ++n) sum[r][n] += x * row[n];
    }
    at += a.depth_stride;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (i32 r = 0; r < kNumRows; ++r) {
#pragma GCC unroll 4
    for (i32 n = 0; n < kNumVectors; ++n) {
      float* place = c + r * c_stride + n * kLanes;
      if (kInto == Into::kAdd) sum[r][n] += load(place);
      if (kInto == Into::kScaled) sum[r][n] += load(place) * factors[r];
      if (kInto == Into::kTimes) sum[r][n] *= splat(factors[r]);
      if (kInto == Into::kAddTimes) sum[r][n] = load(place) + sum[r][n] * factors[r];
      store(place, sum[r][n]);
    }
  }
}

template <i32 kNumRows, Into kInto>
void multiply_rows(i32 vectors, i32 depth, Left a, const float* b, i64 b_stride, float* c, i64 c_stride, const float* factors) {
  static_assert(kVectors <= 4);
  if (vectors == kVectors) return multiply<kNumRows, kVectors, kInto>(depth, a, b, b_stride, c, c_stride, factors);
  if (vectors == 1) return multiply<kNumRows, 1, kInto>(depth, a, b, b_stride, c, c_stride, factors);
  if (vectors == 2) return multiply<kNumRows, 2, kInto>(depth, a, b, b_stride, c, c_stride, factors);
  multiply<kNumRows, 3, kInto>(depth, a, b, b_stride, c, c_stride, factors);
}

// At most kRows rows of C and one panel of columns.
template <Into kInto>
FT_INLINE void multiply_some(i32 rows, i32 vectors, i32 depth, Left a, const float* b, i64 b_stride, float* c, i64 c_stride, const float* factors) {
  static_assert(kRows == 6);
  switch (rows) {
    case 6: return multiply_rows<6, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 5: return multiply_rows<5, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 4: return multiply_rows<4, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 3: return multiply_rows<3, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 2: return multiply_rows<2, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    default: return multiply_rows<1, kInto>(vectors, depth, a, b, b_stride, c, c_stride, factors);
  }
}

// C of any number of rows, `columns` a multiple of kLanes.
template <Into kInto>
void product(i32 rows, i32 columns, i32 depth, Left a, Right b, float* c, i64 c_stride, const float* factors = nullptr) {
  constexpr Into kMore = kInto == Into::kTimes || kInto == Into::kAddTimes ? Into::kAddTimes : Into::kAdd;
  for (i32 column = 0; column < columns; column += kPanel, b.b += b.panel_stride) {
    i32 vectors = min_of(columns - column, kPanel) / kLanes;
    for (i32 row = 0; row < rows; row += kRows) {
      Left left{a.a + row * a.row_stride, a.row_stride, a.depth_stride};
      const float *right = b.b, *own = has_factors(kInto) ? factors + row : nullptr;
      float* place = c + row * c_stride + column;
      i32 count = min_of(rows - row, kRows);
      multiply_some<kInto>(count, vectors, min_of(depth, kMaxTerms), left, right, b.row_stride, place, c_stride, own);
      for (i32 done = kMaxTerms; done < depth; done += kMaxTerms) {
        left.a += kMaxTerms * a.depth_stride;
        right += kMaxTerms * b.row_stride;
        multiply_some<kMore>(count, vectors, min_of(depth - done, kMaxTerms), left, right, b.row_stride, place, c_stride, own);
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
