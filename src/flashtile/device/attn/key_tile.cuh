// The keys that a block of a Hopper backward owns, and the query tiles that see them. Scope of every function: thread.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/key_order.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/math.cuh"
#include "device/ptx/sync.cuh"

namespace flashtile {

// What a block works on: kBlockN keys, and the query tiles [m_begin, m_end) of each head of a group. It lies in shared
// memory: registers are scarce.
struct KeyTile {
  Sequence s;
  i32 kv_head, j_begin, m_begin, m_end, first_head, num_heads;

  template <i32 kBlockM, i32 kBlockN, class Mask, class SeqInfo>
  FT_DEVICE static KeyTile find(const Params& p) {
    KeyTile tile;
    // The first keys come first: under a causal mask most queries see them. In a fixed order of sums the last ones do:
    // their first query tile is seen by the fewest keys.
    bool from_last = is_reversed<Mask>(p);
    if (has_packed_keys<SeqInfo>(p)) {
      auto found = packed_key_tiles(p, kBlockN).find(static_cast<i32>(blockIdx.x), p.heads_kv);
      tile.s = find_sequence<SeqInfo>(p, found.batch);
      KeyBlock block{found.num_counted, found.row};
      if (found.local >= 0) {
        i32 group = find_group<kBlockM>(p, tile.s.seqlen_q, p.heads_kv);
        block = key_block(found.local, found.num_counted, p.heads_kv, group);
      }
      if (from_last && block.n < found.num_tiles) block.n = found.num_tiles - 1 - block.n;
      tile.j_begin = block.n * kBlockN;
      tile.kv_head = block.row;
    } else {
      i32 num_n_blocks = ceil_div(p.seqlen_k, kBlockN), num_rows = p.heads_kv * p.batch;
      KeyBlock block = key_block(blockIdx.x, num_n_blocks, num_rows, find_group<kBlockM>(p, p.seqlen_q, num_rows));
      if (from_last) block.n = num_n_blocks - 1 - block.n;
      tile.j_begin = block.n * kBlockN;
      // Sequences that share a bias come one after the other: the second reads it from L2
      bool is_shared = p.bias != nullptr && p.bias_strides[0] == 0;
      tile.kv_head = is_shared ? block.row / p.batch : block.row % p.heads_kv;
      tile.s = find_sequence<SeqInfo>(p, is_shared ? block.row % p.batch : block.row / p.heads_kv);
    }
    i32 j_end = min_of(tile.j_begin + kBlockN, tile.s.seqlen_k);
    Range queries = query_range<Mask>(p, tile.s, tile.j_begin, j_end);
    tile.m_begin = queries.begin / kBlockM;
    tile.m_end = queries.begin < queries.end ? ceil_div(queries.end, kBlockM) : tile.m_begin;
    tile.num_heads = p.heads / p.heads_kv;
    tile.first_head = tile.kv_head * tile.num_heads;
    return tile;
  }
  // The same where sums may have an order. Sequences of which some tile has no block are left out: a block that waits
  // for its turn would wait for ever.
  template <i32 kBlockM, i32 kBlockN, class Mask, class SeqInfo>
  FT_DEVICE static KeyTile find_in_order(const Params& p) {
    KeyTile tile = find<kBlockM, kBlockN, Mask, SeqInfo>(p);
    if (p.dq_order != nullptr && has_packed_keys<SeqInfo>(p)) {
      if (!packed_key_tiles(p, kBlockN).has_all_counted(tile.s.batch_idx)) tile.s.seqlen_k = 0;
    }
    return tile;
  }
  // Zeros the counts of turns, in a launch before. It has a thread or more for each row of lse, whatever the lengths.
  FT_DEVICE static void clear_order(const Params& p) {
    i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (p.dq_order != nullptr && at < p.lse_size) p.dq_order[at] = 0;
  }
  // The KV heads whose blocks start in turn.
  template <i32 kBlockM>
  FT_DEVICE static i32 find_group(const Params& p, i32 seqlen_q, i32 num_rows) {
    if (p.dq_order == nullptr) return 1;
    return order_group(num_rows, ceil_div(seqlen_q, kBlockM) * (p.heads / p.heads_kv), num_multiprocessors());
  }
  // Whether the blocks of keys that see a query tile add to its dQ from the last to the first.
  template <class Mask>
  FT_DEVICE static bool is_reversed(const Params& p) {
    return Mask::kHasBand && p.dq_order != nullptr && p.window_right >= 0;
  }
  // The number of blocks of keys that add to dQ of the query tile at i_begin before this one.
  template <i32 kBlockM, i32 kBlockN, class Mask>
  FT_DEVICE i32 dq_order(const Params& p, i32 i_begin) const {
    Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + kBlockM, s.seqlen_q));
    i32 n = j_begin / kBlockN;
    return is_reversed<Mask>(p) ? ceil_div(keys.end, kBlockN) - 1 - n : n - keys.begin / kBlockN;
  }
  // Calls body(head, first query, number of the tile) for each of the block's tiles of kBlockM queries, head by head.
  template <i32 kBlockM, class Body>
  FT_DEVICE void for_each_query_tile(Body body) const {
    u32 count = 0;
    for (i32 h = 0; h < num_heads; ++h) {
      for (i32 m = m_begin; m < m_end; ++m, ++count) body(first_head + h, m * kBlockM, count);
    }
  }
  FT_DEVICE bool has_keys() const { return j_begin < s.seqlen_k; }
  FT_DEVICE bool has_queries() const { return m_begin < m_end; }
  FT_DEVICE u32 num_tiles() const { return static_cast<u32>((m_end - m_begin) * num_heads); }
};

}  // namespace flashtile
