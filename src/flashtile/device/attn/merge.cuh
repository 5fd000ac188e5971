// The end of a row: the sink joins the sum, O is normalised, and lse is stored. If the keys are split over blocks, each
// split stores its maximum and its sum instead, and fwd_combine_kernel merges them.
//
// A split stores two numbers, not its lse: near 300 a float32 lse has no digits left for the difference of two, while
// maxima are exact. The "maximum" is what the row's exponents were lowered by. It may lag behind the largest score, by
// as much as the kernel's rescale threshold (attn/online_softmax.cuh). Maxima and sinks are in the unit of scores.
#pragma once

#include "device/attn/online_softmax.cuh"
#include "device/attn/params.cuh"
#include "device/attn/score_unit.cuh"
#include "device/core/math.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

// A row after its last key: m and l with the sink, and the factor alpha that brings O to the new m.
struct RowStats {
  float m, l, alpha;

  // What normalises O: 0 for a fully masked row. Scope: thread.
  FT_DEVICE float norm() const {
    if constexpr (mutates(Mutation::empty_row)) return alpha / l;
    return l == 0.0f ? 0.0f : alpha / l;
  }
};

// Lets the sink (-inf for none) join a row with maximum m and sum l; reduce(l) adds l up over the lanes that share the
// row. For a split pass no sink and do not normalise: the combination does both, once. Scope: warp.
template <bool kIsNatural, class Reduce>
FT_DEVICE RowStats join_sink(float m, float l, float sink, Reduce reduce) {
  float m_new = fmaxf(m, sink);
  float shift = shift_of(m_new);
  constexpr float kFactor = exponent_factor(kIsNatural);
  float alpha = exp_difference(m, shift, kFactor);
  l = reduce(l) * alpha + exp_difference(sink, shift, kFactor);
  if constexpr (mutates(Mutation::sink_twice)) l += exp_difference(sink, shift, kFactor);
  return {m_new, l, alpha};
}

// The natural logarithm of l * 2^m, or of l * e^m. Scope: thread.
FT_DEVICE float lse_of(bool is_natural, float m, float l) {
  float log2_l = log2_approx(l);
  if constexpr (mutates(Mutation::lse_base)) return m + log2_l;
  return is_natural ? m + log2_l * kLn2 : (m + log2_l) * kLn2;
}

// The m and l of one row of one split. Scope: thread.
FT_DEVICE float2& partial_stats(const Params& p, i64 part) { return reinterpret_cast<float2*>(p.partial_stats)[part]; }

// Stores m and l of a row: as partial_stats[part] if the keys are split, else as lse[stat]. Scope: thread.
template <bool kIsNatural>
FT_DEVICE void store_stats(const Params& p, bool is_split, i64 part, i64 stat, float m, float l) {
  if (is_split) {
    partial_stats(p, part) = make_float2(m, l);
  } else {
    p.lse[stat] = lse_of(kIsNatural, m, l);
  }
}

}  // namespace flashtile
