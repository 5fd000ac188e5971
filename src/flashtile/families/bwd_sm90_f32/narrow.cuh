// Attention backward in float32 on Hopper for head dims up to 128: wgmma products of split operands
// (sm90_f32/split_operand.cuh). docs/float32.md.
//
// Two kernels, as in the backward for wide heads (bwd_sm90_wide/common.cuh); every result has one owner.
//
//   dK, dV   a block owns 64 keys and streams the query tiles that see them. Warpgroup 0 computes S^T = K Q^T, P^T and
//            dV += P^T dO, and hands P^T over in shared memory. Warpgroup 1 computes dP^T = V dO^T, dS^T and
//            dK += dS^T Q. In warpgroup 2 one lane issues the copies, one warp loads the statistics.
//   dQ       a block owns 64 or 128 queries, 64 for each consumer, and streams the key tiles that they see:
//            S = Q K^T, dP = dO V^T, dS, dQ += dS K.
//
// All tiles have 64 rows and come split and swizzled, by one bulk copy each (sm90_f32/split_tiles.cuh). As in the
// forward, the products of a tile start a new accumulator T, which is then added in float32. For half_t parts each row
// of P^T and dS is scaled by a power of two that follows from its largest element in the tile; T is scaled back.
#pragma once

#include "device/attn/score_gradient.cuh"
#include "device/core/reduce.cuh"
#include "device/ptx/bulk.cuh"
#include "families/bwd_sm90_wide/bwd_sm90_dkdv.cuh"
#include "families/bwd_sm90_wide/bwd_sm90_dq.cuh"
#include "families/sm90_f32/config.cuh"
#include "families/sm90_f32/split_tiles.cuh"

namespace flashtile {

// ---- What both kernels share.

// What undoes the powers of two of half_t operands. Scope: thread.
struct Unscale {
  float s, dp, dq, dk, dv;

  template <class Config>
  FT_DEVICE static Unscale find(const SplitRange& range) {
    if constexpr (!Config::kIsHalf) return {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    i32 q = scale_exponent(range, Operand::q), k = scale_exponent(range, Operand::k);
    i32 v = scale_exponent(range, Operand::v), dout = scale_exponent(range, Operand::dout);
    return {power_of_two(-q - k), power_of_two(-v - dout), power_of_two(-k), power_of_two(-q), power_of_two(-dout)};
  }
};

// Starts the bulk copy of a split tile. Scope: thread.
template <i32 kElements>
FT_DEVICE void load_split_tile(u16* sTile, const u16* tile, u64& full) {
  mbarrier_arrive_expect(full, 2 * kElements);
  load_bulk(sTile, tile, 2 * kElements, full);
}

// A 64 x kDepth fragment as a split register operand, with rows scaled for half_t parts.
template <class Config, i32 kDepth = 64>
struct SplitFragment {
  using Parts = typename Config::Parts;
  static constexpr i32 kNumParts = Parts::kNumParts;
  u32 parts[kNumParts][kDepth / 4];
  float unscale[2];  // of the thread's two rows

