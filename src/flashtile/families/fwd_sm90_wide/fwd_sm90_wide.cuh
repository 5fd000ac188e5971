// Attention forward on Hopper for wide heads: wgmma, TMA multicast, two consumer warpgroups that share P.
//
// Threads:   a block owns 64 queries. Warpgroup 0 computes the scores, the softmax and the first columns of O;
//            warpgroup 1 the other columns, with P from shared memory. One lane of warpgroup 2 is the producer. Two
//            blocks of a cluster own neighbouring queries and the same keys: each loads every other slab of K and V for
//            both, which halves the traffic of L2.
// Shared:    sQ [slab][64][64], sK, sV [stage][slab][64][64], sP [buffer][64][64], 128-byte swizzled slabs of 64
//            columns; the factors that bring O to a new maximum; barriers; the query tile.
// Barriers:  full_k and empty_k per slab and stage of K, full_v and empty_v per warpgroup and stage of V: the consumers
//            of all blocks arrive at empty in all blocks. full_p and empty_p per buffer of P.
// Mainloop:  warpgroup 0: S of tile n and O += P V of tile n + 1 are in flight together, and the softmax of tile n
//            overlaps the second. Key tiles go from last to first.
// Refuses:   unaligned rows, pages.
#pragma once

#include "device/ptx/cluster.cuh"
#include "families/fwd_sm80/fwd_sm80.cuh"
#include "families/fwd_sm90/fwd_sm90.cuh"
#include "families/fwd_sm90_wide/config.cuh"

