// Joins the sums over the splits of the keys: o = sum_s 2^(m_s - m) o_s / l, l = sum_s 2^(m_s - m) l_s + 2^(sink - m), m the greatest of all.
//
// Grid: one block of 4 warps for each (4 rows, head, batch), one warp to a row; splits are summed in their order.
#pragma once

#include "flashtile/attn/merge.cuh"
#include "flashtile/attn/sequence.cuh"

namespace flashtile {

constexpr i32 kCombineRows = 4;

template <typename Out, class SeqInfo>
__global__ void __launch_bounds__(32 * kCombineRows) fwd_combine_kernel(const FT_GRID_CONSTANT Params p) {
  i32 num_blocks = ceil_div(p.seqlen_q, kCombineRows);
  i32 head = blockIdx.x / num_blocks % p.heads;
  Sequence s = find_sequence<SeqInfo>(p, blockIdx.x / num_blocks / p.heads);
  i32 i = blockIdx.x % num_blocks * kCombineRows + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= s.seqlen_q) return;
  i64 stat = s.stat_row + head * p.lse_head_stride + i;

  // The common maximum and sum, base 2
  float m = p.sinks == nullptr ? -infinity() : p.sinks[head] * kLog2e;
  for (i32 split = 0; split < p.num_splits; ++split) m = max_of(m, partial_stats(p, split * p.lse_size + stat).x);
  float shift = m == -infinity() ? 0.0f : m;
  float l = p.sinks == nullptr ? 0.0f : exp2_approx(p.sinks[head] * kLog2e - shift);
  for (i32 split = 0; split < p.num_splits; ++split) {
    float2 part = partial_stats(p, split * p.lse_size + stat);
    l += exp2_approx(part.x - shift) * part.y;
  }
  if (lane == 0) p.lse[stat] = lse_of(m, l);

  Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, head) + i * p.out_strides.row;
  float factor = l == 0.0f ? 0.0f : 1.0f / l;
  for (i32 d = lane; d < p.head_dim_v; d += 32) {
    float sum = 0.0f;
    for (i32 split = 0; split < p.num_splits; ++split) {
      i64 part = split * p.lse_size + stat;
      float weight = exp2_approx(partial_stats(p, part).x - shift) * factor;
      if constexpr (mutates(Mutation::combine_weight)) weight = factor;
      sum += weight * p.partial_out[part * p.head_dim_v + d];
    }
    gO[d] = from_float<Out>(sum);
  }
}

}  // namespace flashtile