  // Scope: warp.
  FT_DEVICE void split(const float (&x)[kDepth / 2]) {
    float scale[2] = {1.0f, 1.0f};
    unscale[0] = unscale[1] = 1.0f;
#pragma unroll
    for (i32 r = 0; r < 2 && Config::kIsHalf; ++r) {
      float largest = 0.0f;
#pragma unroll
      for (i32 b = 0; b < kDepth / 8; ++b) {
        largest = fmaxf(largest, fmaxf(fabsf(x[4 * b + 2 * r]), fabsf(x[4 * b + 2 * r + 1])));
      }
      // The largest comes to [2^14, 2^15)
      i32 exponent = clamp(14 + 127 - static_cast<i32>(__float_as_uint(quad_max(largest)) >> 23), -126, 126);
      scale[r] = power_of_two(exponent);
      if constexpr (!mutates(Mutation::bwd_sm90_f32_unscale)) unscale[r] = power_of_two(-exponent);
    }
#pragma unroll
    for (i32 y = 0; y < kDepth / 4; ++y) {
      u32 words[kNumParts];
      Parts::split(x[2 * y] * scale[y % 2], x[2 * y + 1] * scale[y % 2], words);
#pragma unroll
      for (i32 part = 0; part < kNumParts; ++part) parts[part][y] = words[part];
    }
  }
};

// D += X B: kDepth rows of B, of whose kHeadDim columns kCount are computed, kColumns of them at a time. b is the first
// of them. Scope: warpgroup.
template <class Config, i32 kHeadDim, i32 kCount = kHeadDim, i32 kDepth>
FT_DEVICE void add_product(float (&rD)[kCount / 2], const SplitFragment<Config, kDepth>& fragment, u32 b) {
  constexpr i32 kSlab = kDepth * 128 >> 4, kSlabs = (kHeadDim + 63) / 64;
  constexpr i32 kColumns = kCount < Config::kColumns ? kCount : Config::kColumns;
#pragma unroll
  for (i32 first = 0; first < kCount; first += kColumns) {
    float rT[kColumns / 2];
    gemm_ab_split<typename Config::Parts, kColumns, kDepth>(rT, fragment.parts, 0, b + first / 64 * kSlab,
                                                            kSlabs * kSlab);
    wgmma_wait<0>();
    pin_registers(rT);
#pragma unroll
    for (i32 x = 0; x < kColumns / 2; ++x) {
      rD[first / 2 + x] = fmaf(rT[x], fragment.unscale[x / 2 % 2], rD[first / 2 + x]);
    }
  }
}

// A bool mask and score modifiers of 8 elements. Mask or bias are loaded together: one by one, each load would wait for
// the one before. With more options that would take too many registers. Scope: thread.
template <class Mask, class ScoreMod, class Dropout>
struct TileOptions {
  static constexpr bool kLoadsAhead =
      Mask::kHasBool + ScoreMod::kNumOptions == 1 && (Mask::kHasBool || ScoreMod::kHasBias) && !Dropout::kIsOn;
  const Params& p;
  const Sequence& s;
  i32 head;
  Score<ScoreMod> scores;
  u32 seen;  // bit x: the mask shows element x
  float bias[8];

  FT_DEVICE TileOptions(const Params& p, const Sequence& s, i32 head) : p(p), s(s), head(head), scores(p, s, head) {}

