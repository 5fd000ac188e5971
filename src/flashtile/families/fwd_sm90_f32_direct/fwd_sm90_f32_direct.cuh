// Attention forward in float32 on Hopper for few queries and heads, without a workspace: the kernel splits the operands
// itself, and a cluster of blocks shares the keys of a query tile. docs/float32.md.
//
// Cluster:   its blocks have the same 128 queries and each a share of their keys. Each leaves the sum of P V, m and l
//            in its shared memory; then each merges some rows of all and stores them.
// Threads:   warpgroups 0 and 1 are the consumers of fwd_sm90_f32.cuh. Warpgroup 2 loads rows, splits them into
//            parts and stores them where the consumers expect them. It loads a tile while it splits another.
// Shared:    FwdSm90F32Storage; m and l of each row. The sums of a consumer lie where its Q was.
// Barriers:  as in fwd_sm90_f32.cuh, but full_* complete by one arrival of each producer warp. Cluster barriers stand
//            before the merge and before the exit: other blocks read this block's sums.
// Refuses:   pages, unaligned rows, head dims over 64.
#pragma once

#include "device/attn/sequence.cuh"
#include "device/ptx/cluster.cuh"
#include "families/fwd_sm90_f32/fwd_sm90_f32.cuh"

namespace flashtile {

template <class Parts, i32 kClusterSize_, bool kOverlaps>
struct Sm90F32DirectConfig : Sm90F32Config<Parts, 64, 64, 128, 64, 2, 64, kOverlaps> {
  static constexpr i32 kClusterSize = kClusterSize_, kNumThreads = 384;
  static constexpr i32 kProducerRegisters = 120, kConsumerRegisters = 192;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= 65536 / kNumThreads / 8 * 8 * 3);
  static_assert(1 <= kClusterSize && kClusterSize <= 8);
};

template <class Config, class Mask, class SeqInfo>
struct alignas(1024) FwdSm90F32DirectStorage {
  FwdSm90F32Storage<Config, Mask, SeqInfo> tiles;
  float2 stats[Config::kBlockM];  // m and l of each row
};

// A tile of 64 rows on its way from global memory to split parts in shared memory. Thread t of 128 has 8 neighbouring
// columns, from 8 (t % 8) on, of every 16th row.
template <class Config>
struct RowsInFlight {
  static constexpr i32 kRowsPerThread = 4;
  float x[kRowsPerThread][8];

