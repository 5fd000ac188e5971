// Attention forward on Hopper for short sequences: the keys of a head stay in shared memory for all of its queries.
//
// Threads:   warpgroups 0 .. kNumConsumers - 1 are consumers. Each takes items of 64 queries (item_walk.cuh) and
//            computes them from scores to output, independently of the others. Of the last warpgroup, one lane of warp
//            0 copies keys, one lane of warp 1 copies queries.
// Shared:    sQ [query stage][slab][64][64], sK, sV [stage][slab][kBlockN][64], 128-byte swizzled slabs of 64 columns;
//            the barriers.
// Barriers:  full_* complete by copied bytes. empty_q completes by the four warps of the one consumer that has the
//            item, empty_kv by one arrival per consumer warp. A consumer releases every key tile once, in order:
//            during its last item of a segment, and unread where it has no item or the item does not see the tile. So
//            it is never a phase behind, and the parity that it waits for is the right one.
// Mainloop:  with kIsOneTile the scores of all keys are in registers at once: one softmax, no rescaling. Else as in
//            fwd_sm90.cuh, without turns: S(n) = Q K(n)^T and O += P(n-1) V(n-1) are in flight together. Key tiles go
//            from first to last.
// Epilogue:  16-byte stores from registers.
// Refuses:   unaligned rows, softcap, ALiBi, bool mask, dropout, sequence lengths, pages; with kIsOneTile a band, else
// a
//            bias.
#pragma once

#include "device/attn/lazy_softmax.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/merge.cuh"
#include "device/attn/score.cuh"
#include "device/core/mutation.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/pipeline.cuh"
#include "device/tile/smem_tile.cuh"
#include "device/tile/wgmma_gemm.cuh"
#include "families/fwd_sm90_short/config.cuh"
#include "families/fwd_sm90_short/item_walk.cuh"
#include "families/fwd_sm90_short/params.cuh"

namespace flashtile {

template <class Config>
struct alignas(1024) FwdSm90ShortStorage {
  using T = typename Config::Element;
  T sQ[Config::kNumQueryStages][Config::kElementsQ];
  T sK[Config::kNumStages][Config::kElementsK];
  T sV[Config::kNumStages][Config::kElementsV];
  u64 full_q[Config::kNumQueryStages], empty_q[Config::kNumQueryStages];
  u64 full_kv[Config::kNumStages], empty_kv[Config::kNumStages];
};

template <class Config, class Mask, class ScoreMod>
struct FwdSm90Short {
  using T = typename Config::Element;
  using BiasElement = typename ScoreMod::BiasElement;
  using Out = typename Config::OutElement;
  using Storage = FwdSm90ShortStorage<Config>;
  using Walk = ItemWalk<Config, Mask>;
  using Queries = Ring<Config::kNumQueryStages>;
  using Keys = Ring<Config::kNumStages>;
  static constexpr bool kHasBias = ScoreMod::kHasBias;
  static constexpr bool kMayBeEmpty = Mask::kHasBand;  // a row may see no key of its first tiles
  using Softmax = typename SoftmaxKind<!Config::kIsOneTile, false, ScoreMod::kIsNatural>::Type;
  static constexpr i32 kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per thread
  // A tile of over 128 keys takes two products: one would need more registers than ptxas allows it
  static constexpr bool kHasParts = kBlockN > 128;
  static constexpr i32 kFirstPart = !kHasParts ? kBlockN : (kBlockN / 2 + 15) / 16 * 16;
  static constexpr i32 kRest = kBlockN - kFirstPart;

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    for (i32 stage = 0; stage < Config::kNumQueryStages; ++stage) {
      mbarrier_init(shared.full_q[stage], 1);
      mbarrier_init(shared.empty_q[stage], 4);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_kv[stage], 1);
      mbarrier_init(shared.empty_kv[stage], 4 * Config::kNumConsumers);
    }
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // ---- Producers. Scope of each: one thread. A map has size 1 along head or batch where the tensor's stride is 0.

