// Products of floats by one warp, each as three products of TF32, over swizzled tiles of floats, and the copies and
// stores of their rows.
//
// Parts:     a float is the sum of two TF32 numbers: big, rounded to 11 bits, and small, the rest, of which the tensor
//            core reads 11 bits. A product is big * big + big * small + small * big; small * small is below 2^-22 of
//            it.
// Tiles:     [rows][kColumns] floats, swizzled as rows of twice as many 16-bit columns (tile/swizzled_tile.cuh).
// A B^T:     ldmatrix reads a row of four floats where it reads eight 16-bit columns: each lane gets what it needs.
// A B:       A is an accumulator. A step takes 8 rows of B in the order in which A holds them: row lane % 4 of the
//            operand is row 2 * (lane % 4) of the 8, row lane % 4 + 4 the next. Of B a lane reads 16 bytes, four
//            columns for four products: column lane / 4 of product i is column 4 * (lane / 4) + i of 32. In the result
//            register 16 c + 4 i + 2 r + e is row r, column 32 c + 8 * (lane % 4) + 4 e + i.
#pragma once

#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/load_shared.cuh"
#include "device/ptx/mma_sync.cuh"
#include "device/tile/swizzled_tile.cuh"

namespace flashtile {

// The TF32 parts of N floats.
template <i32 N>
struct Tf32Parts {
  u32 big[N], small[N];

  // Scope: thread.
  FT_DEVICE void set(i32 x, float value) {
    // Add half of the last kept bit, to round. The tensor core ignores the bits behind it; `small` must not
    u32 rounded = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    big[x] = rounded;
    small[x] = __float_as_uint(value - __uint_as_float(rounded));
    if constexpr (mutates(Mutation::fwd_sm80_f32_small)) small[x] = 0;
    if constexpr (mutates(Mutation::bwd_sm80_f32_small)) small[x] = 0;
  }
};

// D += A B, or with kIsFirst D = A B. The small products go to rE; it may be rD, which they then reach first.
// Scope: warp.
template <bool kIsFirst>
FT_DEVICE void mma_parts(float* rD, float* rE, const Tf32Parts<4>& a, const Tf32Parts<2>& b) {
  if constexpr (kIsFirst) {
    mma_m16n8k8_tf32(rE, a.small, b.big[0], b.big[1], 0.0f, 0.0f, 0.0f, 0.0f);
  } else {
    mma_m16n8k8_tf32(rE, a.small, b.big[0], b.big[1], rE[0], rE[1], rE[2], rE[3]);
  }
  mma_m16n8k8_tf32(rE, a.big, b.small[0], b.small[1], rE[0], rE[1], rE[2], rE[3]);
  if (kIsFirst && rD != rE) {
    mma_m16n8k8_tf32(rD, a.big, b.big[0], b.big[1], 0.0f, 0.0f, 0.0f, 0.0f);
  } else {
    mma_m16n8k8_tf32(rD, a.big, b.big[0], b.big[1], rD[0], rD[1], rD[2], rD[3]);
  }
}

// One step of 8 columns, number d, of A B^T. A and B have kDepth columns, B kColumns rows; the m16 tiles of A are
// 16 * kRowStep rows apart. a and b are this lane's addresses. Small products go to rE. Scope: warp.
template <i32 kColumns, i32 kDepth, i32 kRowStep, bool kIsFirst, i32 kMTiles>
FT_DEVICE void tf32_step_abt(float (&rD)[kMTiles][kColumns / 2], float (&rE)[kMTiles][kColumns / 2], u32 a, u32 b,
                             i32 d) {
  using Tile = SwizzledTile<2 * kDepth>;
  Tf32Parts<4> rA[kMTiles];
#pragma unroll
  for (i32 t = 0; t < kMTiles; ++t) {
    u32 words[4];
    ldmatrix_x4(words, Tile::step_address(a, kRowStep * t, d));
#pragma unroll
    for (i32 x = 0; x < 4; ++x) rA[t].set(x, __uint_as_float(words[x]));
  }
#pragma unroll
  for (i32 n = 0; n < kColumns / 16; ++n) {
    u32 words[4];
    ldmatrix_x4(words, Tile::step_address(b, n, d));
#pragma unroll
    for (i32 half = 0; half < 2; ++half) {
      Tf32Parts<2> rB;
#pragma unroll
      for (i32 x = 0; x < 2; ++x) rB.set(x, __uint_as_float(words[2 * half + x]));
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) {
        mma_parts<kIsFirst>(rD[t] + 8 * n + 4 * half, rE[t] + 8 * n + 4 * half, rA[t], rB);
      }
    }
  }
}

// D = A B^T. Tensor cores truncate when they add: the small products have accumulators of their own. Scope: warp.
template <i32 kColumns, i32 kDepth, i32 kRowStep, i32 kMTiles>
FT_DEVICE void tf32_gemm_abt(float (&rD)[kMTiles][kColumns / 2], u32 a, u32 b) {
  constexpr i32 kCount = kColumns / 2;
  float rE[kMTiles][kCount];
  tf32_step_abt<kColumns, kDepth, kRowStep, true>(rD, rE, a, b, 0);
#pragma unroll
  for (i32 d = 1; d < kDepth / 8; ++d) tf32_step_abt<kColumns, kDepth, kRowStep, false>(rD, rE, a, b, d);
#pragma unroll
  for (i32 x = 0; x < kMTiles * kCount; ++x) rD[x / kCount][x % kCount] += rE[x / kCount][x % kCount];
}

