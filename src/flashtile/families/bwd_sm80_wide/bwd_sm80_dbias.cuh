// The gradient of a bias by mma.sync, float16 from Turing on and bfloat16 from Ampere on: sums of dS before the
// softcap's derivative, over everything that the bias is broadcast onto. Reads no pages.
//
// Block:     kBlockM queries x kBlockN keys of one batch and head of the bias; all queries, or all keys, of an axis of
//            size 1. It streams the terms of its sums: sequences, heads and tiles. Each sum has one owner and a fixed
//            order. Warps as in bwd_sm80_wide.cuh.
// Shared:    slabs [stage] of 64 columns of Q and K, or of dO and V, swizzled (tile/swizzled_tile.cuh); lse and delta
//            of two terms; a ring of terms. At the end the sums of a tile, where an axis is summed up.
// Products:  S = Q K^T and dP = dO V^T. The sums stay in registers.
// Mainloop:  one barrier per slab: behind it the slab has arrived, and the one before it is free for a copy further on.
#pragma once

#include "families/bwd_sm80_wide/bwd_sm80_wide.cuh"

namespace flashtile {

// One tile of one sequence and head.
struct DbiasTerm {
  Sequence s;
  i32 head, i_begin, j_begin;
  i32 is_end;  // there is no further term
};

template <class Config>
struct alignas(128) DbiasSm80Storage {
  using T = typename Config::Element;
  static constexpr i32 kNumTerms = 4;
  T slabs[Config::kNumStages][(Config::kBlockM + Config::kBlockN) * 64];
  float stats[2][2][Config::kBlockM];  // lse and delta of two terms
  DbiasTerm terms[kNumTerms];          // term number count is at count % kNumTerms
  static_assert(sizeof(slabs) >= 4 * Config::kBlockM * Config::kBlockN, "holds the sums of a tile");
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class Load>
struct DbiasSm80 {
  using T = typename Config::Element;
  using Storage = DbiasSm80Storage<Config>;
  using Wide = BwdSm80Wide<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  using TileSlab = SwizzledTile<64>;
  using BiasElement = typename ScoreMod::BiasElement;
  static constexpr i32 kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kMTiles = Config::kMTiles;
  static constexpr i32 kScores = Config::kWarpScores / 2, kNumStages = Config::kNumStages;
  static constexpr i32 kSlabsS = Config::kHeadDim / 64, kSlabsDp = Config::kHeadDimV / 64;
  static_assert(Config::kNumThreads >= 2 * kBlockM, "a thread copies one statistic of a term");
  static_assert(Config::kSlabColumns == 64 && kNumStages - 1 <= kSlabsS + kSlabsDp, "copies are one term ahead");

  // What the block owns, and the next term. Scope of all: thread.
  const Params& p;
  bool all_b, all_h, all_i, all_j;  // axes of size 1
  i32 bias_batch, bias_head, m_tile, n_tile;
  i32 batch, head, m, n;  // the next term, or the first that is none

  FT_DEVICE explicit DbiasSm80(const Params& p) : p(p) {
    all_b = p.bias_sizes[0] == 1, all_h = p.bias_sizes[1] == 1;
    all_i = p.bias_sizes[2] == 1, all_j = p.bias_sizes[3] == 1;
    i32 num_n_blocks = all_j ? 1 : ceil_div(p.seqlen_k, kBlockN), index = static_cast<i32>(blockIdx.x);
    i32 num_m_blocks = all_i ? 1 : ceil_div(p.seqlen_q, kBlockM), num_heads = static_cast<i32>(p.bias_sizes[1]);
    n_tile = index % num_n_blocks;
    m_tile = index / num_n_blocks % num_m_blocks;
    bias_head = index / num_n_blocks / num_m_blocks % num_heads;
    bias_batch = index / num_n_blocks / num_m_blocks / num_heads;
    batch = all_b ? 0 : bias_batch, head = all_h ? 0 : bias_head, m = m_tile, n = n_tile;
  }

