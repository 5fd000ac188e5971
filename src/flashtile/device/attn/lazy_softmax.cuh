// OnlineSoftmax (attn/online_softmax.cuh) for loops that are short of issue slots. Maxima are raised, and O rescaled,
// only where a probability of some row of the warp would exceed 2^8. One vote over the threads' own maxima decides. The
// rest of a raise (maxima of the quads, rescale factors, the test for large shifts) is behind a branch that few tiles
// take.
#pragma once

#include "device/attn/online_softmax.cuh"

namespace flashtile {

template <bool kIsNatural>
struct LazySoftmax {
  using Eager = OnlineSoftmax<false, kIsNatural>;
  float m[2], l[2], alpha[2];
  bool is_raised;  // some row of the warp has a new maximum
  bool is_large;   // some row of the warp has a shift past kLargeShift

  FT_DEVICE LazySoftmax()
      : m{-infinity(), -infinity()}, l{0.0f, 0.0f}, alpha{1.0f, 1.0f}, is_raised(false), is_large(false) {}

  // Raises the maxima to those of a score tile if one is too low, or always with kMustRaise; sets alpha and rescales l.
  // Scope: warp.
  template <bool kIsFirst, bool kMayBeEmpty, bool kMustRaise = false, i32 kScores>
  FT_DEVICE void raise_maximum(float factor, const float (&rS)[kScores]) {
    float tile_max[2];  // of this thread
#pragma unroll
    for (i32 r = 0; r < 2; ++r) tile_max[r] = joined_max<kIsFirst>(m[r], thread_maximum(rS, r));
    is_raised = true;
    if constexpr (!kIsFirst && !kMustRaise) {
      constexpr float kThreshold = Eager::kRescaleThresholdLog2;
      bool is_far = (tile_max[0] - m[0]) * factor > kThreshold || (tile_max[1] - m[1]) * factor > kThreshold;
      is_raised = __any_sync(0xffffffffu, is_far);
      if (!is_raised) return;
    }
    float largest = 0.0f;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float m_old = m[r];
      m[r] = quad_max(tile_max[r]);
      float shift = Eager::template scaled_shift<kMayBeEmpty>(m[r], factor);
      largest = fmaxf(largest, fabsf(shift));
      // Exactly 1 where the maximum stays
      if constexpr (!kIsFirst) {
        float residue = kMayBeEmpty && m[r] == -infinity() ? 0.0f : fmaf(m[r], factor, -shift);
        alpha[r] = exp2_approx(fmaf(m_old, factor, -shift) - residue);
        l[r] *= alpha[r];
      }
    }
    is_large = __any_sync(0xffffffffu, largest > Eager::kLargeShift);
  }

  // Turns scores into probabilities and adds them to l. Scope: warp.
  template <bool kIsFirst, bool kMayBeEmpty, i32 kScores>
  FT_DEVICE void exponentiate(float factor, float (&rS)[kScores]) {
    float shift[2] = {Eager::template scaled_shift<kMayBeEmpty>(m[0], factor),
                      Eager::template scaled_shift<kMayBeEmpty>(m[1], factor)};
    if (is_large) {
      subtract_maxima(m, rS);
      shift[0] = shift[1] = 0.0f;
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float sum = exponentiate_row(factor, shift[r], r, rS);
      l[r] = kIsFirst ? sum : l[r] + sum;
    }
  }

  // Turns scores into probabilities by the maxima as they are. Returns true if one of the maxima may be too low: the
  // caller then computes the scores again and raises them. Else `accept` adds the sums of the probabilities to l.
  // Scope: thread.
  static constexpr float kLargestSum = 4096.0f;  // of a thread's probabilities of a row: float16 holds each of them
  template <i32 kScores>
  FT_DEVICE bool guess(float factor, float (&rS)[kScores], float (&sums)[2]) const {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) sums[r] = exponentiate_row(factor, m[r] * factor, r, rS);
    if constexpr (mutates(Mutation::fwd_sm90_guess)) return false;
    return is_large || fmaxf(sums[0], sums[1]) > kLargestSum;
  }
  FT_DEVICE void accept(const float (&sums)[2]) { l[0] += sums[0], l[1] += sums[1]; }

  // Rescales O to the new maxima. Scope: thread.
  template <i32 kOutputs>
  FT_DEVICE void rescale(float (&rO)[kOutputs]) const {
    if (is_raised) rescale_rows(alpha, rO);
  }
};

// LazySoftmax if kIsBranching, else OnlineSoftmax.
template <bool kIsBranching, bool kRescalesLazily, bool kIsNatural>
struct SoftmaxKind {
  using Type = OnlineSoftmax<kRescalesLazily, kIsNatural>;
};
template <bool kRescalesLazily, bool kIsNatural>
struct SoftmaxKind<true, kRescalesLazily, kIsNatural> {
  using Type = LazySoftmax<kIsNatural>;
};

}  // namespace flashtile
