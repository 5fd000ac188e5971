// The tile of the mma.sync backward: sizes, warps and what each thread holds.
//
// A block owns kBlockN keys and streams tiles of kBlockM queries. kKeyWarps warps divide the keys: each owns kMTiles
// m16 tiles, 64 keys apart from one another; tile t of key warp w has keys 64 g + 16 (w % 4) .. + 15, g = t + kMTiles *
// (w / 4). kColumnWarps warps share the same keys: of S and dP each has kScoreQueries queries, of dK and dV a part of
// the columns. Of dQ a warp has kDqMTiles m16 tiles of queries and kDqColumns columns.
//   kMinBlocks   blocks that share a multiprocessor; limits the registers
//   kIsExact     the head dims are the padded ones: no column needs a check
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumWarps_, i32 kNumStages_,
          i32 kColumnWarps_, i32 kMinBlocks_, bool kIsExact_>
struct Sm80BwdConfig {
  using Element = T;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumWarps = kNumWarps_;
  static constexpr i32 kNumStages = kNumStages_;  // of Q and of dO
  static constexpr i32 kMinBlocks = kMinBlocks_;
  static constexpr bool kIsExact = kIsExact_;
  static constexpr i32 kNumThreads = 32 * kNumWarps;
  static constexpr i32 kColumnWarps = kColumnWarps_;
  static constexpr i32 kKeyWarps = kNumWarps / kColumnWarps;
  static constexpr i32 kMTiles = kBlockN / (16 * kKeyWarps);
  static constexpr i32 kScoreQueries = kBlockM / kColumnWarps;
  static constexpr i32 kColumnsK = kHeadDim / kColumnWarps, kColumnsV = kHeadDimV / kColumnWarps;
  static constexpr i32 kDqMTiles = kColumnWarps;
  static constexpr i32 kDqRowWarps = kBlockM / (16 * kDqMTiles);
  static constexpr i32 kDqColumns = kHeadDim * kDqRowWarps / kNumWarps;
  static_assert(sizeof(T) == 2 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kHeadDim <= 256 && kHeadDimV <= 256);
  static_assert(kBlockM % 32 == 0 && kBlockN % 64 == 0 && kKeyWarps % 4 == 0 && kNumStages >= 2);
  static_assert(kScoreQueries % 16 == 0 && kColumnsK % 32 == 0 && kColumnsV % 32 == 0);
  static_assert(kNumWarps % kDqRowWarps == 0 && kDqColumns % 16 == 0);
};

}  // namespace flashtile
