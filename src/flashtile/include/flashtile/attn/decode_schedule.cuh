// How a decode launch deals out its keys, so that every block reads as many, whatever the lengths of the sequences.
//
// A row tile is up to 64 rows: some queries of a sequence for all heads that share a KV head. Its key tiles are its
// units. The units of all row tiles lie on one line: sequence by sequence, KV head by KV head, query tile by query tile.
// Block b takes the units [b * share, (b + 1) * share). Each block finds its own from the lengths in device memory, so
// the grid depends on no length. Where keys may not be split, a row tile is one unit.
//
// A block walks its units from the last to the first. Of the row tiles in its share the last may continue in the next
// block: its partial result is stored first of all. The first may have begun in blocks before: it comes last, and this
// block joins the parts. So a block waits only for blocks with lower numbers, and only for what they did early.
#pragma once

#include "flashtile/attn/block_range.cuh"
#include "flashtile/attn/scheduler.cuh"
#include "flashtile/attn/work_item.cuh"

namespace flashtile {

enum class DecodeRole : i32 { kWhole, kPart, kJoin };

// One row tile and the key tiles [n_begin, n_end) of it that a block processes.
struct DecodeItem {
  TileCoord coord;  // head is a KV head
  Sequence s;
  i32 i_begin;
  i32 n_begin, n_end;
  Range unmasked;   // tiles that need no mask
  i32 first_block;  // the block that has the row tile's first unit
  DecodeRole role;
  bool is_end;  // no work: the consumers stop

  FT_DEVICE bool has_keys() const { return n_begin < n_end; }
};

template <class Config, class Mask, class SeqInfo>
struct DecodeSchedule {
  static constexpr i32 kBlockN = Config::kBlockN;
  using Packing = HeadPacking<Config>;

  // What a sequence adds to the line.
  struct Work {
    Sequence s;
    i32 n_begin, num_units, num_m_blocks;  // units of a row tile

    FT_DEVICE i64 total(const Params& p) const { return static_cast<i64>(num_units) * num_m_blocks * p.heads_kv; }
  };

  const Params& p;
  i64 share, begin, next;  // of this block: its first unit, and the end of those left
  i64 first;               // unit of the current sequence
  i32 batch;
  Work work;

  // Scope: thread.
  FT_DEVICE static Work find(const Params& p, i32 batch) {
    Work found{find_sequence<SeqInfo>(p, batch), 0, 1, 0};
    found.num_m_blocks = ceil_div(found.s.seqlen_q, Packing::num_queries(p));
    Range keys = key_range<Mask>(p, found.s, 0, found.s.seqlen_q);
    found.n_begin = keys.begin / kBlockN;
    if (p.num_splits > 1) found.num_units = max_of(1, ceil_div(keys.end, kBlockN) - found.n_begin);
    return found;
  }

  FT_DEVICE static i64 total_of(const Params& p, i32 batch) { return batch < p.batch ? find(p, batch).total(p) : 0; }

  // Finds this block's units. Scope: warp (equal in all warps that call).
  FT_DEVICE explicit DecodeSchedule(const Params& params) : p(params) {
    i64 total = 0;
    if constexpr (SeqInfo::kHasLengths) {
      for (i32 b = threadIdx.x % 32; b < p.batch; b += 32) total += total_of(p, b);
#pragma unroll
      for (i32 distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
    } else {
      total = total_of(p, 0) * p.batch;
    }
    i64 least = p.num_splits > 1 ? Config::kMinTiles : 1, grid = gridDim.x;
    share = (total + grid - 1) / grid;
    share = share < least ? least : share;
    begin = blockIdx.x * share;
    next = begin + share < total ? begin + share : total;
    batch = 0, first = 0;
    if (begin < next) find_last();
  }

  // Sets batch and first to the sequence of the last unit. Scope: warp.
  FT_DEVICE void find_last() {
    if constexpr (SeqInfo::kHasLengths) {
      i32 lane = threadIdx.x % 32;
      for (i32 chunk = 0;; chunk += 32) {
        // Add up the sequences of the chunk
        i64 mine = total_of(p, chunk + lane), sum = mine;
#pragma unroll
        for (i32 distance = 1; distance < 32; distance *= 2) {
          i64 other = __shfl_up_sync(0xffffffffu, sum, distance);
          sum += lane >= distance ? other : 0;
        }
        u32 later = __ballot_sync(0xffffffffu, first + sum >= next);
        if (later != 0) {
          i32 found = __ffs(later) - 1;
          first += __shfl_sync(0xffffffffu, sum - mine, found);
          batch = chunk + found;
          break;
        }
        first += __shfl_sync(0xffffffffu, sum, 31);
      }
    } else {
      i64 each = total_of(p, 0);
      batch = static_cast<i32>((next - 1) / each);
      first = batch * each;
    }
    work = find(p, batch);
  }

  FT_DEVICE bool is_done() const { return begin >= next; }

  // The next item, from the last to the first. Scope: thread (uniform in a warp).
  FT_DEVICE DecodeItem take() {
    while (next <= first) {
      work = find(p, --batch);
      first -= work.total(p);
    }
    // Find the row tile of the last unit left, and this block's part of it
    i32 row_tile = static_cast<i32>((next - 1 - first) / work.num_units);
    i64 tile_begin = first + static_cast<i64>(row_tile) * work.num_units, tile_end = tile_begin + work.num_units;
    i64 from = begin > tile_begin ? begin : tile_begin;
    DecodeItem item;
    item.coord = {row_tile % work.num_m_blocks, 0, row_tile / work.num_m_blocks, batch};
    item.s = work.s;
    item.i_begin = item.coord.m_block * Packing::num_queries(p);
    item.is_end = false;
    item.first_block = static_cast<i32>(tile_begin / share);
    bool is_whole = begin <= tile_begin && next == tile_end;
    item.role = is_whole ? DecodeRole::kWhole : next == tile_end ? DecodeRole::kJoin : DecodeRole::kPart;
    // Keep the key tiles that these queries see
    i32 i_end = min_of(item.i_begin + Packing::num_queries(p), item.s.seqlen_q);
    Range seen = key_range<Mask>(p, item.s, item.i_begin, i_end);
    Range common = common_key_range<Mask>(p, item.s, item.i_begin, i_end);
    item.n_begin = seen.begin / kBlockN;
    item.n_end = ceil_div(seen.end, kBlockN);
    if (p.num_splits > 1) {
      item.n_begin = max_of(item.n_begin, work.n_begin + static_cast<i32>(from - tile_begin));
      item.n_end = min_of(item.n_end, work.n_begin + static_cast<i32>(next - tile_begin));
    }
    if constexpr (mutates(Mutation::decode_sm90_unit)) item.n_begin += from == begin && from > tile_begin ? 1 : 0;
    item.unmasked = {ceil_div(common.begin, kBlockN), common.end / kBlockN};
    next = from;
    return item;
  }
};

}  // namespace flashtile
