// Dropout of a simt tile whose rows are queries (gemm.cuh): 8 lanes share a row. Scope: warp.
#pragma once

#include "device/attn/dropout.cuh"
#include "families/simt/gemm.cuh"

namespace flashtile {

template <class Config>
FT_DEVICE void drop_scores(const DropoutBits& bits, i32 i_begin, i32 j_begin, ScoreTile<Config>& rS) {
  constexpr i32 kCols = Config::kColsPerThread;
  static_assert(kCols <= 8);
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    uint4 mine = bits.words(i_begin + row_of<Config>(t), j_begin / 8 + column_group());
#pragma unroll
    for (i32 n = 0; n < kCols; ++n) {
      i32 source = 8 * row_group() + n;
      uint4 w = make_uint4(__shfl_sync(0xffffffffu, mine.x, source), __shfl_sync(0xffffffffu, mine.y, source),
                           __shfl_sync(0xffffffffu, mine.z, source), __shfl_sync(0xffffffffu, mine.w, source));
      if (!bits.is_kept(w, column_group())) rS[t][n] = 0.0f;
    }
  }
}

}  // namespace flashtile
