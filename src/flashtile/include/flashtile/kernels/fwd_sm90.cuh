// Attention forward on Hopper: wgmma products, tiles brought by TMA, a producer and 2 or 3 consumer warpgroups, a persistent grid.
//
// Threads: warpgroups 0 .. kNumConsumers - 1 are consumers with 64 queries each, from scores to output; in the last warpgroup one lane
// is the producer and issues every copy. setmaxnreg moves registers from that group to the consumers.
// Shared: sQ [group][slab][64][64], sK and sV [stage][slab][kBlockN][64] in 128-byte swizzled slabs of 64 columns, then the barriers.
// Barriers: full_* are raised by the copies' bytes, empty_* by one lane of each consumer warp. K and V have rings of their own, and each
// consumer its Q, so that the next tile's is on its way as soon as that group is done.
// Mainloop (FlashAttention-3, section 3.2): S(n) = Q K(n)^T and O += P(n+1) V(n+1) are under way together, and the softmax of S(n) runs
// while the second is; consumers take turns at issuing. Keys go from the last tile to the first, masked tiles in a body of their own.
// Epilogue: quads exchange registers so that every lane stores 16 bytes; no shared memory, so the next tile's Q is on its way.
#pragma once

#include "flashtile/attn/dropout.cuh"
#include "flashtile/attn/mask.cuh"
#include "flashtile/attn/merge.cuh"
#include "flashtile/attn/scheduler.cuh"
#include "flashtile/attn/score_mod.cuh"
#include "flashtile/core/mutation.cuh"
#include "flashtile/ptx/tma.cuh"
#include "flashtile/ptx/wgmma.cuh"
#include "flashtile/tile/fragment.cuh"
#include "flashtile/tile/pipeline.cuh"
#include "flashtile/tile/sm90_config.cuh"

namespace flashtile {

struct FwdSm90Params {
  Params base;
  TensorMap q_map, k_map, v_map;  // (head_dim, rows, heads, batch), boxes of 64 columns and 64 or kBlockN rows
};

// What producer and consumers must agree on: the sequence, the first query and the tiles of keys of one tile of work.
template <class Config, class Mask, class SeqInfo>
struct FwdSm90Work {
  static constexpr i32 kBlockN = Config::kBlockN;
  TileCoord tile;
  Sequence s;
  i32 i_begin;
  i32 n_begin, n_end;

  FT_DEVICE FwdSm90Work(const Params& p, const TileOrder<Mask, Config::kBlockM>& order, i32 index)
      : tile(order.at(p, index)), s(find_sequence<SeqInfo>(p, tile.batch)), i_begin(tile.m_block * Config::kBlockM) {
    Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + Config::kBlockM, s.seqlen_q));
    n_begin = keys.begin / kBlockN;
    n_end = ceil_div(keys.end, kBlockN);
    if constexpr (mutates(Mutation::hopper_last_tile)) n_end = n_end - 1 > n_begin ? n_end - 1 : n_end;
    if (p.num_splits > 1) {
      i32 share = ceil_div(max_of(n_end - n_begin, 0), p.num_splits);
      n_begin += tile.split * share;
      n_end = min_of(n_end, n_begin + share);
    }
  }
  FT_DEVICE bool has_queries() const { return i_begin < s.seqlen_q; }
  FT_DEVICE bool has_keys() const { return n_begin < n_end; }
};

// Which of the tiles of keys matter to the 64 rows of one consumer: those from `end` on hide everything, those inside `free` nothing.
struct FwdSm90Tiles {
  Range free;
  i32 end;
};

