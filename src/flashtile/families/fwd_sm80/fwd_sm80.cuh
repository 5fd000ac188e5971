// Attention forward by mma.sync, float16 from Turing on and bfloat16 from Ampere on: ldmatrix, cp.async, every option.
// FlashAttention-2, section 3.
//
// Grid:      one block per query tile (attn/scheduler.cuh), in one dimension. Under a band the last tile of a head
//            comes first, since it may see the most keys.
// Block:     kBlockM queries; a warp owns kWarpRows of them from scores to output, as one or two m16 tiles. S, P and O
//            stay in its registers, so warps meet only where a stage changes hands.
// Shared:    sQ [kBlockM][kHeadDim], sK [stage][kBlockN][kHeadDim], sV [stage][kBlockN][kHeadDimV], swizzled
//            (tile/swizzled_tile.cuh).
// Mainloop:  key tiles go from last to first. One barrier per tile: behind it the tile has arrived, and the stage of
//            the tile before it is free for the copies of a tile further on. Only the last tile of a sequence has
//            missing rows, and it is copied in the prologue. Masked tiles run a separate loop body.
// Epilogue:  16-byte stores from registers; a quad exchanges words for them.
#pragma once

#include "device/attn/dropout.cuh"
#include "device/attn/merge.cuh"
#include "device/attn/online_softmax.cuh"
#include "device/attn/score_fragment.cuh"
#include "device/attn/work_item.cuh"
#include "device/core/mutation.cuh"
#include "device/core/timeline.cuh"
#include "device/ptx/block_barrier.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/mma_gemm.cuh"
#include "families/fwd_sm80/config.cuh"

namespace flashtile {

template <class Config, class Mask, class SeqInfo>
struct alignas(128) FwdSm80Storage {
  using T = typename Config::Element;
  T sQ[Config::kBlockM * Config::kHeadDim];
  T sK[Config::kNumStages][Config::kBlockN * Config::kHeadDim];
  T sV[Config::kNumStages][Config::kBlockN * Config::kHeadDimV];
  alignas(16) char tile[sizeof(QueryTile<Config, Mask, SeqInfo>)];
};

// The largest dot product is the largest score only under a positive scale. Otherwise scale the scores first.
template <class ScoreMod, bool kIsScalePositive>
struct SignedScoreMod : ScoreMod {};
template <class ScoreMod>
struct SignedScoreMod<ScoreMod, false> : ScoreMod {
  static constexpr bool kChangesScores = true;
};

template <class Config, class Mask, class BaseScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
struct FwdSm80 {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using ScoreMod = SignedScoreMod<BaseScoreMod, Config::kIsScalePositive>;
  using Storage = FwdSm80Storage<Config, Mask, SeqInfo>;
  using Tile = QueryTile<Config, Mask, SeqInfo>;
  using Packing = HeadPacking<Config>;
  using Rows = FragmentRows<Config>;
  using Softmax = WarpSoftmax<Config::kMTiles, ScoreMod::kIsNatural>;
  using TileQK = SwizzledTile<Config::kHeadDim>;
  using TileV = SwizzledTile<Config::kHeadDimV>;
  static constexpr bool kIsNatural = ScoreMod::kIsNatural;
  static constexpr i32 kBlockN = Config::kBlockN, kMTiles = Config::kMTiles, kNumStages = Config::kNumStages;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per m16 tile
  static constexpr i32 kDepthSteps = Config::kHeadDim / 16;
  // With an option the mask costs little: one loop body for all tiles keeps the code short
  static constexpr bool kMasksAlways = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn || kHasOneBarrier;

  // Loops over the rows of a copy are unrolled, unless the rows need checks
  static constexpr bool kUnrolls = Config::kIsExact && Load::kIsAligned16;

  // What a warp carries from tile to tile.
  struct State {
    Softmax softmax;
    float rO[kMTiles][kOutputs];
    u32 rQ[Config::kKeptSteps > 0 ? Config::kKeptSteps : 1][kMTiles][4];
  };