  // Finds the next term. Scope: thread 0.
  FT_DEVICE void find_term(DbiasTerm& term) {
    i32 end_b = all_b ? p.batch : bias_batch + 1, end_h = all_h ? p.heads : bias_head + 1;
    if constexpr (mutates(Mutation::bwd_sm80_wide_dbias_head)) end_h -= all_h && p.heads > 1 ? 1 : 0;
    for (term.is_end = 1; batch < end_b;) {
      Sequence s = find_sequence<SeqInfo>(p, batch);
      i32 i_begin = m * kBlockM, j_begin = n * kBlockN, this_head = head;
      bool has_rows = i_begin < s.seqlen_q, has_keys = j_begin < s.seqlen_k;
      // Step: keys, queries, heads, sequences
      if (all_j && has_rows && has_keys) {
        ++n;
      } else if (n = n_tile; all_i && has_rows) {
        ++m;
      } else if (m = m_tile; ++head == end_h) {
        head = all_h ? 0 : bias_head;
        ++batch;
      }
      if (!has_rows || !has_keys) continue;
      Range keys = key_range<Mask>(p, s, i_begin, min_of(i_begin + kBlockM, s.seqlen_q));
      if (keys.begin >= j_begin + kBlockN || keys.end <= j_begin) continue;
      term = {s, this_head, i_begin, j_begin, 0};
      return;
    }
  }

  // Starts the copy of a slab of a term. Scope: block.
  FT_DEVICE void load(Storage& shared, const DbiasTerm& term, u32 target, i32 count, i32 slab) const {
    bool is_dp = slab >= kSlabsS;
    i32 column = 64 * (is_dp ? slab - kSlabsS : slab), num_columns = (is_dp ? p.head_dim_v : p.head_dim) - column;
    const Strides &q_strides = is_dp ? p.dout_strides : p.q_strides, &k_strides = is_dp ? p.v_strides : p.k_strides;
    const T* gQ = query_rows(static_cast<const T*>(is_dp ? p.dout : p.q), q_strides, term.s, term.head);
    KeyRows<const T, KvSource<false>> gK(static_cast<const T*>(is_dp ? p.v : p.k), k_strides, p, term.s,
                                         term.head / (p.heads / p.heads_kv));
    load_slab<kBlockM, 64, Config::kNumThreads, Load>(
        target, term.s.seqlen_q - term.i_begin, num_columns,
        [&](i32 row) { return gQ + (term.i_begin + row) * q_strides.row + column; });
    load_slab<kBlockN, 64, Config::kNumThreads, Load>(target + kBlockM * TileSlab::kPitch,
                                                      term.s.seqlen_k - term.j_begin, num_columns,
                                                      [&](i32 row) { return gK.row(term.j_begin + row) + column; });
    i32 row = threadIdx.x % kBlockM, which = threadIdx.x / kBlockM;
    if (slab == 0 && which < 2) {
      const float* source = (which == 0 ? p.score_lse : p.delta) + stat_index(p, term.s, term.head, term.i_begin + row);
      cp_async<4>(shared_address(shared.stats[count % 2][which] + row), source,
                  term.i_begin + row < term.s.seqlen_q ? 4 : 0);
    }
  }

