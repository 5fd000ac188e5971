// The query tiles that a persistent block processes, and their order. Scope of every function: thread (uniform in a
// block).
//
// Tiles of one head are consecutive, so that neighbouring blocks share K and V in L2. Block b takes units b, b +
// gridDim.x, and so on. Without a band a unit is one tile. Under a band the last queries of a head may see all keys and
// the first ones almost none: a unit is then a tile of one head and the mirrored tile of the next head, so that all
// units cost the same. If every tile gets a block of its own, units stay single. With kPacksHeads a tile holds queries
// of all heads that share a KV head, and "head" means KV head.
//
// The last round of pairs may leave most blocks idle. Where that saves half a round, the middle tiles of all heads,
// each of which costs half a pair, come last and one by one.
//
// Where sequences share a bias (kSharesBias), those of one head are consecutive: one of them reads it to L2 for all.
//
// The last tile of a head may have few queries and cost less than the others. Where the number of blocks is a multiple
// of the number of tiles, a block would get the same tile of every head: with kRotates, block b takes the tile of block
// b + r in round r instead, so that all blocks get their share of the cheap ones.
#pragma once

#include "flashtile/attn/config.cuh"
#include "flashtile/attn/params.cuh"
#include "flashtile/core/math.cuh"
#include "flashtile/core/mutation.cuh"

namespace flashtile {

struct TileCoord {
  i32 m_block, split, head, batch;
};

template <class Mask, bool kPacksHeads, bool kSharesBias = false, bool kRotates = false>
struct TileScheduler {
  static_assert(!kRotates || !Mask::kHasBand, "pairs cost the same in every block");
  i32 num_m_blocks, num_indices;
  i32 num_pairs;   // units that are pairs; 0: every unit is a tile
  i32 num_middle;  // tiles of each head that are not in a pair

  FT_DEVICE static i32 num_heads(const Params& p) { return kPacksHeads ? p.heads_kv : p.heads; }

  FT_DEVICE void init(const Params& p, i32 block_queries) {
    num_m_blocks = ceil_div(p.seqlen_q, block_queries);
    i32 num_rows = p.num_splits * num_heads(p) * p.batch, grid = static_cast<i32>(gridDim.x);
    num_indices = num_m_blocks * num_rows;
    num_pairs = num_middle = 0;
    if (Mask::kHasBand && num_indices > grid) {
      i32 num_row_pairs = ceil_div(num_rows, 2), num_singles = 0;
      num_pairs = num_m_blocks * num_row_pairs;
      // As many middle tiles as the pairs of an incomplete round have
      i32 middle = ceil_div(num_pairs % grid, num_row_pairs), pairs = num_pairs - middle * num_row_pairs;
      i32 num_rounds = ceil_div(pairs, grid), num_more = 2 * middle * num_row_pairs - (num_rounds * grid - pairs);
      if (pairs > 0 && num_rounds < ceil_div(num_pairs, grid) && num_more <= grid) {
        num_singles = 2 * middle * num_row_pairs, num_middle = middle, num_pairs = pairs;
      }
      num_indices = 2 * (num_pairs + num_singles);
    }
  }

  // The index of this block's first tile, and of the one after index. A pair u has the indices 2 u and 2 u + 1, a
  // single tile among pairs 2 u. The block is done when the index reaches num_indices.
  FT_DEVICE bool is_paired() const { return Mask::kHasBand && num_pairs > 0; }
  FT_DEVICE i32 first() const { return static_cast<i32>(blockIdx.x) * (is_paired() ? 2 : 1); }
  FT_DEVICE i32 next(i32 index) const {
    i32 grid = static_cast<i32>(gridDim.x);
    if constexpr (kRotates) {
      bool is_last = index % grid == grid - 1;
      if constexpr (mutates(Mutation::fwd_sm90_rotation)) is_last = false;
      return index + grid + 1 - (is_last ? grid : 0);
    }
    if (!is_paired()) return index + grid;
    return index % 2 == 0 && index < 2 * num_pairs ? index + 1 : (index / 2 + grid) * 2;
  }

  // The tile of an index. With an odd number of heads the last head has no partner: the partner's tiles get an m_block
  // past the last query.
  FT_DEVICE TileCoord coord(const Params& p, i32 index) const {
    i32 m_block = index % num_m_blocks, row = index / num_m_blocks;
    if (is_paired()) {
      i32 unit = index / 2, num_outer = num_m_blocks - num_middle, first_middle = num_outer / 2, second = index % 2;
      if (unit < num_pairs) {
        m_block = unit % num_outer, row = unit / num_outer;
        if (m_block >= first_middle) m_block += num_middle;
      } else {
        unit -= num_pairs;
        second = unit % 2;
        m_block = first_middle + unit / 2 % num_middle, row = unit / 2 / num_middle;
      }
      row = 2 * row + second;
      if (second == 0) m_block = num_m_blocks - 1 - m_block;
      if (row == p.num_splits * num_heads(p) * p.batch) m_block = num_m_blocks, row = 0;
    }
    i32 split = row % p.num_splits, rest = row / p.num_splits;
    if (kSharesBias && p.bias_strides[0] == 0) return {m_block, split, rest / p.batch, rest % p.batch};
    return {m_block, split, rest % num_heads(p), rest / num_heads(p)};
  }
};

}  // namespace flashtile