  // ---- Copies. Scope: block.

  // Starts the copy of Q; rows without a query become zeros.
  FT_DEVICE static void load_q(const Params& p, T* sQ, const Tile& tile) {
    const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, tile.s, 0) + TileQK::copy_column();
    i32 num_heads = Packing::num_heads(p, tile.coord.head), num_queries = Packing::num_queries(p);
    i32 num_columns = p.head_dim - TileQK::copy_column();
    for_each_row<Config::kHeadDim, Config::kBlockM, Config::kNumThreads, kUnrolls>(
        shared_address(sQ), [&](i32 first, i32 r, u32 target) {
          i32 row = first + r, head = 0, i = tile.i_begin + row;
          if constexpr (Config::kPacksHeads) {
            head = row % 64 / num_queries;
            i = tile.i_begin + row / 64 * num_queries + row % 64 - head * num_queries;
          }
          bool is_row = head < num_heads && static_cast<u32>(i) < static_cast<u32>(tile.s.seqlen_q);
          const T* source = gQ + (tile.coord.head + head) * p.q_strides.head + i * p.q_strides.row;
          copy_row_chunks<Config::kHeadDim, Config::kIsExact, Load>(target, source, is_row, num_columns);
        });
  }

  // Copies the tiles of k or v from last to first. Each thread keeps the address of its chunk of the next tile.
  template <i32 kColumns>
  struct KeyCopy {
    using Shared = SwizzledTile<kColumns>;
    KeyRows<const T, KvSource> rows;
    const char* next;  // not with pages
    i32 num_columns;   // from this thread's on

    FT_DEVICE KeyCopy(const void* tensor, const Strides& strides, const Params& p, const Tile& tile, i32 kv_head,
                      i32 head_dim)
        : rows(static_cast<const T*>(tensor), strides, p, tile.s, kv_head),
          next(nullptr),
          num_columns(head_dim - Shared::copy_column()) {
      if constexpr (!KvSource::kIsPaged) {
        i32 j = (tile.n_end - 1) * kBlockN + threadIdx.x / Shared::kSegment;
        next = reinterpret_cast<const char*>(rows.row(j) + Shared::copy_column());
      }
    }

    // Starts the copy of the next tile, n, whose rows from num_rows on are missing if kHasTail.
    template <bool kHasTail>
    FT_DEVICE void load(u32 stage, i32 n, i32 num_rows) {
      i64 row_bytes = sizeof(T) * rows.row_stride;
      for_each_row<kColumns, kBlockN, Config::kNumThreads, kUnrolls>(stage, [&](i32 first, i32 r, u32 target) {
        const T* source;
        if constexpr (KvSource::kIsPaged) {
          i32 j = kHasTail ? min_of(first + r, num_rows - 1) : first + r;
          source = rows.row(n * kBlockN + j) + Shared::copy_column();
        } else {
          source = reinterpret_cast<const T*>(next + r * row_bytes);
        }
        bool is_row = !kHasTail || first + r < num_rows;
        if constexpr (mutates(Mutation::fwd_sm80_tail)) is_row = true;
        copy_row_chunks<kColumns, Config::kIsExact, Load>(target, source, is_row, num_columns);
      });
      next -= kBlockN * row_bytes;
    }
  };

  // ---- Mainloop. Scope: warp.

  // This thread's rows of m16 tile t of its warp.
  FT_DEVICE static Rows rows_of(const Params& p, const Tile& tile, i32 t) {
    i32 row = static_cast<i32>(threadIdx.x / 32 / Config::kColumnWarps) * Config::kWarpRows + 16 * t;
    return Rows(p, tile, row / 64, row % 64 + threadIdx.x % 32 / 4);
  }

