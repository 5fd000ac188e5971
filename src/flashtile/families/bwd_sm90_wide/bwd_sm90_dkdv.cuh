// dK and dV on Hopper for wide heads: wgmma and TMA, two consumer warpgroups and one of producers.
//
// Threads:   a block owns 64 keys of one KV head and streams the queries that see them, of every head that shares the
//            KV head. Warpgroup 0 computes P and dV, warpgroup 1 computes dS and dK. In warpgroup 2, one warp loads K
//            and Q, another V and dO, a third the statistics; the fourth prepares a bool mask and a bias.
// Shared:    sK, sV [slab][64][64], sQ, sdO [stage][slab][64][64], 128-byte swizzled slabs of 64 columns; sP, the
//            fragments that warpgroup 0 hands to warpgroup 1; lse and delta of each stage; a ring of query tiles;
//            barriers; bits of a mask and tiles of a bias (bwd_sm90/options.cuh).
// Products:  S^T = K Q^T and dP^T = V dO^T have keys as rows. P^T and dS^T, packed to 16 bits, are register operands of
//            dV += P^T dO and dK += dS^T Q. Both accumulators stay in registers; the block is their only owner.
// Mainloop:  warpgroup 0: S(i), P(i), dV(i); warpgroup 1: dP(i), dS(i), dK(i). The second product of a tile and the
//            first of the next one are in flight together. The warpgroups take turns (ping-pong): one issues both while
//            the other computes P or dS.
// Barriers:  full_k, full_v; of Q and of dO, full per stage and slab, empty per stage; full_p and empty_p per buffer;
//            full_tail for tiles with rows past the last query, which the producer clears before it signals full.
// Refuses:   unaligned rows, pages, head dims over 256.
#pragma once

#include "families/bwd_sm90/options.cuh"
#include "families/bwd_sm90_wide/common.cuh"

namespace flashtile {

// One of the query tiles that stream by.
struct StreamedQueryTile {
  i32 i_begin, head;
  i32 has_large_lse;
};
constexpr u32 kNumStreamedTiles = 8;

template <class Config, class Mask, class ScoreMod>
struct alignas(1024) BwdSm90DkdvStorage {
  using T = typename Config::Element;
  static_assert(kNumStreamedTiles >= Config::kNumStages + 2);
  T sK[Config::kElementsQK];
  T sV[Config::kElementsV];
  T sQ[Config::kNumStages][Config::kElementsQK];
  T sdO[Config::kNumStages][Config::kElementsV];
  uint4 sP[Config::kNumBuffers][4][128];  // packed fragments: 16 bytes of each thread, four times
  float lse[Config::kNumStages][64];
  float delta[Config::kNumStages][64];
  StreamedQueryTile queries[kNumStreamedTiles];  // tile number count is at count % kNumStreamedTiles
  u64 full_k, full_v;
  u64 full_tail[2];  // a tile of Q or dO with rows past the last query
  // Each slab of a tile has a full barrier of its own, so that products start with the first; statistics come with the
  // first slab of Q
  u64 full_q[Config::kSlabsQK][Config::kNumStages], empty_q[Config::kNumStages];
  u64 full_do[Config::kSlabsV][Config::kNumStages], empty_do[Config::kNumStages];
  u64 full_p[Config::kNumBuffers], empty_p[Config::kNumBuffers];
  KeyTile tile;
  alignas(128) OptionStorage<Config, Mask, ScoreMod> options;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct BwdSm90Dkdv {
  using T = typename Config::Element;
  using Storage = BwdSm90DkdvStorage<Config, Mask, ScoreMod>;
  using Options = BwdSm90Options<Config, Mask, ScoreMod, Dropout>;
  static_assert(!ScoreMod::Function::kHasDerivative || !Dropout::kIsOn, "the sign of factors says what dropout drops");
  using Band = typename Options::Band;
  using Stages = Ring<Config::kNumStages>;
  using Buffers = Ring<Config::kNumBuffers>;
  static constexpr i32 kScores = 32;  // registers per thread of S^T
  static constexpr bool kHasOptions = Options::kChangesTiles;
  // What P^T needs is loaded while dV of the tile before is in flight, unless that takes too many registers
  static constexpr bool kLoadsEarly = !kHasOptions || Options::kLoadsLseAhead;
  // Registers per thread: the warp that prepares tiles takes its own from the warpgroup that knows no options
  static constexpr i32 kMoreRegisters = Options::kHasTiles ? 8 + 8 * Options::kNumTiles : 0;
  static constexpr i32 kProducerRegisters = Config::kProducerRegisters + kMoreRegisters;
  static constexpr i32 kRegistersDk = Config::kConsumerRegisters - kMoreRegisters;
  // Options need the registers that K would take
  static constexpr bool kHoldsKeys = Config::kHoldsKeys && !kHasOptions;

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    mbarrier_init(shared.full_k, 1);
    mbarrier_init(shared.full_v, 1);
    for (i32 x = 0; x < 2; ++x) mbarrier_init(shared.full_tail[x], 1);
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      for (i32 slab = 0; slab < Config::kSlabsQK; ++slab) mbarrier_init(shared.full_q[slab][stage], slab == 0 ? 2 : 1);
      for (i32 slab = 0; slab < Config::kSlabsV; ++slab) mbarrier_init(shared.full_do[slab][stage], 1);
      mbarrier_init(shared.empty_q[stage], 8);
      mbarrier_init(shared.empty_do[stage], 8);
    }
    for (i32 buffer = 0; buffer < Config::kNumBuffers; ++buffer) {
      mbarrier_init(shared.full_p[buffer], 4);
      mbarrier_init(shared.empty_p[buffer], 4);
    }
    Options::init(shared.options);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // ---- Producer.

