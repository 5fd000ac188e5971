// Attention backward by mma.sync for wide heads, float16 from Turing on and bfloat16 from Ampere on: three kernels,
// each with one gradient. Reads no pages.
//
// No block can hold dK and dV of a wide head, let alone dQ. Each gradient has a kernel that owns its rows: eight
// products instead of five, but no sums in global memory, and results that do not depend on timing. The three differ
// only in what they own and what streams by:
//
//                      dQ                      dK                          dV
//   owned rows         Q, dO                   K, V                        K
//   S, or S^T          Q K^T                   K Q^T                       K Q^T
//   dP, or dP^T        dO V^T                  V dO^T                      -
//   result             dQ += dS K              dK += dS^T Q                dV += P^T dO
//
// Block:     kBlockM rows; it streams tiles of kBlockN rows that see them, of every head that shares a KV head. Warps
//            as in fwd_sm80_wide.cuh.
// Shared:    sA [kBlockM][kHeadDim], sB [kBlockM][kHeadDimV], sP [kBlockM][kBlockN] (P or dS), slabs [stage], swizzled
//            (tile/swizzled_tile.cuh); lse and delta of two tiles of queries.
// Mainloop:  one barrier per slab, as in fwd_sm80_wide.cuh.
#pragma once

#include "device/attn/owned_rows.cuh"
#include "device/attn/score_gradient.cuh"
#include "families/bwd_sm80_wide/config.cuh"
#include "families/fwd_sm80_wide/slabs.cuh"

