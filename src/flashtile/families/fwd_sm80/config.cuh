// The tile of an mma.sync forward: sizes, warps and what each thread holds.
//
// A warp owns kWarpRows of the kBlockM queries, one or two m16 tiles. Two let every K and V fragment feed twice as many
// products, which halves the traffic of shared memory.
//   kMinBlocks         blocks that share a multiprocessor; limits the registers
//   kKeptSteps         so many 16 columns of Q stay in registers; the others are read again for every key tile
//   kPacksHeads        64 rows are queries of all heads that share a KV head
//   kIsScalePositive   S may stay a dot product: its maximum is the score's
//   kIsExact           the head dims are the padded ones: no column needs a check
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumWarps_,
          i32 kNumStages_, i32 kMinBlocks_, i32 kKeptSteps_, bool kPacksHeads_, bool kIsScalePositive_, bool kIsExact_>
struct Sm80Config {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumWarps = kNumWarps_;
  static constexpr i32 kNumStages = kNumStages_;  // of K and of V
  static constexpr i32 kMinBlocks = kMinBlocks_;
  static constexpr i32 kKeptSteps = kKeptSteps_;
  static constexpr bool kPacksHeads = kPacksHeads_;
  static constexpr bool kIsScalePositive = kIsScalePositive_;
  static constexpr bool kIsExact = kIsExact_;
  static constexpr i32 kNumThreads = 32 * kNumWarps;
  static constexpr i32 kColumnWarps = 1;              // that share rows
  static constexpr i32 kNumConsumers = kBlockM / 64;  // groups of 64 rows (attn/work_item.cuh)
  static constexpr i32 kWarpRows = kBlockM / kNumWarps;
  static constexpr i32 kMTiles = kWarpRows / 16;
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0);
  static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kNumStages >= 2);
  static_assert(kWarpRows % 16 == 0 && kMTiles <= 2 && kKeptSteps <= kHeadDim / 16);
};

}  // namespace flashtile
