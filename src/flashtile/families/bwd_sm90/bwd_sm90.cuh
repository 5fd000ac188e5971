// Attention backward on Hopper: dQ, dK and dV by wgmma and TMA, one producer and two consumer warpgroups.
//
// Threads:   a block owns kBlockN keys of one KV head and streams the queries that see them, of every head that shares
//            the KV head. Consumer w owns 64 of the keys: its dK and dV stay in registers and need no atomics. In the
//            last warpgroup, one lane issues the copies of K, V, Q and dO, a second warp loads the statistics, and one
//            lane of a third adds dQ to global memory. The second and the fourth warp prepare masks and biases
//            (options.cuh).
// Shared:    sK, sV [slab][kBlockN][64], sQ, sdO [stage][slab][kBlockM][64], sdS [buffer][slab][kBlockN][64], all
//            128-byte swizzled slabs of 64 columns; sdQ [buffer][64][64] in float32; lse and delta of each stage; the
//            block's key tile and a ring of query tiles; barriers.
// Products:  S^T = K Q^T and dP^T = V dO^T have keys as rows. P^T and dS^T, packed to 16 bits, are register operands of
//            dV += P^T dO and dK += dS^T Q. dS^T also goes through shared memory, for dQ = dS K over all keys of the
//            block. The consumers share dQ by queries, by columns, or tile by tile (config.cuh).
// Mainloop:  dV and dK of tile i, dQ of tile i - 1, S^T and dP^T of tile i + 1; then P and dS of tile i + 1.
// Barriers:  full_k, full_v; full and empty per stage; empty_ds per buffer of dS; full_dq and empty_dq per buffer of
//            dQ. The consumers take turns (ping-pong): one issues its five products while the other computes P and dS.
//            The turn also publishes dS.
// dQ:        float32 sums in global memory (dq_accum) by bulk reductions. bwd_convert_dq_kernel turns them into dQ.
// Refuses:   unaligned rows, pages, head dims over 128.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/key_tile.cuh"
#include "device/core/mutation.cuh"
#include "device/core/timeline.cuh"
#include "device/ptx/bulk.cuh"
#include "device/ptx/tma.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/pipeline.cuh"
#include "device/tile/smem_tile.cuh"
#include "device/tile/wgmma_gemm.cuh"
#include "families/bwd_sm90/config.cuh"
#include "families/bwd_sm90/options.cuh"

