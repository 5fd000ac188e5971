// From scores and dP to P and dS in a fragment (tile/fragment.cuh). Scope of every function: thread, with dropout warp.
//
// ScoreGradient   rows are keys, the kBlockM columns queries: S^T and dP^T in, P^T and dS^T out, in the operand's type
//                 T. A thread's rows are fragment_row() and the 8th after it of the 64 keys from j_begin on.
// QueryGradient   rows are queries, the kBlockN columns keys: S and dP in, dS out in place of dP. A thread's rows are
//                 lane / 4 and the 8th after it of the 16 queries from i_begin on.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/dropout.cuh"
#include "device/attn/mask.cuh"
#include "device/attn/score.cuh"
#include "device/core/mutation.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

// What kCount floats become in type T: two 16-bit elements share a register, floats stay as they are.
template <typename T, i32 kCount>
struct Packed {
  using Type = u32[kCount / 2];
  FT_DEVICE static void set_two(Type& packed, i32 pair, float first, float second) {
    packed[pair] = pack_two<T>(first, second);
  }
};
template <i32 kCount>
struct Packed<float, kCount> {
  using Type = float[kCount];
  FT_DEVICE static void set_two(Type& packed, i32 pair, float first, float second) {
    packed[2 * pair] = first;
    packed[2 * pair + 1] = second;
  }
};

template <typename T, class Mask, class ScoreMod, class Dropout, i32 kBlockM>
struct ScoreGradient {
  static constexpr i32 kScores = kBlockM / 2;  // registers per thread
  using Scores = float[kScores];
  using Pairs = Packed<T, kScores>;
  using Operand = typename Pairs::Type;

  // The columns [begin, end) whose queries see key j, before a bool mask. The first column is query i.
  FT_DEVICE static Range seen_columns(const Params& p, const Sequence& s, i32 i, i32 j) {
    Range seen = query_range<Mask>(p, s, j, j + 1);
    if constexpr (mutates(Mutation::bwd_sm80_mask_offset)) seen.begin -= Mask::kHasBand ? 1 : 0;
    return j < s.seqlen_k ? Range{seen.begin - i, seen.end - i} : Range{0, 0};
  }

  // Without options. P = 2^(S * scale_log2 - lse), at most 1: a large lse may be rounded. With kIsMasked it is 0 where
  // a query does not see the key. Queries past the last one have Q and dO of zeros and add nothing.
  template <bool kIsMasked>
  FT_DEVICE static void plain(const Params& p, const Sequence& s, i32 i_begin, i32 j_begin, const float* sLse,
                              const float* sDelta, const Scores& rS, const Scores& rdP, Operand& packed_p,
                              Operand& packed_ds) {
    Range seen[2];
#pragma unroll
    for (i32 r = 0; r < 2 && kIsMasked; ++r) {
      seen[r] = seen_columns(p, s, i_begin + fragment_column(), j_begin + fragment_row() + 8 * r);
    }
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      float2 lse = *reinterpret_cast<const float2*>(sLse + 8 * b + fragment_column());
      float2 delta = *reinterpret_cast<const float2*>(sDelta + 8 * b + fragment_column());
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float prob[2], ds[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e, column = 8 * b + e;
          float exponent = min_with_nan(fmaf(rS[x], p.scale_log2, -(e == 0 ? lse.x : lse.y)), 0.0f);
          if constexpr (kIsMasked) exponent = column >= seen[r].begin && column < seen[r].end ? exponent : -infinity();
          prob[e] = exp2_approx(exponent);
          ds[e] = prob[e] * (rdP[x] - (e == 0 ? delta.x : delta.y));
        }
        Pairs::set_two(packed_p, 2 * b + r, prob[0], prob[1]);
        Pairs::set_two(packed_ds, 2 * b + r, ds[0], ds[1]);
      }
    }
  }

  // With options: scores need their derivative, dropout the same bits twice. P lacks the keep factor.
  FT_DEVICE static void with_options(const Params& p, const Sequence& s, i32 head, i32 i_begin, i32 j_begin,
                                     const float* sLse, const float* sDelta, const Scores& rS, const Scores& rdP,
                                     Operand& packed_p, Operand& packed_ds) {
    Score<ScoreMod> scores(p, s, head);
    i32 i_first = i_begin + fragment_column(), j_first = j_begin + fragment_row();
    TransposedDropout<Dropout, kBlockM> dropout(p, s, head, i_begin, j_begin);
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      float2 lse = *reinterpret_cast<const float2*>(sLse + 8 * b + fragment_column());
      float2 delta = *reinterpret_cast<const float2*>(sDelta + 8 * b + fragment_column());
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        // Keeps ptxas from loading the bias of all columns at once
        __syncwarp();
        Range seen = seen_columns(p, s, i_first, j_first + 8 * r);
        float prob[2], ds[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 column = 8 * b + e, x = 4 * b + 2 * r + e, i = i_first + column, j = j_first + 8 * r;
          bool is_kept = column >= seen.begin && column < seen.end && i < s.seqlen_q;
          if constexpr (Mask::kHasBool) is_kept = is_kept && is_seen<Mask>(p, s, head, i, j);
          typename Score<ScoreMod>::Kept kept{};
          float dp = rdP[x] * keep_factor<Dropout>(p);
          float score = is_kept ? scores.score(rS[x], i, j, kept) : -infinity();
          float full = probability(score, e == 0 ? lse.x : lse.y, exponent_factor(ScoreMod::kIsNatural));
          bool is_drawn = dropout.is_kept(b, e, r);
          prob[e] = is_drawn ? full : 0.0f;
          ds[e] = full * ((is_drawn ? dp : 0.0f) - (e == 0 ? delta.x : delta.y));
          if constexpr (!mutates(Mutation::bwd_sm80_softcap))
            if constexpr (ScoreMod::kHasDerivative) ds[e] *= scores.gradient(kept);
        }
        Pairs::set_two(packed_p, 2 * b + r, prob[0], prob[1]);
        Pairs::set_two(packed_ds, 2 * b + r, ds[0], ds[1]);
      }
    }
  }
};

