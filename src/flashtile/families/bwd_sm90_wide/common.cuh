// What the two kernels of the wide Hopper backward share (bwd_sm90_dkdv.cuh, bwd_sm90_dq.cuh): includes, parameters,
// loads by TMA, and the clearing of rows past the end of a sequence.
//
// A head dim over 128 leaves no room for dQ beside dK and dV. Two kernels compute S and dP each: seven products instead
// of five, but no float32 sums of dQ in global memory, no atomics, and results that do not depend on timing.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/key_tile.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/tma.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/pipeline.cuh"
#include "device/tile/smem_tile.cuh"
#include "device/tile/wgmma_gemm.cuh"
#include "families/bwd_sm90_wide/config.cuh"

namespace flashtile {

// The maps' axes are (head_dim, rows, heads, batch); their boxes have 64 columns.
struct BwdSm90WideParams {
  Params base;
  TensorMap q_map, dout_map;             // boxes of 64 rows
  TensorMap k_map, v_map;                // boxes of 64 rows: the keys that a block owns
  TensorMap k_stream_map, v_stream_map;  // boxes of kBlockN rows of the dQ kernel
};

// Loads rows of one head, from a column on. A map has size 1 along head or batch where the tensor's stride is 0
// (broadcast or packed). Scope: thread.
template <i32 kRows, i32 kSlabs, typename T>
FT_DEVICE void load_rows(T* sTile, const TensorMap& map, const Strides& strides, u64& full, i32 row, i32 head,
                         i32 batch, i32 column = 0) {
  i32 map_head = strides.head == 0 ? 0 : head, map_batch = strides.batch == 0 ? 0 : batch;
  mbarrier_arrive_expect(full, kRows * kSlabs * 128);
#pragma unroll
  for (i32 slab = 0; slab < kSlabs; ++slab) {
    load_box(sTile + slab * kRows * 64, map, full, column + slab * 64, row, map_head, map_batch);
  }
}

// Zeros rows of a tile from row num_rows on: they belong to another sequence, and 0 * NaN is NaN. Scope: warp.
template <i32 kRows, i32 kSlabs, typename T>
FT_DEVICE void clear_tail(T* sTile, i32 num_rows) {
  if constexpr (mutates(Mutation::bwd_sm90_wide_tail)) num_rows = kRows;
  for (i32 slab = 0; slab < kSlabs; ++slab) {
    uint4* rows = reinterpret_cast<uint4*>(sTile + slab * kRows * 64);
    for (i32 x = num_rows * 8 + threadIdx.x % 32; x < kRows * 8; x += 32) rows[x] = make_uint4(0, 0, 0, 0);
  }
  fence_proxy_async();
  __syncwarp();
}

// Both halves of a packed word. Scope: thread.
template <typename T>
FT_DEVICE float2 unpack_two(u32 packed) {
  return make_float2(to_float(T{static_cast<u16>(packed)}), to_float(T{static_cast<u16>(packed >> 16)}));
}

}  // namespace flashtile
