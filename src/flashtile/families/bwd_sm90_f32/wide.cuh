// Attention backward in float32 on Hopper for head dims over 128, where tiles of 64 queries and 64 keys do not fit
// into shared memory together. docs/float32.md.
//
// As in narrow.cuh, one kernel computes dK and dV, another dQ. A block owns 64 rows of two operands and
// streams tiles of 32 rows of the two others; two consumer warpgroups share the work:
//
//   dK, dV   owns K and V, streams Q and dO. Warpgroup 0 computes S^T, P^T and dV, warpgroup 1 dP^T, dS^T and dK.
//   dQ       owns Q and dO, streams K and V. Warpgroup 0 computes S and P, warpgroup 1 dP. They exchange both in shared
//            memory; each then computes dS and half of the columns of dQ += dS K.
//
// Shared:    two half_t parts of what a block owns stay in shared memory, 128 KB. Three bf16_t parts do not fit beside
//            the streamed tiles: slabs of 64 columns come again for every tile, through rings of two slots.
// Producers: in warpgroup 2, warp 0 streams, warp 1 loads statistics, warps 2 and 3 load the two owned operands.
#pragma once

#include "families/bwd_sm90_f32/narrow.cuh"

namespace flashtile {

// ---- What both kernels share.

constexpr i32 kStreamRows = 32, kNumSlots = 2;

// Barriers of one owned operand.
struct OwnedBarriers {
  u64 full[kNumSlots], empty[kNumSlots];

  // Scope: thread 0.
  FT_DEVICE void init() {
    for (i32 slot = 0; slot < kNumSlots; ++slot) {
      mbarrier_init(full[slot], 1);
      mbarrier_init(empty[slot], 4);
    }
  }
};

template <class Config>
struct WideTiles {
  using Parts = typename Config::Parts;
  using Slots = Ring<kNumSlots>;
  static constexpr i32 kSlabs = Config::kSlabsQK;
  static_assert(Config::kHeadDim == 256 && Config::kHeadDimV == 256);
  static constexpr bool kHoldsOwned = Config::kNumParts <= 2;
  static constexpr i32 kSlot = Config::kNumParts * 64 * 64;  // one slab, all parts
  static constexpr i32 kElementsOwned = kHoldsOwned ? Config::kElementsQ : kNumSlots * kSlot;
  static constexpr i32 kElementsStream = Config::kElementsQ / 64 * kStreamRows;

  // Loads what a block owns, once, or slab by slab for each tile of the stream. Scope: one thread.
  FT_DEVICE static void load_owned(u16* sRows, OwnedBarriers& barriers, const u16* tile, u32 num_tiles) {
    if constexpr (kHoldsOwned) {
      load_split_tile<Config::kElementsQ>(sRows, tile, barriers.full[0]);
    } else {
      for (u32 count = 0; count < kSlabs * num_tiles; ++count) {
        u32 slot = Slots::stage(count), slab = count % kSlabs;
        if constexpr (mutates(Mutation::bwd_sm90_f32_wide_slab)) slab = slab == 3 ? 1 : slab;
        Slots::wait_empty(barriers.empty, count);
        mbarrier_arrive_expect(barriers.full[slot], 2 * kSlot);
#pragma unroll
        for (i32 part = 0; part < Config::kNumParts; ++part) {
          load_bulk(sRows + slot * kSlot + part * 64 * 64, tile + (part * kSlabs + slab) * 64 * 64, 2 * 64 * 64,
                    barriers.full[slot]);
        }
      }
    }
  }

  // Loads kStreamRows rows of a tile of 64, from `row` on. Scope: one thread.
  FT_DEVICE static void load_stream(u16* sTile, const u16* tile, i32 row, u64& full) {
    if constexpr (mutates(Mutation::bwd_sm90_f32_wide_rows)) row = 0;
    mbarrier_arrive_expect(full, 2 * kElementsStream);
#pragma unroll 1
    for (i32 slab = 0; slab < Config::kNumParts * kSlabs; ++slab) {
      load_bulk(sTile + slab * kStreamRows * 64, tile + (slab * 64 + row) * 64, 2 * kStreamRows * 64, full);
    }
  }