  // place(x, i, j) sets the query and the key of element x.
  template <class Place>
  FT_DEVICE void load(Place place) {
    if constexpr (!kLoadsAhead) return;
    const auto* mask = p.mask + s.batch_idx * p.mask_strides[0] + head * p.mask_strides[1];
    seen = 0;
#pragma unroll
    for (i32 x = 0; x < 8; ++x) {
      i32 i, j;
      place(x, i, j);
      // Elements past the end are masked later
      i = min_of(i, s.seqlen_q - 1), j = min_of(j, s.seqlen_k - 1);
      if constexpr (Mask::kHasBool) seen |= (mask[i * p.mask_strides[2] + j * p.mask_strides[3]] != 0 ? 1u : 0u) << x;
      if constexpr (ScoreMod::kHasBias) bias[x] = scores.bias_of(i, j);
    }
  }
  // Of element x, which is query i and key j inside the sequence.
  FT_DEVICE bool is_shown(i32 x, i32 i, i32 j) const {
    if constexpr (!Mask::kHasBool) return true;
    if constexpr (kLoadsAhead) return (seen >> x & 1u) != 0;
    return is_seen<Mask>(p, s, head, i, j);
  }
  using Kept = typename Score<ScoreMod>::Kept;
  FT_DEVICE float score(i32 x, float dot, i32 i, i32 j, Kept& kept) const {
    if constexpr (kLoadsAhead && ScoreMod::kHasBias) return scores.before_bias(dot, i, j, kept) + bias[x];
    return scores.score(dot, i, j, kept);
  }
};

// Multiplies results by a factor apart from that of the store: the product of both factors may be denormal.
// Scope: thread.
template <i32 kCount>
FT_DEVICE void multiply(float (&rD)[kCount], float factor) {
#pragma unroll
  for (i32 x = 0; x < kCount; ++x) rD[x] *= factor;
}

// ---- dK and dV.

template <class Config>
struct alignas(1024) BwdSm90F32DkdvStorage {
  u16 sK[Config::kElementsQ];
  u16 sV[Config::kElementsdO];
  u16 sQ[Config::kNumStages][Config::kElementsQ];
  u16 sdO[Config::kNumStages][Config::kElementsdO];
  float4 sP[8][128];  // from each thread of warpgroup 0 to the same thread of warpgroup 1
  float lse[Config::kNumStages][64];
  float delta[Config::kNumStages][64];
  StreamedQueryTile queries[kNumStreamedTiles];  // tile number count is at count % kNumStreamedTiles
  u64 full_k, full_v;
  u64 full_q[Config::kNumStages], empty_q[Config::kNumStages];  // statistics come with Q
  u64 full_do[Config::kNumStages], empty_do[Config::kNumStages];
  u64 full_p, empty_p;
  KeyTile tile;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm90F32Dkdv {
  using Parts = typename Config::Parts;
  using Storage = BwdSm90F32DkdvStorage<Config>;
  using Options = TileOptions<Mask, ScoreMod, Dropout>;
  using Stages = Ring<Config::kNumStages>;
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr bool kIsSigned = ScoreMod::Function::kHasDerivative;  // factors of dP - delta may be negative
  static_assert(!kIsSigned || !Dropout::kIsOn, "their sign says what dropout drops");

  // Scope: thread 0.
  FT_DEVICE static void init(Storage& shared) {
    mbarrier_init(shared.full_k, 1);
    mbarrier_init(shared.full_v, 1);
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_q[stage], 2);
      mbarrier_init(shared.full_do[stage], 1);
      mbarrier_init(shared.empty_q[stage], 8);
      mbarrier_init(shared.empty_do[stage], 8);
    }
    mbarrier_init(shared.full_p, 4);
    mbarrier_init(shared.empty_p, 4);
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // Scope: one thread.
  FT_DEVICE static void produce(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    i64 key_tile = first_key_tile<64>(p, tile.s, tile.kv_head) + tile.j_begin / 64;
    load_split_tile<Config::kElementsQ>(shared.sK, params.k_parts + key_tile * Config::kElementsQ, shared.full_k);
    load_split_tile<Config::kElementsdO>(shared.sV, params.v_parts + key_tile * Config::kElementsdO, shared.full_v);
    tile.for_each_query_tile<64>([&](i32 head, i32 i, u32 count) {
      u32 stage = Stages::stage(count);
      i64 query_tile = first_query_tile(p, tile.s, head) + i / 64;
      Stages::wait_empty(shared.empty_q, count);
      load_split_tile<Config::kElementsQ>(shared.sQ[stage], params.q_parts + query_tile * Config::kElementsQ,
                                          shared.full_q[stage]);
      Stages::wait_empty(shared.empty_do, count);
      load_split_tile<Config::kElementsdO>(shared.sdO[stage], params.dout_parts + query_tile * Config::kElementsdO,
                                           shared.full_do[stage]);
    });
  }

  // Fills the statistics of every stage and describes its tile. Rows past the last query get those of a fully masked
  // row. Scope: warp.
  FT_DEVICE static void produce_stats(const Params& p, Storage& shared, const KeyTile& tile) {
    i32 lane = threadIdx.x % 32;
    tile.for_each_query_tile<64>([&](i32 head, i32 i_begin, u32 count) {
      u32 stage = Stages::stage(count);
      Stages::wait_empty(shared.empty_q, count);
#pragma unroll
      for (i32 x = 0; x < 2; ++x) {
        i32 i = i_begin + 32 * x + lane;
        i64 stat = stat_index(p, tile.s, head, i);
        shared.lse[stage][32 * x + lane] = i < tile.s.seqlen_q ? p.score_lse[stat] : infinity();
        shared.delta[stage][32 * x + lane] = i < tile.s.seqlen_q ? p.delta[stat] : 0.0f;
      }
      if (lane == 31) shared.queries[count % kNumStreamedTiles] = {i_begin, head, 0};
      __syncwarp();
      arrive_warp(shared.full_q[stage]);
    });
  }