  // Loads tiles of Q or dO. Rows past the last query of a packed sequence are another's: the warp clears them before
  // the consumers see the tile. Scope: warp; one lane issues the copies.
  template <i32 kSlabs, i32 kCount>
  FT_DEVICE static void produce_rows(const KeyTile& tile, T (&sRows)[Config::kNumStages][kCount], const TensorMap& map,
                                     const Strides& strides, u64 (&full)[kSlabs][Config::kNumStages],
                                     u64 (&empty)[Config::kNumStages], u64& full_tail) {
    bool is_issuer = elect_lane();
    u32 num_tails = 0;
    tile.for_each_query_tile<64>([&](i32 head, i32 i, u32 count) {
      u32 stage = Stages::stage(count);
      i32 row = static_cast<i32>(tile.s.q_row) + i, num_rows = tile.s.seqlen_q - i;
      // The lanes leave each wait together: a late one must not find the barrier two phases on
      Stages::wait_empty(empty, count);
      __syncwarp();
      if (SeqInfo::kHasLengths && num_rows < 64) {
        if (is_issuer) load_rows<64, kSlabs>(sRows[stage], map, strides, full_tail, row, head, tile.s.batch_idx);
        mbarrier_wait(full_tail, num_tails++ % 2);
        clear_tail<64, kSlabs>(sRows[stage], num_rows);
        for (i32 slab = 0; slab < kSlabs; ++slab) arrive_warp(full[slab][stage]);
      } else if (is_issuer) {
#pragma unroll
        for (i32 slab = 0; slab < kSlabs; ++slab) {
          load_rows<64, 1>(sRows[stage] + slab * 64 * 64, map, strides, full[slab][stage], row, head, tile.s.batch_idx,
                           64 * slab);
        }
      }
    });
  }

  // Loads K and Q. Scope: warp.
  FT_DEVICE static void produce_q(const BwdSm90WideParams& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    if (elect_lane()) {
      load_rows<64, Config::kSlabsQK>(shared.sK, params.k_map, p.k_strides, shared.full_k,
                                      static_cast<i32>(tile.s.k_row) + tile.j_begin, tile.kv_head, tile.s.batch_idx);
    }
    produce_rows<Config::kSlabsQK>(tile, shared.sQ, params.q_map, p.q_strides, shared.full_q, shared.empty_q,
                                   shared.full_tail[0]);
  }

