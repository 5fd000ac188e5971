// Attention backward in float32 by mma.sync, from Ampere on: every product is three of TF32 (tile/tf32_gemm.cuh). Two
// kernels of one shape. Each gradient element is summed by one warp in a fixed order. Reads no pages.
//
//                      bwd_sm80_f32_dq         bwd_sm80_f32_dkdv
//   owned rows         Q, dO                   K, V
//   streamed tiles     K, V                    Q, dO, lse and delta, of every head that shares the KV head
//   S, or S^T          Q K^T                   K Q^T
//   dP, or dP^T        dO V^T                  V dO^T
//   result             dQ += dS K              dV += P^T dO, dK += dS^T Q
//
// Block:     kBlockM rows. A warp owns one or two m16 tiles of them from scores to results, all in its registers
//            (config.cuh), so warps meet only where a stage changes hands.
// Shared:    sOwn [kBlockM][kHeadDim], sOwnGrad [kBlockM][kHeadDimV], sStream [stage][kBlockN][kHeadDim], sStreamGrad
//            [stage][kBlockN][kHeadDimV], floats, swizzled; lse and delta of the queries.
// Mainloop:  one barrier per tile. Behind it the tile has arrived, and the stage of the tile before it is free. Rows
//            past the last query or key are zeros and add nothing.
#pragma once

#include "device/attn/owned_rows.cuh"
#include "device/attn/score_gradient.cuh"
#include "device/tile/tf32_gemm.cuh"
#include "families/bwd_sm80_f32/config.cuh"

