// Which tiles of work a persistent block takes, and in which order. Scope: thread (uniform in a block).
//
// Without a band the tiles of a head follow each other, so that blocks side by side share K and V in L2. Under a band the tiles of a
// section of heads, as many as L2 holds K and V of, go from the last queries, which may see most keys, to the first.
#pragma once

#include "flashtile/attn/config.cuh"
#include "flashtile/attn/params.cuh"
#include "flashtile/core/math.cuh"

namespace flashtile {

struct TileCoord {
  i32 m_block, split, head, batch;
};

// Kept in shared memory: the mainloop has no registers for it.
template <class Mask, i32 kBlockM>
struct TileOrder {
  static constexpr i64 kSectionBytes = 32 << 20;  // about half of the L2 of an H100 or H200
  i32 num_m_blocks, num_heads, num_tiles, section;

  FT_DEVICE void init(const Params& p, i32 element_bytes) {
    num_m_blocks = ceil_div(p.seqlen_q, kBlockM);
    num_heads = p.batch * p.heads;
    section = 1;
    num_tiles = num_m_blocks * num_heads * p.num_splits;
    if constexpr (Mask::kHasBand) {
      i64 head_bytes = static_cast<i64>(p.seqlen_k) * (p.head_dim + p.head_dim_v) * element_bytes * p.heads_kv / p.heads;
      while (2 * section * head_bytes <= kSectionBytes && section < num_heads) section *= 2;
    }
  }

  // The tiles of this block: one of each round of gridDim.x. Every other round runs backwards, since what comes first is longer.
  FT_DEVICE i32 first() const { return static_cast<i32>(blockIdx.x); }
  FT_DEVICE i32 next(i32 index) const {
    i32 grid = static_cast<i32>(gridDim.x), place = index % grid;
    return index + 2 * (grid - place) - 1;
  }

  FT_DEVICE TileCoord at(const Params& p, i32 index) const {
    i32 split = index % p.num_splits;
    index /= p.num_splits;
    i32 m_block, batch_head;
    if constexpr (Mask::kHasBand) {
      i32 first = index / (section * num_m_blocks) * section;
      i32 rest = index % (section * num_m_blocks), width = min_of(section, num_heads - first);
      batch_head = first + rest % width;
      m_block = num_m_blocks - 1 - rest / width;
    } else {
      batch_head = index / num_m_blocks;
      m_block = index % num_m_blocks;
    }
    return {m_block, split, batch_head % p.heads, batch_head / p.heads};
  }
};

}  // namespace flashtile
