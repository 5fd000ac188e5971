// The two products of the simt family, on float32 tiles in shared memory. Scope: warp; no synchronisation inside unless
// stated.
//
// Lanes: row group = lane / 8, column group = lane % 8. A thread's rows are row_group + 4 * t, its score columns
// column_group + 8 * n, its output columns 4 * column_group + 32 * u + (0..3). So 8 lanes read 128 consecutive bytes,
// and the row groups read by broadcast.
#pragma once

#include "device/core/reduce.cuh"
#include "families/simt/config.cuh"
#include "families/simt/copy.cuh"

namespace flashtile {

// A thread's scores, and its accumulators of an output tile.
template <class Config>
using ScoreTile = float[Config::kRowsPerThread][Config::kColsPerThread];
template <class Config>
using OutputTile = float4[Config::kRowsPerThread][Config::kVectorsPerThread];

// Scope: thread.
FT_DEVICE i32 warp_idx() { return threadIdx.x / 32; }
FT_DEVICE i32 row_group() { return threadIdx.x % 32 / 8; }
FT_DEVICE i32 column_group() { return threadIdx.x % 8; }

// Row t of this thread inside the block. Scope: thread.
template <class Config>
FT_DEVICE i32 row_of(i32 t) {
  return warp_idx() * 4 * Config::kRowsPerThread + 4 * t + row_group();
}

// S = A B^T over the head dimension. Rows of A are the block's own, rows of B are streamed.
template <class Config, i32 kUnroll = 2>
FT_DEVICE void product_abt(ScoreTile<Config>& rS, const float* sA, const float* sB) {
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

// O += P B. P are the warp's own scores in shared memory, rows of B are streamed.
template <class Config, i32 kUnroll = 1>
FT_DEVICE void product_pb(OutputTile<Config>& rO, const float* sP, const float* sB) {
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

// Stores the warp's scores where product_pb reads them. Synchronises the warp before and after.
template <class Config>
FT_DEVICE void store_scores(float* sP, const ScoreTile<Config>& rS) {
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
FT_DEVICE float row_max(float x) { return lanes_max<8>(x); }
FT_DEVICE float row_sum(float x) { return lanes_sum<8>(x); }

// Zeros the accumulators. Scope: thread.
template <class Config>
FT_DEVICE void clear(OutputTile<Config>& rO) {
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
#pragma unroll
    for (i32 u = 0; u < Config::kVectorsPerThread; ++u) rO[t][u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Stores the accumulators to rows [first, first + kBlockM) of a tensor; drops rows from num_rows and columns from
// num_columns on. Scope: thread.
template <class Config, class Load, typename Element>
FT_DEVICE void store_rows(Element* base, i64 row_stride, i32 first, i32 num_rows, i32 num_columns,
                          const OutputTile<Config>& rO) {
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    i32 r = first + row_of<Config>(t);
    if (r >= num_rows) continue;
#pragma unroll
    for (i32 u = 0; u < Config::kVectorsPerThread; ++u) {
      store_four<Element, Load::kIsAligned16>(base + r * row_stride, 4 * column_group() + 32 * u, num_columns,
                                              rO[t][u]);
    }
  }
}

}  // namespace flashtile