namespace flashtile {

template <class Config>
struct alignas(128) BwdSm80WideStorage {
  using T = typename Config::Element;
  T sA[Config::kBlockM * Config::kHeadDim];
  T sB[Config::kHasDp ? Config::kBlockM * Config::kHeadDimV : 64];
  T sP[Config::kBlockM * Config::kBlockN];
  char slabs[Config::kNumStages][Config::template kSlabBytes<Config::kResultDim>];
  static constexpr i32 kStatRows = Config::kBlockM > Config::kBlockN ? Config::kBlockM : Config::kBlockN;
  float stats[2][2][kStatRows];  // lse and delta: of two tiles of queries, or [0] of the block's
  OwnedRows block;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm80Wide {
  using T = typename Config::Element;
  using Storage = BwdSm80WideStorage<Config>;
  using Keys = KeyRows<const T, KvSource<false>>;
  using TileA = SwizzledTile<Config::kHeadDim>;
  using TileB = SwizzledTile<Config::kHeadDimV>;
  using TileP = SwizzledTile<Config::kBlockN>;
  using TileSlab = SwizzledTile<Config::kSlabColumns>;
  using Gradient = ScoreGradient<T, Mask, ScoreMod, Dropout, Config::kWarpScores>;
  using Rows = QueryGradient<Mask, ScoreMod, Dropout, Config::kWarpScores>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kMTiles = Config::kMTiles;
  static constexpr i32 kScores = Config::kWarpScores / 2, kResults = Config::kResultDim / Config::kColumnWarps / 2;
  static constexpr i32 kNumStages = Config::kNumStages, kSlabBytes = sizeof(Storage::slabs[0]);
  static constexpr i32 kNumThreads = Config::kNumThreads;
  static constexpr i32 kPartColumns = Config::template kPartColumns<Config::kResultDim>;
  static constexpr bool kOwnsQueries = Config::kOwnsQueries;
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static_assert(kNumThreads >= 2 * kBlockN, "a thread copies one statistic of a tile");

  // ---- Copies. Scope: block.

  // The rows of one side: of q or dout, or of k or v.
  template <bool kIsQueries>
  FT_DEVICE static const T* side_rows(const Params& p, const void* tensor, const Strides& strides, const Sequence& s,
                                      i32 head, i32 row) {
    const T* base = static_cast<const T*>(tensor);
    if constexpr (kIsQueries) {
      return query_rows(base, strides, s, head) + row * strides.row;
    } else {
      return Keys(base, strides, p, s, head).row(row);
    }
  }

  // Starts the copy of the rows that the block owns.
  FT_DEVICE static void load_owned(const Params& p, Storage& shared, const OwnedRows& block) {
    i32 num_rows = (kOwnsQueries ? block.s.seqlen_q : block.s.seqlen_k) - block.first;
    auto load = [&](auto shape, T* tile, const void* tensor, const Strides& strides, i32 num_columns) {
      const T* rows = side_rows<kOwnsQueries>(p, tensor, strides, block.s, block.head, block.first);
      load_slab<kBlockM, decltype(shape)::kNumColumns, kNumThreads, Load>(
          shared_address(tile), num_rows, num_columns, [&](i32 row) { return rows + row * strides.row; });
    };
    load(TileA(), shared.sA, kOwnsQueries ? p.q : p.k, kOwnsQueries ? p.q_strides : p.k_strides, p.head_dim);
    if constexpr (Config::kHasDp) {
      load(TileB(), shared.sB, kOwnsQueries ? p.dout : p.v, kOwnsQueries ? p.dout_strides : p.v_strides, p.head_dim_v);
    }
  }

  // The statistics of the block's queries. The first slab's barrier comes before their first use.
  FT_DEVICE static void load_owned_stats(const Params& p, Storage& shared, const OwnedRows& block) {
    for (i32 row = threadIdx.x; row < kBlockM; row += kNumThreads) {
      bool is_query = block.first + row < block.s.seqlen_q;
      i64 stat = stat_index(p, block.s, block.head, block.first + row);
      shared.stats[0][0][row] = is_query ? p.score_lse[stat] : infinity();
      shared.stats[0][1][row] = is_query ? p.delta[stat] : 0.0f;
    }
  }

  // Copies the slabs of the tiles that stream by: columns of K or Q for S, columns of V or dO for dP, rows of the
  // result's other factor. Addresses are computed for each slab: registers are scarce.
  struct Copy {
    i32 count, slab;  // the next slab
    i32 head, first;  // of its tile

    FT_DEVICE Copy() : count(0), slab(0), head(0), first(0) {}

    // Starts the next copy, if there is one, to a stage.
    FT_DEVICE void load_next(const Params& p, Storage& shared, const OwnedRows& block, u32 stage) {
      if (count < block.num_tiles()) {
        if (slab == 0) start_tile(p, shared, block);
        u32 target = shared_address(shared.slabs) + stage * kSlabBytes;
        const Strides &a_strides = kOwnsQueries ? p.k_strides : p.q_strides,
                      &b_strides = kOwnsQueries ? p.v_strides : p.dout_strides;
        const void *a = kOwnsQueries ? p.k : p.q, *b = kOwnsQueries ? p.v : p.dout;
        if (slab < Config::kSlabsS) {
          load<kBlockN, Config::kSlabColumns>(p, block, target, a, a_strides, 0, slab * Config::kSlabColumns,
                                              p.head_dim);
        } else if (slab < Config::kSlabsS + Config::kSlabsDp) {
          load<kBlockN, Config::kSlabColumns>(p, block, target, b, b_strides, 0,
                                              (slab - Config::kSlabsS) * Config::kSlabColumns, p.head_dim_v);
        } else {
          i32 number = slab - Config::kSlabsS - Config::kSlabsDp, row = number / Config::kRowParts * Config::kSlabRows;
          load<Config::kSlabRows, kPartColumns>(
              p, block, target, Config::kHasDp ? a : b, Config::kHasDp ? a_strides : b_strides, row,
              number % Config::kRowParts * kPartColumns, Config::kHasDp ? p.head_dim : p.head_dim_v);
        }
        if (++slab == Config::kNumSlabs) slab = 0, ++count;
      }
      cp_async_commit();
    }

    // Finds the next tile; starts the copy of its statistics, if it has queries.
    FT_DEVICE void start_tile(const Params& p, Storage& shared, const OwnedRows& block) {
      head = block.tile_head(count), first = block.tile_row<Config>(count);
      if constexpr (!kOwnsQueries) {
        i32 row = threadIdx.x % kBlockN, which = threadIdx.x / kBlockN;
        if (which < 2) {
          const float* source = (which == 0 ? p.score_lse : p.delta) + stat_index(p, block.s, head, first + row);
          cp_async<4>(shared_address(shared.stats[count % 2][which] + row), source,
                      first + row < block.s.seqlen_q ? 4 : 0);
        }
      }
    }
    // Rows from first + row on and columns from `column` on of a tensor.
    template <i32 kRows, i32 kColumns>
    FT_DEVICE void load(const Params& p, const OwnedRows& block, u32 target, const void* tensor, const Strides& strides,
                        i32 row, i32 column, i32 head_dim) const {
      i32 num_rows = (kOwnsQueries ? block.s.seqlen_k : block.s.seqlen_q) - first - row;
      if constexpr (mutates(Mutation::bwd_sm80_wide_tail)) num_rows = kRows;
      const T* rows = side_rows<!kOwnsQueries>(p, tensor, strides, block.s, head, first + row) + column;
      load_slab<kRows, kColumns, kNumThreads, Load>(target, num_rows, head_dim - column,
                                                    [&](i32 r) { return rows + r * strides.row; });
    }
  };

  // ---- Mainloop. Scope: block.

  FT_DEVICE static void run(const Params& p, Storage& shared, const OwnedRows& block) {
    i32 warp = uniform(threadIdx.x / 32), row_warp = warp / Config::kColumnWarps;
    i32 column_warp = warp % Config::kColumnWarps, first_row = row_warp * Config::kWarpRows;
    i32 first_score = column_warp * Config::kWarpScores;
    float rD[kMTiles][kResults];
#pragma unroll
    for (i32 x = 0; x < kMTiles * kResults; ++x) rD[x / kResults][x % kResults] = 0.0f;

    // Start the copies of the block's rows and of the first slabs
    Copy copy;
    if (block.num_tiles() > 0) load_owned(p, shared, block);
#pragma unroll 1
    for (i32 stage = 0; stage < kNumStages - 1; ++stage) copy.load_next(p, shared, block, stage);
    if constexpr (kOwnsQueries) load_owned_stats(p, shared, block);

    // This lane's addresses
    u32 a = shared_address(shared.sA) + first_row * TileA::kPitch + TileA::template lane_offset<true>();
    u32 b = shared_address(shared.sB) + first_row * TileB::kPitch + TileB::template lane_offset<true>();
    u32 p_lane = shared_address(shared.sP) + first_row * TileP::kPitch + TileP::template lane_offset<true>();
    u32 columns_lane = first_score * TileSlab::kPitch + TileSlab::template lane_offset<false>();
    u32 rows_lane = slab_column_offset<Config, kPartColumns>(column_warp);
    u32 stage = 0;
    // Waits for the next slab. All warps are done with the one before it: refills its stage
    auto next_slab = [&] {
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      copy.load_next(p, shared, block, stage == 0 ? kNumStages - 1 : stage - 1);
      u32 slab = shared_address(shared.slabs) + stage * kSlabBytes;
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
      return slab;
    };
    auto multiply_columns = [&](auto shape, i32 num_slabs, u32 owned, float (&rS)[kMTiles][kScores]) {
#pragma unroll
      for (i32 x = 0; x < kMTiles * kScores; ++x) rS[x / kScores][x % kScores] = 0.0f;
#pragma unroll 1
      for (i32 slab = 0; slab < num_slabs; ++slab) {
        u32 streamed = next_slab() + columns_lane;
        mma_slab_abt<Config, decltype(shape)::kNumColumns>(rS, owned + slab * (2 * Config::kSlabColumns), streamed);
      }
    };

    for (i32 count = 0; count < block.num_tiles(); ++count) {
      // S and dP, or S^T and dP^T
      float rS[kMTiles][kScores], rdP[kMTiles][kScores];
      multiply_columns(TileA(), Config::kSlabsS, a, rS);
      if constexpr (Config::kHasDp) multiply_columns(TileB(), Config::kSlabsDp, b, rdP);
      // dS, or P^T, in 16 bits, to shared memory
      i32 head = block.tile_head(count), first = block.tile_row<Config>(count) + first_score;
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) {
        u32 packed_p[kScores / 2], packed_ds[kScores / 2];
        i32 owned = block.first + first_row + 16 * t;
        if constexpr (kOwnsQueries) {
          i32 row = first_row + 16 * t;
          Rows::template differentiate<true, Mask::kHasBand>(
              p, block.s, block.head, owned, first, shared.stats[0][0] + row, shared.stats[0][1] + row, rS[t], rdP[t]);
#pragma unroll
          for (i32 x = 0; x < kScores / 2; ++x) packed_ds[x] = pack_two<T>(rdP[t][2 * x], rdP[t][2 * x + 1]);
        } else {
          const float* sLse = shared.stats[count % 2][0] + first_score;
          const float* sDelta = shared.stats[count % 2][1] + first_score;
          i32 j_begin = owned - warp % 4 * 16;  // this warp's rows of 64 keys there (tile/fragment.cuh)
          // dV needs no dS: there any registers do for dP
          const auto& rdP_or_any = Config::kHasDp ? rdP[t] : rS[t];
          if constexpr (kHasOptions) {
            Gradient::with_options(p, block.s, head, first, j_begin, sLse, sDelta, rS[t], rdP_or_any, packed_p,
                                   packed_ds);
          } else {
            Gradient::template plain<Mask::kHasBand>(p, block.s, first, j_begin, sLse, sDelta, rS[t], rdP_or_any,
                                                     packed_p, packed_ds);
          }
        }
        store_packed<Config>(shared_address(shared.sP), first_row + 16 * t, first_score,
                             Config::kHasDp ? packed_ds : packed_p);
      }
      // The result of this warp's columns
#pragma unroll 1
      for (i32 step = 0; step < kBlockN / 16; step += Config::kSlabRows / 16) {
        mma_row_parts<Config>(rD, p_lane, step, [&] { return next_slab() + rows_lane; });
      }
    }

    // Store the result
#pragma unroll
    for (i32 x = 0; x < 2 * kMTiles; ++x) {
      i32 row = block.first + first_row + static_cast<i32>(threadIdx.x % 32 / 4) + 8 * x;
      float factor = Config::kHasDp ? p.scale : keep_factor<Dropout>(p);
      T* rows;
      if constexpr (kOwnsQueries) {
        rows = query_rows(static_cast<T*>(p.dq), p.dq_strides, block.s, block.head) + row * p.dq_strides.row;
      } else {
        const Strides& strides = Config::kHasDp ? p.dk_strides : p.dv_strides;
        rows =
            KeyRows<T, KvSource<false>>(static_cast<T*>(Config::kHasDp ? p.dk : p.dv), strides, p, block.s, block.head)
                .row(row);
      }
      store_warp_columns<Config, Load::kIsAligned16>(rows, row < (kOwnsQueries ? block.s.seqlen_q : block.s.seqlen_k),
                                                     Config::kHasDp ? p.head_dim : p.head_dim_v, column_warp, x % 2,
                                                     factor, rD[x / 2]);
    }
  }
};

// Scope: block.
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
FT_DEVICE void run_wide_backward(const Params& p) {
  static_assert(!KvSource::kIsPaged, "reads no pages");
  using Kernel = BwdSm80Wide<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
  if (threadIdx.x == 0) shared.block = OwnedRows::find<Config, Mask, SeqInfo>(p);
  __syncthreads();
  if (shared.block.template has_rows<Config>()) Kernel::run(p, shared, shared.block);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_sm80_dq_kernel(const FT_GRID_CONSTANT Params p) {
  run_wide_backward<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>(p);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_sm80_dk_kernel(const FT_GRID_CONSTANT Params p) {
  run_wide_backward<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>(p);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_sm80_dv_kernel(const FT_GRID_CONSTANT Params p) {
  run_wide_backward<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>(p);
}

}  // namespace flashtile
