// Attention forward in float32 on Hopper: wgmma products of split operands (sm90_f32/split_operand.cuh), one producer
// and 1 to 3 consumer warpgroups, a persistent grid. docs/float32.md.
//
// Threads:   warpgroups 0 .. kNumConsumers - 1 are consumers; each owns 64 queries from scores to output. One lane of
//            the last warpgroup is the producer: it finds the work items and issues every copy. setmaxnreg moves
//            registers from the producer's warpgroup to the consumers.
// Shared:    sQ [consumer][part][slab][64][64], sK, sV [stage][part][slab][kBlockN][64]; the barriers; the tile
//            scheduler; three work items. Tiles come split and swizzled (sm90_f32/split_tiles.cuh), by one bulk copy
//            each.
// Barriers:  as in fwd_sm90.cuh.
// Mainloop:  S = Q K^T; softmax; P split in registers; T = P V; O = alpha O + T. Tensor cores truncate their sums, so
//            each key tile starts a new accumulator T, and O is summed in float32. As in fwd_sm90.cuh, S of a tile and
//            T of the one before it are in flight together, and consumers issue their products in turn.
// Epilogue:  O leaves by 8-byte stores from registers, or element by element where rows are not aligned.
// Refuses:   pages.
#pragma once

#include "device/attn/dropout.cuh"
#include "device/attn/merge.cuh"
#include "device/attn/online_softmax.cuh"
#include "device/attn/score_fragment.cuh"
#include "device/attn/work_item.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/bulk.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/pipeline.cuh"
#include "families/sm90_f32/config.cuh"
#include "families/sm90_f32/split_tiles.cuh"

namespace flashtile {

template <class Config, class Mask, class SeqInfo>
struct alignas(1024) FwdSm90F32Storage {
  u16 sQ[Config::kNumConsumers][Config::kElementsQ];
  u16 sK[Config::kNumStages][Config::kElementsK];
  u16 sV[Config::kNumStages][Config::kElementsV];
  u64 full_q[Config::kNumConsumers], empty_q[Config::kNumConsumers];
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  TileScheduler<Mask, SeqInfo, Config::kPacksHeads> scheduler;
  WorkItemRing<WorkItem<Config, Mask, SeqInfo>> work_items;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct FwdSm90F32 {
  using Parts = typename Config::Parts;
  using Storage = FwdSm90F32Storage<Config, Mask, SeqInfo>;
  using Stages = Ring<Config::kNumStages>;
  using Tile = QueryTile<Config, Mask, SeqInfo>;
  using Item = WorkItem<Config, Mask, SeqInfo>;
  using Rows = FragmentRows<Config>;
  static constexpr bool kTakesTurns = Config::kNumConsumers > 1;
  // Lazily: O and l are rescaled only where a probability would exceed 2, so that rounding errors do not add up
  using Softmax = OnlineSoftmax<true, ScoreMod::kIsNatural, 1>;
  static constexpr bool kIsHalf = Config::kIsHalf;
  static constexpr bool kIsNatural = ScoreMod::kIsNatural;
  static constexpr i32 kBlockN = Config::kBlockN, kNumParts = Config::kNumParts;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per thread
  static constexpr bool kMasksAlways = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  // half_t parts lose what is below 2^-24. P is at most 2.
  static constexpr float kScaleP = kIsHalf ? 8192.0f : 1.0f;

  // What undoes the scales of the operands, powers of two, and what turns S into exponents of 2. Scope: thread.
  struct Scales {
    float unscale_s = 1.0f, unscale_o = 1.0f / kScaleP, factor;

    FT_DEVICE Scales(const Params& p, const SplitRange* found) {
      if constexpr (kIsHalf) {
        const SplitRange& range = *found;
        unscale_s = power_of_two(-scale_exponent(range, Operand::q) - scale_exponent(range, Operand::k));
        unscale_o *= power_of_two(-scale_exponent(range, Operand::v));
      }
      // Score modifiers return scores in their unit; without them S stays a dot product. The factor stays positive: its
      // product with a masked score, -inf, must not be NaN.
      constexpr float kSmallestFloat = 1.40129846e-45f;
      factor = ScoreMod::kChangesScores ? exponent_factor(kIsNatural) : fmaxf(p.scale_log2 * unscale_s, kSmallestFloat);
    }
  };

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(const Params& p, Storage& shared) {
    constexpr i32 kConsumerWarps = 4 * Config::kNumConsumers;
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      mbarrier_init(shared.full_q[consumer], 1);
      mbarrier_init(shared.empty_q[consumer], 4);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_k[stage], 1);
      mbarrier_init(shared.full_v[stage], 1);
      mbarrier_init(shared.empty_k[stage], kConsumerWarps);
      mbarrier_init(shared.empty_v[stage], kConsumerWarps);
    }
    mbarrier_init_fence();
    fence_proxy_async();
    shared.scheduler.init(p, Config::kBlockM);
  }

