// Reductions in global memory that return nothing. One instruction per wrapper. Scope of every function: thread.
// (PTX ISA: red)
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Adds two floats at an 8-byte boundary, each atomically. (PTX ISA: red)
FT_DEVICE void red_add_v2(float* address, float a, float b) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(a), "f"(b) : "memory");
}

// Adds four floats at a 16-byte boundary, each atomically. (PTX ISA: red)
FT_DEVICE void red_add_v4(float* address, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

}  // namespace flashtile
