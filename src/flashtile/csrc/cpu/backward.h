// Backward, in five passes: delta = rowsum(dO * O) - dlse and lse in the unit of the scores; dQ, dK and dV; the sum of
// partial dQ; dbias; dsinks.
//
// In the main pass a task is a key head of one sequence. Each block of keys loops over the blocks of queries that see
// it, of all heads that share it: dV += P^T dO, dK += dS^T Q, dQ += dS K. dK and dV of the block and dQ of all queries
// of the task are accumulated in scratch, in a fixed order. With fewer key heads than threads, num_splits tasks share
// the blocks of keys, and the reduce pass adds up their partial dQ. (FlashAttention-2, section 3.2)
#pragma once

#include "backward_tile.h"

namespace flashtile {
namespace {

// Preprocess: delta and score_lse of one head of one sequence

void preprocess_task(const EngineCall& call, i64 task, void* base) {
  const Params& p = *call.params;
  i32 head = static_cast<i32>(task % p.heads), padded_dim = padded(p.head_dim_v);
  Sequence s = find_sequence(call, static_cast<i32>(task / p.heads));
  real *out = static_cast<real*>(base), *dout = out + padded_dim;
  real *lse = reals(p.lse), *score_lse = reals(p.score_lse), *delta = reals(p.delta);
  for (i32 i = 0; i < s.span.seqlen_q; ++i) {
    i64 lse_idx = make_query(p, s, head, i).lse_idx;
    // A fully masked row: 2^(score - inf) = 0
    bool is_empty = lse[lse_idx] == -kInfinity;
    score_lse[lse_idx] = is_empty ? kInfinity : in_score_unit(p, lse[lse_idx]);
    delta[lse_idx] = 0.0f;
    if (is_empty) continue;
    load_row(out, query_row(p.out, p.out_strides, call.out_element, s, head, i), call.out_element, p.head_dim_v,
             padded_dim);
    load_row(dout, query_row(p.dout, p.dout_strides, call.out_element, s, head, i), call.out_element, p.head_dim_v,
             padded_dim);
    vf sum = {};
    for (i32 c = 0; c < padded_dim; c += kLanes) sum += load(out + c) * load(dout + c);
    delta[lse_idx] = horizontal_sum(sum) - (p.dlse == nullptr ? 0.0f : reals(p.dlse)[lse_idx]);
  }
}

EnginePass preprocess_pass(const EngineCall& call) {
  const Params& p = *call.params;
  return {static_cast<i64>(p.batch) * p.heads, 2 * padded(p.head_dim_v) * static_cast<i64>(sizeof(real)),
          preprocess_task};
}

// dQ, dK, dV

struct MainScratch {
  BackwardTile tile;
  real *dk, *dv, *dq;

  MainScratch(const EngineCall& call, real* base) : tile(call, base) {
    const Params& p = *call.params;
    dk = tile.scratch.take(static_cast<i64>(tile.plan.block_n) * tile.k.padded_dim);
    dv = tile.scratch.take(static_cast<i64>(tile.plan.block_n) * tile.v.padded_dim);
    // All queries of the heads that share a key head
    i64 dq_rows = p.dq == nullptr || p.num_splits > 1 ? 0 : static_cast<i64>(p.heads / p.heads_kv) * p.seqlen_q;
    dq = tile.scratch.take(dq_rows * tile.k.padded_dim);
  }

