// Additions to global memory that return nothing. One instruction per wrapper. Scope of every function: thread.
// (PTX ISA: red)
#pragma once

#include "device/core/arch.cuh"
#include "device/core/types.cuh"

namespace flashtile {

FT_DEVICE void red_add(float* global, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

// Two consecutive floats on an 8-byte boundary, each added atomically.
FT_DEVICE void red_add_two(float* global, float x, float y) {
  if constexpr (kHasVectorReduction) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(global), "f"(x), "f"(y) : "memory");
  } else {
    red_add(global, x);
    red_add(global + 1, y);
  }
}

}  // namespace flashtile
