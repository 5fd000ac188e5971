// Turns dot products into scores, one row of a tile at a time: softcap, ALiBi, bias, masks. Also the dropout
// bits. Scope: thread.
#pragma once

#include "pack.h"

namespace flashtile {
namespace {

// The numbers of a call; a float64 call has them in double precision.
#if defined(FT_DOUBLE)
FT_INLINE const WideParams& wide(const Params& p) { return reinterpret_cast<const WideParams&>(p); }
FT_INLINE double scale_of(const Params& p) { return wide(p).scale; }
FT_INLINE double scale_log2_of(const Params& p) { return wide(p).scale_log2; }
FT_INLINE double softcap_of(const Params& p) { return wide(p).softcap; }
FT_INLINE double softcap_factor_of(const Params& p) { return wide(p).softcap_factor; }
FT_INLINE double keep_factor_of(const Params& p) { return wide(p).keep_factor; }
#else
FT_INLINE float scale_of(const Params& p) { return p.scale; }
FT_INLINE float scale_log2_of(const Params& p) { return p.scale_log2; }
FT_INLINE float softcap_of(const Params& p) { return p.softcap; }
FT_INLINE float softcap_factor_of(const Params& p) { return p.softcap_factor; }
FT_INLINE float keep_factor_of(const Params& p) { return p.keep_factor; }
#endif
FT_INLINE bool has_softcap(const Params& p) { return softcap_of(p) > 0; }
FT_INLINE bool has_normal_factors(const Params& p) {
  real scale = scale_of(p) < 0 ? -scale_of(p) : scale_of(p);
  return scale >= kSmallestNormal && (!has_softcap(p) || softcap_of(p) >= kSmallestNormal);
}

struct Sequence {
  i32 batch_idx;
  Span span;
  i64 offset;  // query i is at the position of key i + offset
};

Sequence find_sequence(const EngineCall& call, i32 batch_idx) {
  const Params& p = *call.params;
  Span span = call.spans == nullptr ? Span{0, p.seqlen_q, 0, p.seqlen_k} : call.spans[batch_idx];
  return {batch_idx, span, p.is_top_left ? 0 : static_cast<i64>(span.seqlen_k) - span.seqlen_q};
}

struct Range {
  i32 begin, end;
};

FT_INLINE Range clamp_range(i64 begin, i64 end, i32 length) {
  begin = max_of<i64>(0, min_of<i64>(begin, length));
  end = max_of<i64>(begin, min_of<i64>(end, length));
  return {static_cast<i32>(begin), static_cast<i32>(end)};
}

// The keys that queries [i_begin, i_end) may see under the causal mask and the window.
FT_INLINE Range key_range(const Params& p, const Sequence& s, i32 i_begin, i32 i_end) {
  i64 begin = p.window_left < 0 ? 0 : i_begin + s.offset - p.window_left;
  i64 end = p.window_right < 0 ? s.span.seqlen_k : i_end + s.offset + p.window_right;
  return clamp_range(begin, end, s.span.seqlen_k);
}

// The queries that may see any of the keys [j_begin, j_end).
FT_INLINE Range query_range(const Params& p, const Sequence& s, i32 j_begin, i32 j_end) {
  i64 begin = p.window_right < 0 ? 0 : j_begin - s.offset - p.window_right;
  i64 end = p.window_left < 0 ? s.span.seqlen_q : j_end - s.offset + p.window_left;
  return clamp_range(begin, end, s.span.seqlen_q);
}

struct Query {
  i32 head, i;
  Range keys;   // the keys that it may see
  i64 lse_idx;  // its element of lse, score_lse and delta
};

Query make_query(const Params& p, const Sequence& s, i32 head, i32 i) {
  i64 lse_idx = s.batch_idx * p.lse_batch_stride + head * p.lse_head_stride + s.span.q_start + i;
  return {head, i, key_range(p, s, i, i + 1), lse_idx};
}

FT_INLINE char* query_row(const void* tensor, const Strides& strides, Element element, const Sequence& s, i32 head,
                          i32 i) {
  i64 at = s.batch_idx * strides.batch + head * strides.head + (static_cast<i64>(s.span.q_start) + i) * strides.row;
  return static_cast<char*>(const_cast<void*>(tensor)) + at * bytes_of(element);
}

FT_INLINE char* key_row(const Params& p, const void* tensor, const Strides& strides, Element element, const Sequence& s,
                        i32 head_kv, i32 j) {
  i64 batch = s.batch_idx, row = static_cast<i64>(s.span.k_start) + j;
  if (p.block_table != nullptr) {
    // Another thread may have written the table since it was checked: read it once and clamp
    i32 page = __atomic_load_n(p.block_table + s.batch_idx * p.table_stride + row / p.page_size, __ATOMIC_RELAXED);
    batch = max_of(0, min_of(page, p.num_pages - 1));
    row %= p.page_size;
  }
  return static_cast<char*>(const_cast<void*>(tensor)) +
         (batch * strides.batch + head_kv * strides.head + row * strides.row) * bytes_of(element);
}

// Scores are in base 2, so that exponents need no product. With a bias they are natural: a finite bias may reach the
// largest number, and its product with log2(e) would overflow.
FT_INLINE bool has_natural_scores(const Params& p) { return p.bias != nullptr; }

// The factor that turns differences of scores into exponents of 2.
FT_INLINE constexpr real exponent_factor(bool is_natural) { return is_natural ? kLog2e : 1.0f; }

// A natural number in the unit of the scores. What is finite stays finite.
FT_INLINE real in_score_unit(const Params& p, real x) {
  if (has_natural_scores(p) || x == -kInfinity || x == kInfinity) return x;
  return max_of(-kLargest, min_of(kLargest, x * kLog2e));
}

// In float64 scale / softcap may be subnormal, so scores are divided by the softcap one by one. In float32 no softcap
// comes here that is so large (plans/params.py: kernel_softcap).
constexpr bool kDividesBySoftcap = sizeof(real) == sizeof(double);

// The factor of a dot product: it gives the score, or the argument of the softcap's tanh (up to the softcap). Q itself
// is not scaled, because the rounding errors of a scaled Q would add up over head_dim.
FT_INLINE real dot_factor(const Params& p) {
  if (has_softcap(p)) return kDividesBySoftcap ? scale_of(p) : softcap_factor_of(p);
  return has_natural_scores(p) ? scale_of(p) : scale_log2_of(p);
}

// Turns dot products times dot_factor into scores, in place; -inf where the query does not see the key. `s` is a row of
// a tile whose first column is key j_begin; only `columns` are computed. With a softcap its derivative goes to
// `softcap_grad`, unless that is null.
void modify_scores(const EngineCall& call, const Sequence& sequence, const Query& query, i32 j_begin, Range columns,
                   real* s, real* softcap_grad) {
  const Params& p = *call.params;
  if (has_softcap(p)) {
    real cap = in_score_unit(p, softcap_of(p));
    for (i32 c = columns.begin; c < columns.end; c += kLanes) {
      vf x = load(s + c), t = tanh_of(kDividesBySoftcap ? x / softcap_of(p) : x);
      store(s + c, t * cap);
      if (softcap_grad != nullptr) store(softcap_grad + c, 1.0f - t * t);
    }
  }
  Range seen{max_of(query.keys.begin - j_begin, columns.begin), min_of(query.keys.end - j_begin, columns.end)};
  if (p.alibi_slopes != nullptr) {
    real alibi = in_score_unit(p, reals(p.alibi_slopes)[sequence.batch_idx * p.alibi_batch_stride + query.head]);
    i32 position = static_cast<i32>(query.i + sequence.offset - j_begin);
    for (i32 c = seen.begin; c < seen.end; ++c)
      s[c] -= alibi * static_cast<real>(position < c ? c - position : position - c);
  }
  if (p.bias != nullptr) {
    i64 at = sequence.batch_idx * p.bias_strides[0] + query.head * p.bias_strides[1] + query.i * p.bias_strides[2] +
             j_begin * p.bias_strides[3];
    with_element(call.bias_element, [&](auto* type) {
      auto* bias = static_cast<const decltype(type)>(const_cast<void*>(p.bias)) + at;
      if (p.bias_strides[3] == 1) {
        for (i32 c = seen.begin; c < seen.end; ++c) s[c] += to_real(bias[c]);
      } else {
        for (i32 c = seen.begin; c < seen.end; ++c) s[c] += to_real(bias[c * p.bias_strides[3]]);
      }
    });
  }
  if (p.mask != nullptr) {
    const u8* mask =
        p.mask + sequence.batch_idx * p.mask_strides[0] + query.head * p.mask_strides[1] + query.i * p.mask_strides[2];
    mask += j_begin * p.mask_strides[3];
    if (p.mask_strides[3] == 1) {
      for (i32 c = seen.begin; c < seen.end; ++c) s[c] = mask[c] != 0 ? s[c] : -kInfinity;
    } else {
      for (i32 c = seen.begin; c < seen.end; ++c) s[c] = mask[c * p.mask_strides[3]] != 0 ? s[c] : -kInfinity;
    }
  }
  for (i32 c = columns.begin; c < min_of(seen.begin, columns.end); ++c) s[c] = -kInfinity;
  for (i32 c = max_of(seen.end, columns.begin); c < columns.end; ++c) s[c] = -kInfinity;
}

FT_INLINE bool has_score_options(const Params& p) {
  return has_softcap(p) || p.alibi_slopes != nullptr || p.bias != nullptr || p.mask != nullptr;
}

constexpr i32 kDropoutGroup = 8;  // consecutive keys that share one Philox call

// 0 or `kept` for `columns` of a row of a tile (bounds are multiples of 4). The bits are in docs/semantics.md.
void keep_factors(const Params& p, const Sequence& sequence, const Query& query, i32 j_begin, Range columns, real kept,
                  real* factors) {
  constexpr i32 kGroups = 16;  // computed together, so that the compiler vectorises the loops
  u64 seed = static_cast<u64>(p.rng_state[0]);
  u32 batch_head = p.first_head + static_cast<u32>(sequence.batch_idx) * p.total_heads + static_cast<u32>(query.head),
      offset = static_cast<u32>(p.rng_state[1]);
  i32 end = (columns.end + kDropoutGroup - 1) / kDropoutGroup;
  for (i32 first = columns.begin / kDropoutGroup; first < end; first += kGroups) {
    u32 w[4][kGroups], key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
    for (i32 g = 0; g < kGroups; ++g) {
      w[0][g] = p.first_key_group + static_cast<u32>(j_begin / kDropoutGroup + first + g);
      w[1][g] = p.first_query + static_cast<u32>(query.i);
      w[2][g] = batch_head;
      w[3][g] = offset;
    }
    for (i32 round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
      for (i32 g = 0; g < kGroups; ++g) {
        u64 product0 = static_cast<u64>(w[0][g]) * 0xD2511F53u, product1 = static_cast<u64>(w[2][g]) * 0xCD9E8D57u;
        w[0][g] = static_cast<u32>(product1 >> 32) ^ w[1][g] ^ key0;
        w[1][g] = static_cast<u32>(product1);
        w[2][g] = static_cast<u32>(product0 >> 32) ^ w[3][g] ^ key1;
        w[3][g] = static_cast<u32>(product0);
      }
    }
    i32 groups = min_of(kGroups, end - first);
    for (i32 g = 0; g < groups; ++g) {
      for (i32 lane = 0; lane < kDropoutGroup; ++lane) {
        u32 bits = w[lane / 2][g] >> (16 * (lane % 2)) & 0xffffu;
        factors[(first + g) * kDropoutGroup + lane] = bits < p.dropout_threshold ? 0.0f : kept;
      }
    }
  }
}

}  // namespace
}  // namespace flashtile
