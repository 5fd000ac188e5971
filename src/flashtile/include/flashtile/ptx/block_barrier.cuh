// The barrier of all threads of a block, for warps that meet there from different places of the code. PTX allows that:
// only the threads of one warp must execute the same instruction. synccheck expects one instruction for the block.
// Builds for it define FT_ONE_BARRIER and call a function. (PTX ISA: bar)
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Scope: block.
#ifdef FT_ONE_BARRIER
__device__ __noinline__ void sync_block() { __syncthreads(); }
#else
FT_DEVICE void sync_block() { __syncthreads(); }
#endif

}  // namespace flashtile
