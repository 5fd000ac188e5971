// The gradient of a bias on Hopper: sums of dS before the softcap's derivative, over everything that the bias is
// broadcast onto.
//
// Threads:   a block owns kBlockN keys and kTiles * kBlockM queries of the bias, of one of its batches and heads; all
//            keys, or all queries, of an axis of size 1. It takes kGroup query tiles at a time and streams the
//            sequences, heads, and tiles of keys whose dS they sum. Each sum has one owner and a fixed order. Roles of
//            the warps are those of bwd_sm90.cuh.
// Shared:    sK, sV [buffer], sQ, sdO [stage] and options as there; sSum [warp][kGroup * kBlockM] for a bias without a
//            key axis.
// Products:  S^T = K Q^T and dP^T = V dO^T, keys as rows.
// Barriers:  full and empty of K and V per buffer, of Q, dO and statistics per stage.
// Refuses:   unaligned rows, pages.
#pragma once

#include "families/bwd_sm90/bwd_sm90.cuh"

namespace flashtile {

// One tile, as the warp that loads the statistics describes it. Consumers read it there: registers are scarce.
struct DbiasTile {
  Sequence s;
  i32 head, i_begin, j_begin;
  i32 group;          // which sums of a consumer it adds to
  u32 kv_count;       // the number of tiles of keys before its own
  i32 is_first;       // of its tile of keys
  i32 is_last;        // of its tile of keys
  i32 has_large_lse;  // as QueryTileIndex::is_checked
};

// Config::kNumBuffers is the number of buffers of K and V.
template <class Config, class Mask, class ScoreMod>
struct alignas(1024) DbiasSm90Storage {
  using T = typename Config::Element;
  static constexpr i32 kGroup = 2;  // query tiles whose sums are in registers; DbiasSm90::consume knows it
  T sK[Config::kNumBuffers][Config::kElementsK];
  T sV[Config::kNumBuffers][Config::kElementsV];
  T sQ[Config::kNumStages][Config::kElementsQ];
  T sdO[Config::kNumStages][Config::kElementsdO];
  OptionStorage<Config, Mask, ScoreMod> options;
  alignas(16) float lse[Config::kNumStages][Config::kBlockM];
  float delta[Config::kNumStages][Config::kBlockM];
  float sSum[4 * Config::kNumConsumers][kGroup * Config::kBlockM];
  DbiasTile tiles[Config::kNumStages];
  u64 full_kv[Config::kNumBuffers], empty_kv[Config::kNumBuffers];
  u64 full[Config::kNumStages], empty[Config::kNumStages];  // Q, dO and their statistics
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo>
struct DbiasSm90 {
  using T = typename Config::Element;
  using Storage = DbiasSm90Storage<Config, Mask, ScoreMod>;
  using Options = BwdSm90Options<Config, Mask, ScoreMod, Dropout>;
  using Band = typename Options::Band;
  using Main = BwdSm90<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  using Stages = Ring<Config::kNumStages>;
  using Buffers = Ring<Config::kNumBuffers>;
  using BiasElement = typename ScoreMod::BiasElement;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kScores = Options::kScores;
  static constexpr i32 kGroup = Storage::kGroup, kTiles = 8;  // query tiles of a group, and of a block
  // Registers per thread
  static constexpr i32 kProducerRegisters = 56, kConsumerRegisters = 224;

  // What a block owns. Scope of all: thread.
  const Params& p;
  bool all_b, all_h, all_i, all_j;  // axes of size 1
  i32 bias_batch, bias_head, n_tile, m_begin, m_end;

  FT_DEVICE explicit DbiasSm90(const Params& p) : p(p) {
    all_b = p.bias_sizes[0] == 1, all_h = p.bias_sizes[1] == 1;
    all_i = p.bias_sizes[2] == 1, all_j = p.bias_sizes[3] == 1;
    i32 num_m_tiles = ceil_div(p.seqlen_q, kBlockM), index = blockIdx.x;
    i32 num_n_blocks = all_j ? 1 : ceil_div(p.seqlen_k, kBlockN);
    i32 num_m_blocks = all_i ? 1 : ceil_div(p.seqlen_q, kTiles * kBlockM);
    n_tile = index % num_n_blocks;
    index /= num_n_blocks;
    m_begin = index % num_m_blocks * kTiles;
    index /= num_m_blocks;
    m_end = all_i ? num_m_tiles : min_of(m_begin + kTiles, num_m_tiles);
    bias_head = index % static_cast<i32>(p.bias_sizes[1]);
    bias_batch = index / static_cast<i32>(p.bias_sizes[1]);
  }