template <class Config, class Mask, class SeqInfo>
struct alignas(1024) FwdSm90Storage {
  using T = typename Config::Element;
  T sQ[Config::kNumConsumers][Config::kElementsQ];
  T sK[Config::kNumStages][Config::kElementsK];
  T sV[Config::kNumStages][Config::kElementsV];
  u64 full_q[Config::kNumConsumers], empty_q[Config::kNumConsumers];
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  TileOrder<Mask, Config::kBlockM> order;
  // Of each consumer warp: what it would not have the registers for
  alignas(16) char work[4 * Config::kNumConsumers][sizeof(FwdSm90Work<Config, Mask, SeqInfo>)];
  FwdSm90Tiles tiles[4 * Config::kNumConsumers];
};

// Named barriers; 0 is __syncthreads.
constexpr i32 kTurnBarrier = 1;  // and one for each further consumer
constexpr i32 kGroupBarrier = 8;

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct FwdSm90 {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using Storage = FwdSm90Storage<Config, Mask, SeqInfo>;
  using Stages = Ring<Config::kNumStages>;
  using Order = TileOrder<Mask, Config::kBlockM>;
  using Work = FwdSm90Work<Config, Mask, SeqInfo>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers of a thread
  static constexpr bool kHasScoreMod = ScoreMod::kHasSoftcap || ScoreMod::kHasAlibi || ScoreMod::kHasBias;
  // Beside the options a mask costs little: one body for all tiles keeps the code short
  static constexpr bool kMasksAlways = kHasScoreMod || Mask::kHasBool || Dropout::kIsOn;

  // ---- Producer. Scope: one thread.

  // A map has one head or batch where the stride along them is 0: broadcast, or packed.
  template <i32 kRows, i32 kSlabs>
  FT_DEVICE static void load_tile(T* tile, const TensorMap& map, const Strides& strides, u64& full, i32 row, i32 head, const Work& work) {
    i32 map_head = strides.head == 0 ? 0 : head, map_batch = strides.batch == 0 ? 0 : work.tile.batch;
    mbarrier_arrive_expect(full, kRows * kSlabs * 128);
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) load_box(tile + slab * kRows * 64, map, full, slab * 64, row, map_head, map_batch);
  }

  FT_DEVICE static void produce(const FwdSm90Params& params, Storage& shared) {
    const Params& p = params.base;
    const Order& order = shared.order;
    u32 num_k = 0, num_v = 0, num_q = 0;
    for (i32 index = order.first(); index < order.num_indices; index = order.next(index)) {
      Work work(p, order, index);
      if (!work.has_queries() || !work.has_keys()) continue;
      i32 kv_head = work.tile.head / (p.heads / p.heads_kv), k_row = static_cast<i32>(work.s.k_row);
      if constexpr (mutates(Mutation::hopper_gqa_head)) kv_head = work.tile.head % p.heads_kv;

      auto load_k = [&](i32 n) {
        u32 stage = Stages::stage(num_k);
        mbarrier_wait(shared.empty_k[stage], Stages::phase(num_k) ^ 1);
        load_tile<kBlockN, Config::kSlabsQK>(shared.sK[stage], params.k_map, p.k_strides, shared.full_k[stage], k_row + n * kBlockN, kv_head, work);
        ++num_k;
      };
      auto load_v = [&](i32 n) {
        u32 stage = Stages::stage(num_v);
        mbarrier_wait(shared.empty_v[stage], Stages::phase(num_v) ^ 1);
        load_tile<kBlockN, Config::kSlabsV>(shared.sV[stage], params.v_map, p.v_strides, shared.full_v[stage], k_row + n * kBlockN, kv_head, work);
        ++num_v;
      };

      // Load the first K, Q group by group, then K and V in the order in which the consumers want and free them
      load_k(work.n_end - 1);
      ++num_q;
      for (i32 group = 0; group < Config::kNumConsumers; ++group) {
        i32 row = static_cast<i32>(work.s.q_row) + work.i_begin + 64 * group;
        mbarrier_wait(shared.empty_q[group], num_q % 2);
        load_tile<64, Config::kSlabsQK>(shared.sQ[group], params.q_map, p.q_strides, shared.full_q[group], row, work.tile.head, work);
      }
      for (i32 n = work.n_end - 2; n >= work.n_begin; --n) {
        load_k(n);
        load_v(n + 1);
      }
      load_v(work.n_begin);
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Running maximum (of what `factor` is to be multiplied with), this thread's part of the running sum, and the last rescale of O, by row.
  struct Softmax {
    float m[2], l[2], alpha[2];
    bool is_raised;  // some row of the warp has another maximum than before
  };
  static constexpr float kSlack = 8.0f;  // in base 2: probabilities grow to 256 before a maximum is raised

  // S = Q K^T, under way on return.
  FT_DEVICE static void product_qk(float (&rS)[kScores], u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < Config::kHeadDim / 16; ++step) {
      i32 slab = step / 4, column = step % 4 * 2;
      Wgmma<T, kBlockN>::template ss<false>(rS, tile_descriptor(q + slab * (64 * 128 >> 4) + column),
                                            tile_descriptor(k + slab * (kBlockN * 128 >> 4) + column), step != 0);
    }
    wgmma_commit();
  }

  // O += P V, under way on return.
  FT_DEVICE static void product_pv(float (&rO)[kOutputs], const u32 (&rP)[kScores / 2], u32 v) {
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kBlockN / 16; ++step) {
      const u32* a = rP + 4 * step;
      Wgmma<T, Config::kHeadDimV>::template rs<true>(rO, a[0], a[1], a[2], a[3], tile_descriptor(v + step * (16 * 128 >> 4)), 1);
    }
    wgmma_commit();
  }

  // Score modifiers, then -inf for what is not seen.
  FT_DEVICE static void modify_scores(const Params& p, const Work& work, const Scorer<ScoreMod>& scorer, i32 i_first, i32 j_begin, float (&rS)[kScores]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      // Rows behind the last query compute, but must not read behind it
      i32 i = min_of(i_first + 8 * r, work.s.seqlen_q - 1);
      i32 j_first = j_begin + fragment_column();
      Range seen = key_range<Mask>(p, work.s, i, i + 1);
      i32 low = seen.begin - j_first, high = seen.end - j_first;
      if constexpr (mutates(Mutation::hopper_mask_offset)) if (Mask::kHasBand) high += 1;
#pragma unroll
      for (i32 b = 0; b < kBlockN / 8; ++b) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 place = 8 * b + e;
          float& x = rS[4 * b + 2 * r + e];
          bool is_kept = place >= low && place < high;
          if constexpr (Mask::kHasBool) is_kept = is_kept && is_seen<Mask>(p, work.s, work.tile.head, i, j_first + place);
          if constexpr (kHasScoreMod) {
            float tanh;
            if (is_kept) x = scorer.score(x, i, j_first + place, tanh);
          }
          x = is_kept ? x : -infinity();
        }
      }
    }
  }

  // What a row's scores are lowered by. With kMayBeEmpty the row may have seen nothing yet.
  template <bool kMayBeEmpty>
  FT_DEVICE static float shift_of(float m, float factor) {
    return kMayBeEmpty && m == -infinity() ? 0.0f : m * factor;
  }

  // The new maxima, and what to rescale by.
  template <bool kIsFirst, bool kMayBeEmpty>
  FT_DEVICE static void raise_maximum(float factor, Softmax& softmax, const float (&rS)[kScores]) {
    float m_new[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float tile_max[2] = {rS[2 * r], rS[2 * r + 1]};
#pragma unroll
      for (i32 b = 1; b < kBlockN / 8; ++b) {
        tile_max[0] = fmaxf(tile_max[0], rS[4 * b + 2 * r]);
        tile_max[1] = fmaxf(tile_max[1], rS[4 * b + 2 * r + 1]);
      }
      m_new[r] = quad_max(fmaxf(tile_max[0], tile_max[1]));
      if constexpr (!kIsFirst) m_new[r] = fmaxf(softmax.m[r], m_new[r]);
    }
    softmax.is_raised = true;
    if constexpr (mutates(Mutation::hopper_stale_max)) if (!kIsFirst) m_new[0] = softmax.m[0], m_new[1] = softmax.m[1];
    if constexpr (Config::kScalesLazily && !kIsFirst) {
      // Keep the old maxima as long as they will do for every row of the warp
      bool is_far = (m_new[0] - softmax.m[0]) * factor > kSlack || (m_new[1] - softmax.m[1]) * factor > kSlack;
      softmax.is_raised = __any_sync(0xffffffffu, is_far);
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float m_old = softmax.m[r];
      if (softmax.is_raised) softmax.m[r] = m_new[r];
      if constexpr (!kIsFirst) softmax.alpha[r] = exp2_approx(fmaf(m_old, factor, -shift_of<kMayBeEmpty>(softmax.m[r], factor)));
    }
  }

  // Turns scores into probabilities and adds them up.
  template <bool kIsFirst, bool kMayBeEmpty>
  FT_DEVICE static void exponentiate(float factor, Softmax& softmax, float (&rS)[kScores]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float shift = shift_of<kMayBeEmpty>(softmax.m[r], factor), sum = 0.0f;
#pragma unroll
      for (i32 b = 0; b < kBlockN / 8; ++b) {
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          float& x = rS[4 * b + 2 * r + e];
          x = exp2_approx(fmaf(x, factor, -shift));
          sum += x;
        }
      }
      softmax.l[r] = kIsFirst ? sum : fmaf(softmax.l[r], softmax.alpha[r], sum);
    }
  }

  FT_DEVICE static void rescale(const Softmax& softmax, float (&rO)[kOutputs]) {
    if (!softmax.is_raised) return;
    if constexpr (mutates(Mutation::hopper_rescale)) return;
#pragma unroll
    for (i32 x = 0; x < kOutputs; ++x) rO[x] *= softmax.alpha[x / 2 % 2];
  }

  // P to 16 bits, with dropout.
  FT_DEVICE static void pack_probabilities(const Params& p, const Work& work, i32 i_first, i32 j_begin, float (&rS)[kScores], u32 (&rP)[kScores / 2]) {
    if constexpr (Dropout::kIsOn) {
      static_assert(kBlockN % 32 == 0);
      DropoutBits bits(p, work.s, work.tile.head);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
#pragma unroll
        for (i32 b = 0; b < kBlockN / 8; b += 4) {
          // Each lane of a quad draws the four words of one group of 8 columns; word t belongs to lane t
          uint4 drawn = bits.words(i_first + 8 * r, j_begin / 8 + b + threadIdx.x % 4);
          u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
          if constexpr (mutates(Mutation::hopper_dropout)) words[0] = drawn.y, words[1] = drawn.x;
          quad_transpose(words);
#pragma unroll
          for (i32 g = 0; g < 4; ++g) {
            rS[4 * (b + g) + 2 * r] *= (words[g] & 0xffffu) < bits.threshold ? 0.0f : bits.keep_factor;
            rS[4 * (b + g) + 2 * r + 1] *= (words[g] >> 16) < bits.threshold ? 0.0f : bits.keep_factor;
          }
        }
      }
    }