  // P^T of a tile in place of S^T, and the factor of dP^T - delta in dS^T, which is negative where dropout drops the
  // element. Without options both are the same. Scope: warp.
  template <i32 kColumns>
  FT_DEVICE static void exponentiate(const Params& p, const Sequence& s, const StreamedQueryTile& queries, i32 j_begin,
                                     const float* sLse, float unscale, float (&rS)[kColumns / 2],
                                     float (&factor)[kColumns / 2]) {
    i32 i_first = queries.i_begin + fragment_column(), j_first = j_begin + fragment_row();
    TransposedDropout<Dropout, kColumns> dropout(p, s, queries.head, queries.i_begin, j_begin);
    Options options(p, s, queries.head);
    float scale_log2 = p.scale_log2 * unscale;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 j = j_first + 8 * r;
      Range seen = ScoreGradient<bf16_t, Mask, ScoreMod, Dropout, 64>::seen_columns(p, s, i_first, j);
#pragma unroll
      for (i32 b = 0; b < kColumns / 8; ++b) {
        float2 lse = *reinterpret_cast<const float2*>(sLse + 8 * b + fragment_column());
        if (b % 4 == 0) {
          options.load([&](i32 x, i32& i, i32& key) { i = i_first + 8 * (b + x / 2) + x % 2, key = j; });
        }
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e, column = 8 * b + e, i = i_first + column;
          bool is_kept = column >= seen.begin && column < seen.end;
          float row_lse = e == 0 ? lse.x : lse.y;
          if constexpr (kHasOptions) {
            is_kept = is_kept && i < s.seqlen_q;
            is_kept = is_kept && options.is_shown(2 * (b % 4) + e, i, j);
            typename Options::Kept kept{};
            bool is_drawn = dropout.is_kept(b, e, r);
            float score = is_kept ? options.score(2 * (b % 4) + e, rS[x] * unscale, i, j, kept) : -infinity();
            float full = probability(score, row_lse, exponent_factor(ScoreMod::kIsNatural));
            if constexpr (mutates(Mutation::bwd_sm90_f32_softcap)) kept.tanh = 0.0f;
            factor[x] = full;
            if constexpr (ScoreMod::kHasDerivative) factor[x] *= options.scores.gradient(kept);
            if constexpr (Dropout::kIsOn) factor[x] = is_drawn ? factor[x] : -factor[x];
            rS[x] = is_drawn ? full * keep_factor<Dropout>(p) : 0.0f;
          } else {
            float exponent = min_with_nan(fmaf(rS[x], scale_log2, -row_lse), 0.0f);
            rS[x] = factor[x] = exp2_approx(is_kept ? exponent : -infinity());
          }
        }
      }
    }
  }

  // Replaces dP^T by dS^T; the factors come from exponentiate. Scope: thread.
  template <i32 kColumns>
  FT_DEVICE static void multiply_gradient(const Params& p, const float4 (&factors)[kColumns / 8][128],
                                          const float* sDelta, float unscale, float (&rdP)[kColumns / 2]) {
#pragma unroll
    for (i32 b = 0; b < kColumns / 8; ++b) {
      float4 four = factors[b][threadIdx.x % 128];
      float factor[4] = {four.x, four.y, four.z, four.w};
      float2 delta = *reinterpret_cast<const float2*>(sDelta + 8 * b + fragment_column());
#pragma unroll
      for (i32 x = 0; x < 4; ++x) {
        float dp = rdP[4 * b + x] * unscale;
        if constexpr (Dropout::kIsOn) dp = __float_as_int(factor[x]) < 0 ? 0.0f : dp * p.keep_factor;
        rdP[4 * b + x] = (kIsSigned ? factor[x] : fabsf(factor[x])) * (dp - (x % 2 == 0 ? delta.x : delta.y));
      }
    }
  }

