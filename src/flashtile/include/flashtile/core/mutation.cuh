// Faults on purpose. A checker that was never seen to fail proves nothing, so test builds break one thing at a time: a unit that begins with
// `#define FT_MUTATION skip_rescale` has that fault, any other unit has none. Python reads the list below (kernels/mutation.py).
//
// In the kernels a fault is a line of its own, in one of two forms:
//   if constexpr (mutates(Mutation::name)) something wrong;            without faults the line is not there
//   if constexpr (!mutates(Mutation::name)) what the kernel does;      without faults only its statement is
// A test strips them by that rule and finds the same machine code, byte by byte.
#pragma once

#include "flashtile/core/types.cuh"

#ifndef FT_MUTATION
#define FT_MUTATION none
#endif

namespace flashtile {

enum class Mutation {
  none,
  // Found by `flashtile check`: in the Hopper forward, where it has its own way to do something
  hopper_rescale,      // the output is not scaled down when the maximum rises
  hopper_stale_max,    // the maximum stays that of the first tile
  hopper_last_tile,    // the last tile of keys is left out
  hopper_mask_offset,  // causal and window masks one key to the right
  hopper_tail,         // rows of V behind the last key are not cleared
  hopper_gqa_head,     // query heads take key heads in turn instead of in groups
  hopper_dropout,      // two of four words of dropout bits are swapped
  hopper_split,        // every split of the keys is the first
  hopper_later_tile,   // a block does its first tile of work again instead of its fourth
  // and in the other kernels, or in what all share
  skip_rescale,        // the output and the sum are not scaled down when the maximum rises
  stale_max,           // the maximum stays that of the first tile: right until an exponential overflows
  score_base,          // scores in base e under exponentials in base 2
  lse_base,            // lse stored as a logarithm to base 2
  drop_last_tile,      // the last tile of keys is left out
  empty_row,           // a row that saw nothing is divided by its sum of 0
  missing_barrier,     // threads that sum up dQ wait for their own part of the K and V tiles only, and one warp is late
  mask_offset,         // causal and window masks one key to the right
  window_edge,         // the last key of a window is hidden
  tail_key,            // one key behind the end of the sequence counts
  tail_column,         // elements behind head_dim are read as if they belonged to the row
  gqa_head,            // query heads take key heads in turn instead of in groups
  neighbour_length,    // a packed sequence has the number of keys of the one before it
  page_index,          // keys behind the first page are read from the page before theirs
  bias_row,            // every row but the first takes the bias of the row above
  alibi_offset,        // ALiBi distances count from the first key instead of the last
  dropout_lane,        // neighbouring keys swap their dropout bits
  dropout_backward,    // dK and dV forget dropout
  sink_twice,          // the sink joins the sum a second time
  combine_weight,      // splits of the keys weigh alike
  softcap_derivative,  // the backward pass forgets the slope of the softcap
  delta_missing,       // delta without rowsum(dO * O)
  dlse_ignored,        // the gradient that comes in through lse is lost
  dq_tile,             // dQ loses the second tile of keys
  dk_group,            // dK and dV come from one query head of a group
  dbias_head,          // a bias shared by all heads loses the gradient of the last
  dsinks_sign,         // the gradient of the sinks has the wrong sign
  // Seen by a tool of compute-sanitizer, as missing_barrier is by racecheck
  out_of_bounds,       // memcheck: a float is written behind the end of lse
  uninitialised,       // initcheck: delta is read where nobody wrote it
  divergent_barrier,   // synccheck: half of the threads go to a barrier
  hopper_out_of_bounds,  // memcheck: a float is written behind the end of lse
  hopper_race,           // racecheck: the order of tiles is written while others read it
  hopper_uninitialised,  // initcheck: lse is read before it is written
};

FT_DEVICE constexpr bool mutates(Mutation fault) { return fault == Mutation::FT_MUTATION; }

// A few microseconds: what a missing barrier needs to show.
FT_DEVICE void be_late() {
  for (long long begin = clock64(); clock64() - begin < 10000;) {}
}

}  // namespace flashtile
