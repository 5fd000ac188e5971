// Options of the Hopper kernel that owns queries (bwd_sm90_dq.cuh): bool mask, softcap, ALiBi, bias and dropout between
// S, dP and dS.
//
// Threads:   a consumer thread loads what its own scores need from global memory into registers: the bits of a mask
//            (attn/mask_bits.cuh) and the bias, in pairs of keys where these are aligned. Shared memory has no room.
// Order:     before its turn, so that the products hide the latency; dropout bits while S is in flight.
// Scores:    base 2 without a bias, natural with one (attn/score_unit.cuh).
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/dropout.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/score.cuh"
#include "device/core/mutation.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

template <class Config, class Mask, class ScoreMod, class Dropout>
struct BwdSm90DqOptions {
  using T = typename Config::Element;
  using BiasElement = typename ScoreMod::BiasElement;
  using Scores = Score<ScoreMod>;
  using ScoreTile = typename Scores::template BackwardTile<false>;
  using Band = flashtile::Mask<Mask::kHasBand, false>;
  static constexpr bool kIsOn = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr i32 kNumOptions = ScoreMod::kNumOptions + Mask::kHasBool + Dropout::kIsOn;
  static constexpr i32 kScores = Config::kBlockN / 2;  // registers per thread of S
  static constexpr bool kHasPairs = sizeof(BiasElement) == 2;
  // Words of the bias: pairs of elements in 16 bits, or elements, in the order of the scores
  static constexpr i32 kBiasWords = !ScoreMod::kHasBias ? 1 : kHasPairs ? kScores / 2 : kScores;
  // dP is in flight while the factors are computed, unless that takes too many registers
  static constexpr bool kIsSplit = kNumOptions < 2 && (!ScoreMod::kHasBias || kHasPairs);
  static constexpr u32 kAllColumns = 0xffffffffu;

  u32 words[2];          // of the mask's bits, one for each row
  u32 seen;              // bit 16 r + 2 b + e: the query of row r sees the key of column 8 b + e
  u32 kept;              // bits of dropout, in the order of `is_kept`
  u32 bias[kBiasWords];  // word 2 b + r, or word 4 b + 2 r + e

  // ---- Before the turn.

