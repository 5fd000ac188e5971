// Online softmax: running maximum m, running sum l, rescale factor alpha = 2^(m_old - m_new). Exponentials are
// 2^(score - m), for natural scores (score_unit.cuh) e^(score - m). A maximum that lags behind the largest score is
// exact too, as long as 2^(score - m) stays in range: each family raises m only when it must (kRescaleThresholdLog2).
// FlashAttention-2, section 3.1.
#pragma once

#include "device/core/math.cuh"
#include "device/core/mutation.cuh"
#include "device/core/reduce.cuh"

namespace flashtile {

// What exponents are lowered by: m, or 0 for a row that has seen no key. Scope: thread.
FT_DEVICE float shift_of(float m) { return m == -infinity() ? 0.0f : m; }

// The maximum of a simt row after a tile with maximum tile_max. It is raised only by more than 1: probabilities stay at
// or below 2, or e. Raised a little with every tile, as under ALiBi, it would rescale the first keys once per tile,
// each time with the same rounding error: 5.9e-6 of an lse over 122 tiles on an NVIDIA H200. With the threshold,
// anything rescaled twice weighs at most a quarter. Scope: thread.
constexpr float kSimtRescaleThreshold = 1.0f;
FT_DEVICE float raised_max(float m, float tile_max) { return tile_max > m + kSimtRescaleThreshold ? tile_max : m; }

// The maximum of a row after a tile with maximum tile_max. With kIsFirst it is the row's first tile: m is ignored.
// Scope: thread.
template <bool kIsFirst>
FT_DEVICE float joined_max(float m, float tile_max) {
  if constexpr (mutates(Mutation::fwd_sm90_stale_max)) return kIsFirst ? tile_max : m;
  return kIsFirst ? tile_max : fmaxf(m, tile_max);
}

// The maximum of row r of a score tile over this thread's columns. Two chains, for more parallelism. Scope: thread.
template <i32 kScores>
FT_DEVICE float thread_maximum(const float (&rS)[kScores], i32 r) {
  float largest[2] = {rS[2 * r], rS[2 * r + 1]};
#pragma unroll
  for (i32 b = 1; b < kScores / 4; ++b) {
    largest[0] = fmaxf(largest[0], rS[4 * b + 2 * r]);
    largest[1] = fmaxf(largest[1], rS[4 * b + 2 * r + 1]);
  }
  return fmaxf(largest[0], largest[1]);
}

// Subtracts the maxima of a thread's two rows from a score tile. Scope: thread.
template <i32 kScores>
FT_DEVICE void subtract_maxima(const float (&m)[2], float (&rS)[kScores]) {
#pragma unroll
  for (i32 x = 0; x < kScores; ++x) rS[x] -= shift_of(m[x / 2 % 2]);
}

// Turns row r of a score tile into probabilities 2^(score * factor - shift). Returns their sum over this thread's
// columns. Scope: thread.
template <i32 kScores>
FT_DEVICE float exponentiate_row(float factor, float shift, i32 r, float (&rS)[kScores]) {
  float sum = 0.0f;
#pragma unroll
  for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      float& x = rS[4 * b + 2 * r + e];
      x = exp2_approx(fmaf(x, factor, -shift));
      sum += x;
    }
  }
  return sum;
}

// Rescales a thread's two rows of O. Scope: thread.
template <i32 kOutputs>
FT_DEVICE void rescale_rows(const float (&alpha)[2], float (&rO)[kOutputs]) {
  if constexpr (mutates(Mutation::fwd_sm90_rescale)) return;
#pragma unroll
  for (i32 x = 0; x < kOutputs; ++x) rO[x] *= alpha[x / 2 % 2];
}

// The softmax state of a thread's two rows of a score fragment (tile/fragment.cuh). Maxima are of scores as they come:
// dot products, or scores in their unit. `factor` > 0 turns both into base 2. l is this thread's part of the row sum;
// the epilogue adds up the quad.
//
// P = 2^(fma(score, factor, -shift)) with shift = m * factor, rounded. The rounding error scales a whole row alike, so
// it cancels when O is divided by l, as long as it is small. It is up to |shift| / 2^24: near 1e11 thousands, and P is
// infinite or 0. Rows past kLargeShift therefore subtract m first, which is exact, and use a shift of 0.
template <bool kRescalesLazily, bool kIsNatural, i32 kThresholdLog2 = 8>
struct OnlineSoftmax {
  // Probabilities may grow to 2^8 before a maximum is raised: float32 sums and 16-bit P hold that
  static constexpr float kRescaleThresholdLog2 = kThresholdLog2;
  static constexpr float kLargeShift = 4096.0f;
  float m[2], l[2], alpha[2];
  bool is_raised;  // some row of the warp has a new maximum

  FT_DEVICE OnlineSoftmax() : m{-infinity(), -infinity()}, l{0.0f, 0.0f}, alpha{1.0f, 1.0f}, is_raised(false) {}

  // With kMayBeEmpty the row may have seen no key yet. Scope: thread.
  template <bool kMayBeEmpty>
  FT_DEVICE static float scaled_shift(float m, float factor) {
    float shift = kIsNatural ? clamp(m * factor, -kLargestFloat, kLargestFloat) : m * factor;
    return kMayBeEmpty && m == -infinity() ? 0.0f : shift;
  }

