// One product on one warpgroup, operands by TMA, so that each descriptor and transpose bit is seen to mean what the
// kernels take it for.
#pragma once

#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

struct ProofParams {
  TensorMap a_map, b_map;
  float* d;  // (64, kColumns)
};

// kIsTransposed: A (64, 64 kSlabs) from registers times B (64 kSlabs, kColumns), as P V. Else A times B^T, B (kColumns,
// 64 kSlabs), as Q K^T.
template <typename T, i32 kColumns, i32 kSlabs, bool kIsTransposed>
__global__ void __launch_bounds__(128, 1) wgmma_proof_kernel(const FT_GRID_CONSTANT ProofParams p) {
  constexpr i32 kDepth = 64 * kSlabs;
  constexpr i32 kRowsB = kIsTransposed ? kDepth : kColumns, kSlabsB = kIsTransposed ? (kColumns + 63) / 64 : kSlabs;
  extern __shared__ __align__(1024) char shared_bytes[];
  T* sA = reinterpret_cast<T*>(shared_bytes);
  T* sB = sA + 64 * kDepth;
  u64& full = *reinterpret_cast<u64*>(sB + kRowsB * 64 * kSlabsB);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, (64 * kDepth + kRowsB * 64 * kSlabsB) * 2);
    for (i32 slab = 0; slab < kSlabs; ++slab) load_box(sA + slab * 64 * 64, p.a_map, full, slab * 64, 0, 0, 0);
    for (i32 slab = 0; slab < kSlabsB; ++slab) load_box(sB + slab * kRowsB * 64, p.b_map, full, slab * 64, 0, 0, 0);
  }
  __syncthreads();
  mbarrier_wait(full, 0);
  float rD[kColumns / 2];
  u32 a = tile_base(sA, 64 * 128), b = tile_base(sB, kRowsB * 128);
  u32 rA[kDepth / 4];
  // The A fragment by hand: row r, 16-byte piece c of a slab lies at piece c ^ (r % 8)
  for (i32 step = 0; step < kDepth / 16; ++step) {
    for (i32 x = 0; x < 4; ++x) {
      i32 row = fragment_row() + 8 * (x % 2), column = 16 * step + 8 * (x / 2) + fragment_column();
      i32 piece = column % 64 / 8 ^ row % 8;
      rA[4 * step + x] = *reinterpret_cast<u32*>(sA + column / 64 * 64 * 64 + row * 64 + piece * 8 + column % 8);
    }
  }
  wgmma_fence();
#pragma unroll
  for (i32 step = 0; step < kDepth / 16; ++step) {
    if constexpr (kIsTransposed) {
      const u32* f = rA + 4 * step;
      Wgmma<T, kColumns>::template rs<true>(rD, f[0], f[1], f[2], f[3], tile_descriptor(b + step * (16 * 128 >> 4)),
                                            step != 0);
    } else {
      i32 slab = step / 4, column = step % 4 * 2;
      Wgmma<T, kColumns>::template ss<false>(rD, tile_descriptor(a + slab * (64 * 128 >> 4) + column),
                                             tile_descriptor(b + slab * (kRowsB * 128 >> 4) + column), step != 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(rD);
  for (i32 x = 0; x < kColumns / 2; ++x) {
    i32 row = fragment_row() + 8 * (x / 2 % 2), column = x / 4 * 8 + fragment_column() + x % 2;
    p.d[row * kColumns + column] = rD[x];
  }
}

}  // namespace flashtile
