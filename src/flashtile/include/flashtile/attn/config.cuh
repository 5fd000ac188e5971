// The policies that a kernel is instantiated with beside its Config, one for each feature. Empty ones cost nothing.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

template <bool kHasBand_, bool kHasBool_>
struct Mask {
  static constexpr bool kHasBand = kHasBand_;  // causal or window
  static constexpr bool kHasBool = kHasBool_;
};

struct NoBias {};
template <bool kHasSoftcap_, bool kHasAlibi_, typename BiasElement_>
struct ScoreMod {
  using BiasElement = BiasElement_;
  static constexpr bool kHasSoftcap = kHasSoftcap_;
  static constexpr bool kHasAlibi = kHasAlibi_;
  static constexpr bool kHasBias = !kIsSame<BiasElement, NoBias>;
};

template <bool kIsOn_>
struct Dropout {
  static constexpr bool kIsOn = kIsOn_;
};

template <bool kHasLengths_>
struct SeqInfo {
  static constexpr bool kHasLengths = kHasLengths_;  // packed sequences, seqused_k or leftpad_k
};

template <bool kIsPaged_>
struct KvSource {
  static constexpr bool kIsPaged = kIsPaged_;
};

template <bool kIsWide_>
struct Load {
  static constexpr bool kIsWide = kIsWide_;  // every row of every tensor on a 16-byte boundary
};

}  // namespace flashtile