  // D = A B^T: A is what the block owns, B is tile number `count` of the stream. kTogether: of gemm_abt_chains. Scope:
  // warpgroup.
  template <i32 kTogether = 2>
  FT_DEVICE static void multiply_owned(float (&rD)[kStreamRows / 2], u16* sRows, OwnedBarriers& barriers, u16* sTile,
                                       u32 count) {
    u32 b = opaque(tile_base(sTile, kStreamRows * 128));
    if constexpr (kHoldsOwned) {
      if (count == 0) mbarrier_wait(barriers.full[0], 0);
      u32 a = opaque(tile_base(sRows, 64 * 128));
      if constexpr (Parts::kNumParts == 2) {
        gemm_abt_chains<Parts, kStreamRows, Config::kHeadDim, 64, kTogether>(rD, a, b);
      } else {
        gemm_abt_split<Parts, kStreamRows, Config::kHeadDim>(rD, a, b);
        wgmma_wait<0>();
        pin_registers(rD);
      }
    } else {
      constexpr u32 kSlabA = 64 * 128 >> 4, kSlabB = kStreamRows * 128 >> 4;
#pragma unroll
      for (i32 x = 0; x < kStreamRows / 2; ++x) rD[x] = 0.0f;
#pragma unroll 1
      for (u32 slab = 0; slab < kSlabs; ++slab) {
        u32 number = kSlabs * count + slab, slot = Slots::stage(number);
        Slots::wait_full(barriers.full, number);
        float rT[kStreamRows / 2];
        u32 a = opaque(tile_base(sRows + slot * kSlot, 64 * 128));
        gemm_abt_split_slab<Parts, kStreamRows>(rT, a, kSlabA, b + slab * kSlabB, kSlabs * kSlabB);
        wgmma_wait<0>();
        pin_registers(rT);
        release_stage(barriers.empty[slot]);
#pragma unroll
        for (i32 x = 0; x < kStreamRows / 2; ++x) rD[x] += rT[x];
      }
    }
  }
};

// Values of a 64 x kStreamRows fragment, from each thread of one warpgroup for the same thread of the other.
using HandedOver = float4[kStreamRows / 8][128];

// Scope: thread.
FT_DEVICE void hand_over(HandedOver& values, const float (&x)[kStreamRows / 2]) {
#pragma unroll
  for (i32 b = 0; b < kStreamRows / 8; ++b) {
    values[b][threadIdx.x % 128] = make_float4(x[4 * b], x[4 * b + 1], x[4 * b + 2], x[4 * b + 3]);
  }
}

// ---- dK and dV.

template <class Config>
struct alignas(1024) BwdSm90F32WideDkdvStorage {
  using Tiles = WideTiles<Config>;
  u16 sK[Tiles::kElementsOwned];
  u16 sV[Tiles::kElementsOwned];
  u16 sQ[Tiles::kElementsStream];
  u16 sdO[Tiles::kElementsStream];
  HandedOver sP;  // from warpgroup 0 to warpgroup 1
  float lse[kStreamRows];
  float delta[kStreamRows];
  StreamedQueryTile queries[kNumStreamedTiles];  // tile number count is at count % kNumStreamedTiles
  OwnedBarriers k, v;
  u64 full_q[1], empty_q[1];  // statistics come with Q
  u64 full_do[1], empty_do[1];
  u64 full_p, empty_p;
  KeyTile tile;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm90F32WideDkdv {
  using Narrow = BwdSm90F32Dkdv<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  using Tiles = WideTiles<Config>;
  using Storage = BwdSm90F32WideDkdvStorage<Config>;
  using Stages = Ring<1>;
  static constexpr i32 kTogether = ScoreMod::kHasBias ? 1 : 2;  // chains of S^T; with a bias two would spill

  // Scope: thread 0.
  FT_DEVICE static void init(Storage& shared) {
    shared.k.init();
    shared.v.init();
    mbarrier_init(shared.full_q[0], 2);
    mbarrier_init(shared.full_do[0], 1);
    mbarrier_init(shared.empty_q[0], 8);
    mbarrier_init(shared.empty_do[0], 8);
    mbarrier_init(shared.full_p, 4);
    mbarrier_init(shared.empty_p, 4);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // Scope: one thread.
  FT_DEVICE static void produce(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    tile.for_each_query_tile<kStreamRows>([&](i32 head, i32 i, u32 count) {
      i64 at = (first_query_tile(params.base, tile.s, head) + i / 64) * static_cast<i64>(Config::kElementsQ);
      Stages::wait_empty(shared.empty_q, count);
      Tiles::load_stream(shared.sQ, params.q_parts + at, i % 64, shared.full_q[0]);
      Stages::wait_empty(shared.empty_do, count);
      Tiles::load_stream(shared.sdO, params.dout_parts + at, i % 64, shared.full_do[0]);
    });
  }

  // Loads the statistics of every tile and describes it. Rows past the last query get those of a fully masked row.
  // Scope: warp.
  FT_DEVICE static void produce_stats(const Params& p, Storage& shared, const KeyTile& tile) {
    i32 lane = threadIdx.x % 32;
    tile.for_each_query_tile<kStreamRows>([&](i32 head, i32 i_begin, u32 count) {
      Stages::wait_empty(shared.empty_q, count);
      i32 i = i_begin + lane;
      i64 stat = stat_index(p, tile.s, head, i);
      shared.lse[lane] = i < tile.s.seqlen_q ? p.score_lse[stat] : infinity();
      shared.delta[lane] = i < tile.s.seqlen_q ? p.delta[stat] : 0.0f;
      if (lane == 31) shared.queries[count % kNumStreamedTiles] = {i_begin, head, 0};
      __syncwarp();
      arrive_warp(shared.full_q[0]);
    });
  }

  // Warpgroup 0: P and dV. Scope: warpgroup.
  FT_DEVICE static void consume_dv(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    Unscale unscale = Unscale::find<Config>(*params.range);
    float rdV[Config::kHeadDimV / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDimV / 2; ++x) rdV[x] = 0.0f;
    for (u32 count = 0; count < tile.num_tiles(); ++count) {
      SplitFragment<Config, kStreamRows> fragment;
      {
        // S^T = K Q^T
        float rS[kStreamRows / 2], factor[kStreamRows / 2];
        Stages::wait_full(shared.full_q, count);
        Tiles::template multiply_owned<kTogether>(rS, shared.sK, shared.k, shared.sQ, count);
        // P^T
        Narrow::template exponentiate<kStreamRows>(p, tile.s, shared.queries[count % kNumStreamedTiles], tile.j_begin,
                                                   shared.lse, unscale.s, rS, factor);
        __syncwarp();
        release_stage(shared.empty_q[0]);
        // Hand it over
        mbarrier_wait(shared.empty_p, count % 2 ^ 1);
        hand_over(shared.sP, factor);
        __syncwarp();
        arrive_warp(shared.full_p);
        fragment.split(rS);
      }
      // dV += P^T dO
      Stages::wait_full(shared.full_do, count);
      add_product<Config, Config::kHeadDimV>(rdV, fragment, opaque(tile_base(shared.sdO, kStreamRows * 128)));
      release_stage(shared.empty_do[0]);
    }
    Narrow::store_keys(p.dv, p.dv_strides, p, tile, p.head_dim_v, unscale.dv, rdV);
  }

  // Warpgroup 1: dS and dK. Scope: warpgroup.
  FT_DEVICE static void consume_dk(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    Unscale unscale = Unscale::find<Config>(*params.range);
    float rdK[Config::kHeadDim / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdK[x] = 0.0f;
    for (u32 count = 0; count < tile.num_tiles(); ++count) {
      SplitFragment<Config, kStreamRows> fragment;
      {
        // dP^T = V dO^T
        float rdP[kStreamRows / 2];
        Stages::wait_full(shared.full_do, count);
        Tiles::multiply_owned(rdP, shared.sV, shared.v, shared.sdO, count);
        release_stage(shared.empty_do[0]);
        // dS^T = P^T * (dP^T - delta)
        Stages::wait_full(shared.full_q, count);
        mbarrier_wait(shared.full_p, count % 2);
        Narrow::template multiply_gradient<kStreamRows>(p, shared.sP, shared.delta, unscale.dp, rdP);
        __syncwarp();
        release_stage(shared.empty_p);
        fragment.split(rdP);
      }
      // dK += dS^T Q
      add_product<Config, Config::kHeadDim>(rdK, fragment, opaque(tile_base(shared.sQ, kStreamRows * 128)));
      release_stage(shared.empty_q[0]);
    }
    multiply(rdK, p.scale);
    Narrow::store_keys(p.dk, p.dk_strides, p, tile, p.head_dim, unscale.dk, rdK);
  }

  FT_DEVICE static void run(const Sm90F32Params& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
    const Params& p = params.base;
    if (threadIdx.x == 0) {
      init(shared);
      shared.tile = KeyTile::find<kStreamRows, 64, Mask, SeqInfo>(p);
    }
    __syncthreads();
    const KeyTile& tile = shared.tile;
    if (!tile.has_keys()) return;
    i32 warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 2) {
      lower_registers<Config::kProducerRegisters>();
      i32 warp = uniform(threadIdx.x / 32 % 4);
      if (!tile.has_queries()) return;
      if (warp == 1) {
        produce_stats(p, shared, tile);
      } else if (elect_lane()) {
        i64 at =
            (first_key_tile<64>(p, tile.s, tile.kv_head) + tile.j_begin / 64) * static_cast<i64>(Config::kElementsQ);
        if (warp == 0) produce(params, shared, tile);
        if (warp == 2) Tiles::load_owned(shared.sK, shared.k, params.k_parts + at, tile.num_tiles());
        if (warp == 3) Tiles::load_owned(shared.sV, shared.v, params.v_parts + at, tile.num_tiles());
      }
    } else if (warpgroup == 0) {
      raise_registers<Config::kConsumerRegisters>();
      consume_dv(params, shared, tile);
    } else {
      raise_registers<Config::kConsumerRegisters>();
      consume_dk(params, shared, tile);
    }
  }
};

// ---- dQ.

template <class Config>
struct alignas(1024) BwdSm90F32WideDqStorage {
  using Tiles = WideTiles<Config>;
  u16 sQ[Tiles::kElementsOwned];
  u16 sdO[Tiles::kElementsOwned];
  u16 sK[Tiles::kElementsStream];
  u16 sV[Tiles::kElementsStream];
  HandedOver factors[2], dp[2];  // of tile number count at count % 2
  OwnedBarriers q, dout;
  u64 full_k[1], empty_k[1];
  u64 full_v[1], empty_v[1];
  QueryBlock block;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm90F32WideDq {
  using Narrow = BwdSm90F32Dq<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  using Tiles = WideTiles<Config>;
  using Storage = BwdSm90F32WideDqStorage<Config>;
  using Stages = Ring<1>;
  static constexpr i32 kHalf = Config::kHeadDim / 2;  // the columns of dQ that a warpgroup computes

  // What QueryBlock asks for.
  struct Sizes {
    static constexpr i32 kBlockM = 64, kBlockN = kStreamRows;
  };

  // Scope: thread 0.
  FT_DEVICE static void init(Storage& shared) {
    shared.q.init();
    shared.dout.init();
    mbarrier_init(shared.full_k[0], 1);
    mbarrier_init(shared.full_v[0], 1);
    mbarrier_init(shared.empty_k[0], 8);
    mbarrier_init(shared.empty_v[0], 4);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // Scope: one thread.
  FT_DEVICE static void produce(const Sm90F32Params& params, Storage& shared, const QueryBlock& block) {
    const Params& p = params.base;
    i64 first = first_key_tile<64>(p, block.s, block.head / (p.heads / p.heads_kv));
    for (u32 count = 0; count < block.num_tiles(); ++count) {
      i32 j = (block.n_begin + static_cast<i32>(count)) * kStreamRows;
      i64 at = (first + j / 64) * Config::kElementsQ;
      Stages::wait_empty(shared.empty_k, count);
      Tiles::load_stream(shared.sK, params.k_parts + at, j % 64, shared.full_k[0]);
      Stages::wait_empty(shared.empty_v, count);
      Tiles::load_stream(shared.sV, params.v_parts + at, j % 64, shared.full_v[0]);
    }
  }

  // Scope: warpgroup.
  FT_DEVICE static void consume(const Sm90F32Params& params, Storage& shared, const QueryBlock& block, i32 warpgroup) {
    const Params& p = params.base;
    const Sequence& s = block.s;
    Unscale unscale = Unscale::find<Config>(*params.range);
    // The thread's two rows
    i32 i[2];
    float lse[2], delta[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i[r] = block.i_begin + fragment_row() + 8 * r;
      i64 stat = stat_index(p, s, block.head, i[r]);
      lse[r] = i[r] < s.seqlen_q ? p.score_lse[stat] : infinity();
      delta[r] = i[r] < s.seqlen_q ? p.delta[stat] : 0.0f;
    }
    float rdQ[kHalf / 2];
#pragma unroll
    for (i32 x = 0; x < kHalf / 2; ++x) rdQ[x] = 0.0f;

    for (u32 count = 0; count < block.num_tiles(); ++count) {
      SplitFragment<Config, kStreamRows> fragment;
      {
        float rX[kStreamRows / 2];
        Stages::wait_full(shared.full_k, count);
        if (warpgroup == 0) {
          // S = Q K^T, and the factors of dP - delta in dS, negative where dropout drops the element
          Tiles::multiply_owned(rX, shared.sQ, shared.q, shared.sK, count);
          i32 j_begin = (block.n_begin + static_cast<i32>(count)) * kStreamRows;
          u32 kept = Narrow::template find_factors<kStreamRows>(p, s, block.head, i, lse, j_begin, unscale.s, rX);
#pragma unroll
          for (i32 x = 0; x < kStreamRows / 2 && Dropout::kIsOn; ++x) rX[x] = kept >> x & 1u ? rX[x] : -rX[x];
          hand_over(shared.factors[count % 2], rX);
        } else {
          // dP = dO V^T
          Stages::wait_full(shared.full_v, count);
          Tiles::multiply_owned(rX, shared.sdO, shared.dout, shared.sV, count);
          release_stage(shared.empty_v[0]);
          hand_over(shared.dp[count % 2], rX);
        }
        // Exchange them. A slot is written again after the barrier of the next tile, which follows these reads.
        named_barrier_sync(kConsumerBarrier, 256);
        u32 slot = count % 2;
        if constexpr (mutates(Mutation::bwd_sm90_f32_wide_stale)) slot ^= count > 0 ? 1 : 0;
        // dS = P * (dP - delta)
#pragma unroll
        for (i32 b = 0; b < kStreamRows / 8; ++b) {
          float4 four =
              warpgroup == 0 ? shared.dp[slot][b][threadIdx.x % 128] : shared.factors[count % 2][b][threadIdx.x % 128];
          float other[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (i32 x = 0; x < 4; ++x) {
            float factor = warpgroup == 0 ? rX[4 * b + x] : other[x];
            float dp = (warpgroup == 0 ? other[x] : rX[4 * b + x]) * unscale.dp;
            if constexpr (Dropout::kIsOn) dp = __float_as_int(factor) < 0 ? 0.0f : dp * p.keep_factor;
            rX[4 * b + x] = (Narrow::kIsSigned ? factor : fabsf(factor)) * (dp - delta[x / 2]);
          }
        }
        fragment.split(rX);
      }
      // dQ += dS K, half of its columns
      i32 first = warpgroup * kHalf;
      if constexpr (mutates(Mutation::bwd_sm90_f32_wide_half)) first = 0;
      u32 k = opaque(tile_base(shared.sK, kStreamRows * 128) + first / 64 * (kStreamRows * 128 >> 4));
      add_product<Config, Config::kHeadDim, kHalf>(rdQ, fragment, k);
      release_stage(shared.empty_k[0]);
    }

    // Store dQ
    multiply(rdQ, p.scale);
    float* gdQ = query_rows(static_cast<float*>(p.dq), p.dq_strides, s, block.head) + warpgroup * kHalf;
    i32 num_columns = p.head_dim - warpgroup * kHalf;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float* row = gdQ + i[r] * p.dq_strides.row;
      if constexpr (Load::kIsAligned16) {
        store_row_float(row, i[r] < s.seqlen_q, num_columns, r, unscale.dq, rdQ);
      } else {
        store_row_elements(row, i[r] < s.seqlen_q, num_columns, r, unscale.dq, rdQ);
      }
    }
  }

  FT_DEVICE static void run(const Sm90F32Params& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
    const Params& p = params.base;
    if (threadIdx.x == 0) {
      init(shared);
      shared.block = QueryBlock::find<Sizes, Mask, ScoreMod, SeqInfo, false>(p);
    }
    __syncthreads();
    const QueryBlock& block = shared.block;
    if (!block.has_queries()) return;
    i32 warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 2) {
      lower_registers<Config::kProducerRegisters>();
      i32 warp = uniform(threadIdx.x / 32 % 4);
      if (block.num_tiles() == 0 || !elect_lane()) return;
      i64 at = (first_query_tile(p, block.s, block.head) + block.i_begin / 64) * static_cast<i64>(Config::kElementsQ);
      if (warp == 0) produce(params, shared, block);
      if (warp == 2) Tiles::load_owned(shared.sQ, shared.q, params.q_parts + at, block.num_tiles());
      if (warp == 3) Tiles::load_owned(shared.sdO, shared.dout, params.dout_parts + at, block.num_tiles());
    } else {
      raise_registers<Config::kConsumerRegisters>();
      consume(params, shared, block, warpgroup);
    }
  }
};

}  // namespace flashtile
