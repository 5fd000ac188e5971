// Slabs of the mma.sync kernels for wide heads (config.cuh): copies from global memory, products of one
// warp, and stores of P or dS to shared memory. Operands in shared memory are given by this lane's address in them.
#pragma once

#include "device/tile/fragment.cuh"
#include "device/tile/mma_gemm.cuh"

namespace flashtile {

// Starts the copy of kRows x kColumns elements to a slab; zeros from num_rows and from num_columns on. row_of(row)
// gives the address of the first column of a row. Eight threads copy 64 columns of a row. Scope: block.
template <i32 kRows, i32 kColumns, i32 kNumThreads, class Load, class RowOf>
FT_DEVICE void load_slab(u32 slab, i32 num_rows, i32 num_columns, RowOf row_of) {
  using Tile = SwizzledTile<kColumns>;
  constexpr i32 kPassRows = kNumThreads / 8, kSegments = kColumns / 64;
  // A pass copies kPassRows rows of one segment, or kRows rows of several
  constexpr i32 kRowStep = kRows < kPassRows ? kRows : kPassRows, kSegmentStep = kPassRows / kRowStep;
  i32 unit = threadIdx.x / 8, first_row = unit % kRowStep, first_segment = unit / kRowStep;
  i32 first_column = 64 * first_segment + 8 * (threadIdx.x % 8);
  u32 target = slab + Tile::chunk_offset(first_row, threadIdx.x % 8) + 128 * first_segment;
#pragma unroll(Load::kIsAligned16 ? kRows / kRowStep : 1)
  for (i32 r = 0; r < kRows; r += kRowStep) {
    const auto* source = row_of(first_row + r) + first_column;
    i32 row_columns = first_row + r < num_rows ? num_columns - first_column : 0;
#pragma unroll(Load::kIsAligned16 ? kSegments : 1)
    for (i32 g = 0; g < kSegments; g += kSegmentStep) {
      if (kSegments % kSegmentStep != 0 && first_segment + g >= kSegments) continue;
      u32 address = target + r * Tile::kPitch + 128 * g;
      if constexpr (Load::kIsAligned16) {
        cp_async<16>(address, source + 64 * g, row_columns > 64 * g ? 16 : 0);
      } else {
        copy_unaligned_chunk(address, source + 64 * g, row_columns - 64 * g);
      }
    }
  }
}

// S += A B^T over the columns of a slab: a is the address of the warp's rows of A at the slab's first column, slab that
// of the warp's rows of B. Scope: warp.
template <class Config, i32 kDepth>
FT_DEVICE void mma_slab_abt(float (&rS)[Config::kMTiles][Config::kWarpScores / 2], u32 a, u32 slab) {
#pragma unroll
  for (i32 d = 0; d < Config::kSlabColumns / 16; ++d) {
    u32 rA[Config::kMTiles][4];
#pragma unroll
    for (i32 t = 0; t < Config::kMTiles; ++t) ldmatrix_x4(rA[t], SwizzledTile<kDepth>::step_address(a, t, d));
    mma_step_abt<typename Config::Element, Config::kWarpScores, Config::kSlabColumns, false>(rS, rA, slab, d);
  }
}

// D += P B over the rows of a slab of kColumns columns, part number kPart of D's: p is the address of the warp's rows
// of P, first_step the first 16 columns of it. The warp's columns of B are every kColumnWarps-th 16, so that their
// addresses differ by constants. Scope: warp.
template <class Config, i32 kColumns, i32 kPart, i32 kResults>
FT_DEVICE void mma_slab_ab(float (&rD)[Config::kMTiles][kResults], u32 p, i32 first_step, u32 slab) {
  constexpr i32 kSteps = kColumns / Config::kColumnWarps / 16;
#pragma unroll
  for (i32 step = 0; step < Config::kSlabRows / 16; ++step) {
    u32 rP[Config::kMTiles][4];
#pragma unroll
    for (i32 t = 0; t < Config::kMTiles; ++t) {
      ldmatrix_x4(rP[t], SwizzledTile<Config::kBlockN>::step_address(p, t, first_step + step));
    }
#pragma unroll
    for (i32 n = 0; n < kSteps; ++n) {
      u32 rB[4];
      ldmatrix_x4_trans(rB, SwizzledTile<kColumns>::step_address(slab, step, Config::kColumnWarps * n));
#pragma unroll
      for (i32 t = 0; t < Config::kMTiles; ++t) {
#pragma unroll
        for (i32 half = 0; half < 2; ++half) {
          float* d = rD[t] + 8 * (kPart * kSteps + n) + 4 * half;
          mma_m16n8k16<typename Config::Element>(d, rP[t], rB[2 * half], rB[2 * half + 1], d[0], d[1], d[2], d[3]);
        }
      }
    }
  }
}

// The same over all columns: next() waits for the next slab and returns its address. Scope: block.
template <class Config, i32 kPart = 0, i32 kResults, class Next>
FT_DEVICE void mma_row_parts(float (&rD)[Config::kMTiles][kResults], u32 p, i32 first_step, Next next) {
  if constexpr (kPart < Config::kRowParts) {
    constexpr i32 kColumns = 2 * kResults * Config::kColumnWarps / Config::kRowParts;
    mma_slab_ab<Config, kColumns, kPart>(rD, p, first_step, next());
    mma_row_parts<Config, kPart + 1>(rD, p, first_step, next);
  }
}

// Where a warp reads its columns of a slab of rows. Scope: warp.
template <class Config, i32 kColumns>
FT_DEVICE u32 slab_column_offset(i32 column_warp) {
  using Tile = SwizzledTile<kColumns>;
  return Tile::step_address(Tile::template lane_offset<true>(), 0, column_warp);
}

// Stores a packed m16 tile of P or dS at row and column of sP [kBlockM][kBlockN]. Scope: warp.
template <class Config, i32 kPacked>
FT_DEVICE void store_packed(u32 sP, i32 row, i32 column, const u32 (&packed)[kPacked]) {
  using Tile = SwizzledTile<Config::kBlockN>;
  i32 lane = threadIdx.x % 32;
#pragma unroll
  for (i32 r = 0; r < 2; ++r) {
#pragma unroll
    for (i32 b = 0; b < kPacked / 2; ++b) {
      i32 chunk = column / 8 + b;
      u32 address = sP + Tile::chunk_offset(row + lane / 4 + 8 * r, chunk % 8) + chunk / 8 * 128 + lane % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(packed[2 * b + r]) : "memory");
    }
  }
}

// Stores row r of an m16 tile of the warp's columns, scaled by factor. Scope: thread.
template <class Config, bool kIsAligned16, typename Out, i32 kCount>
FT_DEVICE void store_warp_columns(Out* row, bool is_inside, i32 num_columns, i32 column_warp, i32 r, float factor,
                                  const float (&rD)[kCount]) {
#pragma unroll
  for (i32 b = 0; b < kCount / 4; ++b) {
    i32 column = 16 * (Config::kColumnWarps * (b / 2) + column_warp) + 8 * (b % 2) + fragment_column();
    float x = rD[4 * b + 2 * r] * factor, y = rD[4 * b + 2 * r + 1] * factor;
    if (!is_inside || column >= num_columns) continue;
    if constexpr (!kIsAligned16) {
      row[column] = from_float<Out>(x);
      if (column + 1 < num_columns) row[column + 1] = from_float<Out>(y);
    } else if constexpr (kIsSame<Out, float>) {
      *reinterpret_cast<float2*>(row + column) = make_float2(x, y);
    } else {
      *reinterpret_cast<u32*>(row + column) = pack_two<Out>(x, y);
    }
  }
}

}  // namespace flashtile
