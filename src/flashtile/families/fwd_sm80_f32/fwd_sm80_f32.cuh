// Attention forward in float32 by mma.sync, from Ampere on: every float32 product is computed as three TF32 products
// (device/tile/tf32_gemm.cuh).
//
// Contract:  inherits FwdSm80 (fwd_sm80.cuh) and overrides step, mainloop and epilogue. Mask, dropout, softmax state,
//            rows and storage are those of fwd_sm80: a change there changes this kernel.
// Grid, Block, Mainloop: as fwd_sm80.cuh. Heads are not packed, and keys not paged.
// Shared:    sQ [kBlockM][kHeadDim], sK [stage][kBlockN][kHeadDim], sV [stage][kBlockN][kHeadDimV], floats, swizzled.
// Sums:      tensor cores truncate when they add. So the small partial products of S have their own accumulators, and
//            P V of each key tile has its own, which are then added to O in float32.
// Epilogue:  a lane holds 8 neighbouring columns of every 32, and stores them at once.
#pragma once

#include "device/tile/tf32_gemm.cuh"
#include "families/fwd_sm80/fwd_sm80.cuh"
#include "families/fwd_sm80_f32/config.cuh"

namespace flashtile {

template <class Config, class Mask, class BaseScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
struct FwdSm80F32 : FwdSm80<Config, Mask, BaseScoreMod, Dropout, SeqInfo, KvSource, Load> {
  using Base = FwdSm80<Config, Mask, BaseScoreMod, Dropout, SeqInfo, KvSource, Load>;
  using ScoreMod = typename Base::ScoreMod;
  using Storage = typename Base::Storage;
  using Tile = typename Base::Tile;
  using Rows = typename Base::Rows;
  using Softmax = typename Base::Softmax;
  using State = typename Base::State;
  using TileQK = SwizzledTile<2 * Config::kHeadDim>;
  static constexpr i32 kBlockN = Config::kBlockN, kMTiles = Config::kMTiles, kNumStages = Config::kNumStages;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per m16 tile
  static constexpr bool kMasksAlways = Base::kMasksAlways;

  // ---- Mainloop. Scope: warp.

  // Key tile: S = Q K^T, softmax, O += P V. q, k and v are this lane's addresses.
  template <bool kIsMasked>
  FT_DEVICE static void step(const Params& p, const Tile& tile, i32 j_begin, float factor, u32 q, u32 k, u32 v,
                             State& state) {
    float rS[kMTiles][kScores];
    tf32_gemm_abt<kBlockN, Config::kHeadDim, 1>(rS, q, k);
    if constexpr (kIsMasked) Base::modify_tile(p, tile, j_begin, rS);
    state.softmax.raise_maximum(factor, [&](i32 t, i32 r) { return Softmax::tile_maximum(rS[t], r); }, state.rO);
    state.softmax.template exponentiate<kIsMasked>(factor, rS);
    if constexpr (Dropout::kIsOn) Base::drop_tile(p, tile, j_begin, rS);
    Tf32Parts<4> parts[kMTiles][kBlockN / 8];
    split_accumulators(parts, rS);
    tf32_gemm_ab<Config::kHeadDimV>(state.rO, parts, v);
  }

