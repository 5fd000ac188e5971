// Rows of a query tile that no query fills, where a tile holds the queries of all heads that share a KV head: 44 of 64
// rows are used by 22 heads. They are computed too. Nothing of theirs is stored, but the rows of a warp vote on when
// maxima are raised (attn/online_softmax.cuh): were they what an earlier kernel left in shared memory, the same call
// would not give the same bits.
#pragma once

#include "flashtile/attn/work_item.cuh"
#include "flashtile/tile/smem_tile.cuh"

namespace flashtile {

// Clears the rows of Q behind those that TMA copies. A barrier of the block must follow. Scope: warpgroup.
template <class Config, typename T>
FT_DEVICE void clear_unused_rows(const Params& p, T* sQ) {
  using Packing = HeadPacking<Config>;
  clear_rows<64, Config::kSlabsQK>(sQ, Packing::num_heads(p) * Packing::num_queries(p));
}

}  // namespace flashtile