  // Stores dK or dV of the block's keys. Scope: thread.
  template <i32 kCount>
  FT_DEVICE static void store_keys(void* base, const Strides& strides, const Params& p, const KeyTile& tile,
                                   i32 num_columns, float factor, const float (&rD)[kCount]) {
    KeyRows<float, KvSource<false>> rows(static_cast<float*>(base), strides, p, tile.s, tile.kv_head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i32 j = tile.j_begin + fragment_row() + 8 * r;
      if constexpr (Load::kIsAligned16) {
        store_row_float(rows.row(j), j < tile.s.seqlen_k, num_columns, r, factor, rD);
      } else {
        store_row_elements(rows.row(j), j < tile.s.seqlen_k, num_columns, r, factor, rD);
      }
    }
  }

  // Warpgroup 0: P and dV. Scope: warpgroup.
  FT_DEVICE static void consume_dv(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    Unscale unscale = Unscale::find<Config>(*params.range);
    float rdV[Config::kHeadDimV / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDimV / 2; ++x) rdV[x] = 0.0f;
    if (tile.has_queries()) mbarrier_wait(shared.full_k, 0);
    for (u32 count = 0; count < tile.num_tiles(); ++count) {
      u32 stage = Stages::stage(count);
      SplitFragment<Config> fragment;
      {
        // S^T = K Q^T
        float rS[32], factor[32];
        Stages::wait_full(shared.full_q, count);
        gemm_abt_split<Parts, 64, Config::kHeadDim>(rS, opaque(tile_base(shared.sK, 64 * 128)),
                                                    opaque(tile_base(shared.sQ[stage], 64 * 128)));
        wgmma_wait<0>();
        pin_registers(rS);
        // P^T
        exponentiate<64>(p, tile.s, shared.queries[count % kNumStreamedTiles], tile.j_begin, shared.lse[stage],
                         unscale.s, rS, factor);
        __syncwarp();
        release_stage(shared.empty_q[stage]);
        // Hand it over
        mbarrier_wait(shared.empty_p, count % 2 ^ 1);
#pragma unroll
        for (i32 x = 0; x < 8; ++x) {
          shared.sP[x][threadIdx.x % 128] =
              make_float4(factor[4 * x], factor[4 * x + 1], factor[4 * x + 2], factor[4 * x + 3]);
        }
        __syncwarp();
        arrive_warp(shared.full_p);
        fragment.split(rS);
      }
      // dV += P^T dO
      Stages::wait_full(shared.full_do, count);
      add_product<Config, Config::kHeadDimV>(rdV, fragment, opaque(tile_base(shared.sdO[stage], 64 * 128)));
      release_stage(shared.empty_do[stage]);
    }
    store_keys(p.dv, p.dv_strides, p, tile, p.head_dim_v, unscale.dv, rdV);
  }

  // Warpgroup 1: dS and dK. Scope: warpgroup.
  FT_DEVICE static void consume_dk(const Sm90F32Params& params, Storage& shared, const KeyTile& tile) {
    const Params& p = params.base;
    Unscale unscale = Unscale::find<Config>(*params.range);
    float rdK[Config::kHeadDim / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdK[x] = 0.0f;
    if (tile.has_queries()) mbarrier_wait(shared.full_v, 0);
    for (u32 count = 0; count < tile.num_tiles(); ++count) {
      u32 stage = Stages::stage(count);
      SplitFragment<Config> fragment;
      {
        // dP^T = V dO^T
        float rdP[32];
        Stages::wait_full(shared.full_do, count);
        gemm_abt_split<Parts, 64, Config::kHeadDimV>(rdP, opaque(tile_base(shared.sV, 64 * 128)),
                                                     opaque(tile_base(shared.sdO[stage], 64 * 128)));
        wgmma_wait<0>();
        pin_registers(rdP);
        release_stage(shared.empty_do[stage]);
        // dS^T = P^T * (dP^T - delta)
        Stages::wait_full(shared.full_q, count);
        mbarrier_wait(shared.full_p, count % 2);
        multiply_gradient<64>(p, shared.sP, shared.delta[stage], unscale.dp, rdP);
        __syncwarp();
        release_stage(shared.empty_p);
        fragment.split(rdP);
      }
      // dK += dS^T Q
      add_product<Config, Config::kHeadDim>(rdK, fragment, opaque(tile_base(shared.sQ[stage], 64 * 128)));
      release_stage(shared.empty_q[stage]);
    }
    multiply(rdK, p.scale);
    store_keys(p.dk, p.dk_strides, p, tile, p.head_dim, unscale.dk, rdK);
  }

  FT_DEVICE static void run(const Sm90F32Params& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
    if (threadIdx.x == 0) {
      init(shared);
      shared.tile = KeyTile::find<64, 64, Mask, SeqInfo>(params.base);
      if constexpr (mutates(Mutation::bwd_sm90_f32_group)) shared.tile.num_heads = 1;
    }
    __syncthreads();
    const KeyTile& tile = shared.tile;
    if (!tile.has_keys()) return;
    i32 warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 2) {
      lower_registers<Config::kProducerRegisters>();
      i32 warp = uniform(threadIdx.x / 32 % 4);
      if (!tile.has_queries()) return;
      if (warp == 0 && elect_lane()) produce(params, shared, tile);
      if (warp == 1) produce_stats(params.base, shared, tile);
    } else if (warpgroup == 0) {
      raise_registers<Config::kConsumerRegisters>();
      consume_dv(params, shared, tile);
    } else {
      raise_registers<Config::kConsumerRegisters>();
      consume_dk(params, shared, tile);
    }
  }
};