  // ---- Producer. Scope: one thread.

  template <i32 kElements>
  FT_DEVICE static void load(u16* sTile, const u16* tile, u64& full) {
    mbarrier_arrive_expect(full, 2 * kElements);
    load_bulk(sTile, tile, 2 * kElements, full);
  }

  FT_DEVICE static void produce(const Sm90F32Params& params, Storage& shared) {
    const Params& p = params.base;
    const auto& scheduler = shared.scheduler;
    u32 num_k = 0, num_v = 0, num_items = 0;
    i32 block = Config::kBlockM;
    for (i32 index = scheduler.first(p, block);; index = scheduler.next(p, index, block)) {
      // Fill the next work item. Its slot is free: the producer has waited for the Q of item num_items - 2, which the
      // consumers release after they finish item num_items - 3.
      Item& item = shared.work_items.at(num_items);
      Tile& tile = item.tile;
      item.index = num_items;
      item.is_end = index >= scheduler.num_indices;
      bool is_end = item.is_end;
      if (!is_end) {
        tile = Tile(p, scheduler, index);
        if (!tile.has_queries()) continue;
      }
      i32 kv_head = tile.coord.head / (p.heads / p.heads_kv), first_k = 0;
      if constexpr (mutates(Mutation::fwd_sm90_f32_gqa_head)) kv_head = tile.coord.head % p.heads_kv;
      if (!is_end) first_k = first_key_tile<kBlockN>(p, tile.s, kv_head);
      auto load_k = [&](i32 n) {
        u32 stage = Stages::stage(num_k);
        Stages::wait_empty(shared.empty_k, num_k++);
        const u16* source = params.k_parts + static_cast<i64>(first_k + n) * Config::kElementsK;
        load<Config::kElementsK>(shared.sK[stage], source, shared.full_k[stage]);
      };
      auto load_v = [&](i32 n) {
        u32 stage = Stages::stage(num_v);
        Stages::wait_empty(shared.empty_v, num_v++);
        const u16* source = params.v_parts + static_cast<i64>(first_k + n) * Config::kElementsV;
        load<Config::kElementsV>(shared.sV[stage], source, shared.full_v[stage]);
      };
      // Load the first K tile
      bool has_keys = !is_end && tile.has_keys();
      if (has_keys) load_k(tile.n_end - 1);
      // Find the key tiles of each consumer
      for (i32 consumer = 0; consumer < Config::kNumConsumers && !is_end; ++consumer) {
        item.consumers[consumer] = ConsumerTiles::find(p, tile, tile.i_begin + 64 * consumer);
      }
      // Load Q, consumer by consumer. full_q also publishes the work item, so it completes without a Q too.
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        mbarrier_wait(shared.empty_q[consumer], num_items % 2 ^ 1);
        i32 i_first = is_end ? 0 : tile.i_begin + 64 * consumer;
        if (has_keys && i_first >= 0 && i_first < tile.s.seqlen_q) {
          i64 index = first_query_tile(p, tile.s, tile.coord.head) + i_first / 64;
          const u16* source = params.q_parts + index * Config::kElementsQ;
          load<Config::kElementsQ>(shared.sQ[consumer], source, shared.full_q[consumer]);
        } else {
          mbarrier_arrive(shared.full_q[consumer]);
        }
      }
      ++num_items;
      if (is_end) return;
      if (!has_keys) continue;
      // Load the other tiles in the order in which the consumers use them
      for (i32 n = tile.n_end - 2; n >= tile.n_begin; --n) {
        load_k(n);
        load_v(n + 1);
      }
      load_v(tile.n_begin);
      num_v = num_k;  // one register less
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Ping-pong: the turn goes round the consumers; each takes one per key tile of a work item, except for the first
  // tile.
  FT_DEVICE static void signal_next(i32 consumer) { give_turn<kTakesTurns>((consumer + 1) % Config::kNumConsumers); }

  // Applies score modifiers and mask to a tile of scores; unscale undoes the scales of Q and K.
  FT_DEVICE static void modify_tile(const Params& p, const Tile& tile, i32 consumer, i32 j_begin, float unscale,
                                    float (&rS)[kScores]) {
    if constexpr (kIsHalf && ScoreMod::kChangesScores) {
#pragma unroll
      for (i32 x = 0; x < kScores; ++x) rS[x] *= unscale;
    }
    flashtile::modify_tile<Mask, ScoreMod>(p, tile, Rows(p, tile, consumer), j_begin, rS);
  }

  // Applies dropout and splits P.
  FT_DEVICE static void split_probabilities(const Params& p, const Tile& tile, i32 consumer, i32 j_begin,
                                            float (&rS)[kScores], u32 (&rP)[kNumParts][kScores / 2]) {
    if constexpr (Dropout::kIsOn) drop_tile(p, tile, Rows(p, tile, consumer), j_begin, rS);
#pragma unroll
    for (i32 x = 0; x < kScores / 2; ++x) {
      u32 parts[kNumParts];
      Parts::split(rS[2 * x] * kScaleP, rS[2 * x + 1] * kScaleP, parts);
#pragma unroll
      for (i32 part = 0; part < kNumParts; ++part) rP[part][x] = parts[part];
      if constexpr (mutates(Mutation::fwd_sm90_f32_low_part)) rP[kNumParts - 1][x] = 0;
    }
  }

  // Starts S = Q K^T. In two half_t parts over more than 128 columns it has several chains of sums, and is done here.
  FT_DEVICE static void start_scores(float (&rS)[kScores], u32 q, u32 k) {
    if constexpr (kIsHalf && kNumParts == 2 && Config::kHeadDim > 128) {
      static_assert(!Config::kOverlaps);
      // With options the descriptors of a longer chain would spill
      constexpr i32 kChain = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn ? 64 : 128;
      gemm_abt_chains<Parts, kBlockN, Config::kHeadDim, kChain, 1>(rS, q, k);
    } else {
      gemm_abt_split<Parts, kBlockN, Config::kHeadDim>(rS, q, k);
    }
  }

  // Processes the key tiles of one work item. num_k counts the tiles so far.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Item& item, i32 consumer, u32& num_k,
                                 float factor, float unscale, Softmax& softmax, float (&rO)[kOutputs]) {
    const Tile& tile = item.tile;
    const ConsumerTiles& tiles = item.consumers[consumer];
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= tiles.unmasked.end || n < tiles.unmasked.begin; };
    i32 n = tile.n_end - 1;

