// One tile of the backward pass: P and dS of a block of queries and a block of keys. Scope: thread.
//
// S = Q K^T and dP = dO V^T use panels of K and V. P = 2^(S - lse) is recomputed from the stored lse, and
// dS = P * (dP - delta). P is limited to 1: where |lse| is 2^24 and more, its rounding error alone may make S - lse
// positive and P infinite.
#pragma once

#include "tiles.h"

namespace flashtile {
namespace {

constexpr i32 kMaxBlock = 128;  // most queries, and most keys, of a tile

struct BackwardPlan {
  i32 block_m, block_n;

  explicit BackwardPlan(const Params& p) {
    block_m = block_n = max_of(p.head_dim, p.head_dim_v) <= 128 ? kMaxBlock : 64;
  }
};

struct BackwardTile {
  const EngineCall& call;
  const Params& p;
  BackwardPlan plan;
  Scratch scratch;
  KeyTile k, v;
  real *q, *dout, *prob, *ds, *softcap_grads, *factors;
  Query queries[kMaxBlock];
  i32 num_rows = 0, i_begin = 0;

  BackwardTile(const EngineCall& call_, real* base) : call(call_), p(*call_.params), plan(p), scratch{base} {
    k.allocate(scratch, plan.block_n, p.head_dim);
    v.allocate(scratch, plan.block_n, p.head_dim_v);
    q = scratch.take(static_cast<i64>(plan.block_m) * k.padded_dim);
    dout = scratch.take(static_cast<i64>(plan.block_m) * v.padded_dim);
    prob = scratch.take(static_cast<i64>(plan.block_m) * plan.block_n);
    ds = scratch.take(static_cast<i64>(plan.block_m) * plan.block_n);
    softcap_grads = scratch.take(plan.block_n);
    factors = scratch.take(plan.block_n);
  }

  // Loads and transposes K and V of keys [j, j + count). Returns the rows of K.
  OperandB load_keys(const Sequence& s, i32 head_kv, i32 j, i32 count) {
    OperandB rows = k.load_rows(call, s, p.k, p.k_strides, head_kv, j, count);
    k.transpose(rows, count);
    v.transpose(v.load_rows(call, s, p.v, p.v_strides, head_kv, j, count), count);
    return rows;
  }

  // Loads Q and dO of queries [i, i + count). A fully masked row has no gradient, whatever dO holds.
  void load_queries(const Sequence& s, i32 head, i32 i, i32 count) {
    num_rows = count;
    i_begin = i;
    for (i32 r = 0; r < count; ++r) {
      queries[r] = make_query(p, s, head, i + r);
      load_row(q + static_cast<i64>(r) * k.padded_dim, query_row(p.q, p.q_strides, call.element, s, head, i + r),
               call.element, p.head_dim, k.padded_dim);
      real* row = dout + static_cast<i64>(r) * v.padded_dim;
      if (reals(p.score_lse)[queries[r].lse_idx] == kInfinity) {
        fill(row, v.padded_dim, 0.0f);
      } else {
        load_row(row, query_row(p.dout, p.dout_strides, call.out_element, s, head, i + r), call.out_element,
                 p.head_dim_v, v.padded_dim);
      }
    }
  }

  // P, with dropout, and dS of keys [j, j + count); 0 where a query does not see a key. With is_for_bias dS is the
  // gradient of the score after the softcap, else that of the scaled dot product before it.
  void score_gradients(const Sequence& s, i32 j, i32 count, bool is_for_bias) {
    Range all{0, round_up(count, kLanes)};
    for (i32 row = 0; row < num_rows; row += kGroupRows) {
      i32 rows = min_of(kGroupRows, num_rows - row);
      real *p_rows = prob + static_cast<i64>(row) * plan.block_n, *ds_rows = ds + static_cast<i64>(row) * plan.block_n;
      Columns columns(queries + row, rows, j, count);
      Range range = columns.is_empty() ? Range{0, 0} : columns.vectors;
      if (!columns.is_empty()) {
        // S = Q K^T and dP = dO V^T
        multiply_panels(rows, columns, {q + static_cast<i64>(row) * k.padded_dim, k.padded_dim, 1}, k, dot_factor(p),
                        p_rows, plan.block_n);
        multiply_panels(rows, columns, {dout + static_cast<i64>(row) * v.padded_dim, v.padded_dim, 1}, v, 1.0f, ds_rows,
                        plan.block_n);
      }
      for (i32 r = 0; r < rows; ++r) {
        real *p_row = p_rows + r * plan.block_n, *ds_row = ds_rows + r * plan.block_n;
        fill(p_row, range.begin, 0.0f);
        fill(ds_row, range.begin, 0.0f);
        fill(p_row + range.end, all.end - range.end, 0.0f);
        fill(ds_row + range.end, all.end - range.end, 0.0f);
        if (range.begin < range.end)
          row_gradients(s, queries[row + r], j, range, columns.is_edge, is_for_bias, p_row, ds_row);
      }
    }
  }

  // One row: from S and dP to P and dS.
  FT_INLINE void row_gradients(const Sequence& s, const Query& query, i32 j, Range range, bool is_edge,
                               bool is_for_bias, real* p_row, real* ds_row) {
    if (is_edge || has_score_options(p)) modify_scores(call, s, query, j, range, p_row, softcap_grads);
    real lse = reals(p.score_lse)[query.lse_idx], delta = reals(p.delta)[query.lse_idx];
    real factor = exponent_factor(has_natural_scores(p));
    if (p.dropout_threshold == 0) {
      for (i32 c = range.begin; c < range.end; c += kLanes) {
        vf prob_c = exp2_of(at_most_zero((load(p_row + c) - lse) * factor));
        store(ds_row + c, prob_c * (load(ds_row + c) - delta));
        store(p_row + c, prob_c);
      }
    } else {
      keep_factors(p, s, query, j, range, keep_factor_of(p), factors);
      for (i32 c = range.begin; c < range.end; c += kLanes) {
        vf prob_c = exp2_of(at_most_zero((load(p_row + c) - lse) * factor)), keep_factor = load(factors + c);
        store(ds_row + c, prob_c * (load(ds_row + c) * keep_factor - delta));
        store(p_row + c, prob_c * keep_factor);
      }
    }
    if (has_softcap(p) && !is_for_bias) {
      for (i32 c = range.begin; c < range.end; c += kLanes)
        store(ds_row + c, load(ds_row + c) * load(softcap_grads + c));
    }
  }
};

}  // namespace
}  // namespace flashtile