  // Scope: block.
  FT_DEVICE void run(Storage& shared) {
    i32 warp = uniform(threadIdx.x / 32), first_row = warp / Config::kColumnWarps * Config::kWarpRows;
    i32 first_score = warp % Config::kColumnWarps * Config::kWarpScores;
    auto term_at = [&](i32 count) -> DbiasTerm& { return shared.terms[count % Storage::kNumTerms]; };
    if (threadIdx.x == 0) find_term(term_at(0)), find_term(term_at(1));
    __syncthreads();

    i32 copy_count = 0, copy_slab = 0;
    u32 stage = 0;
    auto load_next = [&](u32 to) {
      const DbiasTerm& term = term_at(copy_count);
      if (!term.is_end) {
        load(shared, term, shared_address(shared.slabs[to]), copy_count, copy_slab);
        if (++copy_slab == kSlabsS + kSlabsDp) copy_slab = 0, ++copy_count;
      }
      cp_async_commit();
    };
#pragma unroll 1
    for (i32 x = 0; x < kNumStages - 1; ++x) load_next(x);
    // Waits for the next slab. All warps are done with the one before it: refills its stage
    auto next_slab = [&] {
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      load_next(stage == 0 ? kNumStages - 1 : stage - 1);
      u32 slab = shared_address(shared.slabs[stage]);
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
      return slab;
    };
    u32 q_lane = first_row * TileSlab::kPitch + TileSlab::template lane_offset<true>();
    u32 k_lane = (kBlockM + first_score) * TileSlab::kPitch + TileSlab::template lane_offset<false>();
    auto multiply = [&](i32 num_slabs, float (&rS)[kMTiles][kScores]) {
#pragma unroll
      for (i32 x = 0; x < kMTiles * kScores; ++x) rS[x / kScores][x % kScores] = 0.0f;
#pragma unroll 1
      for (i32 slab = 0; slab < num_slabs; ++slab) {
        u32 streamed = next_slab();
        mma_slab_abt<Config, 64>(rS, streamed + q_lane, streamed + k_lane);
      }
    };

    float rSum[kMTiles][kScores];
#pragma unroll
    for (i32 x = 0; x < kMTiles * kScores; ++x) rSum[x / kScores][x % kScores] = 0.0f;
    for (i32 count = 0; !term_at(count).is_end; ++count) {
      float rS[kMTiles][kScores], rdP[kMTiles][kScores];
      multiply(kSlabsS, rS);
      if (threadIdx.x == 0) find_term(term_at(count + 2));
      multiply(kSlabsDp, rdP);
      const DbiasTerm& term = term_at(count);
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) {
        i32 row = first_row + 16 * t;
        Wide::Rows::template differentiate<false, Mask::kHasBand>(
            p, term.s, term.head, term.i_begin + row, term.j_begin + first_score, shared.stats[count % 2][0] + row,
            shared.stats[count % 2][1] + row, rS[t], rdP[t]);
#pragma unroll
        for (i32 x = 0; x < kScores; ++x) rSum[t][x] += rdP[t][x];
      }
    }
    store(shared, first_row, first_score, rSum);
  }

  // Stores the sums, or adds them up over the rows, the columns or both. Scope: block.
  FT_DEVICE void store(Storage& shared, i32 first_row, i32 first_score, const float (&rSum)[kMTiles][kScores]) const {
    BiasElement* base = static_cast<BiasElement*>(p.dbias) +
                        (bias_batch * p.bias_sizes[1] + bias_head) * p.bias_sizes[2] * p.bias_sizes[3];
    bool is_whole = !all_i && !all_j;
    float* sSum = reinterpret_cast<float*>(shared.slabs);
    __syncthreads();
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 x = 0; x < kScores; ++x) {
        i32 row = first_row + 16 * t + static_cast<i32>(threadIdx.x % 32 / 4) + 8 * (x / 2 % 2);
        i32 column = first_score + 8 * (x / 4) + fragment_column() + x % 2;
        i64 i = m_tile * kBlockM + row, j = n_tile * kBlockN + column;
        if (!is_whole) {
          sSum[row * kBlockN + column] = rSum[t][x];
        } else if (i < p.bias_sizes[2] && j < p.bias_sizes[3]) {
          base[i * p.bias_sizes[3] + j] = from_float<BiasElement>(rSum[t][x]);
        }
      }
    }
    if (is_whole) return;
    __syncthreads();
    // Each thread has a row, or a column; one thread has all if both axes are summed up
    i32 num_threads = all_i && all_j ? 1 : all_i ? kBlockN : kBlockM;
    for (i32 x = threadIdx.x; x < num_threads; x += Config::kNumThreads) {
      float sum = 0.0f;
      for (i32 row = all_i ? 0 : x; row < (all_i ? kBlockM : x + 1); ++row) {
        for (i32 column = all_j ? 0 : x; column < (all_j ? kBlockN : x + 1); ++column) {
          sum += sSum[row * kBlockN + column];
        }
      }
      i64 at = all_i && all_j ? 0 : x + static_cast<i64>(all_i ? n_tile * kBlockN : m_tile * kBlockM);
      if (at < p.bias_sizes[2] * p.bias_sizes[3]) base[at] = from_float<BiasElement>(sum);
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, 1) bwd_sm80_dbias_kernel(const FT_GRID_CONSTANT Params p) {
  static_assert(!KvSource::kIsPaged, "reads no pages");
  using Kernel = DbiasSm80<Config, Mask, ScoreMod, Dropout, SeqInfo, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  Kernel(p).run(*reinterpret_cast<typename Kernel::Storage*>(shared_bytes));
}

}  // namespace flashtile
