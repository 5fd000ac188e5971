// Attention forward by mma.sync for wide heads, float16 from Turing on and bfloat16 from Ampere on: head dims to 512,
// every option.
//
// Grid:      as fwd_sm80.cuh.
// Block:     kBlockM queries. No warp holds a row of O: kColumnWarps warps share rows. Each computes its keys of S and
//            of P, and its columns of O (config.cuh).
// Shared:    sQ [kBlockM][kHeadDim], sP [kBlockM][kBlockN], slabs [stage], swizzled (tile/swizzled_tile.cuh); the row
//            maxima of each column of warps.
// Mainloop:  key tiles go from last to first. K comes in slabs of columns, V in slabs of rows, through one ring. One
//            barrier per slab: behind it the slab has arrived, and the one before it is free for a copy further on.
//            The warps that share rows exchange their maxima before the exponentials; the barrier of the first slab of
//            V is also that of P.
// Epilogue:  the sums of the warps that share rows are added up; O is stored from registers.
#pragma once

#include "families/fwd_sm80/fwd_sm80.cuh"
#include "families/fwd_sm80_wide/config.cuh"
#include "families/fwd_sm80_wide/slabs.cuh"

namespace flashtile {

template <class Config, class Mask, class SeqInfo>
struct alignas(128) FwdSm80WideStorage {
  using T = typename Config::Element;
  T sQ[Config::kBlockM * Config::kHeadDim];
  T sP[Config::kBlockM * Config::kBlockN];
  char slabs[Config::kNumStages][Config::template kSlabBytes<Config::kHeadDimV>];
  float rows[Config::kColumnWarps][Config::kBlockM];  // maxima, then sums
  alignas(16) char tile[sizeof(QueryTile<Config, Mask, SeqInfo>)];
};

template <class Config, class Mask, class BaseScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
struct FwdSm80Wide {
  using Narrow = FwdSm80<Config, Mask, BaseScoreMod, Dropout, SeqInfo, KvSource, Load>;
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using ScoreMod = typename Narrow::ScoreMod;
  using Tile = typename Narrow::Tile;
  using Rows = typename Narrow::Rows;
  using Softmax = typename Narrow::Softmax;
  using Storage = FwdSm80WideStorage<Config, Mask, SeqInfo>;
  using TileQ = SwizzledTile<Config::kHeadDim>;
  using TileK = SwizzledTile<Config::kSlabColumns>;
  using TileP = SwizzledTile<Config::kBlockN>;
  static constexpr i32 kBlockN = Config::kBlockN, kMTiles = Config::kMTiles, kNumStages = Config::kNumStages;
  static constexpr i32 kScores = Config::kWarpScores / 2, kOutputs = Config::kHeadDimV / Config::kColumnWarps / 2;
  static constexpr i32 kPartColumns = Config::template kPartColumns<Config::kHeadDimV>;
  static constexpr i32 kNumSlabs = Config::kSlabsK + Config::kSlabsV, kSlabBytes = sizeof(Storage::slabs[0]);

  struct State {
    Softmax softmax;
    float rO[kMTiles][kOutputs];
  };

  // Copies the slabs of a block's key tiles, from the last tile to the first. Scope: block.
  struct Copy {
    KeyRows<const T, KvSource> k, v;
    u32 slabs, stage;
    i32 n, slab;

    FT_DEVICE Copy(const Params& p, Storage& shared, const Tile& tile, i32 kv_head)
        : k(static_cast<const T*>(p.k), p.k_strides, p, tile.s, kv_head),
          v(static_cast<const T*>(p.v), p.v_strides, p, tile.s, kv_head),
          slabs(shared_address(shared.slabs)),
          stage(0),
          n(tile.n_end - 1),
          slab(0) {}

    // Starts the next copy, if there is one.
    FT_DEVICE void load_next(const Params& p, const Tile& tile) {
      if (n >= tile.n_begin) {
        u32 target = slabs + stage * kSlabBytes;
        if (slab < Config::kSlabsK) {
          i32 column = slab * Config::kSlabColumns;
          load<kBlockN, Config::kSlabColumns>(target, k, n * kBlockN, tile.s.seqlen_k, column, p.head_dim);
        } else {
          i32 number = slab - Config::kSlabsK, j = n * kBlockN + number / Config::kRowParts * Config::kSlabRows;
          load<Config::kSlabRows, kPartColumns>(target, v, j, tile.s.seqlen_k,
                                                number % Config::kRowParts * kPartColumns, p.head_dim_v);
        }
        if (++slab == kNumSlabs) slab = 0, --n;
      }
      cp_async_commit();
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
    }
    template <i32 kRows, i32 kColumns>
    FT_DEVICE static void load(u32 target, const KeyRows<const T, KvSource>& rows, i32 j, i32 seqlen_k, i32 column,
                               i32 head_dim) {
      i32 num_rows = seqlen_k - j;
      if constexpr (mutates(Mutation::fwd_sm80_wide_tail)) num_rows = kRows;
      load_slab<kRows, kColumns, Config::kNumThreads, Load>(target, num_rows, head_dim - column, [&](i32 row) {
        // The table of pages ends with the last key
        return rows.row(KvSource::kIsPaged ? min_of(j + row, seqlen_k - 1) : j + row) + column;
      });
    }
  };

