// Products of one warp by mma.sync over swizzled tiles (tile/swizzled_tile.cuh). Accumulators are one fragment
// (tile/fragment.cuh) for each of the warp's m16 tiles. Operands in shared memory are given by this lane's address in
// them. Scope of every function: warp.
#pragma once

#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mma_sync.cuh"
#include "device/tile/swizzled_tile.cuh"

namespace flashtile {

// D = A B^T over one step of 16 columns, or D += A B^T. B has kColumns rows of kDepth columns.
template <typename T, i32 kColumns, i32 kDepth, bool kIsFirst, i32 kMTiles>
FT_DEVICE void mma_step_abt(float (&rD)[kMTiles][kColumns / 2], const u32 (&rA)[kMTiles][4], u32 b, i32 step) {
#pragma unroll
  for (i32 n = 0; n < kColumns / 16; ++n) {
    u32 rB[4];
    ldmatrix_x4(rB, SwizzledTile<kDepth>::step_address(b, n, step));
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        float* d = rD[t] + 8 * n + 4 * half;
        if constexpr (kIsFirst) {
          mma_m16n8k16<T>(d, rA[t], rB[2 * half], rB[2 * half + 1], 0.0f, 0.0f, 0.0f, 0.0f);
        } else {
          mma_m16n8k16<T>(d, rA[t], rB[2 * half], rB[2 * half + 1], d[0], d[1], d[2], d[3]);
        }
      }
    }
  }
}

// D += A B over one step of 16 rows of B; A is a packed accumulator fragment. B has rows of kColumns columns.
template <typename T, i32 kColumns, i32 kMTiles, i32 kPacked>
FT_DEVICE void mma_step_ab(float (&rD)[kMTiles][kColumns / 2], const u32 (&rA)[kMTiles][kPacked], u32 b, i32 step) {
#pragma unroll
  for (i32 n = 0; n < kColumns / 16; ++n) {
    u32 rB[4];
    ldmatrix_x4_trans(rB, SwizzledTile<kColumns>::step_address(b, step, n));
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
      const u32* packed = rA[t] + 4 * step;
      const u32 a[4] = {packed[0], packed[1], packed[2], packed[3]};
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        float* d = rD[t] + 8 * n + 4 * half;
        mma_m16n8k16<T>(d, a, rB[2 * half], rB[2 * half + 1], d[0], d[1], d[2], d[3]);
      }
    }
  }
}

}  // namespace flashtile
