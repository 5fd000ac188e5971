// Score modifiers and mask of one row of a score fragment of a warpgroup (tile/fragment.cuh). Scope: thread.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/mask.cuh"
#include "device/attn/score.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

// Applies the score modifiers to row r, which is query i, then sets what the query does not see to -inf. Without score
// modifiers the scores stay unscaled dot products. i must be inside the sequence.
template <class Mask, class ScoreMod, i32 kScores>
FT_DEVICE void modify_scores(const Params& p, const Sequence& s, i32 head, i32 i, i32 j_begin, i32 r,
                             float (&rS)[kScores]) {
  Score<ScoreMod> scores(p, s, head);
  i32 j_first = j_begin + fragment_column();
  Range seen = key_range<Mask>(p, s, i, i + 1);
  i32 low = seen.begin - j_first, high = seen.end - j_first;
#pragma unroll
  for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      i32 column = 8 * b + e;
      float& x = rS[4 * b + 2 * r + e];
      bool is_kept = column >= low && column < high;
      if constexpr (Mask::kHasBool) is_kept = is_kept && is_seen<Mask>(p, s, head, i, j_first + column);
      if constexpr (ScoreMod::kChangesScores) {
        typename Score<ScoreMod>::Kept kept;
        if (is_kept) x = scores.score(x, i, j_first + column, kept);
      }
      x = is_kept ? x : -infinity();
    }
  }
}

// Both rows of a thread, whose queries and heads are `rows` (attn/work_item.cuh).
template <class Mask, class ScoreMod, class Tile, class Rows, i32 kScores>
FT_DEVICE void modify_tile(const Params& p, const Tile& tile, const Rows& rows, i32 j_begin, float (&rS)[kScores]) {
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
    // Rows past the last query are computed but must not read past it
    i32 i = min_of(rows.i[r], tile.s.seqlen_q - 1);
    modify_scores<Mask, ScoreMod>(p, tile.s, rows.head(tile, r), i, j_begin, r, rS);
  }
}

}  // namespace flashtile
