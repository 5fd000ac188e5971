// Attention forward on Hopper for few queries: what counts is how fast keys arrive. wgmma products over 64 rows, the
// queries of all heads that share a KV head; a ring of small K and V tiles; keys dealt out evenly over the blocks
// (schedule.cuh); partial results joined in the same launch.
//
// Threads:   warps 0 to 3 are the consumer: scores, softmax, output. Warps 4 and 5 are the producer: warp 4 finds the
//            work items and issues the TMA copies; pages are copied by both (attn/paged_keys.cuh).
// Shared:    sQ [slab][64][64], sK, sV [stage][slab][kBlockN][64], 128-byte swizzled; barriers; three work items.
// Barriers:  full_* complete by copies, empty_* by one arrival per consumer warp. A work item arrives with Q.
// Parts:     a block that has only some keys of a row tile stores m, l and the sum of P V to its slot in global memory
//            and then sets the slot's flag. The block with the row tile's last unit waits for the flags of the others,
//            clears them, and joins the parts in the order of the blocks. The flags are kept zeros (runtime/kept.py):
//            nothing else writes them, and each launch leaves them as it found them.
// Refuses:   unaligned rows, bias, bool mask, dropout.
#pragma once

#include "device/attn/merge.cuh"
#include "device/attn/online_softmax.cuh"
#include "device/attn/paged_keys.cuh"
#include "device/attn/score_fragment.cuh"
#include "device/attn/unused_rows.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/block_barrier.cuh"
#include "device/ptx/dependent_launch.cuh"
#include "device/ptx/signal.cuh"
#include "device/tile/epilogue.cuh"
#include "device/tile/wgmma_gemm.cuh"
#include "families/decode_sm90/config.cuh"
#include "families/decode_sm90/schedule.cuh"

namespace flashtile {

// The maps' axes are (head_dim, rows, heads, batch); their boxes have 64 columns. partial_out is (blocks, 64,
// head_dim_v); partial_stats is (blocks, 64, 2).
struct DecodeSm90Params {
  Params base;
  TensorMap q_map;         // boxes of 64 / num_heads rows of num_heads heads
  TensorMap k_map, v_map;  // boxes of kBlockN rows; of pages as PagedKeys says
  u32* part_flags;         // (blocks), 0 between launches; 1: the block's part is ready
};

template <class Config>
struct alignas(1024) DecodeSm90Storage {
  using T = typename Config::Element;
  T sQ[Config::kElementsQ];
  T sK[Config::kNumStages][Config::kElementsK];
  T sV[Config::kNumStages][Config::kElementsV];
  u64 full_q, empty_q;
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  WorkItemRing<DecodeItem> items;
  float2 stats[64];  // m and l of this block's part, for the join
};

template <class Config, class Mask, class ScoreMod, class SeqInfo, class KvSource>
struct DecodeSm90 {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using Storage = DecodeSm90Storage<Config>;
  using Stages = KeyRing<Config::kNumStages, KvSource::kIsPaged>;
  using Pages = PagedKeys<Config::kBlockN, Config::kProducerWarps, true>;
  using Schedule = DecodeSchedule<Config, Mask, SeqInfo>;
  using Rows = FragmentRows<Config>;
  using Softmax = OnlineSoftmax<true, ScoreMod::kIsNatural>;
  static constexpr bool kIsNatural = ScoreMod::kIsNatural;
  static constexpr float kFactor = exponent_factor(kIsNatural);
  static constexpr i32 kBlockN = Config::kBlockN;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per thread
  static_assert(!ScoreMod::kHasBias && !Mask::kHasBool);
  // This block's part of a join lies where K was
  static_assert(sizeof(Storage::sK) >= 64 * Config::kHeadDimV * sizeof(float));

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(const Params& p, Storage& shared) {
    u32 num_producers = KvSource::kIsPaged ? Pages(p).num_arrivals() : 1;
    mbarrier_init(shared.full_q, 1);
    mbarrier_init(shared.empty_q, 4);
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_k[stage], num_producers);
      mbarrier_init(shared.full_v[stage], num_producers);
      mbarrier_init(shared.empty_k[stage], 4);
      mbarrier_init(shared.empty_v[stage], 4);
    }
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // A barrier of the block must follow. Scope: consumer warpgroup.
  FT_DEVICE static void set_up(const Params& p, Storage& shared) {
    if (threadIdx.x == 0) init(p, shared);
    clear_unused_rows<Config>(p, shared.sQ);
  }

