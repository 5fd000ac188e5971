// Attention backward by mma.sync, float16 from Turing on and bfloat16 from Ampere on: dQ, dK and dV in one pass over
// the scores. Reads neither pages nor unaligned rows. FlashAttention-2, section 3.1.2.
//
// Contract:  family.py launches it between the two kernels of steps/bwd_sm90_steps.cuh: the first computes delta and
//            score_lse and clears dq_accum, the last makes dQ of dq_accum. The atomic sums of dQ have no fixed order,
//            so deterministic calls are refused.
// Block:     kBlockN keys of one KV head; streams the queries that see them, of every head that shares the KV head. A
//            warp owns kMTiles tiles of 16 keys, 64 keys apart (config.cuh): their dK and dV stay in registers and need
//            no atomics. With kColumnWarps = 2, two warps share the same keys: each computes half of the queries of S
//            and half of the columns of dK and dV.
// Shared:    sK [kBlockN][kHeadDim], sV [kBlockN][kHeadDimV], sQ [stage][kBlockM][kHeadDim], sdO
//            [stage][kBlockM][kHeadDimV], sdS [buffer][kBlockN][kBlockM], swizzled (tile/swizzled_tile.cuh); lse and
//            delta of each stage; the block's keys. With kColumnWarps = 2 a third buffer of sdS holds P^T.
// Products:  S^T = K Q^T and dP^T = V dO^T have keys as rows, so P^T and dS^T, packed to 16 bits, are register operands
//            of dV += P^T dO and dK += dS^T Q. dS^T also goes through shared memory for dQ = dS K over all keys of the
//            block, of which each warp computes 16 queries and a part of the columns. Warps that share keys exchange
//            P^T and dS^T through shared memory: a fragment of Q or dO then feeds four products instead of two.
// Mainloop:  one barrier per query tile. After it Q, dO and the statistics of the tile have arrived, dS of the tile
//            before is complete, and the stage of the tile before is free. dQ is one tile behind.
// dQ:        float32 sums in global memory: dq_accum, laid out as steps/bwd_sm90_steps.cuh says.
// Marks:     planted faults (core/mutation.cuh) and clocks (mark, core/timeline.cuh): ordinary builds have neither.
#pragma once

#include "device/attn/score_gradient.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/timeline.cuh"
#include "device/ptx/red.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/mma_gemm.cuh"
#include "families/bwd_sm80/config.cuh"

namespace flashtile {

// What a block works on: kBlockN keys, and the query tiles [m_begin, m_end) of each head of a group. It lies in shared
// memory: registers are scarce.
struct OwnedKeys {
  Sequence s;
  i32 kv_head, j_begin, m_begin, m_end, first_head, num_heads;

  template <class Config, class Mask, class SeqInfo>
  FT_DEVICE static OwnedKeys find(const Params& p) {
    OwnedKeys block;
    // Blocks count from the first keys: under a causal mask most queries see those, so the longest blocks start first
    TilePlace place = place_keys<SeqInfo>(p, Config::kBlockN, p.heads_kv, static_cast<i32>(blockIdx.x));
    block.j_begin = place.tile * Config::kBlockN;
    block.kv_head = place.row;
    block.s = find_sequence<SeqInfo>(p, place.batch);
    i32 j_end = min_of(block.j_begin + Config::kBlockN, block.s.seqlen_k);
    Range queries = query_range<Mask>(p, block.s, block.j_begin, j_end);
    block.m_begin = queries.begin / Config::kBlockM;
    block.m_end = max_of(ceil_div(queries.end, Config::kBlockM), block.m_begin);
    block.num_heads = p.heads / p.heads_kv;
    block.first_head = block.kv_head * block.num_heads;
    if constexpr (mutates(Mutation::bwd_sm80_group)) block.num_heads = 1;
    return block;
  }
  FT_DEVICE bool has_keys() const { return j_begin < s.seqlen_k; }
  FT_DEVICE i32 num_tiles() const { return (m_end - m_begin) * num_heads; }
};

// One of the query tiles that stream by. While the block works on tile c, thread 0 finds tile c + kNumStages, and dQ
// still reads tile c - 1: a ring of kNumStages + 2 places.
struct QueryTilePlace {
  i32 i_begin, head;
};
constexpr i32 kNumPlaces = 4;  // for up to two stages

template <class Config>
struct alignas(128) BwdSm80Storage {
  using T = typename Config::Element;
  static_assert(kNumPlaces >= Config::kNumStages + 2);
  T sK[Config::kBlockN * Config::kHeadDim];
  T sV[Config::kBlockN * Config::kHeadDimV];
  T sQ[Config::kNumStages][Config::kBlockM * Config::kHeadDim];
  T sdO[Config::kNumStages][Config::kBlockM * Config::kHeadDimV];
  // dS^T, whose rows are keys, of two tiles; if warps share keys, after them P^T of one
  T sdS[Config::kColumnWarps > 1 ? 3 : 2][Config::kBlockN * Config::kBlockM];
  float lse[Config::kNumStages][Config::kBlockM];
  float delta[Config::kNumStages][Config::kBlockM];
  QueryTilePlace places[kNumPlaces];  // tile number count is at count % kNumPlaces
  OwnedKeys block;