    // Skip tiles that are fully masked for this consumer: release their stages unread and signal the next warpgroup.
    // The lanes leave each wait together, as in wait_item.
    for (; n >= tiles.n_end && n >= tile.n_begin; --n, ++num_k) {
      Stages::wait_full(shared.full_k, num_k);
      __syncwarp();
      release_stage(shared.empty_k[Stages::stage(num_k)]);
      Stages::wait_full(shared.full_v, num_k);
      __syncwarp();
      release_stage(shared.empty_v[Stages::stage(num_k)]);
      if (n > tile.n_begin) {
        wait_turn<kTakesTurns>(consumer);
        signal_next(consumer);
      }
    }
    if (n < tile.n_begin) {
      release_stage(shared.empty_q[consumer]);
      return;
    }

    u32 rP[kNumParts][kScores / 2];
    // The operands in shared memory
    auto q_tile = [&] { return opaque(tile_base(shared.sQ[consumer], 64 * 128)); };
    auto k_tile = [&](u32 count) { return opaque(tile_base(shared.sK[Stages::stage(count)], kBlockN * 128)); };
    auto v_tile = [&](u32 count) { return opaque(tile_base(shared.sV[Stages::stage(count)], kBlockN * 128)); };
    // Release K once its scores are computed, and Q after the last tile
    auto release_operands = [&] {
      release_stage(shared.empty_k[Stages::stage(num_k)]);
      if (n == tile.n_begin) release_stage(shared.empty_q[consumer]);
    };
    // T = P V is computed in chunks of kColumns columns and at most 64 keys, over which truncation stays small. Start
    // chunk number `chunk`.
    constexpr i32 kChunkKeys = kBlockN < 64 ? kBlockN : 64, kChunkColumns = Config::kHeadDimV / Config::kColumns;
    constexpr i32 kNumChunks = kBlockN / kChunkKeys * kChunkColumns;
    auto start_pv = [&](float (&rT)[Config::kColumns / 2], u32 v, i32 chunk) {
      constexpr i32 kSlab = kBlockN * 128 >> 4;
      i32 key = chunk / kChunkColumns * kChunkKeys, column = chunk % kChunkColumns * Config::kColumns;
      gemm_ab_split<Parts, Config::kColumns, kChunkKeys>(rT, rP, key / 16, v + column / 64 * kSlab + key * (128 >> 4),
                                                         Config::kSlabsV * kSlab);
    };
    // Wait for the first chunk of T, and for the others one after the other: O = alpha O + T. Release V.
    auto finish_pv = [&](float (&rT)[Config::kColumns / 2], u32 v, u32 count, float alpha0, float alpha1) {
#pragma unroll
      for (i32 chunk = 0; chunk < kNumChunks; ++chunk) {
        if (chunk > 0) start_pv(rT, v, chunk);
        wgmma_wait<0>();
        pin_registers(rT);
        if (chunk == kNumChunks - 1) release_stage(shared.empty_v[Stages::stage(count)]);
#pragma unroll
        for (i32 x = 0; x < Config::kColumns / 2; ++x) {
          float& o = rO[chunk % kChunkColumns * Config::kColumns / 2 + x];
          float alpha = x / 2 % 2 == 0 ? alpha0 : alpha1;
          o = chunk < kChunkColumns ? fmaf(o, alpha, rT[x]) : o + rT[x];
        }
      }
    };

