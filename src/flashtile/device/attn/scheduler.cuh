// The query tiles that a persistent block processes, and their order. Scope of every function: thread (uniform in a
// block).
//
// Tiles of one head are consecutive, so that neighbouring blocks share K and V in L2. Block b takes units b, b +
// gridDim.x, and so on. Without a band a unit is one tile. Under a band the last queries of a head may see all keys and
// the first ones almost none: a unit is then a tile of one head and the mirrored tile of the next head, so that all
// units cost the same. If every tile gets a block of its own, units stay single. With kPacksHeads a tile holds queries
// of several heads (attn/head_packing.cuh), and "head" means all heads of a tile.
//
// The last round of pairs may leave most blocks idle. Where that saves half a round, the middle tiles of all heads,
// each of which costs half a pair, come last and one by one.
//
// Where sequences share a bias (kSharesBias), those of one head are consecutive: one of them reads it to L2 for all.
//
// Of packed sequences the rests (attn/tile_place.cuh) come last and one by one: they are the tiles with the fewest
// queries or, under a band, those of the first queries. Pairs are then two heads of one sequence.
//
// The last tile of a head may have few queries and cost less than the others. Where the number of blocks is a multiple
// of the number of tiles, a block would get the same tile of every head: with kRotates, block b takes the tile of block
// b + r in round r instead, so that all blocks get their share of the cheap ones.
#pragma once

#include "device/attn/config.cuh"
#include "device/attn/head_packing.cuh"
#include "device/attn/params.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/math.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

struct TileCoord {
  i32 m_block, split, head, batch;  // head: the first one of the tile
};

// The tiles of a grid with a block, or a cluster, for each of them. Under a band the last tiles of a head come first:
// they see the most keys.
template <class Mask, class SeqInfo, bool kPacksHeads>
struct TileGrid {
  FT_DEVICE TileCoord coord(const Params& p, i32 index, i32 block_queries) const {
    using Heads = HeadGroups<kPacksHeads>;
    i32 num_rows = p.num_splits * Heads::num_rows(p);
    TilePlace place = place_queries<SeqInfo>(p, block_queries, num_rows, index, Mask::kHasBand);
    i32 head = Heads::first_head(p, place.row / p.num_splits);
    return {place.tile, place.row % p.num_splits, head, place.batch};
  }
};

template <class Mask, class SeqInfo, bool kPacksHeads, bool kSharesBias = false, bool kRotates = false>
struct TileScheduler {
  static_assert(!kRotates || !Mask::kHasBand, "pairs cost the same in every block");
  static_assert(!kRotates || !SeqInfo::kHasLengths, "packed sequences have different last tiles");
  i32 num_m_blocks, num_indices;
  i32 num_pairs;   // units that are pairs; 0: every unit is a tile
  i32 num_middle;  // tiles of each head that are not in a pair

  using Heads = HeadGroups<kPacksHeads>;

  FT_DEVICE void init(const Params& p, i32 block_queries) {
    i32 grid = static_cast<i32>(gridDim.x);
    num_pairs = num_middle = 0;
    if (has_packed_queries<SeqInfo>(p)) {
      PackedTiles tiles = packed_query_tiles(p, block_queries);
      i32 num_rows = p.num_splits * Heads::num_rows(p);
      num_m_blocks = 0;
      num_indices = tiles.num_indices() * num_rows;
      if (Mask::kHasBand && num_indices > grid && num_rows > 1) {
        num_pairs = tiles.num_counted() * ceil_div(num_rows, 2);
        if (num_pairs > 0) num_indices = 2 * (num_pairs + p.batch * num_rows);
      }
      return;
    }
    num_m_blocks = ceil_div(p.seqlen_q, block_queries);
    i32 num_rows = p.num_splits * Heads::num_rows(p) * p.batch;
    num_indices = num_m_blocks * num_rows;
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
  FT_DEVICE i32 first(const Params& p, i32 block_queries) const {
    return skipped(p, static_cast<i32>(blockIdx.x) * (is_paired() ? 2 : 1), block_queries);
  }
  FT_DEVICE i32 next(const Params& p, i32 index, i32 block_queries) const {
    i32 grid = static_cast<i32>(gridDim.x);
    if constexpr (kRotates) {
      bool is_last = index % grid == grid - 1;
      if constexpr (mutates(Mutation::fwd_sm90_rotation)) is_last = false;
      return index + grid + 1 - (is_last ? grid : 0);
    }
    if (is_paired() && index % 2 == 0 && index < 2 * num_pairs) return index + 1;
    return skipped(p, is_paired() ? (index / 2 + grid) * 2 : index + grid, block_queries);
  }

  // The tile of an index. With an odd number of heads the last head has no partner: the partner's tiles get an m_block
  // past the last query.
  FT_DEVICE TileCoord coord(const Params& p, i32 index, i32 block_queries) const {
    if (has_packed_queries<SeqInfo>(p)) return packed_coord(p, index, block_queries);
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
      if (row == p.num_splits * Heads::num_rows(p) * p.batch) m_block = num_m_blocks, row = 0;
    }
    i32 split = row % p.num_splits, rest = row / p.num_splits;
    if (kSharesBias && p.bias_strides[0] == 0) {
      return {m_block, split, Heads::first_head(p, rest / p.batch), rest % p.batch};
    }
    i32 batch = rest / Heads::num_rows(p);
    return {m_block, split, Heads::first_head(p, rest - batch * Heads::num_rows(p)), batch};
  }

 private:
  // Goes on past the rests of packed sequences that do not exist.
  FT_DEVICE i32 skipped(const Params& p, i32 index, i32 block_queries) const {
    if (!has_packed_queries<SeqInfo>(p)) return index;
    PackedTiles tiles = packed_query_tiles(p, block_queries);
    i32 num_rows = p.num_splits * Heads::num_rows(p), scale = is_paired() ? 2 : 1,
        step = scale * static_cast<i32>(gridDim.x);
    i32 first_rest = is_paired() ? num_pairs : tiles.num_counted() * num_rows;
    while (index >= scale * first_rest && index < num_indices) {
      i32 count = tiles.num_missing(index / scale - first_rest, step / scale, num_rows);
      index += count * step;
      if (count < PackedTiles::kWays) break;
    }
    return index;
  }

  FT_DEVICE TileCoord packed_coord(const Params& p, i32 index, i32 block_queries) const {
    PackedTiles tiles = packed_query_tiles(p, block_queries);
    i32 num_rows = p.num_splits * Heads::num_rows(p), at = index, rows = num_rows;
    bool is_pair = is_paired() && index < 2 * num_pairs;
    if (is_pair) at = index / 2, rows = ceil_div(num_rows, 2);
    if (is_paired() && !is_pair) at = tiles.num_counted() * num_rows + index / 2 - num_pairs;
    TilePlace place = tiles.place(at, rows, Mask::kHasBand);
    if (is_pair) {
      // Counted tile t of a head from the last, of the next head from the first
      i32 second = index % 2;
      place.row = 2 * place.row + second;
      if (second != 0 && place.tile < place.num_tiles) place.tile = place.mirrored();
      if (place.row >= num_rows) place.tile = place.num_tiles, place.row = 0;
    }
    i32 head = quotient(place.row, p.num_splits);
    return {place.tile, place.row - head * p.num_splits, Heads::first_head(p, head), place.batch};
  }
};

}  // namespace flashtile
