// The tile of the mma.sync backward for wide heads: a Sm80WideTile, and which gradient a kernel computes.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "families/fwd_sm80_wide/config.cuh"

namespace flashtile {

enum class WideGradient { kDq, kDk, kDv };

// The first product is over kHeadDim, the second, that dV does not need, over kHeadDimV.
template <typename T, WideGradient kGradient_, i32 kHeadDim_, i32 kHeadDimV_, class Tile>
struct Sm80WideBwdConfig : Tile {
  static constexpr WideGradient kGradient = kGradient_;
  static constexpr bool kHasDp = kGradient != WideGradient::kDv;
  static constexpr bool kOwnsQueries = kGradient == WideGradient::kDq;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kResultDim = kHasDp ? kHeadDim : kHeadDimV;
  static constexpr i32 kSlabsS = kHeadDim / Tile::kSlabColumns;
  static constexpr i32 kSlabsDp = kHasDp ? kHeadDimV / Tile::kSlabColumns : 0;
  static constexpr i32 kSlabsRows = Tile::kBlockN / Tile::kSlabRows * Tile::kRowParts;
  static constexpr i32 kNumSlabs = kSlabsS + kSlabsDp + kSlabsRows;
  static_assert(kHeadDim % Tile::kSlabColumns == 0 && kHeadDimV % Tile::kSlabColumns == 0);
  static_assert(kResultDim % (64 * Tile::kRowParts) == 0);
};

}  // namespace flashtile