  // Applies score modifiers and mask to a tile of scores.
  template <i32 kCount>
  FT_DEVICE static void modify_tile(const Params& p, const Tile& tile, i32 j_begin, float (&rS)[kMTiles][kCount]) {
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
      Rows rows = rows_of(p, tile, t);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        // Rows without a query are computed but must not read outside the sequence
        i32 i = clamp(rows.i[r], 0, tile.s.seqlen_q - 1);
        modify_scores<Mask, ScoreMod>(p, tile.s, rows.head(tile, r), i, j_begin, r, rS[t]);
      }
    }
  }

  // Applies dropout to a tile of probabilities.
  template <i32 kCount>
  FT_DEVICE static void drop_tile(const Params& p, const Tile& tile, i32 j_begin, float (&rS)[kMTiles][kCount]) {
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) flashtile::drop_tile(p, tile, rows_of(p, tile, t), j_begin, rS[t]);
  }

  // Loads 16 columns of Q, number `step`, of the warp's m16 tiles; load_q_steps those that stay in registers.
  FT_DEVICE static void load_q_step(u32 (&rQ)[kMTiles][4], u32 q, i32 step) {
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) ldmatrix_x4(rQ[t], TileQK::step_address(q, t, step));
  }

  FT_DEVICE static void load_q_steps(State& state, u32 q) {
#pragma unroll
    for (i32 d = 0; d < Config::kKeptSteps; ++d) load_q_step(state.rQ[d], q, d);
  }

  // Key tile number count: S = Q K^T, softmax, O += P V. q, k and v are this lane's addresses.
  template <bool kIsMasked>
  FT_DEVICE static void step(const Params& p, const Tile& tile, i32 j_begin, float factor, u32 q, u32 k, u32 v,
                             State& state, u32 count) {
    float rS[kMTiles][kScores];
    u32 rP[kMTiles][kScores / 2];
    mark(Phase::issue_scores, count);
#pragma unroll
    for (i32 d = 0; d < kDepthSteps; ++d) {
      u32 rQ[kMTiles][4];
      if (d >= Config::kKeptSteps) load_q_step(rQ, q, d);
      const auto& a = d < Config::kKeptSteps ? state.rQ[d] : rQ;
      if (d == 0) {
        mma_step_abt<T, kBlockN, Config::kHeadDim, true>(rS, a, k, d);
      } else {
        mma_step_abt<T, kBlockN, Config::kHeadDim, false>(rS, a, k, d);
      }
    }
    mark(Phase::maximum, count);
    if constexpr (kIsMasked) modify_tile(p, tile, j_begin, rS);
    state.softmax.raise_maximum(factor, [&](i32 t, i32 r) { return Softmax::tile_maximum(rS[t], r); }, state.rO);
    mark(Phase::exponentials, count);
    state.softmax.template exponentiate<kIsMasked>(factor, rS);
    if constexpr (Dropout::kIsOn) drop_tile(p, tile, j_begin, rS);
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 x = 0; x < kScores / 2; ++x) rP[t][x] = pack_two<T>(rS[t][2 * x], rS[t][2 * x + 1]);
    }
    mark(Phase::issue, count);
