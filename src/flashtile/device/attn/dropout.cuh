// Dropout bits by Philox4x32-10, as docs/semantics.md defines them, and dropout of a fragment of probabilities, whose
// rows are queries or keys (of a simt tile: simt/dropout.cuh). Each lane draws the words of one group of 8 keys; lanes
// that share a row exchange them.
//
// Kept probabilities stay as they are, and O and dV are multiplied by the keep factor at the end: it reaches 2^16, and
// its product with a probability may be too large for float16.
#pragma once

#include "device/attn/sequence.cuh"
#include "device/core/mutation.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

// Scope: thread.
FT_DEVICE uint4 philox(u32 key0, u32 key1, uint4 c) {
#pragma unroll
  for (i32 round = 0; round < 10; ++round) {
    u32 high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
    u32 high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
    c = make_uint4(high1 ^ c.y ^ key0, low1, high0 ^ c.w ^ key1, low0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// The random numbers of one sequence and head. Scope: thread.
struct DropoutBits {
  u32 key0, key1, offset, batch_head, threshold;
  u32 first_query;
  const Params& params;

  FT_DEVICE DropoutBits(const Params& p, const Sequence& s, i32 head) : first_query(p.first_query), params(p) {
    u64 seed = static_cast<u64>(p.rng_state[0]);
    key0 = static_cast<u32>(seed);
    key1 = static_cast<u32>(seed >> 32);
    offset = static_cast<u32>(p.rng_state[1]);
    batch_head = p.first_head + static_cast<u32>(s.batch_idx) * p.total_heads + static_cast<u32>(head);
    threshold = p.dropout_threshold;
  }

  // The four words of query i and keys 8 * group .. 8 * group + 7.
  FT_DEVICE uint4 words(i32 i, i32 group) const {
    u32 key_group = params.first_key_group + static_cast<u32>(group), query = first_query + static_cast<u32>(i);
    if constexpr (mutates(Mutation::dropout_origin)) query = static_cast<u32>(i);
    return philox(key0, key1, make_uint4(key_group, query, batch_head, offset));
  }

  // Key number lane of its group of 8 is kept.
  FT_DEVICE bool is_kept(uint4 w, i32 lane) const {
    if constexpr (mutates(Mutation::dropout_lane)) lane ^= 1;
    u32 word = lane < 4 ? (lane < 2 ? w.x : w.y) : (lane < 6 ? w.z : w.w);
    u32 bits = (word >> (16 * (lane & 1))) & 0xffffu;
    return bits >= threshold;
  }
};

// The factor of what is kept. Scope: thread.
template <class Dropout>
FT_DEVICE float keep_factor(const Params& p) {
  return Dropout::kIsOn ? p.keep_factor : 1.0f;
}

// Dropout of row r, which is query i, of a fragment (tile/fragment.cuh): 4 lanes share a row. Scope: warp.
template <i32 kScores>
FT_DEVICE void drop_fragment_row(const DropoutBits& bits, i32 i, i32 j_begin, i32 r, float (&rS)[kScores]) {
  static_assert(kScores % 8 == 0);
#pragma unroll
  for (i32 b = 0; b < kScores / 4; b += 4) {
    // Lane t of a quad draws group b + t; after the transpose it has word t of the four groups
    uint4 drawn = bits.words(i, j_begin / 8 + b + threadIdx.x % 4);
    u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
    if constexpr (mutates(Mutation::fwd_sm90_dropout)) words[0] = drawn.y, words[1] = drawn.x;
    quad_transpose(words);
#pragma unroll
    for (i32 g = 0; g < 4 && b + g < kScores / 4; ++g) {
      if ((words[g] & 0xffffu) < bits.threshold) rS[4 * (b + g) + 2 * r] = 0.0f;
      if ((words[g] >> 16) < bits.threshold) rS[4 * (b + g) + 2 * r + 1] = 0.0f;
    }
  }
}

// Both rows of a thread, whose queries and heads are `rows` (attn/work_item.cuh). Scope: warp.
template <class Tile, class Rows, i32 kScores>
FT_DEVICE void drop_tile(const Params& p, const Tile& tile, const Rows& rows, i32 j_begin, float (&rS)[kScores]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    drop_fragment_row(DropoutBits(p, tile.s, rows.head(tile, r)), rows.i[r], j_begin, r, rS);
  }
}

// Dropout of a fragment (tile/fragment.cuh) whose rows are keys, from j_begin on, and whose kColumns columns are
// queries, from i_begin on. The warp's 8 keys of rows r are one group of random words. A lane draws the words of
// every 32nd query and packs a bit for each key, so that one shuffle brings the bits of four elements.
template <class Dropout, i32 kColumns>
struct TransposedDropout {
  u32 bits;  // 8 for each of the two groups of keys and of kColumns / 32 queries
  u32 got[8];

  // Scope: warp.
  FT_DEVICE TransposedDropout(const Params& p, const Sequence& s, i32 head, i32 i_begin, i32 j_begin) {
    static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64);
    if constexpr (Dropout::kIsOn) {
      DropoutBits random(p, s, head);
      i32 lane = threadIdx.x % 32, group = (j_begin + threadIdx.x % 128 / 32 * 16) / 8;
      bits = 0;
#pragma unroll
      for (i32 part = 0; part < 4; ++part) {
        if (32 * (part % 2) >= kColumns) continue;
        uint4 w = random.words(i_begin + 32 * (part % 2) + lane, group + part / 2);
#pragma unroll
        for (i32 key = 0; key < 8; ++key) bits |= (random.is_kept(w, key) ? 1u : 0u) << (8 * part + key);
      }
#pragma unroll
      for (i32 x = 0; x < 8; ++x) {
        got[x] = __shfl_sync(0xffffffffu, bits, 8 * (x / 2) + fragment_column() + x % 2) >> lane / 4;
      }
    }
  }

  // Row r and column 8 b + fragment_column() + e is kept. Scope: thread.
  FT_DEVICE bool is_kept(i32 b, i32 e, i32 r) const {
    if constexpr (!Dropout::kIsOn) return true;
    return (got[2 * (b % 4) + e] >> (8 * (b / 4 + 2 * r)) & 1u) != 0;
  }
};

}  // namespace flashtile
