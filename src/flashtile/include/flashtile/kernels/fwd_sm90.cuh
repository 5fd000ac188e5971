// Attention forward on Hopper: wgmma products, tiles brought by TMA, a producer and 1 to 3 consumer warpgroups, a persistent grid.
//
// Threads: warpgroups 0 .. kNumConsumers - 1 are consumers with 64 queries each, from scores to output; in the last warpgroup one lane
// is the producer: it finds the tiles of work, tells the consumers, and issues every copy. setmaxnreg moves registers from that group to them.
// Shared: sQ and sP [group][slab][64][64], sK and sV [stage][slab][kBlockN][64] in 128-byte swizzled slabs of 64 columns, the barriers, orders.
// Barriers: full_* are raised by the copies' bytes, empty_* by one lane of each consumer warp. K and V have rings of their own, and each
// consumer its Q, so that the next tile's is on its way as soon as that group is done. What a tile of work is about comes with its Q.
// Mainloop (FlashAttention-3, section 3.2): S(n) = Q K(n)^T and O += P(n+1) V(n+1) are under way together, and the softmax of S(n) runs
// while the second is; consumers take turns at issuing. Keys go from the last tile to the first, masked tiles in a body of their own.
// Epilogue: by the copy engine, 16 rows of a warp at a time, where P has room in shared memory that O can leave by; else quads exchange
// registers so that every lane stores 16 bytes.
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
  TensorMap q_map;         // (head_dim, rows, heads, batch), boxes of 64 columns and 64 rows; packed, of as many rows of each of the heads as fit
  TensorMap k_map, v_map;  // likewise, kBlockN rows
  TensorMap out_map;       // likewise, 16 rows; only with kStoresByTma
};

// Which heads and queries the 64 rows of a consumer are: 64 queries of one head, or, packed, as many queries as fit of every head that
// shares a KV head, head by head. Scope: thread.
template <class Config>
struct FwdSm90Packing {
  FT_DEVICE static i32 num_heads(const Params& p) { return Config::kPacksHeads ? p.heads / p.heads_kv : 1; }
  FT_DEVICE static i32 num_queries(const Params& p) { return Config::kPacksHeads ? 64 / num_heads(p) : 64; }
  FT_DEVICE static i32 block_queries(const Params& p) { return Config::kNumConsumers * num_queries(p); }
};

// What producer and consumers must agree on: the sequence, the first query and the tiles of keys of one tile of work.
template <class Config, class Mask, class SeqInfo>
struct FwdSm90Work {
  static constexpr i32 kBlockN = Config::kBlockN;
  using Packing = FwdSm90Packing<Config>;
  TileCoord tile;
  Sequence s;
  i32 i_begin;  // of the first consumer; negative where that has no queries
  i32 n_begin, n_end;

