// Butterfly reductions over aligned groups of 4, 8 or 32 lanes; every lane of the group gets the result.
// Scope of every function: warp (all 32 lanes call).
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// A quad: the 4 lanes that share a row of a score fragment (tile/fragment.cuh).
FT_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
FT_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <i32 kLanes>
FT_DEVICE float lanes_max(float x) {
#pragma unroll
  for (i32 distance = kLanes / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}
template <i32 kLanes>
FT_DEVICE float lanes_sum(float x) {
#pragma unroll
  for (i32 distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

}  // namespace flashtile
