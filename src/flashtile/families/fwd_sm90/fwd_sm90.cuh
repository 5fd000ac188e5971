// Attention forward on Hopper: wgmma products, TMA loads, one producer and 1 to 3 consumer warpgroups, a persistent
// grid.
//
// Threads:   warpgroups 0 .. kNumConsumers - 1 are consumers; each owns 64 queries from scores to output. One lane of
//            the last warpgroup is the producer: it finds the work items and issues every copy. Paged keys are copied
//            by all of its warps (attn/paged_keys.cuh). setmaxnreg moves registers from the producer's
//            warpgroup to the consumers.
// Shared:    sQ, sP [consumer][slab][64][64] and sK, sV [stage][slab][kBlockN][64], 128-byte swizzled slabs of 64
//            columns; the barriers; the tile scheduler; three work items.
// Barriers:  full_* complete by copied bytes, empty_* by one arrival per consumer warp. K and V have separate rings.
//            Each consumer has its own Q, so its next Q loads as soon as it has its last scores. A work item arrives
//            with Q.
// Mainloop:  FlashAttention-3, section 3.2. S(n) = Q K(n)^T and O += P(n+1) V(n+1) are in flight together, and the
//            softmax of S(n) overlaps the second product. Consumers issue their products in turn (ping-pong). Key tiles
//            go from last to first; masked tiles run a separate loop body.
// Epilogue:  O leaves by TMA through sP where P is in shared memory, else by 16-byte stores from registers.
// Refuses:   unaligned rows; pages together with a bias or a bool mask.
#pragma once

#include "device/attn/dropout.cuh"
#include "device/attn/lazy_softmax.cuh"
#include "device/attn/merge.cuh"
#include "device/attn/online_softmax.cuh"
#include "device/attn/paged_keys.cuh"
#include "device/attn/score_fragment.cuh"
#include "device/attn/unused_rows.cuh"
#include "device/attn/work_item.cuh"
#include "device/core/mutation.cuh"
#include "device/core/timeline.cuh"
#include "device/ptx/tma.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/pipeline.cuh"
#include "device/tile/smem_tile.cuh"
#include "device/tile/wgmma_gemm.cuh"
#include "families/fwd_sm90/config.cuh"
#include "families/fwd_sm90/options.cuh"
#include "families/fwd_sm90/params.cuh"

