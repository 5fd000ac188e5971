// The entry points of the float32 backward on Hopper: dK and dV, and dQ, each for half_t and for bf16_t parts. All are
// launched; the numbers of the call decide which of each pair does the work. docs/float32.md.
#pragma once

#include "families/bwd_sm90_f32/narrow.cuh"
#include "families/bwd_sm90_f32/wide.cuh"

namespace flashtile {

template <class Config, class... Policies>
FT_DEVICE void run_bwd_sm90_f32_dkdv(const Sm90F32Params& params) {
  if constexpr (Config::kHeadDim > 128) {
    BwdSm90F32WideDkdv<Config, Policies...>::run(params);
  } else {
    BwdSm90F32Dkdv<Config, Policies...>::run(params);
  }
}
template <class Config, class... Policies>
FT_DEVICE void run_bwd_sm90_f32_dq(const Sm90F32Params& params) {
  if constexpr (Config::kHeadDim > 128) {
    BwdSm90F32WideDq<Config, Policies...>::run(params);
  } else {
    BwdSm90F32Dq<Config, Policies...>::run(params);
  }
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(384, 1) bwd_sm90_f32_dkdv_half_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 == 0) run_bwd_sm90_f32_dkdv<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(384, 1) bwd_sm90_f32_dkdv_bf16_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(!Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 != 0) run_bwd_sm90_f32_dkdv<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bwd_sm90_f32_dq_half_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 == 0) run_bwd_sm90_f32_dq<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bwd_sm90_f32_dq_bf16_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(!Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 != 0) run_bwd_sm90_f32_dq<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}

}  // namespace flashtile
