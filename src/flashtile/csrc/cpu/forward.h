// Forward: a task is a block of queries of one head, or of the few queries of several heads that share their keys. It walks over the
// blocks of keys that any of them sees. For 24 queries at a time: scores of the block, running maximum m and sum l, P, then
// O = alpha * O + P V with O in scratch. (FlashAttention-2, section 3.1)
#pragma once

#include "tiles.h"

namespace flashtile {
namespace {

constexpr i32 kMaxBlockRows = 16 * kGroupRows;  // queries of a task
constexpr i32 kPackRows = 12;                   // what it takes to pack a block of keys, in rows of queries

struct ForwardPlan {
  i32 block_m, block_n, heads_per_task, chunks, m_blocks;  // chunks of heads for each key head; blocks of queries for each head

  explicit ForwardPlan(const EngineCall& call) {
    const Params& p = *call.params;
    i32 group = p.heads / p.heads_kv;
    block_n = max_of(p.head_dim, p.head_dim_v) <= 128 ? 128 : 64;
    choose_rows(p, call.num_threads);
    // Share packed keys among heads, but leave a task for every thread
    i64 most = ceil_div(static_cast<i64>(p.batch) * p.heads, call.num_threads);
    chunks = static_cast<i32>(ceil_div(group, max_of<i64>(1, min_of<i64>(kMaxBlockRows / max_of(p.seqlen_q, 1), most))));
    heads_per_task = static_cast<i32>(ceil_div(group, chunks));
    if (heads_per_task > 1) block_m = max_of(block_m, heads_per_task * p.seqlen_q);
    m_blocks = static_cast<i32>(ceil_div(p.seqlen_q, block_m));
  }

  // Many rows share a block of keys once it is packed, few leave no thread without work: the least time of the thread that has most, in
  // rows. Whole groups, so that a row has the same neighbours, and bits, whatever the number of threads.
  void choose_rows(const Params& p, i32 num_threads) {
    i64 heads = static_cast<i64>(p.batch) * p.heads, least = 0;
    for (i64 blocks = ceil_div(max_of(p.seqlen_q, 1), kMaxBlockRows);; ++blocks) {
      i32 rows = max_of(round_up(static_cast<i32>(ceil_div(p.seqlen_q, blocks)), kGroupRows), kGroupRows);
      i64 time = ceil_div(heads * ceil_div(p.seqlen_q, rows), num_threads) * (rows + kPackRows);
      if (least == 0 || time < least) least = time, block_m = rows;
      if (rows <= kGroupRows || heads * blocks >= 8 * num_threads) return;
    }
  }

  i64 num_tasks(const Params& p) const { return static_cast<i64>(p.batch) * p.heads_kv * chunks * m_blocks; }
};

struct ForwardScratch {
  Scratch scratch;
  KeyTile k, v;
  float *q, *o, *s, *m, *l, *factors;

  ForwardScratch(const Params& p, const ForwardPlan& plan, float* base) : scratch{base} {
    k.cut(scratch, plan.block_n, p.head_dim);
    v.cut(scratch, plan.block_n, p.head_dim_v);
    q = scratch.take(static_cast<i64>(plan.block_m) * k.dims);
    o = scratch.take(static_cast<i64>(plan.block_m) * v.dims);
    s = scratch.take(static_cast<i64>(kGroupRows) * plan.block_n);
    m = scratch.take(plan.block_m);
    l = scratch.take(static_cast<i64>(plan.block_m) * kLanes);
    factors = scratch.take(plan.block_n);
  }
};

// P = 2^(S - m) for a group of rows, in place; raises m, adds to l, and leaves in alpha what O must be scaled by.
FT_INLINE void softmax_rows(i32 rows, Range columns, float* s, i64 stride, float* m, float* l, float* alpha) {
  float safe[kGroupRows];
  for (i32 r = 0; r < rows; ++r) {
    const float* row = s + r * stride;
    vf largest = load(row + columns.begin);
    for (i32 c = columns.begin + kLanes; c < columns.end; c += kLanes) largest = max_vectors(largest, load(row + c));
    // The old maximum will do as long as no P is above 2: what is scaled down with every tile, as under ALiBi, gathers the error of every factor
    float in_tile = max_across(largest), raised = in_tile > m[r] + 1.0f ? in_tile : m[r];
    // The maximum of nothing is replaced by 0, so that 2^(-inf - maximum) is 0 and not NaN
    safe[r] = raised == -kInfinity ? 0.0f : raised;
    alpha[r] = m[r] - safe[r];
    m[r] = raised;
  }
  for (i32 r = 0; r < rows; r += kLanes) store(alpha + r, exp2_of(load(alpha + r)));
  for (i32 r = 0; r < rows; ++r) {
    float* row = s + r * stride;
    vf sum = {};
    for (i32 c = columns.begin; c < columns.end; c += kLanes) {
      vf p = exp2_of(load(row + c) - safe[r]);
      sum += p;
      store(row + c, p);
    }
    // A tile's sum is gathered apart: added one by one to that of all keys before, probabilities would lose digits
    store(l + r * kLanes, load(l + r * kLanes) * alpha[r] + sum);
  }
}

void forward_task(const EngineCall& call, i64 task, float* base) {
  const Params& p = *call.params;
  ForwardPlan plan(call);
  ForwardScratch t(p, plan, base);
  [[maybe_unused]] FlushDenormals flush;

  // Which queries: the last blocks first, which see the most keys under a causal mask
  i32 m_block = plan.m_blocks - 1 - static_cast<i32>(task % plan.m_blocks);
  i32 chunk = static_cast<i32>(task / plan.m_blocks % plan.chunks);
  i32 head_kv = static_cast<i32>(task / plan.m_blocks / plan.chunks % p.heads_kv);
  Sequence s = find_sequence(call, static_cast<i32>(task / plan.m_blocks / plan.chunks / p.heads_kv));
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
      load_row(t.q + num_rows * t.k.dims, query_row(p.q, p.q_strides, call.element, s, head, i), call.element, p.head_dim, t.k.dims);
    }
  }
  fill(t.o, static_cast<i64>(num_rows) * t.v.dims, 0.0f);
  fill(t.m, num_rows, -kInfinity);
  fill(t.l, static_cast<i64>(num_rows) * kLanes, 0.0f);