// ---- dQ.

template <class Config>
struct alignas(1024) BwdSm90F32DqStorage {
  u16 sQ[Config::kNumConsumers][Config::kElementsQ];
  u16 sdO[Config::kNumConsumers][Config::kElementsdO];
  u16 sK[Config::kNumStages][Config::kElementsQ];
  u16 sV[Config::kNumStages][Config::kElementsdO];
  u64 full_q[Config::kNumConsumers], full_do[Config::kNumConsumers];
  u64 full_k[Config::kNumStages], empty_k[Config::kNumStages];
  u64 full_v[Config::kNumStages], empty_v[Config::kNumStages];
  QueryBlock block;
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct BwdSm90F32Dq {
  using Parts = typename Config::Parts;
  using Storage = BwdSm90F32DqStorage<Config>;
  using Options = TileOptions<Mask, ScoreMod, Dropout>;
  using Stages = Ring<Config::kNumStages>;
  static constexpr bool kHasOptions = ScoreMod::kChangesScores || Mask::kHasBool || Dropout::kIsOn;
  static constexpr bool kIsSigned = ScoreMod::Function::kHasDerivative;  // factors of dP - delta may be negative
  static_assert(!kIsSigned || !Dropout::kIsOn, "their sign says what dropout drops");

  // Scope: thread 0.
  FT_DEVICE static void init(Storage& shared) {
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      mbarrier_init(shared.full_q[consumer], 1);
      mbarrier_init(shared.full_do[consumer], 1);
    }
    for (i32 stage = 0; stage < Config::kNumStages; ++stage) {
      mbarrier_init(shared.full_k[stage], 1);
      mbarrier_init(shared.full_v[stage], 1);
      mbarrier_init(shared.empty_k[stage], 4 * Config::kNumConsumers);
      mbarrier_init(shared.empty_v[stage], 4 * Config::kNumConsumers);
    }
    mbarrier_init_fence();
    fence_proxy_async();
  }

  // Scope: one thread.
  FT_DEVICE static void produce(const Sm90F32Params& params, Storage& shared, const QueryBlock& block) {
    const Params& p = params.base;
    for (i32 consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
      i32 i = block.i_begin + 64 * consumer;
      if (i >= block.s.seqlen_q) continue;
      i64 query_tile = first_query_tile(p, block.s, block.head) + i / 64;
      load_split_tile<Config::kElementsQ>(shared.sQ[consumer], params.q_parts + query_tile * Config::kElementsQ,
                                          shared.full_q[consumer]);
      load_split_tile<Config::kElementsdO>(shared.sdO[consumer], params.dout_parts + query_tile * Config::kElementsdO,
                                           shared.full_do[consumer]);
    }
    i64 key_tile = first_key_tile<64>(p, block.s, block.head / (p.heads / p.heads_kv)) + block.n_begin;
    for (u32 count = 0; count < block.num_tiles(); ++count, ++key_tile) {
      u32 stage = Stages::stage(count);
      Stages::wait_empty(shared.empty_k, count);
      load_split_tile<Config::kElementsQ>(shared.sK[stage], params.k_parts + key_tile * Config::kElementsQ,
                                          shared.full_k[stage]);
      Stages::wait_empty(shared.empty_v, count);
      load_split_tile<Config::kElementsdO>(shared.sV[stage], params.v_parts + key_tile * Config::kElementsdO,
                                           shared.full_v[stage]);
    }
  }

