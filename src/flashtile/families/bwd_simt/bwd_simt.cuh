// Attention backward in float32 arithmetic, deterministic: three kernels of one shape. Each gradient element is summed
// by one block in a fixed order. FlashAttention-2, section 3.1.2.
//
// bwd_dq_simt_kernel     a block owns kBlockM queries and streams the keys they see: dQ += dS K
// bwd_dkdv_simt_kernel   a block owns kBlockM keys and streams the queries that see them, of every head that shares
//                        them: dV += P^T dO, dK += dS^T Q. Its score tiles are transposed, so that all sums stay in
//                        registers
// bwd_dbias_simt_kernel  a block owns a tile of the bias and streams everything that is broadcast onto it
//
// All recompute P = 2^(S - lse) and dS = P * (dP - delta) from the results of bwd_preprocess_kernel.
// Threads: as in simt/gemm.cuh.
// Shared:  two tiles of the block's own rows and two of streamed rows [rows][kRowStride], sP [kBlockM][kScoreStride],
//          float32.
#pragma once

#include "device/attn/block_range.cuh"
#include "device/attn/mask.cuh"
#include "device/attn/score.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"
#include "families/simt/dropout.cuh"
#include "families/simt/gemm.cuh"

namespace flashtile {

template <class Config>
struct BwdSimtStorage {
  float sOwn[Config::kBlockM * Config::kRowStride];         // Q, or K
  float sOwnGrad[Config::kBlockM * Config::kRowStride];     // dO, or V
  float sStream[Config::kBlockN * Config::kRowStride];      // K, or Q
  float sStreamGrad[Config::kBlockN * Config::kRowStride];  // V, or dO
  float sP[Config::kBlockM * Config::kScoreStride];
};

// One element: from the dot products S and dP to P with dropout and to dS, the gradient of the bias. `chain` turns dS
// into the gradient of the dot product. Scope: thread.
template <class ScoreMod>
FT_DEVICE void backward_element(const Score<ScoreMod>& scores, float scale, float dot, float dp, float drop,
                                float score_lse, float delta, i32 i, i32 j, float& p_dropped, float& ds, float& chain) {
  typename Score<ScoreMod>::Kept kept{};
  constexpr float kFactor = exponent_factor(ScoreMod::kIsNatural);
  float p = probability(scores.score(dot, i, j, kept), score_lse, kFactor);
  p_dropped = p * drop;
  ds = p * (dp * drop - delta);
  if constexpr (ScoreMod::kHasFunction) ds *= scores.bias_gradient(kept);
  chain = scale;
  if constexpr (ScoreMod::kHasDerivative) chain = scale * scores.dot_gradient(kept);
  if constexpr (mutates(Mutation::softcap_derivative)) chain = scale;
}

// Turns a tile whose rows are queries into dS: takes Q K^T in rS and dO V^T in rD, returns dS in rS, with kOfDot times
// `chain`. Scope: warp.
template <class Config, class Mask, class ScoreMod, class Dropout, bool kIsMasked, bool kOfDot>
FT_DEVICE void query_tile_ds(const Params& p, const Sequence& s, i32 head, const Score<ScoreMod>& scores, i32 i_begin,
                             i32 j_begin, const float (&score_lse)[Config::kRowsPerThread],
                             const float (&delta)[Config::kRowsPerThread], ScoreTile<Config>& rS,
                             ScoreTile<Config>& rD) {
  ScoreTile<Config> drop;
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
#pragma unroll
    for (i32 n = 0; n < Config::kColsPerThread; ++n) drop[t][n] = keep_factor<Dropout>(p);
  }
  if constexpr (Dropout::kIsOn) drop_scores<Config>(DropoutBits(p, s, head), i_begin, j_begin, drop);
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    i32 i = i_begin + row_of<Config>(t);
#pragma unroll
    for (i32 n = 0; n < Config::kColsPerThread; ++n) {
      i32 j = j_begin + column_group() + 8 * n;
      float p_dropped = 0.0f, ds = 0.0f, chain = 0.0f;
      if (!kIsMasked || is_seen<Mask>(p, s, head, i, j)) {
        backward_element<ScoreMod>(scores, p.scale, rS[t][n], rD[t][n], drop[t][n], score_lse[t], delta[t], i, j,
                                   p_dropped, ds, chain);
      }
      rS[t][n] = kOfDot ? ds * chain : ds;
    }
  }
}

