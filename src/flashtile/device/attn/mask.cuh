// Whether a query sees a key: sequence lengths, band (causal or window) and bool mask. Scope: thread.
#pragma once

#include "device/attn/sequence.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

// True if query i sees key j.
template <class Mask>
FT_DEVICE bool is_seen(const Params& p, const Sequence& s, i32 head, i32 i, i32 j) {
  bool seen = j < s.seqlen_k && i < s.seqlen_q;
  if constexpr (mutates(Mutation::tail_key)) seen = j <= s.seqlen_k && i < s.seqlen_q;
  if constexpr (Mask::kHasBand) {
    i32 distance = i + s.offset - j;
    if constexpr (mutates(Mutation::mask_offset)) distance += 1;
    seen =
        seen && (p.window_left < 0 || distance <= p.window_left) && (p.window_right < 0 || -distance <= p.window_right);
    if constexpr (mutates(Mutation::window_edge)) seen = seen && (p.window_left < 0 || distance < p.window_left);
  }
  if constexpr (Mask::kHasBool) {
    if (seen) {
      i64 index =
          s.batch_idx * p.mask_strides[0] + head * p.mask_strides[1] + i * p.mask_strides[2] + j * p.mask_strides[3];
      seen = p.mask[index] != 0;
    }
  }
  return seen;
}

}  // namespace flashtile