    // First tile: S = Q K^T, softmax
    {
      float rS[kScores];
      Stages::wait_full(shared.full_k, num_k);
      start_scores(rS, q_tile(), k_tile(num_k));
      wgmma_wait<0>();
      pin_registers(rS);
      release_operands();
      if (needs_mask(n)) modify_tile(p, tile, consumer, n * kBlockN, unscale, rS);
      softmax.template raise_maximum<true, true>(factor, rS);
      softmax.template exponentiate<true, true>(factor, rS);
      split_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
      ++num_k;
    }

    // Other tiles: S of this tile and T = P V of the tile before it, in flight together
    auto step = [&](auto is_masked) {
      constexpr bool kIsMasked = decltype(is_masked)::kValue;
      float rS[kScores], rT[Config::kColumns / 2];
      // Issue both products in this consumer's turn
      u32 q = q_tile(), k = k_tile(num_k), v = v_tile(num_k - 1);
      Stages::wait_full(shared.full_k, num_k);
      wait_turn<kTakesTurns>(consumer);
      if constexpr (Config::kOverlaps) start_scores(rS, q, k);
      Stages::wait_full(shared.full_v, num_k - 1);
      start_pv(rT, v, 0);
      float alpha0 = softmax.alpha[0], alpha1 = softmax.alpha[1];  // of T's tile
      if constexpr (mutates(Mutation::fwd_sm90_f32_rescale)) alpha0 = alpha1 = 1.0f;
      if constexpr (!Config::kOverlaps) {
        finish_pv(rT, v, num_k - 1, alpha0, alpha1);
        start_scores(rS, q, k);
      }
      signal_next(consumer);
      // Wait for S; mask it and raise the maximum while T is in flight
      wgmma_wait<Config::kOverlaps ? 1 : 0>();
      pin_registers(rS);
      release_operands();
      if constexpr (kIsMasked) modify_tile(p, tile, consumer, n * kBlockN, unscale, rS);
      softmax.template raise_maximum<false, kIsMasked>(factor, rS);
      // Wait for T before the exponentials, not after: splitting P overwrites what T reads
      if constexpr (Config::kOverlaps) finish_pv(rT, v, num_k - 1, alpha0, alpha1);
      softmax.template exponentiate<false, kIsMasked>(factor, rS);
      split_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
      ++num_k;
    };
    for (--n; n >= tile.n_begin; --n) {
      // Without a band only the first tile needs a mask
      if constexpr (Mask::kHasBand && !kMasksAlways) {
        if (needs_mask(n)) {
          step(Constant<true>());
          continue;
        }
      }
      step(Constant<kMasksAlways>());
    }