  // Processes the key tiles [n_begin, n_end) of the block; tile and shared_tile are equal. Scope: block.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Tile& tile, const Tile& shared_tile,
                                 float factor, State& state) {
    i32 warp = uniform(threadIdx.x / 32), row_warp = warp / Config::kColumnWarps;
    i32 column_warp = warp % Config::kColumnWarps, first_row = row_warp * Config::kWarpRows;
    i32 kv_head = tile.coord.head / (p.heads / p.heads_kv);
    // Start the copies of Q and of the first slabs
    clear_tile<Config::kNumThreads>(shared.sQ, sizeof(shared.sQ));
    __syncthreads();
    Narrow::load_q(p, shared.sQ, tile);
    Copy copy(p, shared, tile, kv_head);
#pragma unroll 1
    for (i32 x = 0; x < kNumStages - 1; ++x) copy.load_next(p, tile);

    // This lane's addresses
    u32 q = shared_address(shared.sQ) + first_row * TileQ::kPitch + TileQ::template lane_offset<true>();
    u32 sP = shared_address(shared.sP), p_lane = sP + first_row * TileP::kPitch + TileP::template lane_offset<true>();
    u32 k_lane = column_warp * Config::kWarpScores * TileK::kPitch + TileK::template lane_offset<false>();
    u32 v_lane = slab_column_offset<Config, kPartColumns>(column_warp);
    u32 stage = 0;
    // Waits for the next slab. All warps are done with the one before it: refills its stage
    auto next_slab = [&] {
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      copy.load_next(p, tile);
      u32 slab = copy.slabs + stage * kSlabBytes;
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
      return slab;
    };
    // The tiles that some row sees only in part
    ConsumerTiles tiles = ConsumerTiles::find(p, tile, tile.i_begin);
    i32 unmasked_begin = uniform(tiles.unmasked.begin), unmasked_end = uniform(tiles.unmasked.end);
    if constexpr (Config::kNumConsumers > 1) {
      ConsumerTiles last = ConsumerTiles::find(p, tile, tile.i_begin + (Config::kNumConsumers - 1) * 64);
      unmasked_begin = uniform(max_of(unmasked_begin, last.unmasked.begin));
      unmasked_end = uniform(min_of(unmasked_end, last.unmasked.end));
    }
    float* sRow = shared.rows[0] + first_row + threadIdx.x % 32 / 4;  // of row 0 of m16 tile 0, column warp 0

    for (i32 n = tile.n_end - 1; n >= tile.n_begin; --n) {
      // S = Q K^T of this warp's keys
      float rS[kMTiles][kScores];
#pragma unroll
      for (i32 x = 0; x < kMTiles * kScores; ++x) rS[x / kScores][x % kScores] = 0.0f;
#pragma unroll 1
      for (i32 slab = 0; slab < Config::kSlabsK; ++slab) {
        u32 k = next_slab() + k_lane;
        mma_slab_abt<Config, Config::kHeadDim>(rS, q + slab * (2 * Config::kSlabColumns), k);
      }
      // Apply options and mask
      i32 j_begin = n * kBlockN + column_warp * Config::kWarpScores;
      if (Narrow::kMasksAlways || n >= unmasked_end || n < unmasked_begin) {
        Narrow::modify_tile(p, shared_tile, j_begin, rS);
      }
      // Exchange the maxima of the rows
#pragma unroll
      for (i32 x = 0; x < 2 * kMTiles; ++x) {
        float m = Softmax::tile_maximum(rS[x / 2], x % 2);
        if (threadIdx.x % 4 == 0) sRow[column_warp * Config::kBlockM + 8 * x] = m;
      }
      named_barrier_sync(1 + row_warp, 32 * Config::kColumnWarps);
      auto row_maximum = [&](i32 t, i32 r) {
        i32 from = threadIdx.x % Config::kColumnWarps;
        if constexpr (mutates(Mutation::fwd_sm80_wide_maxima)) from = column_warp;
        return quad_max(sRow[from * Config::kBlockM + 16 * t + 8 * r]);
      };
      state.softmax.raise_maximum(factor, row_maximum, state.rO);
      // P, in 16 bits, to shared memory
      state.softmax.template exponentiate<true>(factor, rS);
      if constexpr (Dropout::kIsOn) Narrow::drop_tile(p, shared_tile, j_begin, rS);
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) {
        u32 packed[kScores / 2];
#pragma unroll
        for (i32 x = 0; x < kScores / 2; ++x) packed[x] = pack_two<T>(rS[t][2 * x], rS[t][2 * x + 1]);
        store_packed<Config>(sP, first_row + 16 * t, column_warp * Config::kWarpScores, packed);
      }
      // O += P V of this warp's columns
#pragma unroll 1
      for (i32 step = 0; step < kBlockN / 16; step += Config::kSlabRows / 16) {
        mma_row_parts<Config>(state.rO, p_lane, step, [&] { return next_slab() + v_lane; });
      }
    }
  }

  // Adds up the sums of the warps that share rows: lane 0 of a quad gets the sum, the others 0. Scope: block.
  FT_DEVICE static void join_sums(Storage& shared, Softmax& softmax) {
    i32 warp = threadIdx.x / 32, column_warp = warp % Config::kColumnWarps;
    float* sRow = shared.rows[0] + warp / Config::kColumnWarps * Config::kWarpRows + threadIdx.x % 32 / 4;
#pragma unroll
    for (i32 x = 0; x < 2 * kMTiles; ++x) {
      float l = quad_sum(softmax.l[x / 2][x % 2]);
      if (threadIdx.x % 4 == 0) sRow[column_warp * Config::kBlockM + 8 * x] = l;
    }
    __syncthreads();
#pragma unroll
    for (i32 x = 0; x < 2 * kMTiles; ++x) {
      float l = 0.0f;
#pragma unroll
      for (i32 w = 0; w < Config::kColumnWarps; ++w) l += sRow[w * Config::kBlockM + 8 * x];
      if constexpr (mutates(Mutation::fwd_sm80_wide_sum)) l = Config::kColumnWarps * sRow[8 * x];
      softmax.l[x / 2][x % 2] = threadIdx.x % 4 == 0 ? l : 0.0f;
    }
  }

  // Normalises and stores O and lse of an m16 tile; of a split the sum of P V, m and l. Scope: warp.
  FT_DEVICE static void epilogue(const Params& p, const Tile& tile, const Rows& rows, float factor, const float (&m)[2],
                                 const float (&l)[2], const float (&rO)[kOutputs]) {
    i32 column_warp = threadIdx.x / 32 % Config::kColumnWarps;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      bool is_query = rows.is_query(tile, r);
      float norm = Narrow::finish_row(p, tile, rows, r, factor, m[r], l[r], column_warp == 0);
      if (p.num_splits > 1 || kIsSame<Out, float>) {
        float* gO = Narrow::float_row(p, tile, rows, r);
        store_warp_columns<Config, Load::kIsAligned16>(gO, is_query, p.head_dim_v, column_warp, r, norm, rO);
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, tile.s, rows.head(tile, r));
        store_warp_columns<Config, Load::kIsAligned16>(gO + rows.i[r] * p.out_strides.row, is_query, p.head_dim_v,
                                                       column_warp, r, norm, rO);
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) fwd_sm80_wide_kernel(const FT_GRID_CONSTANT Params p) {
  using Kernel = FwdSm80Wide<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  // Find this block's query tile
  TileGrid<Mask, SeqInfo, Config::kPacksHeads> grid;
  typename Kernel::Tile tile(p, grid, static_cast<i32>(blockIdx.x));
  if (!tile.has_queries()) return;
  // For masks and the epilogue it stays in shared memory: registers are scarce
  auto& shared_tile = *reinterpret_cast<typename Kernel::Tile*>(shared.tile);
  if (threadIdx.x == 0) shared_tile = tile;

  // Score modifiers return scores in their unit; without them S stays a dot product
  float factor = Kernel::ScoreMod::kChangesScores ? exponent_factor(Kernel::Narrow::kIsNatural) : p.scale_log2;
  typename Kernel::State state;
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
#pragma unroll
    for (i32 x = 0; x < Kernel::kOutputs; ++x) state.rO[t][x] = 0.0f;
  }
  if (tile.has_keys()) Kernel::mainloop(p, shared, tile, shared_tile, factor, state);
  Kernel::join_sums(shared, state.softmax);
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
    typename Kernel::Rows rows = Kernel::Narrow::rows_of(p, shared_tile, t);
    Kernel::epilogue(p, shared_tile, rows, factor, state.softmax.m[t], state.softmax.l[t], state.rO[t]);
  }
}

}  // namespace flashtile