namespace flashtile {

// The maps' axes are (head_dim, rows, heads, batch); their boxes have 64 columns.
struct BwdSm90Params {
  Params base;
  TensorMap q_map, dout_map;  // boxes of kBlockM rows
  TensorMap k_map, v_map;     // boxes of kBlockN rows
};

// One of the query tiles that stream by, as the warp that loads the statistics describes it. Consumers may use tile
// c - 1, and the warp that adds dQ tile c - 2, while tile c + kNumStages is prepared.
struct QueryTileIndex {
  i64 stat;  // of the first query
  i32 i_begin, head;
  i32 num_queries;    // up to the end of the sequence; may be more than the tile's
  i32 order;          // KeyTile::dq_order
  i32 is_checked[2];  // by consumer: some score is masked, or some lse so large that P could be far above 1
};
constexpr u32 kNumQueryTiles = 8;

template <class Config, class Mask, class ScoreMod>
struct alignas(1024) BwdSm90Storage {
  using T = typename Config::Element;
  static_assert(kNumQueryTiles >= Config::kNumStages + 4);
  static_assert(Config::kNumBuffers >= 2);  // dS of a tile is released one tile later
  T sK[Config::kElementsK];
  T sV[Config::kElementsV];
  T sQ[Config::kNumStages][Config::kElementsQ];
  T sdO[Config::kNumStages][Config::kElementsdO];
  T sdS[Config::kNumBuffers][Config::kElementsdS];  // dS^T: keys are rows
  float sdQ[Config::kNumDqBuffers][64 * 64];
  OptionStorage<Config, Mask, ScoreMod> options;
  alignas(16) float lse[Config::kNumStages][Config::kBlockM];
  float delta[Config::kNumStages][Config::kBlockM];
  QueryTileIndex queries[kNumQueryTiles];  // tile number count is at count % kNumQueryTiles
  u64 full_k, full_v;
  u64 full[Config::kNumStages], empty[Config::kNumStages];  // Q, dO and their statistics
  u64 empty_ds[Config::kNumBuffers];
  u64 full_dq[Config::kNumDqBuffers], empty_dq[Config::kNumDqBuffers];
  KeyTile tile;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct BwdSm90 {
  using T = typename Config::Element;
  using Storage = BwdSm90Storage<Config, Mask, ScoreMod>;
  using Options = BwdSm90Options<Config, Mask, ScoreMod, Dropout>;
  using OptionBits = typename Options::Bits;
  using Band = typename Options::Band;
  using Stages = Ring<Config::kNumStages>;
  using Buffers = Ring<Config::kNumBuffers>;
  using DqBuffers = Ring<Config::kNumDqBuffers>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockM / 2;  // registers per thread of S^T
  static constexpr i32 kColumnsDq = 64;        // of dQ that a consumer computes
  static constexpr bool kSharesDq = Config::kSplitsDqRows || Config::kSplitsDqColumns;  // each tile in two parts

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    constexpr i32 kConsumerWarps = 4 * Config::kNumConsumers;
    mbarrier_init(shared.full_k, 1);
    mbarrier_init(shared.full_v, 1);
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full[stage], 3);  // Q, dO, statistics
      mbarrier_init(shared.empty[stage], kConsumerWarps);
    }
    for (i32 buffer = 0; buffer < Config::kNumBuffers; ++buffer) {
      mbarrier_init(shared.empty_ds[buffer], kConsumerWarps);
    }
    for (i32 buffer = 0; buffer < Config::kNumDqBuffers; ++buffer) {
      mbarrier_init(shared.full_dq[buffer], 4);  // the warps of one consumer
      mbarrier_init(shared.empty_dq[buffer], 1);
    }
    Options::init(shared.options);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // ---- Producer. Scope: one thread.

  // Loads rows of one head. A map has size 1 along head or batch where the tensor's stride is 0 (broadcast or packed).
  template <i32 kRows, i32 kSlabs>
  FT_DEVICE static void load(T* sTile, const TensorMap& map, const Strides& strides, u64& full, i32 row, i32 head,
                             i32 batch) {
    i32 map_head = strides.head == 0 ? 0 : head, map_batch = strides.batch == 0 ? 0 : batch;
    load_slabs<kRows, kSlabs>(sTile, map, full, kRows, row, map_head, map_batch);
  }

  FT_DEVICE static void produce(const BwdSm90Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    i32 batch = tile.s.batch_idx, q_row = static_cast<i32>(tile.s.q_row);
    i32 k_row = static_cast<i32>(tile.s.k_row) + tile.j_begin;
    load<kBlockN, Config::kSlabsQK>(shared.sK, params.k_map, p.k_strides, shared.full_k, k_row, tile.kv_head, batch);
    u32 count = 0;
    for (i32 h = 0; h < tile.num_heads; ++h) {
      for (i32 m = tile.m_begin; m < tile.m_end; ++m, ++count) {
        u32 stage = Stages::stage(count);
        i32 row = q_row + m * kBlockM;
        mark(Phase::wait_k_stage, count);
        Stages::wait_empty(shared.empty, count);
        mark(Phase::copy_k, count);
        load<kBlockM, Config::kSlabsQK>(shared.sQ[stage], params.q_map, p.q_strides, shared.full[stage], row,
                                        tile.first_head + h, batch);
        if (count == 0) {
          load<kBlockN, Config::kSlabsV>(shared.sV, params.v_map, p.v_strides, shared.full_v, k_row, tile.kv_head,
                                         batch);
        }
        load<kBlockM, Config::kSlabsV>(shared.sdO[stage], params.dout_map, p.dout_strides, shared.full[stage], row,
                                       tile.first_head + h, batch);
      }
    }
  }

