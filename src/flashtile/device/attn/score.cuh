// From the dot product of a query and a key to their score, and back: scale, softcap, ALiBi, bias and a function, in
// this order (unit: score_unit.cuh). Every forward and backward kernel has its scores and their derivatives from here.
// Scope of every function: thread.
//
// Score                  one element: score() and gradient()
// Score::scaled()        one element where a bias is the only option, for fwd_sm90_short
// Score::ForwardTile     elements of two rows of a fragment, for fwd_sm90
// Score::BackwardTile    elements of a fragment or a transposed one, as exponents of P, for bwd_sm90 and bwd_sm90_wide
//
// A new option is a function of the score: score_function.cuh says what it gives.
#pragma once

#include "device/attn/score_function.cuh"
#include "device/attn/score_unit.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

template <class ScoreMod>
struct Score {
  using BiasElement = typename ScoreMod::BiasElement;
  using Function = FunctionInPlace<typename ScoreMod::Function, ScoreMod::kIsNatural>;
  static constexpr bool kIsNatural = ScoreMod::kIsNatural;
  // The softcap's tanh as 1 - 2 / (1 + e^2x) cancels where |x| is small, so that its error grows with the cap
  static constexpr float kLargestFastSoftcap = 256.0f;

  // True if the fast softcap would not be accurate.
  FT_DEVICE static bool needs_exact_tanh(const Params& p) {
    return ScoreMod::kHasSoftcap && p.softcap > kLargestFastSoftcap;
  }
  // The factor of the dot product: scale in the unit of scores, or scale / softcap.
  FT_DEVICE static float factor_of(const Params& p) {
    return ScoreMod::kHasSoftcap ? p.softcap_factor : kIsNatural ? p.scale : p.scale_log2;
  }
  FT_DEVICE static float cap_of(const Params& p) { return kIsNatural ? p.softcap : p.softcap * kLog2e; }
  FT_DEVICE static float slope_of(const Params& p, const Sequence& s, i32 head) {
    return in_score_unit(kIsNatural, p.alibi_slopes[s.batch_idx * p.alibi_batch_stride + head]);
  }

  // The score where the options are the bias alone.
  FT_DEVICE static float scaled(const Params& p, float dot, float bias) { return fmaf(dot, factor_of(p), bias); }

  // ---- One element.

  // What gradient() needs of an element. All zeros where the element is masked.
  struct Kept {
    float tanh;        // the softcap's
    float derivative;  // the function's
  };

  Function function;
  i32 head;
  float factor, cap, slope;
  const BiasElement* bias;  // (seqlen_q, seqlen_k) of this sequence and head, by strides
  i64 bias_row_stride, bias_column_stride;
  i32 offset;

  FT_DEVICE Score(const Params& p, const Sequence& s, i32 head) : function(p, s), head(head), offset(s.offset) {
    factor = factor_of(p);
    if constexpr (mutates(Mutation::score_base)) factor *= kLn2;
    if constexpr (ScoreMod::kHasSoftcap) cap = cap_of(p);
    if constexpr (ScoreMod::kHasAlibi) slope = slope_of(p, s, head);
    if constexpr (ScoreMod::kHasBias) {
      bias = static_cast<const BiasElement*>(p.bias) + s.batch_idx * p.bias_strides[0] + head * p.bias_strides[1];
      bias_row_stride = p.bias_strides[2];
      bias_column_stride = p.bias_strides[3];
    }
  }

