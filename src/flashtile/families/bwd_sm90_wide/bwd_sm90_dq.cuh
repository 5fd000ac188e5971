// dQ on Hopper for wide heads: wgmma and TMA, two consumer warpgroups and one of producers.
//
// Threads:   a block owns 128 queries of one head, 64 for each consumer, and streams the keys that they see. In the
//            last warpgroup, one warp loads dO and V, another Q and K.
// Shared:    sQ, sdO [consumer][slab][64][64], loaded once; sK, sV [stage][slab][kBlockN][64], 128-byte swizzled slabs
//            of 64 columns; the block's queries; barriers.
// Products:  S = Q K^T and dP = dO V^T have queries as rows. dS, packed to 16 bits, is a register operand of
//            dQ += dS K. dQ stays in registers; a consumer is its only owner.
// Mainloop:  dQ of tile n - 1, dP and S of tile n; then dS of tile n. The consumers take turns (ping-pong): one issues
//            its three products while the other computes dS. Options: dq_options.cuh.
// Barriers:  full_q, full_do per consumer; full and empty per stage of K; the same per stage and slab of V. V has one
//            stage where two do not fit: a slab is refilled as soon as both consumers have used it. full_tail as in
//            bwd_sm90_dkdv.cuh.
// Refuses:   unaligned rows, pages, head dims over 256.
#pragma once

#include "families/bwd_sm90_wide/common.cuh"
#include "families/bwd_sm90_wide/dq_options.cuh"

namespace flashtile {

// What a block works on: 128 queries of one head and the key tiles [n_begin, n_end) that they see. It lies in shared
// memory: registers are scarce.
struct QueryBlock {
  Sequence s;
  i32 head, i_begin, n_begin, n_end;
  Range consumers[2];  // the tiles that the 64 queries of each see, counted from n_begin

