// Before the backward pass: delta = rowsum(dO * O) - dlse and lse in base 2 for every query row, and the gradient of
// the sinks.
//
// bwd_preprocess_kernel  one block of 4 warps per (64 rows, head, batch), one warp per row
// bwd_dsinks_kernel      one block per head; sums all its rows in a fixed order
#pragma once

#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/mutation.cuh"
#include "flashtile/core/reduce.cuh"

namespace flashtile {

constexpr i32 kPreprocessRows = 64;
constexpr i32 kPreprocessThreads = 128;

template <typename Out, class SeqInfo>
__global__ void __launch_bounds__(kPreprocessThreads) bwd_preprocess_kernel(const FT_GRID_CONSTANT Params p) {
  i32 num_blocks = ceil_div(p.seqlen_q, kPreprocessRows);
  i32 head = blockIdx.x / num_blocks % p.heads;
  Sequence s = find_sequence<SeqInfo>(p, blockIdx.x / num_blocks / p.heads);
  const Out* gO = query_rows(static_cast<const Out*>(p.out), p.out_strides, s, head);
  const Out* gdO = query_rows(static_cast<const Out*>(p.dout), p.dout_strides, s, head);
  i32 lane = threadIdx.x % 32, first = blockIdx.x % num_blocks * kPreprocessRows;
  i32 end = min_of(first + kPreprocessRows, s.seqlen_q);
  for (i32 i = first + threadIdx.x / 32; i < end; i += kPreprocessThreads / 32) {
    // rowsum(dO * O)
    float sum = 0.0f;
    for (i32 d = lane; d < p.head_dim_v; d += 32) {
      sum += to_float(gO[i * p.out_strides.row + d]) * to_float(gdO[i * p.dout_strides.row + d]);
    }
    sum = lanes_sum<32>(sum);
    if (lane == 0) {
      i64 stat = stat_index(p, s, head, i);
      // A fully masked row has no gradient: lse_log2 = +inf makes P 0, and delta is 0 whatever dlse is
      bool is_empty = p.lse[stat] == -infinity();
      if constexpr (mutates(Mutation::delta_missing)) sum = 0.0f;
      if constexpr (!mutates(Mutation::dlse_ignored))
        if (p.dlse != nullptr) sum -= p.dlse[stat];
      if constexpr (!mutates(Mutation::uninitialised)) p.delta[stat] = is_empty ? 0.0f : sum;
      p.lse_log2[stat] = is_empty ? infinity() : p.lse[stat] * kLog2e;
    }
  }
}

template <class SeqInfo>
__global__ void __launch_bounds__(kPreprocessThreads) bwd_dsinks_kernel(const FT_GRID_CONSTANT Params p) {
  __shared__ float partial[kPreprocessThreads];
  i32 head = blockIdx.x;
  float sink = p.sinks[head] * kLog2e, sum = 0.0f;
  for (i32 b = 0; b < p.batch; ++b) {
    Sequence s = find_sequence<SeqInfo>(p, b);
    for (i32 i = threadIdx.x; i < s.seqlen_q; i += kPreprocessThreads) {
      i64 stat = stat_index(p, s, head, i);
      sum -= exp2_approx(sink - p.lse_log2[stat]) * p.delta[stat];
      if constexpr (mutates(Mutation::dsinks_sign)) sum += 2.0f * exp2_approx(sink - p.lse_log2[stat]) * p.delta[stat];
    }
  }
  // Sum over the block
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (i32 step = kPreprocessThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.dsinks[head] = partial[0];
}

}  // namespace flashtile
