// Forward pass. A task is a block of queries of one head or, if there are few queries, all queries of several heads
// that share their keys. It loops over the blocks of keys that any of its queries sees. For each group of 24 queries it
// computes scores, row maximum m and row sum l, P, and O = alpha * O + P V with O in scratch.
// (FlashAttention-2, section 3.1)
#pragma once

#include "tiles.h"

namespace flashtile {
namespace {

constexpr i32 kMaxBlockRows = 16 * kGroupRows;  // most queries of a task
constexpr i32 kPackCost = 12;                   // time to pack a block of keys, in units of one query row

struct ForwardPlan {
  i32 block_m, block_n, heads_per_task;
  i32 head_chunks;   // tasks that share the query heads of a key head
  i32 num_m_blocks;  // blocks of queries per head

  explicit ForwardPlan(const EngineCall& call) {
    const Params& p = *call.params;
    i32 group = p.heads / p.heads_kv;
    block_n = max_of(p.head_dim, p.head_dim_v) <= 128 ? 128 : 64;
    choose_block_m(p, call.num_threads);
    // Heads of a task share its packed keys; still leave a task for every thread
    i64 max_heads = ceil_div(static_cast<i64>(p.batch) * p.heads, call.num_threads);
    head_chunks = static_cast<i32>(
        ceil_div(group, max_of<i64>(1, min_of<i64>(kMaxBlockRows / max_of(p.seqlen_q, 1), max_heads))));
    heads_per_task = static_cast<i32>(ceil_div(group, head_chunks));
    if (heads_per_task > 1) block_m = max_of(block_m, heads_per_task * p.seqlen_q);
    num_m_blocks = static_cast<i32>(ceil_div(p.seqlen_q, block_m));
  }

  // Large blocks reuse packed keys more, small blocks balance the threads better. Minimise the time of the busiest
  // thread, in query rows. Blocks are whole groups, so that results do not depend on the number of threads.
  void choose_block_m(const Params& p, i32 num_threads) {
    i64 heads = static_cast<i64>(p.batch) * p.heads, least = 0;
    for (i64 blocks = ceil_div(max_of(p.seqlen_q, 1), kMaxBlockRows);; ++blocks) {
      i32 rows = max_of(round_up(static_cast<i32>(ceil_div(p.seqlen_q, blocks)), kGroupRows), kGroupRows);
      i64 time = ceil_div(heads * ceil_div(p.seqlen_q, rows), num_threads) * (rows + kPackCost);
      if (least == 0 || time < least) least = time, block_m = rows;
      if (rows <= kGroupRows || heads * blocks >= 8 * num_threads) return;
    }
  }

  i64 num_tasks(const Params& p) const { return static_cast<i64>(p.batch) * p.heads_kv * head_chunks * num_m_blocks; }
};

struct ForwardScratch {
  Scratch scratch;
  KeyTile k, v;
  real *q, *o, *s, *m, *l, *factors;

