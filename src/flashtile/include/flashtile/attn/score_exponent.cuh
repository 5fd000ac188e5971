// From the dot product S to the exponent of P in a backward pass of the Hopper kernels: scale, softcap, ALiBi, bias and
// lse (unit: score_unit.cuh). Scope of every function: thread.
#pragma once

#include "flashtile/attn/score_unit.cuh"

namespace flashtile {

template <class ScoreMod>
struct ScoreExponent {
  static constexpr bool kIsNatural = ScoreMod::kHasBias;
  // With a softcap, P is kept times 4: its derivative 4 r (1 - r) then needs no factor
  static constexpr float kLargest = ScoreMod::kHasSoftcap ? 2.0f : 0.0f;
  static constexpr float kLargestFastSoftcap = 256.0f;

  // True if the fast softcap would not be accurate.
  FT_DEVICE static bool needs_exact_tanh(const Params& p) {
    return ScoreMod::kHasSoftcap && p.softcap > kLargestFastSoftcap;
  }

  // The exponent of P. `distance_penalty` is ALiBi's slope * |distance|. Sets `derivative` to that of the softcap,
  // divided by 4.
  template <bool kIsExact>
  FT_DEVICE static float find(const Params& p, float dot, float lse, float bias, float distance_penalty,
                              float& derivative) {
    float score;
    if constexpr (ScoreMod::kHasSoftcap) {
      float cap = kIsNatural ? p.softcap : p.softcap * kLog2e;
      float rest = kIsNatural ? bias : 2.0f - lse;
      if constexpr (kIsExact) {
        float tanh = tanh_by_exp2(dot * p.softcap_factor);
        derivative = 0.25f - 0.25f * tanh * tanh;
        score = fmaf(cap, tanh, rest);
      } else {
        // tanh(x) = 1 - 2 r and its derivative 4 r (1 - r), with r = 1 / (1 + e^2x)
        float r_tanh = reciprocal(1.0f + exp2_approx(dot * (2.0f * kLog2e * p.softcap_factor)));
        derivative = fmaf(-r_tanh, r_tanh, r_tanh);
        score = fmaf(r_tanh, -2.0f * cap, cap + rest);
      }
    } else if constexpr (kIsNatural) {
      score = fmaf(dot, p.scale, bias);
    } else {
      score = fmaf(dot, p.scale_log2, -lse);
    }
    if constexpr (ScoreMod::kHasAlibi) score -= distance_penalty;
    if constexpr (kIsNatural) score = fmaf(score - lse, kLog2e, ScoreMod::kHasSoftcap ? 2.0f : 0.0f);
    return score;
  }
};

}  // namespace flashtile