namespace flashtile {

template <class Config, class Mask, class ScoreMod, class SeqInfo>
struct alignas(1024) FwdSm90Storage {
  using T = typename Config::Element;
  // Not with masks, score modifiers and lengths: the producer has no registers for it
  static constexpr bool kRotates =
      !Mask::kHasBand && !Mask::kHasBool && !ScoreMod::kChangesScores && !SeqInfo::kHasLengths && !Config::kPacksHeads;
  T sQ[Config::kNumConsumers][Config::kElementsQ];
  T sK[Config::kNumStages][Config::kElementsK];
  T sV[Config::kNumStages][Config::kElementsV];
  T sP[Config::kNumConsumers][Config::kElementsP];
  u64 full_q[Config::kNumConsumers], empty_q[Config::kNumConsumers];
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  TileScheduler<Mask, SeqInfo, Config::kPacksHeads, ScoreMod::kHasBias, kRotates> scheduler;
  WorkItemRing<WorkItem<Config, Mask, SeqInfo>> work_items;
  FwdBiasTiles<Config, typename ScoreMod::BiasElement> bias;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource>
struct FwdSm90 {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using Storage = FwdSm90Storage<Config, Mask, ScoreMod, SeqInfo>;
  using Options = FwdSm90Options<Config, Mask, ScoreMod, SeqInfo>;
  using Walk = TileWalk<Mask::kHasBool>;
  using Stages = KeyRing<Config::kNumStages, KvSource::kIsPaged>;
  using Pages = PagedKeys<Config::kBlockN, 4, false, (Config::kNumConsumers > 2)>;
  using Tile = QueryTile<Config, Mask, SeqInfo>;
  using Item = WorkItem<Config, Mask, SeqInfo>;
  using Packing = HeadPacking<Config>;
  using Rows = FragmentRows<Config>;
  static constexpr bool kIsNatural = ScoreMod::kIsNatural;
  static constexpr i32 kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per thread
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr bool kIsBranching = Config::kRescalesLazily && Config::kIsSoftmaxBound && !kHasOptions;
  using Softmax = typename SoftmaxKind<kIsBranching, Config::kRescalesLazily, ScoreMod::kIsNatural>::Type;
  // Under a band, unmasked tiles run a loop of their own
  static constexpr bool kSeparatesMasked = Mask::kHasBand && !kHasOptions && Config::kIsSoftmaxBound;
  // Unmasked tiles take the maxima of the tiles before: theirs are found only if probabilities grow. With 128 columns
  // the vote of the warpgroup costs more than that saves.
  static constexpr bool kGuessesMaximum = kIsBranching && Config::kHeadDimV <= 64;
  static_assert(!KvSource::kIsPaged || (!ScoreMod::kHasBias && !Mask::kHasBool), "all producer warps copy pages");
  // Registers per thread: warps that copy a bias or pages need more. Three consumers leave none to spare: there the
  // producer looks up no page ahead, and computes its counters again.
  static constexpr bool kSavesRegisters = KvSource::kIsPaged && Config::kNumConsumers > 2;
  static constexpr i32 kPageRegisters = KvSource::kIsPaged && Config::kNumConsumers == 2 ? 16 : 0;
  static constexpr i32 kProducerRegisters = Config::kProducerRegisters + (ScoreMod::kHasBias ? 16 : 0) + kPageRegisters;
  static constexpr i32 kConsumerRegisters = Config::consumer_registers(kProducerRegisters);
  // O leaves by TMA through sP. Not with packed sequences: a box does not end at a sequence's last row.
  static constexpr bool kStoresByTma = Config::kStoresP && !SeqInfo::kHasLengths && kIsSame<Out, T>;
  static_assert(!kStoresByTma || Config::kElementsP >= 64 * 64 * Config::kSlabsV);

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init_scheduler(const Params& p, Storage& shared) {
    shared.scheduler.init(p, Packing::block_queries(p));
  }

  FT_DEVICE static void init(const Params& p, Storage& shared) {
    constexpr i32 kConsumerWarps = 4 * Config::kNumConsumers;
    u32 num_producers = KvSource::kIsPaged ? Pages(p).num_arrivals() : 1;
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      mbarrier_init(shared.full_q[consumer], 1);
      mbarrier_init(shared.empty_q[consumer], 4);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_k[stage], num_producers);
      mbarrier_init(shared.full_v[stage], num_producers);
      mbarrier_init(shared.empty_k[stage], kConsumerWarps);
      mbarrier_init(shared.empty_v[stage], kConsumerWarps);
    }
    Options::init(shared.bias);
    mbarrier_init_fence();
    fence_proxy_async();
    init_scheduler(p, shared);
  }

  // ---- Producer. Scope: one thread; of paged keys the warpgroup, whose first thread does the rest.

  // Loads rows of one head. A map has size 1 along head or batch where the tensor's stride is 0 (broadcast or packed).
  template <i32 kRows, i32 kSlabs>
  FT_DEVICE static void load(T* sTile, const TensorMap& map, const Strides& strides, u64& full, i32 num_rows, i32 row,
                             i32 head, const Tile& tile) {
    i32 map_head = strides.head == 0 ? 0 : head, map_batch = strides.batch == 0 ? 0 : tile.coord.batch;
    load_slabs<kRows, kSlabs>(sTile, map, full, num_rows, row, map_head, map_batch);
  }

