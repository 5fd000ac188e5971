// Which keys a block of queries sees, which queries see a block of keys, and which tiles need a mask. A band is a
// causal mask or a window: query i sees the keys from i + offset - window_left to i + offset + window_right. Scope of
// every function: thread.
#pragma once

#include "device/attn/sequence.cuh"

namespace flashtile {

struct Range {
  i32 begin, end;
};

// position - window and position + window, clamped to [0, length]. A window may be 2^31 - 1: written as sums, they
// could overflow.
FT_DEVICE i32 window_begin(i32 position, i32 window, i32 length) {
  return position <= window ? 0 : min_of(position - window, length);
}
FT_DEVICE i32 window_end(i32 position, i32 window, i32 length) {
  return window >= length - position ? length : max_of(position + window, 0);
}

// The keys that any of the queries [i_begin, i_end) sees.
template <class Mask>
FT_DEVICE Range key_range(const Params& p, const Sequence& s, i32 i_begin, i32 i_end) {
  Range r{0, s.seqlen_k};
  if constexpr (Mask::kHasBand) {
    if (p.window_left >= 0) r.begin = window_begin(i_begin + s.offset, p.window_left, s.seqlen_k);
    if (p.window_right >= 0) r.end = window_end(i_end + s.offset, p.window_right, s.seqlen_k);
  }
  return r;
}

// The keys that all of the queries [i_begin, i_end) see, before a bool mask.
template <class Mask>
FT_DEVICE Range common_key_range(const Params& p, const Sequence& s, i32 i_begin, i32 i_end) {
  Range r{0, s.seqlen_k};
  if constexpr (Mask::kHasBand) {
    if (p.window_left >= 0) r.begin = window_begin(i_end - 1 + s.offset, p.window_left, s.seqlen_k);
    if (p.window_right >= 0) r.end = window_end(i_begin + 1 + s.offset, p.window_right, s.seqlen_k);
  }
  return r;
}

// The queries that see any of the keys [j_begin, j_end).
template <class Mask>
FT_DEVICE Range query_range(const Params& p, const Sequence& s, i32 j_begin, i32 j_end) {
  Range r{0, s.seqlen_q};
  if constexpr (Mask::kHasBand) {
    if (p.window_right >= 0) r.begin = window_begin(j_begin - s.offset, p.window_right, s.seqlen_q);
    if (p.window_left >= 0) r.end = window_end(j_end - s.offset, p.window_left, s.seqlen_q);
  }
  return r;
}

// True if some element of [i, i + num_rows) x [j, j + num_columns) is outside the sequence or the band, or if there is
// a bool mask.
template <class Mask>
FT_DEVICE bool needs_mask(const Params& p, const Sequence& s, i32 i, i32 num_rows, i32 j, i32 num_columns) {
  bool is_edge = Mask::kHasBool || j + num_columns > s.seqlen_k || i + num_rows > s.seqlen_q;
  if constexpr (Mask::kHasBand) {
    is_edge |= p.window_right >= 0 && j + num_columns - 1 - (i + s.offset) > p.window_right;
    is_edge |= p.window_left >= 0 && i + num_rows - 1 + s.offset - j > p.window_left;
  }
  return is_edge;
}

// The part of the key tiles [n_begin, n_end) that belongs to one split.
FT_DEVICE void split_tiles(const Params& p, i32 split, i32& n_begin, i32& n_end) {
  if (p.num_splits > 1) {
    i32 share = ceil_div(max_of(n_end - n_begin, 0), p.num_splits);
    n_begin += split * share;
    n_end = min_of(n_end, n_begin + share);
  }
}

}  // namespace flashtile
