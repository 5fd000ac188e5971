// Attention forward in float32 arithmetic (FFMA), for every architecture and option. FlashAttention-2, section 3.1.
//
// Grid:      one block per (m_block, split of the keys, head, batch), in one dimension. m_block is fastest, so that
//            neighbouring blocks share K and V in L2; the last m_block comes first, since it sees the most keys under a
//            causal mask. A split stores its sum of P V, its m and its l for fwd_combine_kernel.
// Block:     kBlockM queries. Each warp owns 4 * kRowsPerThread of them from scores to output, so P needs no block
//            barrier.
// Shared:    sQ [kBlockM][kRowStride], sK and sV [kBlockN][kRowStride], sP [kBlockM][kScoreStride], float32.
// Mainloop:  K(n+1) is copied while P(n) V(n) is computed, V(n+1) while S(n+1) is; each goes to the buffer just
//            released.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/mask.cuh"
#include "device/attn/merge.cuh"
#include "device/attn/online_softmax.cuh"
#include "device/attn/score.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"
#include "families/simt/dropout.cuh"
#include "families/simt/gemm.cuh"

namespace flashtile {

template <class Config>
struct FwdSimtStorage {
  float sQ[Config::kBlockM * Config::kRowStride];
  float sK[Config::kBlockN * Config::kRowStride];
  float sV[Config::kBlockN * Config::kRowStride];
  float sP[Config::kBlockM * Config::kScoreStride];
};

// The running maximum, the running sum and the output of a thread's rows.
template <class Config>
struct FwdSimtState {
  float m[Config::kRowsPerThread];
  float l[Config::kRowsPerThread];
  OutputTile<Config> rO;
};

// Turns a tile of dot products into P: score modifiers, mask, online softmax, dropout. Leaves P in shared memory and
// rescales O. Scope: warp.
template <class Config, class Mask, class ScoreMod, class Dropout, bool kIsMasked>
FT_DEVICE void fwd_simt_scores(const Params& p, const Sequence& s, i32 head, const Score<ScoreMod>& scores, i32 i_begin,
                               i32 j_begin, FwdSimtStorage<Config>& shared, FwdSimtState<Config>& state,
                               ScoreTile<Config>& rS) {
  constexpr i32 kCols = Config::kColsPerThread;
  constexpr float kFactor = exponent_factor(ScoreMod::kIsNatural);
  // Store each P as soon as it is computed: 5 % faster with 8 x 8 scores on an NVIDIA H200, no change with fewer. Not
  // with dropout, which needs the whole row
  constexpr bool kStoresEarly = !Dropout::kIsOn && Config::kRowsPerThread * kCols >= 64;
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    i32 i = i_begin + row_of<Config>(t);
    // Compute scores, -inf where masked
#pragma unroll
    for (i32 n = 0; n < kCols; ++n) {
      i32 j = j_begin + column_group() + 8 * n;
      typename Score<ScoreMod>::Kept kept;
      if constexpr (kIsMasked) {
        bool seen = is_seen<Mask>(p, s, head, i, j);
        rS[t][n] = seen ? scores.score(rS[t][n], i, j, kept) : -infinity();
      } else {
        rS[t][n] = scores.score(rS[t][n], i, j, kept);
      }
    }
    // Raise the maximum if it is too low
    float tile_max = rS[t][0];
#pragma unroll
    for (i32 n = 1; n < kCols; ++n) tile_max = fmaxf(tile_max, rS[t][n]);
    float m_new = raised_max(state.m[t], row_max(tile_max));
    if constexpr (mutates(Mutation::stale_max)) m_new = state.m[t] == -infinity() ? m_new : state.m[t];
    float shift = shift_of(m_new);
    float alpha = exp_difference(state.m[t], shift, kFactor);
    if constexpr (mutates(Mutation::skip_rescale)) alpha = 1.0f;
    // Compute P and its sum
    float* sP = shared.sP + row_of<Config>(t) * Config::kScoreStride + column_group();
    float sum = 0.0f;
#pragma unroll
    for (i32 n = 0; n < kCols; ++n) {
      rS[t][n] = exp_difference(rS[t][n], shift, kFactor);
      sum += rS[t][n];
      if constexpr (kStoresEarly) sP[8 * n] = rS[t][n];
    }
    state.m[t] = m_new;
    state.l[t] = state.l[t] * alpha + row_sum(sum);
    // Rescale O
#pragma unroll
    for (i32 u = 0; u < Config::kVectorsPerThread; ++u) {
      state.rO[t][u].x *= alpha;
      state.rO[t][u].y *= alpha;
      state.rO[t][u].z *= alpha;
      state.rO[t][u].w *= alpha;
    }
  }
  if constexpr (Dropout::kIsOn) drop_scores<Config>(DropoutBits(p, s, head), i_begin, j_begin, rS);
  if constexpr (!kStoresEarly) store_scores<Config>(shared.sP, rS);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) fwd_simt_kernel(const FT_GRID_CONSTANT Params p) {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  // Unrolling on an NVIDIA H200. Q K^T: 2 is 2 % slower than 1 for 8 x 8 scores, and 12 % faster for 4 x 8 at d = 128.
  // P V: 2 is 3 % faster than 1 at 64 x 64, d = 64, and slower for longer rows of O
  constexpr i32 kUnrollS = Config::kRowsPerThread * Config::kColsPerThread >= 64 ? 1 : 2;
  constexpr i32 kUnrollO = Config::kVectorsPerThread <= 2 ? 2 : 1;
  extern __shared__ __align__(16) char shared_bytes[];
  FwdSimtStorage<Config>& shared = *reinterpret_cast<FwdSimtStorage<Config>*>(shared_bytes);

  // Find this block's queries and keys
  TilePlace place =
      place_queries<SeqInfo>(p, Config::kBlockM, p.num_splits * p.heads, static_cast<i32>(blockIdx.x), true);
  i32 split = place.row % p.num_splits, head = place.row / p.num_splits;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  i32 i_begin = place.tile * Config::kBlockM;
  if (i_begin >= s.seqlen_q) return;
  i32 kv_head = head / (p.heads / p.heads_kv);
  if constexpr (mutates(Mutation::gqa_head)) kv_head = head % p.heads_kv;
  const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, s, head);
  KeyRows<const T, KvSource> gK(static_cast<const T*>(p.k), p.k_strides, p, s, kv_head);
  KeyRows<const T, KvSource> gV(static_cast<const T*>(p.v), p.v_strides, p, s, kv_head);
  Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + Config::kBlockM, s.seqlen_q));
  i32 n_begin = keys.begin / Config::kBlockN, n_end = ceil_div(keys.end, Config::kBlockN);
  if constexpr (mutates(Mutation::drop_last_tile)) n_end = n_end - 1 > n_begin ? n_end - 1 : n_end;
  split_tiles(p, split, n_begin, n_end);

  auto load_k = [&](i32 n) {
    if (n < n_end) {
      load_tile<Config, Load, Config::kBlockN, T>(shared.sK, n * Config::kBlockN, s.seqlen_k, p.head_dim,
                                                  [&](i32 j) { return gK.row(j); });
    }
    cp_async_commit();
  };
  auto load_v = [&](i32 n) {
    if (n < n_end) {
      load_tile<Config, Load, Config::kBlockN, T>(shared.sV, n * Config::kBlockN, s.seqlen_k, p.head_dim_v,
                                                  [&](i32 j) { return gV.row(j); });
    }
    cp_async_commit();
  };

  // Load Q and the first K and V
  load_tile<Config, Load, Config::kBlockM, T>(shared.sQ, i_begin, s.seqlen_q, p.head_dim,
                                              [&](i32 i) { return gQ + i * p.q_strides.row; });
  load_k(n_begin);
  load_v(n_begin);

  FwdSimtState<Config> state;
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    state.m[t] = -infinity();
    state.l[t] = 0.0f;
  }
  clear<Config>(state.rO);

  Score<ScoreMod> scores(p, s, head);
  if constexpr (mutates(Mutation::divergent_barrier))
    if (threadIdx.x % 2 == 0) __syncthreads();
  for (i32 n = n_begin; n < n_end; ++n) {
    i32 j_begin = n * Config::kBlockN;
    float rS[Config::kRowsPerThread][Config::kColsPerThread];
    // Wait for the K tile
    cp_async_wait<1>();
    __syncthreads();
    // S = Q K^T, then load the next K tile into the same buffer
    product_abt<Config, kUnrollS>(rS, shared.sQ, shared.sK);
    __syncthreads();
    load_k(n + 1);
    // Compute P; only edge tiles pay for the mask
    if (needs_mask<Mask>(p, s, i_begin, Config::kBlockM, j_begin, Config::kBlockN)) {
      fwd_simt_scores<Config, Mask, ScoreMod, Dropout, true>(p, s, head, scores, i_begin, j_begin, shared, state, rS);
    } else {
      fwd_simt_scores<Config, Mask, ScoreMod, Dropout, false>(p, s, head, scores, i_begin, j_begin, shared, state, rS);
    }
    // Wait for the V tile
    cp_async_wait<1>();
    __syncthreads();
    // O += P V, then load the next V tile into the same buffer
    product_pb<Config, kUnrollO>(state.rO, shared.sP, shared.sV);
    __syncthreads();
    load_v(n + 1);
  }

  // Finish the softmax, normalise and store O and lse; of a split the sum of P V, m and l
  bool is_split = p.num_splits > 1;
  constexpr bool kIsNatural = ScoreMod::kIsNatural;
  float sink = p.sinks == nullptr || is_split ? -infinity() : in_score_unit(kIsNatural, p.sinks[head]);
  Out* gO = query_rows(static_cast<Out*>(p.out), p.out_strides, s, head);
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    i32 i = i_begin + row_of<Config>(t);
    RowStats stats = join_sink<kIsNatural>(state.m[t], state.l[t], sink, [](float l) { return l; });
    float norm = (is_split ? 1.0f : stats.norm()) * keep_factor<Dropout>(p);
    if (i >= s.seqlen_q) continue;
    i64 stat = stat_index(p, s, head, i);
    i64 part = split * p.lse_size + stat;
    if (column_group() == 0) store_stats<kIsNatural>(p, is_split, part, stat, stats.m, stats.l);
    if constexpr (mutates(Mutation::out_of_bounds)) p.lse[p.lse_size] = 0.0f;
#pragma unroll
    for (i32 u = 0; u < Config::kVectorsPerThread; ++u) {
      float4 o = state.rO[t][u];
      o = make_float4(o.x * norm, o.y * norm, o.z * norm, o.w * norm);
      if (is_split) {
        store_four<float, Load::kIsAligned16>(p.partial_out + part * p.head_dim_v, 4 * column_group() + 32 * u,
                                              p.head_dim_v, o);
      } else {
        store_four<Out, Load::kIsAligned16>(gO + i * p.out_strides.row, 4 * column_group() + 32 * u, p.head_dim_v, o);
      }
    }
  }
}

}  // namespace flashtile
