// Before the backward pass: delta = rowsum(dO * O) - dlse and lse in the unit of scores for every query row, and the
// gradient of the sinks.
//
// bwd_preprocess_kernel  one block of 4 warps per (64 rows, head, batch), one warp per row
// bwd_dsinks_kernel      one block per head; sums all its rows in a fixed order
#pragma once

#include "device/attn/score_unit.cuh"
#include "device/attn/sequence.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"
#include "device/core/reduce.cuh"

namespace flashtile {

constexpr i32 kPreprocessRows = 64;
constexpr i32 kPreprocessThreads = 128;

template <typename Out, class SeqInfo>
__global__ void __launch_bounds__(kPreprocessThreads) bwd_preprocess_kernel(const FT_GRID_CONSTANT Params p) {
  TilePlace place = place_queries<SeqInfo>(p, kPreprocessRows, p.heads, static_cast<i32>(blockIdx.x));
  i32 head = place.row;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  const Out* gO = query_rows(static_cast<const Out*>(p.out), p.out_strides, s, head);
  const Out* gdO = query_rows(static_cast<const Out*>(p.dout), p.dout_strides, s, head);
  i32 lane = threadIdx.x % 32, first = place.tile * kPreprocessRows;
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
      // A fully masked row has no gradient: score_lse = +inf makes P 0, and delta is 0 whatever dlse is
      bool is_empty = p.lse[stat] == -infinity();
      if constexpr (mutates(Mutation::delta_missing)) sum = 0.0f;
      if constexpr (!mutates(Mutation::dlse_ignored))
        if (p.dlse != nullptr) sum -= p.dlse[stat];
      if constexpr (!mutates(Mutation::uninitialised)) p.delta[stat] = is_empty ? 0.0f : sum;
      p.score_lse[stat] = is_empty ? infinity() : in_score_unit(has_natural_scores(p), p.lse[stat]);
    }
  }
}

template <class SeqInfo>
__global__ void __launch_bounds__(kPreprocessThreads) bwd_dsinks_kernel(const FT_GRID_CONSTANT Params p) {
  __shared__ float partial[kPreprocessThreads];
  i32 head = blockIdx.x;
  bool is_natural = has_natural_scores(p);
  float factor = exponent_factor(is_natural), sink = in_score_unit(is_natural, p.sinks[head]), sum = 0.0f;
  for (i32 b = 0; b < p.batch; ++b) {
    Sequence s = find_sequence<SeqInfo>(p, b);
    for (i32 i = threadIdx.x; i < s.seqlen_q; i += kPreprocessThreads) {
      i64 stat = stat_index(p, s, head, i);
      float share = probability(sink, p.score_lse[stat], factor) * p.delta[stat];
      sum -= share;
      if constexpr (mutates(Mutation::dsinks_sign)) sum += 2.0f * share;
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