  // kHasMaskMap: a pre-pass has made the map of the bool mask's tiles.
  template <class Config, class Mask, class ScoreMod, class SeqInfo, bool kHasMaskMap = Mask::kHasBool>
  FT_DEVICE static QueryBlock find(const Params& p) {
    QueryBlock block;
    // The last queries come first: under a causal mask they see most keys
    TilePlace place = place_queries<SeqInfo>(p, Config::kBlockM, p.heads, static_cast<i32>(blockIdx.x), Mask::kHasBand);
    block.head = place.row;
    i32 batch_idx = place.batch;
    // Sequences that share a bias come one after the other: the second reads it from L2
    if (ScoreMod::kHasBias && p.bias_strides[0] == 0 && !has_packed_queries<SeqInfo>(p)) {
      i32 row = place.batch * p.heads + place.row;
      block.head = row / p.batch, batch_idx = row % p.batch;
    }
    block.s = find_sequence<SeqInfo>(p, batch_idx);
    block.i_begin = place.tile * Config::kBlockM;
    i32 i_end = min_of(block.i_begin + Config::kBlockM, block.s.seqlen_q);
    Range keys = key_range<Mask>(p, block.s, block.i_begin, i_end);
    block.n_begin = keys.begin / Config::kBlockN;
    block.n_end = max_of(ceil_div(keys.end, Config::kBlockN), block.n_begin);
    if constexpr (mutates(Mutation::bwd_sm90_wide_dq_tile)) block.n_end -= block.n_end - block.n_begin > 1 ? 1 : 0;
    for (i32 consumer = 0; consumer < 2; ++consumer) {
      i32 i = block.i_begin + 64 * consumer;
      keys = key_range<Mask>(p, block.s, i, min_of(i + 64, block.s.seqlen_q));
      bool is_empty = i >= block.s.seqlen_q || keys.begin >= keys.end;
      i32 end = min_of(ceil_div(keys.end, Config::kBlockN), block.n_end);
      block.consumers[consumer] =
          is_empty ? Range{0, 0} : Range{keys.begin / Config::kBlockN - block.n_begin, end - block.n_begin};
    }
    if constexpr (kHasMaskMap) block.trim<Config::kBlockN>(p);
    return block;
  }
  // Skips key tiles that the bool mask hides from all queries of a consumer, at both ends of its range.
  template <i32 kBlockN>
  FT_DEVICE void trim(const Params& p) {
    constexpr i32 kParts = kMaskTile / kBlockN;  // of a tile of the mask's map
    for (i32 consumer = 0; consumer < 2; ++consumer) {
      Range& tiles = consumers[consumer];
      if (tiles.begin >= tiles.end) continue;
      i32 i = i_begin + 64 * consumer, begin = tiles.begin + n_begin, end = tiles.end + n_begin;
      i32 first = begin / kParts, last = ceil_div(end, kParts);
      MaskWindow<true, 1> window;
      window.find<kMaskTile>(p, s.batch_idx, head, 1, i, min_of(i + 64, s.seqlen_q));
      window.trim(first, last);
      begin = max_of(begin, first * kParts), end = min_of(end, last * kParts);
      tiles = begin < end ? Range{begin - n_begin, end - n_begin} : Range{0, 0};
    }
    // The tiles of both
    Range both = {min_of(consumers[0].begin, consumers[1].begin), max_of(consumers[0].end, consumers[1].end)};
    if (consumers[0].begin >= consumers[0].end) both = consumers[1];
    if (consumers[1].begin >= consumers[1].end) both = consumers[0];
    for (i32 consumer = 0; consumer < 2; ++consumer) {
      Range& tiles = consumers[consumer];
      if (tiles.begin < tiles.end) tiles = {tiles.begin - both.begin, tiles.end - both.begin};
    }
    n_end = n_begin + both.end;
    n_begin += both.begin;
  }
  FT_DEVICE bool has_queries() const { return i_begin < s.seqlen_q; }
  FT_DEVICE u32 num_tiles() const { return static_cast<u32>(n_end - n_begin); }
};

template <class Config>
struct alignas(1024) BwdSm90DqStorage {
  using T = typename Config::Element;
  T sQ[2][Config::kElementsQ];
  T sdO[2][Config::kElementsdO];
  T sK[Config::kStagesK][Config::kElementsK];
  T sV[Config::kStagesV][Config::kElementsV];
  u64 full_q[2], full_do[2];
  u64 full_tail[2];  // a part of V or K with rows past the last key
  u64 full_k[Config::kStagesK], empty_k[Config::kStagesK];
  u64 full_v[Config::kSlabsV][Config::kStagesV], empty_v[Config::kSlabsV][Config::kStagesV];
  QueryBlock block;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct BwdSm90Dq {
  using T = typename Config::Element;
  using Storage = BwdSm90DqStorage<Config>;
  using StagesK = Ring<Config::kStagesK>;
  using StagesV = Ring<Config::kStagesV>;
  static constexpr i32 kBlockN = Config::kBlockN, kSlabsV = Config::kSlabsV;
  static constexpr i32 kScores = kBlockN / 2;  // registers per thread of S
  using Options = BwdSm90DqOptions<Config, Mask, ScoreMod, Dropout>;
  using Band = typename Options::Band;
  static constexpr bool kHasOptions = Options::kIsOn;
  static constexpr bool kIsSplit = !kHasOptions || Options::kIsSplit;  // dP is in flight while P is computed
  static constexpr bool kHoldsdO = Config::kHoldsdO && !kHasOptions;

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    for (i32 consumer = 0; consumer < 2; ++consumer) {
      mbarrier_init(shared.full_q[consumer], 1);
      mbarrier_init(shared.full_do[consumer], 1);
    }
    for (i32 x = 0; x < 2; ++x) mbarrier_init(shared.full_tail[x], 1);
    for (i32 stage = 0; stage < Config::kStagesK; ++stage) {
      mbarrier_init(shared.full_k[stage], 1);
      mbarrier_init(shared.empty_k[stage], 8);
    }
    for (i32 slab = 0; slab < kSlabsV; ++slab) {
      for (i32 stage = 0; stage < Config::kStagesV; ++stage) {
        mbarrier_init(shared.full_v[slab][stage], 1);
        mbarrier_init(shared.empty_v[slab][stage], 8);
      }
    }
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // ---- Producers, one for dO and V, one for Q and K. Scope: warp; one lane issues the copies. The lanes leave each
  // wait together: a late one must not find the barrier two phases on.

  // The first key of tile number count.
  FT_DEVICE static i32 first_key(const QueryBlock& block, u32 count) {
    return (block.n_begin + static_cast<i32>(count)) * kBlockN;
  }
  FT_DEVICE static i32 kv_head(const Params& p, const QueryBlock& block) {
    i32 head = block.head / (p.heads / p.heads_kv);
    if constexpr (mutates(Mutation::bwd_sm90_wide_gqa_head)) head = block.head % p.heads_kv;
    return head;
  }

  // Loads kSlabs slabs of a tile of K or V, from slab number `first` on. Rows past the last key are another sequence's:
  // the warp clears them before the consumers see the tile.
  template <i32 kSlabs>
  FT_DEVICE static void load_keys(const Params& p, const QueryBlock& block, T* tile, const TensorMap& map,
                                  const Strides& strides, u64& full, u64& full_tail, u32& num_tails, u32 count,
                                  i32 first) {
    i32 row = first_key(block, count), num_rows = block.s.seqlen_k - row, head = kv_head(p, block);
    bool is_issuer = elect_lane(), has_tail = SeqInfo::kHasLengths && num_rows < kBlockN;
    if (is_issuer) {
      load_rows<kBlockN, kSlabs>(tile, map, strides, has_tail ? full_tail : full, static_cast<i32>(block.s.k_row) + row,
                                 head, block.s.batch_idx, 64 * first);
    }
    if (has_tail) {
      mbarrier_wait(full_tail, num_tails++ % 2);
      clear_tail<kBlockN, kSlabs>(tile, num_rows);
      arrive_warp(full);
    }
  }

  FT_DEVICE static void produce_v(const BwdSm90WideParams& params, Storage& shared, const QueryBlock& block) {
    const Params& p = params.base;
    u32 num_tails = 0;
    auto load_do = [&](i32 consumer) {
      if (!elect_lane()) return;
      load_rows<64, kSlabsV>(shared.sdO[consumer], params.dout_map, p.dout_strides, shared.full_do[consumer],
                             static_cast<i32>(block.s.q_row) + block.i_begin + 64 * consumer, block.head,
                             block.s.batch_idx);
    };
    load_do(0);
    for (u32 count = 0; count < block.num_tiles(); ++count) {
      u32 stage = StagesV::stage(count);
      for (i32 slab = 0; slab < kSlabsV; ++slab) {
        StagesV::wait_empty(shared.empty_v[slab], count);
        __syncwarp();
        load_keys<1>(p, block, shared.sV[stage] + slab * kBlockN * 64, params.v_stream_map, p.v_strides,
                     shared.full_v[slab][stage], shared.full_tail[0], num_tails, count, slab);
      }
      if (count == 0) load_do(1);
    }
  }

  FT_DEVICE static void produce_k(const BwdSm90WideParams& params, Storage& shared, const QueryBlock& block) {
    const Params& p = params.base;
    u32 num_tails = 0;
    auto load_q = [&](i32 consumer) {
      if (!elect_lane()) return;
      load_rows<64, Config::kSlabsQK>(shared.sQ[consumer], params.q_map, p.q_strides, shared.full_q[consumer],
                                      static_cast<i32>(block.s.q_row) + block.i_begin + 64 * consumer, block.head,
                                      block.s.batch_idx);
    };
    load_q(0);
    for (u32 count = 0; count < block.num_tiles(); ++count) {
      u32 stage = StagesK::stage(count);
      StagesK::wait_empty(shared.empty_k, count);
      __syncwarp();
      load_keys<Config::kSlabsQK>(p, block, shared.sK[stage], params.k_stream_map, p.k_strides, shared.full_k[stage],
                                  shared.full_tail[1], num_tails, count, 0);
      if (count == 0) load_q(1);
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // A thread's two rows.
  struct Rows {
    const QueryBlock& block;
    i32 consumer;
    float lse[2], delta[2];
    bool is_large;  // some lse of the warp

    // Scope: warp.
    FT_DEVICE Rows(const Params& p, const QueryBlock& block, i32 consumer) : block(block), consumer(consumer) {
      is_large = false;
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        bool is_query = i(r) < block.s.seqlen_q;
        i64 stat = stat_index(p, block.s, block.head, i(r));
        lse[r] = is_query ? p.score_lse[stat] : infinity();
        delta[r] = is_query ? p.delta[stat] : 0.0f;
        is_large |= is_large_lse(lse[r]);
      }
      is_large = __any_sync(0xffffffffu, is_large);
    }
    FT_DEVICE i32 first() const { return block.i_begin + 64 * consumer; }
    FT_DEVICE i32 i(i32 r) const { return first() + fragment_row() + 8 * r; }
  };

  // The columns [begin, end) of the fragment that query i sees, before a bool mask. The first column is key j.
  FT_DEVICE static Range seen_columns(const Params& p, const Sequence& s, i32 i, i32 j) {
    Range seen = key_range<Mask>(p, s, i, i + 1);
    if constexpr (mutates(Mutation::bwd_sm90_wide_dq_mask)) seen.end += Mask::kHasBand ? 1 : 0;
    return {seen.begin - j, seen.end - j};
  }

  // dS = P * (dP - delta) with P = 2^(S - lse). With kIsChecked P is 0 where a query does not see the key, and at most
  // 1. Scope: thread.
  template <bool kIsChecked>
  FT_DEVICE static void differentiate(const Params& p, const Sequence& s, const Rows& rows, i32 j_begin,
                                      const float (&rS)[kScores], const float (&rdP)[kScores],
                                      u32 (&packed_ds)[kScores / 2]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      Range seen{};
      if constexpr (kIsChecked) seen = seen_columns(p, s, rows.i(r), j_begin + fragment_column());
#pragma unroll
      for (i32 b = 0; b < kScores / 4; ++b) {
        float ds[2];
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e, column = 8 * b + e;
          float score = fmaf(rS[x], p.scale_log2, -rows.lse[r]);
          if constexpr (kIsChecked) {
            score = score > 0.0f ? 0.0f : score;
            score = column >= seen.begin && column < seen.end ? score : -infinity();
          }
          ds[e] = exp2_approx(score) * (rdP[x] - rows.delta[r]);
        }
        packed_ds[2 * b + r] = pack_two<T>(ds[0], ds[1]);
      }
    }
  }

