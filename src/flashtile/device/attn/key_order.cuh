// The order in which blocks that own keys start.
//
// Blocks of one head are consecutive, so that those that run together share Q and dO in L2. Where sums have a fixed
// order, block n of a head may add to a query tile only after block n - 1: it follows at a distance of about
// kOrderDistance tiles. Consecutive blocks start together, so those of a head would wait for each other. The heads of a
// group then take turns: the next block of a head starts when its predecessor is that many tiles ahead.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

struct KeyBlock {
  i32 n;    // block of keys
  i32 row;  // KV head and sequence
};

constexpr i32 kOrderDistance = 2;

// Heads whose blocks start in turn, if a block has num_tiles query tiles. Scope: thread.
FT_DEVICE i32 order_group(i32 num_rows, i32 num_tiles, i32 num_multiprocessors) {
  i32 group = (kOrderDistance * num_multiprocessors + num_tiles - 1) / (num_tiles < 1 ? 1 : num_tiles);
  return group < 1 ? 1 : group < num_rows ? group : num_rows;
}

// The block of keys that thread block number index owns. A block comes after all blocks of its row with a smaller n.
// Scope: thread.
FT_DEVICE KeyBlock key_block(i32 index, i32 num_n_blocks, i32 num_rows, i32 group) {
  i32 first = index / (num_n_blocks * group) * group, rest = index - first * num_n_blocks;
  i32 size = num_rows - first < group ? num_rows - first : group;
  return {rest / size, first + rest % size};
}

}  // namespace flashtile
