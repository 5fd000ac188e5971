// Tiles of 16-bit elements in shared memory, as TMA and wgmma expect them: slabs of 64 columns, each [rows][128 bytes]
// on a 1024-byte boundary. Swizzle: 16-byte chunk c of row r is stored at chunk c ^ (r % 8).
#pragma once

#include "device/ptx/stmatrix.cuh"
#include "device/ptx/sync.cuh"
#include "device/ptx/tma.cuh"

namespace flashtile {

// Starts the TMA load of a tile at (row, head, batch) and arms its full barrier. The map's boxes have num_rows of the
// tile's kRows rows. Scope: thread.
template <i32 kRows, i32 kSlabs, typename T>
FT_DEVICE void load_slabs(T* tile, const TensorMap& map, u64& full, i32 num_rows, i32 row, i32 head, i32 batch) {
  mbarrier_arrive_expect(full, num_rows * kSlabs * 128);
#pragma unroll
  for (i32 slab = 0; slab < kSlabs; ++slab) load_box(tile + slab * kRows * 64, map, full, slab * 64, row, head, batch);
}

// Stores a packed accumulator fragment as 64 rows of a tile of kRows rows. TMA may then read it; wgmma may read the
// rows of the calling warp. Scope: warp.
template <i32 kRows = 64, typename T, i32 kCount>
FT_DEVICE void store_fragment(T* tile, const u32 (&packed)[kCount]) {
  i32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  u32 first = shared_address(tile) + row * 128 + (lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (i32 step = 0; step < kCount / 4; ++step) {
    const u32* a = packed + 4 * step;
    stmatrix_x4((first ^ step % 4 * 32) + step / 4 * (kRows * 128), a[0], a[1], a[2], a[3]);
  }
  fence_proxy_async();
  __syncwarp();
}

// Loads a slab of a 64-row tile as a packed fragment. Scope: thread.
template <typename T>
FT_DEVICE void load_fragment(const T* slab, u32 (&packed)[16]) {
  i32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const u32* words = reinterpret_cast<const u32*>(slab) + row * 32 + lane % 4;
#pragma unroll
  for (i32 x = 0; x < 16; ++x) packed[x] = words[x % 2 * 8 * 32 + (x / 2 ^ row % 8) * 4];
}

// Zeros rows [first, kRows) of a tile. The caller synchronises the warpgroup. Scope: warpgroup.
template <i32 kRows, i32 kSlabs, typename T>
FT_DEVICE void clear_rows(T* tile, i32 first) {
  for (i32 slab = 0; slab < kSlabs; ++slab) {
    uint4* rows = reinterpret_cast<uint4*>(tile + slab * kRows * 64);
    for (i32 x = first * 8 + threadIdx.x % 128; x < kRows * 8; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();
}

}  // namespace flashtile