    // Add the last T
    float rT[Config::kColumns / 2];
    u32 v = v_tile(num_k - 1);
    Stages::wait_full(shared.full_v, num_k - 1);
    start_pv(rT, v, 0);
    finish_pv(rT, v, num_k - 1, softmax.alpha[0], softmax.alpha[1]);
  }

  // Finishes the softmax, normalises and stores O and lse; of a split the sum of P V, m and l. unscale undoes the
  // scales of P and V, and has dropout's keep factor. Scope: warp.
  FT_DEVICE static void epilogue(const Params& p, const Tile& tile, i32 consumer, float factor, float unscale,
                                 const Softmax& softmax, float (&rO)[kOutputs]) {
    Rows rows(p, tile, consumer);
    bool is_split = p.num_splits > 1;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = rows.i[r], head = rows.head(tile, r);
      bool is_query = rows.is_query(tile, r);
      // Store the statistics
      float sink = p.sinks == nullptr || is_split ? -infinity() : in_score_unit(kIsNatural, p.sinks[head]);
      float m = ScoreMod::kChangesScores ? softmax.m[r] : softmax.m[r] * factor;
      RowStats stats = join_sink<kIsNatural>(m, softmax.l[r], sink, [](float l) { return quad_sum(l); });
      i64 stat = stat_index(p, tile.s, head, i), part = tile.coord.split * p.lse_size + stat;
      if (is_query && threadIdx.x % 4 == 0) store_stats<kIsNatural>(p, is_split, part, stat, stats.m, stats.l);
      // Store O. It is multiplied by norm and by unscale one after the other: their product may be denormal.
      float norm = is_split ? 1.0f : stats.norm();
#pragma unroll
      for (i32 b = 0; b < kOutputs / 4; ++b) rO[4 * b + 2 * r] *= norm, rO[4 * b + 2 * r + 1] *= norm;
      float* gO = is_split
                      ? p.partial_out + part * p.head_dim_v
                      : query_rows(static_cast<float*>(p.out), p.out_strides, tile.s, head) + i * p.out_strides.row;
      if constexpr (Load::kIsAligned16) {
        store_row_float(gO, is_query, p.head_dim_v, r, unscale, rO);
      } else {
        store_row_elements(gO, is_query, p.head_dim_v, r, unscale, rO);
      }
    }
  }

  FT_DEVICE static void consume(const Sm90F32Params& params, Storage& shared, i32 consumer) {
    const Params& p = params.base;
    Scales scales(p, params.range);
    u32 num_k = 0;
    // The first turn is consumer 0's
    if (consumer == Config::kNumConsumers - 1) signal_next(consumer);
    const Item* item = &shared.work_items.at(0);
    wait_item(shared.full_q[consumer], 0);
    while (!item->is_end) {
      Softmax softmax;
      float rO[kOutputs];
#pragma unroll
      for (i32 x = 0; x < kOutputs; ++x) rO[x] = 0.0f;
      if (item->tile.has_keys()) {
        mainloop(p, shared, *item, consumer, num_k, scales.factor, scales.unscale_s, softmax, rO);
      } else {
        release_stage(shared.empty_q[consumer]);
      }
      epilogue(p, item->tile, consumer, scales.factor, scales.unscale_o * keep_factor<Dropout>(p), softmax, rO);
      // Wait for the next work item
      u32 next = item->index + 1;
      wait_item(shared.full_q[consumer], next);
      item = &shared.work_items.at(next);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
FT_DEVICE void run_fwd_sm90_f32(const Sm90F32Params& params) {
  using Kernel = FwdSm90F32<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) Kernel::init(params.base, shared);
  __syncthreads();

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kNumConsumers) {
    lower_registers<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 4 * Config::kNumConsumers && elect_lane()) Kernel::produce(params, shared);
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(params, shared, warpgroup);
  }
}

// Both kernels are launched; the numbers of the call decide which of them does the work.
template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_f32_half_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 == 0) run_fwd_sm90_f32<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_f32_bf16_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(!Config::kIsHalf && !KvSource::kIsPaged);
  if (params.range->needs_bf16 != 0) run_fwd_sm90_f32<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>(params);
}

}  // namespace flashtile
