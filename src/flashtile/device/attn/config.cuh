// The policies of a kernel besides its Config, one per feature. A policy that is off costs nothing.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <bool kHasBand_, bool kHasBool_>
struct Mask {
  static constexpr bool kHasBand = kHasBand_;  // causal or window
  static constexpr bool kHasBool = kHasBool_;  // a bool mask tensor
};

struct NoBias {};
// A function of the score derives from this; score.cuh says what else it gives.
template <bool kIsNatural_, bool kHasDerivative_>
struct ScoreFunction {
  static constexpr bool kIsNatural = kIsNatural_;          // its scores are natural, else base 2 (score_unit.cuh)
  static constexpr bool kHasDerivative = kHasDerivative_;  // which is not 1 everywhere
};
struct NoFunction : ScoreFunction<false, false> {
  struct Row {};
};
template <bool kHasSoftcap_, bool kHasAlibi_, typename BiasElement_, class Function_ = NoFunction>
struct ScoreMod {
  using Function = Function_;
  using BiasElement = BiasElement_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasAlibi = kHasAlibi_;
  static constexpr bool kHasBias = !kIsSame<BiasElement, NoBias>;
  static constexpr bool kHasFunction = !kIsSame<Function, NoFunction>;
  static constexpr i32 kNumOptions = kHasSoftcap + kHasAlibi + kHasBias + kHasFunction;
  static constexpr bool kChangesScores = kNumOptions > 0;               // more than the scale
  static constexpr bool kIsNatural = kHasBias || Function::kIsNatural;  // the unit of scores (score_unit.cuh)
  static constexpr bool kHasDerivative = kHasSoftcap || Function::kHasDerivative;  // which is not the scale alone
};

template <bool kIsOn_>
struct Dropout {
  static constexpr bool kIsOn = kIsOn_;
};

template <bool kHasLengths_>
struct SeqInfo {
  static constexpr bool kHasLengths = kHasLengths_;  // cu_seqlens, seqused_k or leftpad_k
};

template <bool kIsPaged_>
struct KvSource {
  static constexpr bool kIsPaged = kIsPaged_;
};

template <bool kIsAligned16_>
struct Load {
  // Every row of every tensor starts on a 16-byte boundary and is a multiple of 16 bytes long
  static constexpr bool kIsAligned16 = kIsAligned16_;
};

}  // namespace flashtile