  // The accumulator of dQ of a head, from query 0 on.
  real* dq_rows(const Sequence& s, i32 head, i32 split) const {
    const Params& p = tile.p;
    if (p.num_splits == 1) return dq + static_cast<i64>(head % (p.heads / p.heads_kv)) * p.seqlen_q * tile.k.padded_dim;
    return reals(p.partial_out) + (split * p.lse_size + make_query(p, s, head, 0).lse_idx) * tile.k.padded_dim;
  }
};

// Writes dK or dV of a block of keys: stores, or adds if sequences may share pages.
void store_key_grads(const EngineCall& call, const Sequence& s, void* tensor, const Strides& strides, i32 head_kv,
                     i32 j, i32 count, const real* rows, i32 dim, real factor) {
  const Params& p = *call.params;
  for (i32 n = 0; n < count; ++n) {
    char* to = key_row(p, tensor, strides, call.key_grad_element, s, head_kv, j + n);
    const real* row = rows + static_cast<i64>(n) * padded(dim);
    if (p.block_table != nullptr) {
      add_row(reinterpret_cast<real*>(to), row, dim, factor);
    } else {
      store_row(to, row, call.key_grad_element, dim, factor);
    }
  }
}

void sequence_gradients(const EngineCall& call, MainScratch& t, const Sequence& s, i32 head_kv, i32 split) {
  const Params& p = *call.params;
  BackwardTile& tile = t.tile;
  i32 block_m = tile.plan.block_m, block_n = tile.plan.block_n, padded_dim = tile.k.padded_dim,
      padded_dim_v = tile.v.padded_dim;
  i32 first_head = head_kv * (p.heads / p.heads_kv), last_head = first_head + p.heads / p.heads_kv;
  i64 num_dq = static_cast<i64>(s.span.seqlen_q) * padded_dim;
  if (p.dq != nullptr) {
    for (i32 head = first_head; head < last_head; ++head) fill(t.dq_rows(s, head, split), num_dq, 0.0f);
  }

  for (i64 j_begin = split * block_n; j_begin < s.span.seqlen_k; j_begin += p.num_splits * block_n) {
    i32 j = static_cast<i32>(j_begin), count = min_of(block_n, s.span.seqlen_k - j);
    fill(t.dk, static_cast<i64>(count) * padded_dim, 0.0f);
    fill(t.dv, static_cast<i64>(count) * padded_dim_v, 0.0f);
    Range visible = query_range(p, s, j, j + count);
    OperandB k_rows = {};
    if (visible.begin < visible.end) k_rows = tile.load_keys(s, head_kv, j, count);
    for (i32 head = first_head; head < last_head; ++head) {
      for (i32 i = round_down(visible.begin, block_m); i < visible.end; i += block_m) {
        tile.load_queries(s, head, i, min_of(block_m, s.span.seqlen_q - i));
        tile.score_gradients(s, j, count, false);
        // dQ += dS K, over the keys that each group of queries sees
        if (p.dq != nullptr) {
          for (i32 row = 0; row < tile.num_rows; row += kGroupRows) {
            i32 rows = min_of(kGroupRows, tile.num_rows - row);
            Range seen = Columns(tile.queries + row, rows, j, count).seen;
            if (seen.begin >= seen.end) continue;
            product<Epilogue::kAdd>(rows, padded_dim, seen.end - seen.begin,
                                    {tile.ds + static_cast<i64>(row) * block_n + seen.begin, block_n, 1},
                                    {k_rows.b + seen.begin * k_rows.row_stride, k_rows.row_stride, k_rows.panel_stride},
                                    t.dq_rows(s, head, split) + static_cast<i64>(i + row) * padded_dim, padded_dim);
          }
        }
        // dV += P^T dO and dK += dS^T Q, over the queries that see each group of keys
        for (i32 column = 0; column < count; column += kGroupRows) {
          i32 columns = min_of(kGroupRows, count - column);
          Range rows = query_range(p, s, j + column, j + column + columns);
          rows = {max_of(rows.begin - i, 0), min_of(rows.end - i, tile.num_rows)};
          if (rows.begin >= rows.end) continue;
          i64 at = static_cast<i64>(rows.begin) * block_n + column;
          if (p.dv != nullptr) {
            product<Epilogue::kAdd>(columns, padded_dim_v, rows.end - rows.begin, {tile.prob + at, 1, block_n},
                                    {tile.dout + static_cast<i64>(rows.begin) * padded_dim_v, padded_dim_v, kPanel},
                                    t.dv + static_cast<i64>(column) * padded_dim_v, padded_dim_v);
          }
          if (p.dk != nullptr) {
            product<Epilogue::kAdd>(columns, padded_dim, rows.end - rows.begin, {tile.ds + at, 1, block_n},
                                    {tile.q + static_cast<i64>(rows.begin) * padded_dim, padded_dim, kPanel},
                                    t.dk + static_cast<i64>(column) * padded_dim, padded_dim);
          }
        }
      }
    }
    if (p.dk != nullptr) store_key_grads(call, s, p.dk, p.dk_strides, head_kv, j, count, t.dk, p.head_dim, scale_of(p));
    if (p.dv != nullptr) store_key_grads(call, s, p.dv, p.dv_strides, head_kv, j, count, t.dv, p.head_dim_v, 1.0f);
  }

  if (p.dq != nullptr && p.num_splits == 1) {
    for (i32 head = first_head; head < last_head; ++head) {
      for (i32 i = 0; i < s.span.seqlen_q; ++i) {
        store_row(query_row(p.dq, p.dq_strides, call.element, s, head, i),
                  t.dq_rows(s, head, 0) + static_cast<i64>(i) * padded_dim, call.element, p.head_dim, scale_of(p));
      }
    }
  }
}

void main_task(const EngineCall& call, i64 task, void* base) {
  const Params& p = *call.params;
  [[maybe_unused]] FlushDenormals flush(has_normal_factors(p));
  MainScratch t(call, static_cast<real*>(base));
  i32 split = static_cast<i32>(task % p.num_splits), head_kv = static_cast<i32>(task / p.num_splits % p.heads_kv);
  // With pages one task handles all sequences, because they may share pages
  i32 begin = static_cast<i32>(task / p.num_splits / p.heads_kv), end = p.block_table != nullptr ? p.batch : begin + 1;
  for (i32 b = begin; b < end; ++b) sequence_gradients(call, t, find_sequence(call, b), head_kv, split);
}

EnginePass main_pass(const EngineCall& call) {
  const Params& p = *call.params;
  i64 sequences = p.block_table != nullptr ? min_of(p.batch, 1) : p.batch;
  bool is_needed = p.dq != nullptr || p.dk != nullptr || p.dv != nullptr;
  return {is_needed ? sequences * p.heads_kv * p.num_splits : 0, MainScratch(call, nullptr).tile.scratch.num_bytes(),
          main_task};
}

// Sum of the partial dQ of the splits: a task is one head of one sequence

void reduce_task(const EngineCall& call, i64 task, void* base) {
  real* row = static_cast<real*>(base);
  const Params& p = *call.params;
  i32 head = static_cast<i32>(task % p.heads), padded_dim = padded(p.head_dim);
  Sequence s = find_sequence(call, static_cast<i32>(task / p.heads));
  for (i32 i = 0; i < s.span.seqlen_q; ++i) {
    const real* partial = reals(p.partial_out) + make_query(p, s, head, i).lse_idx * padded_dim;
    for (i32 c = 0; c < padded_dim; c += kLanes) {
      vf sum = load(partial + c);
      for (i32 split = 1; split < p.num_splits; ++split) sum += load(partial + split * p.lse_size * padded_dim + c);
      store(row + c, sum);
    }
    store_row(query_row(p.dq, p.dq_strides, call.element, s, head, i), row, call.element, p.head_dim, scale_of(p));
  }
}

EnginePass reduce_pass(const EngineCall& call) {
  const Params& p = *call.params;
  bool is_needed = p.dq != nullptr && p.num_splits > 1;
  return {is_needed ? static_cast<i64>(p.batch) * p.heads : 0, padded(p.head_dim) * static_cast<i64>(sizeof(real)),
          reduce_task};
}

// dbias: a task is a tile of it, summed over the axes that the bias is broadcast along

struct BiasScratch {
  BackwardTile tile;
  real *sums, *errors;  // sums, and their accumulated rounding errors

