// Joins the outputs of the splits of the keys: o = sum_s 2^(lse_s - lse) o_s, lse = log sum_s exp(lse_s) + exp(sink).
//
// Grid: one block of 4 warps for each (4 rows, head, batch), one warp to a row; splits are summed in their order.
#pragma once

#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/mutation.cuh"

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
  for (i32 split = 0; split < p.num_splits; ++split) m = max_of(m, p.partial_lse[split * p.lse_size + stat] * kLog2e);
  float shift = m == -infinity() ? 0.0f : m;
  float l = p.sinks == nullptr ? 0.0f : exp2_approx(p.sinks[head] * kLog2e - shift);
  for (i32 split = 0; split < p.num_splits; ++split) l += exp2_approx(p.partial_lse[split * p.lse_size + stat] * kLog2e - shift);
  if (lane == 0) p.lse[stat] = (m + log2_approx(l)) * kLn2;

  Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, head) + i * p.out_strides.row;
  float factor = l == 0.0f ? 0.0f : 1.0f / l;
  for (i32 d = lane; d < p.head_dim_v; d += 32) {
    float sum = 0.0f;
    for (i32 split = 0; split < p.num_splits; ++split) {
      i64 part = split * p.lse_size + stat;
      float weight = exp2_approx(p.partial_lse[part] * kLog2e - shift) * factor;
      if constexpr (mutates(Mutation::combine_weight)) weight = 1.0f / static_cast<float>(p.num_splits);
      sum += weight * p.partial_out[part * p.head_dim_v + d];
    }
    gO[d] = from_float<Out>(sum);
  }
}

}  // namespace flashtile