  // Replaces S by the factor of dP - delta in dS. Bit x of the result is set if dropout keeps element x. Scope: warp.
  template <i32 kColumns>
  FT_DEVICE static u32 find_factors(const Params& p, const Sequence& s, i32 head, const i32 (&i)[2],
                                    const float (&lse)[2], i32 j_begin, float unscale, float (&rS)[kColumns / 2]) {
    Options options(p, s, head);
    i32 j_first = j_begin + fragment_column();
    float scale_log2 = p.scale_log2 * unscale;
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      Range seen = key_range<Mask>(p, s, i[r], i[r] + 1);
      i32 low = seen.begin - j_first, high = seen.end - j_first;
#pragma unroll
      for (i32 b = 0; b < kColumns / 8; ++b) {
        if (b % 4 == 0) {
          options.load([&](i32 x, i32& query, i32& j) { query = i[r], j = j_first + 8 * (b + x / 2) + x % 2; });
        }
#pragma unroll
        for (i32 e = 0; e < 2; ++e) {
          i32 x = 4 * b + 2 * r + e, column = 8 * b + e, j = j_first + column;
          bool is_kept = column >= low && column < high;
          if constexpr (kHasOptions) {
            is_kept = is_kept && i[r] < s.seqlen_q;
            is_kept = is_kept && options.is_shown(2 * (b % 4) + e, i[r], j);
            typename Options::Kept kept{};
            float score = is_kept ? options.score(2 * (b % 4) + e, rS[x] * unscale, i[r], j, kept) : -infinity();
            rS[x] = probability(score, lse[r], exponent_factor(ScoreMod::kIsNatural));
            if constexpr (ScoreMod::kHasDerivative) rS[x] *= options.scores.gradient(kept);
          } else {
            float exponent = min_with_nan(fmaf(rS[x], scale_log2, -lse[r]), 0.0f);
            rS[x] = exp2_approx(is_kept ? exponent : -infinity());
          }
        }
      }
    }
    u32 kept = 0;
    if constexpr (Dropout::kIsOn) {
      DropoutBits bits(p, s, head);
#pragma unroll
      for (i32 x = 0; x < kColumns / 2; x += 16) {
#pragma unroll
        for (i32 r = 0; r < 2; ++r) {
          // Lane t of a quad draws keys 8 t .. 8 t + 7 of 32; after the transpose it has the bits of its two columns
          uint4 drawn = bits.words(i[r], (j_begin + 2 * x) / 8 + threadIdx.x % 4);
          u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
          quad_transpose(words);
#pragma unroll
          for (i32 g = 0; g < 4; ++g) {
            u32 two = ((words[g] & 0xffffu) >= bits.threshold ? 1u : 0u) | (words[g] >> 16 >= bits.threshold ? 2u : 0u);
            kept |= two << (x + 4 * g + 2 * r);
          }
        }
      }
    }
    return kept;
  }

  // Scope: warpgroup.
  FT_DEVICE static void consume(const Sm90F32Params& params, Storage& shared, const QueryBlock& block, i32 consumer) {
    const Params& p = params.base;
    const Sequence& s = block.s;
    Unscale unscale = Unscale::find<Config>(*params.range);
    // The thread's two rows
    i32 i[2];
    float lse[2], delta[2];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      i[r] = block.i_begin + 64 * consumer + fragment_row() + 8 * r;
      i64 stat = stat_index(p, s, block.head, i[r]);
      lse[r] = i[r] < s.seqlen_q ? p.score_lse[stat] : infinity();
      delta[r] = i[r] < s.seqlen_q ? p.delta[stat] : 0.0f;
    }
    float rdQ[Config::kHeadDim / 2];
