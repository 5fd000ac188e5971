// The tiles of the mma.sync kernels for wide heads, whose accumulator no warp can hold alone.
//
// A block owns kBlockM rows (queries, or keys in a backward kernel) and streams tiles of kBlockN rows of the other
// side. Its warps are a grid of kRowWarps x kColumnWarps: a warp has kWarpRows rows, kWarpScores columns of the scores
// and every kColumnWarps-th 16 columns of the result, from 16 * (warp % kColumnWarps) on. P goes through shared memory.
//
// Streamed tiles pass through a ring of kNumStages slabs: kSlabColumns columns of all kBlockN rows where the head dim
// is the depth of a product, kSlabRows rows where the rows are. kRowParts slabs hold all columns of such rows.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, i32 kBlockM_, i32 kBlockN_, i32 kRowWarps_, i32 kColumnWarps_, i32 kSlabColumns_, i32 kSlabRows_,
          i32 kNumStages_, i32 kRowParts_ = 1>
struct Sm80WideTile {
  using Element = T;
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kRowWarps = kRowWarps_;
  static constexpr i32 kColumnWarps = kColumnWarps_;
  static constexpr i32 kSlabColumns = kSlabColumns_;
  static constexpr i32 kSlabRows = kSlabRows_;
  static constexpr i32 kNumStages = kNumStages_;
  static constexpr i32 kRowParts = kRowParts_;
  static constexpr i32 kNumWarps = kRowWarps * kColumnWarps;
  static constexpr i32 kNumThreads = 32 * kNumWarps;
  static constexpr i32 kWarpRows = kBlockM / kRowWarps;
  static constexpr i32 kMTiles = kWarpRows / 16;
  static constexpr i32 kWarpScores = kBlockN / kColumnWarps;
  static_assert(sizeof(T) == 2 && kWarpRows % 16 == 0 && kMTiles <= 2 && kWarpScores % 16 == 0);
  static_assert(kColumnWarps == 2 || kColumnWarps == 4);
  static_assert(kBlockN % 64 == 0 && kSlabColumns % 64 == 0 && kSlabRows % 16 == 0 && kBlockN % kSlabRows == 0);
  static_assert(kNumStages >= 2);

  // The columns of a slab of rows of width kRowDim, and the bytes of a slab that holds one of both kinds.
  template <i32 kRowDim>
  static constexpr i32 kPartColumns = kRowDim / kRowParts;
  template <i32 kRowDim>
  static constexpr i32 kSlabBytes =
      sizeof(T) * (kBlockN * kSlabColumns > kSlabRows * kPartColumns<kRowDim> ? kBlockN * kSlabColumns
                                                                              : kSlabRows * kPartColumns<kRowDim>);
};

// Forward. kPacksHeads and kIsScalePositive as in fwd_sm80/config.cuh.
template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, class Tile, bool kPacksHeads_,
          bool kIsScalePositive_>
struct Sm80WideConfig : Tile {
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr bool kPacksHeads = kPacksHeads_;
  static constexpr bool kIsScalePositive = kIsScalePositive_;
  static constexpr i32 kNumConsumers = Tile::kBlockM / 64;  // groups of 64 rows (attn/work_item.cuh)
  static constexpr i32 kSlabsK = kHeadDim / Tile::kSlabColumns;
  static constexpr i32 kSlabsV = Tile::kBlockN / Tile::kSlabRows * Tile::kRowParts;
  static constexpr i32 kKeptSteps = 0;
  static constexpr bool kIsExact = false;
  static_assert(Tile::kBlockM % 64 == 0 && kHeadDim % Tile::kSlabColumns == 0);
  static_assert(kHeadDimV % (64 * Tile::kRowParts) == 0);
};

}  // namespace flashtile
