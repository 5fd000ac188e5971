// What the producer of a warp-specialised forward kernel tells its consumers: one query tile, the key tiles it needs,
// and which of them each consumer must mask or may skip. The producer writes work items to a ring in shared memory;
// consumers read them there at every use, since registers are scarce. Scope of every function: thread.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/head_packing.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/scheduler.cuh"
#include "device/core/mutation.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

// One query tile and the key tiles [n_begin, n_end) that it needs.
template <class Config, class Mask, class SeqInfo>
struct QueryTile {
  static constexpr i32 kBlockN = Config::kBlockN;
  using Packing = HeadPacking<Config>;
  TileCoord coord;
  Sequence s;
  i32 i_begin;  // first query of consumer 0; negative if that consumer has no queries
  i32 n_begin, n_end;

  template <class Scheduler>
  FT_DEVICE QueryTile(const Params& p, const Scheduler& scheduler, i32 index)
      : coord(scheduler.coord(p, index, Packing::block_queries(p))),
        s(find_sequence<SeqInfo>(p, coord.batch)),
        i_begin(coord.m_block * Packing::block_queries(p)) {
    i32 block = Packing::block_queries(p);
    // Where the first queries see the fewest keys, let the tiles end with the last query: consumers without queries are
    // then in the cheapest tile
    if constexpr (Mask::kHasBand && !Config::kPacksHeads) {
      if (p.window_right >= 0) i_begin -= (ceil_div(s.seqlen_q, block) * block - s.seqlen_q) / 64 * 64;
    }
    Range keys = key_range<Mask>(p, s, max_of(i_begin, 0), min_of(i_begin + block, s.seqlen_q));
    n_begin = keys.begin / kBlockN;
    n_end = ceil_div(keys.end, kBlockN);
    i32 split = coord.split;
    if constexpr (mutates(Mutation::fwd_sm90_last_tile)) n_end = n_end - 1 > n_begin ? n_end - 1 : n_end;
    if constexpr (mutates(Mutation::fwd_sm90_split)) split = 0;
    split_tiles(p, split, n_begin, n_end);
  }
  FT_DEVICE bool has_queries() const { return i_begin < s.seqlen_q; }
  FT_DEVICE bool has_keys() const { return n_begin < n_end; }
};

// The key tiles of one consumer's 64 rows: tiles from n_end on are fully masked, tiles inside `unmasked` need no mask.
struct ConsumerTiles {
  Range unmasked;
  i32 n_end;

  template <class Config, class Mask, class SeqInfo>
  FT_DEVICE static ConsumerTiles find(const Params& p, const QueryTile<Config, Mask, SeqInfo>& tile, i32 i_first) {
    constexpr i32 kBlockN = Config::kBlockN;
    using Packing = HeadPacking<Config>;
    Range seen = key_range<Mask>(p, tile.s, i_first, i_first + Packing::num_queries(p));
    Range common = common_key_range<Mask>(p, tile.s, i_first, i_first + Packing::num_queries(p));
    bool has_queries = i_first >= 0 && i_first < tile.s.seqlen_q;
    return {Range{ceil_div(common.begin, kBlockN), Mask::kHasBool ? 0 : common.end / kBlockN},
            has_queries ? min_of(tile.n_end, ceil_div(seen.end, kBlockN)) : tile.n_begin};
  }
};

template <class Config, class Mask, class SeqInfo>
struct WorkItem : MaskWindow<Mask::kHasBool, Config::kNumConsumers> {
  using Window = MaskWindow<Mask::kHasBool, Config::kNumConsumers>;
  QueryTile<Config, Mask, SeqInfo> tile;
  ConsumerTiles consumers[Config::kNumConsumers];
  u32 index;    // of this item in the block's sequence of items
  bool is_end;  // no work: the consumers stop
};

// Three items in shared memory: the one a consumer computes, the one before it, whose O may still be being stored, and
// the one that the producer prepares.
template <class Item>
struct WorkItemRing {
  static constexpr u32 kNumItems = 3;
  alignas(16) char items[kNumItems][sizeof(Item)];

  FT_DEVICE Item& at(u32 index) { return *reinterpret_cast<Item*>(items[index % kNumItems]); }
};

// The query and the head of each of this thread's two fragment rows, first_row and the 8th after it of a consumer's 64.
// A row without a query gets a query index outside the sequence and a valid head.
template <class Config>
struct FragmentRows {
  i32 i[2], packed_head[2];

  template <class Tile>
  FT_DEVICE FragmentRows(const Params& p, const Tile& tile, i32 consumer, i32 first_row = fragment_row()) {
    using Packing = HeadPacking<Config>;
    i32 num_heads = Packing::num_heads(p, tile.coord.head), num_queries = Packing::num_queries(p);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 row = first_row + 8 * r;
      i[r] = tile.i_begin + num_queries * consumer + row;
      if constexpr (Config::kPacksHeads) {
        i32 head = row / num_queries;
        i[r] = head < num_heads ? i[r] - head * num_queries : p.seqlen_q;
        packed_head[r] = tile.coord.head + min_of(head, num_heads - 1);
      }
    }
  }
  template <class Tile>
  FT_DEVICE bool is_query(const Tile& tile, i32 r) const {
    return static_cast<u32>(i[r]) < static_cast<u32>(tile.s.seqlen_q);
  }
  template <class Tile>
  FT_DEVICE i32 head(const Tile& tile, i32 r) const {
    return Config::kPacksHeads ? packed_head[r] : tile.coord.head;
  }
};

}  // namespace flashtile
