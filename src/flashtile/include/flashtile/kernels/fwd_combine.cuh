// Merges the splits of the keys: o = sum_s 2^(m_s - m) o_s / l, l = sum_s 2^(m_s - m) l_s + 2^(sink - m), m the largest
// of all. Every sum has a fixed order.
//
// Grid:    one block of 4 warps per (4 rows, head, batch), one warp per row. For m and l the lanes share the splits,
//          for o the columns.
#pragma once

#include "flashtile/attn/merge.cuh"
#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/reduce.cuh"

namespace flashtile {

constexpr i32 kCombineRows = 4;
constexpr i32 kCombineColumns = 8;  // per lane, at most

template <typename Out, class SeqInfo>
__global__ void __launch_bounds__(32 * kCombineRows) fwd_combine_kernel(const FT_GRID_CONSTANT Params p) {
  i32 num_blocks = ceil_div(p.seqlen_q, kCombineRows);
  i32 head = blockIdx.x / num_blocks % p.heads;
  Sequence s = find_sequence<SeqInfo>(p, blockIdx.x / num_blocks / p.heads);
  i32 i = blockIdx.x % num_blocks * kCombineRows + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= s.seqlen_q) return;
  i64 stat = stat_index(p, s, head, i);

  // Find the common maximum and sum, base 2
  float m = p.sinks == nullptr ? -infinity() : p.sinks[head] * kLog2e;
  float sink = m;
  for (i32 split = lane; split < p.num_splits; split += 32) {
    m = max_of(m, partial_stats(p, split * p.lse_size + stat).x);
  }
  m = lanes_max<32>(m);
  float shift = shift_of(m), l = 0.0f;
  for (i32 split = lane; split < p.num_splits; split += 32) {
    float2 part = partial_stats(p, split * p.lse_size + stat);
    l += exp2_approx(part.x - shift) * part.y;
  }
  l = lanes_sum<32>(l);
  l += exp2_approx(sink - shift);
  if (lane == 0) p.lse[stat] = lse_of(m, l);

  // Add up the weighted splits and store
  Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, head) + i * p.out_strides.row;
  float factor = l == 0.0f ? 0.0f : 1.0f / l;
  float sums[kCombineColumns] = {};
#pragma unroll 4
  for (i32 split = 0; split < p.num_splits; ++split) {
    i64 part = split * p.lse_size + stat;
    float weight = exp2_approx(partial_stats(p, part).x - shift) * factor;
    if constexpr (mutates(Mutation::combine_weight)) weight = factor;
    const float* partial = p.partial_out + part * p.head_dim_v;
#pragma unroll
    for (i32 x = 0; x < kCombineColumns; ++x) {
      i32 d = lane + 32 * x;
      if (d < p.head_dim_v) sums[x] += weight * partial[d];
    }
  }
#pragma unroll
  for (i32 x = 0; x < kCombineColumns; ++x) {
    i32 d = lane + 32 * x;
    if (d < p.head_dim_v) gO[d] = from_float<Out>(sums[x]);
  }
}

}  // namespace flashtile