  // ---- Producer. Scope: each of its warps.

  // A map has size 1 along an axis whose stride is 0.
  template <i32 kSlabs>
  FT_DEVICE static void load_keys(T* sTile, const TensorMap& map, const void* base, const Strides& strides,
                                  i32 num_columns, u64& full, i32 n, i32 kv_head, const DecodeItem& item,
                                  const Pages& pages, typename Pages::Place place) {
    if constexpr (KvSource::kIsPaged) {
      pages.template copy<kSlabs>(sTile, map, static_cast<const T*>(base), strides, num_columns, full, place, kv_head,
                                  item.s.seqlen_k - n * kBlockN);
    } else {
      if (threadIdx.x % 32 != 0) return;
      mbarrier_arrive_expect(full, kBlockN * kSlabs * 128);
#pragma unroll
      for (i32 slab = 0; slab < kSlabs; ++slab) {
        load_box_once(sTile + slab * kBlockN * 64, map, full, slab * 64, static_cast<i32>(item.s.k_row) + n * kBlockN,
                      strides.head == 0 ? 0 : kv_head, strides.batch == 0 ? 0 : item.coord.batch);
      }
    }
  }

  FT_DEVICE static void produce(const DecodeSm90Params& params, Storage& shared) {
    const Params& p = params.base;
    Pages pages(p);
    wait_for_previous();
    Schedule schedule(p);
    if constexpr (!kHasOneBarrier) __syncthreads();  // after set_up
    bool is_first = threadIdx.x == 128;
    i32 num_heads = schedule.num_heads, num_queries = schedule.num_queries;
    u32 num_tiles = 0;
    for (u32 num_items = 0;; ++num_items) {
      // Publish the next work item with its Q. Its slot is free: the consumers have released the Q of item
      // num_items - 2, so they have finished item num_items - 3.
      DecodeItem item;
      bool is_end = schedule.is_done();
      if (!is_end) item = schedule.take();
      item.is_end = is_end;
      bool has_keys = !is_end && item.has_keys();
      typename Pages::Place place{}, ahead{};
      if constexpr (KvSource::kIsPaged) {
        if (has_keys) place = pages.find(item.s, item.n_end - 1);
      }
      if (is_first) shared.items.at(num_items) = item;
      if (threadIdx.x / 32 == 4) {
        mbarrier_wait(shared.empty_q, num_items % 2 ^ 1);
        if (has_keys) {
          if (is_first) {
            load_slabs<64, Config::kSlabsQK>(shared.sQ, params.q_map, shared.full_q, num_heads * num_queries,
                                             static_cast<i32>(item.s.q_row) + item.i_begin,
                                             p.q_strides.head == 0 ? 0 : item.coord.head,
                                             p.q_strides.batch == 0 ? 0 : item.coord.batch);
          }
        } else if (is_first) {
          mbarrier_arrive(shared.full_q);
        }
      }
      if (is_end) {
        // All copies have been started. Earlier, the blocks of the next kernel would crowd some multiprocessors
        launch_dependents();
        return;
      }
      if (!has_keys) continue;
      // Load K and V tiles from the last to the first; find pages one tile ahead
      i32 kv_head = item.coord.head / (p.heads / p.heads_kv);
      for (i32 n = item.n_end - 1; n >= item.n_begin; --n, ++num_tiles) {
        if constexpr (KvSource::kIsPaged) {
          if (n > item.n_begin) ahead = pages.find(item.s, n - 1);
        }
        u32 stage = Stages::stage(num_tiles);
        Stages::wait_empty(shared.empty_k, num_tiles);
        load_keys<Config::kSlabsQK>(shared.sK[stage], params.k_map, p.k, p.k_strides, p.head_dim, shared.full_k[stage],
                                    n, kv_head, item, pages, place);
        Stages::wait_empty(shared.empty_v, num_tiles);
        load_keys<Config::kSlabsV>(shared.sV[stage], params.v_map, p.v, p.v_strides, p.head_dim_v, shared.full_v[stage],
                                   n, kv_head, item, pages, place);
        place = ahead;
      }
    }
  }

