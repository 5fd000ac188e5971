// Attention forward in float32 by mma.sync, from Ampere on: every product is three of TF32.
//
// Parts:     a float is the sum of two TF32 numbers: big, rounded to 11 bits, and small, the rest, of which the tensor
//            core reads 11 bits. A product is big * big + big * small + small * big; small * small is below 2^-22 of
//            it.
// Grid, Block, Mainloop: as fwd_sm80.cuh, from which mask, softmax and scheduling come. Heads are not packed, and keys
//            not paged.
// Shared:    sQ [kBlockM][kHeadDim], sK [stage][kBlockN][kHeadDim], sV [stage][kBlockN][kHeadDimV], floats, swizzled as
//            rows of twice as many 16-bit columns (tile/swizzled_tile.cuh).
// Operands:  ldmatrix reads a row of four floats where it reads eight 16-bit columns, so that Q and K need no other
//            loads. A step of P V takes keys in the order that the accumulator of S has them: row lane % 4 of B is key
//            2 * (lane % 4), row lane % 4 + 4 the next. Of V a lane reads 16 bytes, four columns for four products:
//            column lane / 4 of product i is column 4 * (lane / 4) + i of 32.
// Sums:      tensor cores truncate when they add. The small products have accumulators of their own, and each key tile
//            starts new ones for P V, which float32 adds to O.
// Epilogue:  a lane has 8 neighbouring columns of every 32.
#pragma once

#include "flashtile/kernels/fwd_sm80.cuh"
#include "flashtile/tile/sm80_f32_config.cuh"

namespace flashtile {

// The TF32 parts of N floats.
template <i32 N>
struct Tf32Parts {
  u32 big[N], small[N];

  // Scope: thread.
  FT_DEVICE void set(i32 x, float value) {
    // Add half of the last kept bit, to round. The tensor core ignores the bits behind it; `small` must not
    u32 rounded = (__float_as_uint(value) + 0x1000u) & 0xffffe000u;
    big[x] = rounded;
    small[x] = __float_as_uint(value - __uint_as_float(rounded));
    if constexpr (mutates(Mutation::fwd_sm80_f32_small)) small[x] = 0;
  }
};

template <class Config, class Mask, class BaseScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
struct FwdSm80F32 : FwdSm80<Config, Mask, BaseScoreMod, Dropout, SeqInfo, KvSource, Load> {
  using Base = FwdSm80<Config, Mask, BaseScoreMod, Dropout, SeqInfo, KvSource, Load>;
  using ScoreMod = typename Base::ScoreMod;
  using Storage = typename Base::Storage;
  using Tile = typename Base::Tile;
  using Rows = typename Base::Rows;
  using Softmax = typename Base::Softmax;
  using State = typename Base::State;
  using TileQK = SwizzledTile<2 * Config::kHeadDim>;
  using TileV = SwizzledTile<2 * Config::kHeadDimV>;
  static constexpr i32 kBlockN = Config::kBlockN, kMTiles = Config::kMTiles, kNumStages = Config::kNumStages;
  static constexpr i32 kScores = kBlockN / 2, kOutputs = Config::kHeadDimV / 2;  // registers per m16 tile
  static constexpr bool kMasksAlways = Base::kMasksAlways;

  // ---- Copies. Scope: block.

  // Starts the copy of rows of floats to a tile. Rows outside of [begin, end) and columns from num_columns on are
  // zeros.
  template <i32 kColumns, i32 kRows>
  FT_DEVICE static void load_rows(u32 tile, const float* first_row, i64 row_stride, i32 begin, i32 end,
                                  i32 num_columns) {
    using Shared = SwizzledTile<2 * kColumns>;
    i32 first_column = Shared::copy_column() / 2;
    const float* base = first_row + first_column;
    num_columns -= first_column;
    for_each_row<2 * kColumns, kRows, Config::kNumThreads, Base::kUnrolls>(tile, [&](i32 first, i32 r, u32 target) {
      bool is_row = first + r >= begin && first + r < end;
      if constexpr (mutates(Mutation::fwd_sm80_f32_tail)) is_row = first + r >= begin;
      const float* source = base + (first + r) * row_stride;
#pragma unroll(Base::kUnrolls ? Shared::kNumSegments : 1)
      for (i32 segment = 0; segment < Shared::kNumSegments; ++segment) {
        i32 column = 32 * segment, count = is_row ? clamp(num_columns - column, 0, 4) : 0;
        if constexpr (Config::kIsExact) count = is_row ? 4 : 0;
        if constexpr (Load::kIsAligned16) {
          cp_async<16>(target + 4 * column, source + column, 4 * count);
        } else {
#pragma unroll
          for (i32 x = 0; x < 4; ++x) cp_async<4>(target + 4 * (column + x), source + column + x, x < count ? 4 : 0);
        }
      }
    });
  }

