// The barrier of all threads of a block, for warps that meet there from different places of the code. PTX allows that:
// only the threads of one warp must execute the same instruction. synccheck expects one instruction for the block,
// unless the barrier counts its threads. Builds for it define FT_COUNTED_BARRIER. (PTX ISA: bar)
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Scope: block.
FT_DEVICE void sync_block() {
#ifdef FT_COUNTED_BARRIER
  asm volatile("bar.sync 0, %0;" ::"r"(blockDim.x) : "memory");
#else
  __syncthreads();
#endif
}

}  // namespace flashtile