  // Processes the key tiles [n_begin, n_end) of the block. shared_tile is the copy of tile in shared memory that masks
  // read: registers are scarce. Scope: block.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Tile& tile, const Tile& shared_tile,
                                 float factor, State& state) {
    i32 warp = uniform(threadIdx.x / 32);
    i32 kv_head = tile.coord.head / (p.heads / p.heads_kv);
    KeyRows<const float, KvSource> gK(static_cast<const float*>(p.k), p.k_strides, p, tile.s, kv_head);
    KeyRows<const float, KvSource> gV(static_cast<const float*>(p.v), p.v_strides, p, tile.s, kv_head);
    u32 k_tiles = shared_address(shared.sK), v_tiles = shared_address(shared.sV);
    constexpr u32 kBytesK = sizeof(shared.sK[0]), kBytesV = sizeof(shared.sV[0]);
    auto load_tile = [&](i32 n, u32 stage, auto has_tail) {
      i32 num_rows = decltype(has_tail)::kValue ? tile.s.seqlen_k - n * kBlockN : kBlockN;
      if constexpr (mutates(Mutation::fwd_sm80_f32_tail)) num_rows = kBlockN;
      copy_float_rows<Config, Load, Config::kHeadDim, kBlockN>(k_tiles + stage * kBytesK, gK.row(n * kBlockN),
                                                               gK.row_stride, 0, num_rows, p.head_dim);
      copy_float_rows<Config, Load, Config::kHeadDimV, kBlockN>(v_tiles + stage * kBytesV, gV.row(n * kBlockN),
                                                                gV.row_stride, 0, num_rows, p.head_dim_v);
    };
    // Start the copies of Q and of the first tiles, a group for each tile. Rows of Q are valid from -i_begin on: the
    // tile may begin before the first query. Only the last key tile, which is copied first, may lack rows
    const float* gQ = query_rows(static_cast<const float*>(p.q), p.q_strides, tile.s, tile.coord.head);
    copy_float_rows<Config, Load, Config::kHeadDim, Config::kBlockM>(
        shared_address(shared.sQ), gQ + tile.i_begin * p.q_strides.row, p.q_strides.row, -tile.i_begin,
        tile.s.seqlen_q - tile.i_begin, p.head_dim);
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

    // The key tiles of this warp's rows: masks are decided for groups of 64
    ConsumerTiles tiles = ConsumerTiles::find(p, tile, tile.i_begin + warp * Config::kWarpRows / 64 * 64);
    i32 warp_end = uniform(tiles.n_end), unmasked_begin = uniform(tiles.unmasked.begin);
    i32 unmasked_end = uniform(tiles.unmasked.end);
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= unmasked_end || n < unmasked_begin; };
    // This lane's addresses
    u32 q = shared_address(shared.sQ) + warp * (Config::kWarpRows * TileQK::kPitch);
    q += TileQK::template lane_offset<true>();
    u32 k_lane = k_tiles + TileQK::template lane_offset<false>();
    u32 v_lane = v_tiles + tf32_lane_offset<Config::kHeadDimV>();
    u32 stage = 0;
    i32 n = tile.n_end - 1, n_begin = tile.n_begin;
    auto process_tile = [&](auto is_masked) {
      // Wait for tile n. All warps are done with the tile before it: refill its stage
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      u32 free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
      i32 n_next = n - (kNumStages - 1);
      if (n_next >= n_begin) load_tile(n_next, free_stage, Constant<false>());
      cp_async_commit();
      // Skip the tile if it is fully masked for this warp
      if (!decltype(is_masked)::kValue || n < warp_end) {
        u32 k = k_lane + stage * kBytesK, v = v_lane + stage * kBytesV;
        step<decltype(is_masked)::kValue>(p, shared_tile, n * kBlockN, factor, q, k, v, state);
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

  // Finishes the softmax, normalises and stores O and lse of an m16 tile. For a split of the keys it stores the
  // unnormalised sum of P V, together with m and l.
  FT_DEVICE static void epilogue(const Params& p, const Tile& tile, const Rows& rows, float factor, const float (&m)[2],
                                 const float (&l)[2], const float (&rO)[kOutputs]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float norm = Base::finish_row(p, tile, rows, r, factor, m[r], l[r], /*stores_stats=*/true);
      bool is_query = rows.is_query(tile, r);
      float* gO = Base::float_row(p, tile, rows, r);
      store_float_row<Load>(gO, is_query, p.head_dim_v, r, norm, rO);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    fwd_sm80_f32_kernel(const FT_GRID_CONSTANT Params p) {
  static_assert(!KvSource::kIsPaged, "reads no pages");
  using Kernel = FwdSm80F32<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  // Find this block's query tile
  TileGrid<Mask, SeqInfo, false> grid;
  typename Kernel::Tile tile(p, grid, static_cast<i32>(blockIdx.x));
  if (!tile.has_queries()) return;
  // Masks and the epilogue read it from shared memory: registers are scarce
  auto& shared_tile = *reinterpret_cast<typename Kernel::Tile*>(shared.tile);
  if (threadIdx.x == 0) shared_tile = tile;

  // With score modifiers S is scaled already, and factor converts it to base 2. Without them S is Q K^T, and factor is
  // scale * log2(e)
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
    __syncthreads();  // makes shared_tile visible, as the mainloop's first barrier does
  }
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
    typename Kernel::Rows rows = Kernel::rows_of(p, shared_tile, t);
    Kernel::epilogue(p, shared_tile, rows, factor, state.softmax.m[t], state.softmax.l[t], state.rO[t]);
  }
}

}  // namespace flashtile
