// Which keys a query sees: the range of a block of rows, whether a tile needs masking, and the test of one element. Scope: thread.
#pragma once

#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/mutation.cuh"

namespace flashtile {

struct Range {
  i32 begin, end;
};

// The keys that queries [i_begin, i_end) may see.
template <class Mask>
FT_DEVICE Range key_range(const Params& p, const Sequence& s, i32 i_begin, i32 i_end) {
  Range r{0, s.seqlen_k};
  if constexpr (Mask::kHasBand) {
    if (p.window_left >= 0) r.begin = clamp(i_begin + s.offset - p.window_left, 0, s.seqlen_k);
    if (p.window_right >= 0) r.end = clamp(i_end + s.offset + p.window_right, 0, s.seqlen_k);
  }
  return r;
}

// The keys that each of the queries [i_begin, i_end) sees, a bool mask aside.
template <class Mask>
FT_DEVICE Range common_key_range(const Params& p, const Sequence& s, i32 i_begin, i32 i_end) {
  Range r{0, s.seqlen_k};
  if constexpr (Mask::kHasBand) {
    if (p.window_left >= 0) r.begin = clamp(i_end - 1 + s.offset - p.window_left, 0, s.seqlen_k);
    if (p.window_right >= 0) r.end = clamp(i_begin + 1 + s.offset + p.window_right, 0, s.seqlen_k);
  }
  return r;
}

// The queries that may see any of the keys [j_begin, j_end).
template <class Mask>
FT_DEVICE Range query_range(const Params& p, const Sequence& s, i32 j_begin, i32 j_end) {
  Range r{0, s.seqlen_q};
  if constexpr (Mask::kHasBand) {
    if (p.window_right >= 0) r.begin = clamp(j_begin - s.offset - p.window_right, 0, s.seqlen_q);
    if (p.window_left >= 0) r.end = clamp(j_end - s.offset + p.window_left, 0, s.seqlen_q);
  }
  return r;
}

// Some element of the tile [i, i + num_rows) x [j, j + num_columns) is outside the sequence, outside the band or under a bool mask.
template <class Mask>
FT_DEVICE bool needs_mask(const Params& p, const Sequence& s, i32 i, i32 num_rows, i32 j, i32 num_columns) {
  bool is_edge = Mask::kHasBool || j + num_columns > s.seqlen_k || i + num_rows > s.seqlen_q;
  if constexpr (Mask::kHasBand) {
    is_edge |= p.window_right >= 0 && j + num_columns - 1 > i + s.offset + p.window_right;
    is_edge |= p.window_left >= 0 && j < i + num_rows - 1 + s.offset - p.window_left;
  }
  return is_edge;
}

// Query i sees key j.
template <class Mask>
FT_DEVICE bool is_seen(const Params& p, const Sequence& s, i32 head, i32 i, i32 j) {
  bool seen = j < s.seqlen_k && i < s.seqlen_q;
  if constexpr (mutates(Mutation::tail_key)) seen = j <= s.seqlen_k && i < s.seqlen_q;
  if constexpr (Mask::kHasBand) {
    i32 distance = i + s.offset - j;
    if constexpr (mutates(Mutation::mask_offset)) distance += 1;
    seen = seen && (p.window_left < 0 || distance <= p.window_left) && (p.window_right < 0 || -distance <= p.window_right);
    if constexpr (mutates(Mutation::window_edge)) seen = seen && (p.window_left < 0 || distance < p.window_left);
  }
  if constexpr (Mask::kHasBool) {
    if (seen) {
      i64 at = s.batch_idx * p.mask_strides[0] + head * p.mask_strides[1] + i * p.mask_strides[2] + j * p.mask_strides[3];
      seen = p.mask[at] != 0;
    }
  }
  return seen;
}

}  // namespace flashtile
