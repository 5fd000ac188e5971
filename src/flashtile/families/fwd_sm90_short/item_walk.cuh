// The work of a block of the Hopper forward for short sequences. An item is 64 queries of one head. The items of all
// heads are numbered head by head and dealt out in equal, contiguous shares; consumers take the items of their block in
// turn. A segment is a run of items of one head that share a copy of its keys in shared memory: all items of the head
// if its key tiles fit, else as many as there are consumers. Under a band the items of a head go from its last queries
// to its first: the longest first. Producers and consumers walk alike, each by itself. Scope of every function: thread.
#pragma once

#include "device/attn/block_range.cuh"

namespace flashtile {

template <class Config, class Mask>
struct ItemWalk {
  static constexpr i32 kBlockN = Config::kBlockN;
  const Params& p;
  i32 num_items;    // of the block
  i32 batch, head;  // of the segment
  i32 first, end;   // its items within the head
  i32 first_item;   // the same, counted from the block's first item
  u32 ring;         // key tiles of all segments before
  Range keys;       // its key tiles

  FT_DEVICE explicit ItemWalk(const Params& p) : p(p), first_item(0), ring(0) {
    i64 all = static_cast<i64>(p.batch) * p.heads * num_tiles();
    i64 begin = blockIdx.x * all / gridDim.x;
    num_items = static_cast<i32>((blockIdx.x + 1) * all / gridDim.x - begin);
    i32 pair = static_cast<i32>(begin / num_tiles());
    first = static_cast<i32>(begin - static_cast<i64>(pair) * num_tiles());
    batch = pair / p.heads;
    head = pair - batch * p.heads;
    find_end();
  }

  // Query tiles of a head.
  FT_DEVICE i32 num_tiles() const { return ceil_div(p.seqlen_q, 64); }
  // Items of a segment at most.
  FT_DEVICE i32 limit() const {
    bool is_resident = Config::kIsOneTile || ceil_div(p.seqlen_k, kBlockN) < Config::kNumStages;
    return is_resident ? num_tiles() : min_of(num_tiles(), Config::kNumConsumers);
  }
  // What follows the segment's items and key tiles.
  FT_DEVICE i32 item_end() const { return first_item + end - first; }
  FT_DEVICE u32 ring_end() const { return ring + keys.end - keys.begin; }
  // Goes to the next segment. Past the last one there are no items.
  FT_DEVICE void next() {
    first_item = item_end();
    ring = ring_end();
    first = end;
    if (first == num_tiles()) {
      first = 0;
      if (++head == p.heads) head = 0, ++batch;
    }
    find_end();
  }
  // The first query of an item of the segment, counted within the head.
  FT_DEVICE i32 first_query(i32 item) const { return 64 * (Mask::kHasBand ? num_tiles() - 1 - item : item); }
  // The key tiles of the queries [i_begin, i_end).
  FT_DEVICE Range key_tiles(i32 i_begin, i32 i_end) const {
    if constexpr (Config::kIsOneTile) return {0, p.seqlen_k > 0 ? 1 : 0};
    Range seen = key_range<Mask>(p, sequence(), i_begin, min_of(i_end, p.seqlen_q));
    if (seen.begin >= seen.end) return {0, 0};
    return {seen.begin / kBlockN, ceil_div(seen.end, kBlockN)};
  }
  FT_DEVICE Sequence sequence() const {
    return {
        batch, p.seqlen_q, p.seqlen_k, p.is_top_left ? 0 : p.seqlen_k - p.seqlen_q, 0, 0, batch * p.lse_batch_stride};
  }

 private:
  FT_DEVICE void find_end() {
    end = min_of(min_of(first + limit(), num_tiles()), first + num_items - first_item);
    i32 a = first_query(first), b = first_query(end - 1);
    keys = key_tiles(min_of(a, b), max_of(a, b) + 64);
  }
};

}  // namespace flashtile