  // ---- Mainloop. Scope: warp.

  // D += A B, or with kIsFirst D = A B. The small products go to rE; it may be rD, which they then reach first.
  template <bool kIsFirst>
  FT_DEVICE static void multiply(float* rD, float* rE, const Tf32Parts<4>& a, const Tf32Parts<2>& b) {
    if constexpr (kIsFirst) {
      mma_m16n8k8_tf32(rE, a.small, b.big[0], b.big[1], 0.0f, 0.0f, 0.0f, 0.0f);
    } else {
      mma_m16n8k8_tf32(rE, a.small, b.big[0], b.big[1], rE[0], rE[1], rE[2], rE[3]);
    }
    mma_m16n8k8_tf32(rE, a.big, b.small[0], b.small[1], rE[0], rE[1], rE[2], rE[3]);
    if (kIsFirst && rD != rE) {
      mma_m16n8k8_tf32(rD, a.big, b.big[0], b.big[1], 0.0f, 0.0f, 0.0f, 0.0f);
    } else {
      mma_m16n8k8_tf32(rD, a.big, b.big[0], b.big[1], rD[0], rD[1], rD[2], rD[3]);
    }
  }

  // One step of 8 columns of S = Q K^T. q and k are this lane's addresses.
  template <bool kIsFirst>
  FT_DEVICE static void score_step(float (&rS)[kMTiles][kScores], float (&rE)[kMTiles][kScores], u32 q, u32 k, i32 d) {
    Tf32Parts<4> a[kMTiles];
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
      u32 words[4];
      ldmatrix_x4(words, TileQK::step_address(q, t, d));
#pragma unroll
      for (i32 x = 0; x < 4; ++x) a[t].set(x, __uint_as_float(words[x]));
    }
#pragma unroll
    for (i32 n = 0; n < kBlockN / 16; ++n) {
      u32 words[4];
      ldmatrix_x4(words, TileQK::step_address(k, n, d));
#pragma unroll
      for (i32 half = 0; half < 2; ++half) {
        Tf32Parts<2> b;
#pragma unroll
        for (i32 x = 0; x < 2; ++x) b.set(x, __uint_as_float(words[2 * half + x]));
#pragma unroll
        for (i32 t = 0; t < kMTiles; ++t) {
          multiply<kIsFirst>(rS[t] + 8 * n + 4 * half, rE[t] + 8 * n + 4 * half, a[t], b);
        }
      }
    }
  }

  // One step of 8 keys of P V in 32 columns. v is this lane's address of the keys and columns.
  template <bool kIsFirst>
  FT_DEVICE static void output_step(float (&rD)[kMTiles][16], const Tf32Parts<4> (&a)[kMTiles][kBlockN / 8], u32 v,
                                    i32 j) {
    float rows[2][4];
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      u32 address = (v ^ 16 * r) + r * TileV::kPitch;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(rows[r][0]), "=f"(rows[r][1]), "=f"(rows[r][2]), "=f"(rows[r][3])
                   : "r"(address)
                   : "memory");
    }
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      Tf32Parts<2> b;
      b.set(0, rows[0][i]);
      b.set(1, rows[1][i]);