  // Calls body(s, head, j_begin, first, last) for each tile of keys that the query tiles [m, m_last) are summed with:
  // those of [first, last) see some of its keys.
  template <class Body>
  FT_DEVICE void for_each_key_tile(i32 m, i32 m_last, Body body) const {
    for (i32 b = all_b ? 0 : bias_batch; b < (all_b ? p.batch : bias_batch + 1); ++b) {
      Sequence s = find_sequence<SeqInfo>(p, b);
      i32 num_n_tiles = ceil_div(s.seqlen_k, kBlockN);
      for (i32 head = all_h ? 0 : bias_head; head < (all_h ? p.heads : bias_head + 1); ++head) {
        if constexpr (mutates(Mutation::bwd_sm90_dbias_head))
          if (all_h && head == p.heads - 1) continue;
        for (i32 n = n_tile; n < (all_j ? num_n_tiles : min_of(n_tile + 1, num_n_tiles)); ++n) {
          i32 j_begin = n * kBlockN;
          Range queries = query_range<Mask>(p, s, j_begin, min_of(j_begin + kBlockN, s.seqlen_k));
          i32 first = max_of(queries.begin / kBlockM, m), last = min_of(ceil_div(queries.end, kBlockM), m_last);
          if (first < last) body(s, head, j_begin, first, last);
        }
      }
    }
  }
  // The query tiles of one pass over the keys: a group, or all of them if their sums are one.
  FT_DEVICE i32 pass_end(i32 m) const { return all_i ? m_end : min_of(m + kGroup, m_end); }

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(Storage& shared) {
    for (i32 buffer = 0; buffer < Config::kNumBuffers; ++buffer) {
      mbarrier_init(shared.full_kv[buffer], 2);  // K, V
      mbarrier_init(shared.empty_kv[buffer], 4 * Config::kNumConsumers);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full[stage], 3);  // Q, dO, statistics
      mbarrier_init(shared.empty[stage], 4 * Config::kNumConsumers);
    }
    Options::init(shared.options);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // ---- Producers.

  // Loads the tiles. Scope: one thread.
  FT_DEVICE void produce(const BwdSm90Params& params, Storage& shared) const {
    u32 count = 0, kv_count = 0;
    for (i32 m = m_begin; m < m_end; m = pass_end(m)) {
      for_each_key_tile(m, pass_end(m), [&](const Sequence& s, i32 head, i32 j_begin, i32 first, i32 last) {
        i32 kv_head = head / (p.heads / p.heads_kv), k_row = static_cast<i32>(s.k_row) + j_begin;
        u32 buffer = Buffers::stage(kv_count);
        u64& full_kv = shared.full_kv[buffer];
        Buffers::wait_empty(shared.empty_kv, kv_count++);
        Main::template load<kBlockN, Config::kSlabsQK>(shared.sK[buffer], params.k_map, p.k_strides, full_kv, k_row,
                                                       kv_head, s.batch_idx);
        Main::template load<kBlockN, Config::kSlabsV>(shared.sV[buffer], params.v_map, p.v_strides, full_kv, k_row,
                                                      kv_head, s.batch_idx);
        for (i32 tile = first; tile < last; ++tile, ++count) {
          u32 stage = Stages::stage(count);
          i32 row = static_cast<i32>(s.q_row) + tile * kBlockM;
          Stages::wait_empty(shared.empty, count);
          Main::template load<kBlockM, Config::kSlabsQK>(shared.sQ[stage], params.q_map, p.q_strides,
                                                         shared.full[stage], row, head, s.batch_idx);
          Main::template load<kBlockM, Config::kSlabsV>(shared.sdO[stage], params.dout_map, p.dout_strides,
                                                        shared.full[stage], row, head, s.batch_idx);
        }
      });
    }
  }

  // Fills the statistics of every stage and describes its tile. Scope: warp.
  FT_DEVICE void produce_stats(Storage& shared) const {
    i32 lane = threadIdx.x % 32;
    u32 count = 0, kv_count = 0;
    for (i32 m = m_begin; m < m_end; m = pass_end(m)) {
      for_each_key_tile(m, pass_end(m), [&](const Sequence& s, i32 head, i32 j_begin, i32 first, i32 last) {
        for (i32 tile = first; tile < last; ++tile, ++count) {
          u32 stage = Stages::stage(count);
          float lse[kBlockM / 32], delta[kBlockM / 32];
          bool is_large = false;
#pragma unroll
          for (i32 x = 0; x < kBlockM / 32; ++x) {
            i32 i = tile * kBlockM + 32 * x + lane;
            bool is_query = i < s.seqlen_q;
            i64 stat = stat_index(p, s, head, i);
            lse[x] = is_query ? p.score_lse[stat] : infinity();
            delta[x] = is_query ? p.delta[stat] : 0.0f;
            is_large |= is_large_lse(lse[x]);
          }
          is_large = __any_sync(0xffffffffu, is_large);
          Stages::wait_empty(shared.empty, count);
#pragma unroll
          for (i32 x = 0; x < kBlockM / 32; ++x) {
            shared.lse[stage][32 * x + lane] = lse[x];
            shared.delta[stage][32 * x + lane] = delta[x];
          }
          if (lane == 31) {
            DbiasTile& to = shared.tiles[stage];
            to.s = s;
            to.head = head, to.i_begin = tile * kBlockM, to.j_begin = j_begin;
            to.group = all_i ? (tile - first) % kGroup : tile - m;
            to.kv_count = kv_count, to.is_first = tile == first, to.is_last = tile + 1 == last;
            to.has_large_lse = is_large;
          }
          __syncwarp();
          arrive_warp(shared.full[stage]);
        }
        ++kv_count;
      });
    }
  }

