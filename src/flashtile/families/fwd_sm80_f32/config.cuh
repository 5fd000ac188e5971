// The tile of the float32 forward by mma.sync: a Sm80Config of floats. Q is read again for every key tile, and heads
// are not packed.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "families/fwd_sm80/config.cuh"

namespace flashtile {

template <i32 kHeadDim, i32 kHeadDimV, i32 kBlockM, i32 kBlockN, i32 kNumWarps, i32 kNumStages, i32 kMinBlocks,
          bool kIsScalePositive, bool kIsExact>
struct Sm80F32Config : Sm80Config<float, float, kHeadDim, kHeadDimV, kBlockM, kBlockN, kNumWarps, kNumStages,
                                  kMinBlocks, 0, false, kIsScalePositive, kIsExact> {};

}  // namespace flashtile
