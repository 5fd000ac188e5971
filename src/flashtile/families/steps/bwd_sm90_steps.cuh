// The steps before and after bwd_sm90_kernel, both bound by memory. Rows are those of lse, so packed sequences need no
// padding.
//
// bwd_sm90_preprocess_kernel  for every query row: delta = rowsum(dO * O) - dlse, lse in the unit of scores, and zeros
//                             for dq_accum and dq_order
// bwd_convert_dq_kernel       dQ = scale * dq_accum in 16 bits
//
// Contract:  the layout of dq_accum. A slab is 64 columns of all rows of lse. Columns 8 c .. 8 c + 7 of row i of a
//            sequence are chunk c ^ (i % 8) of that row. BwdSm90::stage_dq and BwdSm80::add_dq add in this order,
//            bwd_convert_dq_kernel reads in it. The planted fault bwd_sm90_dq_order breaks it.
// Threads:   8 lanes per row, 16 rows per pass of a block, kStepRows rows per block.
#pragma once

#include "device/attn/key_tile.cuh"
#include "device/attn/score_unit.cuh"
#include "device/attn/sequence.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"
#include "device/core/reduce.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

constexpr i32 kStepRows = 32;
constexpr i32 kStepThreads = 128;

// A block's sequence, head and rows.
template <class SeqInfo>
struct StepRows {
  Sequence s;
  i32 head, first;

  FT_DEVICE explicit StepRows(const Params& p) {
    TilePlace place = place_queries<SeqInfo>(p, kStepRows, p.heads, static_cast<i32>(blockIdx.x));
    head = place.row;
    s = find_sequence<SeqInfo>(p, place.batch);
    first = place.tile * kStepRows + threadIdx.x / 8;
  }
};

// The sum of the products of 8 pairs of 16-bit elements. Scope: thread.
template <typename T>
FT_DEVICE float dot8(uint4 a, uint4 b) {
  const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (i32 w = 0; w < 4; ++w) {
    sum = fmaf(to_float(T{static_cast<u16>(x[w])}), to_float(T{static_cast<u16>(y[w])}), sum);
    sum = fmaf(to_float(T{static_cast<u16>(x[w] >> 16)}), to_float(T{static_cast<u16>(y[w] >> 16)}), sum);
  }
  return sum;
}

template <typename T, class SeqInfo, i32 kSlabs>
__global__ void __launch_bounds__(kStepThreads) bwd_sm90_preprocess_kernel(const FT_GRID_CONSTANT Params p) {
  StepRows<SeqInfo> rows(p);
  const T* gO = query_rows(static_cast<const T*>(p.out), p.out_strides, rows.s, rows.head);
  const T* gdO = query_rows(static_cast<const T*>(p.dout), p.dout_strides, rows.s, rows.head);
  i32 lane = threadIdx.x % 8;
#pragma unroll
  for (i32 pass = 0; pass < kStepRows; pass += kStepThreads / 8) {
    i32 i = rows.first + pass;
    bool is_query = i < rows.s.seqlen_q;
    // rowsum(dO * O)
    float sum = 0.0f;
    for (i32 d = 8 * lane; d < p.head_dim_v; d += 64) {
      if (is_query) {
        sum += dot8<T>(*reinterpret_cast<const uint4*>(gO + i * p.out_strides.row + d),
                       *reinterpret_cast<const uint4*>(gdO + i * p.dout_strides.row + d));
      }
    }
    sum = lanes_sum<8>(sum);
    i64 stat = stat_index(p, rows.s, rows.head, i);
    if (!is_query) continue;
    if (lane == 0) {
      // A fully masked row has no gradient: score_lse = +inf makes P 0, and delta is 0 whatever dlse is
      float lse = p.lse[stat];
      bool is_empty = lse == -infinity();
      if constexpr (mutates(Mutation::bwd_sm90_delta)) sum = 0.0f;
      if (p.dlse != nullptr) sum -= p.dlse[stat];
      if (!SeqInfo::kHasLengths && p.dq_order != nullptr) p.dq_order[stat] = 0;
      p.delta[stat] = is_empty ? 0.0f : sum;
      p.score_lse[stat] = is_empty ? infinity() : in_score_unit(has_natural_scores(p), lse);
    }
    // Zero the row's sums of dQ
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) {
      float4* row = reinterpret_cast<float4*>(p.dq_accum + (slab * p.lse_size + stat) * 64);
      row[lane] = row[lane + 8] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // Bad lengths may leave rows without a block
  if constexpr (SeqInfo::kHasLengths) KeyTile::clear_order(p);
}

template <typename T, class SeqInfo, i32 kSlabs>
__global__ void __launch_bounds__(kStepThreads) bwd_convert_dq_kernel(const FT_GRID_CONSTANT Params p) {
  StepRows<SeqInfo> rows(p);
  T* gdQ = query_rows(static_cast<T*>(p.dq), p.dq_strides, rows.s, rows.head);
  i32 lane = threadIdx.x % 8;
#pragma unroll
  for (i32 pass = 0; pass < kStepRows; pass += kStepThreads / 8) {
    i32 i = rows.first + pass;
    if (i >= rows.s.seqlen_q) continue;
    i64 stat = stat_index(p, rows.s, rows.head, i);
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) {
      const float4* row = reinterpret_cast<const float4*>(p.dq_accum + (slab * p.lse_size + stat) * 64);
      // Undo the swizzle of dq_accum
      i32 chunk = lane ^ i % 8, column = 64 * slab + 8 * lane;
      if constexpr (mutates(Mutation::bwd_sm90_dq_order)) chunk = lane;
      float4 x = row[2 * chunk], y = row[2 * chunk + 1];
      if (column < p.head_dim) {
        *reinterpret_cast<uint4*>(gdQ + i * p.dq_strides.row + column) =
            make_uint4(pack_two<T>(x.x * p.scale, x.y * p.scale), pack_two<T>(x.z * p.scale, x.w * p.scale),
                       pack_two<T>(y.x * p.scale, y.y * p.scale), pack_two<T>(y.z * p.scale, y.w * p.scale));
      }
    }
  }
}

}  // namespace flashtile