  // A tile of K or V, wherever the keys are.
  template <i32 kSlabs>
  FT_DEVICE static void load_keys(T* sTile, const TensorMap& map, const void* base, const Strides& strides,
                                  i32 num_columns, u64& full, i32 n, i32 head, const Tile& tile, const Pages& pages,
                                  typename Pages::Place place) {
    if constexpr (KvSource::kIsPaged) {
      pages.template copy<kSlabs>(sTile, map, static_cast<const T*>(base), strides, num_columns, full, place, head,
                                  tile.s.seqlen_k - n * kBlockN);
    } else {
      load<kBlockN, kSlabs>(sTile, map, strides, full, kBlockN, static_cast<i32>(tile.s.k_row) + n * kBlockN, head,
                            tile);
    }
  }

  FT_DEVICE static typename Pages::Place find_keys(const Pages& pages, const Tile& tile, i32 n) {
    if constexpr (KvSource::kIsPaged) return n >= tile.n_begin ? pages.find(tile.s, n) : typename Pages::Place{-1, 0};
    return {};
  }

  FT_DEVICE static void sync_producer() {
    if constexpr (KvSource::kIsPaged) named_barrier_sync(kProducerBarrier, 128);
  }

  FT_DEVICE static void produce(const FwdSm90Params& params, Storage& shared) {
    const Params& p = params.base;
    const auto& scheduler = shared.scheduler;
    Pages pages(p);
    auto is_first = [] { return !KvSource::kIsPaged || Pages::thread() % 128 == 0; };
    u32 num_k = 0, num_v = 0, num_items = 0;
    i32 block = Packing::block_queries(p);
    for (i32 index = scheduler.first(p, block);; index = scheduler.next(p, index, block)) {
      // Fill the next work item. Its slot is free: the producer has waited for the Q of item num_items - 2, which the
      // consumers release after they finish item num_items - 3.
      Item& item = shared.work_items.at(num_items);
      Tile& tile = item.tile;
      bool is_end = index >= scheduler.num_indices;
      sync_producer();
      if (is_first()) {
        item.index = num_items;
        item.is_end = is_end;
        if (!is_end) {
          i32 tile_index = index;
          if constexpr (mutates(Mutation::fwd_sm90_later_tile))
            tile_index = num_items == 3 ? scheduler.first(p, block) : index;
          tile = Tile(p, scheduler, tile_index);
          if (tile.has_queries()) Options::trim(params, item);
        }
      }
      sync_producer();
      if (!is_end && !tile.has_queries()) continue;
      i32 kv_head = tile.coord.head / (p.heads / p.heads_kv);
      if constexpr (mutates(Mutation::fwd_sm90_gqa_head)) kv_head = tile.coord.head % p.heads_kv;
      auto load_k = [&](i32 n, typename Pages::Place place) {
        u32 stage = Stages::stage(num_k);
        mark(Phase::wait_k_stage, num_k);
        Stages::wait_empty(shared.empty_k, num_k);
        mark(Phase::copy_k, num_k);
        load_keys<Config::kSlabsQK>(shared.sK[stage], params.k_map, p.k, p.k_strides, p.head_dim, shared.full_k[stage],
                                    n, kv_head, tile, pages, place);
        ++num_k;
      };
      auto load_v = [&](i32 n, typename Pages::Place place) {
        u32 stage = Stages::stage(num_v);
        mark(Phase::wait_v_stage, num_v);
        Stages::wait_empty(shared.empty_v, num_v);
        mark(Phase::copy_v, num_v);
        load_keys<Config::kSlabsV>(shared.sV[stage], params.v_map, p.v, p.v_strides, p.head_dim_v, shared.full_v[stage],
                                   n, kv_head, tile, pages, place);
        ++num_v;
      };
      // Load the first K tile
      bool has_keys = !is_end && tile.has_keys();
      typename Pages::Place place{}, ahead{};
      if (has_keys) {
        place = find_keys(pages, tile, tile.n_end - 1);
        if constexpr (!kSavesRegisters) ahead = find_keys(pages, tile, tile.n_end - 2);
        load_k(tile.n_end - 1, place);
      }
      // Find the key tiles of each consumer
      i32 num_heads = Packing::num_heads(p), num_queries = Packing::num_queries(p);
      for (i32 consumer = 0; consumer < Config::kNumConsumers && !is_end && is_first(); ++consumer) {
        item.consumers[consumer] = ConsumerTiles::find(p, tile, tile.i_begin + num_queries * consumer);
        if constexpr (Mask::kHasBool) {
          i32 i_first = tile.i_begin + num_queries * consumer;
          Range common = common_key_range<Mask>(p, tile.s, i_first, i_first + num_queries);
          item.consumers[consumer].unmasked.end = common.end / kBlockN;
        }
      }
      // Load Q, consumer by consumer. full_q also publishes the work item, so it completes without a Q too.
      for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        mbarrier_wait(shared.empty_q[consumer], num_items % 2 ^ 1);
        if (!is_first()) continue;
        if (has_keys) {
          load<64, Config::kSlabsQK>(
              shared.sQ[consumer], params.q_map, p.q_strides, shared.full_q[consumer], num_heads * num_queries,
              static_cast<i32>(tile.s.q_row) + tile.i_begin + num_queries * consumer, tile.coord.head, tile);
        } else {
          mbarrier_arrive(shared.full_q[consumer]);
        }
      }
      ++num_items;
      if (is_end) return;
      if (!has_keys) continue;
      if constexpr (kSavesRegisters) place = find_keys(pages, tile, tile.n_end - 1);
      // Load the other K and V tiles in the order in which the consumers use them; find pages one tile ahead
      if constexpr (Mask::kHasBool) {
        Walk walk = first_walk(item, 0);
        i32 before = tile.n_end - 1;
        for (i32 n = next_tile(item, 0, walk, before); n >= tile.n_begin; n = next_tile(item, 0, walk, n)) {
          load_k(n, place);
          load_v(before, place);
          before = n;
        }
      } else {
        for (i32 n = tile.n_end - 2; n >= tile.n_begin; --n) {
          typename Pages::Place next = kSavesRegisters ? find_keys(pages, tile, n) : ahead;
          if constexpr (!kSavesRegisters) ahead = find_keys(pages, tile, n - 1);
          load_k(n, next);
          if constexpr (kSavesRegisters) num_v = num_k - 2;  // K of tiles n + 1 and n is under way
          load_v(n + 1, place);
          place = next;
        }
      }
      if constexpr (kSavesRegisters) num_v = num_k - 1;
      load_v(tile.n_begin, place);
      if constexpr (kSavesRegisters) num_items = item.index + 1;
    }
  }

  // Copies the bias tiles of one consumer. Scope: warp.
  FT_DEVICE static void produce_bias(const FwdSm90Params& params, Storage& shared, i32 consumer) {
    u32 count = 0;
    for (u32 index = 0;; ++index) {
      wait_item(shared.full_q[consumer], index);
      const Item& item = shared.work_items.at(index);
      if (item.is_end) return;
      const Tile& tile = item.tile;
      if (!tile.has_keys()) continue;
      Walk walk = first_walk(item, consumer);
      for (i32 n = tile.n_end - 1; n >= tile.n_begin; n = next_tile(item, consumer, walk, n)) {
        if (n >= item.consumers[consumer].n_end) continue;
        Options::load_bias(params, shared.bias, tile, consumer, n, count++);
      }
    }
  }

  // ---- Key tiles of a work item. Scope: thread.

  FT_DEVICE static Walk first_walk(const Item& item, i32 consumer) {
    Walk walk;
    if constexpr (Mask::kHasBool) walk.visible = item.visible, walk.full = item.full[consumer];
    return walk;
  }
  FT_DEVICE static i32 next_tile(const Item& item, i32 consumer, Walk& walk, i32 n) {
    if constexpr (!Mask::kHasBool) {
      return n - 1;
    } else {
      return walk.next(n, item.tile.n_begin,
                       [&](i32 word) { return make_uint2(item.load_visible(word), item.load_full(consumer, word)); });
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Ping-pong: the turn goes round the consumers; each takes one per key tile of a work item, except for the first
  // tile.
  FT_DEVICE static void signal_next(i32 consumer) {
    give_turn<Config::kPingPong>((consumer + 1) % Config::kNumConsumers);
  }

  // Applies dropout and rounds P to 16 bits.
  FT_DEVICE static void pack_probabilities(const Params& p, const Tile& tile, i32 consumer, i32 j_begin,
                                           float (&rS)[kScores], u32 (&rP)[kScores / 2]) {
    if constexpr (Dropout::kIsOn) drop_tile(p, tile, Rows(p, tile, consumer), j_begin, rS);
#pragma unroll
    for (i32 x = 0; x < kScores / 2; ++x) rP[x] = pack_two<T>(rS[2 * x], rS[2 * x + 1]);
  }

  // Zeros V from row num_rows on: rows past the last key belong to another sequence, and 0 * NaN is NaN.
  FT_DEVICE static void clear_tail(T* sV, i32 num_rows, i32 consumer) {
    if constexpr (mutates(Mutation::fwd_sm90_tail)) num_rows = kBlockN;
    clear_rows<kBlockN, Config::kSlabsV>(sV, num_rows);
    named_barrier_sync(kConsumerBarrier + consumer, 128);
  }

  // Processes the key tiles of one work item. num_k counts the K tiles so far; V is one tile behind.
  FT_DEVICE static void mainloop(const FwdSm90Params& params, Storage& shared, const Item& item, i32 consumer,
                                 u32& num_k, u32& num_biases, float factor, Softmax& softmax, float (&rO)[kOutputs]) {
    const Params& p = params.base;
    const Tile& tile = item.tile;
    const ConsumerTiles& tiles = item.consumers[consumer];
    auto q_tile = [&] { return tile_base(shared.sQ[consumer], 64 * 128); };
    auto p_tile = [&] { return tile_base(shared.sP[consumer], 64 * 128); };
    auto k_tile = [&](u32 count) { return tile_base(shared.sK[Stages::stage(count)], kBlockN * 128); };
    auto v_tile = [&](u32 count) { return tile_base(shared.sV[Stages::stage(count)], kBlockN * 128); };
    Walk walk = first_walk(item, consumer);
    auto needs_mask = [&](i32 n) {
      if constexpr (Mask::kHasBool) {
        if (!walk.is_full(n)) return true;
      }
      return n >= tiles.unmasked.end || n < tiles.unmasked.begin;
    };
    i32 n = tile.n_end - 1;

    // Skip tiles that are fully masked for this consumer: release their stages unread and signal the next warpgroup.
    // The lanes leave each wait together, as in wait_item.
    for (; n >= tiles.n_end && n >= tile.n_begin;
         n = Mask::kHasBool ? next_tile(item, consumer, walk, n) : n - 1, ++num_k) {
      Stages::wait_full(shared.full_k, num_k);
      __syncwarp();
      release_stage(shared.empty_k[Stages::stage(num_k)]);
      Stages::wait_full(shared.full_v, num_k);
      __syncwarp();
      release_stage(shared.empty_v[Stages::stage(num_k)]);
      if (n > tile.n_begin) {
        wait_turn<Config::kPingPong>(consumer);
        signal_next(consumer);
      }
    }
    if (n < tile.n_begin) {
      release_stage(shared.empty_q[consumer]);
      return;
    }

    u32 rP[kScores / 2];
    // Release K once its scores are computed, and Q after the last tile
    auto release_operands = [&] {
      release_stage(shared.empty_k[Stages::stage(num_k)]);
      if (n == tile.n_begin) release_stage(shared.empty_q[consumer]);
    };
    // Start O += P V with the V tile number count
    auto start_pv = [&](u32 count) {
      if constexpr (Config::kStoresP) {
        gemm_ab<T, Config::kHeadDimV, kBlockN>(rO, p_tile(), v_tile(count));
      } else {
        gemm_ab<T, Config::kHeadDimV, kBlockN>(rO, rP, v_tile(count));
      }
    };

    // Scores and mask of a tile
    typename Options::RowState state(params, item, consumer);
    auto modify = [&](auto is_masked, const typename Options::Early& early, float (&rS)[kScores]) {
      constexpr bool kIsMasked = decltype(is_masked)::kValue;
      if constexpr (kHasOptions || Mask::kHasBand) {
        Options::template modify<kIsMasked>(params, shared.bias, tile, consumer, n, early, state, num_biases, rS);
      } else if constexpr (kIsMasked) {
        modify_tile<Mask, ScoreMod>(p, tile, Rows(p, tile, consumer), n * kBlockN, rS);
      }
    };

    // First tile: S = Q K^T, softmax
    {
      float rS[kScores];
      auto early = Options::template load_early<true>(item, state, n);
      Stages::wait_full(shared.full_k, num_k);
      gemm_abt<T, kBlockN, Config::kHeadDim>(rS, q_tile(), k_tile(num_k));
      wgmma_wait<0>();
      pin_registers(rS);
      release_operands();
      if (needs_mask(n)) {
        modify(Constant<true>(), early, rS);
      } else if constexpr (kHasOptions) {
        modify(Constant<false>(), early, rS);
      }
      softmax.template raise_maximum<true, true>(factor, rS);
      softmax.template exponentiate<true, true>(factor, rS);
      pack_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
      if constexpr (Config::kStoresP) {
        wait_tma_store_read();
        store_fragment(shared.sP[consumer], rP);
      }
    }
    if constexpr (SeqInfo::kHasLengths || KvSource::kIsPaged) {
      if ((n + 1) * kBlockN > tile.s.seqlen_k) {
        Stages::wait_full(shared.full_v, num_k);
        clear_tail(shared.sV[Stages::stage(num_k)], tile.s.seqlen_k - n * kBlockN, consumer);
      }
    }
    ++num_k;

    // Other tiles: S of this tile and O += P V of the tile before it, in flight together
    auto step = [&](auto is_masked) {
      constexpr bool kIsMasked = decltype(is_masked)::kValue;
      constexpr bool kMayBeEmpty = kIsMasked || ScoreMod::kChangesScores;  // a bias may be -inf
      float rS[kScores];
      auto early = Options::template load_early<kIsMasked>(item, state, n);
      // Issue both products in this consumer's turn
      u32 q = q_tile(), k = k_tile(num_k);
      mark(Phase::wait_tile, num_k);
      Stages::wait_full(shared.full_k, num_k);
      mark(Phase::wait_turn, num_k);
      wait_turn<Config::kPingPong>(consumer);
      mark(Phase::issue, num_k);
      gemm_abt<T, kBlockN, Config::kHeadDim>(rS, q, k);
      Stages::wait_full(shared.full_v, num_k - 1);
      start_pv(num_k - 1);
      signal_next(consumer);
      // Wait for S; mask it and raise the maximum while O += P V is in flight
      mark(Phase::wait_scores, num_k);
      if constexpr (kGuessesMaximum) {
        if constexpr (!kIsMasked) {
          wgmma_wait<1>();
          pin_registers(rS);
          mark(Phase::exponentials, num_k);
          float sums[2];
          bool is_low = softmax.guess(factor, rS, sums);
          mark(Phase::wait_output, num_k);
          wgmma_wait<0>();
          pin_registers(rO);
          mark(Phase::end, num_k);
          release_stage(shared.empty_v[Stages::stage(num_k - 1)]);
          pack_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
          if constexpr (Config::kStoresP) store_fragment(shared.sP[consumer], rP);
          // A branch of the warpgroup, whose product it is; the vote tells ptxas that it is one of the warp
          if (__any_sync(0xffffffffu, named_barrier_any(kConsumerBarrier + consumer, 128, is_low))) {
            // Compute the scores again
            gemm_abt<T, kBlockN, Config::kHeadDim>(rS, q, k);
            wgmma_wait<0>();
            pin_registers(rS);
            softmax.template raise_maximum<false, true, true>(factor, rS);
            softmax.template exponentiate<false, true>(factor, rS);
            pack_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
            if constexpr (Config::kStoresP) store_fragment(shared.sP[consumer], rP);
            softmax.rescale(rO);
          } else {
            softmax.accept(sums);
          }
          release_operands();
          ++num_k;
          return;
        }
      }
      wgmma_wait<1>();
      pin_registers(rS);
      mark(Phase::maximum, num_k);
      release_operands();
      modify(is_masked, early, rS);
      softmax.template raise_maximum<false, kMayBeEmpty>(factor, rS);
      // Wait for O before the exponentials, not after: rescaling and packing fill the gaps between them
      mark(Phase::wait_output, num_k);
      wgmma_wait<0>();
      pin_registers(rO);
      mark(Phase::exponentials, num_k);
      release_stage(shared.empty_v[Stages::stage(num_k - 1)]);
      // Compute P, then rescale O
      softmax.template exponentiate<false, kMayBeEmpty>(factor, rS);
      pack_probabilities(p, tile, consumer, n * kBlockN, rS, rP);
      if constexpr (Config::kStoresP) store_fragment(shared.sP[consumer], rP);
      softmax.rescale(rO);
      mark(Phase::end, num_k);
      ++num_k;
    };
    if constexpr (kSeparatesMasked) {
      // A branch in each step would keep ptxas from overlapping the steps
      --n;
#pragma unroll 1
      for (; n >= tile.n_begin && n >= tiles.unmasked.end; --n) step(Constant<true>());
#pragma unroll 1
      for (; n >= tile.n_begin && n >= tiles.unmasked.begin; --n) step(Constant<false>());
#pragma unroll 1
      for (; n >= tile.n_begin; --n) step(Constant<true>());
    } else {
      for (n = Mask::kHasBool ? next_tile(item, consumer, walk, n) : n - 1; n >= tile.n_begin;
           n = Mask::kHasBool ? next_tile(item, consumer, walk, n) : n - 1) {
        // Without a band or a bool mask only the first tile needs a mask
        if constexpr (Mask::kHasBand || Mask::kHasBool) {
          if (needs_mask(n)) {
            step(Constant<true>());
            continue;
          }
        }
        step(Constant<false>());
      }
    }

    // Add the last P V
    Stages::wait_full(shared.full_v, num_k - 1);
    start_pv(num_k - 1);
    wgmma_wait<0>();
    pin_registers(rO);
    release_stage(shared.empty_v[Stages::stage(num_k - 1)]);
  }

  // Finishes the softmax, normalises and stores O and lse; of a split the sum of P V, m and l. Scope: warp.
  FT_DEVICE static void epilogue(const FwdSm90Params& params, Storage& shared, const Tile& tile, i32 consumer,
                                 float factor, const Softmax& softmax, const float (&rO)[kOutputs]) {
    const Params& p = params.base;
    Rows rows(p, tile, consumer);
    bool is_split = p.num_splits > 1;
    float norm[2];
    i64 part[2];
    // Store the statistics of both rows
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 head = rows.head(tile, r);
      float sink = p.sinks == nullptr || is_split ? -infinity() : in_score_unit(kIsNatural, p.sinks[head]);
      float m = ScoreMod::kChangesScores ? softmax.m[r] : softmax.m[r] * factor;
      RowStats stats = join_sink<kIsNatural>(m, softmax.l[r], sink, [](float l) { return quad_sum(l); });
      norm[r] = (is_split ? 1.0f : stats.norm()) * keep_factor<Dropout>(p);
      i64 stat = stat_index(p, tile.s, head, rows.i[r]);
      part[r] = tile.coord.split * p.lse_size + stat;
      if constexpr (mutates(Mutation::fwd_sm90_out_of_bounds)) p.lse[p.lse_size] = 0.0f;
      if (rows.is_query(tile, r) && threadIdx.x % 4 == 0) {
        if constexpr (mutates(Mutation::fwd_sm90_uninitialised)) stats.l += p.lse[stat] == 1.5f ? 1.0f : 0.0f;
        store_stats<kIsNatural>(p, is_split, part[r], stat, stats.m, stats.l);
      }
    }
    // Store O
    if constexpr (kStoresByTma) {
      if (!is_split) {
        stage_rows(shared.sP[consumer], norm, rO);
        store_staged_rows<Config::kSlabsV>(shared.sP[consumer], params.out_map, tile.i_begin + 64 * consumer,
                                           tile.coord.head, tile.coord.batch);
        return;
      }
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = rows.i[r], head = rows.head(tile, r);
      bool is_query = rows.is_query(tile, r);
      if (is_split || kIsSame<Out, float>) {
        float* gO = is_split
                        ? p.partial_out + part[r] * p.head_dim_v
                        : query_rows(static_cast<float*>(p.out), p.out_strides, tile.s, head) + i * p.out_strides.row;
        store_row_float(gO, is_query, p.head_dim_v, r, norm[r], rO);
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, tile.s, head) + i * p.out_strides.row;
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
          uint4 chunk = packed_chunk<Out>(rO, b, r, norm[r]);
          i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
          if (is_query && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = chunk;
        }
      }
    }
  }

  FT_DEVICE static void consume(const FwdSm90Params& params, Storage& shared, i32 consumer) {
    const Params& p = params.base;
    // Score modifiers return scores in their unit; without them S stays a dot product
    float factor = ScoreMod::kChangesScores ? exponent_factor(kIsNatural) : p.scale_log2;
    u32 num_k = 0, num_biases = 0;
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
        mainloop(params, shared, *item, consumer, num_k, num_biases, factor, softmax, rO);
      } else {
        release_stage(shared.empty_q[consumer]);
      }
      epilogue(params, shared, item->tile, consumer, factor, softmax, rO);
      // Wait for the next work item
      u32 next = item->index + 1;
      wait_item(shared.full_q[consumer], next);
      item = &shared.work_items.at(next);
    }
    // Shared memory must outlive the last TMA store
    if constexpr (kStoresByTma) wait_tma_store_read();
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) fwd_sm90_kernel(const FT_GRID_CONSTANT FwdSm90Params params) {
  static_assert(Load::kIsAligned16, "TMA reads no unaligned rows");
  using Kernel = FwdSm90<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) Kernel::init(params.base, shared);
  if constexpr (Config::kPacksHeads) {
    if (threadIdx.x < 128 * Config::kNumConsumers) clear_unused_rows<Config>(params.base, shared.sQ[threadIdx.x / 128]);
  }
  __syncthreads();
  if constexpr (mutates(Mutation::fwd_sm90_race))
    if (threadIdx.x == 0) Kernel::init_scheduler(params.base, shared);

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kNumConsumers) {
    lower_registers<Kernel::kProducerRegisters>();
    if constexpr (ScoreMod::kHasBias) {
      i32 consumer = uniform(threadIdx.x / 32) - 4 * Config::kNumConsumers - 1;
      if (consumer >= 0 && consumer < Config::kNumConsumers) Kernel::produce_bias(params, shared, consumer);
    }
    if (KvSource::kIsPaged || (threadIdx.x / 32 == 4 * Config::kNumConsumers && elect_lane())) {
      // Without keys the maps are empty
      if (params.base.seqlen_k > 0 && (!KvSource::kIsPaged || threadIdx.x % 128 == 0)) {
        prefetch_map(params.q_map);
        prefetch_map(params.k_map);
        prefetch_map(params.v_map);
        if constexpr (Kernel::kStoresByTma) prefetch_map(params.out_map);
      }
      Kernel::produce(params, shared);
    }
  } else {
    raise_registers<Kernel::kConsumerRegisters>();
    Kernel::consume(params, shared, warpgroup);
  }
}

}  // namespace flashtile