  // Waits for dP slab by slab, and releases V. kPending groups are in flight behind it.
  template <i32 kPending, i32 kSlab = 0>
  FT_DEVICE static void release_v(Storage& shared, u32 count) {
    if constexpr (kSlab < kSlabsV) {
      wgmma_wait<kPending + kSlabsV - 1 - kSlab>();
      release_stage(shared.empty_v[kSlab][StagesV::stage(count)]);
      release_v<kPending, kSlab + 1>(shared, count);
    }
  }

  FT_DEVICE static void consume(const BwdSm90WideParams& params, Storage& shared, const QueryBlock& block,
                                i32 consumer) {
    const Params& p = params.base;
    const Sequence& s = block.s;
    Rows rows(p, block, consumer);
    float rdQ[Config::kHeadDim / 2];
    u32 packed_ds[kScores / 2], rdO[kHoldsdO ? kSlabsV : 1][16];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdQ[x] = 0.0f;

    auto j_begin = [&](u32 count) { return first_key(block, count); };
    auto k_tile = [&](u32 count) { return tile_base(shared.sK[StagesK::stage(count)], kBlockN * 128); };
    auto v_tile = [&](u32 count) { return tile_base(shared.sV[StagesV::stage(count)], kBlockN * 128); };
    // Start dP = dO V^T, slab by slab
    auto start_dp = [&](u32 count, float (&rdP)[kScores]) {
      u32 rows_do = tile_base(shared.sdO[consumer], 64 * 128), rows_v = v_tile(count);
      if constexpr (kHasOptions) {
        // Compute descriptors anew for every tile: kept in registers they would spill
        asm volatile("" : "+r"(rows_do), "+r"(rows_v));
        rows_do = uniform(rows_do);
        rows_v = uniform(rows_v);
      }
#pragma unroll
      for (i32 slab = 0; slab < kSlabsV; ++slab) {
        StagesV::wait_full(shared.full_v[slab], count);
        u32 slab_v = rows_v + slab * (kBlockN * 128 >> 4);
        if constexpr (kHoldsdO) {
          gemm_abt_slab<T, kBlockN>(rdP, rdO[slab], slab_v, slab != 0);
        } else {
          gemm_abt_slab<T, kBlockN>(rdP, rows_do + slab * (64 * 128 >> 4), slab_v, slab != 0);
        }
      }
    };
    // Start S = Q K^T
    auto start_s = [&](u32 count, float (&rS)[kScores]) {
      StagesK::wait_full(shared.full_k, count);
      gemm_abt<T, kBlockN, Config::kHeadDim>(rS, tile_base(shared.sQ[consumer], 64 * 128), k_tile(count));
    };
    // Start dQ += dS K
    auto start_dq = [&](u32 count) { gemm_ab<T, Config::kHeadDim, kBlockN>(rdQ, packed_ds, k_tile(count)); };
    // Load what the factors of dS need, before the turn
    Options options;
    typename Options::ScoreTile scores;
    if constexpr (Options::Scores::kHasRows) scores.open(p, s, block.head);
    auto load_options = [&](u32 count) {
      if constexpr (kHasOptions) options.load(p, s, block.head, {rows.i(0), rows.i(1)}, j_begin(count));
    };
    // From S to the factors of dS
    auto find_factors = [&](u32 count, float (&rS)[kScores]) {
      options.open_mask(j_begin(count));
      if (needs_mask<Band>(p, s, rows.first(), 0, j_begin(count), kBlockN) ||
          (Mask::kHasBand && needs_mask<Band>(p, s, rows.first(), 64, j_begin(count), kBlockN))) {
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          options.hide(r, seen_columns(p, s, rows.i(r), j_begin(count) + fragment_column()));
        }
      }
      if constexpr (ScoreMod::kHasFunction) scores.place_at(rows.i(0), j_begin(count) + fragment_column());
      i32 distance = rows.i(0) + s.offset - j_begin(count) - fragment_column();
      auto find = [&](auto exact, auto masked) {
        options.template find_factors<decltype(exact)::kValue, decltype(masked)::kValue>(p, scores, rows.lse, distance,
                                                                                         rS);
      };
      if (rows.is_large || Options::Scores::needs_exact_tanh(p)) {
        find(Constant<true>(), Constant<true>());
      } else if (__any_sync(0xffffffffu, !options.sees_all())) {
        find(Constant<false>(), Constant<true>());
      } else {
        find(Constant<false>(), Constant<false>());
      }
    };
    // One turn: dQ of the tile before, if there is one, and dS of tile number count. With options dP follows dQ, whose
    // operand then leaves its registers to the bias or, where even these do not suffice, the factors.
    auto step = [&](u32 count, auto has_dq) {
      constexpr bool kHasDq = decltype(has_dq)::kValue;
      float rdP[kScores], rS[kScores];
      load_options(count);
      wait_turn(consumer);
      if constexpr (kHasDq) start_dq(count - 1);
      if constexpr (!kHasOptions) start_dp(count, rdP);
      start_s(count, rS);
      if constexpr (!kHasOptions || !kIsSplit) give_turn(1 - consumer);
      if constexpr (kHasDq) {
        // Wait for dQ: release its K
        wgmma_wait<(kHasOptions ? 0 : kSlabsV) + 1>();
        pin_registers(rdQ);
        release_stage(shared.empty_k[StagesK::stage(count - 1)]);
      }
      if constexpr (kHasOptions) {
        if constexpr (kIsSplit) {
          start_dp(count, rdP);
          give_turn(1 - consumer);
        }
        options.draw(p, s, block.head, {rows.i(0), rows.i(1)}, j_begin(count));
        wgmma_wait<kIsSplit ? kSlabsV : 0>();
        pin_registers(rS);
        find_factors(count, rS);
        pin_registers(rS);
        if constexpr (!kIsSplit) start_dp(count, rdP);
        release_v<0>(shared, count);
        pin_registers(rdP);
        options.differentiate(p, rows.delta, rS, rdP, packed_ds);
      } else {
        release_v<1>(shared, count);
        wgmma_wait<0>();
        pin_registers(rdP);
        pin_registers(rS);
        if (rows.is_large || needs_mask<Mask>(p, s, rows.first(), 0, j_begin(count), kBlockN) ||
            (Mask::kHasBand && needs_mask<Mask>(p, s, rows.first(), 64, j_begin(count), kBlockN))) {
          differentiate<true>(p, s, rows, j_begin(count), rS, rdP, packed_ds);
        } else {
          differentiate<false>(p, s, rows, j_begin(count), rS, rdP, packed_ds);
        }
      }
    };
    // Release a tile that this consumer's queries do not see, and pass the turn. The lanes leave each wait together:
    // once one of them has released a stage, its barrier may go on to the next phase.
    auto pass = [&](u32 count) {
      StagesK::wait_full(shared.full_k, count);
      __syncwarp();
      release_stage(shared.empty_k[StagesK::stage(count)]);
      for (i32 slab = 0; slab < kSlabsV; ++slab) {
        StagesV::wait_full(shared.full_v[slab], count);
        __syncwarp();
        release_stage(shared.empty_v[slab][StagesV::stage(count)]);
      }
      wait_turn(consumer);
      give_turn(1 - consumer);
    };