namespace flashtile {

template <class Config>
struct alignas(128) BwdSm80F32Storage {
  float sOwn[Config::kBlockM * Config::kHeadDim];                              // Q, or K
  float sOwnGrad[Config::kBlockM * Config::kHeadDimV];                         // dO, or V
  float sStream[Config::kNumStages][Config::kBlockN * Config::kHeadDim];       // K, or Q
  float sStreamGrad[Config::kNumStages][Config::kBlockN * Config::kHeadDimV];  // V, or dO
  // lse and delta: [0] of the block's queries, or of each stage's
  static constexpr i32 kStatTiles = Config::kOwnsQueries ? 1 : Config::kNumStages;
  float stats[kStatTiles][2][Config::kOwnsQueries ? Config::kBlockM : Config::kBlockN];
  OwnedRows block;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm80F32 {
  using Storage = BwdSm80F32Storage<Config>;
  using TileQK = SwizzledTile<2 * Config::kHeadDim>;
  using TileV = SwizzledTile<2 * Config::kHeadDimV>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kMTiles = Config::kMTiles;
  static constexpr i32 kScores = kBlockN / 2;  // registers per m16 tile
  static constexpr i32 kNumStages = Config::kNumStages, kNumThreads = Config::kNumThreads;
  static constexpr bool kOwnsQueries = Config::kOwnsQueries;
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  // A band hides few tiles from both of two m16 tiles
  static constexpr bool kSkipsTiles = Mask::kHasBand && kMTiles == 1;
  static_assert(kNumThreads >= 2 * kBlockN, "a thread copies one statistic of a tile");

  // ---- Copies. Scope: block.

  // Starts the copy of kRows rows of q and dout, or of k and v, from `row` on; zeros behind the last.
  template <bool kIsQueries, i32 kRows>
  FT_DEVICE static void copy_rows(const Params& p, const Sequence& s, i32 head, i32 row, u32 tile, u32 grad_tile) {
    i32 num_rows = (kIsQueries ? s.seqlen_q : s.seqlen_k) - row;
    if constexpr (mutates(Mutation::bwd_sm80_f32_tail)) num_rows = kRows;
    auto copy = [&](auto shape, u32 target, const void* tensor, const Strides& strides, i32 num_columns) {
      const float* base = static_cast<const float*>(tensor);
      if constexpr (kIsQueries) {
        base = query_rows(base, strides, s, head) + row * strides.row;
      } else {
        base = KeyRows<const float, KvSource<false>>(base, strides, p, s, head).row(row);
      }
      copy_float_rows<Config, Load, decltype(shape)::kNumColumns / 2, kRows>(target, base, strides.row, 0, num_rows,
                                                                             num_columns);
    };
    copy(TileQK(), tile, kIsQueries ? p.q : p.k, kIsQueries ? p.q_strides : p.k_strides, p.head_dim);
    copy(TileV(), grad_tile, kIsQueries ? p.dout : p.v, kIsQueries ? p.dout_strides : p.v_strides, p.head_dim_v);
  }

  // The statistics of the block's queries. The first tile's barrier comes before their first use.
  FT_DEVICE static void load_owned_stats(const Params& p, Storage& shared, const OwnedRows& block) {
    for (i32 row = threadIdx.x; row < kBlockM; row += kNumThreads) {
      bool is_query = block.first + row < block.s.seqlen_q;
      i64 stat = stat_index(p, block.s, block.head, block.first + row);
      shared.stats[0][0][row] = is_query ? p.score_lse[stat] : infinity();
      shared.stats[0][1][row] = is_query ? p.delta[stat] : 0.0f;
    }
  }

  // One of the tiles that stream by, head by head.
  struct Place {
    i32 head, row;

    FT_DEVICE explicit Place(const OwnedRows& block)
        : head(uniform(block.first_head)), row(uniform(block.first_tile) * kBlockN) {}
    FT_DEVICE void advance(const OwnedRows& block) {
      row += kBlockN;
      if (kOwnsQueries || row < (block.first_tile + block.num_row_tiles) * kBlockN) return;
      row = block.first_tile * kBlockN;
      ++head;
    }
  };

  // Starts the copy of a tile, with its statistics if it has queries.
  FT_DEVICE static void load_tile(const Params& p, Storage& shared, const OwnedRows& block, const Place& place,
                                  u32 stage) {
    u32 tile = shared_address(shared.sStream) + stage * sizeof(shared.sStream[0]);
    u32 grad_tile = shared_address(shared.sStreamGrad) + stage * sizeof(shared.sStreamGrad[0]);
    copy_rows<!kOwnsQueries, kBlockN>(p, block.s, place.head, place.row, tile, grad_tile);
    if constexpr (!kOwnsQueries) {
      i32 row = threadIdx.x % kBlockN, which = threadIdx.x / kBlockN;
      if (which < 2) {
        const float* source =
            (which == 0 ? p.score_lse : p.delta) + stat_index(p, block.s, place.head, place.row + row);
        cp_async<4>(shared_address(shared.stats[stage][which] + row), source,
                    place.row + row < block.s.seqlen_q ? 4 : 0);
      }
    }
  }

  // ---- Mainloop. Scope: warp.

  // The streamed rows that any of this warp's rows sees.
  FT_DEVICE static Range seen_rows(const Params& p, const OwnedRows& block, i32 first_row) {
    i32 first = block.first + first_row, end = first + 16;
    if constexpr (kOwnsQueries) {
      return key_range<Mask>(p, block.s, first, min_of(end, block.s.seqlen_q));
    } else {
      return query_range<Mask>(p, block.s, first, min_of(end, block.s.seqlen_k));
    }
  }

  // dS of m16 tile t in place of dP, and P with dropout in place of S if the rows are keys.
  FT_DEVICE static void differentiate(const Params& p, const Storage& shared, i32 first_row, const Place& place,
                                      u32 stage, float (&rS)[kScores], float (&rdP)[kScores]) {
    const OwnedRows& block = shared.block;
    i32 owned = block.first + first_row;
    bool is_masked = false;
    if constexpr (Mask::kHasBand && kOwnsQueries) {
      is_masked = needs_mask<Mask>(p, block.s, owned, 16, place.row, kBlockN);
    } else if constexpr (Mask::kHasBand) {
      is_masked = needs_mask<Mask>(p, block.s, place.row, kBlockN, owned, 16);
    }
    if constexpr (kOwnsQueries) {
      using Gradient = QueryGradient<Mask, ScoreMod, Dropout, kBlockN>;
      const float *sLse = shared.stats[0][0] + first_row, *sDelta = shared.stats[0][1] + first_row;
      if (is_masked) {
        Gradient::template differentiate<true, true>(p, block.s, block.head, owned, place.row, sLse, sDelta, rS, rdP);
      } else {
        Gradient::template differentiate<true, false>(p, block.s, block.head, owned, place.row, sLse, sDelta, rS, rdP);
      }
    } else {
      using Gradient = ScoreGradient<float, Mask, ScoreMod, Dropout, kBlockN>;
      const float *sLse = shared.stats[stage][0], *sDelta = shared.stats[stage][1];
      i32 j_begin = owned / 64 * 64;  // this warp's rows of 64 keys there (tile/fragment.cuh)
      if constexpr (kHasOptions) {
        Gradient::with_options(p, block.s, place.head, place.row, j_begin, sLse, sDelta, rS, rdP, rS, rdP);
      } else if (is_masked) {
        Gradient::template plain<true>(p, block.s, place.row, j_begin, sLse, sDelta, rS, rdP, rS, rdP);
      } else {
        Gradient::template plain<false>(p, block.s, place.row, j_begin, sLse, sDelta, rS, rdP, rS, rdP);
      }
    }
  }

  // Stores the rows of an m16 tile of dQ, dK or dV.
  template <i32 kCount>
  FT_DEVICE static void store_rows(const Params& p, const OwnedRows& block, i32 first_row, void* tensor,
                                   const Strides& strides, i32 num_columns, float factor, const float (&rD)[kCount]) {
    float* base = static_cast<float*>(tensor);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 row = block.first + first_row + static_cast<i32>(threadIdx.x % 32 / 4) + 8 * r;
      if constexpr (kOwnsQueries) {
        store_float_row<Load>(query_rows(base, strides, block.s, block.head) + row * strides.row,
                              row < block.s.seqlen_q, num_columns, r, factor, rD);
      } else {
        store_float_row<Load>(KeyRows<float, KvSource<false>>(base, strides, p, block.s, block.head).row(row),
                              row < block.s.seqlen_k, num_columns, r, factor, rD);
      }
    }
  }

