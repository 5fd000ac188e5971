// The unit of scores, row maxima, sinks and lse inside a kernel. It is base 2, so that exponents need no product. With
// a bias it is natural: a finite bias may reach the largest float32, and its product with log2(e) would overflow. Scope
// of every function: thread.
#pragma once

#include "device/attn/params.cuh"
#include "device/core/math.cuh"

namespace flashtile {

FT_DEVICE bool has_natural_scores(const Params& p) { return p.bias != nullptr; }

// The factor that turns a difference of scores into an exponent of 2.
FT_DEVICE constexpr float exponent_factor(bool is_natural) { return is_natural ? kLog2e : 1.0f; }

// 2^(a - b), or e^(a - b). The compiler must not fuse the subtraction with the product that gave a: b is such a product
// rounded, and near 1e11 the rounding alone would make the exponent overflow.
FT_DEVICE float exp_difference(float a, float b, float factor) { return exp2_approx(__fadd_rn(a, -b) * factor); }

// The same for P of a backward pass, at most 1: where |lse| is 2^24 and more, its rounding error may make a - lse
// positive and large. NaN stays NaN.
FT_DEVICE float probability(float score, float lse, float factor) {
  float exponent = (score - lse) * factor;
  return exp2_approx(exponent > 0.0f ? 0.0f : exponent);
}

// An lse so large that its rounding could make P far larger than 1. +inf, a fully masked row, makes P 0.
constexpr float kLargeLse = 4096.0f;
FT_DEVICE bool is_large_lse(float lse) { return fabsf(lse) > kLargeLse && lse != infinity(); }

// A natural number in the unit of scores. What is finite stays finite.
FT_DEVICE float in_score_unit(bool is_natural, float x) {
  if (is_natural || x == -infinity()) return x;
  return clamp(x * kLog2e, -kLargestFloat, kLargestFloat);
}

}  // namespace flashtile