  // Finds a query tile. Scope: thread 0.
  FT_DEVICE void find_place(i32 count) {
    i32 num_m_blocks = block.m_end - block.m_begin;
    if (count >= block.num_tiles()) return;
    places[count % kNumPlaces] = {(block.m_begin + count % num_m_blocks) * Config::kBlockM,
                                  block.first_head + count / num_m_blocks};
  }
  FT_DEVICE const QueryTilePlace& place(i32 count) const { return places[count % kNumPlaces]; }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct BwdSm80 {
  using T = typename Config::Element;
  using Storage = BwdSm80Storage<Config>;
  using Gradient = ScoreGradient<T, Mask, ScoreMod, Dropout, Config::kScoreQueries>;
  using TileQK = SwizzledTile<Config::kHeadDim>;
  using TileV = SwizzledTile<Config::kHeadDimV>;
  using TileS = SwizzledTile<Config::kBlockM>;
  using Aligned = Load<true>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kMTiles = Config::kMTiles;
  static constexpr i32 kNumStages = Config::kNumStages, kNumThreads = Config::kNumThreads;
  static constexpr i32 kScoreQueries = Config::kScoreQueries;
  static constexpr bool kSharesKeys = Config::kColumnWarps > 1;
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static_assert(kNumThreads >= 2 * kBlockM, "a thread copies one statistic of a tile");

  // ---- Copies. Scope: block.

  // Starts the copy of rows [row, row + kRows) of a tensor; zeros from num_rows on.
  template <i32 kColumns, i32 kRows>
  FT_DEVICE static void load_rows(T* sTile, const T* first_row, i64 row_stride, i32 num_rows, i32 num_columns) {
    using Tile = SwizzledTile<kColumns>;
    if constexpr (mutates(Mutation::bwd_sm80_tail)) num_rows = kRows;
    const T* base = first_row + Tile::copy_column();
    for_each_row<kColumns, kRows, kNumThreads, Config::kIsExact>(
        shared_address(sTile), [&](i32 first, i32 r, u32 target) {
          const T* source = base + first * row_stride + r * row_stride;
          copy_row_chunks<kColumns, Config::kIsExact, Aligned>(target, source, first + r < num_rows,
                                                               num_columns - Tile::copy_column());
        });
  }

  // Starts the copy of Q, dO and the statistics of tile number count.
  FT_DEVICE static void load_queries(const Params& p, Storage& shared, const OwnedKeys& block, i32 count) {
    i32 stage = count % kNumStages, head = shared.place(count).head, i_begin = shared.place(count).i_begin;
    i32 num_rows = block.s.seqlen_q - i_begin;
    const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, block.s, head) + i_begin * p.q_strides.row;
    const T* gdO = query_rows(static_cast<const T*>(p.dout), p.dout_strides, block.s, head);
    load_rows<Config::kHeadDim, kBlockM>(shared.sQ[stage], gQ, p.q_strides.row, num_rows, p.head_dim);
    load_rows<Config::kHeadDimV, kBlockM>(shared.sdO[stage], gdO + i_begin * p.dout_strides.row, p.dout_strides.row,
                                          num_rows, p.head_dim_v);
    i32 row = threadIdx.x % kBlockM;
    if (threadIdx.x < 2 * kBlockM) {
      bool is_lse = threadIdx.x < kBlockM;
      const float* source = (is_lse ? p.score_lse : p.delta) + stat_index(p, block.s, head, i_begin + row);
      cp_async<4>(shared_address((is_lse ? shared.lse[stage] : shared.delta[stage]) + row), source,
                  row < num_rows ? 4 : 0);
    }
  }

