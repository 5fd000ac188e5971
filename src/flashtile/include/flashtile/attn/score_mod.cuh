// From the dot product to the score (unit: score_unit.cuh): scale, softcap, ALiBi, bias, in this order. Scope: thread.
#pragma once

#include "flashtile/attn/score_unit.cuh"
#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/mutation.cuh"

namespace flashtile {

template <class ScoreMod>
struct Scorer {
  using BiasElement = typename ScoreMod::BiasElement;
  static constexpr bool kIsNatural = ScoreMod::kHasBias;
  float factor;             // of the dot product: scale in the unit of scores, or scale / softcap
  float cap;                // softcap
  float slope;              // ALiBi slope
  const BiasElement* bias;  // (seqlen_q, seqlen_k) of this sequence and head, by strides
  i64 bias_row_stride, bias_column_stride;
  i32 offset;

  FT_DEVICE Scorer(const Params& p, const Sequence& s, i32 head) : offset(s.offset) {
    factor = ScoreMod::kHasSoftcap ? p.softcap_factor : (kIsNatural ? p.scale : p.scale_log2);
    if constexpr (mutates(Mutation::score_base)) factor *= kLn2;
    if constexpr (ScoreMod::kHasSoftcap) cap = kIsNatural ? p.softcap : p.softcap * kLog2e;
    if constexpr (ScoreMod::kHasAlibi) {
      slope = in_score_unit(kIsNatural, p.alibi_slopes[s.batch_idx * p.alibi_batch_stride + head]);
    }
    if constexpr (ScoreMod::kHasBias) {
      bias = static_cast<const BiasElement*>(p.bias) + s.batch_idx * p.bias_strides[0] + head * p.bias_strides[1];
      bias_row_stride = p.bias_strides[2];
      bias_column_stride = p.bias_strides[3];
    }
  }

  // The score of query i and key j, both inside the sequence. Sets tanh to the softcap's tanh, which the
  // backward pass needs.
  FT_DEVICE float score(float dot, i32 i, i32 j, float& tanh) const {
    float s = score_without_bias(dot, i, j, tanh);
    if constexpr (ScoreMod::kHasBias) s += bias_of(i, j);
    return s;
  }
  FT_DEVICE float bias_of(i32 i, i32 j) const {
    if constexpr (mutates(Mutation::bias_row)) i = max_of(i - 1, 0);
    return to_float(bias[i * bias_row_stride + j * bias_column_stride]);
  }
  FT_DEVICE float score_without_bias(float dot, i32 i, i32 j, float& tanh) const {
    float s = dot * factor;
    if constexpr (ScoreMod::kHasSoftcap) {
      tanh = tanh_by_exp2(s);
      s = cap * tanh;
    }
    if constexpr (ScoreMod::kHasAlibi) {
      i32 distance = i + offset - j;
      if constexpr (mutates(Mutation::alibi_offset)) distance -= offset;
      s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return s;
  }
};

}  // namespace flashtile