#pragma unroll
      for (i32 t = 0; t < kMTiles; ++t) multiply<kIsFirst>(rD[t] + 4 * i, rD[t] + 4 * i, a[t][j], b);
    }
  }

  // Key tile: S = Q K^T, softmax, O += P V. q, k and v are this lane's addresses.
  template <bool kIsMasked>
  FT_DEVICE static void step(const Params& p, const Tile& tile, i32 j_begin, float factor, u32 q, u32 k, u32 v,
                             State& state) {
    float rS[kMTiles][kScores];
    {
      float rE[kMTiles][kScores];
      score_step<true>(rS, rE, q, k, 0);
#pragma unroll
      for (i32 d = 1; d < Config::kHeadDim / 8; ++d) score_step<false>(rS, rE, q, k, d);
#pragma unroll
      for (i32 x = 0; x < kMTiles * kScores; ++x) rS[x / kScores][x % kScores] += rE[x / kScores][x % kScores];
    }
    if constexpr (kIsMasked) Base::modify_tile(p, tile, j_begin, rS);
    state.softmax.raise_maximum(factor, [&](i32 t, i32 r) { return Softmax::tile_maximum(rS[t], r); }, state.rO);
    state.softmax.template exponentiate<kIsMasked>(factor, rS);
    if constexpr (Dropout::kIsOn) Base::drop_tile(p, tile, j_begin, rS);
    // Columns 2 * (lane % 4) and the next of 8 keys are columns lane % 4 and lane % 4 + 4 of a step
    Tf32Parts<4> parts[kMTiles][kBlockN / 8];
#pragma unroll
    for (i32 t = 0; t < kMTiles; ++t) {
#pragma unroll
      for (i32 x = 0; x < kScores; ++x) parts[t][x / 4].set(x % 2 * 2 + x / 2 % 2, rS[t][x]);
    }
#pragma unroll
    for (i32 c = 0; c < Config::kHeadDimV / 32; ++c) {
      float rD[kMTiles][16];
      output_step<true>(rD, parts, v + 128 * c, 0);
#pragma unroll
      for (i32 j = 1; j < kBlockN / 8; ++j) output_step<false>(rD, parts, v + 128 * c + 8 * j * TileV::kPitch, j);
#pragma unroll
      for (i32 x = 0; x < 16 * kMTiles; ++x) state.rO[x / 16][16 * c + x % 16] += rD[x / 16][x % 16];
    }
  }

  // Processes the key tiles [n_begin, n_end) of the block; tile and shared_tile are equal. Scope: block.
  FT_DEVICE static void mainloop(const Params& p, Storage& shared, const Tile& tile, const Tile& shared_tile,
                                 float factor, State& state) {
    i32 warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    i32 kv_head = tile.coord.head / (p.heads / p.heads_kv);
    KeyRows<const float, KvSource> gK(static_cast<const float*>(p.k), p.k_strides, p, tile.s, kv_head);
    KeyRows<const float, KvSource> gV(static_cast<const float*>(p.v), p.v_strides, p, tile.s, kv_head);
    u32 k_tiles = shared_address(shared.sK), v_tiles = shared_address(shared.sV);
    constexpr u32 kBytesK = sizeof(shared.sK[0]), kBytesV = sizeof(shared.sV[0]);
    auto load_tile = [&](i32 n, u32 stage, auto has_tail) {
      i32 num_rows = decltype(has_tail)::kValue ? tile.s.seqlen_k - n * kBlockN : kBlockN;
      load_rows<Config::kHeadDim, kBlockN>(k_tiles + stage * kBytesK, gK.row(n * kBlockN), gK.row_stride, 0, num_rows,
                                           p.head_dim);
      load_rows<Config::kHeadDimV, kBlockN>(v_tiles + stage * kBytesV, gV.row(n * kBlockN), gV.row_stride, 0, num_rows,
                                            p.head_dim_v);
    };
    // Start the copies of Q and of the first tiles, a group for each tile
    const float* gQ = query_rows(static_cast<const float*>(p.q), p.q_strides, tile.s, tile.coord.head);
    load_rows<Config::kHeadDim, Config::kBlockM>(shared_address(shared.sQ), gQ + tile.i_begin * p.q_strides.row,
                                                 p.q_strides.row, -tile.i_begin, tile.s.seqlen_q - tile.i_begin,
                                                 p.head_dim);
#pragma unroll
    for (i32 stage = 0; stage < kNumStages - 1; ++stage) {
      i32 n = tile.n_end - 1 - stage;
      if (stage == 0) {
        load_tile(n, stage, Constant<true>());
      } else if (n >= tile.n_begin) {
        load_tile(n, stage, Constant<false>());
      }
      cp_async_commit();
    }

    // The key tiles of this warp's rows
    ConsumerTiles tiles = ConsumerTiles::find(p, tile, tile.i_begin + warp * Config::kWarpRows / 64 * 64);
    i32 warp_end = uniform(tiles.n_end), unmasked_begin = uniform(tiles.unmasked.begin);
    i32 unmasked_end = uniform(tiles.unmasked.end);
    auto needs_mask = [&](i32 n) { return kMasksAlways || n >= unmasked_end || n < unmasked_begin; };
    // This lane's addresses
    u32 q = shared_address(shared.sQ) + warp * (Config::kWarpRows * TileQK::kPitch);
    q += TileQK::template lane_offset<true>();
    u32 k_lane = k_tiles + TileQK::template lane_offset<false>();
    u32 v_lane = v_tiles + TileV::chunk_offset(2 * (lane % 4), lane / 4);
    u32 stage = 0;
    i32 n = tile.n_end - 1, n_begin = tile.n_begin;
    auto process_tile = [&](auto is_masked) {
      // Wait for tile n. All warps are done with the tile before it: refill its stage
      cp_async_wait<kNumStages - 2>();
      __syncthreads();
      u32 free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
      i32 n_next = n - (kNumStages - 1);
      if (n_next >= n_begin) load_tile(n_next, free_stage, Constant<false>());
      cp_async_commit();
      // Skip the tile if it is fully masked for this warp
      if (!decltype(is_masked)::kValue || n < warp_end) {
        u32 k = k_lane + stage * kBytesK, v = v_lane + stage * kBytesV;
        step<decltype(is_masked)::kValue>(p, shared_tile, n * kBlockN, factor, q, k, v, state);
      }
      stage = stage == kNumStages - 1 ? 0 : stage + 1;
      --n;
    };
    // A loop for each body: one loop around both would move O between their registers in every tile
    while (n >= n_begin) {
      while (n >= n_begin && needs_mask(n)) process_tile(Constant<true>());
      if constexpr (!kMasksAlways) {
        while (n >= n_begin && !needs_mask(n)) process_tile(Constant<false>());
      }
    }
  }

  // ---- Epilogue. Scope: warp.

  // Finishes the softmax, normalises and stores O and lse of an m16 tile; of a split the sum of P V, m and l.
  FT_DEVICE static void epilogue(const Params& p, const Tile& tile, const Rows& rows, float factor, const float (&m)[2],
                                 const float (&l)[2], const float (&rO)[kOutputs]) {
#pragma unroll
    for (i32 r = 0; r < 2; ++r) {
      float norm = Base::finish_row(p, tile, rows, r, factor, m[r], l[r], true);
      bool is_query = rows.is_query(tile, r);
      float* gO = Base::float_row(p, tile, rows, r);
#pragma unroll
      for (i32 x = 0; x < kOutputs / 8; ++x) {
        i32 column = 32 * (x / 2) + 8 * static_cast<i32>(threadIdx.x % 4) + 4 * (x % 2);
        const float* o = rO + 16 * (x / 2) + 2 * r + x % 2;
        if constexpr (Load::kIsAligned16) {
          float4 four = make_float4(o[0] * norm, o[4] * norm, o[8] * norm, o[12] * norm);
          if (is_query && column < p.head_dim_v) *reinterpret_cast<float4*>(gO + column) = four;
        } else {
#pragma unroll
          for (i32 i = 0; i < 4; ++i) {
            if (is_query && column + i < p.head_dim_v) gO[column + i] = o[4 * i] * norm;
          }
        }
      }
    }
  }
};

