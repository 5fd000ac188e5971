// The tile of the Hopper decode kernel: 64 rows, one consumer warpgroup, two producer warps.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockN_, i32 kNumStages_, i32 kNumBlocks_,
          i32 kFewUnits_>
struct Sm90DecodeConfig {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = 64;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumStages = kNumStages_;  // of K and of V
  static constexpr i32 kNumBlocks = kNumBlocks_;  // per multiprocessor
  static constexpr i32 kFewUnits = kFewUnits_;    // key tiles of a block: with fewer one block for each multiprocessor
  static constexpr bool kPacksHeads = true;
  static constexpr i32 kNumConsumers = 1;
  static constexpr i32 kProducerWarps = 2;
  static constexpr i32 kNumThreads = 128 + 32 * kProducerWarps;
  // Tiles are slabs of 64 columns; the last slab may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsQ = 64 * 64 * kSlabsQK;
  static constexpr i32 kElementsK = kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * kSlabsV;
  static_assert(sizeof(T) == 2 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0 && kBlockN % 16 == 0);
};

}  // namespace flashtile