namespace flashtile {

template <class Config, class Mask, class SeqInfo>
struct alignas(1024) FwdSm90WideStorage {
  using T = typename Config::Element;
  T sQ[Config::kSlabsQK][64 * 64];
  T sK[Config::kStagesK][Config::kSlabsQK][64 * 64];
  T sV[Config::kStagesV][Config::kSlabsV][64 * 64];
  T sP[2][64 * 64];
  float alpha[2][64];   // of the rows of a buffer of P
  float norm[64];       // what normalises O
  i32 is_raised[2][4];  // some row of a warp has a new maximum
  u64 full_q;
  u64 full_k[Config::kSlabsQK][Config::kStagesK], empty_k[Config::kSlabsQK][Config::kStagesK];
  u64 full_v[2][Config::kStagesV], empty_v[2][Config::kStagesV];
  u64 full_p[2], empty_p[2];
  alignas(16) char tile[sizeof(QueryTile<Config, Mask, SeqInfo>)];
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct FwdSm90Wide {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using Storage = FwdSm90WideStorage<Config, Mask, SeqInfo>;
  using Tile = QueryTile<Config, Mask, SeqInfo>;
  using Rows = FragmentRows<Config>;
  using Softmax = OnlineSoftmax<true, ScoreMod::kIsNatural>;
  using EndOfRow = FwdSm80<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource<false>, Load<true>>;
  using StagesK = Ring<Config::kStagesK>;
  using StagesV = Ring<Config::kStagesV>;
  using Buffers = Ring<2>;
  static constexpr i32 kBlockN = Config::kBlockN, kScores = kBlockN / 2;
  static constexpr i32 kSlabsQK = Config::kSlabsQK, kSlabsV = Config::kSlabsV, kSlabsFirst = Config::kSlabsFirst;
  static constexpr bool kMasksAlways = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr i32 kNormBarrier = 1, kTailBarrier = 2;  // named barriers

  // The slabs of V, and the columns of O, of a warpgroup.
  template <i32 kGroup>
  static constexpr i32 kSlabsOf = kGroup == 0 ? kSlabsFirst : kSlabsV - kSlabsFirst;

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    constexpr i32 kWarps = 4 * Config::kClusterSize;
    mbarrier_init(shared.full_q, 1);
    for (i32 slab = 0; slab < kSlabsQK; ++slab) {
      for (i32 stage = 0; stage < Config::kStagesK; ++stage) {
        mbarrier_init(shared.full_k[slab][stage], 1);
        mbarrier_init(shared.empty_k[slab][stage], kWarps);
      }
    }
    for (i32 x = 0; x < 2; ++x) {
      for (i32 stage = 0; stage < Config::kStagesV; ++stage) {
        mbarrier_init(shared.full_v[x][stage], 1);
        mbarrier_init(shared.empty_v[x][stage], kWarps);
      }
      mbarrier_init(shared.full_p[x], 4);
      mbarrier_init(shared.empty_p[x], 4);
    }
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // Releases a slab in every block of the cluster. Scope: warp.
  FT_DEVICE static void release(u64& empty) {
    if constexpr (Config::kClusterSize == 1) {
      release_stage(empty);
    } else {
      if (threadIdx.x % 32 < Config::kClusterSize) mbarrier_arrive_at(empty, threadIdx.x % 32);
    }
  }

  // Hides from the compiler that x is the same in every tile: it would keep every descriptor in registers, and spill.
  // Scope: thread.
  FT_DEVICE static u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  // ---- Producer. Scope: one thread.

  FT_DEVICE static void produce(const FwdSm90Params& params, Storage& shared, const Tile& tile, u32 rank) {
    const Params& p = params.base;
    constexpr u16 kAllBlocks = (1 << Config::kClusterSize) - 1;
    i32 kv_head = tile.coord.head / (p.heads / p.heads_kv), k_row = static_cast<i32>(tile.s.k_row);
    if constexpr (mutates(Mutation::fwd_sm90_wide_gqa_head)) kv_head = tile.coord.head % p.heads_kv;
    // This block's part of the slabs, for all blocks
    auto load_slab = [&](T* slab, const TensorMap& map, const Strides& strides, u64& full, i32 number, i32 n) {
      i32 head = strides.head == 0 ? 0 : kv_head, batch = strides.batch == 0 ? 0 : tile.coord.batch;
      i32 row = k_row + n * kBlockN;
      if constexpr (Config::kClusterSize == 1) {
        load_box(slab, map, full, 64 * number, row, head, batch);
      } else {
        if (number % Config::kClusterSize != static_cast<i32>(rank)) return;
        load_box_multicast(slab, map, full, 64 * number, row, head, batch, kAllBlocks);
      }
    };
    auto load_k = [&](i32 n, u32 count) {
      u32 stage = StagesK::stage(count);
      for (i32 slab = 0; slab < kSlabsQK; ++slab) {
        StagesK::wait_empty(shared.empty_k[slab], count);
        mbarrier_arrive_expect(shared.full_k[slab][stage], 64 * 128);
        load_slab(shared.sK[stage][slab], params.k_map, p.k_strides, shared.full_k[slab][stage], slab, n);
      }
    };
    auto load_v = [&](i32 n, u32 count) {
      u32 stage = StagesV::stage(count);
      for (i32 group = 0; group < 2; ++group) {
        i32 begin = group == 0 ? 0 : kSlabsFirst, end = group == 0 ? kSlabsFirst : kSlabsV;
        StagesV::wait_empty(shared.empty_v[group], count);
        mbarrier_arrive_expect(shared.full_v[group][stage], (end - begin) * 64 * 128);
        for (i32 slab = begin; slab < end; ++slab) {
          load_slab(shared.sV[stage][slab], params.v_map, p.v_strides, shared.full_v[group][stage], slab, n);
        }
      }
    };
    // Load Q
    mbarrier_arrive_expect(shared.full_q, kSlabsQK * 64 * 128);
    for (i32 slab = 0; slab < kSlabsQK; ++slab) {
      load_box(shared.sQ[slab], params.q_map, shared.full_q, 64 * slab,
               static_cast<i32>(tile.s.q_row) + tile.i_begin + 64 * static_cast<i32>(rank),
               p.q_strides.head == 0 ? 0 : tile.coord.head, p.q_strides.batch == 0 ? 0 : tile.coord.batch);
    }
    // Load K and V in the order in which the consumers use them
    u32 count = 0;
    load_k(tile.n_end - 1, 0);
    for (i32 n = tile.n_end - 2; n >= tile.n_begin; --n, ++count) {
      load_k(n, count + 1);
      load_v(n + 1, count);
    }
    load_v(tile.n_begin, count);
  }

  // ---- Consumers. Scope: warpgroup.

  // Zeros V past the last key: those rows belong to another sequence, and 0 * NaN is NaN.
  template <i32 kGroup>
  FT_DEVICE static void clear_tail(Storage& shared, const Tile& tile, u32 stage, i32 n) {
    if constexpr (SeqInfo::kHasLengths) {
      i32 num_rows = tile.s.seqlen_k - n * kBlockN;
      if constexpr (mutates(Mutation::fwd_sm90_wide_tail)) num_rows = kBlockN;
      if (num_rows < kBlockN) {
        clear_rows<64, kSlabsOf<kGroup>>(shared.sV[stage][kGroup == 0 ? 0 : kSlabsFirst], num_rows);
        named_barrier_sync(kTailBarrier + kGroup, 128);
      }
    }
  }

  // Applies score modifiers and mask to a tile of scores.
  FT_DEVICE static void modify_tile(const Params& p, const Tile& tile, i32 rank, i32 j_begin, float (&rS)[kScores]) {
    Rows rows(p, tile, rank);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = clamp(rows.i[r], 0, tile.s.seqlen_q - 1);
      modify_scores<Mask, ScoreMod>(p, tile.s, tile.coord.head, i, j_begin, r, rS);
    }
  }

