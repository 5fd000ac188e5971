// What a row leaves behind: its lse, or, where its keys are split over blocks, the maximum and the sum by which fwd_combine_kernel joins them.
// Two numbers and not each split's lse: near 300 a float32 has no digits left for the difference of two lse, while maxima are exact. "Maximum" is
// whatever the row's exponentials were lowered by: one of its scores, which may be below the largest, by 1 at most (Hopper: 8).
#pragma once

#include "flashtile/attn/params.cuh"
#include "flashtile/core/math.cuh"
#include "flashtile/core/mutation.cuh"

namespace flashtile {

// The natural logarithm of l * 2^m. Scope: thread.
FT_DEVICE float lse_of(float m, float l) {
  float lse_log2 = m + log2_approx(l);
  if constexpr (mutates(Mutation::lse_base)) return lse_log2;
  return lse_log2 * kLn2;
}

// Scope: thread.
FT_DEVICE float2& partial_stats(const Params& p, i64 part) { return reinterpret_cast<float2*>(p.partial_stats)[part]; }

// Stores m (base 2) and l of a row: for the combination if it is part of one, else as lse. Scope: thread.
FT_DEVICE void store_stats(const Params& p, bool is_part, i64 part, i64 stat, float m, float l) {
  if (is_part) {
    partial_stats(p, part) = make_float2(m, l);
  } else {
    p.lse[stat] = lse_of(m, l);
  }
}

}  // namespace flashtile
