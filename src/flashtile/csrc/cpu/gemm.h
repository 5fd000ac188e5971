// Matrix product C (+)= A B, with a micro-kernel that keeps a few rows of C in registers. Scope: thread.
//
// Rows of B are loaded as vectors. Elements of A are broadcast and may have any strides, so A can be read transposed.
// All operands are of type real (simd.h); rows of B and C are padded to whole vectors.
#pragma once

#include "simd.h"

namespace flashtile {
namespace {

constexpr i32 kMicroRows = 6;   // rows of C in the micro-kernel
constexpr i32 kGroupRows = 24;  // rows of A that reuse a panel of B in L1
constexpr i32 kMaxTerms = 128;  // a longer sum is a sum of partial sums of this many terms, which rounds less

// An epilogue says what happens to C; there is one factor for each row.
enum class Epilogue {
  kStore,       // C = A B
  kAdd,         // C += A B
  kRescaleAdd,  // C = factors * C + A B
  kScale,       // C = factors * A B
  kAddScale,    // C = factors * (C + A B)
  kScaleAdd,    // C += factors * A B
};
constexpr bool has_factors(Epilogue epilogue) { return epilogue != Epilogue::kStore && epilogue != Epilogue::kAdd; }

// Element (row, depth) of A is a[row * row_stride + depth * depth_stride].
struct OperandA {
  const real* a;
  i64 row_stride, depth_stride;
};

// Vector n of row `depth` of a panel of B starts at b[depth * row_stride + n * kLanes]; panels are panel_stride apart.
struct OperandB {
  const real* b;
  i64 row_stride, panel_stride;
};

// A product that is not fused with the sum it goes into. The compiler fuses in some instances of the micro-kernel and
// not in others, and the bits of a row would depend on how many rows are computed with it.
FT_INLINE vf rounded(vf x) {
#ifdef __FMA__
  asm("" : "+x"(x));
#endif
  return x;
}

// C of kNumRows rows and kNumVectors vectors.
template <i32 kNumRows, i32 kNumVectors, Epilogue kEpilogue>
void micro_kernel(i32 depth, OperandA a, const real* b, i64 b_stride, real* c, i64 c_stride, const real* factors) {
  vf sum[kNumRows][kNumVectors] = {};
  const real* at = a.a;
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
      real* target = c + r * c_stride + n * kLanes;
      if (kEpilogue == Epilogue::kAdd) sum[r][n] += load(target);
      if (kEpilogue == Epilogue::kRescaleAdd) sum[r][n] += rounded(load(target) * factors[r]);
      if (kEpilogue == Epilogue::kScale) sum[r][n] *= splat(factors[r]);
      if (kEpilogue == Epilogue::kAddScale) sum[r][n] = (load(target) + sum[r][n]) * splat(factors[r]);
      if (kEpilogue == Epilogue::kScaleAdd) sum[r][n] = load(target) + rounded(sum[r][n] * factors[r]);
      store(target, sum[r][n]);
    }
  }
}

// C of kNumRows rows and at most kVectors vectors.
template <i32 kNumRows, Epilogue kEpilogue>
void multiply_rows(i32 vectors, i32 depth, OperandA a, const real* b, i64 b_stride, real* c, i64 c_stride,
                   const real* factors) {
  static_assert(kVectors <= 4);
  if (vectors == kVectors)
    return micro_kernel<kNumRows, kVectors, kEpilogue>(depth, a, b, b_stride, c, c_stride, factors);
  if (vectors == 1) return micro_kernel<kNumRows, 1, kEpilogue>(depth, a, b, b_stride, c, c_stride, factors);
  if (vectors == 2) return micro_kernel<kNumRows, 2, kEpilogue>(depth, a, b, b_stride, c, c_stride, factors);
  micro_kernel<kNumRows, 3, kEpilogue>(depth, a, b, b_stride, c, c_stride, factors);
}

// C of at most kMicroRows rows and one panel of columns.
template <Epilogue kEpilogue>
FT_INLINE void multiply_panel(i32 rows, i32 vectors, i32 depth, OperandA a, const real* b, i64 b_stride, real* c,
                              i64 c_stride, const real* factors) {
  static_assert(kMicroRows == 6);
  switch (rows) {
    case 6: return multiply_rows<6, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 5: return multiply_rows<5, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 4: return multiply_rows<4, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 3: return multiply_rows<3, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    case 2: return multiply_rows<2, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
    default: return multiply_rows<1, kEpilogue>(vectors, depth, a, b, b_stride, c, c_stride, factors);
  }
}

// C of any number of rows, `columns` a multiple of kLanes. kScale scales the whole sum: partial sums of both signs may
// overflow when they are scaled.
template <Epilogue kEpilogue>
void product(i32 rows, i32 columns, i32 depth, OperandA a, OperandB b, real* c, i64 c_stride,
             const real* factors = nullptr) {
  constexpr bool kIsScaled = kEpilogue == Epilogue::kScale;
  constexpr Epilogue kFirst = kIsScaled ? Epilogue::kStore : kEpilogue;
  constexpr Epilogue kNext = kEpilogue == Epilogue::kScaleAdd ? Epilogue::kScaleAdd : Epilogue::kAdd;
  constexpr Epilogue kLast = kIsScaled ? Epilogue::kAddScale : kNext;
  for (i32 column = 0; column < columns; column += kPanel, b.b += b.panel_stride) {
    i32 vectors = min_of(columns - column, kPanel) / kLanes;
    for (i32 row = 0; row < rows; row += kMicroRows) {
      OperandA left{a.a + row * a.row_stride, a.row_stride, a.depth_stride};
      const real *right = b.b, *row_factors = has_factors(kEpilogue) ? factors + row : nullptr;
      real* target = c + row * c_stride + column;
      i32 count = min_of(rows - row, kMicroRows);
      if (depth <= kMaxTerms) {
        multiply_panel<kEpilogue>(count, vectors, depth, left, right, b.row_stride, target, c_stride, row_factors);
        continue;
      }
      multiply_panel<kFirst>(count, vectors, kMaxTerms, left, right, b.row_stride, target, c_stride, row_factors);
      for (i32 done = kMaxTerms; done < depth; done += kMaxTerms) {
        left.a += kMaxTerms * a.depth_stride;
        right += kMaxTerms * b.row_stride;
        i32 terms = min_of(depth - done, kMaxTerms);
        if (done + terms == depth) {
          multiply_panel<kLast>(count, vectors, terms, left, right, b.row_stride, target, c_stride, row_factors);
        } else {
          multiply_panel<kNext>(count, vectors, terms, left, right, b.row_stride, target, c_stride, row_factors);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