#pragma unroll
    for (i32 x = 0; x < Config::kHeadDim / 2; ++x) rdQ[x] = 0.0f;

    Range tiles = block.consumers[consumer];
    if (tiles.begin < tiles.end) {
      mbarrier_wait(shared.full_q[consumer], 0);
      mbarrier_wait(shared.full_do[consumer], 0);
    }
    for (u32 count = 0; count < block.num_tiles(); ++count) {
      u32 stage = Stages::stage(count);
      Stages::wait_full(shared.full_k, count);
      Stages::wait_full(shared.full_v, count);
      // Release a tile that this consumer's queries do not see. The lanes leave the waits together: once one of them
      // has released a stage, its barrier may go on to the next phase.
      if (static_cast<i32>(count) < tiles.begin || static_cast<i32>(count) >= tiles.end) {
        __syncwarp();
        release_stage(shared.empty_k[stage]);
        release_stage(shared.empty_v[stage]);
        continue;
      }
      SplitFragment<Config> fragment;
      u32 k = opaque(tile_base(shared.sK[stage], 64 * 128));
      {
        // S = Q K^T and dP = dO V^T
        float rS[32], rdP[32];
        gemm_abt_split<Parts, 64, Config::kHeadDim>(rS, opaque(tile_base(shared.sQ[consumer], 64 * 128)), k);
        gemm_abt_split<Parts, 64, Config::kHeadDimV>(rdP, opaque(tile_base(shared.sdO[consumer], 64 * 128)),
                                                     opaque(tile_base(shared.sV[stage], 64 * 128)));
        wgmma_wait<1>();
        pin_registers(rS);
        i32 j_begin = (block.n_begin + static_cast<i32>(count)) * 64;
        u32 kept = find_factors<64>(p, s, block.head, i, lse, j_begin, unscale.s, rS);
        wgmma_wait<0>();
        pin_registers(rdP);
        release_stage(shared.empty_v[stage]);
        // dS = P * (dP - delta)
#pragma unroll
        for (i32 x = 0; x < 32; ++x) {
          float dp = rdP[x] * unscale.dp;
          if constexpr (mutates(Mutation::bwd_sm90_f32_dropout)) kept = ~0u;
          if constexpr (Dropout::kIsOn) dp = kept >> x & 1u ? dp * p.keep_factor : 0.0f;
          rS[x] *= dp - delta[x / 2 % 2];
        }
        fragment.split(rS);
      }
      // dQ += dS K
      add_product<Config, Config::kHeadDim>(rdQ, fragment, k);
      release_stage(shared.empty_k[stage]);
    }

    // Store dQ
    multiply(rdQ, p.scale);
    float* gdQ = query_rows(static_cast<float*>(p.dq), p.dq_strides, s, block.head);
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float* row = gdQ + i[r] * p.dq_strides.row;
      if constexpr (Load::kIsAligned16) {
        store_row_float(row, i[r] < s.seqlen_q, p.head_dim, r, unscale.dq, rdQ);
      } else {
        store_row_elements(row, i[r] < s.seqlen_q, p.head_dim, r, unscale.dq, rdQ);
      }
    }
  }

  FT_DEVICE static void run(const Sm90F32Params& params) {
    extern __shared__ __align__(1024) char shared_bytes[];
    Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
    if (threadIdx.x == 0) {
      init(shared);
      shared.block = QueryBlock::find<Config, Mask, ScoreMod, SeqInfo, false>(params.base);
    }
    __syncthreads();
    const QueryBlock& block = shared.block;
    if (!block.has_queries()) return;
    i32 warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == Config::kNumConsumers) {
      lower_registers<Config::kProducerRegisters>();
      if (threadIdx.x / 32 % 4 == 0 && block.num_tiles() > 0 && elect_lane()) produce(params, shared, block);
    } else {
      raise_registers<Config::kConsumerRegisters>();
      consume(params, shared, block, warpgroup);
    }
  }
};

}  // namespace flashtile