#pragma unroll
    for (i32 x = 0; x < kScores / 2; ++x) rP[x] = pack_two<T>(rS[2 * x], rS[2 * x + 1]);
  }

  // Zeros the rows of V behind the last key: what lies there belongs to others, and 0 times it need not be 0.
  FT_DEVICE static void clear_tail(T* sV, i32 num_rows, i32 group) {
    if constexpr (mutates(Mutation::hopper_tail)) num_rows = kBlockN;
    for (i32 slab = 0; slab < Config::kSlabsV; ++slab) {
      uint4* rows = reinterpret_cast<uint4*>(sV + slab * kBlockN * 64);
      for (i32 x = num_rows * 8 + threadIdx.x % 128; x < kBlockN * 8; x += 128) rows[x] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    named_barrier_sync(kGroupBarrier + group, 128);
  }

  FT_DEVICE static void wait_k(Storage& shared, u32 count) { mbarrier_wait(shared.full_k[Stages::stage(count)], Stages::phase(count)); }
  FT_DEVICE static void wait_v(Storage& shared, u32 count) { mbarrier_wait(shared.full_v[Stages::stage(count)], Stages::phase(count)); }
  // One lane of each warp hands a tile back.
  FT_DEVICE static void release(u64& empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
  }
  // Turns go round the consumers; each has as many in a tile of work as there are tiles of keys but one.
  FT_DEVICE static void take_turn(i32 group) {
    if constexpr (Config::kTakesTurns) named_barrier_sync(kTurnBarrier + group, 256);
  }
  FT_DEVICE static void pass_turn(i32 group) {
    if constexpr (Config::kTakesTurns) named_barrier_arrive(kTurnBarrier + (group + 1) % Config::kNumConsumers, 256);
  }

  // Finds the work of one index, and which tiles matter to the rows of the group. Scope: warp.
  FT_DEVICE static void find_work(const Params& p, const Order& order, i32 index, i32 group, Work& work, FwdSm90Tiles& tiles) {
    Work found(p, order, index);
    i32 i_group = found.i_begin + 64 * group;
    Range seen = key_range<Mask>(p, found.s, i_group, i_group + 64);
    Range free = common_key_range<Mask>(p, found.s, i_group, i_group + 64);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      work = found;
      tiles.free = Range{ceil_div(free.begin, kBlockN), Mask::kHasBool ? 0 : free.end / kBlockN};
      tiles.end = i_group < found.s.seqlen_q ? min_of(found.n_end, ceil_div(seen.end, kBlockN)) : found.n_begin;
    }
    __syncwarp();
  }

  // All tiles of keys of one tile of work. num_k counts the tiles of K so far; V is one behind.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, i32 group, const Work& work, const FwdSm90Tiles& tiles, u32& num_k, float factor,
                                 Softmax& softmax, float (&rO)[kOutputs]) {
    u32 q_base = tile_base(shared.sQ[group], 64 * 128), k_base = tile_base(shared.sK, kBlockN * 128), v_base = tile_base(shared.sV, kBlockN * 128);
    auto k_tile = [&](u32 count) { return k_base + Stages::stage(count) * (Config::kElementsK * 2 >> 4); };
    auto v_tile = [&](u32 count) { return v_base + Stages::stage(count) * (Config::kElementsV * 2 >> 4); };
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= tiles.free.end || n < tiles.free.begin; };
    i32 i_first = work.i_begin + 64 * group + fragment_row(), n = work.n_end - 1;
    Scorer<ScoreMod> scorer(p, work.s, work.tile.head);

    // Tiles that hide everything from this group: hand them back, and the turn on
    for (; n >= tiles.end && n >= work.n_begin; --n, ++num_k) {
      wait_k(shared, num_k);
      release(shared.empty_k[Stages::stage(num_k)]);
      wait_v(shared, num_k);
      release(shared.empty_v[Stages::stage(num_k)]);
      if (n > work.n_begin) {
        take_turn(group);
        pass_turn(group);
      }
    }
    if (n < work.n_begin) {
      release(shared.empty_q[group]);
      return;
    }

    // First tile: S = Q K^T, softmax
    u32 rP[kScores / 2];
    {
      float rS[kScores];
      wait_k(shared, num_k);
      product_qk(rS, q_base, k_tile(num_k));
      wgmma_wait<0>();
      pin_registers(rS);
      release(shared.empty_k[Stages::stage(num_k)]);
      if (needs_mask(n)) modify_scores(p, work, scorer, i_first, n * kBlockN, rS);
      raise_maximum<true, true>(factor, softmax, rS);
      exponentiate<true, true>(factor, softmax, rS);
      pack_probabilities(p, work, i_first, n * kBlockN, rS, rP);
    }
    if constexpr (SeqInfo::kHasLengths) {
      if ((n + 1) * kBlockN > work.s.seqlen_k) {
        wait_v(shared, num_k);
        clear_tail(shared.sV[Stages::stage(num_k)], work.s.seqlen_k - n * kBlockN, group);
      }
    }
    ++num_k;

    // S of one tile and O += P V of the tile before it, under way together
    auto step = [&](auto is_masked) {
      constexpr bool kIsMasked = decltype(is_masked)::kValue;
      float rS[kScores];
      wait_k(shared, num_k);
      take_turn(group);
      product_qk(rS, q_base, k_tile(num_k));
      wait_v(shared, num_k - 1);
      product_pv(rO, rP, v_tile(num_k - 1));
      pass_turn(group);
      // Softmax while the second product is under way
      wgmma_wait<1>();
      pin_registers(rS);
      release(shared.empty_k[Stages::stage(num_k)]);
      if constexpr (kIsMasked) modify_scores(p, work, scorer, i_first, n * kBlockN, rS);
      raise_maximum<false, kIsMasked>(factor, softmax, rS);
      // Not after the exponentials: rescaling and packing fill the gaps between them
      wgmma_wait<0>();
      pin_registers(rO);
      release(shared.empty_v[Stages::stage(num_k - 1)]);
      rescale(softmax, rO);
      exponentiate<false, kIsMasked>(factor, softmax, rS);
      pack_probabilities(p, work, i_first, n * kBlockN, rS, rP);
      ++num_k;
    };
    for (--n; n >= work.n_begin; --n) {
      if (needs_mask(n)) {
        step(Constant<true>());
      } else {
        step(Constant<kMasksAlways>());
      }
    }

    // Hand back Q, add the last P V
    release(shared.empty_q[group]);
    wait_v(shared, num_k - 1);
    product_pv(rO, rP, v_tile(num_k - 1));
    wgmma_wait<0>();
    pin_registers(rO);
    release(shared.empty_v[Stages::stage(num_k - 1)]);
  }

  FT_DEVICE static void consume(const FwdSm90Params& params, Storage& shared, i32 group) {
    const Params& p = params.base;
    const Order& order = shared.order;
    Work& work = *reinterpret_cast<Work*>(shared.work[threadIdx.x / 32]);
    FwdSm90Tiles& tiles = shared.tiles[threadIdx.x / 32];
    float factor = kHasScoreMod ? 1.0f : p.scale_log2;
    u32 num_k = 0, num_q = 0;
    // The first turn is that of group 0
    if (group == Config::kNumConsumers - 1) pass_turn(group);
    for (i32 index = order.first(); index < order.num_indices; index = order.next(index)) {
      find_work(p, order, index, group, work, tiles);
      if (!work.has_queries()) continue;
      Softmax softmax{{-infinity(), -infinity()}, {0.0f, 0.0f}, {1.0f, 1.0f}, false};
      float rO[kOutputs];
#pragma unroll
      for (i32 x = 0; x < kOutputs; ++x) rO[x] = 0.0f;
      if (work.has_keys()) {
        if constexpr (!mutates(Mutation::hopper_early_q)) mbarrier_wait(shared.full_q[group], num_q++ % 2);
        mainloop(p, shared, group, work, tiles, num_k, factor, softmax, rO);
      }
      store(p, work, work.i_begin + 64 * group + fragment_row(), factor, softmax, rO);
    }
  }

  // Lets the sink join (once: in the combination, where there is one), normalises, stores O and lse; of a split, sum, m and l. Scope: warp.
  FT_DEVICE static void store(const Params& p, const Work& work, i32 i_first, float factor, const Softmax& softmax, const float (&rO)[kOutputs]) {
    bool is_part = p.num_splits > 1;
    i32 head = work.tile.head;
    float sink = p.sinks == nullptr || is_part ? -infinity() : p.sinks[head] * kLog2e;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = i_first + 8 * r;
      float m = softmax.m[r] * factor;
      float m_new = fmaxf(m, sink);
      float shift = m_new == -infinity() ? 0.0f : m_new;
      float alpha = exp2_approx(m - shift);
      float l = quad_sum(softmax.l[r]) * alpha + exp2_approx(sink - shift);
      float norm = is_part ? 1.0f : l == 0.0f ? 0.0f : alpha / l;
      i64 stat = work.s.stat_row + head * p.lse_head_stride + i;
      i64 part = work.tile.split * p.lse_size + stat;
      bool is_inside = i < work.s.seqlen_q;
      if constexpr (mutates(Mutation::hopper_uninitialised)) if (is_inside) l += p.lse[stat] == 1.5f ? 1.0f : 0.0f;
      if constexpr (mutates(Mutation::hopper_out_of_bounds)) p.lse[p.lse_size] = 0.0f;
      if (is_inside && threadIdx.x % 4 == 0) store_stats(p, is_part, part, stat, m_new, l);
      if (is_part || kIsSame<Out, float>) {
        float* gO = is_part ? p.partial_out + part * p.head_dim_v
                            : reinterpret_cast<float*>(query_rows(static_cast<Out*>(p.out), p.out_strides, work.s, head) + i * p.out_strides.row);
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; ++b) {
          i32 column = 8 * b + fragment_column();
          float2 two = make_float2(rO[4 * b + 2 * r] * norm, rO[4 * b + 2 * r + 1] * norm);
          if (is_inside && column < p.head_dim_v) *reinterpret_cast<float2*>(gO + column) = two;
        }
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, work.s, head) + i * p.out_strides.row;
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
          u32 words[4];