template <class Mask, class ScoreMod, class Dropout, i32 kBlockN>
struct QueryGradient {
  static constexpr i32 kScores = kBlockN / 2;  // registers per thread
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;

  // Keys are those from j_begin on; sLse and sDelta belong to the 16 queries. Without options kIsMasked says whether
  // queries may not see keys of the tile. Without kIsOfDot dS is the gradient of the bias.
  template <bool kIsOfDot, bool kIsMasked>
  FT_DEVICE static void differentiate(const Params& p, const Sequence& s, i32 head, i32 i_begin, i32 j_begin,
                                      const float* sLse, const float* sDelta, const float (&rS)[kScores],
                                      float (&rdP)[kScores]) {
    Score<ScoreMod> scores(p, s, head);
    i32 j_first = j_begin + fragment_column();
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 row = static_cast<i32>(threadIdx.x % 32 / 4) + 8 * r, i = i_begin + row;
      float lse = sLse[row], delta = sDelta[row];
      if constexpr (Dropout::kIsOn) drop_fragment_row(DropoutBits(p, s, head), i, j_begin, r, rdP);
      Range seen = key_range<Mask>(p, s, i, i + 1);
      if constexpr (mutates(Mutation::bwd_sm80_wide_dq_mask)) seen.end += Mask::kHasBand ? 1 : 0;
      if constexpr (mutates(Mutation::bwd_sm80_f32_mask_offset)) seen.end += Mask::kHasBand ? 1 : 0;
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e, j = j_first + 8 * b + e;
          bool is_kept = j >= seen.begin && j < seen.end;
          float prob;
          typename Score<ScoreMod>::Kept kept{};
          if constexpr (kHasOptions) {
            is_kept = is_kept && i < s.seqlen_q;
            if constexpr (Mask::kHasBool) is_kept = is_kept && is_seen<Mask>(p, s, head, i, j);
            float score = is_kept ? scores.score(rS[x], i, j, kept) : -infinity();
            prob = probability(score, lse, exponent_factor(ScoreMod::kIsNatural));
          } else {
            // Keys past the last one have K and V of zeros and add nothing
            float exponent = min_with_nan(fmaf(rS[x], p.scale_log2, -lse), 0.0f);
            prob = exp2_approx(!kIsMasked || is_kept ? exponent : -infinity());
          }
          rdP[x] = prob * (rdP[x] * keep_factor<Dropout>(p) - delta);
          if constexpr (ScoreMod::kHasDerivative && kIsOfDot) rdP[x] *= scores.gradient(kept);
          if constexpr (ScoreMod::kHasFunction && !kIsOfDot) rdP[x] *= scores.bias_gradient(kept);
        }
      }
    }
  }
};

}  // namespace flashtile