  // Prepares the mask and the bias of one consumer. Scope: warp.
  FT_DEVICE void produce_options(Storage& shared, i32 consumer) const {
    u32 count = 0;
    for (i32 m = m_begin; m < m_end; m = pass_end(m)) {
      for_each_key_tile(m, pass_end(m), [&](const Sequence& s, i32 head, i32 j_begin, i32 first, i32 last) {
        struct {
          const Sequence& s;
          i32 first_head, num_heads, m_begin, m_end, j_begin;
        } tile{s, head, 1, first, last, j_begin};
        Options::produce(p, shared.options, tile, consumer, count);
      });
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Adds dS of tile number count, which has arrived, to rSum.
  FT_DEVICE void add_tile(Storage& shared, i32 consumer, u32 count, float (&rSum)[kScores]) const {
    u32 stage = Stages::stage(count);
    const DbiasTile& tile = shared.tiles[stage];
    const Sequence& s = tile.s;
    u32 buffer = Buffers::stage(tile.kv_count);
    i32 i_begin = tile.i_begin, j_begin = tile.j_begin + 64 * consumer;
    float rS[kScores], rdP[kScores];
    // S^T = K Q^T, dP^T = V dO^T
    gemm_abt<T, kBlockM, Config::kHeadDim, kBlockN>(rS,
                                                    tile_base(shared.sK[buffer] + 64 * 64 * consumer, kBlockN * 128),
                                                    tile_base(shared.sQ[stage], kBlockM * 128));
    gemm_abt<T, kBlockM, Config::kHeadDimV, kBlockN>(rdP,
                                                     tile_base(shared.sV[buffer] + 64 * 64 * consumer, kBlockN * 128),
                                                     tile_base(shared.sdO[stage], kBlockM * 128));
    // Load the rest while they are in flight
    typename Options::Bits bits =
        Options::load_bits(p, shared.options, s, consumer, count, tile.head, i_begin, j_begin);
    Options options(p, shared.options, s, consumer, count, tile.head, i_begin, j_begin, bits, shared.lse[stage]);
    float2 delta[kScores / 4];
#pragma unroll
    for (i32 b = 0; b < kScores / 4; ++b) delta[b] = Options::stats(shared.delta[stage], b);
    bool is_checked = needs_mask<Band>(p, s, i_begin, kBlockM, j_begin, 64) || tile.has_large_lse != 0;
    wgmma_wait<0>();
    pin_registers(rS);
    pin_registers(rdP);
    auto add = [&](auto checked, auto masked, const Range(&seen)[2]) {
      options.template add_score_gradient<decltype(checked)::kValue, decltype(masked)::kValue>(seen, shared.lse[stage],
                                                                                               delta, rS, rdP, rSum);
    };
    if (is_checked || options.needs_exact_tanh()) {
      Range seen[2];
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        seen[r] = Main::seen_columns(p, s, i_begin + fragment_column(), j_begin + fragment_row() + 8 * r);
      }
      add(Constant<true>(), Constant<Mask::kHasBool>(), seen);
    } else if (Mask::kHasBool && bits.is_masked) {
      add(Constant<false>(), Constant<Mask::kHasBool>(), {});
    } else {
      add(Constant<false>(), Constant<false>(), {});
    }
    if (tile.is_last) release_stage(shared.empty_kv[buffer]);
    __syncwarp();
    release_stage(shared.empty[stage]);
  }

  // Stores the sums of the query tiles [m, m + kGroup).
  FT_DEVICE void store(Storage& shared, i32 m, i32 consumer, float (&rSum)[kGroup][kScores]) const {
    BiasElement* base = static_cast<BiasElement*>(p.dbias) +
                        (bias_batch * p.bias_sizes[1] + bias_head) * p.bias_sizes[2] * p.bias_sizes[3];
    i32 lane = threadIdx.x % 32, j_first = n_tile * kBlockN + 64 * consumer + fragment_row();
    if (all_j) {
      // Sum over the keys of a warp, then over the warps
      i32 warp = threadIdx.x / 32;
#pragma unroll
      for (i32 g = 0; g < kGroup; ++g) {
#pragma unroll
        for (i32 y = 0; y < kScores / 2; ++y) {
          float sum = rSum[g][y / 2 * 4 + y % 2] + rSum[g][y / 2 * 4 + y % 2 + 2];
#pragma unroll
          for (i32 distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
          if (lane < 4) shared.sSum[warp][g * kBlockM + y / 2 * 8 + fragment_column() + y % 2] = sum;
        }
      }
      named_barrier_sync(kConsumerBarrier, 128 * Config::kNumConsumers);
      float total = 0.0f;
      for (i32 i = threadIdx.x; i < kGroup * kBlockM; i += 128 * Config::kNumConsumers) {
        float sum = 0.0f;
        for (i32 w = 0; w < 4 * Config::kNumConsumers; ++w) sum += shared.sSum[w][i];
        i64 row = static_cast<i64>(m) * kBlockM + i;
        if (!all_i && row < p.bias_sizes[2]) base[row] = from_float<BiasElement>(sum);
        shared.sSum[0][i] = sum;
      }
      named_barrier_sync(kConsumerBarrier, 128 * Config::kNumConsumers);
      if (all_i && threadIdx.x == 0) {
        for (i32 i = 0; i < kGroup * kBlockM; ++i) total += shared.sSum[0][i];
        base[0] = from_float<BiasElement>(total);
      }
    } else if (all_i) {
      // Sum over the queries of a thread, then of a quad
#pragma unroll
      for (i32 r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (i32 g = 0; g < kGroup; ++g) {
#pragma unroll
          for (i32 b = 0; b < kScores / 4; ++b) sum += rSum[g][4 * b + 2 * r] + rSum[g][4 * b + 2 * r + 1];
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        i32 j = j_first + 8 * r;
        if (lane % 4 == 0 && j < p.bias_sizes[3]) base[j] = from_float<BiasElement>(sum);
      }
    } else {
#pragma unroll
      for (i32 g = 0; g < kGroup; ++g) {
#pragma unroll
        for (i32 x = 0; x < kScores; ++x) {
          i32 i = (m + g) * kBlockM + x / 4 * 8 + fragment_column() + x % 2, j = j_first + x / 2 % 2 * 8;
          bool is_inside = m + g < m_end && i < p.bias_sizes[2] && j < p.bias_sizes[3];
          if (is_inside) base[i * p.bias_sizes[3] + j] = from_float<BiasElement>(rSum[g][x]);
        }
      }
    }
  }

  FT_DEVICE void consume(Storage& shared, i32 consumer) const {
    u32 count = 0;
    for (i32 m = m_begin; m < m_end; m = pass_end(m)) {
      float rSum[kGroup][kScores];
#pragma unroll
      for (i32 x = 0; x < kGroup * kScores; ++x) rSum[x / kScores][x % kScores] = 0.0f;
      u32 end = count;
      for_each_key_tile(m, pass_end(m), [&](const Sequence&, i32, i32, i32 first, i32 last) { end += last - first; });
      for (; count < end; ++count) {
        // Wait for Q and dO, and for K and V
        Stages::wait_full(shared.full, count);
        const DbiasTile& tile = shared.tiles[Stages::stage(count)];
        if (tile.is_first) Buffers::wait_full(shared.full_kv, tile.kv_count);
        if (tile.group == 0) {
          add_tile(shared, consumer, count, rSum[0]);
        } else {
          add_tile(shared, consumer, count, rSum[1]);
        }
      }
      store(shared, m, consumer, rSum);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1)
    bwd_sm90_dbias_kernel(const FT_GRID_CONSTANT BwdSm90Params params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16, "TMA reads neither pages nor unaligned rows");
  using Kernel = DbiasSm90<Config, Mask, ScoreMod, Dropout, SeqInfo>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
  if (threadIdx.x == 0) Kernel::init(shared);
  __syncthreads();
  Kernel kernel(params.base);
  i32 warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32 % 4);
  if (warpgroup < Config::kNumConsumers) {
    raise_registers<Kernel::kConsumerRegisters>();
    kernel.consume(shared, warpgroup);
  } else {
    lower_registers<Kernel::kProducerRegisters>();
    if (warp == 0) {
      if (elect_lane()) kernel.produce(params, shared);
    } else if (warp == 1) {
      kernel.produce_stats(shared);
    } else {
      kernel.produce_options(shared, warp - 2);
    }
  }
}

}  // namespace flashtile