  // Scope: block.
  FT_DEVICE static void run(const Params& p, Storage& shared, const OwnedRows& block) {
    i32 warp = uniform(threadIdx.x / 32), first_row = 16 * (4 * kMTiles * (warp / 4) + warp % 4);
    // dQ, or dK; dV
    constexpr i32 kResults = Config::kHeadDim / 2, kResultsV = kOwnsQueries ? 1 : Config::kHeadDimV / 2;
    float rD[kMTiles][kResults], rdV[kMTiles][kResultsV];
#pragma unroll
    for (i32 x = 0; x < kMTiles * kResults; ++x) rD[x / kResults][x % kResults] = 0.0f;
#pragma unroll
    for (i32 x = 0; x < kMTiles * kResultsV; ++x) rdV[x / kResultsV][x % kResultsV] = 0.0f;

    i32 num_tiles = uniform(block.num_tiles());
    if (num_tiles > 0) {
      // Start the copies of the block's rows and of the first tiles, a group for each tile
      copy_rows<kOwnsQueries, kBlockM>(p, block.s, block.head, block.first, shared_address(shared.sOwn),
                                       shared_address(shared.sOwnGrad));
      if constexpr (kOwnsQueries) load_owned_stats(p, shared, block);
      Place place(block), next(block);
#pragma unroll
      for (i32 stage = 0; stage < kNumStages - 1; ++stage) {
        if (stage < num_tiles) load_tile(p, shared, block, next, stage);
        next.advance(block);
        cp_async_commit();
      }

      // This lane's addresses
      u32 own = shared_address(shared.sOwn) + first_row * TileQK::kPitch + TileQK::template lane_offset<true>();
      u32 own_grad = shared_address(shared.sOwnGrad) + first_row * TileV::kPitch + TileV::template lane_offset<true>();
      constexpr u32 kBytes = sizeof(shared.sStream[0]), kGradBytes = sizeof(shared.sStreamGrad[0]);
      Range seen{0, 0};
      if constexpr (kSkipsTiles) seen = seen_rows(p, block, first_row);
      u32 stage = 0;
      for (i32 count = 0; count < num_tiles; ++count) {
        // Wait for the tile. All warps are done with the tile before it: refill its stage
        cp_async_wait<kNumStages - 2>();
        __syncthreads();
        if (count + kNumStages - 1 < num_tiles) {
          load_tile(p, shared, block, next, stage == 0 ? kNumStages - 1 : stage - 1);
          next.advance(block);
        }
        cp_async_commit();
        // Skip the tile if it is fully masked for this warp
        if (!kSkipsTiles || (place.row < seen.end && place.row + kBlockN > seen.begin)) {
          u32 stream = shared_address(shared.sStream) + stage * kBytes;
          u32 stream_grad = shared_address(shared.sStreamGrad) + stage * kGradBytes;
          // S and dP, or S^T and dP^T. is_true and __syncwarp keep ptxas from mixing the steps: it would spill
          float rS[kMTiles][kScores], rdP[kMTiles][kScores];
          tf32_gemm_abt<kBlockN, Config::kHeadDim, 4>(rS, own, stream + TileQK::template lane_offset<false>());
          if (is_true()) {
            tf32_gemm_abt<kBlockN, Config::kHeadDimV, 4>(rdP, own_grad,
                                                         stream_grad + TileV::template lane_offset<false>());
          }
          // P and dS
          __syncwarp();
#pragma unroll
          for (i32 t = 0; t < kMTiles; ++t) {
            if (is_true()) differentiate(p, shared, first_row + 64 * t, place, stage, rS[t], rdP[t]);
          }
          // dV += P^T dO
          Tf32Parts<4> parts[kMTiles][kBlockN / 8];
          if constexpr (!kOwnsQueries) {
            split_accumulators(parts, rS);
            tf32_gemm_ab<Config::kHeadDimV, true>(rdV, parts, stream_grad + tf32_lane_offset<Config::kHeadDimV>());
          }
          // dQ += dS K, or dK += dS^T Q
          split_accumulators(parts, rdP);
          tf32_gemm_ab<Config::kHeadDim, true>(rD, parts, stream + tf32_lane_offset<Config::kHeadDim>());
        }
        place.advance(block);
        stage = stage == kNumStages - 1 ? 0 : stage + 1;
      }
    }

    // Store the results
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
      i32 row = first_row + 64 * t;
      if constexpr (kOwnsQueries) {
        store_rows(p, block, row, p.dq, p.dq_strides, p.head_dim, p.scale, rD[t]);
      } else {
        store_rows(p, block, row, p.dk, p.dk_strides, p.head_dim, p.scale, rD[t]);
        store_rows(p, block, row, p.dv, p.dv_strides, p.head_dim_v, keep_factor<Dropout>(p), rdV[t]);
      }
    }
  }
};

// Scope: block.
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
FT_DEVICE void run_float_backward(const Params& p) {
  static_assert(!KvSource::kIsPaged, "reads no pages");
  using Kernel = BwdSm80F32<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
  // It stays in shared memory: registers are scarce
  if (threadIdx.x == 0) shared.block = OwnedRows::find<Config, Mask, SeqInfo>(p);
  __syncthreads();
  if (shared.block.template has_rows<Config>()) Kernel::run(p, shared, shared.block);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    bwd_sm80_f32_dq_kernel(const FT_GRID_CONSTANT Params p) {
  run_float_backward<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>(p);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    bwd_sm80_f32_dkdv_kernel(const FT_GRID_CONSTANT Params p) {
  run_float_backward<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>(p);
}

}  // namespace flashtile
