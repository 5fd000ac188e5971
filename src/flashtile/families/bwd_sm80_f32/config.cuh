// The tile of the float32 backward by mma.sync.
//
// A block owns kBlockM rows, queries or keys, and streams tiles of kBlockN rows of the other side. A warp owns kMTiles
// m16 tiles, 64 rows apart from one another: tile t of warp w has rows 64 g + 16 (w % 4) .. + 15, g = t + kMTiles *
// (w / 4).
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumWarps_, i32 kNumStages_, i32 kMinBlocks_,
          bool kOwnsQueries_, bool kIsExact_>
struct Sm80F32BwdConfig {
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumWarps = kNumWarps_;
  static constexpr i32 kNumStages = kNumStages_;  // of streamed tiles
  static constexpr i32 kMinBlocks = kMinBlocks_;
  static constexpr bool kOwnsQueries = kOwnsQueries_;
  static constexpr bool kIsExact = kIsExact_;
  static constexpr i32 kNumThreads = 32 * kNumWarps;
  static constexpr i32 kMTiles = kBlockM / (16 * kNumWarps);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kNumStages >= 2);
  static_assert(kNumWarps % 4 == 0 && kBlockM == 16 * kNumWarps * kMTiles && (kMTiles == 1 || kMTiles == 2));
  static_assert(kBlockN == 16 || kBlockN == 32 || kBlockN == 64);
};

}  // namespace flashtile
