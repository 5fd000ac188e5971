// Stores of register fragments to shared memory as 8 x 8 matrices of 16-bit elements. Scope: warp.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// Four 8 x 8 matrices; lane x gives the shared address of row x % 8 of matrix x / 8. (PTX ISA: stmatrix)
FT_DEVICE void stmatrix_x4(u32 address, u32 a0, u32 a1, u32 a2, u32 a3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), "r"(a1),
               "r"(a2), "r"(a3)
               : "memory");
}

}  // namespace flashtile
