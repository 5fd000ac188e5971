// Length classes: the only way in which a plan's key may look at the sizes of a call. Kinds and thresholds come as
// data, with the GPU; the arithmetic is Python's, in integers. plans/length_class.py says what a new kind takes.
#pragma once

#include <limits>

#include "device/core/types.cuh"

namespace flashtile {

constexpr i32 kMaxLengthClasses = 24;

struct Shape {
  i64 batch, heads, heads_kv, seqlen_q, seqlen_k;
  i64 expected_q, expected_k;  // lengths by which kernels are chosen (problem.py: Shape)
  i64 least_share;             // likewise
  i64 share_k = 0;             // rows of k for each sequence
};

enum class LengthClassKind : i64 {
  kSmallGrid,
  kPackedHeads,
  kRaggedQueries,
  kManyScores,
  kShortLengths,
  kFewQueries,
  kKeySteps,
  kLongLengths,
  kLongShares,
  kManyRows,
  kManyKeyTiles,
  kCount
};

struct LengthClass {
  LengthClassKind kind;
  i64 a, b, c;

  bool operator==(const LengthClass& other) const {
    return kind == other.kind && a == other.a && b == other.b && c == other.c;
  }
};

inline i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// The product, or the largest number where it is larger.
inline i64 saturating_product(i64 a, i64 b) {
  i64 product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<i64>::max() : product;
}

struct PackedHeads {
  i64 heads, num_tiles;  // of a tile; of the heads that share a KV head
};

// As plans/length_class.py: packed_heads
inline PackedHeads packed_heads(const Shape& shape, i64 tile_rows) {
  i64 heads = shape.heads / shape.heads_kv, num_tiles = divide_up(heads, tile_rows);
  return {divide_up(heads, num_tiles), num_tiles};
}

inline u8 length_class(const LengthClass& of, const Shape& shape, i64 num_multiprocessors) {
  switch (of.kind) {
    case LengthClassKind::kSmallGrid: {  // a: rows of a block
      i64 blocks = saturating_product(saturating_product(divide_up(shape.expected_q, of.a), shape.heads), shape.batch);
      return blocks < num_multiprocessors;
    }
    case LengthClassKind::kPackedHeads: {  // a: rows of a tile; b: rows of a block
      PackedHeads packed = packed_heads(shape, of.a);
      i64 num_packed = packed.num_tiles * divide_up(shape.expected_q, of.a / packed.heads);
      i64 num_single = shape.heads / shape.heads_kv * divide_up(shape.expected_q, of.b);
      return static_cast<u8>(num_packed < num_single ? packed.heads : 1);
    }
    case LengthClassKind::kRaggedQueries: {  // a: rows of a large block; b: of a small one; c: percent
      i64 rows = divide_up(shape.expected_q, of.a) * of.a;
      return 100 * rows > of.c * (divide_up(shape.expected_q, of.b) * of.b);
    }
    case LengthClassKind::kManyScores: {  // a: log2 of the number of scores
      i64 rows = saturating_product(saturating_product(shape.batch, shape.heads), shape.expected_q);
      return saturating_product(rows, shape.expected_k) >= (i64{1} << of.a);
    }
    case LengthClassKind::kShortLengths:  // a: queries; b: keys
      return shape.expected_q <= of.a && shape.expected_k <= of.b;
    case LengthClassKind::kFewQueries: {  // a: rows of a tile; b: tiles at most; c: nonzero: one tile of heads
      auto [heads, num_tiles] = packed_heads(shape, of.a);
      if (of.c != 0 && num_tiles > 1) return 0;
      i64 queries = shape.expected_q <= 1 ? shape.expected_q : shape.seqlen_q;
      return static_cast<u8>(divide_up(queries, of.a / heads) <= of.b ? heads : 0);
    }
    case LengthClassKind::kManyRows:  // a: rows of a tile
      return saturating_product(shape.expected_q, packed_heads(shape, of.a).heads) > of.a;
    case LengthClassKind::kManyKeyTiles: {  // a: rows of a tile; b: keys of a tile; c: tiles at most
      i64 rows =
          saturating_product(saturating_product(shape.heads_kv, packed_heads(shape, of.a).num_tiles), shape.batch);
      return saturating_product(rows, divide_up(shape.seqlen_k, of.b)) > of.c;
    }
    case LengthClassKind::kKeySteps: {  // a, b, c: keys at most, of a single tile, of some, and of all
      if (shape.expected_k > of.c) return 0;
      if (shape.expected_k > of.a) return shape.expected_k <= of.b ? 254 : 255;
      i64 steps = divide_up(shape.expected_k, 16);
      return static_cast<u8>(steps < 1 ? 1 : steps);
    }
    case LengthClassKind::kLongLengths:  // a: queries; b: keys
      return shape.expected_q >= of.a && shape.expected_k >= of.b;
    case LengthClassKind::kLongShares:  // a, b, c: shares, in rising order
      return static_cast<u8>((shape.least_share >= of.a) + (shape.least_share >= of.b) + (shape.least_share >= of.c));
    default: return 0;
  }
}

}  // namespace flashtile