  // Raises the maxima to those of a score tile and sets alpha. Scope: warp.
  template <bool kIsFirst, bool kMayBeEmpty, i32 kScores>
  FT_DEVICE void raise_maximum(float factor, const float (&rS)[kScores]) {
    float m_new[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) m_new[r] = joined_max<kIsFirst>(m[r], quad_max(thread_maximum(rS, r)));
    is_raised = true;
    if constexpr (kRescalesLazily && !kIsFirst) {
      // Keep the old maxima while they are close enough for every row of the warp
      bool is_far =
          (m_new[0] - m[0]) * factor > kRescaleThresholdLog2 || (m_new[1] - m[1]) * factor > kRescaleThresholdLog2;
      is_raised = __any_sync(0xffffffffu, is_far);
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float m_old = m[r];
      if (is_raised) m[r] = m_new[r];
      // Exactly 1 where the maximum stays: l is rescaled in every tile, O only where is_raised
      if constexpr (!kIsFirst) {
        float shift = scaled_shift<kMayBeEmpty>(m[r], factor);
        float residue = kMayBeEmpty && m[r] == -infinity() ? 0.0f : fmaf(m[r], factor, -shift);
        alpha[r] = exp2_approx(fmaf(m_old, factor, -shift) - residue);
      }
    }
  }

  // Turns scores into probabilities and adds them to l. Scope: warp.
  template <bool kIsFirst, bool kMayBeEmpty, i32 kScores>
  FT_DEVICE void exponentiate(float factor, float (&rS)[kScores]) {
    float shift[2] = {scaled_shift<kMayBeEmpty>(m[0], factor), scaled_shift<kMayBeEmpty>(m[1], factor)};
    // A branch of the whole warp: a divergent one would take the uniform registers from the loop around it
    if (__any_sync(0xffffffffu, fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kLargeShift)) {
      subtract_maxima(m, rS);
      shift[0] = shift[1] = 0.0f;
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float sum = exponentiate_row(factor, shift[r], r, rS);
      l[r] = kIsFirst ? sum : fmaf(l[r], alpha[r], sum);
    }
  }

  // Rescales O to the new maxima. Scope: thread.
  template <i32 kOutputs>
  FT_DEVICE void rescale(float (&rO)[kOutputs]) const {
    if (is_raised) rescale_rows(alpha, rO);
  }
};

// The softmax state of a warp that owns kTiles m16 tiles (tile/fragment.cuh): OnlineSoftmax with lazy rescaling. One
// vote decides for all rows whether maxima are raised. Rescale factors are computed only then, and O is rescaled at
// once, so that they do not stay in registers.
template <i32 kTiles, bool kIsNatural>
struct WarpSoftmax {
  using One = OnlineSoftmax<true, kIsNatural>;
  float m[kTiles][2], l[kTiles][2];

  FT_DEVICE WarpSoftmax() {
#pragma unroll
    for (i32 x = 0; x < 2 * kTiles; ++x) m[x / 2][x % 2] = -infinity(), l[x / 2][x % 2] = 0.0f;
  }

  // The maximum of row r of an m16 tile of scores. Scope: warp.
  template <i32 kScores>
  FT_DEVICE static float tile_maximum(const float (&rS)[kScores], i32 r) {
    return quad_max(thread_maximum(rS, r));
  }

  // Raises the maxima to those of a score tile, tile_max(t, r), if one is too low; rescales l and O. Scope: warp.
  template <i32 kOutputs, class TileMax>
  FT_DEVICE void raise_maximum(float factor, TileMax tile_max, float (&rO)[kTiles][kOutputs]) {
    float m_new[kTiles][2];
    bool is_far = false;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        m_new[t][r] = fmaxf(m[t][r], tile_max(t, r));
        if constexpr (mutates(Mutation::fwd_sm80_stale_max)) m_new[t][r] = m[t][r] > -1e30f ? m[t][r] : m_new[t][r];
        // True for a first finite maximum: it is infinitely far from -inf. False while both are -inf: NaN
        is_far |= (m_new[t][r] - m[t][r]) * factor > One::kRescaleThresholdLog2;
      }
    }
    if (!__any_sync(0xffffffffu, is_far)) return;
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        // Exactly 1 where the maximum stays
        float shift = One::template scaled_shift<true>(m_new[t][r], factor);
        float residue = m_new[t][r] == -infinity() ? 0.0f : fmaf(m_new[t][r], factor, -shift);
        float alpha = exp2_approx(fmaf(m[t][r], factor, -shift) - residue);
        m[t][r] = m_new[t][r];
        l[t][r] *= alpha;
        if constexpr (mutates(Mutation::fwd_sm80_rescale)) alpha = 1.0f;
#pragma unroll
        for (i32 x = 0; x < kOutputs / 4; ++x) {
          rO[t][4 * x + 2 * r] *= alpha;
          rO[t][4 * x + 2 * r + 1] *= alpha;
        }
      }
    }
  }

  // Turns scores into probabilities and adds them to l. With kMayBeEmpty a row may have seen no key yet. Scope: warp.
  template <bool kMayBeEmpty, i32 kScores>
  FT_DEVICE void exponentiate(float factor, float (&rS)[kTiles][kScores]) {
    float shift[kTiles][2];
    bool is_large = false;
#pragma unroll
    for (i32 x = 0; x < 2 * kTiles; ++x) {
      shift[x / 2][x % 2] = One::template scaled_shift<kMayBeEmpty>(m[x / 2][x % 2], factor);
      is_large |= fabsf(shift[x / 2][x % 2]) > One::kLargeShift;
    }
    if (__any_sync(0xffffffffu, is_large)) {
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) {
        subtract_maxima(m[t], rS[t]);
        shift[t][0] = shift[t][1] = 0.0f;
      }
    }
#pragma unroll
    for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        // Each tile has a sum of its own: thousands of keys added to l one by one would round it too often
        l[t][r] += exponentiate_row(factor, shift[t][r], r, rS[t]);
      }
    }
  }
};

}  // namespace flashtile
