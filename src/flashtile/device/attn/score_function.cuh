// A function of the score: what a new option of the scores is. Score (score.cuh) applies it behind all other options,
// in every kernel.
//
// It is a struct in attn/, in a header that score.cuh includes. It derives from ScoreFunction<kIsNatural,
// kHasDerivative> (config.cuh), is the last parameter of ScoreMod and gives, all static:
//
// struct Row                   what it keeps of a query; row(p, s, head, i) finds it in the sequence s
// score(p, row, x, i, j)       the new score, from x, the score so far; both natural or both base 2, as kIsNatural says
// derivative(p, row, x, i, j)  that of score() with respect to x, if kHasDerivative
//
// If scores may be natural without a bias, has_natural_scores (score_unit.cuh), which kernels without policies ask,
// must say so too. The query i and the key j are inside the sequence. What masked elements give is not used. Scope:
// thread.
#pragma once

#include "device/attn/config.cuh"
#include "device/attn/sequence.cuh"
#include "device/core/math.cuh"

namespace flashtile {

// A function in one sequence, in the unit of scores.
template <class Function, bool kIsNatural>
struct FunctionInPlace {
  using Row = typename Function::Row;
  // From the unit of scores to that of the function, and back
  static constexpr bool kIsSameUnit = kIsNatural == Function::kIsNatural;
  static_assert(kIsSameUnit || kIsNatural);
  static constexpr float kThere = kIsSameUnit ? 1.0f : kLog2e, kBack = kIsSameUnit ? 1.0f : kLn2;
  const Params& p;
  const Sequence& s;

  FT_DEVICE FunctionInPlace(const Params& p, const Sequence& s) : p(p), s(s) {}
  // i and j may be outside the sequence.
  FT_DEVICE Row row(i32 head, i32 i) const { return Function::row(p, s, head, query(i)); }
  FT_DEVICE float score(const Row& row, float x, i32 i, i32 j) const {
    return Function::score(p, row, x * kThere, query(i), key(j)) * kBack;
  }
  FT_DEVICE float derivative(const Row& row, float x, i32 i, i32 j) const {
    if constexpr (!Function::kHasDerivative) {
      return 1.0f;
    } else {
      return Function::derivative(p, row, x * kThere, query(i), key(j));
    }
  }
  FT_DEVICE i32 query(i32 i) const { return clamp(i, 0, s.seqlen_q - 1); }
  FT_DEVICE i32 key(i32 j) const { return clamp(j, 0, s.seqlen_k - 1); }
};

template <bool kIsNatural>
struct FunctionInPlace<NoFunction, kIsNatural> {
  using Row = NoFunction::Row;
  FT_DEVICE FunctionInPlace(const Params&, const Sequence&) {}
};

}  // namespace flashtile
