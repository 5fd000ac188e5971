// Products of one warpgroup over swizzled shared-memory tiles (tile/smem_tile.cuh). Operands are given by tile_base.
// Every function commits one wgmma group and returns while it is in flight: call wgmma_wait and pin_registers before
// using the result. Scope of every function: warpgroup.
#pragma once

#include "device/ptx/wgmma.cuh"

namespace flashtile {

// D = A B^T over kDepth columns: A is 64 rows of a tile of kRowsA rows, B has kColumns rows.
template <typename T, i32 kColumns, i32 kDepth, i32 kRowsA = 64>
FT_DEVICE void gemm_abt(float (&rD)[kColumns / 2], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < kDepth / 16; ++step) {
    i32 slab = step / 4, column = step % 4 * 2;
    Wgmma<T, kColumns>::template ss<false>(rD, tile_descriptor(a + slab * (kRowsA * 128 >> 4) + column),
                                           tile_descriptor(b + slab * (kColumns * 128 >> 4) + column), step != 0);
  }
  wgmma_commit();
}

// D = A B^T, or D += A B^T, over one slab of 64 columns.
template <typename T, i32 kColumns>
FT_DEVICE void gemm_abt_slab(float (&rD)[kColumns / 2], u32 a, u32 b, bool accumulates) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < 4; ++step) {
    Wgmma<T, kColumns>::template ss<false>(rD, tile_descriptor(a + 2 * step), tile_descriptor(b + 2 * step),
                                           accumulates || step != 0);
  }
  wgmma_commit();
}

// The same with A in registers, as a packed fragment.
template <typename T, i32 kColumns>
FT_DEVICE void gemm_abt_slab(float (&rD)[kColumns / 2], const u32 (&rA)[16], u32 b, bool accumulates) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < 4; ++step) {
    const u32* a = rA + 4 * step;
    Wgmma<T, kColumns>::template rs<false>(rD, a[0], a[1], a[2], a[3], tile_descriptor(b + 2 * step),
                                           accumulates || step != 0);
  }
  wgmma_commit();
}

// D += A B: A (64 x kDepth) in shared memory, B has kDepth rows of kColumns columns.
template <typename T, i32 kColumns, i32 kDepth>
FT_DEVICE void gemm_ab(float (&rD)[kColumns / 2], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < kDepth / 16; ++step) {
    u64 b_step = tile_descriptor(b + step * (16 * 128 >> 4));
    Wgmma<T, kColumns>::template ss<true>(rD, tile_descriptor(a + step / 4 * (64 * 128 >> 4) + step % 4 * 2), b_step,
                                          1);
  }
  wgmma_commit();
}

// The same with A in registers, as a packed accumulator fragment.
template <typename T, i32 kColumns, i32 kDepth>
FT_DEVICE void gemm_ab(float (&rD)[kColumns / 2], const u32 (&rA)[kDepth / 4], u32 b) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < kDepth / 16; ++step) {
    u64 b_step = tile_descriptor(b + step * (16 * 128 >> 4));
    const u32* a = rA + 4 * step;
    Wgmma<T, kColumns>::template rs<true>(rD, a[0], a[1], a[2], a[3], b_step, 1);
  }
  wgmma_commit();
}

// D = A^T B: A has kDepth rows of 64 columns, B has kDepth rows of kColumns columns.
template <typename T, i32 kColumns, i32 kDepth>
FT_DEVICE void gemm_atb(float (&rD)[kColumns / 2], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < kDepth / 16; ++step) {
    Wgmma<T, kColumns>::template ss<true, true>(rD, tile_descriptor(a + step * (16 * 128 >> 4)),
                                                tile_descriptor(b + step * (16 * 128 >> 4)), step != 0);
  }
  wgmma_commit();
}

}  // namespace flashtile