  // The score of query i and key j, both inside the sequence.
  FT_DEVICE float score(float dot, i32 i, i32 j, Kept& kept) const {
    float x = before_bias(dot, i, j, kept);
    if constexpr (ScoreMod::kHasBias) x += bias_of(i, j);
    if constexpr (ScoreMod::kHasFunction) x = behind_bias(x, i, j, kept);
    return x;
  }
  FT_DEVICE float before_bias(float dot, i32 i, i32 j, Kept& kept) const {
    float x = dot * factor;
    if constexpr (ScoreMod::kHasSoftcap) {
      kept.tanh = tanh_by_exp2(x);
      x = cap * kept.tanh;
    }
    if constexpr (ScoreMod::kHasAlibi) {
      i32 distance = i + offset - j;
      if constexpr (mutates(Mutation::alibi_offset)) distance -= offset;
      x -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return x;
  }
  FT_DEVICE float behind_bias(float x, i32 i, i32 j, Kept& kept) const {
    auto row = function.row(head, i);
    kept.derivative = function.derivative(row, x, i, j);
    return function.score(row, x, i, j);
  }
  FT_DEVICE float bias_of(i32 i, i32 j) const {
    if constexpr (mutates(Mutation::bias_row)) i = max_of(i - 1, 0);
    return to_float(bias[i * bias_row_stride + j * bias_column_stride]);
  }

  // The derivative of the score with respect to scale times the dot product.
  FT_DEVICE static float gradient(const Kept& kept) {
    float derivative = ScoreMod::kHasFunction ? kept.derivative : 1.0f;
    if constexpr (ScoreMod::kHasSoftcap) derivative *= 1.0f - kept.tanh * kept.tanh;
    return derivative;
  }
  // The same in two factors: with respect to the bias, and of what the bias is added to.
  FT_DEVICE static float bias_gradient(const Kept& kept) { return ScoreMod::kHasFunction ? kept.derivative : 1.0f; }
  FT_DEVICE static float dot_gradient(const Kept& kept) {
    return ScoreMod::kHasSoftcap ? 1.0f - kept.tanh * kept.tanh : 1.0f;
  }

  // ---- The Hopper forward. A thread has two rows of a fragment (tile/fragment.cuh).

  // What a thread keeps of its two queries.
  static constexpr bool kHasRows = ScoreMod::kHasAlibi || ScoreMod::kHasFunction;
  struct Nothing {};
  struct FunctionRows {
    typename Function::Row function[2];
  };
  struct Rows : Select<ScoreMod::kHasFunction, FunctionRows, Nothing>::Type {
    float slope[2];  // of ALiBi

    // Row 0 comes first. With kHasOneHead both rows are of one head.
    template <bool kHasOneHead>
    FT_DEVICE void find(i32 r, const Params& p, const Sequence& s, i32 head, i32 i) {
      if constexpr (ScoreMod::kHasAlibi) {
        if (r == 0 || !kHasOneHead) {
          slope[r] = slope_of(p, s, head);
        } else {
          slope[r] = slope[0];
        }
      }
      if constexpr (ScoreMod::kHasFunction) this->function[r] = Function(p, s).row(head, i);
    }
  };

  // The softcap's tanh: kRough is tanh.approx, as accurate as bfloat16.
  enum class Tanh { kRough, kFast, kExact };

  // Where the function of a tile is.
  struct RowPlace {
    const Sequence* sequence;
    const Rows* rows;
    i32 i[2], j;  // of the thread's first column
  };
  // The columns of one tile of keys. With kIsOneSided all distances of a query from a key have the same sign.
  template <Tanh kTanh, bool kIsOneSided>
  struct ForwardTile : Select<ScoreMod::kHasFunction, RowPlace, Nothing>::Type {
    float cap, factor;
    float slope[2], first[2];  // ALiBi: slope, and the distance of the first column, times the slope if kIsOneSided

    FT_DEVICE explicit ForwardTile(const Params& p) : cap(cap_of(p)), factor(factor_of(p)) {}
    // `distance` is that of row r from the thread's first column, `side` the sign of all distances.
    FT_DEVICE void place(i32 r, const Rows& rows, i32 distance, i32 side) {
      if constexpr (ScoreMod::kHasAlibi) {
        slope[r] = kIsOneSided && side < 0 ? -rows.slope[r] : rows.slope[r];
        first[r] = (kIsOneSided ? -slope[r] : 1.0f) * static_cast<float>(distance);
      }
    }
    // Row r is query i and the thread's first column key j; both may be past the last one. For a function alone.
    FT_DEVICE void place_at(i32 r, const Sequence& s, const Rows& rows, i32 i, i32 j) {
      this->sequence = &s, this->rows = &rows, this->i[r] = i, this->j = j;
    }

    // Turns a dot product into its score: row r, and a column that counts from the thread's first.
    FT_DEVICE void score(const Params& p, float& element, i32 r, i32 column, float bias) const {
      // In this order: the compiler sorts the operands of products by it
      float factor = this->factor, cap = this->cap, x = element;
      if constexpr (ScoreMod::kHasSoftcap) {
        if constexpr (kTanh == Tanh::kRough) {
          x = cap * tanh_approx(x * factor);
        } else if constexpr (kTanh == Tanh::kExact) {
          x = cap * tanh_by_exp2(x * factor);
        } else {
          x = fmaf(reciprocal(1.0f + exp2_approx(x * (2.0f * kLog2e * factor))), -2.0f * cap, cap);
        }
        if constexpr (ScoreMod::kHasBias && !ScoreMod::kHasAlibi) x += bias;
      } else if constexpr (ScoreMod::kHasBias && !ScoreMod::kHasAlibi) {
        x = fmaf(x, factor, bias);
      } else if constexpr (!ScoreMod::kHasAlibi) {
        x *= factor;
      }
      if constexpr (ScoreMod::kHasAlibi) {
        if constexpr (kIsOneSided) {
          float step = fmaf(slope[r], static_cast<float>(column), first[r]);
          x = ScoreMod::kHasSoftcap ? x + step : fmaf(x, factor, step);
        } else {
          float distance = fabsf(first[r] - static_cast<float>(column));
          x = fmaf(-slope[r], distance, ScoreMod::kHasSoftcap ? x : x * factor);
        }
        if constexpr (ScoreMod::kHasBias) x += bias;
      }
      if constexpr (ScoreMod::kHasFunction) {
        x = Function(p, *this->sequence).score(this->rows->function[r], x, this->i[r], this->j + column);
      }
      element = x;
    }
  };

  // ---- The Hopper backward. P is kept times kProbFactor.

  // P times a derivative, which may be infinite or NaN where P is 0.
  FT_DEVICE static float weighted(float prob, float derivative) {
    return ScoreMod::kHasFunction && prob == 0.0f ? 0.0f : prob * derivative;
  }
  // The softcap's derivative 4 r (1 - r) then needs no factor
  static constexpr float kProbFactor = ScoreMod::kHasSoftcap ? 4.0f : 1.0f;
  static constexpr float kLargestExponent = ScoreMod::kHasSoftcap ? 2.0f : 0.0f;  // of P times kProbFactor

  // Where the function of a tile is.
  struct Place {
    const Sequence* sequence;
    i32 head, i, j;  // of the thread's first element
  };

  // A thread's elements of one tile. Row r is 8 r rows below its first row, columns count from its first column. Rows
  // are queries and columns keys; with kIsTransposed rows are keys and columns queries.
  template <bool kIsTransposed>
  struct BackwardTile : Select<ScoreMod::kHasFunction, Place, Nothing>::Type {
    float slope, first_step;  // ALiBi: the slope, and its product with the distance of the first element

    FT_DEVICE void open(const Params& p, const Sequence& s, i32 head) {
      if constexpr (ScoreMod::kHasFunction) this->sequence = &s, this->head = head;
      if constexpr (ScoreMod::kHasAlibi) slope = slope_of(p, s, head);
    }
    // `distance` is that of the first element's query from its key.
    FT_DEVICE void place(i32 distance) {
      if constexpr (ScoreMod::kHasAlibi) first_step = slope * static_cast<float>(distance);
    }
    // The first element is query i and key j. For a function alone.
    FT_DEVICE void place_at(i32 i, i32 j) {
      if constexpr (ScoreMod::kHasFunction) this->i = i, this->j = j;
    }

    // What an element's place alone subtracts from its score: slope * |distance|, the size of the product with the sign
    // of the slope.
    FT_DEVICE float shift(i32 r, i32 column) const {
      if constexpr (!ScoreMod::kHasAlibi) return 0.0f;
      return copysignf(fmaf(kIsTransposed ? slope : -slope, static_cast<float>(column - 8 * r), first_step), slope);
    }
    // From a dot product to the exponent of P times kProbFactor. With kIsExact the softcap is
    // exact. Sets `derivative`, divided by kProbFactor, to that of the score with respect to scale times the dot
    // product, or without kIsOfDot with respect to the bias.
    template <bool kIsExact, bool kIsOfDot>
    FT_DEVICE float exponent(const Params& p, float dot, i32 r, i32 column, float lse, float bias, float shift,
                             float& derivative) const {
      constexpr bool kSubtractsLast = kIsNatural || ScoreMod::kHasFunction;  // lse
      float x;
      derivative = 1.0f / kProbFactor;
      if constexpr (ScoreMod::kHasSoftcap) {
        float cap = cap_of(p);
        float rest = kSubtractsLast ? bias : kLargestExponent - lse;
        if constexpr (kIsExact) {
          float tanh = tanh_by_exp2(dot * factor_of(p));
          if constexpr (kIsOfDot) derivative = 0.25f - 0.25f * tanh * tanh;
          x = fmaf(cap, tanh, rest);
        } else {
          // tanh(x) = 1 - 2 r and its derivative 4 r (1 - r), with r = 1 / (1 + e^2x)
          float r_tanh = reciprocal(1.0f + exp2_approx(dot * (2.0f * kLog2e * factor_of(p))));
          if constexpr (kIsOfDot) derivative = fmaf(-r_tanh, r_tanh, r_tanh);
          x = fmaf(r_tanh, -2.0f * cap, cap + rest);
        }
      } else {
        x = fmaf(dot, factor_of(p), kSubtractsLast ? bias : -lse);
      }
      if constexpr (ScoreMod::kHasAlibi) x -= shift;
      if constexpr (ScoreMod::kHasFunction) {
        Function function(p, *this->sequence);
        i32 query = this->i + (kIsTransposed ? column : 8 * r), key = this->j + (kIsTransposed ? 8 * r : column);
        auto row = function.row(this->head, query);
        derivative *= function.derivative(row, x, query, key);
        // The lse of a query past the last one is +inf
        x = lse == infinity() ? -infinity() : function.score(row, x, query, key);
      }
      if constexpr (kSubtractsLast) x = fmaf(x - lse, exponent_factor(kIsNatural), kLargestExponent);
      return x;
    }
  };
};

}  // namespace flashtile