  FT_DEVICE static void produce_keys(const FwdSm90ShortParams& params, Storage& shared) {
    const Params& p = params.base;
    u32 count = 0;
    for (Walk walk(p); walk.first_item < walk.num_items; walk.next()) {
      i32 kv_head = walk.head / (p.heads / p.heads_kv);
      if constexpr (mutates(Mutation::fwd_sm90_short_gqa_head)) kv_head = walk.head % p.heads_kv;
      auto head_of = [&](const Strides& strides) { return strides.head == 0 ? 0 : kv_head; };
      auto batch_of = [&](const Strides& strides) { return strides.batch == 0 ? 0 : walk.batch; };
      for (i32 n = walk.keys.begin; n < walk.keys.end; ++n, ++count) {
        u32 stage = Keys::stage(count);
        u64& full = shared.full_kv[stage];
        Keys::wait_empty(shared.empty_kv, count);
        mbarrier_arrive_expect(full, kBlockN * 128 * (Config::kSlabsQK + Config::kSlabsV));
        for (i32 slab = 0; slab < Config::kSlabsQK; ++slab) {
          load_box(shared.sK[stage] + slab * kBlockN * 64, params.k_map, full, 64 * slab, n * kBlockN,
                   head_of(p.k_strides), batch_of(p.k_strides));
        }
        for (i32 slab = 0; slab < Config::kSlabsV; ++slab) {
          load_box(shared.sV[stage] + slab * kBlockN * 64, params.v_map, full, 64 * slab, n * kBlockN,
                   head_of(p.v_strides), batch_of(p.v_strides));
        }
      }
    }
  }

