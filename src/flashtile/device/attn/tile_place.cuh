// Where the tiles of a call are: the sequence, the row and the tile that an index stands for. A row is what has tiles
// of its own in each sequence: a head, or one split of a head. Scope of every function: thread.
//
// Sequences of a batched tensor have as many tiles each as the longest may have. The tiles of a row are consecutive.
//
// The lengths of packed sequences are known on the device alone. A sequence from position `start` to `end` of the
// packed tensor has ceil((end - start) / T) tiles of T positions: as many as multiples of T lie in (start, end], its
// counted tiles, or one more, its rest. The counted tiles of all sequences are at most total / T; tile x of them
// belongs to the sequence with start / T <= x < end / T, which a search finds. So the indices of num_rows rows are
//   [0, total / T * num_rows)      counted tiles, sequence by sequence, row by row
//   [.., + batch * num_rows)       rests, sequence by sequence
// An index without a tile stands for one behind the last. The host counts as many indices, or up to num_rows more
// (families/steps/__init__.py: query_tiles, key_tiles).
#pragma once

#include "device/attn/config.cuh"
#include "device/attn/params.cuh"
#include "device/core/math.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

// a / b of numbers that are not negative, in fewer instructions than with a sign.
FT_DEVICE i32 quotient(i32 a, i32 b) { return static_cast<i32>(static_cast<u32>(a) / static_cast<u32>(b)); }

struct TilePlace {
  i32 tile;  // of the row; num_tiles or more where the index has none
  i32 num_tiles, row, batch;
  i32 num_counted;  // of packed sequences

  // The other one of two counted tiles that are as far from the first as from the last, in an order from the last.
  FT_DEVICE i32 mirrored() const { return 2 * num_tiles - 1 - num_counted - tile; }
};

// The tiles of packed sequences, all of the same size.
struct PackedTiles {
  static constexpr i32 kWays = 8;  // loads that do not wait for each other
  const i32* starts;               // (batch + 1)
  i32 batch, total, tile_rows;

  // A sequence, and where an index is among its tiles. An index without a tile is a rest behind the last one.
  struct Found {
    i32 batch, num_tiles, num_counted;
    i32 local;  // among the counted tiles of all rows; negative for a rest
    i32 row;    // of a rest
  };

  // Counted tiles of a row, and the indices of a row.
  FT_DEVICE i32 num_counted() const { return quotient(total, tile_rows); }
  FT_DEVICE i32 num_indices() const { return num_counted() + batch; }

  FT_DEVICE Found find(i32 index, i32 num_rows) const {
    i32 rest = index - num_counted() * num_rows;
    i32 x = quotient(index, num_rows), b = rest < 0 ? search(x) : min_of(quotient(rest, num_rows), batch - 1);
    i32 start = clamp(starts[b], 0, total), end = clamp(starts[b + 1], start, total);
    i32 first = quotient(start, tile_rows), num_counted = quotient(end, tile_rows) - first;
    i32 num_tiles = ceil_div(end - start, tile_rows);
    if (rest >= 0) {
      i32 row = rest - b * num_rows;
      if (row < num_rows) return {b, num_tiles, num_counted, -1, row};
    } else if (x >= first && x < first + num_counted) {
      return {b, num_tiles, num_counted, index - first * num_rows, 0};
    }
    return {b, num_tiles, num_tiles, -1, 0};
  }
  // True if every counted tile of a sequence has an index. Where starts decrease, which they must not, some may have
  // none. A later tile is never found in an earlier sequence, so the first and the last one tell of all.
  FT_DEVICE bool has_all_counted(i32 b) const {
    i32 start = clamp(starts[b], 0, total), end = clamp(starts[b + 1], start, total);
    i32 first = quotient(start, tile_rows), last = quotient(end, tile_rows) - 1;
    return last < first || (search(first) == b && search(last) == b);
  }
  // How many of the rests at index, index + step, ... do not exist before one that does; kWays where none of so many
  // does. Indices past the last count as such that exist.
  FT_DEVICE i32 num_missing(i32 index, i32 step, i32 num_rows) const {
    i32 count = 0;
    bool is_missing = true;
#pragma unroll
    for (i32 way = 0; way < kWays; ++way) {
      i32 b = quotient(index + way * step, num_rows);
      i32 at = min_of(b, batch - 1), start = clamp(starts[at], 0, total), end = clamp(starts[at + 1], start, total);
      i32 num_counted = quotient(end, tile_rows) - quotient(start, tile_rows);
      is_missing = is_missing && b < batch && ceil_div(end - start, tile_rows) == num_counted;
      count += is_missing ? 1 : 0;
    }
    return count;
  }
  // Where the tiles of a row are consecutive: from the first, the rest last; or from the last, the rest first.
  FT_DEVICE TilePlace place(i32 index, i32 num_rows, bool from_last) const {
    Found found = find(index, num_rows);
    i32 num_tiles = found.num_tiles, t = found.num_counted, row = found.row;
    if (found.local >= 0) {
      row = quotient(found.local, found.num_counted);
      t = found.local - row * found.num_counted;
    }
    if constexpr (mutates(Mutation::packed_rest))
      if (found.local < 0) t = num_tiles;
    return {from_last && t < num_tiles ? num_tiles - 1 - t : t, num_tiles, row, found.batch, found.num_counted};
  }

