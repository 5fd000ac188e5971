// Loads from global memory that other blocks have written during this launch. Scope of every function: thread.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Loads 16 bytes from L2: the line may be out of date in L1. (PTX ISA: ld, cache operators)
FT_DEVICE float4 load_global(const float4* from) {
  float4 found;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
               : "l"(from)
               : "memory");
  return found;
}

}  // namespace flashtile