  // ---- Mainloop. Scope: warp.

  // Which warps share keys, and which of them this is.
  FT_DEVICE static i32 key_warp(i32 warp) { return kSharesKeys ? warp % Config::kKeyWarps : warp; }
  FT_DEVICE static i32 column_warp(i32 warp) { return kSharesKeys ? warp / Config::kKeyWarps : 0; }

  // The 16-row step of a tile of keys where m16 tile 0 of a warp begins; tile t is 4 t steps further.
  FT_DEVICE static i32 first_key_step(i32 warp) { return 4 * kMTiles * (key_warp(warp) / 4) + key_warp(warp) % 4; }

  // S^T = K Q^T, or dP^T = V dO^T: a is this lane's address of the warp's keys, b that of the queries.
  template <i32 kDepth>
  FT_DEVICE static void multiply_abt(float (&rD)[kMTiles][kScoreQueries / 2], u32 a, u32 b) {
#pragma unroll
    for (i32 d = 0; d < kDepth / 16; ++d) {
      u32 rA[kMTiles][4];
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) ldmatrix_x4(rA[t], SwizzledTile<kDepth>::step_address(a, 4 * t, d));
      if (d == 0) {
        mma_step_abt<T, kScoreQueries, kDepth, true>(rD, rA, b, d);
      } else {
        mma_step_abt<T, kScoreQueries, kDepth, false>(rD, rA, b, d);
      }
    }
  }