 private:
  // The last sequence that begins before counted tile x ends. A step looks at several places at once: their loads do
  // not wait for each other.
  FT_DEVICE i32 search(i32 x) const {
    i32 low = 0, count = batch, limit = (x + 1) * tile_rows;
    while (count > 1) {
      i32 step = ceil_div(count, kWays), hits = 0;
#pragma unroll
      for (i32 k = 1; k < kWays; ++k) {
        if (k * step < count) hits += starts[low + k * step] < limit ? 1 : 0;
      }
      low += hits * step;
      count = min_of(step, count - hits * step);
    }
    return low;
  }
};

template <class SeqInfo>
FT_DEVICE bool has_packed_queries(const Params& p) {
  return SeqInfo::kHasLengths && p.cu_seqlens_q != nullptr;
}
template <class SeqInfo>
FT_DEVICE bool has_packed_keys(const Params& p) {
  return SeqInfo::kHasLengths && p.cu_seqlens_k != nullptr && p.block_table == nullptr;
}
FT_DEVICE PackedTiles packed_query_tiles(const Params& p, i32 tile_rows) {
  return {p.cu_seqlens_q, p.batch, p.total_q, tile_rows};
}
FT_DEVICE PackedTiles packed_key_tiles(const Params& p, i32 tile_rows) {
  return {p.cu_seqlens_k, p.batch, p.total_k, tile_rows};
}

// The tile of sequences that all have `length` positions.
FT_DEVICE TilePlace place_tile(i32 length, i32 tile_rows, i32 num_rows, i32 index, bool from_last) {
  i32 num_tiles = ceil_div(length, tile_rows), rest = quotient(index, num_tiles), t = index - rest * num_tiles;
  i32 batch = quotient(rest, num_rows);
  return {from_last ? num_tiles - 1 - t : t, num_tiles, rest - batch * num_rows, batch, num_tiles};
}
// How many indices there are for tiles of queries, or of keys.
template <class SeqInfo>
FT_DEVICE i32 num_query_indices(const Params& p, i32 tile_rows, i32 num_rows) {
  if (has_packed_queries<SeqInfo>(p)) return packed_query_tiles(p, tile_rows).num_indices() * num_rows;
  return ceil_div(p.seqlen_q, tile_rows) * num_rows * p.batch;
}
template <class SeqInfo>
FT_DEVICE i32 num_key_indices(const Params& p, i32 tile_rows, i32 num_rows) {
  if (has_packed_keys<SeqInfo>(p)) return packed_key_tiles(p, tile_rows).num_indices() * num_rows;
  return ceil_div(p.seqlen_k, tile_rows) * num_rows * p.batch;
}
// The tile that an index stands for.
template <class SeqInfo>
FT_DEVICE TilePlace place_queries(const Params& p, i32 tile_rows, i32 num_rows, i32 index, bool from_last = false) {
  if (has_packed_queries<SeqInfo>(p)) return packed_query_tiles(p, tile_rows).place(index, num_rows, from_last);
  return place_tile(p.seqlen_q, tile_rows, num_rows, index, from_last);
}
template <class SeqInfo>
FT_DEVICE TilePlace place_keys(const Params& p, i32 tile_rows, i32 num_rows, i32 index) {
  if (has_packed_keys<SeqInfo>(p)) return packed_key_tiles(p, tile_rows).place(index, num_rows, false);
  return place_tile(p.seqlen_k, tile_rows, num_rows, index, false);
}

}  // namespace flashtile