  // Fills the statistics of every stage, describes its tile, and prepares the options of consumer 0. Rows past the last
  // query get the statistics of a fully masked row. Scope: warp.
  FT_DEVICE static void produce_stats(const Params& p, Storage& shared, const KeyTile& tile) {
    constexpr i32 kRows = kBlockM / 32;
    i32 lane = threadIdx.x % 32;
    u32 count = 0;
    for (i32 h = 0; h < tile.num_heads; ++h) {
      for (i32 m = tile.m_begin; m < tile.m_end; ++m, ++count) {
        float lse[kRows], delta[kRows];
#pragma unroll
        for (i32 x = 0; x < kRows; ++x) {
          i32 i = m * kBlockM + 32 * x + lane;
          bool is_query = i < tile.s.seqlen_q;
          i64 stat = stat_index(p, tile.s, tile.first_head + h, i);
          lse[x] = is_query ? p.score_lse[stat] : infinity();
          delta[x] = is_query ? p.delta[stat] : 0.0f;
        }
        bool is_large = false;
#pragma unroll
        for (i32 x = 0; x < kRows; ++x) is_large |= is_large_lse(lse[x]);
        is_large = __any_sync(0xffffffffu, is_large);
        u32 stage = Stages::stage(count);
        Stages::wait_empty(shared.empty, count);
#pragma unroll
        for (i32 x = 0; x < kRows; ++x) {
          shared.lse[stage][32 * x + lane] = lse[x];
          shared.delta[stage][32 * x + lane] = delta[x];
        }
        if (lane == 31) {
          i32 i_begin = m * kBlockM, head = tile.first_head + h;
          bool is_checked[2];
#pragma unroll
          for (i32 consumer = 0; consumer < 2; ++consumer) {
            i32 j_begin = tile.j_begin + 64 * consumer;
            // Rows past the last query need no mask: their lse makes P 0
            is_checked[consumer] = is_large || needs_mask<Band>(p, tile.s, i_begin, 0, j_begin, 64) ||
                                   (Mask::kHasBand && needs_mask<Band>(p, tile.s, i_begin, kBlockM, j_begin, 64));
          }
          shared.queries[count % kNumQueryTiles] = {stat_index(p, tile.s, head, i_begin),
                                                    i_begin,
                                                    head,
                                                    tile.s.seqlen_q - i_begin,
                                                    tile.dq_order<kBlockM, kBlockN, Mask>(p, i_begin),
                                                    {is_checked[0], is_checked[1]}};
        }
        __syncwarp();
        arrive_warp(shared.full[stage]);
        Options::prepare(p, shared.options, tile, 0, h, m, count, 0);
      }
    }
  }