  BiasScratch(const EngineCall& call, real* base) : tile(call, base) {
    sums = tile.scratch.take(size());
    errors = tile.scratch.take(size());
  }

  i64 size() const { return static_cast<i64>(tile.plan.block_m) * tile.plan.block_n; }

  // Gradients of all heads and batches may add up to one element and cancel: keep the rounding error (Knuth's TwoSum)
  FT_INLINE void add(i64 at, vf x) {
    vf old = load(sums + at), sum = old + x, added = sum - old;
    store(sums + at, sum);
    store(errors + at, load(errors + at) + ((old - (sum - added)) + (x - added)));
  }
};

void bias_task(const EngineCall& call, i64 task, void* base) {
  const Params& p = *call.params;
  [[maybe_unused]] FlushDenormals flush(has_normal_factors(p));
  BiasScratch t(call, static_cast<real*>(base));
  BackwardTile& tile = t.tile;
  i32 block_m = tile.plan.block_m, block_n = tile.plan.block_n;
  bool has_batch = p.bias_sizes[0] != 1, has_heads = p.bias_sizes[1] != 1, has_rows = p.bias_sizes[2] != 1,
       has_columns = p.bias_sizes[3] != 1;
  i64 n_blocks = ceil_div(p.bias_sizes[3], block_n), m_blocks = ceil_div(p.bias_sizes[2], block_m);
  i32 own_j = static_cast<i32>(task % n_blocks) * block_n,
      own_i = static_cast<i32>(task / n_blocks % m_blocks) * block_m;
  i32 own_head = static_cast<i32>(task / n_blocks / m_blocks % p.bias_sizes[1]);
  i32 own_batch = static_cast<i32>(task / n_blocks / m_blocks / p.bias_sizes[1]);
  fill(t.sums, t.size(), 0.0f);
  fill(t.errors, t.size(), 0.0f);

  for (i32 b = has_batch ? own_batch : 0; b < (has_batch ? own_batch + 1 : p.batch); ++b) {
    Sequence s = find_sequence(call, b);
    i32 j_end = has_columns ? min_of(own_j + block_n, s.span.seqlen_k) : s.span.seqlen_k;
    for (i32 head = has_heads ? own_head : 0; head < (has_heads ? own_head + 1 : p.heads); ++head) {
      for (i32 j = own_j; j < j_end; j += block_n) {
        i32 count = min_of(block_n, s.span.seqlen_k - j);
        Range visible = query_range(p, s, j, j + count);
        i32 i_end = has_rows ? min_of(own_i + block_m, visible.end) : visible.end;
        i32 i_begin = has_rows ? own_i : round_down(visible.begin, block_m);
        if (i_begin < i_end) tile.load_keys(s, head / (p.heads / p.heads_kv), j, count);
        for (i32 i = i_begin; i < i_end; i += block_m) {
          tile.load_queries(s, head, i, min_of(block_m, s.span.seqlen_q - i));
          tile.score_gradients(s, j, count, true);
          // Rows that share an element are summed first: a sum of partial sums rounds less
          i32 num_shared = has_rows ? 1 : tile.num_rows;
          for (i32 r = 0; r < tile.num_rows; r += num_shared) {
            for (i32 c = 0; c < count; c += kLanes) {
              vf sum = {};
              for (i32 n = r; n < r + num_shared; ++n) sum += load(tile.ds + static_cast<i64>(n) * block_n + c);
              t.add(static_cast<i64>(has_rows ? r : 0) * block_n + c, sum);
            }
          }
        }
      }
    }
  }

  i64 at = (static_cast<i64>(own_batch) * p.bias_sizes[1] + own_head) * p.bias_sizes[2] * p.bias_sizes[3];
  for (i32 r = 0; r < (has_rows ? min_of<i64>(block_m, p.bias_sizes[2] - own_i) : 1); ++r) {
    real *sums = t.sums + static_cast<i64>(r) * block_n, *errors = t.errors + static_cast<i64>(r) * block_n;
    for (i32 c = 0; c < block_n; ++c) errors[c] = errors[c] == errors[c] ? errors[c] : 0.0f;  // NaN for an infinite sum
    if (has_columns) {
      for (i32 c = 0; c < block_n; ++c) sums[c] += errors[c];
    } else {
      double all = 0.0;
      for (i32 c = 0; c < block_n; ++c) all += static_cast<double>(sums[c]) + errors[c];
      sums[0] = static_cast<real>(all);
    }
    i32 columns = has_columns ? static_cast<i32>(min_of<i64>(block_n, p.bias_sizes[3] - own_j)) : 1;
    i64 element = at + (own_i + r) * p.bias_sizes[3] + own_j;
    store_row(static_cast<char*>(p.dbias) + element * bytes_of(call.bias_element), sums, call.bias_element, columns,
              1.0f);
  }
}

EnginePass bias_pass(const EngineCall& call) {
  const Params& p = *call.params;
  BiasScratch t(call, nullptr);
  i64 tiles = p.bias_sizes[0] * p.bias_sizes[1] * ceil_div(p.bias_sizes[2], t.tile.plan.block_m) *
              ceil_div(p.bias_sizes[3], t.tile.plan.block_n);
  return {p.dbias == nullptr ? 0 : tiles, t.tile.scratch.num_bytes(), bias_task};
}

// dsinks: a task is a head

void sinks_task(const EngineCall& call, i64 task, void*) {
  const Params& p = *call.params;
  i32 head = static_cast<i32>(task);
  real sink = in_score_unit(p, reals(p.sinks)[head]), factor = exponent_factor(has_natural_scores(p));
  double sum = 0.0;
  for (i32 b = 0; b < p.batch; ++b) {
    Sequence s = find_sequence(call, b);
    for (i32 i = 0; i < s.span.seqlen_q; ++i) {
      i64 lse_idx = make_query(p, s, head, i).lse_idx;
      sum -= exp2_of(min_of<real>((sink - reals(p.score_lse)[lse_idx]) * factor, 0)) * reals(p.delta)[lse_idx];
    }
  }
  reals(p.dsinks)[head] = static_cast<real>(sum);
}

EnginePass sinks_pass(const EngineCall& call) {
  return {call.params->dsinks == nullptr ? 0 : call.params->heads, 0, sinks_task};
}

}  // namespace
}  // namespace flashtile