  // dV += P^T dO, or dK += dS^T Q, with P^T or dS^T from shared memory: a is this lane's address of the warp's keys in
  // it, b that of the warp's columns of dO or Q.
  template <i32 kTileColumns, i32 kCount>
  FT_DEVICE static void multiply_ab(float (&rD)[kMTiles][kCount], u32 a, u32 b) {
#pragma unroll
    for (i32 i = 0; i < kBlockM / 16; ++i) {
      u32 rA[kMTiles][4];
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) ldmatrix_x4(rA[t], TileS::step_address(a, 4 * t, i));
#pragma unroll
      for (i32 n = 0; n < kCount / 8; ++n) {
        u32 rB[4];
        ldmatrix_x4_trans(rB, SwizzledTile<kTileColumns>::step_address(b, i, n));
#pragma unroll
        for (i32 x = 0; x < 2 * kMTiles; ++x) {
          float* d = rD[x / 2] + 8 * n + 4 * (x % 2);
          mma_m16n8k16<T>(d, rA[x / 2], rB[2 * (x % 2)], rB[2 * (x % 2) + 1], d[0], d[1], d[2], d[3]);
        }
      }
    }
  }

  // Stores a packed fragment of dS^T or P^T: two 16-bit elements of each of two rows in every 8 columns.
  FT_DEVICE static void store_scores(u32 tile, i32 warp, const u32 (&packed)[kMTiles][kScoreQueries / 4]) {
    i32 lane = threadIdx.x % 32, first = column_warp(warp) * (kScoreQueries / 8);
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 row = 16 * (first_key_step(warp) + 4 * t) + lane / 4 + 8 * r;
#pragma unroll
        for (i32 b = 0; b < kScoreQueries / 8; ++b) {
          i32 chunk = first + b;
          u32 address = tile + TileS::chunk_offset(row, chunk % TileS::kSegment) +
                        chunk / TileS::kSegment * TileS::kSegment * 16 + lane % 4 * 4;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(packed[t][2 * b + r]) : "memory");
        }
      }
    }
  }

  // Adds dQ = dS K of tile number count to dq_accum. ds and k are this lane's addresses.
  FT_DEVICE static void add_dq(const Params& p, const Storage& shared, i32 warp, i32 count, u32 ds, u32 k) {
    constexpr i32 kColumns = Config::kDqColumns, kTiles = Config::kDqMTiles;
    i32 row_warp = warp % Config::kDqRowWarps, column_step = warp / Config::kDqRowWarps * (kColumns / 16);
    float rdQ[kTiles][kColumns / 2];
#pragma unroll
    for (i32 j = 0; j < kBlockN / 16; ++j) {
      u32 rA[kTiles][4];
#pragma unroll
      for (i32 t = 0; t < kTiles; ++t) ldmatrix_x4_trans(rA[t], TileS::step_address(ds, j, t));
#pragma unroll
      for (i32 n = 0; n < kColumns / 16; ++n) {
        u32 rB[4];
        ldmatrix_x4_trans(rB, TileQK::step_address(k, j, column_step + n));
#pragma unroll
        for (i32 t = 0; t < kTiles; ++t) {
#pragma unroll
          for (i32 half = 0; half < 2; ++half) {
            float* d = rdQ[t] + 8 * n + 4 * half;
            if (j == 0) {
              mma_m16n8k16<T>(d, rA[t], rB[2 * half], rB[2 * half + 1], 0.0f, 0.0f, 0.0f, 0.0f);
            } else {
              mma_m16n8k16<T>(d, rA[t], rB[2 * half], rB[2 * half + 1], d[0], d[1], d[2], d[3]);
            }
          }
        }
      }
    }
    if constexpr (mutates(Mutation::bwd_sm80_dq_tile))
      if (count == 1) return;
    const Sequence& s = shared.block.s;
#pragma unroll
    for (i32 r = 0; r < 2 * kTiles; ++r) {
      i32 i = shared.place(count).i_begin + 16 * kTiles * row_warp + threadIdx.x % 32 / 4 + 8 * r;
      if (i >= s.seqlen_q) continue;
      float* row = p.dq_accum + stat_index(p, s, shared.place(count).head, i) * 64 + fragment_column();
#pragma unroll
      for (i32 b = 0; b < kColumns / 8; ++b) {
        i32 chunk = 2 * column_step + b;
        red_add_two(row + chunk / 8 * (64 * p.lse_size) + 8 * (chunk % 8 ^ i % 8), rdQ[r / 2][4 * b + 2 * (r % 2)],
                    rdQ[r / 2][4 * b + 2 * (r % 2) + 1]);
      }
    }
  }

  // Stores dK or dV of an m16 tile of keys.
  template <i32 kCount>
  FT_DEVICE static void store_rows(void* base, const Strides& strides, const Params& p, const OwnedKeys& block, i32 j,
                                   i32 first_column, i32 num_columns, float factor, const float (&rD)[kCount]) {
    KeyRows<T, KvSource<false>> rows(static_cast<T*>(base), strides, p, block.s, block.kv_head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
#pragma unroll
      for (i32 b = 0; b < kCount / 4; b += 4) {
        uint4 chunk = packed_chunk<T>(rD, b, r, factor);
        i32 column = first_column + 8 * (b + static_cast<i32>(threadIdx.x % 4));
        if (j + 8 * r < block.s.seqlen_k && column < num_columns) {
          *reinterpret_cast<uint4*>(rows.row(j + 8 * r) + column) = chunk;
        }
      }
    }
  }

  FT_DEVICE static void run(const Params& p, Storage& shared, const OwnedKeys& block, i32 warp) {
    const Sequence& s = block.s;
    constexpr i32 kColumnsK = Config::kColumnsK, kColumnsV = Config::kColumnsV;
    float rdK[kMTiles][kColumnsK / 2], rdV[kMTiles][kColumnsV / 2];
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 x = 0; x < kColumnsK / 2; ++x) rdK[t][x] = 0.0f;
#pragma unroll
      for (i32 x = 0; x < kColumnsV / 2; ++x) rdV[t][x] = 0.0f;
    }
    // On sm_90 and later the count stays in a register. On older GPUs ptxas would spill it, so every use reads it from
    // shared memory. kHasVectorReduction serves here only as a test for sm_90 or later
    i32 kept_tiles = block.num_tiles();
    auto num_tiles = [&] { return kHasVectorReduction ? kept_tiles : block.num_tiles(); };
    if (num_tiles() > 0) {
      // Padding columns that no copy writes stay zeros
      if constexpr (!Config::kIsExact) {
        clear_tile<kNumThreads>(shared.sK,
                                sizeof(shared.sK) + sizeof(shared.sV) + sizeof(shared.sQ) + sizeof(shared.sdO));
        __syncthreads();
      }
      // Start the copies of K, V and the first queries
      KeyRows<const T, KvSource<false>> gK(static_cast<const T*>(p.k), p.k_strides, p, s, block.kv_head);
      KeyRows<const T, KvSource<false>> gV(static_cast<const T*>(p.v), p.v_strides, p, s, block.kv_head);
      i32 num_keys = s.seqlen_k - block.j_begin;
      load_rows<Config::kHeadDim, kBlockN>(shared.sK, gK.row(block.j_begin), gK.row_stride, num_keys, p.head_dim);
      load_rows<Config::kHeadDimV, kBlockN>(shared.sV, gV.row(block.j_begin), gV.row_stride, num_keys, p.head_dim_v);
#pragma unroll
      for (i32 stage = 0; stage < kNumStages - 1; ++stage) {
        if (stage < num_tiles()) load_queries(p, shared, block, stage);
        cp_async_commit();
      }

      // This lane's addresses
      u32 keys_at = first_key_step(warp) * 16;
      u32 k_rows = shared_address(shared.sK) + keys_at * TileQK::kPitch + TileQK::template lane_offset<true>();
      u32 v_rows = shared_address(shared.sV) + keys_at * TileV::kPitch + TileV::template lane_offset<true>();
      u32 k_columns = shared_address(shared.sK) + TileQK::template lane_offset<true>();
      // The columns of dS that are this warp's queries of dQ, transposed
      u32 ds_lane = shared_address(shared.sdS) + TileS::template lane_offset<false>();
      ds_lane = TileS::step_address(ds_lane, 0, warp % Config::kDqRowWarps * Config::kDqMTiles);
      constexpr u32 kBytesQ = sizeof(shared.sQ[0]), kBytesdO = sizeof(shared.sdO[0]), kBytesdS = sizeof(shared.sdS[0]);

      for (i32 count = 0; count < num_tiles(); ++count) {
        // Wait for the tile. All warps are done with the tile before it: refill its stage
        mark(Phase::wait_tile, count);
        cp_async_wait<kNumStages - 2>();
        __syncthreads();
        mark(Phase::copy_k, count);
        if (count + kNumStages - 1 < num_tiles()) load_queries(p, shared, block, count + kNumStages - 1);
        cp_async_commit();
        if (threadIdx.x == 0) shared.find_place(count + kNumStages);
        i32 stage = count % kNumStages, i_begin = shared.place(count).i_begin;
        u32 q = shared_address(shared.sQ) + stage * kBytesQ, dout = shared_address(shared.sdO) + stage * kBytesdO;
        u32 ds_buffer = count % 2 * kBytesdS;

        // S^T = K Q^T, dP^T = V dO^T
        mark(Phase::issue_scores, count);
        i32 query = column_warp(warp) * kScoreQueries;  // the first of this warp's scores
        float rS[kMTiles][kScoreQueries / 2], rdP[kMTiles][kScoreQueries / 2];
        multiply_abt<Config::kHeadDim>(rS, k_rows, q + query * TileQK::kPitch + TileQK::template lane_offset<false>());
        multiply_abt<Config::kHeadDimV>(rdP, v_rows,
                                        dout + query * TileV::kPitch + TileV::template lane_offset<false>());
        // P^T and dS^T
        mark(Phase::gradient, count);
        u32 packed_p[kMTiles][kScoreQueries / 4], packed_ds[kMTiles][kScoreQueries / 4];
#pragma unroll
        for (i32 t = 0; t < kMTiles; ++t) {
          i32 j_begin = block.j_begin + 64 * (t + kMTiles * (key_warp(warp) / 4)), i_first = i_begin + query;
          const float* sLse = shared.lse[stage] + query;
          const float* sDelta = shared.delta[stage] + query;
          if constexpr (kHasOptions) {
            Gradient::with_options(p, s, shared.place(count).head, i_first, j_begin, sLse, sDelta, rS[t], rdP[t],
                                   packed_p[t], packed_ds[t]);
          } else {
            bool is_masked = needs_mask<Mask>(p, s, i_first, 0, j_begin, 64);
            if constexpr (Mask::kHasBand) is_masked |= needs_mask<Mask>(p, s, i_first, kScoreQueries, j_begin, 64);
            if (is_masked) {
              Gradient::template plain<true>(p, s, i_first, j_begin, sLse, sDelta, rS[t], rdP[t], packed_p[t],
                                             packed_ds[t]);
            } else {
              Gradient::template plain<false>(p, s, i_first, j_begin, sLse, sDelta, rS[t], rdP[t], packed_p[t],
                                              packed_ds[t]);
            }
          }
        }
        mark(Phase::store, count);
        store_scores(shared_address(shared.sdS) + ds_buffer, warp, packed_ds);
        // dV += P^T dO, dK += dS^T Q
        if constexpr (kSharesKeys) {
          store_scores(shared_address(shared.sdS[2]), warp, packed_p);
          // Wait for the other warps of these keys
          mark(Phase::wait_turn, count);
          named_barrier_sync(1 + key_warp(warp), 32 * Config::kColumnWarps);
          u32 keys = keys_at * TileS::kPitch + TileS::template lane_offset<true>();
          u32 p_rows = shared_address(shared.sdS[2]) + keys;
          u32 ds_rows = shared_address(shared.sdS) + ds_buffer + keys;
          u32 dout_columns =
              TileV::step_address(dout + TileV::template lane_offset<true>(), 0, column_warp(warp) * (kColumnsV / 16));
          u32 q_columns =
              TileQK::step_address(q + TileQK::template lane_offset<true>(), 0, column_warp(warp) * (kColumnsK / 16));
          if constexpr (mutates(Mutation::bwd_sm80_columns)) q_columns = q + TileQK::template lane_offset<true>();
          mark(Phase::issue, count);
          multiply_ab<Config::kHeadDimV>(rdV, p_rows, dout_columns);
          multiply_ab<Config::kHeadDim>(rdK, ds_rows, q_columns);
        } else {
          mark(Phase::issue, count);
#pragma unroll
          for (i32 i = 0; i < kBlockM / 16; ++i) {
            mma_step_ab<T, Config::kHeadDimV>(rdV, packed_p, dout + TileV::template lane_offset<true>(), i);
          }
#pragma unroll
          for (i32 i = 0; i < kBlockM / 16; ++i) {
            mma_step_ab<T, Config::kHeadDim>(rdK, packed_ds, q + TileQK::template lane_offset<true>(), i);
          }
        }
        // dQ of the tile before
        mark(Phase::add_dq, count);
        if (count > 0) add_dq(p, shared, warp, count - 1, ds_lane + (kBytesdS - ds_buffer), k_columns);
        mark(Phase::end, count);
      }
      // dQ of the last tile
      __syncthreads();
      i32 last = num_tiles() - 1;
      add_dq(p, shared, warp, last, ds_lane + last % 2 * kBytesdS, k_columns);
    }
    // Store dK and dV
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
      i32 j = block.j_begin + 64 * (t + kMTiles * (key_warp(warp) / 4)) + fragment_row();
      store_rows(p.dk, p.dk_strides, p, block, j, column_warp(warp) * kColumnsK, p.head_dim, p.scale, rdK[t]);
      store_rows(p.dv, p.dv_strides, p, block, j, column_warp(warp) * kColumnsV, p.head_dim_v, keep_factor<Dropout>(p),
                 rdV[t]);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    bwd_sm80_kernel(const FT_GRID_CONSTANT Params p) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "reads neither pages nor unaligned rows");
  using Kernel = BwdSm80<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
  if (threadIdx.x == 0) {
    shared.block = OwnedKeys::find<Config, Mask, SeqInfo>(p);
    for (i32 count = 0; count < Config::kNumStages; ++count) shared.find_place(count);
  }
  __syncthreads();
  if (shared.block.has_keys()) Kernel::run(p, shared, shared.block, uniform(threadIdx.x / 32));
}

}  // namespace flashtile