  Range keys = key_range(p, s, i_begin, i_end);
  bool is_plain = !has_options(p);
  for (i32 j = round_down(keys.begin, plan.block_n); j < keys.end; j += plan.block_n) {
    i32 count = min_of(plan.block_n, s.span.seqlen_k - j);
    t.k.transpose(t.k.load_rows(call, s, p.k, p.k_strides, head_kv, j, count), count);
    Right v = t.v.load_rows(call, s, p.v, p.v_strides, head_kv, j, count);
    for (i32 row = 0; row < num_rows; row += kGroupRows) {
      i32 rows = min_of(kGroupRows, num_rows - row);
      Columns columns(queries + row, rows, j, count);
      if (columns.is_empty()) continue;
      // S = Q K^T
      multiply_panels(rows, columns, {t.q + row * t.k.dims, t.k.dims, 1}, t.k, dot_factor(p), t.s, plan.block_n);
      if (!is_plain || columns.is_edge) {
        for (i32 r = 0; r < rows; ++r) finish_row(call, s, queries[row + r], j, columns.vectors, t.s + r * plan.block_n, nullptr);
      }
      // P and the running maximum and sum
      float alpha[round_up(kGroupRows, kPad)];
      softmax_rows(rows, columns.vectors, t.s, plan.block_n, t.m + row, t.l + row * kLanes, alpha);
      if (p.dropout_threshold != 0) {
        for (i32 r = 0; r < rows; ++r) {
          keep_factors(p, s, queries[row + r], j, columns.vectors, t.factors);
          float* line = t.s + r * plan.block_n;
          for (i32 c = columns.vectors.begin; c < columns.vectors.end; c += kLanes) store(line + c, load(line + c) * load(t.factors + c));
        }
      }
      // O = alpha * O + P V
      Right seen{v.b + columns.seen.begin * v.row_stride, v.row_stride, v.panel_stride};
      product<Into::kScaled>(rows, t.v.dims, columns.seen.end - columns.seen.begin, {t.s + columns.seen.begin, plan.block_n, 1}, seen,
                             t.o + row * t.v.dims, t.v.dims, alpha);
    }
  }

  for (i32 r = 0; r < num_rows; ++r) {
    const Query& query = queries[r];
    float m = t.m[r], l = sum_across(load(t.l + r * kLanes)), alpha = 1.0f;
    if (p.sinks != nullptr) {
      // The sink is a key without a value: it joins the denominator only
      float sink = p.sinks[query.head] * kLog2e, raised = max_of(m, sink), safe = raised == -kInfinity ? 0.0f : raised;
      alpha = exp2_of(m - safe);
      l = l * alpha + exp2_of(sink - safe);
      m = raised;
    }
    // A row that saw no key has l = 0: output 0, lse -inf
    store_row(query_row(p.out, p.out_strides, call.out_element, s, query.head, query.i), t.o + r * t.v.dims, call.out_element, p.head_dim_v,
              l == 0.0f ? 0.0f : alpha / l);
    p.lse[query.stat] = l == 0.0f ? -kInfinity : m * kLn2 + __builtin_logf(l);
  }
}

EnginePass forward_pass(const EngineCall& call) {
  ForwardPlan plan(call);
  return {plan.num_tasks(*call.params), ForwardScratch(*call.params, plan, nullptr).scratch.used, forward_task};
}

}  // namespace
}  // namespace flashtile
