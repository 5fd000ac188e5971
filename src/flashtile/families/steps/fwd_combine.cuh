// Merges the splits of the keys: o = sum_s 2^(m_s - m) o_s / l, l = sum_s 2^(m_s - m) l_s + 2^(sink - m), m the largest
// of all; powers of e for natural scores (score_unit.cuh). Every sum has a fixed order.
//
// Grid:    one block of 4 warps per (4 rows, head, batch), one warp per row. For m and l the lanes share the splits,
//          for o the columns.
#pragma once

#include "device/attn/merge.cuh"
#include "device/attn/sequence.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/reduce.cuh"

namespace flashtile {

constexpr i32 kCombineRows = 4;
constexpr i32 kCombineColumns = 8;  // per lane at a time

template <typename Out, class SeqInfo>
__global__ void __launch_bounds__(32 * kCombineRows) fwd_combine_kernel(const FT_GRID_CONSTANT Params p) {
  TilePlace place = place_queries<SeqInfo>(p, kCombineRows, p.heads, static_cast<i32>(blockIdx.x));
  i32 head = place.row;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  i32 i = place.tile * kCombineRows + threadIdx.x / 32, lane = threadIdx.x % 32;
  // It is never negative; without a word about it, kernels for packed sequences spill (sm_100)
  if (i < 0 || i >= s.seqlen_q) return;
  i64 stat = stat_index(p, s, head, i);

  // Find the common maximum and sum
  bool is_natural = has_natural_scores(p);
  float factor = exponent_factor(is_natural);
  float m = p.sinks == nullptr ? -infinity() : in_score_unit(is_natural, p.sinks[head]);
  float sink = m;
  for (i32 split = lane; split < p.num_splits; split += 32) {
    m = max_of(m, partial_stats(p, split * p.lse_size + stat).x);
  }
  m = lanes_max<32>(m);
  float shift = shift_of(m), l = 0.0f;
  for (i32 split = lane; split < p.num_splits; split += 32) {
    float2 part = partial_stats(p, split * p.lse_size + stat);
    l += exp_difference(part.x, shift, factor) * part.y;
  }
  l = lanes_sum<32>(l);
  l += exp_difference(sink, shift, factor);
  if (lane == 0) p.lse[stat] = lse_of(is_natural, m, l);

  // Add up the weighted splits and store
  Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, head) + i * p.out_strides.row;
  float norm = l == 0.0f ? 0.0f : 1.0f / l;
  for (i32 first = lane; first < p.head_dim_v; first += 32 * kCombineColumns) {
    float sums[kCombineColumns] = {};
#pragma unroll 4
    for (i32 split = 0; split < p.num_splits; ++split) {
      i64 part = split * p.lse_size + stat;
      float weight = exp_difference(partial_stats(p, part).x, shift, factor) * norm;
      if constexpr (mutates(Mutation::combine_weight)) weight = norm;
      const float* partial = p.partial_out + part * p.head_dim_v;
#pragma unroll
      for (i32 x = 0; x < kCombineColumns; ++x) {
        i32 d = first + 32 * x;
        if (d < p.head_dim_v) sums[x] += weight * partial[d];
      }
    }
#pragma unroll
    for (i32 x = 0; x < kCombineColumns; ++x) {
      i32 d = first + 32 * x;
      if (d < p.head_dim_v) gO[d] = from_float<Out>(sums[x]);
    }
  }
}

}  // namespace flashtile