  FT_DEVICE static void produce_queries(const FwdSm90ShortParams& params, Storage& shared) {
    const Params& p = params.base;
    i32 index = 0;
    for (Walk walk(p); walk.first_item < walk.num_items; walk.next()) {
      for (i32 item = walk.first; item < walk.end; ++item, ++index) {
        Queries::wait_empty(shared.empty_q, index);
        u64& full = shared.full_q[Queries::stage(index)];
        if (p.seqlen_k == 0) {
          mbarrier_arrive(full);
          continue;
        }
        i32 row = walk.first_query(item);
        if constexpr (mutates(Mutation::fwd_sm90_short_item)) row = item == 1 ? 0 : row;
        load_slabs<64, Config::kSlabsQK>(shared.sQ[Queries::stage(index)], params.q_map, full, 64, row,
                                         p.q_strides.head == 0 ? 0 : walk.head,
                                         p.q_strides.batch == 0 ? 0 : walk.batch);
      }
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Hides the keys past the last one, and under a band what each row does not see, in key tile n. Scope: thread.
  FT_DEVICE static void hide(const Walk& walk, i32 i_begin, i32 n, float (&rS)[kScores]) {
    const Params& p = walk.p;
    if constexpr (Config::kIsOneTile) {
      constexpr i32 kFirst = (kBlockN - Config::kTail) / 8;
      i32 end = p.seqlen_k - fragment_column();
      if constexpr (mutates(Mutation::fwd_sm90_short_tail)) end += 1;
#pragma unroll
      for (i32 b = kFirst; b < kBlockN / 8; ++b) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          bool is_kept = 8 * b + e < end;
#pragma unroll
          for (i32 r = 0; r < 2; ++r) rS[4 * b + 2 * r + e] = is_kept ? rS[4 * b + 2 * r + e] : -infinity();
        }
      }
    } else {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 i = min_of(i_begin + fragment_row() + 8 * r, p.seqlen_q - 1), j_first = n * kBlockN + fragment_column();
        Range seen = key_range<Mask>(p, walk.sequence(), i, i + 1);
        i32 end = seen.end - j_first;
        if constexpr (mutates(Mutation::fwd_sm90_short_mask_offset)) end += Mask::kHasBand ? 1 : 0;
        u32 bits = columns_below(end);
        if constexpr (Mask::kHasBand) bits &= ~columns_below(seen.begin - j_first);
#pragma unroll
        for (i32 x = 0; x < kScores / 2; ++x) {
          float& score = rS[x / 2 * 4 + 2 * r + x % 2];
          score = (bits >> x & 1u) != 0 ? score : -infinity();
        }
      }
    }
  }

  // The kCount registers from kBegin on. Scope: thread.
  template <i32 kBegin, i32 kCount, typename Register, i32 kAll>
  FT_DEVICE static auto& part(Register (&all)[kAll]) {
    return reinterpret_cast<Register(&)[kCount]>(all[kBegin]);
  }

  FT_DEVICE static void pack(const float (&rS)[kScores], u32 (&rP)[kScores / 2]) {
#pragma unroll
    for (i32 x = 0; x < kScores / 2; ++x) rP[x] = pack_two<T>(rS[2 * x], rS[2 * x + 1]);
  }

  // The bias of an item as it lies in memory, of the first kEarly steps of 16 keys. With few keys that is all of it,
  // loaded before the products; more would not fit the registers.
  static constexpr i32 kSteps = kBlockN / 16, kEarly = !kHasBias ? 1 : kBlockN <= 128 ? kSteps : 2;

  // Scales the scores and adds the bias. Scope: thread.
  FT_DEVICE static void add_bias(const Params& p, const uint4 (&early)[kEarly], const uint4* fragments,
                                 float (&rS)[kScores]) {
#pragma unroll
    for (i32 step = 0; step < kSteps; ++step) {
      uint4 eight = step < kEarly ? early[min_of(step, kEarly - 1)] : fragments[128 * step];
      const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (i32 x = 0; x < 8; ++x) {
        BiasElement bias{static_cast<u16>(words[x / 2] >> x % 2 * 16)};
        rS[8 * step + x] = Score<ScoreMod>::scaled(p, rS[8 * step + x], to_float(bias));
      }
    }
  }

  // Starts S = Q K^T.
  FT_DEVICE static void start_scores(float (&rS)[kScores], u32 q, u32 k) {
    gemm_abt<T, kFirstPart, Config::kHeadDim>(part<0, kFirstPart / 2>(rS), q, k);
    if constexpr (kHasParts) {
      static_assert(Config::kSlabsQK == 1, "the rows of the second product follow those of the first");
      gemm_abt<T, kRest, Config::kHeadDim>(part<kFirstPart / 2, kRest / 2>(rS), q, k + (kFirstPart * 128 >> 4));
    }
  }

  // Releases the key tiles [begin, end) of the ring unread. The lanes leave each wait together: once one of them has
  // released a stage, the producer may complete its next phase. Scope: warp.
  FT_DEVICE static void skip(Storage& shared, u32 begin, u32 end) {
    for (u32 count = begin; count != end; ++count) {
      Keys::wait_full(shared.full_kv, count);
      __syncwarp();
      release_stage(shared.empty_kv[Keys::stage(count)]);
    }
  }

  // Processes the key tiles of an item, number index of the block, whose queries begin with i_begin. The last item of
  // this consumer in the segment releases the key tiles.
  FT_DEVICE static void mainloop(const FwdSm90ShortParams& params, Storage& shared, const Walk& walk, i32 index,
                                 i32 i_begin, bool is_last, float factor, Softmax& softmax, float (&rO)[kOutputs]) {
    const Params& p = walk.p;
    u32 query_stage = Queries::stage(index);
    u32 q = tile_base(shared.sQ[query_stage], 64 * 128);
    auto k_tile = [&](u32 count) { return tile_base(shared.sK[Keys::stage(count)], kBlockN * 128); };
    auto v_tile = [&](u32 count) { return tile_base(shared.sV[Keys::stage(count)], kBlockN * 128); };
    Range tiles = walk.key_tiles(i_begin, i_begin + 64);
    // The lanes leave the wait together: once one of them releases Q, the producer may complete the next phase
    Queries::wait_full(shared.full_q, index);
    __syncwarp();
    if (tiles.begin >= tiles.end) {
      release_stage(shared.empty_q[query_stage]);
      if (is_last) skip(shared, walk.ring, walk.ring_end());
      return;
    }
    u32 count = walk.ring + tiles.begin - walk.keys.begin;
    if (is_last) skip(shared, walk.ring, count);
    Range common = common_key_range<Mask>(p, walk.sequence(), i_begin, min_of(i_begin + 64, p.seqlen_q));
    i32 unmasked_begin = ceil_div(common.begin, kBlockN), unmasked_end = common.end / kBlockN;
    i32 n = tiles.begin;
    u32 rP[kScores / 2];
    auto release_query = [&] {
      if (n == tiles.end - 1) release_stage(shared.empty_q[query_stage]);
    };

    // First tile: S = Q K^T, softmax
    {
      float rS[kScores];
      uint4 early[kEarly];
      const uint4* fragments = nullptr;
      if constexpr (kHasBias) {
        fragments = bias_fragments(params, kSteps, walk.batch, walk.head, i_begin / 64);
#pragma unroll
        for (i32 step = 0; step < kEarly; ++step) early[step] = fragments[128 * step];
      }
      Keys::wait_full(shared.full_kv, count);
      start_scores(rS, q, k_tile(count));
      wgmma_wait<0>();
      pin_registers(rS);
      release_query();
      if constexpr (kHasBias) {
        add_bias(p, early, fragments, rS);
      } else if (Config::kIsOneTile || n < unmasked_begin || n >= unmasked_end) {
        hide(walk, i_begin, n, rS);
      }
      softmax.template raise_maximum<true, true>(factor, rS);
      softmax.template exponentiate<true, true>(factor, part<0, kFirstPart / 2>(rS));
      if constexpr (kHasParts) {
        softmax.template exponentiate<false, true>(factor, part<kFirstPart / 2, kRest / 2>(rS));
      }
      pack(rS, rP);
    }
    // Other tiles: S of this tile and O += P V of the tile before it, in flight together
    if constexpr (!Config::kIsOneTile) {
      auto step = [&](auto is_masked) {
        constexpr bool kIsMasked = decltype(is_masked)::kValue;
        float rS[kScores];
        Keys::wait_full(shared.full_kv, count);
        start_scores(rS, q, k_tile(count));
        gemm_ab<T, Config::kHeadDimV, kBlockN>(rO, rP, v_tile(count - 1));
        wgmma_wait<1>();
        pin_registers(rS);
        release_query();
        if constexpr (kIsMasked) hide(walk, i_begin, n, rS);
        softmax.template raise_maximum<false, kMayBeEmpty>(factor, rS);
        wgmma_wait<0>();
        pin_registers(rO);
        if (is_last) release_stage(shared.empty_kv[Keys::stage(count - 1)]);
        softmax.template exponentiate<false, kMayBeEmpty>(factor, rS);
        pack(rS, rP);
        if constexpr (!mutates(Mutation::fwd_sm90_short_rescale)) softmax.rescale(rO);
      };
      for (++n, ++count; n < tiles.end; ++n, ++count) {
        if (n < unmasked_begin || n >= unmasked_end) {
          step(Constant<true>());
        } else {
          step(Constant<false>());
        }
      }
      --count;
    }
    // Add the last P V
    gemm_ab<T, Config::kHeadDimV, kBlockN>(rO, rP, v_tile(count));
    wgmma_wait<0>();
    pin_registers(rO);
    if (is_last) {
      release_stage(shared.empty_kv[Keys::stage(count)]);
      skip(shared, count + 1, walk.ring_end());
    }
  }

  // Normalises and stores O and lse. Scope: warp.
  FT_DEVICE static void epilogue(const Walk& walk, i32 i_begin, float factor, const Softmax& softmax,
                                 const float (&rO)[kOutputs]) {
    const Params& p = walk.p;
    Sequence s = walk.sequence();
    float sink = p.sinks == nullptr ? -infinity() : in_score_unit(kHasBias, p.sinks[walk.head]);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = i_begin + fragment_row() + 8 * r;
      bool is_query = i < p.seqlen_q;
      float m = kHasBias ? softmax.m[r] : softmax.m[r] * factor;
      RowStats stats = join_sink<kHasBias>(m, softmax.l[r], sink, [](float l) { return quad_sum(l); });
      float norm = stats.norm();
      if (is_query && threadIdx.x % 4 == 0) p.lse[stat_index(p, s, walk.head, i)] = lse_of(kHasBias, stats.m, stats.l);
      Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, walk.head) + i * p.out_strides.row;
