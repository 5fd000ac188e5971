// How a decode launch deals out its keys, so that all blocks read equally many, whatever the lengths of the sequences.
//
// A row tile is up to 64 rows: some queries of a sequence for the heads of a tile (attn/head_packing.cuh). Its key
// tiles are its units. The units of all row tiles lie on one line: sequence by sequence, head by head, query tile by
// query tile. Block b takes the units [b * share, (b + 1) * share). Each block finds its own from the lengths in device
// memory, so the grid depends on no length. Where keys may not be split, a row tile is one unit. The share is larger
// than an even one where a row tile would be cut into so many parts that joining them took longer than their keys.
//
// Units are counted in 32 bits. Where bad lengths give more than kMaxUnits, the line ends there: all blocks must agree
// on it, or some would look for sequences that do not exist, wait for parts that nobody has, or leave flags set.
//
// A block walks its units from the last to the first. Of the row tiles in its share the last may continue in the next
// block: its partial result is stored first of all. The first may have begun in blocks before: it comes last, and this
// block joins the parts. So a block waits only for blocks with lower numbers, and only for what they did early.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/scheduler.cuh"
#include "device/attn/work_item.cuh"
#include "device/ptx/sync.cuh"

namespace flashtile {

enum class DecodeRole : i32 { kWhole, kPart, kJoin };

// One row tile and the key tiles [n_begin, n_end) of it that a block processes.
struct DecodeItem {
  TileCoord coord;
  Sequence s;
  i32 i_begin;
  i32 num_heads, num_queries;  // of the row tile: its rows are the queries of each head, head by head
  i32 n_begin, n_end;
  Range unmasked;   // tiles that need no mask
  i32 first_block;  // of a join: the block that has the row tile's first unit
  DecodeRole role;
  bool is_end;  // no work: the consumers stop

  FT_DEVICE bool has_keys() const { return n_begin < n_end; }
};

template <class Config, class Mask, class SeqInfo>
struct DecodeSchedule {
  using Packing = HeadPacking<Config>;
  static constexpr i32 kBlockN = Config::kBlockN;
  static constexpr i32 kMaxUnits = 7 << 28;   // and a share more, of 8 blocks at least, fits 32 bits
  static constexpr i32 kLengthsInFlight = 4;  // of a lane: none needs the result of another

  // What a sequence adds to the line.
  struct Work {
    Sequence s;
    i32 n_begin, num_units, num_m_blocks;  // units of a row tile
    i32 total;                             // units of the sequence
  };

  const Params& p;
  i32 num_heads, num_queries;  // that a row tile has room for
  i32 share;                   // units of a block
  i32 begin, next = 0;         // this block's first unit, and the end of those that are left
  // The first unit of the current sequence, and its number. Before take() has found it: the end of its units, and one
  // more
  i32 first, batch;
  Work work;

  // Scope: thread.
  FT_DEVICE Work find(i32 b) const {
    Work found{find_sequence<SeqInfo>(p, b), 0, 1, 1, 0};
    Range keys = key_range<Mask>(p, found.s, 0, found.s.seqlen_q);
    found.n_begin = keys.begin / kBlockN;
    if (p.num_splits > 1) found.num_units = max_of(1, ceil_div(keys.end, kBlockN) - found.n_begin);
    if (found.s.seqlen_q > num_queries) found.num_m_blocks = ceil_div(found.s.seqlen_q, num_queries);
    if (found.s.seqlen_q <= 0) return found;
    if constexpr (SeqInfo::kHasLengths) {
      i64 total = static_cast<i64>(found.num_units) * found.num_m_blocks * Packing::num_rows(p);
      found.total = total < kMaxUnits ? static_cast<i32>(total) : kMaxUnits;
    } else {
      found.total = found.num_units * found.num_m_blocks * Packing::num_rows(p);
    }
    return found;
  }
  // A sum of units, at most kMaxUnits.
  FT_DEVICE static i32 sum_of(i32 a, i32 b) {
    u32 sum = static_cast<u32>(a) + static_cast<u32>(b);
    return sum < static_cast<u32>(kMaxUnits) ? static_cast<i32>(sum) : kMaxUnits;
  }
  // What a lane has found. Scope: warp.
  FT_DEVICE static Work from_lane(const Work& found, i32 lane) {
    auto get = [&](auto x) { return __shfl_sync(0xffffffffu, x, lane); };
    const Sequence& s = found.s;
    Sequence same{get(s.batch_idx), get(s.seqlen_q), get(s.seqlen_k), get(s.offset),
                  get(s.q_row),     get(s.k_row),    get(s.stat_row)};
    return {same, get(found.n_begin), get(found.num_units), get(found.num_m_blocks), get(found.total)};
  }

  // The sum over the lanes up to this one. Scope: warp.
  FT_DEVICE static i32 running_sum(i32 x) {
#pragma unroll
    for (i32 distance = 1; distance < 32; distance *= 2) {
      i32 other = __shfl_up_sync(0xffffffffu, x, distance);
      x = sum_of(x, static_cast<i32>(threadIdx.x % 32) >= distance ? other : 0);
    }
    return x;
  }

