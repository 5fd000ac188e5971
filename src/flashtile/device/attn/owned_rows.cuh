// The rows that a block of an mma.sync backward owns, queries or keys, and the tiles of the other side that stream by.
#pragma once

#include "device/attn/key_tile.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

// What a block works on: rows from `first` on, and tiles of the other side: num_row_tiles of each of num_heads heads.
// It lies in shared memory: registers are scarce. Scope of every function: thread.
struct OwnedRows {
  Sequence s;
  i32 head, first;                // owned: a query head, or a KV head
  i32 first_tile, num_row_tiles;  // that stream by
  i32 first_head, num_heads;      // of those

  template <class Config, class Mask, class SeqInfo>
  FT_DEVICE static OwnedRows find(const Params& p) {
    OwnedRows block;
    if constexpr (Config::kOwnsQueries) {
      // The last queries come first: under a causal mask they see most keys
      TilePlace place =
          place_queries<SeqInfo>(p, Config::kBlockM, p.heads, static_cast<i32>(blockIdx.x), Mask::kHasBand);
      block.head = place.row;
      block.s = find_sequence<SeqInfo>(p, place.batch);
      block.first = place.tile * Config::kBlockM;
      i32 i_end = min_of(block.first + Config::kBlockM, block.s.seqlen_q);
      Range keys = key_range<Mask>(p, block.s, block.first, i_end);
      block.first_tile = keys.begin / Config::kBlockN;
      block.num_row_tiles = max_of(ceil_div(keys.end, Config::kBlockN) - block.first_tile, 0);
      block.first_head = block.head / (p.heads / p.heads_kv);
      if constexpr (mutates(Mutation::bwd_sm80_wide_gqa_head)) block.first_head = block.head % p.heads_kv;
      if constexpr (mutates(Mutation::bwd_sm80_f32_gqa_head)) block.first_head = block.head % p.heads_kv;
      block.num_heads = 1;
    } else {
      KeyTile tile = KeyTile::find<Config::kBlockN, Config::kBlockM, Mask, SeqInfo>(p);
      block.s = tile.s;
      block.head = tile.kv_head;
      block.first = tile.j_begin;
      block.first_tile = tile.m_begin;
      block.num_row_tiles = tile.m_end - tile.m_begin;
      block.first_head = tile.first_head;
      block.num_heads = tile.num_heads;
      if constexpr (mutates(Mutation::bwd_sm80_wide_group)) block.num_heads = 1;
      if constexpr (mutates(Mutation::bwd_sm80_f32_group)) block.num_heads = 1;
    }
    return block;
  }
  template <class Config>
  FT_DEVICE bool has_rows() const {
    return first < (Config::kOwnsQueries ? s.seqlen_q : s.seqlen_k);
  }
  FT_DEVICE i32 num_tiles() const { return num_row_tiles * num_heads; }
  // The head and the first row of streamed tile number count.
  FT_DEVICE i32 tile_head(i32 count) const { return first_head + count / num_row_tiles; }
  template <class Config>
  FT_DEVICE i32 tile_row(i32 count) const {
    return (first_tile + count % num_row_tiles) * Config::kBlockN;
  }
};

}  // namespace flashtile