template <class Config, class Mask, class ScoreMod, class Dropout, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    fwd_sm80_f32_kernel(const FT_GRID_CONSTANT Params p) {
  static_assert(!KvSource::kIsPaged, "reads no pages");
  using Kernel = FwdSm80F32<Config, Mask, ScoreMod, Dropout, SeqInfo, KvSource, Load>;
  extern __shared__ __align__(128) char shared_bytes[];
  typename Kernel::Storage& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);

  // Find this block's query tile
  TileScheduler<Mask, false> scheduler;
  scheduler.init(p, Config::kBlockM);
  i32 index = static_cast<i32>(blockIdx.x);
  if constexpr (Mask::kHasBand) index += scheduler.num_m_blocks - 1 - 2 * (index % scheduler.num_m_blocks);
  typename Kernel::Tile tile(p, scheduler, index);
  if (!tile.has_queries()) return;
  // For masks and the epilogue it stays in shared memory: registers are scarce
  auto& shared_tile = *reinterpret_cast<typename Kernel::Tile*>(shared.tile);
  if (threadIdx.x == 0) shared_tile = tile;

  // Score modifiers return scores in their unit; without them S stays a dot product
  float factor = Kernel::ScoreMod::kChangesScores ? exponent_factor(Kernel::kIsNatural) : p.scale_log2;
  typename Kernel::State state;
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
#pragma unroll
    for (i32 x = 0; x < Kernel::kOutputs; ++x) state.rO[t][x] = 0.0f;
  }
  if (tile.has_keys()) {
    Kernel::mainloop(p, shared, tile, shared_tile, factor, state);
  } else {
    __syncthreads();
  }
#pragma unroll
  for (i32 t = 0; t < Config::kMTiles; ++t) {
    typename Kernel::Rows rows = Kernel::rows_of(p, shared_tile, t);
    Kernel::epilogue(p, shared_tile, rows, factor, state.softmax.m[t], state.softmax.l[t], state.rO[t]);
  }
}

}  // namespace flashtile
