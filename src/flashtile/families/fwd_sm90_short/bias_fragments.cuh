// Before the Hopper forward for short sequences: a 16-bit bias in the order of score fragments (tile/fragment.cuh), so
// that a thread loads what it adds, 16 bytes at a time. A bias that all sequences share is then read from L2.
//
// Grid:     one block per (64 queries, head, batch), of those that differ in the bias
// Threads:  the 128 of a warpgroup
#pragma once

#include "device/core/mutation.cuh"
#include "device/tile/fragment.cuh"
#include "families/fwd_sm90_short/params.cuh"

namespace flashtile {

constexpr i32 kBiasFragmentThreads = 128;

template <typename Bias, i32 kSteps>
__global__ void __launch_bounds__(kBiasFragmentThreads)
    bias_fragments_kernel(const FT_GRID_CONSTANT FwdSm90ShortParams params) {
  static_assert(sizeof(Bias) == 2);
  const Params& p = params.base;
  i32 num_tiles = (p.seqlen_q + 63) / 64, num_heads = static_cast<i32>(p.bias_sizes[1]);
  i32 tile = blockIdx.x % num_tiles, plane = blockIdx.x / num_tiles;
  i32 head = plane % num_heads, batch = plane / num_heads;
  const Bias* bias = static_cast<const Bias*>(p.bias) + batch * p.bias_strides[0] + head * p.bias_strides[1];
  uint4* fragments = bias_fragments(params, kSteps, batch, head, tile);
  for (i32 step = 0; step < kSteps; ++step) {
    u32 words[4];
#pragma unroll
    for (i32 x = 0; x < 4; ++x) {
      i32 i = min_of(64 * tile + fragment_row() + x % 2 * 8, p.seqlen_q - 1);
      i32 j = 16 * step + x / 2 * 8 + fragment_column();
      if constexpr (mutates(Mutation::fwd_sm90_short_bias_row)) i = max_of(i - 1, 0);
      u32 bits[2];
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        Bias hidden = from_float<Bias>(-infinity());
        bits[e] = (j + e < p.seqlen_k ? bias[i * p.bias_strides[2] + (j + e) * p.bias_strides[3]] : hidden).bits;
      }
      words[x] = bits[0] | bits[1] << 16;
    }
    fragments[128 * step] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace flashtile