// The parts of accumulators, as A operands of steps of 8 columns: columns 2 * (lane % 4) and the next of 8 are columns
// lane % 4 and lane % 4 + 4 of a step. Scope: thread.
template <i32 kCount, i32 kMTiles>
FT_DEVICE void split_accumulators(Tf32Parts<4> (&parts)[kMTiles][kCount / 4], const float (&rS)[kMTiles][kCount]) {
#pragma unroll
  for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
    for (i32 x = 0; x < kCount; ++x) parts[t][x / 4].set(x % 2 * 2 + x / 2 % 2, rS[t][x]);
  }
}

// One step of 8 rows, number j, of A B in 32 columns. b is this lane's address of the rows and columns. Scope: warp.
template <i32 kColumns, bool kIsFirst, i32 kMTiles, i32 kSteps>
FT_DEVICE void tf32_step_ab(float (&rD)[kMTiles][16], const Tf32Parts<4> (&a)[kMTiles][kSteps], u32 b, i32 j) {
  float rows[2][4];
#pragma unroll
  for (i32 r = 0; r < 2; ++r) load_shared_four(rows[r], (b ^ 16 * r) + r * SwizzledTile<2 * kColumns>::kPitch);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    Tf32Parts<2> rB;
    rB.set(0, rows[0][i]);
    rB.set(1, rows[1][i]);
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) mma_parts<kIsFirst>(rD[t] + 4 * i, rD[t] + 4 * i, a[t][j], rB);
  }
}

// This lane's address in a tile B of a product A B. Scope: warp.
template <i32 kColumns>
FT_DEVICE u32 tf32_lane_offset() {
  return SwizzledTile<2 * kColumns>::chunk_offset(2 * (threadIdx.x % 4), threadIdx.x % 32 / 4);
}

// True; the compiler does not know it. A branch on it ends a basic block, across which ptxas moves little. Scope:
// thread.
FT_DEVICE bool is_true() {
  u32 num_threads;
  asm volatile("mov.u32 %0, %%ntid.x;" : "=r"(num_threads));
  return num_threads != 0;
}

// O += A B. Tensor cores truncate when they add: the sum of this call has accumulators of its own, which float32 adds
// to O. b is this lane's address. Without kSavesRegisters ptxas may put these additions off to the last columns, with
// all accumulators in registers. Scope: warp.
template <i32 kColumns, bool kSavesRegisters = false, i32 kMTiles, i32 kSteps>
FT_DEVICE void tf32_gemm_ab(float (&rO)[kMTiles][kColumns / 2], const Tf32Parts<4> (&a)[kMTiles][kSteps], u32 b) {
#pragma unroll
  for (i32 c = 0; c < kColumns / 32; ++c) {
    if (kSavesRegisters && !is_true()) continue;
    float rD[kMTiles][16];
    tf32_step_ab<kColumns, true>(rD, a, b + 128 * c, 0);
#pragma unroll
    for (i32 j = 1; j < kSteps; ++j) {
      tf32_step_ab<kColumns, false>(rD, a, b + 128 * c + 8 * j * SwizzledTile<2 * kColumns>::kPitch, j);
    }
#pragma unroll
    for (i32 x = 0; x < 16 * kMTiles; ++x) rO[x / 16][16 * c + x % 16] += rD[x / 16][x % 16];
  }
}

// Starts the copy of rows of floats to a tile. Rows outside of [begin, end) and columns from num_columns on are zeros.
// Config::kIsExact: all columns are there. Scope: block.
template <class Config, class Load, i32 kColumns, i32 kRows>
FT_DEVICE void copy_float_rows(u32 tile, const float* first_row, i64 row_stride, i32 begin, i32 end, i32 num_columns) {
  using Shared = SwizzledTile<2 * kColumns>;
  // Unrolled, unless the rows need checks
  constexpr bool kUnrolls = Config::kIsExact && Load::kIsAligned16;
  i32 first_column = Shared::copy_column() / 2;
  const float* base = first_row + first_column;
  num_columns -= first_column;
  for_each_row<2 * kColumns, kRows, Config::kNumThreads, kUnrolls>(tile, [&](i32 first, i32 r, u32 target) {
    bool is_row = first + r >= begin && first + r < end;
    const float* source = base + (first + r) * row_stride;
#pragma unroll(kUnrolls ? Shared::kNumSegments : 1)
    for (i32 segment = 0; segment < Shared::kNumSegments; ++segment) {
      i32 column = 32 * segment, count = is_row ? clamp(num_columns - column, 0, 4) : 0;
      if constexpr (Config::kIsExact) count = is_row ? 4 : 0;
      if constexpr (Load::kIsAligned16) {
        cp_async<16>(target + 4 * column, source + column, 4 * count);
      } else {
#pragma unroll
        for (i32 x = 0; x < 4; ++x) cp_async<4>(target + 4 * (column + x), source + column + x, x < count ? 4 : 0);
      }
    }
  });
}

// Stores row r of a result of A B, times a factor: 8 neighbouring columns of every 32. Scope: thread.
template <class Load, i32 kCount>
FT_DEVICE void store_float_row(float* row, bool is_row, i32 num_columns, i32 r, float factor,
                               const float (&rO)[kCount]) {
#pragma unroll
  for (i32 x = 0; x < kCount / 8; ++x) {
    i32 column = 32 * (x / 2) + 8 * static_cast<i32>(threadIdx.x % 4) + 4 * (x % 2);
    const float* o = rO + 16 * (x / 2) + 2 * r + x % 2;
    if constexpr (Load::kIsAligned16) {
      float4 four = make_float4(o[0] * factor, o[4] * factor, o[8] * factor, o[12] * factor);
      if (is_row && column < num_columns) *reinterpret_cast<float4*>(row + column) = four;
    } else {
#pragma unroll
      for (i32 i = 0; i < 4; ++i) {
        if (is_row && column + i < num_columns) row[column + i] = o[4 * i] * factor;
      }
    }
  }
}

}  // namespace flashtile