  FT_DEVICE FwdSm90Work(const Params& p, const TileOrder<Mask, Config::kPacksHeads>& order, i32 index)
      : tile(order.at(p, index)), s(find_sequence<SeqInfo>(p, tile.batch)), i_begin(tile.m_block * Packing::block_queries(p)) {
    i32 block = Packing::block_queries(p);
    // Where the first queries see the fewest keys, it is not the last tile whose consumers are left without queries but the first
    if constexpr (Mask::kHasBand && !Config::kPacksHeads) {
      if (p.window_right >= 0) i_begin -= (ceil_div(s.seqlen_q, block) * block - s.seqlen_q) / 64 * 64;
    }
    Range keys = key_range<Mask>(p, s, max_of(i_begin, 0), min_of(i_begin + block, s.seqlen_q));
    n_begin = keys.begin / kBlockN;
    n_end = ceil_div(keys.end, kBlockN);
    if constexpr (mutates(Mutation::hopper_last_tile)) n_end = n_end - 1 > n_begin ? n_end - 1 : n_end;
    if (p.num_splits > 1) {
      i32 share = ceil_div(max_of(n_end - n_begin, 0), p.num_splits);
      n_begin += tile.split * share;
      if constexpr (mutates(Mutation::hopper_split)) n_begin -= tile.split * share;
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

// What a tile of work is about. It lies in shared memory and is read at every use: registers are scarce.
template <class Config, class Mask, class SeqInfo>
struct FwdSm90Order {
  FwdSm90Work<Config, Mask, SeqInfo> work;
  FwdSm90Tiles tiles[Config::kNumConsumers];
  u32 place;  // among all orders, this one's
  bool is_end;
};

template <class Config, class Mask, class SeqInfo>
struct alignas(1024) FwdSm90Storage {
  using T = typename Config::Element;
  T sQ[Config::kNumConsumers][Config::kElementsQ];
  T sK[Config::kNumStages][Config::kElementsK];
  T sV[Config::kNumStages][Config::kElementsV];
  T sP[Config::kNumConsumers][Config::kElementsP];
  u64 full_q[Config::kNumConsumers], empty_q[Config::kNumConsumers];
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  TileOrder<Mask, Config::kPacksHeads> tile_order;
  // The one whose Q a consumer has, the one before, whose O it may still be storing, and the one to come
  static constexpr u32 kNumOrders = 3;
  alignas(16) char orders[kNumOrders][sizeof(FwdSm90Order<Config, Mask, SeqInfo>)];
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
  using Work = FwdSm90Work<Config, Mask, SeqInfo>;
  using Order = FwdSm90Order<Config, Mask, SeqInfo>;
  using Packing = FwdSm90Packing<Config>;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers of a thread
  static constexpr bool kHasScoreMod = ScoreMod::kHasSoftcap || ScoreMod::kHasAlibi || ScoreMod::kHasBias;
  // Beside the options a mask costs little: one body for all tiles keeps the code short
  static constexpr bool kMasksAlways = kHasScoreMod || Mask::kHasBool || Dropout::kIsOn;
  // O leaves by the copy engine, by way of sP. Not where the rows behind a sequence's last are another's: a box does not end there.
  static constexpr bool kStoresByTma = Config::kStoresP && !SeqInfo::kHasLengths && kIsSame<Out, T>;
  static_assert(!kStoresByTma || Config::kElementsP >= 64 * 64 * Config::kSlabsV);

  // ---- Producer. Scope: one thread.

  // A map has one head or batch where the stride along them is 0: broadcast, or packed. Its boxes have num_rows of a tile's kRows rows.
  template <i32 kRows, i32 kSlabs>
  FT_DEVICE static void load_tile(T* tile, const TensorMap& map, const Strides& strides, u64& full, i32 num_rows, i32 row, i32 head, const Work& work) {
    i32 map_head = strides.head == 0 ? 0 : head, map_batch = strides.batch == 0 ? 0 : work.tile.batch;
    mbarrier_arrive_expect(full, num_rows * kSlabs * 128);
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) load_box(tile + slab * kRows * 64, map, full, slab * 64, row, map_head, map_batch);
  }

  FT_DEVICE static Order& order_at(Storage& shared, u32 place) { return *reinterpret_cast<Order*>(shared.orders[place % Storage::kNumOrders]); }

  // Which of the tiles of keys matter to the rows of one consumer.
  FT_DEVICE static FwdSm90Tiles find_tiles(const Params& p, const Work& work, i32 i_group) {
    Range seen = key_range<Mask>(p, work.s, i_group, i_group + Packing::num_queries(p));
    Range free = common_key_range<Mask>(p, work.s, i_group, i_group + Packing::num_queries(p));
    bool has_queries = i_group >= 0 && i_group < work.s.seqlen_q;
    return {Range{ceil_div(free.begin, kBlockN), Mask::kHasBool ? 0 : free.end / kBlockN},
            has_queries ? min_of(work.n_end, ceil_div(seen.end, kBlockN)) : work.n_begin};
  }

  FT_DEVICE static void produce(const FwdSm90Params& params, Storage& shared) {
    const Params& p = params.base;
    const auto& tile_order = shared.tile_order;
    u32 num_k = 0, num_v = 0, num_q = 0;
    for (i32 index = tile_order.first();; index = tile_order.next(index)) {
      // Its readers were done when they handed back the Q of two orders before this
      Order& order = order_at(shared, num_q);
      Work& work = order.work;
      order.place = num_q;
      order.is_end = index >= tile_order.num_indices;
      bool is_end = order.is_end;
      if (!is_end) {
        work = Work(p, tile_order, index);
        if constexpr (mutates(Mutation::hopper_later_tile)) if (num_q == 3) work = Work(p, tile_order, tile_order.first());
        if (!work.has_queries()) continue;
      }
      i32 kv_head = Config::kPacksHeads ? work.tile.head : work.tile.head / (p.heads / p.heads_kv), k_row = static_cast<i32>(work.s.k_row);
      if constexpr (mutates(Mutation::hopper_gqa_head)) kv_head = work.tile.head % p.heads_kv;
      auto load_k = [&](i32 n) {
        u32 stage = Stages::stage(num_k);
        mbarrier_wait(shared.empty_k[stage], Stages::phase(num_k) ^ 1);
        load_tile<kBlockN, Config::kSlabsQK>(shared.sK[stage], params.k_map, p.k_strides, shared.full_k[stage], kBlockN, k_row + n * kBlockN, kv_head, work);
        ++num_k;
      };
      auto load_v = [&](i32 n) {
        u32 stage = Stages::stage(num_v);
        mbarrier_wait(shared.empty_v[stage], Stages::phase(num_v) ^ 1);
        load_tile<kBlockN, Config::kSlabsV>(shared.sV[stage], params.v_map, p.v_strides, shared.full_v[stage], kBlockN, k_row + n * kBlockN, kv_head, work);
        ++num_v;
      };
      bool has_keys = !is_end && work.has_keys();
      // Load the first K, Q group by group, then K and V in the order in which the consumers want and free them
      if (has_keys) load_k(work.n_end - 1);
      i32 num_heads = Packing::num_heads(p), num_queries = Packing::num_queries(p);
      for (i32 group = 0; group < Config::kNumConsumers && !is_end; ++group) {
        order.tiles[group] = find_tiles(p, work, work.i_begin + num_queries * group);
      }
      for (i32 group = 0; group < Config::kNumConsumers; ++group) {
        mbarrier_wait(shared.empty_q[group], num_q % 2 ^ 1);
        if (has_keys) {
          load_tile<64, Config::kSlabsQK>(shared.sQ[group], params.q_map, p.q_strides, shared.full_q[group], num_heads * num_queries,
                                          static_cast<i32>(work.s.q_row) + work.i_begin + num_queries * group, work.tile.head * num_heads, work);
        } else {
          mbarrier_arrive(shared.full_q[group]);
        }
      }
      ++num_q;
      if (is_end) return;
      if (!has_keys) continue;
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

  // O += P V, under way on return. P is in registers, or in shared memory at p.
  FT_DEVICE static void product_pv(float (&rO)[kOutputs], const u32 (&rP)[kScores / 2], u32 p, u32 v) {
    wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kBlockN / 16; ++step) {
      u64 b = tile_descriptor(v + step * (16 * 128 >> 4));
      if constexpr (Config::kStoresP) {
        Wgmma<T, Config::kHeadDimV>::template ss<true>(rO, tile_descriptor(p + step / 4 * (64 * 128 >> 4) + step % 4 * 2), b, 1);
      } else {
        const u32* a = rP + 4 * step;
        Wgmma<T, Config::kHeadDimV>::template rs<true>(rO, a[0], a[1], a[2], a[3], b, 1);
      }
    }
    wgmma_commit();
  }

  // The query and the head of each of this thread's two rows; a row that is none has a query outside the sequence, and a head that exists.
  struct Rows {
    i32 i[2], packed_head[2];
    FT_DEVICE Rows(const Params& p, const Work& work, i32 group) {
      i32 num_heads = Packing::num_heads(p), num_queries = Packing::num_queries(p);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        i32 row = fragment_row() + 8 * r;
        i[r] = work.i_begin + num_queries * group + row;
        if constexpr (Config::kPacksHeads) {
          i32 head = row / num_queries;
          i[r] = head < num_heads ? i[r] - head * num_queries : p.seqlen_q;
          packed_head[r] = work.tile.head * num_heads + min_of(head, num_heads - 1);
        }
      }
    }
    FT_DEVICE bool is_query(const Work& work, i32 r) const { return static_cast<u32>(i[r]) < static_cast<u32>(work.s.seqlen_q); }
    FT_DEVICE i32 head(const Work& work, i32 r) const { return Config::kPacksHeads ? packed_head[r] : work.tile.head; }
  };

  // Score modifiers, then -inf for what is not seen.
  FT_DEVICE static void modify_scores(const Params& p, const Work& work, i32 group, i32 j_begin,
                                      float (&rS)[kScores]) {
    Rows rows(p, work, group);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      // Rows behind the last query compute, but must not read behind it
      i32 i = min_of(rows.i[r], work.s.seqlen_q - 1), head = rows.head(work, r);
      Scorer<ScoreMod> scorer(p, work.s, head);
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
          if constexpr (Mask::kHasBool) is_kept = is_kept && is_seen<Mask>(p, work.s, head, i, j_first + place);
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
  FT_DEVICE static void pack_probabilities(const Params& p, const Work& work, i32 group, i32 j_begin, float (&rS)[kScores], u32 (&rP)[kScores / 2]) {
    if constexpr (Dropout::kIsOn) {
      static_assert(kBlockN % 32 == 0);
      Rows rows(p, work, group);
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        DropoutBits bits(p, work.s, rows.head(work, r));
#pragma unroll
        for (i32 b = 0; b < kBlockN / 8; b += 4) {
          // Each lane of a quad draws the four words of one group of 8 columns; word t belongs to lane t
          uint4 drawn = bits.words(rows.i[r], j_begin / 8 + b + threadIdx.x % 4);
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

  // All lanes together: once one of them hands this Q back, the producer may write over the order before, which none may be reading then,
  // and end the next phase, in which none may be waiting for this one.
  FT_DEVICE static void wait_q(Storage& shared, i32 group, u32 place) {
    mbarrier_wait(shared.full_q[group], place % 2);
    __syncwarp();
  }
  FT_DEVICE static void wait_k(Storage& shared, u32 count) { mbarrier_wait(shared.full_k[Stages::stage(count)], Stages::phase(count)); }
  FT_DEVICE static void wait_v(Storage& shared, u32 count) { mbarrier_wait(shared.full_v[Stages::stage(count)], Stages::phase(count)); }
  // One lane of each warp hands a tile back: the last, whose reads are those of a warp that racecheck remembers.
  FT_DEVICE static void release(u64& empty) {
    if (threadIdx.x % 32 == 31) mbarrier_arrive(empty);
  }
  // Turns go round the consumers; each has as many in a tile of work as there are tiles of keys but one.
  FT_DEVICE static void take_turn(i32 group) {
    if constexpr (Config::kTakesTurns) named_barrier_sync(kTurnBarrier + group, 256);
  }
  FT_DEVICE static void pass_turn(i32 group) {
    if constexpr (Config::kTakesTurns) named_barrier_arrive(kTurnBarrier + (group + 1) % Config::kNumConsumers, 256);
  }

  // All tiles of keys of one tile of work. num_k counts the tiles of K so far; V is one behind.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Order& order, i32 group, u32& num_k, float factor, Softmax& softmax,
                                 float (&rO)[kOutputs]) {
    const Work& work = order.work;
    const FwdSm90Tiles& tiles = order.tiles[group];
    auto q_tile = [&] { return tile_base(shared.sQ[group], 64 * 128); };
    auto p_tile = [&] { return tile_base(shared.sP[group], 64 * 128); };
    auto k_tile = [&](u32 count) { return tile_base(shared.sK[Stages::stage(count)], kBlockN * 128); };
    auto v_tile = [&](u32 count) { return tile_base(shared.sV[Stages::stage(count)], kBlockN * 128); };
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= tiles.free.end || n < tiles.free.begin; };
    i32 n = work.n_end - 1;

    // Tiles that hide everything from this group: hand them back, lanes together as in wait_q, and the turn on
    for (; n >= tiles.end && n >= work.n_begin; --n, ++num_k) {
      wait_k(shared, num_k);
      __syncwarp();
      release(shared.empty_k[Stages::stage(num_k)]);
      wait_v(shared, num_k);
      __syncwarp();
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

    // K of a tile whose scores are there, with the last one Q too
    auto release_operands = [&] {
      release(shared.empty_k[Stages::stage(num_k)]);
      if (n == work.n_begin) release(shared.empty_q[group]);
    };

    // First tile: S = Q K^T, softmax
    u32 rP[kScores / 2];
    {
      float rS[kScores];
      wait_k(shared, num_k);
      product_qk(rS, q_tile(), k_tile(num_k));
      wgmma_wait<0>();
      pin_registers(rS);
      release_operands();
      if (needs_mask(n)) modify_scores(p, work, group, n * kBlockN, rS);
      raise_maximum<true, true>(factor, softmax, rS);
      exponentiate<true, true>(factor, softmax, rS);
      pack_probabilities(p, work, group, n * kBlockN, rS, rP);
      if constexpr (Config::kStoresP) {
        await_stored_rows();
        store_fragment(shared.sP[group], rP);
      }
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
      u32 q = q_tile(), k = k_tile(num_k);
      wait_k(shared, num_k);
      take_turn(group);
      product_qk(rS, q, k);
      wait_v(shared, num_k - 1);
      product_pv(rO, rP, p_tile(), v_tile(num_k - 1));
      pass_turn(group);
      // Softmax while the second product is under way
      wgmma_wait<1>();
      pin_registers(rS);
      release_operands();
      if constexpr (kIsMasked) modify_scores(p, work, group, n * kBlockN, rS);
      raise_maximum<false, kIsMasked>(factor, softmax, rS);
      // Not after the exponentials: rescaling and packing fill the gaps between them
      wgmma_wait<0>();
      pin_registers(rO);
      release(shared.empty_v[Stages::stage(num_k - 1)]);
      exponentiate<false, kIsMasked>(factor, softmax, rS);
      pack_probabilities(p, work, group, n * kBlockN, rS, rP);
      if constexpr (Config::kStoresP) store_fragment(shared.sP[group], rP);
      rescale(softmax, rO);
      ++num_k;
    };
    for (--n; n >= work.n_begin; --n) {
      // Without a band only the first tile has an edge
      if constexpr (Mask::kHasBand && !kMasksAlways) {
        if (needs_mask(n)) {
          step(Constant<true>());
          continue;
        }
      }
      step(Constant<kMasksAlways>());
    }

    // Add the last P V
    wait_v(shared, num_k - 1);
    product_pv(rO, rP, p_tile(), v_tile(num_k - 1));
    wgmma_wait<0>();
    pin_registers(rO);
    release(shared.empty_v[Stages::stage(num_k - 1)]);
  }

  FT_DEVICE static void consume(const FwdSm90Params& params, Storage& shared, i32 group) {
    const Params& p = params.base;
    float factor = kHasScoreMod ? 1.0f : p.scale_log2;
    u32 num_k = 0;
    // The first turn is that of group 0
    if (group == Config::kNumConsumers - 1) pass_turn(group);
    const Order* order = &order_at(shared, 0);
    wait_q(shared, group, 0);
    while (!order->is_end) {
      Softmax softmax{{-infinity(), -infinity()}, {0.0f, 0.0f}, {1.0f, 1.0f}, false};
      float rO[kOutputs];
#pragma unroll
      for (i32 x = 0; x < kOutputs; ++x) rO[x] = 0.0f;
      if (order->work.has_keys()) {
        mainloop(p, shared, *order, group, num_k, factor, softmax, rO);
      } else {
        release(shared.empty_q[group]);
      }
      store(params, shared, order->work, group, factor, softmax, rO);
      u32 next = order->place + 1;
      wait_q(shared, group, next);
      order = &order_at(shared, next);
    }
    if constexpr (kStoresByTma) await_stored_rows();
  }

  // Lets the sink join (once: in the combination, where there is one), normalises, stores O and lse; of a split, sum, m and l. Scope: warp.
  FT_DEVICE static void store(const FwdSm90Params& params, Storage& shared, const Work& work, i32 group, float factor,
                              const Softmax& softmax, const float (&rO)[kOutputs]) {
    const Params& p = params.base;
    Rows rows(p, work, group);
    bool is_part = p.num_splits > 1;
    float norm[2];
    i64 part[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = rows.i[r], head = rows.head(work, r);
      float sink = p.sinks == nullptr || is_part ? -infinity() : p.sinks[head] * kLog2e;
      float m = softmax.m[r] * factor;
      float m_new = fmaxf(m, sink);
      float shift = m_new == -infinity() ? 0.0f : m_new;
      float alpha = exp2_approx(m - shift);
      float l = quad_sum(softmax.l[r]) * alpha + exp2_approx(sink - shift);
      norm[r] = is_part ? 1.0f : l == 0.0f ? 0.0f : alpha / l;
      i64 stat = work.s.stat_row + head * p.lse_head_stride + i;
      part[r] = work.tile.split * p.lse_size + stat;
      if constexpr (mutates(Mutation::hopper_uninitialised)) if (rows.is_query(work, r)) l += p.lse[stat] == 1.5f ? 1.0f : 0.0f;
      if constexpr (mutates(Mutation::hopper_out_of_bounds)) p.lse[p.lse_size] = 0.0f;
      if (rows.is_query(work, r) && threadIdx.x % 4 == 0) store_stats(p, is_part, part[r], stat, m_new, l);
    }
    if constexpr (kStoresByTma) {
      if (!is_part) {
        store_by_tma(params, shared, work, group, norm, rO);
        return;
      }
    }
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 i = rows.i[r], head = rows.head(work, r);
      bool is_inside = rows.is_query(work, r);
      if (is_part || kIsSame<Out, float>) {
        float* gO = is_part ? p.partial_out + part[r] * p.head_dim_v
                            : reinterpret_cast<float*>(query_rows(static_cast<Out*>(p.out), p.out_strides, work.s, head) + i * p.out_strides.row);
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; ++b) {
          i32 column = 8 * b + fragment_column();
          float2 two = make_float2(rO[4 * b + 2 * r] * norm[r], rO[4 * b + 2 * r + 1] * norm[r]);
          if (is_inside && column < p.head_dim_v) *reinterpret_cast<float2*>(gO + column) = two;
        }
      } else if constexpr (!kIsSame<Out, float>) {
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, work.s, head) + i * p.out_strides.row;
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
          u32 words[4];
#pragma unroll
          for (i32 g = 0; g < 4; ++g) words[g] = pack_two<Out>(rO[4 * (b + g) + 2 * r] * norm[r], rO[4 * (b + g) + 2 * r + 1] * norm[r]);
          quad_transpose(words);
          i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
          if (is_inside && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  // O by way of sP, 16 rows of a warp at a time; rows and columns outside the tensor are dropped. Under way on return. Scope: warp.
  FT_DEVICE static void store_by_tma(const FwdSm90Params& params, Storage& shared, const Work& work, i32 group, const float (&norm)[2],
                                     const float (&rO)[kOutputs]) {
    u32 packed[kOutputs / 2];
#pragma unroll
    for (i32 x = 0; x < kOutputs / 2; ++x) packed[x] = pack_two<T>(rO[2 * x] * norm[x % 2], rO[2 * x + 1] * norm[x % 2]);
    await_stored_rows();
    store_fragment(shared.sP[group], packed);
    i32 first = threadIdx.x % 128 / 32 * 16, row = work.i_begin + 64 * group + first;
    if (threadIdx.x % 32 == 0 && row >= 0) {
#pragma unroll
      for (i32 slab = 0; slab < Config::kSlabsV; ++slab) {
        store_box(shared.sP[group] + (slab * 64 + first) * 64, params.out_map, slab * 64, row, work.tile.head, work.tile.batch);
      }
      bulk_commit();
    }
  }
  // Until this warp's last rows have left sP. Scope: warp.
  FT_DEVICE static void await_stored_rows() {
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
    __syncwarp();
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
    shared.tile_order.init(params.base, FwdSm90Packing<Config>::block_queries(params.base));
  }
  __syncthreads();
  if constexpr (mutates(Mutation::hopper_race)) if (threadIdx.x == 0) shared.tile_order.init(params.base, FwdSm90Packing<Config>::block_queries(params.base));

  i32 group = uniform(threadIdx.x / 128);
  if (group == Config::kNumConsumers) {
    lower_registers<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 4 * Config::kNumConsumers && elect_lane()) {
      // Where there are no keys their maps are empty
      if (params.base.seqlen_k > 0) {
        prefetch_map(params.q_map);
        prefetch_map(params.k_map);
        prefetch_map(params.v_map);
        if constexpr (Kernel::kStoresByTma) prefetch_map(params.out_map);
      }
      Kernel::produce(params, shared);
    }
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(params, shared, group);
  }
}

}  // namespace flashtile