  // Loads V and dO. Scope: warp.
  FT_DEVICE static void produce_do(const BwdSm90WideParams& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    if (elect_lane()) {
      load_rows<64, Config::kSlabsV>(shared.sV, params.v_map, p.v_strides, shared.full_v,
                                     static_cast<i32>(tile.s.k_row) + tile.j_begin, tile.kv_head, tile.s.batch_idx);
    }
    produce_rows<Config::kSlabsV>(tile, shared.sdO, params.dout_map, p.dout_strides, shared.full_do, shared.empty_do,
                                  shared.full_tail[1]);
  }

  // Fills the statistics of every stage. Rows past the last query get those of a fully masked row. Scope: warp.
  FT_DEVICE static void produce_stats(const Params& p, Storage& shared, const KeyTile& tile) {
    i32 lane = threadIdx.x % 32;
    tile.for_each_query_tile<64>([&](i32 head, i32 i_begin, u32 count) {
      float lse[2], delta[2];
      bool is_large = false;
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        i32 i = i_begin + 32 * x + lane;
        bool is_query = i < tile.s.seqlen_q;
        i64 stat = stat_index(p, tile.s, head, i);
        lse[x] = is_query ? p.score_lse[stat] : infinity();
        delta[x] = is_query ? p.delta[stat] : 0.0f;
        is_large |= is_large_lse(lse[x]);
      }
      is_large = __any_sync(0xffffffffu, is_large);
      u32 stage = Stages::stage(count);
      Stages::wait_empty(shared.empty_q, count);
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        shared.lse[stage][32 * x + lane] = lse[x];
        shared.delta[stage][32 * x + lane] = delta[x];
      }
      if (lane == 31) shared.queries[count % kNumStreamedTiles] = {i_begin, head, is_large};
      __syncwarp();
      arrive_warp(shared.full_q[0][stage]);
    });
  }

  // ---- Consumers. Scope: warpgroup.

  // The warpgroups take turns: one issues two products while the other computes P or dS.

  // K or V of the block, the left operand of a product: in shared memory or, with kHoldsKeys, in registers.
  template <i32 kSlabs>
  struct Keys {
    const T* tile;
    u32 packed[kHoldsKeys ? kSlabs : 1][16];

    FT_DEVICE explicit Keys(const T* tile) : tile(tile) {
#pragma unroll
      for (i32 slab = 0; slab < kSlabs && kHoldsKeys; ++slab) load_fragment(tile + slab * 64 * 64, packed[slab]);
    }

    // Starts D = keys * rows^T, slab by slab as tile number count of the rows arrives. Commits kSlabs groups.
    FT_DEVICE void start(float (&rD)[kScores], const T* rows, u64 (&full)[kSlabs][Config::kNumStages],
                         u32 count) const {
      u32 b = tile_base(rows, 64 * 128);
#pragma unroll
      for (i32 slab = 0; slab < kSlabs; ++slab) {
        constexpr i32 kSlabUnits = 64 * 128 >> 4;
        Stages::wait_full(full[slab], count);
        if constexpr (kHoldsKeys) {
          gemm_abt_slab<T, 64>(rD, packed[slab], b + slab * kSlabUnits, slab != 0);
        } else {
          gemm_abt_slab<T, 64>(rD, tile_base(tile, 64 * 128) + slab * kSlabUnits, b + slab * kSlabUnits, slab != 0);
        }
      }
    }
  };

  // Statistics of a thread's queries, two of every 8. Loaded while a product is in flight.
  using Stats = float[16];
  FT_DEVICE static void load_stats(const float* sStats, Stats& stats) {
#pragma unroll
    for (i32 b = 0; b < 8; ++b) {
      float2 two = *reinterpret_cast<const float2*>(sStats + 8 * b + fragment_column());
      stats[2 * b] = two.x;
      stats[2 * b + 1] = two.y;
    }
  }

  // The columns [begin, end) of the fragment whose queries see key j, before a bool mask. The first column is query i.
  FT_DEVICE static Range seen_columns(const Params& p, const Sequence& s, i32 i, i32 j) {
    Range seen = query_range<Mask>(p, s, j, j + 1);
    if constexpr (mutates(Mutation::bwd_sm90_wide_mask_offset)) seen.begin -= Mask::kHasBand ? 1 : 0;
    return {seen.begin - i, seen.end - i};
  }

  // P^T = 2^(S^T - lse). With kIsChecked it is 0 where a query does not see the key, and at most 1. Rows of the
  // fragment are keys; rows past the last key are never stored. Scope: thread.
  template <bool kIsChecked>
  FT_DEVICE static void exponentiate(const Params& p, const Sequence& s, i32 i_begin, i32 j_begin, const Stats& lse,
                                     const float (&rS)[kScores], u32 (&packed_p)[kScores / 2]) {
    Range seen[2];
#pragma unroll
    for (i32 r = 0; r < 2 && kIsChecked; ++r) {
      seen[r] = seen_columns(p, s, i_begin + fragment_column(), j_begin + fragment_row() + 8 * r);
    }
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float prob[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 column = 8 * b + e;
          float score = fmaf(rS[4 * b + 2 * r + e], p.scale_log2, -lse[2 * b + e]);
          if constexpr (kIsChecked) {
            score = score > 0.0f ? 0.0f : score;
            score = column >= seen[r].begin && column < seen[r].end ? score : -infinity();
          }
          prob[e] = exp2_approx(score);
        }
        packed_p[2 * b + r] = pack_two<T>(prob[0], prob[1]);
      }
    }
  }

  // The same with options: P^T as dV needs it, and the factor of dP^T - delta in dS^T, which is negative where dropout
  // drops the element. Scope: warp.
  template <bool kIsChecked, bool kIsMasked>
  FT_DEVICE static void exponentiate_options(Options& options, const Range (&seen)[2], const float* sLse,
                                             float (&rS)[kScores], u32 (&packed_p)[kScores / 2],
                                             u32 (&packed_factor)[kScores / 2]) {
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
      options.advance_bias(b);
      options.template exponentiate_columns<kIsChecked, kIsMasked>(b, seen, rS, packed_p);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float kept[2], factor[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          float prob = rS[4 * b + 2 * r + e];
          bool is_kept = options.is_kept(b, r, e);
          kept[e] = is_kept ? prob : 0.0f;
          factor[e] = is_kept ? prob : -prob;
        }
        if constexpr (!ScoreMod::kHasDerivative) packed_p[2 * b + r] = pack_two<T>(kept[0], kept[1]);
        packed_factor[2 * b + r] = pack_two<T>(factor[0], factor[1]);
        if constexpr (mutates(Mutation::bwd_sm90_wide_softcap)) packed_factor[2 * b + r] = packed_p[2 * b + r];
      }
      options.advance_lse(sLse, b);
      // Finish these columns before the next, if registers are few; the checked body is rare
      if constexpr (kIsChecked || Options::kNumOptions > 2)
        Options::pin(rS[4 * b], rS[4 * b + 1], rS[4 * b + 2], rS[4 * b + 3]);
    }
  }

  // Hands a packed fragment to the same thread of warpgroup 1.
  FT_DEVICE static void send(Storage& shared, u32 count, const u32 (&packed)[kScores / 2]) {
    Buffers::wait_empty(shared.empty_p, count);
    u32 buffer = Buffers::stage(count);
#pragma unroll
    for (i32 x = 0; x < 4; ++x) {
      shared.sP[buffer][x][threadIdx.x % 128] =
          make_uint4(packed[4 * x], packed[4 * x + 1], packed[4 * x + 2], packed[4 * x + 3]);
    }
    __syncwarp();
    arrive_warp(shared.full_p[buffer]);
  }
  FT_DEVICE static void receive(Storage& shared, u32 count, u32 (&packed)[kScores / 2]) {
    Buffers::wait_full(shared.full_p, count);
    u32 buffer = Buffers::stage(count);
#pragma unroll
    for (i32 x = 0; x < 4; ++x) {
      uint4 words = shared.sP[buffer][x][threadIdx.x % 128];
      packed[4 * x] = words.x;
      packed[4 * x + 1] = words.y;
      packed[4 * x + 2] = words.z;
      packed[4 * x + 3] = words.w;
    }
    __syncwarp();
    release_stage(shared.empty_p[buffer]);
  }

  // dS^T = P^T * (dP^T - delta). Scope: thread.
  FT_DEVICE static void differentiate(const Params& p, const Stats& delta, const float (&rdP)[kScores],
                                      const u32 (&packed_factor)[kScores / 2], u32 (&packed_ds)[kScores / 2]) {
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) {
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 x = 4 * b + 2 * r;
        float2 factor = unpack_two<T>(packed_factor[x / 2]);
        float dp[2] = {rdP[x], rdP[x + 1]};
        if constexpr (Dropout::kIsOn) {
          dp[0] = __float_as_int(factor.x) < 0 ? 0.0f : dp[0] * p.keep_factor;
          dp[1] = __float_as_int(factor.y) < 0 ? 0.0f : dp[1] * p.keep_factor;
          factor = make_float2(fabsf(factor.x), fabsf(factor.y));
        }
        packed_ds[x / 2] = pack_two<T>(factor.x * (dp[0] - delta[2 * b]), factor.y * (dp[1] - delta[2 * b + 1]));
      }
    }
  }

  // Stores dK or dV of the block's keys.
  template <i32 kCount>
  FT_DEVICE static void store_keys(void* base, const Strides& strides, const Params& p, const KeyTile& tile,
                                   i32 num_columns, float factor, const float (&rD)[kCount]) {
    KeyRows<T, KvSource<false>> rows(static_cast<T*>(base), strides, p, tile.s, tile.kv_head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 j = tile.j_begin + fragment_row() + 8 * r;
#pragma unroll
      for (i32 b = 0; b < kCount / 4; b += 4) {
        uint4 chunk = packed_chunk<T>(rD, b, r, factor);
        i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
        if (j < tile.s.seqlen_k && column < num_columns) *reinterpret_cast<uint4*>(rows.row(j) + column) = chunk;
      }
    }
  }

  // Warpgroup 0: P and dV.
  FT_DEVICE static void consume_dv(const BwdSm90WideParams& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    const Sequence& s = tile.s;
    float rdV[Config::kHeadDimV / 2];
    u32 packed_p[kScores / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDimV / 2; ++x) rdV[x] = 0.0f;

    // Start dV += P^T dO
    auto start_dv = [&](u32 count) {
      for (i32 slab = 0; slab < Config::kSlabsV; ++slab) Stages::wait_full(shared.full_do[slab], count);
      gemm_ab<T, Config::kHeadDimV, 64>(rdV, packed_p, tile_base(shared.sdO[Stages::stage(count)], 64 * 128));
    };
    // Load what P^T needs while S^T is in flight
    auto prepare = [&](u32 count, Stats& lse) {
      const float* sLse = shared.lse[Stages::stage(count)];
      if constexpr (kHasOptions) {
        const StreamedQueryTile& queries = shared.queries[count % kNumStreamedTiles];
        auto bits = Options::load_bits(p, shared.options, s, 0, count, queries.head, queries.i_begin, tile.j_begin);
        Options options(p, shared.options, s, 0, count, queries.head, queries.i_begin, tile.j_begin, bits, sLse);
        if constexpr (kLoadsEarly) options.pin_lse();
        return options;
      } else {
        load_stats(sLse, lse);
        pin_registers(lse);
        return Constant<0>();
      }
    };
    // Wait for S^T, release its Q, compute P^T and hand it to the other warpgroup
    auto finish_s = [&](u32 count, const Stats& lse, auto& options, float (&rS)[kScores]) {
      u32 stage = Stages::stage(count);
      wgmma_wait<0>();
      pin_registers(rS);
      const StreamedQueryTile& queries = shared.queries[count % kNumStreamedTiles];
      if constexpr (kLoadsEarly) release_stage(shared.empty_q[stage]);
      bool is_checked = queries.has_large_lse != 0;
      if constexpr (Mask::kHasBand) {
        is_checked |= needs_mask<Band>(p, s, queries.i_begin, 0, tile.j_begin, 64);
        is_checked |= needs_mask<Band>(p, s, queries.i_begin, 64, tile.j_begin, 64);
      }
      if constexpr (kHasOptions) {
        u32 packed_factor[kScores / 2];
        auto exponentiate = [&](auto checked, auto masked, const Range(&seen)[2]) {
          exponentiate_options<decltype(checked)::kValue, decltype(masked)::kValue>(options, seen, shared.lse[stage],
                                                                                    rS, packed_p, packed_factor);
        };
        if (is_checked || options.needs_exact_tanh()) {
          Range seen[2];
#pragma unroll
          for (i32 r = 0; r < 2; ++r) {
            seen[r] = seen_columns(p, s, queries.i_begin + fragment_column(), tile.j_begin + fragment_row() + 8 * r);
          }
          exponentiate(Constant<true>(), Constant<Mask::kHasBool>(), seen);
        } else if (Mask::kHasBool && options.bits.is_masked) {
          exponentiate(Constant<false>(), Constant<Mask::kHasBool>(), {});
        } else {
          exponentiate(Constant<false>(), Constant<false>(), {});
        }
        if constexpr (!kLoadsEarly) {
          __syncwarp();
          release_stage(shared.empty_q[stage]);
        }
        send(shared, count, packed_factor);
      } else {
        if (is_checked) {
          exponentiate<true>(p, s, queries.i_begin, tile.j_begin, lse, rS, packed_p);
        } else {
          exponentiate<false>(p, s, queries.i_begin, tile.j_begin, lse, rS, packed_p);
        }
        send(shared, count, packed_p);
      }
    };

    if (tile.num_tiles() > 0) {
      mbarrier_wait(shared.full_k, 0);
      Keys<Config::kSlabsQK> keys(shared.sK);
      // Start S^T = K Q^T
      auto start_s = [&](u32 count, float (&rS)[kScores]) {
        keys.start(rS, shared.sQ[Stages::stage(count)], shared.full_q, count);
      };
      {
        float rS[kScores];
        Stats lse;
        wait_turn(0);
        start_s(0, rS);
        give_turn(1);
        auto options = prepare(0, lse);
        finish_s(0, lse, options, rS);
      }
      u32 count = 1;
      for (; count < tile.num_tiles(); ++count) {
        float rS[kScores];
        Stats lse;
        // Wait for dV of the tile before: release its dO
        auto wait_dv = [&] {
          wgmma_wait<Config::kSlabsQK>();
          pin_registers(rdV);
          release_stage(shared.empty_do[Stages::stage(count - 1)]);
        };
        // Start dV of the tile before and S^T of this one
        wait_turn(0);
        start_dv(count - 1);
        start_s(count, rS);
        give_turn(1);
        if constexpr (!kLoadsEarly) wait_dv();
        auto options = prepare(count, lse);
        if constexpr (kLoadsEarly) wait_dv();
        finish_s(count, lse, options, rS);
      }
      wait_turn(0);
      start_dv(count - 1);
      give_turn(1);
      wgmma_wait<0>();
      pin_registers(rdV);
    }
    store_keys(p.dv, p.dv_strides, p, tile, p.head_dim_v, Options::dv_factor(p), rdV);
  }

  // Warpgroup 1: dS and dK.
  FT_DEVICE static void consume_dk(const BwdSm90WideParams& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    float rdK[Config::kHeadDim / 2];
    u32 packed_ds[kScores / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdK[x] = 0.0f;

    // Start dK += dS^T Q
    auto start_dk = [&](u32 count) {
      gemm_ab<T, Config::kHeadDim, 64>(rdK, packed_ds, tile_base(shared.sQ[Stages::stage(count)], 64 * 128));
    };
    // Wait for Q and its statistics
    auto wait_delta = [&](u32 count, Stats& delta) {
      for (i32 slab = 0; slab < Config::kSlabsQK; ++slab) Stages::wait_full(shared.full_q[slab], count);
      load_stats(shared.delta[Stages::stage(count)], delta);
      pin_registers(delta);
    };
    // Wait for dP^T, release its dO, and compute dS^T
    auto finish_dp = [&](u32 count, const Stats& delta, float (&rdP)[kScores]) {
      u32 packed_factor[kScores / 2];
      wgmma_wait<0>();
      pin_registers(rdP);
      release_stage(shared.empty_do[Stages::stage(count)]);
      receive(shared, count, packed_factor);
      differentiate(p, delta, rdP, packed_factor, packed_ds);
    };

    if (tile.num_tiles() > 0) {
      mbarrier_wait(shared.full_v, 0);
      Keys<Config::kSlabsV> keys(shared.sV);
      // Start dP^T = V dO^T
      auto start_dp = [&](u32 count, float (&rdP)[kScores]) {
        keys.start(rdP, shared.sdO[Stages::stage(count)], shared.full_do, count);
      };
      {
        float rdP[kScores];
        Stats delta;
        // The first turn is warpgroup 0's
        give_turn(0);
        wait_turn(1);
        start_dp(0, rdP);
        give_turn(0);
        wait_delta(0, delta);
        finish_dp(0, delta, rdP);
      }
      u32 count = 1;
      for (; count < tile.num_tiles(); ++count) {
        float rdP[kScores];
        Stats delta;
        // Start dK of the tile before and dP^T of this one
        wait_turn(1);
        start_dk(count - 1);
        start_dp(count, rdP);
        give_turn(0);
        wait_delta(count, delta);
        // Wait for dK: release its Q
        wgmma_wait<Config::kSlabsV>();
        pin_registers(rdK);
        release_stage(shared.empty_q[Stages::stage(count - 1)]);
        finish_dp(count, delta, rdP);
      }
      wait_turn(1);
      start_dk(count - 1);
      wgmma_wait<0>();
      pin_registers(rdK);
    }
    store_keys(p.dk, p.dk_strides, p, tile, p.head_dim, p.scale, rdK);
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bwd_sm90_dkdv_kernel(const FT_GRID_CONSTANT BwdSm90WideParams params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "TMA reads neither pages nor unaligned rows");
  using Kernel = BwdSm90Dkdv<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) {
    Kernel::init(shared);
    shared.tile = KeyTile::find<64, 64, Mask, SeqInfo>(params.base);
    if constexpr (mutates(Mutation::bwd_sm90_wide_group)) shared.tile.num_heads = 1;
  }
  __syncthreads();
  const KeyTile& tile = shared.tile;
  if (!tile.has_keys()) return;
  if constexpr (Mask::kHasBool) {
    // Skip queries that see none of the block's keys
    if (threadIdx.x < 32) {
      Range seen = Kernel::Options::visible_tiles(params.base, tile);
      __syncwarp();
      if (threadIdx.x == 31) shared.tile.m_begin = seen.begin, shared.tile.m_end = seen.end;
    }
    __syncthreads();
  }

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    lower_registers<Kernel::kProducerRegisters>();
    i32 warp = uniform(threadIdx.x / 32 % 4);
    // Without queries the maps are empty
    if (!tile.has_queries()) return;
    if (warp == 0) {
      Kernel::produce_q(params, shared, tile);
    } else if (warp == 1) {
      Kernel::produce_do(params, shared, tile);
    } else if (warp == 2) {
      Kernel::produce_stats(params.base, shared, tile);
    } else if (Kernel::Options::kHasTiles) {
      u32 count = 0;
      Kernel::Options::produce(params.base, shared.options, tile, 0, count);
    }
  } else if (warpgroup == 0) {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume_dv(params, shared, tile);
  } else {
    raise_registers<Kernel::kRegistersDk>();
    Kernel::consume_dk(params, shared, tile);
  }
}

}  // namespace flashtile
