// Stores an accumulator fragment to global memory: by TMA through shared memory, or directly, row by row. A thread's
// row r (0 or 1) is scaled by factor[r].
#pragma once

#include "device/tile/fragment.cuh"
#include "device/tile/smem_tile.cuh"

namespace flashtile {

// Waits until the TMA stores that lane 0 has started have read shared memory. Scope: warp.
FT_DEVICE void wait_tma_store_read() {
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
  __syncwarp();
}

// Stages the warp's 16 rows in 16 bits in sTile, a 64-row tile of the warpgroup. Scope: warp.
template <typename T, i32 kCount>
FT_DEVICE void stage_rows(T* sTile, const float (&factor)[2], const float (&rO)[kCount]) {
  u32 packed[kCount / 2];
#pragma unroll
  for (i32 x = 0; x < kCount / 2; ++x) {
    packed[x] = pack_two<T>(rO[2 * x] * factor[x % 2], rO[2 * x + 1] * factor[x % 2]);
  }
  wait_tma_store_read();
  store_fragment(sTile, packed);
}

// Starts the TMA store of the warp's staged rows. row is the tensor row of the warpgroup's first row. The map's boxes
// have 16 rows; TMA drops rows and columns past the tensor's end. A box before row 0 is illegal and is skipped.
// Scope: warp.
template <i32 kSlabs, typename T>
FT_DEVICE void store_staged_rows(const T* sTile, const TensorMap& map, i32 row, i32 head, i32 batch) {
  i32 first = threadIdx.x % 128 / 32 * 16;
  if (threadIdx.x % 32 == 0 && row + first >= 0) {
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) {
      store_box(sTile + (slab * 64 + first) * 64, map, slab * 64, row + first, head, batch);
    }
    bulk_commit();
  }
}

// Stores row r as float32, 8 bytes per lane. Scope: thread.
template <i32 kCount>
FT_DEVICE void store_row_float(float* row, bool is_inside, i32 num_columns, i32 r, float factor,
                               const float (&rO)[kCount]) {
#pragma unroll
  for (i32 b = 0; b < kCount / 4; ++b) {
    i32 column = 8 * b + fragment_column();
    float2 two = make_float2(rO[4 * b + 2 * r] * factor, rO[4 * b + 2 * r + 1] * factor);
    if (is_inside && column < num_columns) *reinterpret_cast<float2*>(row + column) = two;
  }
}

// Stores row r element by element, whatever its alignment. Scope: thread.
template <typename Out, i32 kCount>
FT_DEVICE void store_row_elements(Out* row, bool is_inside, i32 num_columns, i32 r, float factor,
                                  const float (&rO)[kCount]) {
#pragma unroll
  for (i32 x = 0; x < kCount / 2; ++x) {
    i32 b = x / 2, e = x % 2, column = 8 * b + fragment_column() + e;
    if (is_inside && column < num_columns) row[column] = from_float<Out>(rO[4 * b + 2 * r + e] * factor);
  }
}

// The 8 columns from 8 * (b + lane % 4) on of row r, in 16 bits. Quads exchange words, so that each lane can store 16
// bytes. Scope: warp.
template <typename Out, i32 kCount>
FT_DEVICE uint4 packed_chunk(const float (&rO)[kCount], i32 b, i32 r, float factor) {
  u32 words[4];
#pragma unroll
  for (i32 g = 0; g < 4; ++g) {
    words[g] = pack_two<Out>(rO[4 * (b + g) + 2 * r] * factor, rO[4 * (b + g) + 2 * r + 1] * factor);
  }
  quad_transpose(words);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace flashtile