  // Starts loading a thread's part of the tile at key j_begin. i: its two queries; those past the last one are computed
  // but must not read past it. Scope: thread.
  FT_DEVICE void load(const Params& p, const Sequence& s, i32 head, const i32 (&i)[2], i32 j_begin) {
    if constexpr (Mask::kHasBool) {
      MaskLayout<kMaskTile> layout(p);
      i32 plane = layout.plane(s.batch_idx, head);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 row = min_of(i[r], s.seqlen_q - 1);
        if constexpr (mutates(Mutation::bwd_sm90_wide_mask_row)) row = max_of(row - 1, 0);
        words[r] = p.mask_bits[4 * layout.bits_index(plane, row, j_begin / kMaskTile) + threadIdx.x % 4];
      }
    }
    if constexpr (ScoreMod::kHasBias) load_bias(p, s, head, i, j_begin);
  }

  FT_DEVICE void load_bias(const Params& p, const Sequence& s, i32 head, const i32 (&i)[2], i32 j_begin) {
    i32 j = j_begin + fragment_column();
    const BiasElement* rows[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 row = min_of(i[r], s.seqlen_q - 1);
      rows[r] = static_cast<const BiasElement*>(p.bias) + s.batch_idx * p.bias_strides[0] + head * p.bias_strides[1] +
                row * p.bias_strides[2] + j * p.bias_strides[3];
    }
    i64 bytes = (p.bias_strides[0] | p.bias_strides[1] | p.bias_strides[2]) * sizeof(BiasElement);
    bytes |= reinterpret_cast<i64>(p.bias);
    bool is_aligned = bytes % (2 * sizeof(BiasElement)) == 0;
    if (p.bias_strides[3] == 1 && is_aligned && j_begin + Config::kBlockN <= s.seqlen_k) {
      // Two keys at a time
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          if constexpr (kHasPairs) {
            bias[2 * b + r] = *reinterpret_cast<const u32*>(rows[r] + 8 * b);
          } else {
            uint2 two = *reinterpret_cast<const uint2*>(rows[r] + 8 * b);
            bias[4 * b + 2 * r] = two.x;
            bias[4 * b + 2 * r + 1] = two.y;
          }
        }
      }
    } else {
      // One by one; keys past the last one are not read
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          BiasElement two[2];
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            two[e] = from_float<BiasElement>(0.0f);
            if (j + 8 * b + e < s.seqlen_k) two[e] = rows[r][(8 * b + e) * p.bias_strides[3]];
          }
          if constexpr (kHasPairs) {
            bias[2 * b + r] = two[0].bits | static_cast<u32>(two[1].bits) << 16;
          } else {
            bias[4 * b + 2 * r] = __float_as_int(two[0]);
            bias[4 * b + 2 * r + 1] = __float_as_int(two[1]);
          }
        }
      }
    }
  }

  // ---- While S is in flight.

  // Draws the bits of dropout. Lane t of a quad draws keys 8 t .. 8 t + 7 of each 32 and packs a bit for each; a
  // shuffle brings the bits of 8 elements. Scope: warp.
  FT_DEVICE void draw(const Params& p, const Sequence& s, i32 head, const i32 (&i)[2], i32 j_begin) {
    if constexpr (Dropout::kIsOn) {
      DropoutBits random(p, s, head);
      u32 drawn = 0, threshold = random.threshold << 16;
      i32 quad_lane = threadIdx.x % 4;
      kept = 0;
#pragma unroll
      for (i32 part = 0; part < 4; ++part) {
        uint4 words = random.words(i[part % 2], j_begin / 8 + part / 2 * 4 + quad_lane);
        const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (i32 w = 0; w < 4; ++w) {
          if (pairs[w] << 16 >= threshold) drawn |= 1u << (8 * part + 2 * w);
          if (pairs[w] >= threshold) drawn |= 2u << (8 * part + 2 * w);
        }
      }
#pragma unroll
      for (i32 g = 0; g < 4; ++g) {
        u32 got = __shfl_sync(0xffffffffu, drawn, g, 4) >> 2 * quad_lane;
        kept += (got & 0x03030303u) << 2 * g;
      }
    }
  }
  // Whether dropout keeps row r, column 8 b + e. Scope: thread.
  FT_DEVICE bool is_kept(i32 b, i32 r, i32 e) const {
    if constexpr (!Dropout::kIsOn) return true;
    if constexpr (mutates(Mutation::bwd_sm90_wide_dropout)) r ^= 1;
    return (kept & 1u << (16 * (b / 4) + 8 * r + 2 * (b % 4) + e)) != 0;
  }

  // ---- After S.

  // Takes the tile's half of the mask's words. Scope: thread.
  FT_DEVICE void open_mask(i32 j_begin) {
    seen = kAllColumns;
    if constexpr (Mask::kHasBool) seen = __byte_perm(words[0], words[1], j_begin / 64 % 2 == 0 ? 0x5410u : 0x7632u);
  }
  // Hides the columns outside [begin, end) of row r. Scope: thread.
  FT_DEVICE void hide(i32 r, Range columns) {
    u32 inside = columns_below(columns.end) & ~columns_below(columns.begin);
    seen &= inside << 16 * r | (r == 0 ? 0xffff0000u : 0x0000ffffu);
  }
  FT_DEVICE bool sees_all() const { return seen == kAllColumns; }
  FT_DEVICE bool is_seen(i32 b, i32 r, i32 e) const { return (seen & 1u << (16 * r + 2 * b + e)) != 0; }
  // The bias of row r, column 8 b + e. Scope: thread.
  FT_DEVICE float bias_of(i32 b, i32 r, i32 e) const {
    if constexpr (!ScoreMod::kHasBias) {
      return 0.0f;
    } else if constexpr (kHasPairs) {
      u32 pair = bias[2 * b + r];
      return to_float(BiasElement{static_cast<u16>(e == 0 ? pair : pair >> 16)});
    } else {
      return __int_as_float(bias[4 * b + 2 * r + e]);
    }
  }

  // Replaces S by the factor of dP - delta in dS. With kIsMasked it is 0 where the query does not see the key; with
  // kIsExact, P is at most 1 and the softcap exact. `distance` is that of the thread's first element. Scope: thread.
  template <bool kIsExact, bool kIsMasked>
  FT_DEVICE void find_factors(const Params& p, ScoreTile& scores, const float (&lse)[2], i32 distance,
                              float (&rS)[kScores]) const {
    scores.place(distance);
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e;
          float shift = scores.shift(r, 8 * b + e), derivative;
          float power = scores.template exponent<kIsExact, true>(p, rS[x], r, 8 * b + e, lse[r], bias_of(b, r, e),
                                                                 shift, derivative);
          if constexpr (kIsExact) power = power > Scores::kLargestExponent ? Scores::kLargestExponent : power;
          float prob = exp2_approx(power);
          if constexpr (kIsMasked) prob = is_seen(b, r, e) ? prob : 0.0f;
          rS[x] = prob;
          if constexpr (ScoreMod::kHasDerivative) rS[x] = Scores::weighted(prob, derivative);
        }
      }
      // Finish these columns before the next: the exact body, which is rare, must not take more registers
      if constexpr (kIsExact) {
        asm volatile("" : "+f"(rS[4 * b]), "+f"(rS[4 * b + 1]), "+f"(rS[4 * b + 2]), "+f"(rS[4 * b + 3])::"memory");
      }
    }
  }

  // dS from these factors. Scope: thread.
  FT_DEVICE void differentiate(const Params& p, const float (&delta)[2], const float (&rS)[kScores],
                               const float (&rdP)[kScores], u32 (&packed_ds)[kScores / 2]) const {
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float ds[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e;
          float difference = rdP[x] - delta[r];
          if constexpr (Dropout::kIsOn) difference = fmaf(is_kept(b, r, e) ? rdP[x] : 0.0f, p.keep_factor, -delta[r]);
          ds[e] = rS[x] * difference;
        }
        packed_ds[2 * b + r] = pack_two<T>(ds[0], ds[1]);
      }
    }
  }
};

}  // namespace flashtile
