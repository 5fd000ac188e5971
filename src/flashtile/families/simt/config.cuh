// The tile of a simt kernel: sizes, shared-memory strides and what each thread holds.
//
// The simt family computes with FFMA on float32 tiles in shared memory, whatever the storage type T is. A warp owns
// 4 * kRowsPerThread rows of the block. Its lanes form 4 row groups x 8 column groups; a thread holds
// kRowsPerThread x kBlockN / 8 scores.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kBlockM_, i32 kBlockN_, i32 kNumWarps_>
struct SimtConfig {
  using Element = T;                          // of q, k, v and their gradients
  using OutElement = Out;                     // of out and its gradient
  static constexpr i32 kHeadDim = kHeadDim_;  // head_dim and head_dim_v, padded
  static constexpr i32 kBlockM = kBlockM_;    // rows that the block owns
  static constexpr i32 kBlockN = kBlockN_;    // rows of a streamed tile
  static constexpr i32 kNumWarps = kNumWarps_;
  static constexpr i32 kNumThreads = 32 * kNumWarps;
  static constexpr i32 kRowsPerThread = kBlockM / (4 * kNumWarps);
  static constexpr i32 kColsPerThread = kBlockN / 8;
  static constexpr i32 kVectorsPerThread = kHeadDim / 32;  // float4 of an output row
  // A row stride of 4 mod 32 floats puts 8 consecutive rows on different banks
  static constexpr i32 kRowStride = kHeadDim + 4;
  // A row stride of 8 mod 32 floats puts the 4 row groups of 8 lanes on different banks
  static constexpr i32 kScoreStride = kBlockN + 8;
  static_assert(kHeadDim % 32 == 0 && kBlockN % 8 == 0 && kBlockM % (4 * kNumWarps) == 0);
};

}  // namespace flashtile
