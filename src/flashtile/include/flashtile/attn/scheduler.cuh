// The query tiles that a persistent block processes, and their order. Scope of every function: thread (uniform in a
// block).
//
// Tiles of one head are consecutive, so that neighbouring blocks share K and V in L2. Block b takes units b, b +
// gridDim.x, and so on. Without a band a unit is one tile. Under a band the last queries of a head may see all keys and
// the first ones almost none: a unit is then a tile of one head and the mirrored tile of the next head, so that all
// units cost the same. If every tile gets a block of its own, units stay single. With kPacksHeads a tile holds queries
// of all heads that share a KV head, and "head" means KV head.
#pragma once

#include "flashtile/attn/config.cuh"
#include "flashtile/attn/params.cuh"
#include "flashtile/core/math.cuh"

namespace flashtile {

struct TileCoord {
  i32 m_block, split, head, batch;
};

template <class Mask, bool kPacksHeads>
struct TileScheduler {
  i32 num_m_blocks, num_indices;
  bool is_paired;

  FT_DEVICE static i32 num_heads(const Params& p) { return kPacksHeads ? p.heads_kv : p.heads; }

  FT_DEVICE void init(const Params& p, i32 block_queries) {
    num_m_blocks = ceil_div(p.seqlen_q, block_queries);
    i32 num_rows = p.num_splits * num_heads(p) * p.batch;
    is_paired = Mask::kHasBand && num_m_blocks * num_rows > static_cast<i32>(gridDim.x);
    num_indices = num_m_blocks * (is_paired ? 2 * ceil_div(num_rows, 2) : num_rows);
  }

  // The index of this block's first tile, and of the one after index. A pair u has the indices 2 u and 2 u + 1. The
  // block is done when the index reaches num_indices.
  FT_DEVICE i32 first() const { return static_cast<i32>(blockIdx.x) * (is_paired ? 2 : 1); }
  FT_DEVICE i32 next(i32 index) const {
    i32 grid = static_cast<i32>(gridDim.x);
    if (!is_paired) return index + grid;
    return index % 2 == 0 ? index + 1 : index - 1 + 2 * grid;
  }

  // The tile of an index. With an odd number of heads the last head has no partner: the partner's tiles get an m_block
  // past the last query.
  FT_DEVICE TileCoord coord(const Params& p, i32 index) const {
    i32 unit = is_paired ? index / 2 : index, m_block = unit % num_m_blocks, row = unit / num_m_blocks;
    if (is_paired) {
      row = 2 * row + index % 2;
      if (index % 2 == 0) m_block = num_m_blocks - 1 - m_block;
      if (row == p.num_splits * num_heads(p) * p.batch) m_block = num_m_blocks, row = 0;
    }
    return {m_block, row % p.num_splits, row / p.num_splits % num_heads(p), row / p.num_splits / num_heads(p)};
  }
};

}  // namespace flashtile
