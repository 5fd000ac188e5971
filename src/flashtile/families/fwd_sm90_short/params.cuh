// The arguments of the Hopper forward for short sequences and of its pre-pass. family.py mirrors the struct.
#pragma once

#include "device/attn/params.cuh"
#include "device/ptx/tma.cuh"

namespace flashtile {

// The maps' axes are (head_dim, rows, heads, batch); their boxes have 64 columns.
struct FwdSm90ShortParams {
  Params base;
  TensorMap q_map;         // boxes of 64 rows
  TensorMap k_map, v_map;  // boxes of kBlockN rows
  uint4* bias_fragments;   // a bias as score fragments (bias_fragments.cuh), or null
};

// Where the fragments of a query tile begin, for a thread of the warpgroup: one uint4, 8 scores, for each 16 keys, 128
// apart. The last keys of the last 16 may not exist: they are -inf. Scope: thread.
FT_DEVICE uint4* bias_fragments(const FwdSm90ShortParams& params, i32 num_steps, i32 batch, i32 head, i32 query_tile) {
  const Params& p = params.base;
  i64 plane = (p.bias_sizes[0] == 1 ? 0 : batch) * p.bias_sizes[1] + (p.bias_sizes[1] == 1 ? 0 : head);
  i64 tile = plane * ((p.seqlen_q + 63) / 64) + query_tile;
  return params.bias_fragments + tile * num_steps * 128 + threadIdx.x % 128;
}

}  // namespace flashtile