  // Finds this block's units: sums the lengths of up to 32 groups of sequences, and looks into the group of its last
  // unit in the same way, until a group is 32 sequences. One loop for all: code that is not in the instruction cache
  // costs more than another look at some lengths. Scope: warp (equal in all warps that call).
  FT_DEVICE explicit DecodeSchedule(const Params& params) : p(params) {
    num_heads = Packing::num_heads(p);
    num_queries = Packing::num_queries(p);
    if constexpr (SeqInfo::kHasLengths) {
      i32 lane = threadIdx.x % 32, from = 0, count = p.batch, before = 0;  // sequences; units before them
      bool is_summed = false;
      while (true) {
        bool is_last = count <= 32;
        i32 group = 32 * ceil_div(count, 32 * 32), units = 0;  // of this lane: of a group, at last of a sequence
        Work found_here;
        for (i32 start = 0, place = 0; start < count; start += group, ++place) {
          i32 sum = 0, end = min_of(start + group, count);
#pragma unroll kLengthsInFlight
          for (i32 i = start + lane; i - lane < end; i += 32) {
            found_here = find(from + min_of(i, count - 1));
            sum = sum_of(sum, i < end ? found_here.total : 0);
          }
          if (!is_last) sum = __shfl_sync(0xffffffffu, running_sum(sum), 31);
          if (is_last || place == lane) units = sum;
        }
        i32 sum = running_sum(units);
        if (!is_summed) {
          deal_out(__shfl_sync(0xffffffffu, sum, 31));
          if (is_done()) return;
          is_summed = true;
        }
        i32 found = __ffs(__ballot_sync(0xffffffffu, sum_of(before, sum) >= next)) - 1;
        i32 earlier = __shfl_sync(0xffffffffu, sum, max_of(found - 1, 0));
        before += found > 0 ? earlier : 0;
        if (is_last) {
          batch = from + found;
          work = from_lane(found_here, found);
          first = before;
          return;
        }
        from += found * group;
        count = min_of(group, count - found * group);
      }
    } else {
      i32 each = find(0).total;
      deal_out(each * p.batch);
      if (is_done()) return;
      batch = (next - 1) / each + 1;
      first = batch * each;
    }
  }

  // Sets this block's units. Scope: thread.
  FT_DEVICE void deal_out(i32 total) {
    // Few units: one block on each multiprocessor leaves fewer parts to join
    i32 num_blocks = gridDim.x, few = Config::kFewUnits * Config::kNumBlocks * num_multiprocessors();
    if (p.num_splits > 1 && total <= few) num_blocks = min_of(num_blocks, num_multiprocessors());
    share = max_of(ceil_div(total, num_blocks), least_share(total));
    begin = min_of(static_cast<i32>(blockIdx.x) * share, total);
    next = min_of(begin + share, total);
  }

  // The units of a block with which a row tile takes the least time, if blocks enough are free: those units one after
  // the other, and then the join. Four warps join a row each, 16 parts at a time, which takes kJoinCost units. Scope:
  // thread.
  FT_DEVICE i32 least_share(i32 total) const {
    constexpr float kJoinCost = 1.15f;  // with one sequence and 64 heads over a KV head (NVIDIA H200)
    i32 queries = p.cu_seqlens_q != nullptr ? ceil_div(p.total_q, p.batch) : p.seqlen_q;
    i32 rows = num_heads * min_of(num_queries, queries);
    float units = static_cast<float>(total) / static_cast<float>(p.batch * Packing::num_rows(p));
    return max_of(static_cast<i32>(sqrtf(units * static_cast<float>(ceil_div(rows, 4)) * (kJoinCost / 16.0f))), 1);
  }

  FT_DEVICE bool is_done() const { return begin >= next; }

  // The next item, from the last to the first. Scope: thread (uniform in a warp).
  FT_DEVICE DecodeItem take() {
    while (next <= first) {
      work = find(--batch);
      first -= work.total;
    }
    // Find the row tile of the last unit left, and this block's part of it
    i32 row_tile = (next - 1 - first) / work.num_units, m_block = 0, head = row_tile;
    if (work.num_m_blocks > 1) head = row_tile / work.num_m_blocks, m_block = row_tile - head * work.num_m_blocks;
    i32 tile_begin = first + row_tile * work.num_units, num_units = work.num_units;
    if constexpr (SeqInfo::kHasLengths) num_units = min_of(num_units, kMaxUnits - tile_begin);
    i32 tile_end = tile_begin + num_units;
    i32 from = max_of(begin, tile_begin);
    DecodeItem item;
    item.coord = {m_block, 0, Packing::first_head(p, head), batch};
    item.s = work.s;
    item.i_begin = m_block * num_queries;
    item.is_end = false;
    bool is_last = next == tile_end;
    item.role = !is_last ? DecodeRole::kPart : begin > tile_begin ? DecodeRole::kJoin : DecodeRole::kWhole;
    item.first_block = item.role == DecodeRole::kJoin ? tile_begin / share : 0;
    // Keep the key tiles that these queries see
    i32 i_end = min_of(item.i_begin + num_queries, item.s.seqlen_q);
    item.num_heads = Packing::num_heads(p, item.coord.head);
    item.num_queries = i_end - item.i_begin;
    Range seen = key_range<Mask>(p, item.s, item.i_begin, i_end);
    Range common = common_key_range<Mask>(p, item.s, item.i_begin, i_end);
    item.n_begin = seen.begin / kBlockN;
    item.n_end = ceil_div(seen.end, kBlockN);
    if (p.num_splits > 1) {
      item.n_begin = max_of(item.n_begin, work.n_begin + from - tile_begin);
      item.n_end = min_of(item.n_end, work.n_begin + next - tile_begin);
    }
    if constexpr (mutates(Mutation::decode_sm90_unit)) item.n_begin += from > tile_begin ? 1 : 0;
    item.unmasked = {ceil_div(common.begin, kBlockN), common.end / kBlockN};
    next = from;
    return item;
  }
};

}  // namespace flashtile
