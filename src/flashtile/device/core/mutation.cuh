// Planted faults. A checker that was never seen to fail proves nothing, so test builds break one thing at a time: a
// unit that begins with `#define FT_MUTATION skip_rescale` has that fault, any other unit has none. plans/mutation.py
// reads the list below.
//
// In a kernel a fault is one line, in one of two forms:
//
//   if constexpr (mutates(Mutation::name)) wrong statement;
//   if constexpr (!mutates(Mutation::name)) correct statement;
//
// A build without faults drops the first form and keeps the statement of the second. A test strips the faults by this
// rule and compares the machine code byte by byte.
#pragma once

#include "device/core/types.cuh"

#ifndef FT_MUTATION
#define FT_MUTATION none
#endif

namespace flashtile {

enum class Mutation {
  none,
  // Found by `flashtile check`, in the Hopper forward
  fwd_sm90_rescale,      // the output is not scaled down when the maximum rises
  fwd_sm90_stale_max,    // the maximum stays that of the first tile
  fwd_sm90_last_tile,    // the last key tile is skipped
  fwd_sm90_mask_offset,  // causal and window masks are one key too far right
  fwd_sm90_tail,         // rows of V past the last key are not cleared
  fwd_sm90_gqa_head,     // query head h uses KV head h % heads_kv instead of h / group
  fwd_sm90_dropout,      // two of four words of dropout bits are swapped
  fwd_sm90_split,        // every split processes the keys of the first one
  fwd_sm90_page,         // keys after the first page are read from the page before
  fwd_sm90_later_tile,   // a block repeats its first query tile instead of its fourth
  fwd_sm90_guess,        // probabilities by the maxima of earlier tiles are kept however large they are
  fwd_sm90_rotation,     // the last block of a round skips a round
  fwd_sm90_mask_bits,    // neighbouring keys swap their bits of a bool mask
  fwd_sm90_mask_tiles,   // tiles count as fully seen if one lane's rows of the mask are
  fwd_sm90_mask_row,     // every query but a tile's first uses the bool mask of the query before
  fwd_sm90_bias_row,     // query tiles after the first use the bias of one query before
  fwd_sm90_alibi,        // ALiBi distances count from the first key instead of the last
  // Found by `flashtile check`, in the Hopper forward for short sequences
  fwd_sm90_short_rescale,      // the output is not scaled down when the maximum rises
  fwd_sm90_short_tail,         // one key past the last is attended
  fwd_sm90_short_mask_offset,  // causal and window masks are one key too far right
  fwd_sm90_short_bias_row,     // every query but the first uses the bias of the query before
  fwd_sm90_short_gqa_head,     // query head h uses KV head h % heads_kv instead of h / group
  fwd_sm90_short_item,         // the second query tile of a head has the queries of its first
  // Found by `flashtile check`, in the Hopper kernels for float32
  fwd_sm90_f32_low_part,       // the small parts of P are dropped
  fwd_sm90_f32_rescale,        // the output is not scaled down when the maximum rises
  fwd_sm90_f32_tail,           // rows past the last query or key are split instead of cleared
  fwd_sm90_f32_gqa_head,       // query head h uses KV head h % heads_kv instead of h / group
  fwd_sm90_f32_direct_rank,    // without a pre-pass: the last block of a cluster repeats the keys of the first
  fwd_sm90_f32_direct_weight,  // without a pre-pass: all blocks of a cluster have the same weight
  fwd_sm90_f32_direct_tail,    // without a pre-pass: rows past the last query or key are split instead of cleared
  fwd_sm90_f32_direct_part,    // without a pre-pass: the small parts of the second half of V's columns are dropped
  bwd_sm90_f32_unscale,        // sums of P and dS products keep the scale of their rows
  bwd_sm90_f32_group,          // dK and dV use only one query head of a group
  bwd_sm90_f32_softcap,        // dK ignores the derivative of the softcap
  bwd_sm90_f32_dropout,        // dQ ignores dropout
  bwd_sm90_f32_wide_rows,      // wide heads: every other tile repeats the 32 rows before it
  bwd_sm90_f32_wide_half,      // wide heads: both warpgroups compute the first half of dQ's columns
  bwd_sm90_f32_wide_stale,     // wide heads: dQ takes dP of the tile before
  bwd_sm90_f32_wide_slab,  // wide heads, bf16_t parts: the second slab of a block's rows is used again as the fourth
  // Found by `flashtile check`, in the Hopper decode kernel
  decode_sm90_tail,    // rows of V past the last key are not cleared
  decode_sm90_weight,  // all parts of a row tile have the same weight
  decode_sm90_unit,    // a block skips the first key tile of its share
  // Found by `flashtile check`, in the Hopper forward for wide heads
  fwd_sm90_wide_gqa_head,  // query head h uses KV head h % heads_kv instead of h / group
  fwd_sm90_wide_rescale,   // the second half of the output is not scaled down when the maximum rises
  fwd_sm90_wide_tail,      // rows of V past the last key are not cleared
  // Found by `flashtile check`, in the mma.sync forward
  fwd_sm80_rescale,    // the output is not scaled down when the maximum rises
  fwd_sm80_stale_max,  // the maximum stays that of the first tile
  fwd_sm80_skip,       // warps skip the tiles that a band cuts
  fwd_sm80_tail,       // rows past the last key are copied instead of cleared
  fwd_sm80_column,     // eight columns past head_dim are copied instead of cleared
  fwd_sm80_gqa_head,   // query head h uses KV head h % heads_kv instead of h / group
  fwd_sm80_warp_rows,  // every warp uses the queries of the first
  // Found by `flashtile check`, in the mma.sync forward in float32
  fwd_sm80_f32_small,  // products of the small parts of operands are left out
  fwd_sm80_f32_tail,   // rows past the last key are copied instead of cleared
  // Found by `flashtile check`, in the mma.sync forward for wide heads
  fwd_sm80_wide_tail,    // rows past the last key are copied instead of cleared
  fwd_sm80_wide_maxima,  // warps that share rows keep maxima of their own
  fwd_sm80_wide_sum,     // the sum of a row is that of one warp
  // Found by `flashtile check`, in the Hopper backward
  bwd_sm90_delta,        // delta without rowsum(dO * O)
  bwd_sm90_dq_tile,      // dQ of the second query tile is not added
  bwd_sm90_dq_order,     // the columns of dQ stay swizzled
  bwd_sm90_mask_offset,  // causal and window masks are one query too early
  bwd_sm90_tail,         // rows past the last query or key are not cleared
  bwd_sm90_group,        // only one query head of a group
  bwd_sm90_dropout,      // two groups of 8 keys swap their dropout bits
  bwd_sm90_mask_row,     // every query but the first uses the bool mask of the query before
  bwd_sm90_bias_row,     // query tiles after the first use the bias of one query before
  bwd_sm90_alibi,        // ALiBi distances count from the first key instead of the last
  bwd_sm90_dbias_head,   // a bias shared by all heads misses the gradient of the last head
  bwd_sm90_softcap,      // the derivative of the softcap is ignored
  // Found by `flashtile check`, in the Hopper backward for wide heads
  bwd_sm90_wide_dq_tile,      // dQ skips the last key tile
  bwd_sm90_wide_dq_mask,      // causal and window masks of dQ are one key too far right
  bwd_sm90_wide_gqa_head,     // dQ of query head h uses KV head h % heads_kv instead of h / group
  bwd_sm90_wide_mask_offset,  // causal and window masks of dK and dV are one query too early
  bwd_sm90_wide_tail,         // rows past the last query or key are not cleared
  bwd_sm90_wide_group,        // dK and dV use only one query head of a group
  bwd_sm90_wide_dropout,      // two queries of dQ swap their dropout bits
  bwd_sm90_wide_mask_row,     // every query of dQ but the first uses the bool mask of the query before
  bwd_sm90_wide_softcap,      // dK ignores the derivative of the softcap
  // Found by `flashtile check`, in the mma.sync backward
  bwd_sm80_mask_offset,  // causal and window masks are one query too early
  bwd_sm80_tail,         // rows past the last query or key are copied instead of cleared
  bwd_sm80_group,        // only one query head of a group
  bwd_sm80_dq_tile,      // dQ of the second query tile is not added
  bwd_sm80_softcap,      // the derivative of the softcap is ignored
  bwd_sm80_columns,      // warps that share keys all read the first columns of Q
  // Found by `flashtile check`, in the mma.sync backward in float32
  bwd_sm80_f32_small,        // products of the small parts of operands are left out
  bwd_sm80_f32_tail,         // rows past the last query or key are copied instead of cleared
  bwd_sm80_f32_mask_offset,  // causal and window masks of dQ are one key too far right
  bwd_sm80_f32_gqa_head,     // dQ of query head h uses KV head h % heads_kv instead of h / group
  bwd_sm80_f32_group,        // dK and dV use only one query head of a group
  // Found by `flashtile check`, in the mma.sync backward for wide heads
  bwd_sm80_wide_dq_mask,     // causal and window masks of dQ are one key too far right
  bwd_sm80_wide_gqa_head,    // dQ of query head h uses KV head h % heads_kv instead of h / group
  bwd_sm80_wide_group,       // dK and dV use only one query head of a group
  bwd_sm80_wide_tail,        // rows past the last query or key are copied instead of cleared
  bwd_sm80_wide_dbias_head,  // a bias shared by all heads misses the gradient of the last head
  // Found by `flashtile check`, in the other kernels or in code that all share
  skip_rescale,        // the output and the sum are not scaled down when the maximum rises
  stale_max,           // the maximum stays that of the first tile: correct until an exponential overflows
  score_base,          // scores in base e with exponentials in base 2
  lse_base,            // lse is stored in base 2
  drop_last_tile,      // the last key tile is skipped
  empty_row,           // a fully masked row is divided by its sum of 0
  missing_barrier,     // the dQ kernel skips the barrier after loading K and V, and one warp is late
  mask_offset,         // causal and window masks are one key too far right
  window_edge,         // the last key of a window is masked
  tail_key,            // one key past the end of the sequence is attended
  tail_column,         // elements past head_dim are read as part of the row
  gqa_head,            // query head h uses KV head h % heads_kv instead of h / group
  neighbour_length,    // a packed sequence has the number of keys of the one before it
  packed_rest,         // packed sequences lack the tile that ends at no multiple of its size
  page_index,          // keys after the first page are read from the page before
  bias_row,            // every row but the first uses the bias of the row above
  alibi_offset,        // ALiBi distances count from the first key instead of the last
  dropout_lane,        // neighbouring keys swap their dropout bits
  dropout_origin,      // dropout counts queries from the first of the call, not of the larger problem
  dropout_backward,    // dK and dV ignore dropout
  sink_twice,          // the sink joins the sum twice
  combine_weight,      // all splits have the same weight
  softcap_derivative,  // the backward pass ignores the derivative of the softcap
  delta_missing,       // delta without rowsum(dO * O)
  dlse_ignored,        // the gradient of lse is ignored
  dq_tile,             // dQ skips the second key tile
  dk_group,            // dK and dV use only one query head of a group
  dbias_head,          // a bias shared by all heads misses the gradient of the last head
  dsinks_sign,         // the gradient of the sinks has the wrong sign
  // Found by a tool of compute-sanitizer; racecheck also finds missing_barrier
  out_of_bounds,           // memcheck: a float is written past the end of lse
  uninitialised,           // initcheck: delta is read but never written
  divergent_barrier,       // synccheck: half of the threads reach a barrier
  fwd_sm80_out_of_bounds,  // memcheck: a float is written past the end of lse
  fwd_sm80_race,           // racecheck: the query tile is written while other threads read it
  fwd_sm80_uninitialised,  // initcheck: lse is read before it is written
  fwd_sm90_out_of_bounds,  // memcheck: a float is written past the end of lse
  fwd_sm90_race,           // racecheck: the tile scheduler is written while other threads read it
  fwd_sm90_uninitialised,  // initcheck: lse is read before it is written
};

// True in a build with this fault.
FT_DEVICE constexpr bool mutates(Mutation fault) { return fault == Mutation::FT_MUTATION; }

// Waits a few microseconds, so that a missing barrier shows. Scope: thread.
FT_DEVICE void be_late() {
  for (long long begin = clock64(); clock64() - begin < 10000;) {}
}

}  // namespace flashtile
