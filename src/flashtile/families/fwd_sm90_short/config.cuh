// The tile of the Hopper forward for short sequences: sizes, warpgroup roles and registers per role.
//
// Each consumer warpgroup computes items of 64 queries of its own; one more warpgroup holds the producers.
//   kIsOneTile   one key tile holds all keys of a sequence: over kBlockN - kTail of them
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockN_, i32 kNumConsumers_, i32 kNumStages_,
          i32 kNumQueryStages_, bool kIsOneTile_>
struct Sm90ShortConfig {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumConsumers = kNumConsumers_;      // warpgroups
  static constexpr i32 kNumStages = kNumStages_;            // of K and V together
  static constexpr i32 kNumQueryStages = kNumQueryStages_;  // of Q
  static constexpr bool kIsOneTile = kIsOneTile_;
  static constexpr i32 kTail = kBlockN <= 64 ? kBlockN : 16;
  static constexpr i32 kNumThreads = 128 * (kNumConsumers + 1);
  // Registers per thread that setmaxnreg assigns, out of what the block was launched with
  static constexpr i32 kProducerRegisters = 32;
  static constexpr i32 kAllRegisters = 65536 / kNumThreads / 8 * 8 * (kNumConsumers + 1);
  static constexpr i32 kConsumerRegisters = (kAllRegisters - kProducerRegisters) / kNumConsumers / 8 * 8;
  // Tiles are slabs of 64 columns; the last slab may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsQ = 64 * 64 * kSlabsQK;
  static constexpr i32 kElementsK = kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * kSlabsV;
  static_assert(sizeof(T) == 2 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0);
  static_assert(kNumQueryStages % kNumConsumers == 0, "a consumer waits for every phase of its query stages");
  static_assert(kBlockN % 16 == 0 && (kIsOneTile ? kBlockN <= 208 : kBlockN <= 128));
};

}  // namespace flashtile