  // Adds the parts of dQ to dq_accum as they come or, with dq_order, tile by tile in a fixed order. Each slab of
  // dq_accum holds the rows of lse one after the other, so a part is one piece. A reduction takes long to complete:
  // with two buffers a part is released when the next one is on its way, and the next block's turn for a tile is
  // signalled then too, or earlier if this thread must wait for a turn of its own.
  FT_DEVICE static void reduce_dq(const Params& p, Storage& shared, const KeyTile& tile) {
    constexpr i32 kPending = Config::kNumDqBuffers - 1;
    static_assert(kPending <= 1);
    bool is_ordered = p.dq_order != nullptr;
    u32 num_tiles = tile.num_tiles(), number = 0;
    i32* unsignalled = nullptr;  // the count of the tile before
    for (u32 count = 0; count < num_tiles; ++count) {
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        if (!has_dq(consumer, count)) continue;
        DqBuffers::wait_full(shared.full_dq, number);
        const QueryTileIndex& queries = shared.queries[count % kNumQueryTiles];
        bool is_first = consumer == 0 || !kSharesDq;
        if (is_ordered && is_first && !is_turn(p.dq_order + queries.stat, queries.order)) {
          if (unsignalled != nullptr) bulk_wait<0>(), signal_turn(unsignalled);
          unsignalled = nullptr;
          while (!is_turn(p.dq_order + queries.stat, queries.order)) {}
        }
        i32 first = Config::kSplitsDqRows ? 64 * consumer : 0, num_rows = min_of(64, queries.num_queries - first);
        i64 row = queries.stat + first + (Config::kSplitsDqColumns ? consumer * p.lse_size : 0);
        if constexpr (mutates(Mutation::bwd_sm90_dq_tile))
          if (count == 1) num_rows = 0;
        if (num_rows > 0) reduce_add(p.dq_accum + row * 64, shared.sdQ[DqBuffers::stage(number)], 256 * num_rows);
        bulk_commit();
        bulk_wait_read<kPending>();
        if (kPending == 0 || number > 0) mbarrier_arrive(shared.empty_dq[DqBuffers::stage(number + kPending)]);
        ++number;
        if (is_first && unsignalled != nullptr) bulk_wait<1>(), signal_turn(unsignalled);
        if (is_ordered) unsignalled = p.dq_order + queries.stat;
      }
    }
    // Shared memory must outlive the last reduction
    bulk_wait<0>();
    if (unsignalled != nullptr) signal_turn(unsignalled);
  }

  // ---- Consumer. Scope: warpgroup.

  // Zeros rows of a tile from row num_rows on: they belong to another sequence, and 0 * NaN is NaN.
  template <i32 kRows, i32 kSlabs>
  FT_DEVICE static void clear_tail(T* sTile, i32 num_rows, i32 consumer) {
    if constexpr (mutates(Mutation::bwd_sm90_tail)) num_rows = kRows;
    clear_rows<kRows, kSlabs>(sTile, num_rows);
    named_barrier_sync(kConsumerBarrier + consumer, 128);
  }

  // Statistics of a thread's queries, two of every 8, in chunks of 32 queries. Loaded ahead, but no earlier than
  // registers allow: products in flight keep shared memory busy.
  static constexpr i32 kChunks = kBlockM / 32;
  static constexpr i32 kChunksAhead = kBlockM == 64 ? 2 : 1;
  using Stats = float[kBlockM / 4];
  FT_DEVICE static void load_chunk(const float* sStats, i32 chunk, Stats& stats) {
    if (chunk >= kChunks) return;
#pragma unroll
    for (i32 x = 8 * chunk; x < 8 * chunk + 8; x += 2) {
      float2 two = *reinterpret_cast<const float2*>(sStats + 4 * x + fragment_column());
      stats[x] = two.x;
      stats[x + 1] = two.y;
    }
#pragma unroll
    for (i32 x = 8 * chunk; x < 8 * chunk + 8; ++x) pin_register(stats[x]);
  }
  FT_DEVICE static void load_first_chunks(const float* sStats, Stats& stats) {
#pragma unroll
    for (i32 chunk = 0; chunk < kChunksAhead; ++chunk) load_chunk(sStats, chunk, stats);
  }

  // The columns [begin, end) of the fragment whose queries see key j, before a bool mask. The first column is query i.
  FT_DEVICE static Range seen_columns(const Params& p, const Sequence& s, i32 i, i32 j) {
    Range seen = query_range<Mask>(p, s, j, j + 1);
    if constexpr (mutates(Mutation::bwd_sm90_mask_offset)) seen.begin -= Mask::kHasBand ? 1 : 0;
    return j < s.seqlen_k ? Range{seen.begin - i, seen.end - i} : Range{0, 0};
  }

  // P^T = 2^(S^T - lse), in place. With kIsChecked it is 0 where a query does not see the key, and at most 1. Rows of
  // the fragment are keys. Scope: thread.
  template <bool kIsChecked>
  FT_DEVICE static void exponentiate(const Params& p, const Sequence& s, i32 i_begin, i32 j_begin, const float* sLse,
                                     Stats& lse, float (&rS)[kScores]) {
    Range seen[2];
#pragma unroll
    for (i32 r = 0; r < 2 && kIsChecked; ++r) {
      seen[r] = seen_columns(p, s, i_begin + fragment_column(), j_begin + fragment_row() + 8 * r);
    }
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      if (b % 4 == 0) load_chunk(sLse, b / 4 + kChunksAhead, lse);
#pragma unroll
      for (i32 x = 0; x < 4; ++x) {
        i32 r = x / 2, column = 8 * b + x % 2;
        float score = fmaf(rS[4 * b + x], p.scale_log2, -lse[2 * b + x % 2]);
        if constexpr (kIsChecked) {
          score = score > 0.0f ? 0.0f : score;
          score = column >= seen[r].begin && column < seen[r].end ? score : -infinity();
        }
        rS[4 * b + x] = exp2_approx(score);
      }
    }
  }

  // dS^T = P^T * (dP^T - delta). Packs P^T too: packing it earlier would need more registers.
  FT_DEVICE static void differentiate(const float* sDelta, Stats& delta, const float (&rP)[kScores],
                                      const float (&rdP)[kScores], u32 (&packed_p)[kScores / 2],
                                      u32 (&packed_ds)[kScores / 2]) {
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      if (b % 4 == 0) load_chunk(sDelta, b / 4 + kChunksAhead, delta);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 x = 4 * b + 2 * r;
        packed_ds[x / 2] = pack_two<T>(rP[x] * (rdP[x] - delta[2 * b]), rP[x + 1] * (rdP[x + 1] - delta[2 * b + 1]));
        packed_p[x / 2] = pack_two<T>(rP[x], rP[x + 1]);
      }
    }
  }

  // Whether a consumer computes a part of dQ of tile number count, and the number of that part.
  FT_DEVICE static bool has_dq(i32 consumer, u32 count) { return kSharesDq || static_cast<i32>(count % 2) == consumer; }
  FT_DEVICE static u32 dq_number(i32 consumer, u32 count) { return kSharesDq ? 2 * count + consumer : count; }

  // Hands a consumer's part of dQ of tile number count to reduce_dq, and releases the tile's dS. A swizzle avoids bank
  // conflicts: columns 8 b .. 8 b + 7 of query i are stored at 8 (b ^ i % 8). Scope: warp.
  FT_DEVICE static void stage_dq(Storage& shared, i32 consumer, u32 count, const float (&rdQ)[kColumnsDq / 2]) {
    release_stage(shared.empty_ds[Buffers::stage(count)]);
    if (!has_dq(consumer, count)) return;
    u32 buffer = DqBuffers::stage(dq_number(consumer, count));
    DqBuffers::wait_empty(shared.empty_dq, dq_number(consumer, count));
    i32 row = fragment_row();
    float* sRow = shared.sdQ[buffer] + row * 64 + fragment_column();
#pragma unroll
    for (i32 b = 0; b < kColumnsDq / 8; ++b) {
      float* two = sRow + 8 * (b ^ row % 8);
      *reinterpret_cast<float2*>(two) = make_float2(rdQ[4 * b], rdQ[4 * b + 1]);
      *reinterpret_cast<float2*>(two + 8 * 64) = make_float2(rdQ[4 * b + 2], rdQ[4 * b + 3]);
    }
    fence_proxy_async();
    __syncwarp();
    arrive_warp(shared.full_dq[buffer]);
  }

  // Stores dK or dV of a consumer's keys.
  template <i32 kCount>
  FT_DEVICE static void store_rows(void* base, const Strides& strides, const Params& p, const KeyTile& tile,
                                   i32 j_begin, i32 num_columns, float factor, const float (&rD)[kCount]) {
    KeyRows<T, KvSource<false>> rows(static_cast<T*>(base), strides, p, tile.s, tile.kv_head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 j = j_begin + fragment_row() + 8 * r;
#pragma unroll
      for (i32 b = 0; b < kCount / 4; b += 4) {
        uint4 chunk = packed_chunk<T>(rD, b, r, factor);
        i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
        if (j < tile.s.seqlen_k && column < num_columns) *reinterpret_cast<uint4*>(rows.row(j) + column) = chunk;
      }
    }
  }

  FT_DEVICE static void consume(const BwdSm90Params& params, Storage& shared, const KeyTile& tile, i32 consumer) {
    const Params& p = params.base;
    const Sequence& s = tile.s;
    auto num_tiles = [&] { return tile.num_tiles(); };
    auto j_begin = [&] { return tile.j_begin + 64 * consumer; };
    float rdK[Config::kHeadDim / 2], rdV[Config::kHeadDimV / 2];
    u32 packed_p[kScores / 2], packed_ds[kScores / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdK[x] = 0.0f;
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDimV / 2; ++x) rdV[x] = 0.0f;

    // Tile bases of the operands
    auto k_tile = [&](i32 slab) { return tile_base(shared.sK + slab * kBlockN * 64, kBlockN * 128); };
    auto k_rows = [&] { return tile_base(shared.sK + 64 * 64 * consumer, kBlockN * 128); };
    auto v_rows = [&] { return tile_base(shared.sV + 64 * 64 * consumer, kBlockN * 128); };
    auto q_tile = [&](u32 count) { return tile_base(shared.sQ[Stages::stage(count)], kBlockM * 128); };
    auto do_tile = [&](u32 count) { return tile_base(shared.sdO[Stages::stage(count)], kBlockM * 128); };
    auto ds_tile = [&](u32 count) {
      i32 slab = Config::kSplitsDqRows ? consumer : 0;
      return tile_base(shared.sdS[Buffers::stage(count)] + slab * kBlockN * 64, kBlockN * 128);
    };

    auto i_begin = [&](u32 count) { return shared.queries[count % kNumQueryTiles].i_begin; };
    // Wait for Q and dO of tile number count
    auto wait_operands = [&](u32 count) {
      Stages::wait_full(shared.full, count);
      if constexpr (SeqInfo::kHasLengths) {
        i32 num_rows = s.seqlen_q - i_begin(count);
        if (num_rows < kBlockM) {
          clear_tail<kBlockM, Config::kSlabsQK>(shared.sQ[Stages::stage(count)], num_rows, consumer);
          clear_tail<kBlockM, Config::kSlabsV>(shared.sdO[Stages::stage(count)], num_rows, consumer);
        }
      }
    };
    // Start S^T = K Q^T
    auto start_s = [&](u32 count, float (&rS)[kScores]) {
      gemm_abt<T, kBlockM, Config::kHeadDim, kBlockN>(rS, k_rows(), q_tile(count));
    };
    // Start dP^T = V dO^T
    auto start_dp = [&](u32 count, float (&rdP)[kScores]) {
      gemm_abt<T, kBlockM, Config::kHeadDimV, kBlockN>(rdP, v_rows(), do_tile(count));
    };
    // Load what P^T of tile number count needs
    auto load_lse = [&](u32 count, Stats& lse) {
      if constexpr (!Options::kChangesTiles) {
        load_first_chunks(shared.lse[Stages::stage(count)], lse);
      }
      return shared.queries[count % kNumQueryTiles].is_checked[consumer] != 0;
    };
    auto load_bits = [&](u32 count) {
      return Options::load_bits(p, shared.options, s, consumer, count, shared.queries[count % kNumQueryTiles].head,
                                i_begin(count), j_begin());
    };
    // From S^T and dP^T, both in flight, to P^T and dS^T; stores dS^T for both consumers
    auto differentiate_tile = [&](u32 count, bool is_checked, Stats& lse, const OptionBits& bits, float (&rS)[kScores],
                                  float (&rdP)[kScores]) {
      u32 stage = Stages::stage(count);
      if constexpr (Options::kChangesTiles) {
        Options options(p, shared.options, s, consumer, count, shared.queries[count % kNumQueryTiles].head,
                        i_begin(count), j_begin(), bits, shared.lse[stage]);
        wgmma_wait<1>();
        pin_registers(rS);
        auto differentiate = [&](auto checked, auto masked, const Range(&seen)[2]) {
          options.template differentiate<decltype(checked)::kValue, decltype(masked)::kValue>(
              seen, shared.lse[stage], shared.delta[stage], rS, rdP, packed_p, packed_ds);
        };
        if (is_checked || options.needs_exact_tanh()) {
          Range seen[2];
#pragma unroll
          for (i32 r = 0; r < 2; ++r) {
            seen[r] = seen_columns(p, s, i_begin(count) + fragment_column(), j_begin() + fragment_row() + 8 * r);
          }
          differentiate(Constant<true>(), Constant<Mask::kHasBool>(), seen);
        } else if (Mask::kHasBool && bits.is_masked) {
          differentiate(Constant<false>(), Constant<Mask::kHasBool>(), {});
        } else {
          differentiate(Constant<false>(), Constant<false>(), {});
        }
      } else {
        Stats delta;
        // Compute P^T while dP^T is in flight
        mark(Phase::wait_scores, count);
        wgmma_wait<1>();
        pin_registers(rS);
        mark(Phase::exponentials, count);
        if (is_checked) {
          exponentiate<true>(p, s, i_begin(count), j_begin(), shared.lse[stage], lse, rS);
        } else {
          exponentiate<false>(p, s, i_begin(count), j_begin(), shared.lse[stage], lse, rS);
        }
        // Compute dS^T
        load_first_chunks(shared.delta[stage], delta);
        mark(Phase::wait_dp, count);
        wgmma_wait<0>();
        pin_registers(rdP);
        mark(Phase::gradient, count);
        differentiate(shared.delta[stage], delta, rS, rdP, packed_p, packed_ds);
      }
      // Store dS^T for both consumers
      Buffers::wait_empty(shared.empty_ds, count);
      store_fragment<kBlockN>(shared.sdS[Buffers::stage(count)] + 64 * 64 * consumer, packed_ds);
    };
    // Start dV += P^T dO
    auto start_dv = [&](u32 count) { gemm_ab<T, Config::kHeadDimV, kBlockM>(rdV, packed_p, do_tile(count)); };
    // Start dK += dS^T Q
    auto start_dk = [&](u32 count) { gemm_ab<T, Config::kHeadDim, kBlockM>(rdK, packed_ds, q_tile(count)); };
    auto release_operands = [&](u32 count) {
      pin_registers(rdV);
      pin_registers(rdK);
      release_stage(shared.empty[Stages::stage(count)]);
    };
    // Start dQ = dS K
    auto start_dq = [&](u32 count, float (&rdQ)[kColumnsDq / 2]) {
      if (has_dq(consumer, count)) {
        gemm_atb<T, kColumnsDq, kBlockN>(rdQ, ds_tile(count), k_tile(Config::kSplitsDqColumns ? consumer : 0));
      } else {
        wgmma_fence();
        wgmma_commit();
      }
    };

    if (num_tiles() > 0) {
      mbarrier_wait(shared.full_k, 0);
      mbarrier_wait(shared.full_v, 0);
      if constexpr (SeqInfo::kHasLengths) {
        i32 num_rows = s.seqlen_k - tile.j_begin;
        if (num_rows < kBlockN) {
          clear_tail<kBlockN, Config::kSlabsQK>(shared.sK, num_rows, consumer);
          clear_tail<kBlockN, Config::kSlabsV>(shared.sV, num_rows, consumer);
        }
      }
      // The first turn is consumer 0's
      if (consumer == 1) give_turn(1 - consumer);
      wait_operands(0);
      {
        float rS[kScores], rdP[kScores];
        Stats lse;
        bool is_checked = load_lse(0, lse);
        OptionBits bits = load_bits(0);
        wait_turn(consumer);
        start_s(0, rS);
        start_dp(0, rdP);
        give_turn(1 - consumer);
        differentiate_tile(0, is_checked, lse, bits, rS, rdP);
      }
      u32 count = 0;
      auto step = [&](auto is_first) {
        float rS[kScores], rdP[kScores];
        // Wait for Q and dO, then for this consumer's turn: the other consumer has stored its dS of the tile before
        mark(Phase::wait_tile, count + 1);
        wait_operands(count + 1);
        Stats lse;
        bool is_checked = load_lse(count + 1, lse);
        OptionBits bits = load_bits(count + 1);
        mark(Phase::wait_turn, count + 1);
        wait_turn(consumer);
        mark(Phase::issue, count + 1);
        // Start dV and dK of this tile, dQ of the tile before and, once P^T has left the registers, S^T of the next
        // tile
        start_dv(count);
        start_dk(count);
        if constexpr (decltype(is_first)::kValue) {
          wgmma_wait<0>();
          release_operands(count);
          start_s(count + 1, rS);
        } else {
          float rdQ[kColumnsDq / 2];
          start_dq(count - 1, rdQ);
          mark(Phase::wait_output, count + 1);
          wgmma_wait<1>();
          release_operands(count);
          mark(Phase::issue_scores, count + 1);
          start_s(count + 1, rS);
          // Hand over dQ; dP^T takes its registers
          mark(Phase::wait_dq, count + 1);
          wgmma_wait<1>();
          pin_registers(rdQ);
          mark(Phase::store, count + 1);
          if (!Options::kChangesTiles || count > 0) stage_dq(shared, consumer, count - 1, rdQ);
        }
        start_dp(count + 1, rdP);
        give_turn(1 - consumer);
        differentiate_tile(count + 1, is_checked, lse, bits, rS, rdP);
        mark(Phase::end, count + 1);
        ++count;
      };
      // With options a copy would spill: there dQ of the first step comes from uninitialised dS and is not staged
      if constexpr (!Options::kChangesTiles)
        if (num_tiles() > 1) step(Constant<true>());
      while (count + 1 < num_tiles()) step(Constant<false>());
      // The last tile, then a turn more for its dQ. Parts of dQ are staged in the order of turns.
      float rdQ[kColumnsDq / 2];
      wait_turn(consumer);
      start_dv(count);
      start_dk(count);
      start_dq(count - 1, rdQ);
      wgmma_wait<0>();
      pin_registers(rdV);
      pin_registers(rdK);
      pin_registers(rdQ);
      if (count > 0) stage_dq(shared, consumer, count - 1, rdQ);
      give_turn(1 - consumer);
      wait_turn(consumer);
      start_dq(count, rdQ);
      wgmma_wait<0>();
      pin_registers(rdQ);
      stage_dq(shared, consumer, count, rdQ);
      if (consumer == 0) give_turn(1 - consumer);
    }
    // Store dK and dV
    store_rows(p.dk, p.dk_strides, p, tile, j_begin(), p.head_dim, p.scale, rdK);
    store_rows(p.dv, p.dv_strides, p, tile, j_begin(), p.head_dim_v, Options::dv_factor(p), rdV);
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_sm90_kernel(const FT_GRID_CONSTANT BwdSm90Params params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "TMA reads neither pages nor unaligned rows");
  using Kernel = BwdSm90<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) {
    Kernel::init(shared);
    shared.tile = KeyTile::find_in_order<Config::kBlockM, Config::kBlockN, Mask, SeqInfo>(params.base);
    if constexpr (mutates(Mutation::bwd_sm90_group)) shared.tile.num_heads = 1;
  }
  __syncthreads();
  const KeyTile& tile = shared.tile;
  if (!tile.has_keys()) return;
  if constexpr (Mask::kHasBool) {
    // Skip queries that see none of the block's keys. In a fixed order of sums other blocks wait for all of them.
    if (params.base.dq_order == nullptr) {
      if (threadIdx.x < 32) {
        Range seen = Kernel::Options::visible_tiles(params.base, tile);
        __syncwarp();
        if (threadIdx.x == 31) shared.tile.m_begin = seen.begin, shared.tile.m_end = seen.end;
      }
      __syncthreads();
    }
  }

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kNumConsumers) {
    lower_registers<Kernel::Options::kProducerRegisters>();
    i32 warp = uniform(threadIdx.x / 32 % 4);
    if (warp == 0 && elect_lane()) {
      // Without queries the maps are empty
      if (tile.has_queries()) Kernel::produce(params, shared, tile);
    } else if (warp == 1) {
      Kernel::produce_stats(params.base, shared, tile);
    } else if (warp == 2 && elect_lane()) {
      Kernel::reduce_dq(params.base, shared, tile);
    } else if (warp == 3) {
      u32 count = 0;
      Kernel::Options::produce(params.base, shared.options, tile, 1, count);
    }
  } else {
    raise_registers<Kernel::Options::kConsumerRegisters>();
    Kernel::consume(params, shared, tile, warpgroup);
  }
}

}  // namespace flashtile
