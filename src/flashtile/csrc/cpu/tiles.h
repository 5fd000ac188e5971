// Shared by all passes: scratch allocation, tiles of keys, and the columns that a group of queries sees. Scope: thread.
#pragma once

#include "gemm.h"
#include "score.h"

namespace flashtile {
namespace {

constexpr i32 kPad = 16;  // head dims in scratch are padded to a multiple of this

// Allocates arrays from a task's scratch. With a null base it only counts, so that sizes come from the same code.
struct Scratch {
  real* base;
  i64 used = 0;

  real* take(i64 count) {
    real* array = base == nullptr ? nullptr : base + used;
    used += ceil_div(count, kPad) * kPad;
    return array;
  }

  i64 num_bytes() const { return used * static_cast<i64>(sizeof(real)); }
};

FT_INLINE i32 padded(i32 head_dim) { return round_up(head_dim, kPad); }

// A block of K or V, converted to real: its rows, and the same transposed to panels.
struct KeyTile {
  real *rows, *panels;
  i32 dim, padded_dim;

  void allocate(Scratch& scratch, i32 block_n, i32 dim_) {
    dim = dim_;
    padded_dim = padded(dim);
    rows = scratch.take(static_cast<i64>(block_n) * padded_dim);
    panels = scratch.take(static_cast<i64>(block_n) * padded_dim);
  }

  // Rows [j, j + count) of k or v, then zero rows up to a whole vector. Not copied if the tensor already has this
  // layout.
  OperandB load_rows(const EngineCall& call, const Sequence& s, const void* tensor, const Strides& strides, i32 head_kv,
                     i32 j, i32 count) {
    const Params& p = *call.params;
    bool is_tile = call.element == kRealElement && p.block_table == nullptr && strides.row == padded_dim &&
                   dim == padded_dim && count % kLanes == 0;
    if (is_tile) {
      return {reinterpret_cast<const real*>(key_row(p, tensor, strides, call.element, s, head_kv, j)), padded_dim,
              kPanel};
    }
    for (i32 n = 0; n < count; ++n) {
      load_row(rows + static_cast<i64>(n) * padded_dim, key_row(p, tensor, strides, call.element, s, head_kv, j + n),
               call.element, dim, padded_dim);
    }
    fill(rows + static_cast<i64>(count) * padded_dim, static_cast<i64>(round_up(count, kLanes) - count) * padded_dim,
         0.0f);
    return {rows, padded_dim, kPanel};
  }

  // Fills the panels from the result of load_rows.
  void transpose(OperandB from, i32 count) {
    transpose_rows(panels, panel_stride(), from.b, from.row_stride, round_up(count, kLanes), round_up(dim, 4));
  }

  i64 panel_stride() const { return static_cast<i64>(kPanel) * padded_dim; }
  OperandB panels_from(i32 column) const { return {panels + column / kPanel * panel_stride(), kPanel, panel_stride()}; }
};

// The columns of a tile of keys [j, j + count) that a group of rows sees: exact, and rounded to whole vectors.
struct Columns {
  Range seen, vectors;
  bool is_edge;  // some row does not see all of those vectors

  Columns(const Query* queries, i32 rows, i32 j, i32 count) : seen{count, 0}, is_edge(false) {
    for (i32 r = 0; r < rows; ++r) {
      seen.begin = min_of(seen.begin, max_of(queries[r].keys.begin - j, 0));
      seen.end = max_of(seen.end, min_of(queries[r].keys.end - j, count));
    }
    vectors = {round_down(seen.begin, kLanes), round_up(seen.end, kLanes)};
    for (i32 r = 0; r < rows; ++r)
      is_edge |= queries[r].keys.begin > j + vectors.begin || queries[r].keys.end < j + vectors.end;
  }

  bool is_empty() const { return seen.begin >= seen.end; }
  i32 panel_begin() const { return round_down(vectors.begin, kPanel); }
};

// S = A K^T for the columns of a group of rows.
FT_INLINE void multiply_panels(i32 rows, const Columns& columns, OperandA a, const KeyTile& keys, real factor, real* s,
                               i64 stride) {
  i32 begin = columns.panel_begin();
  real factors[kGroupRows];
  for (real& each : factors) each = factor;
  product<Epilogue::kScale>(rows, columns.vectors.end - begin, keys.dim, a, keys.panels_from(begin), s + begin, stride,
                            factors);
}

constexpr i32 kFewRows = 4;

// Asks for rows that will be read soon. With few queries the time goes into reading K and V, in an order that the
// processor does not foresee.
FT_INLINE void prefetch_rows(OperandB rows, i32 count, i32 dim) {
  for (i32 r = 0; r < count; ++r)
    for (i32 c = 0; c < dim; c += 64 / static_cast<i32>(sizeof(real)))
      __builtin_prefetch(rows.b + r * rows.row_stride + c);
}

// Multiplies at most kFewRows rows, by rows of K instead of panels: 4 columns of K at a time are transposed in
// registers. Sums have the order of multiply_panels, so the bits are the same. dim is at most kMaxTerms.
template <i32 kNumRows>
void multiply_few(const Columns& columns, OperandA a, OperandB rows, i32 dim, real factor, real* s, i64 stride) {
  constexpr i32 kGroups = 2;  // vectors of keys at a time: their sums overlap
  for (i32 column = columns.vectors.begin; column < columns.vectors.end; column += kGroups * kLanes) {
    i32 groups = min_of(kGroups, (columns.vectors.end - column) / kLanes);
    const real* from = rows.b + column * rows.row_stride;
    vf sum[kGroups][kNumRows] = {};
    for (i32 c = 0; c < dim; c += 4) {
      prefetch_rows({from + (kGroups * kLanes + c / 4) * rows.row_stride, rows.row_stride * (dim / 4 + 1), 0},
                    (kGroups * kLanes - c / 4 + dim / 4) / (dim / 4 + 1), dim);
      for (i32 g = 0; g < groups; ++g) {
        vf x[4];
#pragma GCC unroll 4
        for (i32 r = 0; r < 4; ++r) x[r] = load_quads(from + (g * kLanes + r) * rows.row_stride + c, rows.row_stride);
        transpose_quads(x);
#pragma GCC unroll 4
        for (i32 n = 0; n < 4; ++n) {
          if (c + n >= dim) break;
#pragma GCC unroll 4
          for (i32 r = 0; r < kNumRows; ++r) sum[g][r] += splat(a.a[r * a.row_stride + c + n]) * x[n];
        }
      }
    }
    for (i32 g = 0; g < groups; ++g)
      for (i32 r = 0; r < kNumRows; ++r) store(s + r * stride + column + g * kLanes, sum[g][r] * factor);
  }
}

FT_INLINE void multiply_rows_of_keys(i32 num_rows, const Columns& columns, OperandA a, OperandB rows, i32 dim,
                                     real factor, real* s, i64 stride) {
  static_assert(kFewRows == 4);
  switch (num_rows) {
    case 4: return multiply_few<4>(columns, a, rows, dim, factor, s, stride);
    case 3: return multiply_few<3>(columns, a, rows, dim, factor, s, stride);
    case 2: return multiply_few<2>(columns, a, rows, dim, factor, s, stride);
    default: return multiply_few<1>(columns, a, rows, dim, factor, s, stride);
  }
}

}  // namespace
}  // namespace flashtile
