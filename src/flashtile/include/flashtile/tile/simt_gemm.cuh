// The two products of the simt family, on float32 tiles in shared memory. Scope: warp; no synchronisation inside.
//
// Lanes: row group = lane / 8, column group = lane % 8. A thread's rows are row_group + 4 * t, its score columns column_group + 8 * n,
// its output columns 4 * column_group + 32 * u + (0..3): 8 lanes read 128 consecutive bytes, the row groups read by broadcast.
#pragma once

#include "flashtile/core/mutation.cuh"
#include "flashtile/core/vec.cuh"
#include "flashtile/tile/simt_config.cuh"

namespace flashtile {

FT_DEVICE i32 warp_idx() { return threadIdx.x / 32; }
FT_DEVICE i32 row_group() { return threadIdx.x % 32 / 8; }
FT_DEVICE i32 column_group() { return threadIdx.x % 8; }

// Row number t of this thread inside the block.
template <class Config>
FT_DEVICE i32 row_of(i32 t) {
  return warp_idx() * 4 * Config::kRowsPerThread + 4 * t + row_group();
}

// S = A B^T over the head dimension: rows of A are the block's, rows of B the streaming ones.
template <class Config, i32 kUnroll = 2>
FT_DEVICE void product_abt(float (&rS)[Config::kRowsPerThread][Config::kColsPerThread], const float* sA, const float* sB) {
  constexpr i32 kRows = Config::kRowsPerThread, kCols = Config::kColsPerThread, kStride = Config::kRowStride;
  const float* a = sA + row_of<Config>(0) * kStride;
  const float* b = sB + column_group() * kStride;
#pragma unroll
  for (i32 t = 0; t < kRows; ++t) {
#pragma unroll
    for (i32 n = 0; n < kCols; ++n) rS[t][n] = 0.0f;
  }
#pragma unroll kUnroll
  for (i32 d = 0; d < Config::kHeadDim; d += 4) {
    float4 rA[kRows];
#pragma unroll
    for (i32 t = 0; t < kRows; ++t) rA[t] = *reinterpret_cast<const float4*>(a + 4 * t * kStride + d);
#pragma unroll
    for (i32 n = 0; n < kCols; ++n) {
      float4 rB = *reinterpret_cast<const float4*>(b + 8 * n * kStride + d);
#pragma unroll
      for (i32 t = 0; t < kRows; ++t) {
        rS[t][n] = fmaf(rA[t].x, rB.x, rS[t][n]);
        rS[t][n] = fmaf(rA[t].y, rB.y, rS[t][n]);
        rS[t][n] = fmaf(rA[t].z, rB.z, rS[t][n]);
        rS[t][n] = fmaf(rA[t].w, rB.w, rS[t][n]);
      }
    }
  }
}

// O += P B: P are the warp's own scores in shared memory, rows of B the streaming ones.
template <class Config, i32 kUnroll = 1>
FT_DEVICE void product_pb(float4 (&rO)[Config::kRowsPerThread][Config::kVectorsPerThread], const float* sP, const float* sB) {
  constexpr i32 kRows = Config::kRowsPerThread, kVectors = Config::kVectorsPerThread;
  const float* p = sP + row_of<Config>(0) * Config::kScoreStride;
  const float* b = sB + 4 * column_group();
#pragma unroll kUnroll
  for (i32 j = 0; j < Config::kBlockN; j += 4) {
    float4 rP[kRows];
#pragma unroll
    for (i32 t = 0; t < kRows; ++t) rP[t] = *reinterpret_cast<const float4*>(p + 4 * t * Config::kScoreStride + j);
#pragma unroll
    for (i32 step = 0; step < 4; ++step) {
#pragma unroll
      for (i32 u = 0; u < kVectors; ++u) {
        float4 rB = *reinterpret_cast<const float4*>(b + (j + step) * Config::kRowStride + 32 * u);
#pragma unroll
        for (i32 t = 0; t < kRows; ++t) {
          float x = step == 0 ? rP[t].x : step == 1 ? rP[t].y : step == 2 ? rP[t].z : rP[t].w;
          rO[t][u].x = fmaf(x, rB.x, rO[t][u].x);
          rO[t][u].y = fmaf(x, rB.y, rO[t][u].y);
          rO[t][u].z = fmaf(x, rB.z, rO[t][u].z);
          rO[t][u].w = fmaf(x, rB.w, rO[t][u].w);
        }
      }
    }
  }
}

// The warp's scores to shared memory, each row where product_pb reads it.
template <class Config>
FT_DEVICE void store_scores(float* sP, const float (&rS)[Config::kRowsPerThread][Config::kColsPerThread]) {
  __syncwarp();
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    float* row = sP + row_of<Config>(t) * Config::kScoreStride + column_group();
#pragma unroll
    for (i32 n = 0; n < Config::kColsPerThread; ++n) row[8 * n] = rS[t][n];
  }
  __syncwarp();
}

// Reductions over the 8 lanes that share a row.
FT_DEVICE float row_max(float x) {
#pragma unroll
  for (i32 lane = 4; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}
FT_DEVICE float row_sum(float x) {
#pragma unroll
  for (i32 lane = 4; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Loads rows [first, first + kRows) of a tensor into shared memory, zeros behind num_rows and num_columns. `row_at(r)` is the address
// of row r. All threads of the block take part; copies may be asynchronous.
template <class Config, class Load, i32 kRows, typename T, class RowAt>
FT_DEVICE void load_tile(float* sTile, i32 first, i32 num_rows, i32 num_columns, RowAt row_at) {
  constexpr i32 kElements = Access<T, Load::kIsWide>::kElements;
  constexpr i32 kPerRow = Config::kHeadDim / kElements;
#pragma unroll 4
  for (i32 index = threadIdx.x; index < kRows * kPerRow; index += Config::kNumThreads) {
    i32 r = index / kPerRow, column = index % kPerRow * kElements;
    bool is_valid = first + r < num_rows && column < num_columns;
    if constexpr (mutates(Mutation::tail_column)) is_valid = first + r < num_rows;
    const T* source = is_valid ? row_at(first + r) + column : row_at(0);
    copy_access<T, Load::kIsWide>(sTile + r * Config::kRowStride + column, source, is_valid);
  }
}

}  // namespace flashtile