#pragma unroll
    for (i32 j = 0; j < kBlockN / 16; ++j) mma_step_ab<T, Config::kHeadDimV>(state.rO, rP, v, j);
    mark(Phase::end, count);
  }

  // Processes the key tiles [n_begin, n_end) of the block; tile and shared_tile are equal. Scope: block.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Tile& tile, const Tile& shared_tile,
                                 float factor, State& state) {
    i32 warp = uniform(threadIdx.x / 32);
    i32 kv_head = tile.coord.head / (p.heads / p.heads_kv);
    if constexpr (mutates(Mutation::fwd_sm80_gqa_head)) kv_head = tile.coord.head % p.heads_kv;
    KeyCopy<Config::kHeadDim> gK(p.k, p.k_strides, p, tile, kv_head, p.head_dim);
    KeyCopy<Config::kHeadDimV> gV(p.v, p.v_strides, p, tile, kv_head, p.head_dim_v);
    u32 k_tiles = shared_address(shared.sK), v_tiles = shared_address(shared.sV);
    constexpr u32 kBytesK = sizeof(shared.sK[0]), kBytesV = sizeof(shared.sV[0]);
    auto load_tile = [&](i32 n, u32 stage, auto has_tail) {
      constexpr bool kHasTail = decltype(has_tail)::kValue;
      i32 num_rows = kHasTail ? tile.s.seqlen_k - n * kBlockN : kBlockN;
      gK.template load<kHasTail>(k_tiles + stage * kBytesK, n, num_rows);
      gV.template load<kHasTail>(v_tiles + stage * kBytesV, n, num_rows);
    };

    u32 q = shared_address(shared.sQ) + warp * (Config::kWarpRows * TileQK::kPitch);
    q += TileQK::template lane_offset<true>();
    if constexpr (mutates(Mutation::fwd_sm80_warp_rows)) q -= warp * (Config::kWarpRows * TileQK::kPitch);
    // Padding columns that no copy writes stay zeros
    if constexpr (!Config::kIsExact) {
      clear_tile<Config::kNumThreads>(&shared, sizeof(shared.sQ) + sizeof(shared.sK) + sizeof(shared.sV));
      __syncthreads();
    }
    // Start the copies of Q and of the first tiles, a group for each tile
    load_q(p, shared.sQ, tile);
#pragma unroll
    for (i32 stage = 0; stage < kNumStages - 1; ++stage) {
      i32 n = tile.n_end - 1 - stage;
      if (stage == 0) {
        load_tile(n, stage, Constant<true>());
      } else if (n >= tile.n_begin) {
        load_tile(n, stage, Constant<false>());
      }
      cp_async_commit();
    }

    // The key tiles of this warp's rows
    i32 consumer = warp * Config::kWarpRows / 64, i_first = tile.i_begin + consumer * Packing::num_queries(p);
    ConsumerTiles tiles = ConsumerTiles::find(p, tile, i_first);
    i32 warp_end = uniform(tiles.n_end), unmasked_begin = uniform(tiles.unmasked.begin);
    i32 unmasked_end = uniform(tiles.unmasked.end);
    if constexpr (mutates(Mutation::fwd_sm80_skip)) warp_end = unmasked_end;
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= unmasked_end || n < unmasked_begin; };
    u32 k_lane = k_tiles + TileQK::template lane_offset<false>(),
        v_lane = v_tiles + TileV::template lane_offset<true>();
    u32 stage = 0;
    i32 n = tile.n_end - 1, n_begin = tile.n_begin;
    auto process_tile = [&](auto is_masked) {
      // Wait for tile n. All warps are done with the tile before it: refill its stage
      u32 count = tile.n_end - 1 - n;
      mark(Phase::wait_tile, count);
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      mark(Phase::copy_k, count);
      u32 free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
      i32 n_next = n - (kNumStages - 1);
      if (n_next >= n_begin) load_tile(n_next, free_stage, Constant<false>());
      cp_async_commit();
      if constexpr (Config::kKeptSteps > 0) {
        if (n == tile.n_end - 1) load_q_steps(state, q);
      }
      // Skip the tile if it is fully masked for this warp
      if (!decltype(is_masked)::kValue || n < warp_end) {
        u32 k = k_lane + stage * kBytesK, v = v_lane + stage * kBytesV;
        step<decltype(is_masked)::kValue>(p, shared_tile, n * kBlockN, factor, q, k, v, state, count);
      }
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
      --n;
    };
    // A loop for each body: one loop around both would move O between their registers in every tile
    while (n >= n_begin) {
      while (n >= n_begin && needs_mask(n)) process_tile(Constant<true>());
      if constexpr (!kMasksAlways) {
        while (n >= n_begin && !needs_mask(n)) process_tile(Constant<false>());
      }
    }
  }

  // ---- Epilogue. Scope: warp.

  // Lets the sink join row r, stores lse, or m and l of a split, and returns what normalises O.
  FT_DEVICE static float finish_row(const Params& p, const Tile& tile, const Rows& rows, i32 r, float factor, float m,
                                    float l, bool stores_stats) {
    bool is_split = p.num_splits > 1;
    i32 head = rows.head(tile, r);
    float sink = p.sinks == nullptr || is_split ? -infinity() : in_score_unit(kIsNatural, p.sinks[head]);
    float m_score = ScoreMod::kChangesScores ? m : m * factor;
    RowStats stats = join_sink<kIsNatural>(m_score, l, sink, [](float l) { return quad_sum(l); });
    float norm = (is_split ? 1.0f : stats.norm()) * keep_factor<Dropout>(p);
    i64 stat = stat_index(p, tile.s, head, rows.i[r]);
    if constexpr (mutates(Mutation::fwd_sm80_out_of_bounds)) p.lse[p.lse_size] = 0.0f;
    if (stores_stats && rows.is_query(tile, r) && threadIdx.x % 4 == 0) {
      if constexpr (mutates(Mutation::fwd_sm80_uninitialised)) stats.l += p.lse[stat] == 1.5f ? 1.0f : 0.0f;
      store_stats<kIsNatural>(p, is_split, tile.coord.split * p.lse_size + stat, stat, stats.m, stats.l);
    }
    return norm;
  }

  // Row r of O in float32: of the output, or of a split.
  FT_DEVICE static float* float_row(const Params& p, const Tile& tile, const Rows& rows, i32 r) {
    i32 i = rows.i[r], head = rows.head(tile, r);
    i64 part = tile.coord.split * p.lse_size + stat_index(p, tile.s, head, i);
    return p.num_splits > 1
               ? p.partial_out + part * p.head_dim_v
               : query_rows(static_cast<float*>(p.out), p.out_strides, tile.s, head) + i * p.out_strides.row;
  }

  // Finishes the softmax, normalises and stores O and lse of an m16 tile; of a split the sum of P V, m and l.
  FT_DEVICE static void epilogue(const Params& p, const Tile& tile, const Rows& rows, float factor, const float (&m)[2],
                                 const float (&l)[2], const float (&rO)[kOutputs]) {
    bool is_split = p.num_splits > 1;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = rows.i[r], head = rows.head(tile, r);
      bool is_query = rows.is_query(tile, r);
      float norm = finish_row(p, tile, rows, r, factor, m[r], l[r], true);
      // Store O
      if (is_split || kIsSame<Out, float>) {
        float* gO = float_row(p, tile, rows, r);
        if constexpr (Load::kIsAligned16) {
          store_row_float(gO, is_query, p.head_dim_v, r, norm, rO);
        } else {
          store_row_elements(gO, is_query, p.head_dim_v, r, norm, rO);
        }
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, tile.s, head) + i * p.out_strides.row;
        if constexpr (Load::kIsAligned16) {
#pragma unroll
          for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
            uint4 chunk = packed_chunk<Out>(rO, b, r, norm);
            i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
            if (is_query && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = chunk;
          }
        } else {
          store_row_elements(gO, is_query, p.head_dim_v, r, norm, rO);
        }
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    fwd_sm80_kernel(const FT_GRID_CONSTANT Params p) {
  static_assert(sizeof(typename Config::Element) == 2);
  using Kernel = FwdSm80<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>;
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
  float factor = Kernel::ScoreMod::kChangesScores ? exponent_factor(Kernel::kIsNatural) : p.scale_log2;
  typename Kernel::State state;
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
#pragma unroll
    for (i32 x = 0; x < Kernel::kOutputs; ++x) state.rO[t][x] = 0.0f;
  }
  if (tile.has_keys()) {
    Kernel::mainloop(p, shared, tile, shared_tile, factor, state);
  } else {
    __syncthreads();
  }
  if constexpr (mutates(Mutation::fwd_sm80_race))
    if (threadIdx.x == 0) shared_tile = tile;
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
    typename Kernel::Rows rows = Kernel::rows_of(p, shared_tile, t);
    Kernel::epilogue(p, shared_tile, rows, factor, state.softmax.m[t], state.softmax.l[t], state.rO[t]);
  }
}

}  // namespace flashtile
