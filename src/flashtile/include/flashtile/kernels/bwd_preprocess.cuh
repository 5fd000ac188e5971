// Before the backward pass: delta = rowsum(dO * O) - dlse and lse in base 2, for every query row; and the gradient of the sinks.
//
// bwd_preprocess_kernel: one block of 4 warps for each (64 rows, head, batch), one warp to a row.
// bwd_dsinks_kernel: one block for each head, over all its rows, in a fixed order.
#pragma once

#include "flashtile/attn/sequence.cuh"
#include "flashtile/core/mutation.cuh"

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
  for (i32 i = first + threadIdx.x / 32; i < min_of(first + kPreprocessRows, s.seqlen_q); i += kPreprocessThreads / 32) {
    float sum = 0.0f;
    for (i32 d = lane; d < p.head_dim_v; d += 32) sum += to_float(gO[i * p.out_strides.row + d]) * to_float(gdO[i * p.dout_strides.row + d]);
#pragma unroll
    for (i32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      i64 at = s.stat_row + head * p.lse_head_stride + i;
      // A row that saw nothing has no gradient: 2^(score - inf) = 0, and its delta is 0 whatever came in
      bool is_empty = p.lse[at] == -infinity();
      if constexpr (mutates(Mutation::delta_missing)) sum = 0.0f;
      if constexpr (!mutates(Mutation::dlse_ignored)) if (p.dlse != nullptr) sum -= p.dlse[at];
      if constexpr (!mutates(Mutation::uninitialised)) p.delta[at] = is_empty ? 0.0f : sum;
      p.lse_log2[at] = is_empty ? infinity() : p.lse[at] * kLog2e;
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
      i64 at = s.stat_row + head * p.lse_head_stride + i;
      sum -= exp2_approx(sink - p.lse_log2[at]) * p.delta[at];
      if constexpr (mutates(Mutation::dsinks_sign)) sum += 2.0f * exp2_approx(sink - p.lse_log2[at]) * p.delta[at];
    }
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (i32 step = kPreprocessThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.dsinks[head] = partial[0];
}

}  // namespace flashtile