#pragma unroll
      for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
        uint4 chunk = packed_chunk<Out>(rO, b, r, norm);
        i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
        if (is_query && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = chunk;
      }
    }
  }

  FT_DEVICE static void consume(const FwdSm90ShortParams& params, Storage& shared, i32 consumer) {
    const Params& p = params.base;
    float factor = kHasBias ? exponent_factor(ScoreMod::kIsNatural) : p.scale_log2;
    i32 index = consumer;
    for (Walk walk(p); walk.first_item < walk.num_items; walk.next()) {
      if (index >= walk.item_end()) skip(shared, walk.ring, walk.ring_end());
      for (; index < walk.item_end(); index += Config::kNumConsumers) {
        i32 i_begin = walk.first_query(walk.first + index - walk.first_item);
        bool is_last = index + Config::kNumConsumers >= walk.item_end();
        Softmax softmax;
        float rO[kOutputs];
#pragma unroll
        for (i32 x = 0; x < kOutputs; ++x) rO[x] = 0.0f;
        mainloop(params, shared, walk, index, i_begin, is_last, factor, softmax, rO);
        epilogue(walk, i_begin, factor, softmax, rO);
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_short_kernel(const FT_GRID_CONSTANT FwdSm90ShortParams params) {
  static_assert(Load::kIsAligned16, "TMA reads no unaligned rows");
  static_assert(ScoreMod::kNumOptions == ScoreMod::kHasBias && !Mask::kHasBool && !Dropout::kIsOn);
  static_assert(!SeqInfo::kHasLengths && !KvSource::kIsPaged);
  static_assert(!(Config::kIsOneTile && Mask::kHasBand) && !(!Config::kIsOneTile && ScoreMod::kHasBias));
  using Kernel = FwdSm90Short<Config, Mask, ScoreMod>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) Kernel::init(shared);
  __syncthreads();
  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kNumConsumers) {
    lower_registers<Config::kProducerRegisters>();
    i32 warp = uniform(threadIdx.x / 32) - 4 * Config::kNumConsumers;
    if (warp == 0 && elect_lane()) Kernel::produce_keys(params, shared);
    if (warp == 1 && elect_lane()) Kernel::produce_queries(params, shared);
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(params, shared, warpgroup);
  }
}

}  // namespace flashtile