  ForwardScratch(const Params& p, const ForwardPlan& plan, real* base) : scratch{base} {
    k.allocate(scratch, plan.block_n, p.head_dim);
    v.allocate(scratch, plan.block_n, p.head_dim_v);
    q = scratch.take(static_cast<i64>(plan.block_m) * k.padded_dim);
    o = scratch.take(static_cast<i64>(plan.block_m) * v.padded_dim);
    s = scratch.take(static_cast<i64>(kGroupRows) * plan.block_n);
    m = scratch.take(plan.block_m);
    l = scratch.take(static_cast<i64>(plan.block_m) * kLanes);
    factors = scratch.take(plan.block_n);
  }
};

// P = 2^(S - m) for a group of rows, in place, or e^(S - m). Updates m and l; `alpha` gets the factors that rescale O.
template <bool kIsNatural>
void softmax_rows(i32 rows, Range columns, real* s, i64 stride, real* m, real* l, real* alpha) {
  constexpr real kFactor = exponent_factor(kIsNatural);
  real safe[kGroupRows];
  for (i32 r = 0; r < rows; ++r) {
    const real* row = s + r * stride;
    vf largest = load(row + columns.begin);
    for (i32 c = columns.begin + kLanes; c < columns.end; c += kLanes) largest = max_vectors(largest, load(row + c));
    // Keep the old maximum while no P exceeds 2, or e: rescaling in every tile, as ALiBi causes, accumulates rounding
    // errors
    real in_tile = horizontal_max(largest), raised = in_tile > m[r] + 1.0f ? in_tile : m[r];
    // 0 replaces the maximum of a row without keys: 2^(-inf - 0) is 0, 2^(-inf + inf) would be NaN
    safe[r] = raised == -kInfinity ? 0.0f : raised;
    alpha[r] = (m[r] - safe[r]) * kFactor;
    m[r] = raised;
  }
  for (i32 r = 0; r < rows; r += kLanes) store(alpha + r, exp2_of(load(alpha + r)));
  for (i32 r = 0; r < rows; ++r) {
    real* row = s + r * stride;
    vf sum = {};
    for (i32 c = columns.begin; c < columns.end; c += kLanes) {
      vf p = exp2_of((load(row + c) - safe[r]) * kFactor);
      sum += p;
      store(row + c, p);
    }
    // Sum the tile separately first: adding each probability to the long sum would round more
    store(l + r * kLanes, load(l + r * kLanes) * alpha[r] + sum);
  }
}

void forward_task(const EngineCall& call, i64 task, void* base) {
  const Params& p = *call.params;
  ForwardPlan plan(call);
  ForwardScratch t(p, plan, static_cast<real*>(base));
  [[maybe_unused]] FlushDenormals flush(has_normal_factors(p));

  // Find the queries. Last blocks come first: under a causal mask they see the most keys
  i32 m_block = plan.num_m_blocks - 1 - static_cast<i32>(task % plan.num_m_blocks);
  i32 chunk = static_cast<i32>(task / plan.num_m_blocks % plan.head_chunks);
  i32 head_kv = static_cast<i32>(task / plan.num_m_blocks / plan.head_chunks % p.heads_kv);
  Sequence s = find_sequence(call, static_cast<i32>(task / plan.num_m_blocks / plan.head_chunks / p.heads_kv));
  i32 group = p.heads / p.heads_kv, first_head = head_kv * group + chunk * plan.heads_per_task;
  i32 last_head = min_of(first_head + plan.heads_per_task, (head_kv + 1) * group);
  i32 i_begin = m_block * plan.block_m, i_end = min_of(i_begin + plan.block_m, s.span.seqlen_q);
  if (i_begin >= i_end) return;

  // Load Q
  Query queries[kMaxBlockRows];
  i32 num_rows = 0;
  for (i32 head = first_head; head < last_head; ++head) {
    for (i32 i = i_begin; i < i_end; ++i, ++num_rows) {
      queries[num_rows] = make_query(p, s, head, i);
      load_row(t.q + num_rows * t.k.padded_dim, query_row(p.q, p.q_strides, call.element, s, head, i), call.element,
               p.head_dim, t.k.padded_dim);
    }
  }
  fill(t.o, static_cast<i64>(num_rows) * t.v.padded_dim, 0.0f);
  fill(t.m, num_rows, -kInfinity);
  fill(t.l, static_cast<i64>(num_rows) * kLanes, 0.0f);

  Range keys = key_range(p, s, i_begin, i_end);
  bool is_plain = !has_score_options(p), is_natural = has_natural_scores(p);
  // Packing K pays off only where several rows use it
  bool has_few_rows = num_rows <= kFewRows && t.k.dim <= kMaxTerms;
  auto* softmax = is_natural ? softmax_rows<true> : softmax_rows<false>;
  for (i32 j = round_down(keys.begin, plan.block_n); j < keys.end; j += plan.block_n) {
    i32 count = min_of(plan.block_n, s.span.seqlen_k - j);
    OperandB k = t.k.load_rows(call, s, p.k, p.k_strides, head_kv, j, count);
    if (!has_few_rows) t.k.transpose(k, count);
    OperandB v = t.v.load_rows(call, s, p.v, p.v_strides, head_kv, j, count);
    for (i32 row = 0; row < num_rows; row += kGroupRows) {
      i32 rows = min_of(kGroupRows, num_rows - row);
      Columns columns(queries + row, rows, j, count);
      if (columns.is_empty()) continue;
      // S = Q K^T
      OperandA q{t.q + row * t.k.padded_dim, t.k.padded_dim, 1};
      if (has_few_rows) {
        multiply_rows_of_keys(rows, columns, q, k, t.k.dim, dot_factor(p), t.s, plan.block_n);
      } else {
        multiply_panels(rows, columns, q, t.k, dot_factor(p), t.s, plan.block_n);
      }
      if (!is_plain || columns.is_edge) {
        for (i32 r = 0; r < rows; ++r)
          modify_scores(call, s, queries[row + r], j, columns.vectors, t.s + r * plan.block_n, nullptr);
      }
      // Online softmax
      real alpha[round_up(kGroupRows, kPad)];
      softmax(rows, columns.vectors, t.s, plan.block_n, t.m + row, t.l + row * kLanes, alpha);
      if (p.dropout_threshold != 0) {
        for (i32 r = 0; r < rows; ++r) {
          keep_factors(p, s, queries[row + r], j, columns.vectors, 1.0f, t.factors);
          real* line = t.s + r * plan.block_n;
          for (i32 c = columns.vectors.begin; c < columns.vectors.end; c += kLanes)
            store(line + c, load(line + c) * load(t.factors + c));
        }
      }
      // O = alpha * O + P V
      OperandB seen{v.b + columns.seen.begin * v.row_stride, v.row_stride, v.panel_stride};
      product<Epilogue::kRescaleAdd>(rows, t.v.padded_dim, columns.seen.end - columns.seen.begin,
                                     {t.s + columns.seen.begin, plan.block_n, 1}, seen, t.o + row * t.v.padded_dim,
                                     t.v.padded_dim, alpha);
    }
  }

  // Kept probabilities stay as they are until here
  real keep_factor = p.dropout_threshold != 0 ? keep_factor_of(p) : real(1);
  for (i32 r = 0; r < num_rows; ++r) {
    const Query& query = queries[r];
    real m = t.m[r], l = horizontal_sum(load(t.l + r * kLanes)), alpha = 1.0f;
    if (p.sinks != nullptr) {
      // The sink is a key without a value: it joins the denominator only
      real sink = in_score_unit(p, reals(p.sinks)[query.head]), raised = max_of(m, sink);
      real safe = raised == -kInfinity ? 0.0f : raised, factor = exponent_factor(is_natural);
      alpha = exp2_of((m - safe) * factor);
      l = l * alpha + exp2_of((sink - safe) * factor);
      m = raised;
    }
    // A fully masked row has l = 0: output 0, lse -inf
    store_row(query_row(p.out, p.out_strides, call.out_element, s, query.head, query.i), t.o + r * t.v.padded_dim,
              call.out_element, p.head_dim_v, l == 0.0f ? 0.0f : alpha / l * keep_factor);
    reals(p.lse)[query.lse_idx] = l == 0.0f ? -kInfinity : m * (is_natural ? real(1) : kLn2) + log_of(l);
  }
}

EnginePass forward_pass(const EngineCall& call) {
  ForwardPlan plan(call);
  return {plan.num_tasks(*call.params), ForwardScratch(*call.params, plan, nullptr).scratch.num_bytes(), forward_task};
}

}  // namespace
}  // namespace flashtile
