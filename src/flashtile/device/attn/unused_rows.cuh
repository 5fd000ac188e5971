// Rows of a query tile without a query. A tile holds queries of several heads (attn/head_packing.cuh), and 64 need not
// be a multiple of their number: 22 heads with 2 queries each use 44 rows of 64.
//
// Unused rows are computed, not stored. They still take part in the warp's vote on raising maxima
// (attn/online_softmax.cuh). TMA does not write them, so whatever an earlier kernel left in shared memory would decide
// when used rows are rescaled, and equal calls could differ in their last bits. Zeros prevent that.
#pragma once

#include "device/attn/work_item.cuh"
#include "device/tile/smem_tile.cuh"

namespace flashtile {

// Zeros the rows of a consumer's Q behind those that TMA copies. A barrier of the block must follow. Scope: warpgroup.
template <class Config, typename T>
FT_DEVICE void clear_unused_rows(const Params& p, T* sQ) {
  using Packing = HeadPacking<Config>;
  clear_rows<64, Config::kSlabsQK>(sQ, Packing::num_heads(p) * Packing::num_queries(p));
}

}  // namespace flashtile
