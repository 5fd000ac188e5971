// Loads of 8 x 8 matrices of 16-bit elements from shared memory to register fragments. Scope: warp.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Four matrices, each transposed; lane x gives the shared address of row x % 8 of matrix x / 8 as it is stored. Lane t
// gets column t / 4 of rows 2 * (t % 4) and 2 * (t % 4) + 1, the first in the low half. (PTX ISA: ldmatrix)
FT_DEVICE void ldmatrix_x4_transposed(u32 address, u32 (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

}  // namespace flashtile
