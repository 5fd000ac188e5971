// Before a pass on Hopper: packs a bool mask into bits and makes the map of its tiles (attn/mask_bits.cuh).
//
// Grid:     one block per (64 queries, head, batch, 32 key tiles), of those that differ in memory
// Threads:  16 warps, each with two of the key tiles; a lane packs a row of a tile
#pragma once

#include "device/attn/mask_bits.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

constexpr i32 kMaskBitsThreads = 512;

// One bit for each of 16 bytes that is not 0. Scope: thread.
FT_DEVICE u32 nonzero_bytes(uint4 bytes) {
  const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  u32 bits = 0;
#pragma unroll
  for (i32 w = 0; w < 4; ++w) {
    u32 high = (((words[w] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[w]) & 0x80808080u;
    bits |= ((high >> 7) * 0x01020408u >> 24) << (4 * w);
  }
  return bits;
}

// Adds the bits of 16 keys to the words of their row: four to each. Scope: thread.
FT_DEVICE void add_piece(u32 bits, i32 piece, u32 (&words)[4]) {
  if constexpr (mutates(Mutation::fwd_sm90_mask_bits)) bits = (bits >> 1 & 0x5555u) | (bits & 0x5555u) << 1;
#pragma unroll
  for (i32 t = 0; t < 4; ++t) words[t] |= ((bits >> 2 * t & 3u) | (bits >> (6 + 2 * t) & 12u)) << (4 * piece);
}

// Packs the row of a tile of kBlockN contiguous keys. Rows that are not aligned come in aligned pieces too: the last
// one has up to 15 bytes past the tile, the first one as many before it, which are there. Scope: thread.
template <i32 kBlockN>
FT_DEVICE void pack_contiguous(const u8* keys, u32 (&words)[4]) {
  i32 shift = static_cast<i32>(reinterpret_cast<u64>(keys) % 16);
  const uint4* pieces = reinterpret_cast<const uint4*>(keys - shift);
  if (shift == 0) {
#pragma unroll
    for (i32 piece = 0; piece < kBlockN / 16; ++piece) add_piece(nonzero_bytes(pieces[piece]), piece, words);
    return;
  }
  u32 bits = nonzero_bytes(pieces[0]);
#pragma unroll
  for (i32 piece = 0; piece < kBlockN / 16; ++piece) {
    bits |= nonzero_bytes(pieces[piece + 1]) << 16;
    add_piece(bits >> shift & 0xffffu, piece, words);
    bits >>= 16;
  }
}

// Packs the row of a tile of num_keys keys, one by one. Scope: thread.
FT_DEVICE void pack_keys(const u8* keys, i64 stride, i32 num_keys, u32 (&words)[4]) {
  for (i32 piece = 0; 16 * piece < num_keys; ++piece) {
    u32 bits = 0;
#pragma unroll 8
    for (i32 x = 0; x < 16; ++x) {
      i32 key = 16 * piece + x;
      if (key < num_keys && keys[key * stride] != 0) bits |= 1u << x;
    }
    add_piece(bits, piece, words);
  }
}

template <i32 kBlockN>
__global__ void __launch_bounds__(kMaskBitsThreads, 2) mask_bits_kernel(const FT_GRID_CONSTANT Params p) {
  constexpr u32 kAllKeys = 0xffffffffu >> (32 - kBlockN / 4);
  MaskLayout<kBlockN> layout(p);
  i32 index = blockIdx.x, group = index % layout.num_groups;
  index /= layout.num_groups;
  i32 head = index % layout.num_heads;
  index /= layout.num_heads;
  i32 batch_idx = index % layout.num_batches, word = index / layout.num_batches;
  i32 plane = layout.plane(batch_idx, head), lane = threadIdx.x % 32;
  const u8* base = p.mask + batch_idx * p.mask_strides[0] + head * p.mask_strides[1];

  __shared__ u32 visible, full;
  if (threadIdx.x == 0) visible = 0, full = 0;
  __syncthreads();
  for (i32 x = threadIdx.x / 32; x < kMaskWord; x += kMaskBitsThreads / 32) {
    i32 n = word * kMaskWord + x, j = n * kBlockN;
    if (n >= layout.num_tiles) break;
    bool is_visible = false, is_full = true;
    for (i32 i = group * kMaskGroup + lane; i < min_of((group + 1) * kMaskGroup, layout.num_rows); i += 32) {
      const u8* keys = base + i * p.mask_strides[2] + j * p.mask_strides[3];
      u32 words[4] = {0, 0, 0, 0};
      i32 num_after = reinterpret_cast<u64>(keys) % 16 == 0 ? 0 : 15;
      if (p.mask_strides[3] == 1 && j + kBlockN + num_after <= p.seqlen_k) {
        pack_contiguous<kBlockN>(keys, words);
      } else {
        pack_keys(keys, p.mask_strides[3], min_of(p.seqlen_k - j, kBlockN), words);
      }
      reinterpret_cast<uint4*>(p.mask_bits)[layout.bits_index(plane, i, n)] =
          make_uint4(words[0], words[1], words[2], words[3]);
      is_visible |= (words[0] | words[1] | words[2] | words[3]) != 0;
      is_full &= (words[0] & words[1] & words[2] & words[3]) == kAllKeys;
    }
    if constexpr (mutates(Mutation::fwd_sm90_mask_tiles)) is_full = is_full || lane != 3;
    is_visible = __any_sync(0xffffffffu, is_visible), is_full = __all_sync(0xffffffffu, is_full);
    if (lane == 0 && is_visible) atomicOr(&visible, 1u << x);
    if (lane == 0 && is_full) atomicOr(&full, 1u << x);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    reinterpret_cast<uint2*>(p.mask_tiles)[layout.tiles_index(plane, group, word)] = make_uint2(visible, full);
}

}  // namespace flashtile