  // Applies dropout, rounds P to 16 bits and hands it to the other warpgroup, with the factors of its rows.
  FT_DEVICE static void publish(const Params& p, Storage& shared, const Tile& tile, i32 rank, u32 count, i32 j_begin,
                                const Softmax& softmax, float (&rS)[kScores]) {
    if constexpr (Dropout::kIsOn) drop_tile(p, tile, Rows(p, tile, rank), j_begin, rS);
    u32 rP[kScores / 2];
#pragma unroll
    for (i32 x = 0; x < kScores / 2; ++x) rP[x] = pack_two<T>(rS[2 * x], rS[2 * x + 1]);
    u32 buffer = Buffers::stage(count);
    Buffers::wait_empty(shared.empty_p, count);
    store_fragment(shared.sP[buffer], rP);
    if (threadIdx.x % 4 == 0) {
      shared.alpha[buffer][fragment_row()] = softmax.alpha[0];
      shared.alpha[buffer][fragment_row() + 8] = softmax.alpha[1];
    }
    if (threadIdx.x % 32 == 0) shared.is_raised[buffer][threadIdx.x / 32] = softmax.is_raised;
    __syncwarp();
    arrive_warp(shared.full_p[buffer]);
  }

  // Warpgroup 0: scores, softmax, the first columns of O.
  FT_DEVICE static void consume_scores(const Params& p, Storage& shared, const Tile& tile, i32 rank, float factor,
                                       Softmax& softmax, float (&rO)[kSlabsFirst * 32]) {
    ConsumerTiles tiles = ConsumerTiles::find(p, tile, tile.i_begin + 64 * rank);
    i32 unmasked_begin = uniform(tiles.unmasked.begin), unmasked_end = uniform(tiles.unmasked.end);
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= unmasked_end || n < unmasked_begin; };
    // Start S = Q K^T, slab by slab
    auto start_s = [&](u32 count, float (&rS)[kScores]) {
      u32 q = opaque(tile_base(shared.sQ, 64 * 128)), k = opaque(tile_base(shared.sK[StagesK::stage(count)], 64 * 128));
#pragma unroll
      for (i32 slab = 0; slab < kSlabsQK; ++slab) {
        StagesK::wait_full(shared.full_k[slab], count);
        gemm_abt_slab<T, kBlockN>(rS, q + slab * (64 * 128 >> 4), k + slab * (64 * 128 >> 4), slab != 0);
        // Release the slab before this one, so that its next load starts early
        if (slab > 0) {
          wgmma_wait<1>();
          release(shared.empty_k[slab - 1][StagesK::stage(count)]);
        }
      }
    };
    auto release_last_k = [&](u32 count) { release(shared.empty_k[kSlabsQK - 1][StagesK::stage(count)]); };
    // Start O += P V
    auto start_pv = [&](u32 count, i32 n) {
      u32 stage = StagesV::stage(count);
      StagesV::wait_full(shared.full_v[0], count);
      clear_tail<0>(shared, tile, stage, n);
      gemm_ab<T, 64 * kSlabsFirst, kBlockN>(rO, tile_base(shared.sP[Buffers::stage(count)], 64 * 128),
                                            tile_base(shared.sV[stage], 64 * 128));
    };