  // ---- Consumer. Scope: warpgroup.

  FT_DEVICE static void sync_consumer() { named_barrier_sync(kConsumerBarrier, 128); }

  // Processes the key tiles of one work item. num_tiles counts the tiles so far.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const DecodeItem& item, const Rows& rows,
                                 u32& num_tiles, float factor, Softmax& softmax, float (&rO)[kOutputs]) {
    u32 rP[kScores / 2];
    i32 n = item.n_end - 1, n_begin = item.n_begin;
    auto step = [&](auto is_first) {
      constexpr bool kIsFirst = decltype(is_first)::kValue;
      float rS[kScores];
      u32 stage = Stages::stage(num_tiles);
      // S = Q K^T, in flight behind O += P V of the tile before
      Stages::wait_full(shared.full_k, num_tiles);
      gemm_abt<T, kBlockN, Config::kHeadDim>(rS, tile_base(shared.sQ, 64 * 128),
                                             tile_base(shared.sK[stage], kBlockN * 128));
      wgmma_wait<0>();
      pin_registers(rS);
      pin_registers(rO);
      if constexpr (!kIsFirst) release_stage(shared.empty_v[Stages::stage(num_tiles - 1)]);
      release_stage(shared.empty_k[stage]);
      if (n == n_begin) release_stage(shared.empty_q);
      // Mask and softmax
      bool is_edge = ScoreMod::kChangesScores || n >= item.unmasked.end || n < item.unmasked.begin;
      if (is_edge) modify_tile<Mask, ScoreMod>(p, item, rows, n * kBlockN, rS);
      softmax.template raise_maximum<kIsFirst, true>(factor, rS);
      softmax.template exponentiate<kIsFirst, true>(factor, rS);
#pragma unroll
      for (i32 x = 0; x < kScores / 2; ++x) rP[x] = pack_two<T>(rS[2 * x], rS[2 * x + 1]);
      if constexpr (!kIsFirst) softmax.rescale(rO);
      // O += P V
      Stages::wait_full(shared.full_v, num_tiles);
      if constexpr (SeqInfo::kHasLengths || KvSource::kIsPaged) {
        // Rows of V past the last key may be anything, and 0 * NaN is NaN
        if ((n + 1) * kBlockN > item.s.seqlen_k) {
          i32 num_rows = item.s.seqlen_k - n * kBlockN;
          if constexpr (mutates(Mutation::decode_sm90_tail)) num_rows = kBlockN;
          clear_rows<kBlockN, Config::kSlabsV>(shared.sV[stage], num_rows);
          sync_consumer();
        }
      }
      gemm_ab<T, Config::kHeadDimV, kBlockN>(rO, rP, tile_base(shared.sV[stage], kBlockN * 128));
      ++num_tiles;
    };
    step(Constant<true>());
    for (--n; n >= n_begin; --n) step(Constant<false>());
    wgmma_wait<0>();
    pin_registers(rO);
    release_stage(shared.empty_v[Stages::stage(num_tiles - 1)]);
  }

  // ---- Epilogue.

  FT_DEVICE static float2* part_stats(const Params& p, i32 block) {
    return reinterpret_cast<float2*>(p.partial_stats) + block * 64;
  }
  FT_DEVICE static float* part_rows(const Params& p, i32 block) {
    return p.partial_out + static_cast<i64>(block) * 64 * p.head_dim_v;
  }

  // Stores O and lse. Scope: warp.
  FT_DEVICE static void store(const Params& p, const DecodeItem& item, const Rows& rows, float factor,
                              const Softmax& softmax, const float (&rO)[kOutputs]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 head = rows.head(item, r), i = rows.i[r];
      bool is_query = rows.is_query(item, r);
      float sink = p.sinks == nullptr ? -infinity() : in_score_unit(kIsNatural, p.sinks[head]);
      float m = ScoreMod::kChangesScores ? softmax.m[r] : softmax.m[r] * factor;
      RowStats stats = join_sink<kIsNatural>(m, softmax.l[r], sink, [](float l) { return quad_sum(l); });
      float norm = stats.norm();
      if (is_query && threadIdx.x % 4 == 0)
        p.lse[stat_index(p, item.s, head, i)] = lse_of(kIsNatural, stats.m, stats.l);
      Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, item.s, head) + i * p.out_strides.row;
      if constexpr (kIsSame<Out, float>) {
        store_row_float(gO, is_query, p.head_dim_v, r, norm, rO);
      } else {
#pragma unroll
        for (i32 b = 0; b < Config::kHeadDimV / 8; b += 4) {
          uint4 chunk = packed_chunk<Out>(rO, b, r, norm);
          i32 column = 8 * (b + static_cast<i32>(threadIdx.x % 4));
          if (is_query && column < p.head_dim_v) *reinterpret_cast<uint4*>(gO + column) = chunk;
        }
      }
    }
  }

  // Stores m, l and the sum of P V of the rows with a query. Scope: warp.
  FT_DEVICE static void store_part(const Params& p, const DecodeItem& item, const Rows& rows, float factor,
                                   const Softmax& softmax, const float (&rO)[kOutputs], float* out, float2* stats) {
    i32 queries = item.num_queries;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      bool is_query = rows.is_query(item, r);
      i32 row = (rows.head(item, r) - item.coord.head) * queries + rows.i[r] - item.i_begin;
      float m = ScoreMod::kChangesScores ? softmax.m[r] : softmax.m[r] * factor, l = quad_sum(softmax.l[r]);
      if (is_query && threadIdx.x % 4 == 0) stats[row] = make_float2(m, l);
      store_row_float(out + row * p.head_dim_v, is_query, p.head_dim_v, r, 1.0f, rO);
    }
  }

  FT_DEVICE static void store_four(float* out, float4 x) { *reinterpret_cast<float4*>(out) = x; }
  template <typename Half>
  FT_DEVICE static void store_four(Half* out, float4 x) {
    *reinterpret_cast<uint2*>(out) = make_uint2(pack_two<Half>(x.x, x.y), pack_two<Half>(x.z, x.w));
  }
  FT_DEVICE static void add_scaled(float4& sum, float weight, float4 x) {
    sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
  }

  // Waits for the parts of a row tile that blocks before this one have. Scope: warpgroup.
  FT_DEVICE static void wait_for_parts(const DecodeSm90Params& params, const DecodeItem& item, i32 num_parts) {
    for (i32 part = threadIdx.x; part < num_parts; part += 128) {
      u32* flag = params.part_flags + item.first_block + part;
      acquire_flag(flag, 1);
      *flag = 0;
    }
    sync_consumer();
  }

  // Joins kRows rows of a row tile from `first` on: for m and l the lanes share the parts, for O the columns. 16 parts
  // of rows are in flight together. Waits for the parts first, if told so: all that needs none of them comes before.
  // Scope: warp.
  template <i32 kRows>
  FT_DEVICE static void join_rows(const DecodeSm90Params& params, const Storage& shared, const DecodeItem& item,
                                  i32 first, i32 num_rows, i32 num_parts, bool must_wait) {
    const Params& p = params.base;
    constexpr i32 kColumns = 128, kParts = 16 / kRows;
    i32 lane = threadIdx.x % 32, queries = item.num_queries;
    const float* own = reinterpret_cast<const float*>(shared.sK);
    i32 row[kRows], head[kRows];
    float sink[kRows], m[kRows], shift[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      row[r] = min_of(first + r, num_rows - 1);  // the last row again, where there is none
      head[r] = item.coord.head + row[r] / queries;
      sink[r] = p.sinks == nullptr ? -infinity() : in_score_unit(kIsNatural, p.sinks[head[r]]);
    }
    const float2* stats = part_stats(p, item.first_block);
    const float* columns = part_rows(p, item.first_block) + 4 * lane;
    i32 part_size = 64 * p.head_dim_v;
    // Lane z has the statistics of part z of each 32
    auto stats_of = [&](i32 r, i32 part) {
      float2 found = make_float2(-infinity(), 0.0f);
      if (part < num_parts) found = load_from_l2(stats + part * 64 + row[r]);
      return found;
    };
    float4 x[kRows][kParts];
    auto load_parts = [&](i32 slice, i32 begin) {
      i32 num_left = slice + 4 * lane < p.head_dim_v ? num_parts - begin : 0;
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const float* from = columns + slice + row[r] * p.head_dim_v + static_cast<i64>(begin) * part_size;
#pragma unroll
        for (i32 y = 0; y < kParts; ++y, from += part_size) {
          x[r][y] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (y < num_left) x[r][y] = load_from_l2(reinterpret_cast<const float4*>(from));
        }
      }
    };
    if (must_wait) wait_for_parts(params, item, num_parts);
    float2 kept[kRows];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) kept[r] = stats_of(r, lane);
    load_parts(0, 0);
    // Find the common maxima
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      m[r] = fmaxf(fmaxf(sink[r], shared.stats[row[r]].x), kept[r].x);
#pragma unroll 1
      for (i32 part = lane + 32; part < num_parts; part += 32) m[r] = fmaxf(m[r], stats_of(r, part).x);
      m[r] = lanes_max<32>(m[r]);
      shift[r] = shift_of(m[r]);
    }
    for (i32 slice = 0; slice < p.head_dim_v; slice += kColumns) {
      i32 column = slice + 4 * lane;
      bool is_inside = column < p.head_dim_v;
      // Begin with this block's part and the sink
      float l[kRows];
      float4 sum[kRows];
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        float2 own_stats = shared.stats[row[r]];
        float weight = exp_difference(own_stats.x, shift[r], kFactor);
        l[r] = weight * own_stats.y + exp_difference(sink[r], shift[r], kFactor);
        sum[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float* from = own + row[r] * p.head_dim_v + column;
        if (is_inside) add_scaled(sum[r], weight, *reinterpret_cast<const float4*>(from));
      }
      // Add the other parts
      for (i32 begin = 0; begin < num_parts; begin += kParts) {
        if (begin + slice > 0) load_parts(slice, begin);
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) {
          if (begin % 32 == 0 && begin + slice > 0) kept[r] = stats_of(r, begin + lane);
          float weight = exp_difference(kept[r].x, shift[r], kFactor);
          if (begin % 32 == 0) l[r] += lanes_sum<32>(weight * kept[r].y);
          if constexpr (mutates(Mutation::decode_sm90_weight)) weight = 1.0f;
#pragma unroll
          for (i32 y = 0; y < kParts; ++y) {
            add_scaled(sum[r], __shfl_sync(0xffffffffu, weight, begin % 32 + y), x[r][y]);
          }
        }
      }
      // Normalise and store
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        i32 i = item.i_begin + row[r] % queries;
        float norm = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
        if (lane == 0) p.lse[stat_index(p, item.s, head[r], i)] = lse_of(kIsNatural, m[r], l[r]);
        sum[r].x *= norm, sum[r].y *= norm, sum[r].z *= norm, sum[r].w *= norm;
        Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, item.s, head[r]) + i * p.out_strides.row;
        if (is_inside) store_four(gO + column, sum[r]);
      }
    }
  }

  // Joins the parts of a row tile, of which this block's own is in shared memory. Scope: warpgroup.
  FT_DEVICE static void join(const DecodeSm90Params& params, Storage& shared, const DecodeItem& item) {
    i32 num_parts = static_cast<i32>(blockIdx.x) - item.first_block;
    i32 num_rows = item.num_queries * item.num_heads, warp = threadIdx.x / 32;
    // Each warp waits in join_rows, or here if it has no rows
    constexpr bool kWaitsLate = !kHasOneBarrier;
    if constexpr (!kWaitsLate) wait_for_parts(params, item, num_parts);
    if (num_rows > 4 && num_parts <= 8) {
      for (i32 first = 4 * warp; first < num_rows; first += 16) {
        join_rows<4>(params, shared, item, first, num_rows, num_parts, kWaitsLate && first < 16);
      }
      if (kWaitsLate && 4 * warp >= num_rows) wait_for_parts(params, item, num_parts);
    } else {
      for (i32 first = warp; first < num_rows; first += 4) {
        join_rows<1>(params, shared, item, first, num_rows, num_parts, kWaitsLate && first < 4);
      }
      if (kWaitsLate && warp >= num_rows) wait_for_parts(params, item, num_parts);
    }
  }

  FT_DEVICE static void epilogue(const DecodeSm90Params& params, Storage& shared, const DecodeItem& item,
                                 const Rows& rows, float factor, const Softmax& softmax, const float (&rO)[kOutputs]) {
    const Params& p = params.base;
    if (item.role == DecodeRole::kWhole) {
      store(p, item, rows, factor, softmax, rO);
      return;
    }
    // The part of a join goes to shared memory, where K was. A join is the block's last item, so no copy comes; the
    // barrier waits for warps that still read the last tile of K.
    i32 block = blockIdx.x;
    bool is_join = item.role == DecodeRole::kJoin;
    if (is_join) sync_consumer();
    float* out = is_join ? reinterpret_cast<float*>(shared.sK) : part_rows(p, block);
    store_part(p, item, rows, factor, softmax, rO, out, is_join ? shared.stats : part_stats(p, block));
    if (is_join) {
      join(params, shared, item);
    } else {
      sync_consumer();
      if (threadIdx.x == 0) release_flag(params.part_flags + block, 1);
    }
  }

  FT_DEVICE static void consume(const DecodeSm90Params& params, Storage& shared) {
    const Params& p = params.base;
    // Score modifiers return scores in base 2; without them S stays a dot product
    float factor = ScoreMod::kChangesScores ? kFactor : p.scale_log2;
    u32 num_tiles = 0;
    for (u32 index = 0;; ++index) {
      // Wait for a work item and its Q. The lanes leave together: once one of them releases this Q, the producer may
      // overwrite the item before it.
      mbarrier_wait(shared.full_q, index % 2);
      __syncwarp();
      const DecodeItem& item = shared.items.at(index);
      if (item.is_end) return;
      Rows rows(p, item, 0);
      Softmax softmax;
      float rO[kOutputs];
#pragma unroll
      for (i32 x = 0; x < kOutputs; ++x) rO[x] = 0.0f;
      if (item.has_keys()) {
        mainloop(p, shared, item, rows, num_tiles, factor, softmax, rO);
      } else {
        release_stage(shared.empty_q);
      }
      epilogue(params, shared, item, rows, factor, softmax, rO);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kNumBlocks)
    decode_sm90_kernel(const FT_GRID_CONSTANT DecodeSm90Params params) {
  static_assert(Load::kIsAligned16 && !Dropout::kIsOn, "TMA reads no unaligned rows");
  using Kernel = DecodeSm90<Config, Mask, ScoreMod, SeqInfo, KvSource>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  // The kernel before this one in the stream may still run: nothing that it could read or write is touched before
  // wait_for_previous
  i32 warp = uniform(threadIdx.x / 32);
  preload_params(params.base, warp, Config::kNumThreads / 32, shared.stats);
  if constexpr (kHasOneBarrier) {
    if (warp < 4) Kernel::set_up(params.base, shared);
    __syncthreads();
  }
  if (warp < 4) {
    if constexpr (!kHasOneBarrier) Kernel::set_up(params.base, shared);
    wait_for_previous();
    if constexpr (!kHasOneBarrier) __syncthreads();
    Kernel::consume(params, shared);
  } else if (warp == 4 || KvSource::kIsPaged) {
    // Without keys the maps are empty
    if (warp == 4 && elect_lane() && params.base.seqlen_k > 0) {
      prefetch_map(params.q_map);
      prefetch_map(params.k_map);
      prefetch_map(params.v_map);
    }
    Kernel::produce(params, shared);
  } else if constexpr (!kHasOneBarrier) {
    __syncthreads();
  }
}

}  // namespace flashtile