  // Starts to load; row(r) is the address of row r. Rows from num_rows on and columns from head_dim on are zeros.
  // Scope: thread.
  template <class Row>
  FT_DEVICE void load(i32 num_rows, i32 head_dim, Row row) {
    if constexpr (mutates(Mutation::fwd_sm90_f32_direct_tail)) num_rows = 64;
#pragma unroll
    for (i32 y = 0; y < kRowsPerThread; ++y) {
      i32 r = threadIdx.x % 128 / 8 + 16 * y, column = threadIdx.x % 8 * 8;
#pragma unroll
      for (i32 e = 0; e < 8; ++e) x[y][e] = 0.0f;
      if (r >= num_rows) continue;
      const float4* at = reinterpret_cast<const float4*>(row(r) + column);
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        if (column + 4 * half >= head_dim) continue;
        float4 four = at[half];
        x[y][4 * half] = four.x, x[y][4 * half + 1] = four.y;
        x[y][4 * half + 2] = four.z, x[y][4 * half + 3] = four.w;
      }
    }
  }

  // Splits the rows, scaled for half_t parts, and stores the parts, swizzled, for wgmma to read. Scope: thread.
  template <bool kIsV>
  FT_DEVICE void store(u16* sTile, float scale) const {
    constexpr i32 kNumParts = Config::kNumParts;
#pragma unroll
    for (i32 y = 0; y < kRowsPerThread; ++y) {
      i32 r = threadIdx.x % 128 / 8 + 16 * y, chunk = threadIdx.x % 8;
      u32 words[kNumParts][4];
#pragma unroll
      for (i32 pair = 0; pair < 4; ++pair) {
        u32 parts[kNumParts];
        float low = x[y][2 * pair], high = x[y][2 * pair + 1];
        if constexpr (Config::kIsHalf) low *= scale, high *= scale;
        Config::Parts::split(low, high, parts);
        if constexpr (mutates(Mutation::fwd_sm90_f32_direct_part)) parts[1] = kIsV && chunk >= 4 ? 0 : parts[1];
#pragma unroll
        for (i32 part = 0; part < kNumParts; ++part) words[part][pair] = parts[part];
      }
#pragma unroll
      for (i32 part = 0; part < kNumParts; ++part) {
        uint4* rows = reinterpret_cast<uint4*>(sTile + (part * 64 + r) * 64);
        rows[chunk ^ r % 8] = make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
      }
    }
    fence_proxy_async();
    __syncwarp();
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct FwdSm90F32Direct {
  using Base = FwdSm90F32<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  using Storage = FwdSm90F32DirectStorage<Config, Mask, SeqInfo>;
  using Stages = typename Base::Stages;
  using Item = typename Base::Item;
  using Rows = RowsInFlight<Config>;
  static constexpr i32 kColumns = Config::kHeadDimV, kChunks = kColumns / 4;  // of 16 bytes, of a row of sums

  // ---- Prologue. Scope: thread 0.

  FT_DEVICE static void init(const Params& p, Storage& shared) {
    auto& tiles = shared.tiles;
    // One arrival of each producer warp
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) mbarrier_init(tiles.full_q[consumer], 4);
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) mbarrier_init(tiles.empty_q[consumer], 4);
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(tiles.full_k[stage], 4);
      mbarrier_init(tiles.full_v[stage], 4);
      mbarrier_init(tiles.empty_k[stage], 4 * Config::kNumConsumers);
      mbarrier_init(tiles.empty_v[stage], 4 * Config::kNumConsumers);
    }
    mbarrier_init_fence();
    TileGrid<Mask, SeqInfo, false> grid;
    Item& item = tiles.work_items.at(0);
    item.tile = typename Base::Tile(p, grid, static_cast<i32>(blockIdx.x) / Config::kClusterSize);
    // This block's share of the keys
    i32 rank = static_cast<i32>(cluster_rank()), begin = item.tile.n_begin;
    i32 num_tiles = max_of(item.tile.n_end - begin, 0);
    if constexpr (mutates(Mutation::fwd_sm90_f32_direct_rank)) rank = rank == Config::kClusterSize - 1 ? 0 : rank;
    item.tile.n_begin = begin + num_tiles * rank / Config::kClusterSize;
    item.tile.n_end = begin + num_tiles * (rank + 1) / Config::kClusterSize;
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      item.consumers[consumer] = ConsumerTiles::find(p, item.tile, item.tile.i_begin + 64 * consumer);
    }
  }

  // ---- Producer. Scope: warpgroup.

  FT_DEVICE static void signal_full(u64& full) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
  }

  // The power of two that an operand is scaled by.
  FT_DEVICE static float scale_of(const SplitRange* range, Operand operand) {
    if constexpr (!Config::kIsHalf) return 1.0f;
    return power_of_two(scale_exponent(*range, operand));
  }

  FT_DEVICE static void produce(const Params& p, const SplitRange* range, Storage& shared) {
    float scale_q = scale_of(range, Operand::q), scale_k = scale_of(range, Operand::k);
    float scale_v = scale_of(range, Operand::v);
    auto& tiles = shared.tiles;
    const typename Base::Tile& tile = tiles.work_items.at(0).tile;
    const Sequence& s = tile.s;
    i32 head = tile.coord.head, kv_head = head / (p.heads / p.heads_kv);
    KeyRows<const float, KvSource<false>> k(static_cast<const float*>(p.k), p.k_strides, p, s, kv_head);
    KeyRows<const float, KvSource<false>> v(static_cast<const float*>(p.v), p.v_strides, p, s, kv_head);
    const float* q = query_rows(static_cast<const float*>(p.q), p.q_strides, s, head);
    Rows a, b;
    auto load_q = [&](Rows& rows, i32 consumer) {
      i32 i = tile.i_begin + 64 * consumer;
      rows.load(i < 0 ? 0 : s.seqlen_q - i, p.head_dim, [&](i32 r) { return q + (i + r) * p.q_strides.row; });
    };
    auto load_k = [&](Rows& rows, i32 n) {
      rows.load(s.seqlen_k - 64 * n, p.head_dim, [&](i32 r) { return k.row(64 * n + r); });
    };
    auto load_v = [&](Rows& rows, i32 n) {
      rows.load(s.seqlen_k - 64 * n, p.head_dim_v, [&](i32 r) { return v.row(64 * n + r); });
    };
    // Load Q and the first K
    load_q(a, 0);
    load_q(b, 1);
    a.template store<false>(tiles.sQ[0], scale_q);
    signal_full(tiles.full_q[0]);
    load_k(a, tile.n_end - 1);
    b.template store<false>(tiles.sQ[1], scale_q);
    signal_full(tiles.full_q[1]);
    u32 count = 0;
    for (i32 n = tile.n_end - 1; n >= tile.n_begin; --n, ++count) {
      u32 stage = Stages::stage(count);
      // Store K while V is on its way
      load_v(b, n);
      Stages::wait_empty(tiles.empty_k, count);
      a.template store<false>(tiles.sK[stage], scale_k);
      signal_full(tiles.full_k[stage]);
      // Store V while the next K is on its way
      if (n > tile.n_begin) load_k(a, n - 1);
      Stages::wait_empty(tiles.empty_v, count);
      b.template store<true>(tiles.sV[stage], scale_v);
      signal_full(tiles.full_v[stage]);
    }
  }

  // ---- Consumer. Scope: warpgroup.

  // Where chunk number `chunk` of a row of sums lies. Chunks are swizzled: a quad's rows fall on different banks.
  FT_DEVICE static i32 chunk_place(i32 row, i32 chunk) { return row * kChunks + (chunk ^ row % 8); }
  FT_DEVICE static float4* sums(Storage& shared, i32 consumer) {
    static_assert(16 * 64 * kChunks <= 2 * Config::kElementsQ);
    return reinterpret_cast<float4*>(shared.tiles.sQ[consumer]);
  }

  FT_DEVICE static void consume(const Params& p, const SplitRange* range, Storage& shared, i32 consumer) {
    typename Base::Scales scales(p, range);
    const Item& item = shared.tiles.work_items.at(0);
    typename Base::Softmax softmax;
    float rO[Base::kOutputs];
#pragma unroll
    for (i32 x = 0; x < Base::kOutputs; ++x) rO[x] = 0.0f;
    // The first turn is consumer 0's
    if (consumer == Config::kNumConsumers - 1) Base::signal_next(consumer);
    u32 num_k = 0;
    if (item.tile.has_keys()) {
      wait_item(shared.tiles.full_q[consumer], 0);
      Base::mainloop(p, shared.tiles, item, consumer, num_k, scales.factor, scales.unscale_s, softmax, rO);
    }
    // Leave the sums in place of Q, once every warp has read it
    named_barrier_sync(kConsumerBarrier + consumer, 128);
    float* partial = reinterpret_cast<float*>(sums(shared, consumer));
    float unscale = scales.unscale_o * keep_factor<Dropout>(p);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 row = fragment_row() + 8 * r;
      float m = ScoreMod::kChangesScores ? softmax.m[r] : softmax.m[r] * scales.factor;
      RowStats stats = join_sink<Base::kIsNatural>(m, softmax.l[r], -infinity(), [](float l) { return quad_sum(l); });
      if (threadIdx.x % 4 == 0) shared.stats[64 * consumer + row] = make_float2(stats.m, stats.l);
#pragma unroll
      for (i32 y = 0; y < Base::kOutputs / 4; ++y) {
        i32 column = 8 * y + fragment_column();
        float2 two = make_float2(rO[4 * y + 2 * r] * unscale, rO[4 * y + 2 * r + 1] * unscale);
        *reinterpret_cast<float2*>(partial + 4 * chunk_place(row, column / 4) + column % 4) = two;
      }
    }
  }

  // ---- Epilogue: merges a share of the rows over the blocks of the cluster. Scope: both consumers.

  FT_DEVICE static void merge(const Params& p, Storage& shared) {
    constexpr i32 kBlocks = Config::kClusterSize, kThreads = 128 * Config::kNumConsumers;
    const typename Base::Tile& tile = shared.tiles.work_items.at(0).tile;
    constexpr float kFactor = exponent_factor(Base::kIsNatural);
    i32 rank = static_cast<i32>(cluster_rank()), head = tile.coord.head;
    float sink = p.sinks == nullptr ? -infinity() : in_score_unit(Base::kIsNatural, p.sinks[head]);
    float* gO = query_rows(static_cast<float*>(p.out), p.out_strides, tile.s, head);
    for (i32 x = static_cast<i32>(threadIdx.x) + rank * kThreads; x < Config::kBlockM * kChunks;
         x += kBlocks * kThreads) {
      i32 row = x / kChunks, chunk = x % kChunks, i = tile.i_begin + row;
      if (i < 0 || i >= tile.s.seqlen_q) continue;
      // The common maximum and sum. Two rows of stats lie in 16 bytes.
      float m = sink, m_of[kBlocks], l_of[kBlocks];
#pragma unroll
      for (i32 block = 0; block < kBlocks; ++block) {
        float4 two = load_at(reinterpret_cast<const float4*>(shared.stats) + row / 2, block);
        m_of[block] = row % 2 == 0 ? two.x : two.z, l_of[block] = row % 2 == 0 ? two.y : two.w;
        m = fmaxf(m, m_of[block]);
      }
      float shift = shift_of(m), l = 0.0f;
#pragma unroll
      for (i32 block = 0; block < kBlocks; ++block) {
        m_of[block] = exp_difference(m_of[block], shift, kFactor);
        l += m_of[block] * l_of[block];
      }
      l += exp_difference(sink, shift, kFactor);
      float norm = l == 0.0f ? 0.0f : 1.0f / l;
      // Add up the weighted sums
      float sum[4] = {};
#pragma unroll
      for (i32 block = 0; block < kBlocks; ++block) {
        float weight = m_of[block] * norm;
        if constexpr (mutates(Mutation::fwd_sm90_f32_direct_weight)) weight = norm;
        float4 four = load_at(sums(shared, row / 64) + chunk_place(row % 64, chunk), block);
        sum[0] = fmaf(weight, four.x, sum[0]), sum[1] = fmaf(weight, four.y, sum[1]);
        sum[2] = fmaf(weight, four.z, sum[2]), sum[3] = fmaf(weight, four.w, sum[3]);
      }
      // Store
      if (chunk == 0) p.lse[stat_index(p, tile.s, head, i)] = lse_of(Base::kIsNatural, m, l);
      if (4 * chunk < p.head_dim_v) {
        float4* at = reinterpret_cast<float4*>(gO + i * p.out_strides.row + 4 * chunk);
        *at = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
FT_DEVICE void run_fwd_sm90_f32_direct(const Sm90F32Params& params) {
  static_assert(!KvSource::kIsPaged && Load::kIsAligned16);
  using Kernel = FwdSm90F32Direct<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  extern __shared__ __align__(1024) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
  const Params& p = params.base;

  if (threadIdx.x == 0) Kernel::init(p, shared);
  __syncthreads();
  // A whole cluster has queries, or none of it
  const auto& tile = shared.tiles.work_items.at(0).tile;
  if (!tile.has_queries()) return;

  i32 warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kNumConsumers) {
    lower_registers<Config::kProducerRegisters>();
    if (tile.has_keys()) Kernel::produce(p, params.range, shared);
    cluster_sync();
  } else {
    raise_registers<Config::kConsumerRegisters>();
    Kernel::consume(p, params.range, shared, warpgroup);
    // Wait for the sums of every block
    cluster_sync();
    Kernel::merge(p, shared);
  }
  // Other blocks may still read this block's sums
  cluster_sync();
}

// Both kernels are launched; the range of the numbers decides which of them does the work. Where no kernel before them
// has found the range (null), the bf16_t kernel alone is launched.
template <class Config, class... Policies>
__global__ void __cluster_dims__(Config::kClusterSize, 1, 1) __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_f32_direct_half_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(Config::kIsHalf);
  if (params.range->needs_bf16 == 0) run_fwd_sm90_f32_direct<Config, Policies...>(params);
}
template <class Config, class... Policies>
__global__ void __cluster_dims__(Config::kClusterSize, 1, 1) __launch_bounds__(Config::kNumThreads, 1)
    fwd_sm90_f32_direct_bf16_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(!Config::kIsHalf);
  if (params.range == nullptr || params.range->needs_bf16 != 0) {
    run_fwd_sm90_f32_direct<Config, Policies...>(params);
  }
}

}  // namespace flashtile
