// Barriers that warps of a block reach in different places of the code. PTX allows that: only the threads of one warp
// must execute the same instruction. synccheck expects one instruction for all warps. Builds for it define
// FT_ONE_BARRIER: there all warps meet in one place. (PTX ISA: bar)
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

#ifdef FT_ONE_BARRIER
constexpr bool kHasOneBarrier = true;
#else
constexpr bool kHasOneBarrier = false;
#endif

}  // namespace flashtile
