// The tile of the Hopper backward: sizes, warpgroup roles and registers per role.
//
// A block owns kBlockN keys, 64 for each consumer warpgroup, and streams tiles of kBlockM queries; one more warpgroup
// holds the producer.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumStages_, i32 kNumBuffers_,
          i32 kNumDqBuffers_, i32 kNumBiasStages_ = 2>
struct Sm90BwdConfig {
  using Element = T;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumStages = kNumStages_;        // of Q and of dO
  static constexpr i32 kNumBuffers = kNumBuffers_;      // of dS; of K and V in bwd_sm90_dbias_kernel
  static constexpr i32 kNumDqBuffers = kNumDqBuffers_;  // 64 x 64 parts of dQ on their way to global memory
  static constexpr i32 kNumBiasStages = kNumBiasStages_;
  static constexpr i32 kNumConsumers = kBlockN / 64;
  static constexpr bool kHasOneProduct = false;  // a consumer has both S^T and dP^T
  static constexpr i32 kNumThreads = 128 * (kNumConsumers + 1);
  // Registers per thread that setmaxnreg assigns, out of 65536 per multiprocessor
  static constexpr i32 kProducerRegisters = 24;
  static constexpr i32 kConsumerRegisters = 240;
  // Tiles are slabs of 64 columns; the last slab may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsK = kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * kSlabsV;
  static constexpr i32 kElementsQ = kBlockM * 64 * kSlabsQK;
  static constexpr i32 kElementsdO = kBlockM * 64 * kSlabsV;
  static constexpr i32 kElementsdS = kBlockN * kBlockM;
  // How the consumers share dQ: each takes 64 queries or one slab of columns, or else they take turns, tile by tile
  static constexpr bool kSplitsDqRows = kBlockM == 128;
  static constexpr bool kSplitsDqColumns = kBlockM == 64 && kSlabsQK == 2;
  static_assert(sizeof(T) == 2 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kHeadDim <= 128);
  static_assert((kBlockM == 64 || (kBlockM == 128 && kSlabsQK == 1)) && kBlockN == 128 && kHeadDimV <= 128);
  // A tile is released only after the next one has arrived
  static_assert(kNumStages >= 2);
};

}  // namespace flashtile
