// The policies of a kernel besides its Config, one per feature. A policy that is off costs nothing.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

template <bool kHasBand_, bool kHasBool_>
struct Mask {
  static constexpr bool kHasBand = kHasBand_;  // causal or window
  static constexpr bool kHasBool = kHasBool_;  // a bool mask tensor
};

struct NoBias {};
template <bool kHasSoftcap_, bool kHasAlibi_, typename BiasElement_>
struct ScoreMod {
  using BiasElement = BiasElement_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasAlibi = kHasAlibi_;
  static constexpr bool kHasBias = !kIsSame<BiasElement, NoBias>;
  static constexpr bool kChangesScores = kHasSoftcap || kHasAlibi || kHasBias;  // more than the scale
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
