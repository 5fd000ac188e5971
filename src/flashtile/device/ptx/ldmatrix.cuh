// Loads of 8 x 8 matrices of 16-bit elements from shared memory into mma fragments. One instruction per wrapper. Scope
// of every function: warp.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// Four 8 x 8 matrices; lane x gives the shared address of row x % 8 of matrix x / 8. Register i gets two elements of
// matrix i: row lane / 4, columns 2 * (lane % 4) and the next. (PTX ISA: ldmatrix)
FT_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same with each matrix transposed: rows 2 * (lane % 4) and the next, column lane / 4. (PTX ISA: ldmatrix)
FT_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

}  // namespace flashtile