    auto begin = [&] { return static_cast<u32>(block.consumers[consumer].begin); };
    auto end = [&] { return static_cast<u32>(block.consumers[consumer].end); };
    // The first turn is consumer 0's
    if (consumer == 1) give_turn(1 - consumer);
    u32 count = 0;
    for (; count < begin(); ++count) pass(count);
    if (count < end()) {
      mbarrier_wait(shared.full_do[consumer], 0);
      mbarrier_wait(shared.full_q[consumer], 0);
#pragma unroll
      for (i32 slab = 0; slab < kSlabsV && kHoldsdO; ++slab) {
        load_fragment(shared.sdO[consumer] + slab * 64 * 64, rdO[slab]);
      }
      step(count, Constant<false>());
      for (++count; count < end(); ++count) step(count, Constant<true>());
      start_dq(count - 1);
      wgmma_wait<0>();
      pin_registers(rdQ);
      release_stage(shared.empty_k[StagesK::stage(count - 1)]);
    }
    for (; count < block.num_tiles(); ++count) pass(count);

    // Store dQ
    T* gdQ = query_rows(static_cast<T*>(p.dq), p.dq_strides, s, block.head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
#pragma unroll
      for (i32 b = 0; b < Config::kHeadDim / 8; b += 4) {
        uint4 chunk = packed_chunk<T>(rdQ, b, r, p.scale);
        i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
        if (rows.i(r) < s.seqlen_q && column < p.head_dim) {
          *reinterpret_cast<uint4*>(gdQ + rows.i(r) * p.dq_strides.row + column) = chunk;
        }
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bwd_sm90_dq_kernel(const FT_GRID_CONSTANT BwdSm90WideParams params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "TMA reads neither pages nor unaligned rows");
  using Kernel = BwdSm90Dq<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  if (threadIdx.x == 0) {
    Kernel::init(shared);
    shared.block = QueryBlock::find<Config, Mask, ScoreMod, SeqInfo>(params.base);
  }
  __syncthreads();
  const QueryBlock& block = shared.block;
  if (!block.has_queries()) return;

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 2) {
    lower_registers<Config::kProducerRegisters>();
    // Without keys the maps are empty
    if (block.n_begin >= block.n_end) return;
    i32 warp = uniform(threadIdx.x / 32 % 4);
    if (warp == 0) Kernel::produce_v(params, shared, block);
    if (warp == 1) Kernel::produce_k(params, shared, block);
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(params, shared, block, warpgroup);
  }
}

}  // namespace flashtile
