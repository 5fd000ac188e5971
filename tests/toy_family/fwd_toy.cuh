// A forward pass to show what a family needs: a thread for each query, keys one after the other from shared memory.
//
// Threads: kBlockM, one query each. Shared memory: kBlockN rows of K and of V. float32, head dims to 32, causal and
// window.
#include "device/attn/mask.cuh"
#include "device/attn/tile_place.cuh"

namespace flashtile {

template <i32 kBlockM_, i32 kBlockN_>
struct ToyConfig {
  static constexpr i32 kBlockM = kBlockM_, kBlockN = kBlockN_, kHeadDim = 32;
};

template <class Config>
struct FwdToyStorage {
  float sK[Config::kBlockN][Config::kHeadDim];
  float sV[Config::kBlockN][Config::kHeadDim];
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kBlockM) fwd_toy_kernel(const FT_GRID_CONSTANT Params p) {
  extern __shared__ __align__(16) char shared_bytes[];
  FwdToyStorage<Config>& shared = *reinterpret_cast<FwdToyStorage<Config>*>(shared_bytes);

  // Find this thread's query
  TilePlace place = place_queries<SeqInfo>(p, Config::kBlockM, p.heads, static_cast<i32>(blockIdx.x));
  i32 i = place.tile * Config::kBlockM + static_cast<i32>(threadIdx.x), head = place.row;
  Sequence s = find_sequence<SeqInfo>(p, place.batch);
  const float* gQ = query_rows(static_cast<const float*>(p.q), p.q_strides, s, head) + i * p.q_strides.row;
  KeyRows<const float, KvSource> gK(static_cast<const float*>(p.k), p.k_strides, p, s, head / (p.heads / p.heads_kv));
  KeyRows<const float, KvSource> gV(static_cast<const float*>(p.v), p.v_strides, p, s, head / (p.heads / p.heads_kv));

  float rO[Config::kHeadDim] = {}, m = -infinity(), l = 0.0f;
  for (i32 j_begin = 0; j_begin < s.seqlen_k; j_begin += Config::kBlockN) {
    // Load a tile of K and V; columns behind the head dim and rows behind the last key are zero
    __syncthreads();
    for (i32 e = threadIdx.x; e < Config::kBlockN * Config::kHeadDim; e += Config::kBlockM) {
      i32 n = e / Config::kHeadDim, c = e % Config::kHeadDim, j = j_begin + n;
      shared.sK[n][c] = j < s.seqlen_k && c < p.head_dim ? gK.row(j)[c] : 0.0f;
      shared.sV[n][c] = j < s.seqlen_k && c < p.head_dim_v ? gV.row(j)[c] : 0.0f;
    }
    __syncthreads();
    for (i32 n = 0; n < Config::kBlockN; ++n) {
      if (!is_seen<Mask>(p, s, head, i, j_begin + n)) continue;
      // Score, raise the maximum, rescale, add
      float score = 0.0f;
      for (i32 c = 0; c < p.head_dim; ++c) score += gQ[c] * shared.sK[n][c];
      score *= p.scale_log2;
      float m_new = fmaxf(m, score), alpha = exp2_approx(m - m_new), weight = exp2_approx(score - m_new);
      m = m_new;
      l = l * alpha + weight;
#pragma unroll
      for (i32 c = 0; c < Config::kHeadDim; ++c) rO[c] = rO[c] * alpha + weight * shared.sV[n][c];
    }
  }

  // Store O and lse
  if (i >= s.seqlen_q) return;
  float* gO = query_rows(static_cast<float*>(p.out), p.out_strides, s, head) + i * p.out_strides.row;
#pragma unroll
  for (i32 c = 0; c < Config::kHeadDim; ++c) {
    if (c < p.head_dim_v) gO[c] = l > 0.0f ? rO[c] / l : 0.0f;
  }
  p.lse[s.stat_row + head * p.lse_head_stride + i] = l > 0.0f ? (m + log2f(l)) * 0.6931471805599453f : -infinity();
}

}  // namespace flashtile