// query_tile_ds with a mask where the tile needs one. Scope: warp.
template <class Config, class Mask, class ScoreMod, class Dropout, bool kOfDot>
FT_DEVICE void query_tile(const Params& p, const Sequence& s, i32 head, const Score<ScoreMod>& scores, i32 i_begin,
                          i32 j_begin, const float (&score_lse)[Config::kRowsPerThread],
                          const float (&delta)[Config::kRowsPerThread], ScoreTile<Config>& rS, ScoreTile<Config>& rD) {
  if (needs_mask<Mask>(p, s, i_begin, Config::kBlockM, j_begin, Config::kBlockN)) {
    query_tile_ds<Config, Mask, ScoreMod, Dropout, true, kOfDot>(p, s, head, scores, i_begin, j_begin, score_lse, delta,
                                                                 rS, rD);
  } else {
    query_tile_ds<Config, Mask, ScoreMod, Dropout, false, kOfDot>(p, s, head, scores, i_begin, j_begin, score_lse,
                                                                  delta, rS, rD);
  }
}

// Loads the statistics of a thread's query rows. Rows outside the sequence get those of a fully masked row.
// Scope: thread.
template <class Config>
FT_DEVICE void load_stats(const Params& p, const Sequence& s, i32 head, i32 i_begin,
                          float (&score_lse)[Config::kRowsPerThread], float (&delta)[Config::kRowsPerThread]) {
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
    i32 i = i_begin + row_of<Config>(t);
    i64 stat = stat_index(p, s, head, i);
    score_lse[t] = i < s.seqlen_q ? p.score_lse[stat] : infinity();
    delta[t] = i < s.seqlen_q ? p.delta[stat] : 0.0f;
  }
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_dq_simt_kernel(const FT_GRID_CONSTANT Params p) {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  extern __shared__ __align__(16) char shared_bytes[];
  BwdSimtStorage<Config>& shared = *reinterpret_cast<BwdSimtStorage<Config>*>(shared_bytes);

  // Find this block's queries and load Q and dO
  TilePlace place = place_queries<SeqInfo>(p, Config::kBlockM, p.heads, static_cast<i32>(blockIdx.x), true);
  i32 i_begin = place.tile * Config::kBlockM, head = place.row;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  if (i_begin >= s.seqlen_q) return;
  i32 kv_head = head / (p.heads / p.heads_kv);
  const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, s, head);
  const Out* gdO = query_rows(static_cast<const Out*>(p.dout), p.dout_strides, s, head);
  KeyRows<const T, KvSource> gK(static_cast<const T*>(p.k), p.k_strides, p, s, kv_head);
  KeyRows<const T, KvSource> gV(static_cast<const T*>(p.v), p.v_strides, p, s, kv_head);
  load_tile<Config, Load, Config::kBlockM, T>(shared.sOwn, i_begin, s.seqlen_q, p.head_dim,
                                              [&](i32 i) { return gQ + i * p.q_strides.row; });
  load_tile<Config, Load, Config::kBlockM, Out>(shared.sOwnGrad, i_begin, s.seqlen_q, p.head_dim_v,
                                                [&](i32 i) { return gdO + i * p.dout_strides.row; });

  float score_lse[Config::kRowsPerThread], delta[Config::kRowsPerThread];
  load_stats<Config>(p, s, head, i_begin, score_lse, delta);
  OutputTile<Config> rdQ;
  clear<Config>(rdQ);
  Score<ScoreMod> scores(p, s, head);
  Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + Config::kBlockM, s.seqlen_q));
  for (i32 n = keys.begin / Config::kBlockN; n < ceil_div(keys.end, Config::kBlockN); ++n) {
    i32 j_begin = n * Config::kBlockN;
    if constexpr (mutates(Mutation::dq_tile))
      if (n == 1) continue;
    if constexpr (mutates(Mutation::missing_barrier))
      if (threadIdx.x < 32) be_late();
    // Load K and V
    load_tile<Config, Load, Config::kBlockN, T>(shared.sStream, j_begin, s.seqlen_k, p.head_dim,
                                                [&](i32 j) { return gK.row(j); });
    load_tile<Config, Load, Config::kBlockN, T>(shared.sStreamGrad, j_begin, s.seqlen_k, p.head_dim_v,
                                                [&](i32 j) { return gV.row(j); });
    cp_async_commit();
    cp_async_wait<0>();
    if constexpr (!mutates(Mutation::missing_barrier)) __syncthreads();
    // Compute dS from S and dP
    ScoreTile<Config> rS, rD;
    product_abt<Config>(rS, shared.sOwn, shared.sStream);
    product_abt<Config>(rD, shared.sOwnGrad, shared.sStreamGrad);
    query_tile<Config, Mask, ScoreMod, Dropout, true>(p, s, head, scores, i_begin, j_begin, score_lse, delta, rS, rD);
    // dQ += dS K
    store_scores<Config>(shared.sP, rS);
    product_pb<Config>(rdQ, shared.sP, shared.sStream);
    __syncthreads();
  }
  cp_async_wait<0>();
  T* gdQ = query_rows(static_cast<T*>(p.dq), p.dq_strides, s, head);
  store_rows<Config, Load>(gdQ, p.dq_strides.row, i_begin, s.seqlen_q, p.head_dim, rdQ);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_dkdv_simt_kernel(const FT_GRID_CONSTANT Params p) {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  extern __shared__ __align__(16) char shared_bytes[];
  BwdSimtStorage<Config>& shared = *reinterpret_cast<BwdSimtStorage<Config>*>(shared_bytes);

  // Find this block's keys and load K and V. The first keys come first: under a causal mask most queries see them
  TilePlace place = place_keys<SeqInfo>(p, Config::kBlockM, p.heads_kv, static_cast<i32>(blockIdx.x));
  i32 j_begin = place.tile * Config::kBlockM, kv_head = place.row;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  if (j_begin >= s.seqlen_k) return;
  KeyRows<const T, KvSource> gK(static_cast<const T*>(p.k), p.k_strides, p, s, kv_head);
  KeyRows<const T, KvSource> gV(static_cast<const T*>(p.v), p.v_strides, p, s, kv_head);
  load_tile<Config, Load, Config::kBlockM, T>(shared.sOwn, j_begin, s.seqlen_k, p.head_dim,
                                              [&](i32 j) { return gK.row(j); });
  load_tile<Config, Load, Config::kBlockM, T>(shared.sOwnGrad, j_begin, s.seqlen_k, p.head_dim_v,
                                              [&](i32 j) { return gV.row(j); });

  OutputTile<Config> rdK, rdV;
  clear<Config>(rdK);
  clear<Config>(rdV);
  i32 group = p.heads / p.heads_kv;
  Range queries = query_range<Mask>(p, s, j_begin, min_of(j_begin + Config::kBlockM, s.seqlen_k));
  for (i32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    if constexpr (mutates(Mutation::dk_group))
      if (head != kv_head * group) continue;
    const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, s, head);
    const Out* gdO = query_rows(static_cast<const Out*>(p.dout), p.dout_strides, s, head);
    Score<ScoreMod> scores(p, s, head);
    for (i32 m = queries.begin / Config::kBlockN; m < ceil_div(queries.end, Config::kBlockN); ++m) {
      i32 i_begin = m * Config::kBlockN;
      // Load Q and dO
      load_tile<Config, Load, Config::kBlockN, T>(shared.sStream, i_begin, s.seqlen_q, p.head_dim,
                                                  [&](i32 i) { return gQ + i * p.q_strides.row; });
      load_tile<Config, Load, Config::kBlockN, Out>(shared.sStreamGrad, i_begin, s.seqlen_q, p.head_dim_v,
                                                    [&](i32 i) { return gdO + i * p.dout_strides.row; });
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      // Compute P^T and dS^T from S^T and dP^T
      ScoreTile<Config> rS, rD;
      product_abt<Config>(rS, shared.sOwn, shared.sStream);
      product_abt<Config>(rD, shared.sOwnGrad, shared.sStreamGrad);
      bool is_masked = needs_mask<Mask>(p, s, i_begin, Config::kBlockN, j_begin, Config::kBlockM);
#pragma unroll
      for (i32 n = 0; n < Config::kColsPerThread; ++n) {
        i32 i = i_begin + column_group() + 8 * n;
        bool is_inside = i < s.seqlen_q;
        i64 stat = stat_index(p, s, head, i);
        float score_lse = is_inside ? p.score_lse[stat] : infinity();
        float delta = is_inside ? p.delta[stat] : 0.0f;
#pragma unroll
        for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
          i32 j = j_begin + row_of<Config>(t);
          float p_dropped = 0.0f, ds = 0.0f, chain = 0.0f;
          if (!is_masked || is_seen<Mask>(p, s, head, i, j)) {
            float drop = 1.0f;
            if constexpr (Dropout::kIsOn) {
              DropoutBits bits(p, s, head);
              drop = bits.is_kept(bits.words(i, j / 8), j % 8) ? p.keep_factor : 0.0f;
              if constexpr (mutates(Mutation::dropout_backward)) drop = 1.0f;
            }
            backward_element<ScoreMod>(scores, p.scale, rS[t][n], rD[t][n], drop, score_lse, delta, i, j, p_dropped, ds,
                                       chain);
          }
          rS[t][n] = p_dropped;
          rD[t][n] = ds * chain;
        }
      }
      // dV += P^T dO, dK += dS^T Q
      store_scores<Config>(shared.sP, rS);
      product_pb<Config>(rdV, shared.sP, shared.sStreamGrad);
      store_scores<Config>(shared.sP, rD);
      product_pb<Config>(rdK, shared.sP, shared.sStream);
      __syncthreads();
    }
  }
  cp_async_wait<0>();
  KeyRows<T, KvSource> gdK(static_cast<T*>(p.dk), p.dk_strides, p, s, kv_head);
  KeyRows<T, KvSource> gdV(static_cast<T*>(p.dv), p.dv_strides, p, s, kv_head);
  store_rows<Config, Load>(gdK.base, p.dk_strides.row, j_begin, s.seqlen_k, p.head_dim, rdK);
  store_rows<Config, Load>(gdV.base, p.dv_strides.row, j_begin, s.seqlen_k, p.head_dim_v, rdV);
}

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_dbias_simt_kernel(const FT_GRID_CONSTANT Params p) {
  using T = typename Config::Element;
  using Out = typename Config::OutElement;
  using BiasElement = typename ScoreMod::BiasElement;
  extern __shared__ __align__(16) char shared_bytes[];
  BwdSimtStorage<Config>& shared = *reinterpret_cast<BwdSimtStorage<Config>*>(shared_bytes);

  // Find this block's tile of the bias. The block streams all of an axis of size 1
  bool all_b = p.bias_sizes[0] == 1, all_h = p.bias_sizes[1] == 1;
  bool all_i = p.bias_sizes[2] == 1, all_j = p.bias_sizes[3] == 1;
  i32 num_m_blocks = ceil_div(p.seqlen_q, Config::kBlockM), num_n_blocks = ceil_div(p.seqlen_k, Config::kBlockN);
  i32 tile = blockIdx.x;
  i32 n_tile = all_j ? 0 : tile % num_n_blocks;
  tile /= all_j ? 1 : num_n_blocks;
  i32 m_tile = all_i ? 0 : tile % num_m_blocks;
  tile /= all_i ? 1 : num_m_blocks;
  i32 bias_head = tile % static_cast<i32>(p.bias_sizes[1]), bias_batch = tile / static_cast<i32>(p.bias_sizes[1]);

  ScoreTile<Config> rSum;
#pragma unroll
  for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
#pragma unroll
    for (i32 n = 0; n < Config::kColsPerThread; ++n) rSum[t][n] = 0.0f;
  }
  for (i32 b = all_b ? 0 : bias_batch; b < (all_b ? p.batch : bias_batch + 1); ++b) {
    Sequence s = find_sequence<SeqInfo>(p, b);
    for (i32 head = all_h ? 0 : bias_head; head < (all_h ? p.heads : bias_head + 1); ++head) {
      if constexpr (mutates(Mutation::dbias_head))
        if (all_h && head == p.heads - 1) continue;
      i32 kv_head = head / (p.heads / p.heads_kv);
      const T* gQ = query_rows(static_cast<const T*>(p.q), p.q_strides, s, head);
      const Out* gdO = query_rows(static_cast<const Out*>(p.dout), p.dout_strides, s, head);
      KeyRows<const T, KvSource> gK(static_cast<const T*>(p.k), p.k_strides, p, s, kv_head);
      KeyRows<const T, KvSource> gV(static_cast<const T*>(p.v), p.v_strides, p, s, kv_head);
      Score<ScoreMod> scores(p, s, head);
      for (i32 m = m_tile; m < (all_i ? ceil_div(s.seqlen_q, Config::kBlockM) : m_tile + 1); ++m) {
        i32 i_begin = m * Config::kBlockM;
        Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + Config::kBlockM, s.seqlen_q));
        if (i_begin >= s.seqlen_q || keys.begin >= keys.end) continue;
        // Load Q and dO
        load_tile<Config, Load, Config::kBlockM, T>(shared.sOwn, i_begin, s.seqlen_q, p.head_dim,
                                                    [&](i32 i) { return gQ + i * p.q_strides.row; });
        load_tile<Config, Load, Config::kBlockM, Out>(shared.sOwnGrad, i_begin, s.seqlen_q, p.head_dim_v,
                                                      [&](i32 i) { return gdO + i * p.dout_strides.row; });
        float score_lse[Config::kRowsPerThread], delta[Config::kRowsPerThread];
        load_stats<Config>(p, s, head, i_begin, score_lse, delta);
        for (i32 n = n_tile; n < (all_j ? ceil_div(s.seqlen_k, Config::kBlockN) : n_tile + 1); ++n) {
          i32 j_begin = n * Config::kBlockN;
          if (j_begin >= keys.end || j_begin + Config::kBlockN <= keys.begin) continue;
          // Load K and V
          load_tile<Config, Load, Config::kBlockN, T>(shared.sStream, j_begin, s.seqlen_k, p.head_dim,
                                                      [&](i32 j) { return gK.row(j); });
          load_tile<Config, Load, Config::kBlockN, T>(shared.sStreamGrad, j_begin, s.seqlen_k, p.head_dim_v,
                                                      [&](i32 j) { return gV.row(j); });
          cp_async_commit();
          cp_async_wait<0>();
          __syncthreads();
          // Compute dS from S and dP, and add it up
          ScoreTile<Config> rS, rD;
          product_abt<Config>(rS, shared.sOwn, shared.sStream);
          product_abt<Config>(rD, shared.sOwnGrad, shared.sStreamGrad);
          query_tile<Config, Mask, ScoreMod, Dropout, false>(p, s, head, scores, i_begin, j_begin, score_lse, delta, rS,
                                                             rD);
#pragma unroll
          for (i32 t = 0; t < Config::kRowsPerThread; ++t) {
#pragma unroll
            for (i32 c = 0; c < Config::kColsPerThread; ++c) rSum[t][c] += rS[t][c];
          }
          __syncthreads();
        }
        // Q and dO may still be on their way where every key tile was skipped
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
      }
    }
  }

  // Sum over the broadcast axes inside the tile, in shared memory, and store
  store_scores<Config>(shared.sP, rSum);
  __syncthreads();
  i64 base = (bias_batch * p.bias_sizes[1] + bias_head) * p.bias_sizes[2] * p.bias_sizes[3];
  i32 num_rows = all_i ? 1 : Config::kBlockM, num_columns = all_j ? 1 : Config::kBlockN;
  for (i32 index = threadIdx.x; index < num_rows * num_columns; index += Config::kNumThreads) {
    i32 r = index / num_columns, c = index % num_columns;
    float sum = 0.0f;
    for (i32 rr = r; rr < (all_i ? Config::kBlockM : r + 1); ++rr) {
      for (i32 cc = c; cc < (all_j ? Config::kBlockN : c + 1); ++cc) sum += shared.sP[rr * Config::kScoreStride + cc];
    }
    i64 i = all_i ? 0 : m_tile * Config::kBlockM + r, j = all_j ? 0 : n_tile * Config::kBlockN + c;
    if (i < p.bias_sizes[2] && j < p.bias_sizes[3]) {
      static_cast<BiasElement*>(p.dbias)[base + i * p.bias_sizes[3] + j] = from_float<BiasElement>(sum);
    }
  }
}

}  // namespace flashtile
