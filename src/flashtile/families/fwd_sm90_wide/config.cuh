// The tile of the Hopper forward for wide heads: sizes, warpgroup roles and registers per role.
//
// A block owns 64 queries. Two consumer warpgroups share the columns of O, in slabs of 64; the first computes the
// scores as well. A cluster of kClusterSize blocks owns consecutive queries of a head and loads each slab of K and V
// once.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kStagesK_, i32 kStagesV_, i32 kClusterSize_>
struct Sm90FwdWideConfig {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kStagesK = kStagesK_;
  static constexpr i32 kStagesV = kStagesV_;
  static constexpr i32 kClusterSize = kClusterSize_;
  static constexpr i32 kBlockN = 64;
  static constexpr i32 kNumThreads = 384;
  static constexpr i32 kNumConsumers = kClusterSize;  // groups of 64 rows of a query tile (attn/work_item.cuh)
  static constexpr bool kPacksHeads = false;
  static constexpr i32 kSlabsQK = kHeadDim / 64;
  static constexpr i32 kSlabsV = kHeadDimV / 64;
  static constexpr i32 kSlabsFirst = kSlabsV / 2;  // of the warpgroup that computes the scores
  // Registers per thread that setmaxnreg assigns, out of 168 for each of 384
  static constexpr i32 kProducerRegisters = 40, kConsumerRegisters = 232;
  // What FwdSm80 (fwd_sm80/fwd_sm80.cuh), whose end of a row is used here, asks for
  static constexpr bool kIsScalePositive = true, kIsExact = true;
  static constexpr i32 kMTiles = 1, kKeptSteps = 0, kNumStages = 2, kColumnWarps = 1, kWarpRows = 16;
  static_assert(sizeof(T) == 2 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  static_assert(kSlabsFirst >= 1 && kSlabsV - kSlabsFirst <= 4, "a product has at most 256 columns");
};

}  // namespace flashtile