    mbarrier_wait(shared.full_q, 0);
    i32 n = tile.n_end - 1;
    {
      float rS[kScores];
      start_s(0, rS);
      wgmma_wait<0>();
      pin_registers(rS);
      release_last_k(0);
      if (needs_mask(n)) modify_tile(p, tile, rank, n * kBlockN, rS);
      softmax.template raise_maximum<true, true>(factor, rS);
      softmax.template exponentiate<true, true>(factor, rS);
      publish(p, shared, tile, rank, 0, n * kBlockN, softmax, rS);
    }
    u32 count = 1;
    for (--n; n >= tile.n_begin; --n, ++count) {
      float rS[kScores];
      // S of this tile and O += P V of the one before, in flight together
      start_s(count, rS);
      start_pv(count - 1, n + 1);
      wgmma_wait<1>();
      pin_registers(rS);
      release_last_k(count);
      if (needs_mask(n)) modify_tile(p, tile, rank, n * kBlockN, rS);
      softmax.template raise_maximum<false, true>(factor, rS);
      softmax.template exponentiate<false, true>(factor, rS);
      publish(p, shared, tile, rank, count, n * kBlockN, softmax, rS);
      wgmma_wait<0>();
      pin_registers(rO);
      release(shared.empty_v[0][StagesV::stage(count - 1)]);
      softmax.rescale(rO);
    }
    start_pv(count - 1, n + 1);
    wgmma_wait<0>();
    pin_registers(rO);
    release(shared.empty_v[0][StagesV::stage(count - 1)]);
  }

  // Warpgroup 1: the other columns of O.
  FT_DEVICE static void consume_values(Storage& shared, const Tile& tile, float (&rO)[kSlabsOf<1> * 32]) {
    u32 count = 0;
    for (i32 n = tile.n_end - 1; n >= tile.n_begin; --n, ++count) {
      u32 buffer = Buffers::stage(count), stage = StagesV::stage(count);
      // Wait for P; bring O to its maxima
      Buffers::wait_full(shared.full_p, count);
      bool is_raised = count > 0 && shared.is_raised[buffer][threadIdx.x % 128 / 32] != 0;
      if constexpr (mutates(Mutation::fwd_sm90_wide_rescale)) is_raised = false;
      if (is_raised) {
        float alpha[2] = {shared.alpha[buffer][fragment_row()], shared.alpha[buffer][fragment_row() + 8]};
#pragma unroll
        for (i32 x = 0; x < kSlabsOf<1> * 32; ++x) rO[x] *= alpha[x / 2 % 2];
      }
      // O += P V
      StagesV::wait_full(shared.full_v[1], count);
      clear_tail<1>(shared, tile, stage, n);
      gemm_ab<T, 64 * kSlabsOf<1>, kBlockN>(rO, tile_base(shared.sP[buffer], 64 * 128),
                                            tile_base(shared.sV[stage][kSlabsFirst], 64 * 128));
      wgmma_wait<0>();
      pin_registers(rO);
      release(shared.empty_v[1][stage]);
      release_stage(shared.empty_p[buffer]);
    }
  }