#pragma unroll
          for (i32 g = 0; g < 4; ++g) words[g] = pack_two<Out>(rO[4 * (b + g) + 2 * r] * norm, rO[4 * (b + g) + 2 * r + 1] * norm);
          quad_transpose(words);
          i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
          if (is_inside && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) fwd_sm90_kernel(const FT_GRID_CONSTANT FwdSm90Params params) {
  static_assert(!KvSource::kIsPaged && Load::kIsWide, "pages and narrow rows are the simt family's");
  using Kernel = FwdSm90<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(1024) char shared_bytes[];
  FwdSm90Storage<Config, Mask, SeqInfo>& shared = *reinterpret_cast<FwdSm90Storage<Config, Mask, SeqInfo>*>(shared_bytes);

  if (threadIdx.x == 0) {
    constexpr i32 kConsumerWarps = 4 * Config::kNumConsumers;
    for (i32 group = 0; group < Config::kNumConsumers; ++group) {
      mbarrier_init(shared.full_q[group], 1);
      mbarrier_init(shared.empty_q[group], 4);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_k[stage], 1);
      mbarrier_init(shared.full_v[stage], 1);
      mbarrier_init(shared.empty_k[stage], kConsumerWarps);
      mbarrier_init(shared.empty_v[stage], kConsumerWarps);
    }
    mbarrier_init_fence();
    fence_proxy_async();
    shared.order.init(params.base);
  }
  __syncthreads();
  if constexpr (mutates(Mutation::hopper_race)) if (threadIdx.x == 0) shared.order.init(params.base);

  // Every lane of a warp knows the same number, and the compiler that they do
  i32 group = __shfl_sync(0xffffffffu, static_cast<i32>(threadIdx.x / 128), 0);
  if (group == Config::kNumConsumers) {
    lower_registers<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 4 * Config::kNumConsumers && elect_lane()) {
      // Where there are no keys their maps are empty
      if (params.base.seqlen_k > 0) {
        prefetch_map(params.q_map);
        prefetch_map(params.k_map);
        prefetch_map(params.v_map);
        Kernel::produce(params, shared);
      }
    }
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(params, shared, group);
  }
}

}  // namespace flashtile