  // Stores columns of O from slab `first` on. Scope: warp.
  template <i32 kCount>
  FT_DEVICE static void store(const Params& p, const Tile& tile, const Rows& rows, i32 first, const float (&norm)[2],
                              const float (&rO)[kCount]) {
    i32 column_begin = 64 * first, num_columns = p.head_dim_v - column_begin;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      bool is_query = rows.is_query(tile, r);
      if (p.num_splits > 1 || kIsSame<Out, float>) {
        store_row_float(EndOfRow::float_row(p, tile, rows, r) + column_begin, is_query, num_columns, r, norm[r], rO);
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, tile.s, tile.coord.head) +
                  rows.i[r] * p.out_strides.row + column_begin;
#pragma unroll
        for (i32 b = 0; b < kCount / 4; b += 4) {
          uint4 chunk = packed_chunk<Out>(rO, b, r, norm[r]);
          i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
          if (is_query && column < num_columns) *reinterpret_cast<uint4*>(gO + column) = chunk;
        }
      }
    }
  }

  FT_DEVICE static void consume_first(const Params& p, Storage& shared, const Tile& tile, i32 rank) {
    float factor = ScoreMod::kChangesScores ? exponent_factor(ScoreMod::kIsNatural) : p.scale_log2;
    Softmax softmax;
    float rO[kSlabsFirst * 32];
#pragma unroll
    for (i32 x = 0; x < kSlabsFirst * 32; ++x) rO[x] = 0.0f;
    if (tile.has_keys()) consume_scores(p, shared, tile, rank, factor, softmax, rO);
    Rows rows(p, tile, rank);
    float norm[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      norm[r] = EndOfRow::finish_row(p, tile, rows, r, factor, softmax.m[r], softmax.l[r], true);
      if (threadIdx.x % 4 == 0) shared.norm[fragment_row() + 8 * r] = norm[r];
    }
    named_barrier_arrive(kNormBarrier, 256);
    store(p, tile, rows, 0, norm, rO);
  }

  FT_DEVICE static void consume_second(const Params& p, Storage& shared, const Tile& tile, i32 rank) {
    float rO[kSlabsOf<1> * 32];
#pragma unroll
    for (i32 x = 0; x < kSlabsOf<1> * 32; ++x) rO[x] = 0.0f;
    if (tile.has_keys()) consume_values(shared, tile, rO);
    Rows rows(p, tile, rank);
    named_barrier_sync(kNormBarrier, 256);
    float norm[2] = {shared.norm[fragment_row()], shared.norm[fragment_row() + 8]};
    store(p, tile, rows, kSlabsFirst, norm, rO);
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __cluster_dims__(Config::kClusterSize, 1, 1) __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_wide_kernel(const FT_GRID_CONSTANT FwdSm90Params params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "TMA reads neither pages nor unaligned rows");
  using Kernel = FwdSm90Wide<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  using Tile = typename Kernel::Tile;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  // Find the query tile of this cluster
  const Params& p = params.base;
  i32 rank = Config::kClusterSize == 1 ? 0 : static_cast<i32>(cluster_rank());
  if (threadIdx.x == 0) {
    Kernel::init(shared);
    TileGrid<Mask, SeqInfo, false> grid;
    *reinterpret_cast<Tile*>(shared.tile) = Tile(p, grid, static_cast<i32>(blockIdx.x) / Config::kClusterSize);
  }
  __syncthreads();
  if constexpr (Config::kClusterSize > 1) cluster_sync();
  const Tile& tile = *reinterpret_cast<const Tile*>(shared.tile);

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    lower_registers<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 8 && tile.has_queries() && tile.has_keys() && elect_lane()) {
      Kernel::produce(params, shared, tile, rank);
    }
    __syncwarp();
  } else {
    raise_registers<Config::kConsumerRegisters>();
    if (tile.has_queries()) {
      if (warpgroup == 0) {
        Kernel::consume_first(p, shared, tile, rank);
      } else {
        Kernel::consume_second(p, shared, tile, rank);
      }
    }
  }
  // The other blocks may still write to this block's shared memory
  if constexpr (Config::kClusterSize > 1) cluster_sync();
}

}  // namespace flashtile
