// Splits float32 Q, K, V and dO into 16-bit operands (split_tiles.cuh).
//
//   f32_range_kernel   the largest elements of a sample of rows; one block per head and sequence
//   f32_split_kernel   a persistent grid; a block splits one tile after the other
//   f32_check_kernel   the same for half_t parts, which it checks but does not store
//
// A thread splits 8 neighbouring elements: it reads 32 bytes and writes 16 for each part.
#pragma once

#include "device/attn/config.cuh"
#include "device/attn/tile_place.cuh"
#include "device/core/mutation.cuh"
#include "device/core/reduce.cuh"
#include "families/sm90_f32/config.cuh"
#include "families/sm90_f32/split_tiles.cuh"

namespace flashtile {

constexpr i32 kSplitThreads = 256, kRangeThreads = 512, kSampleRows = 32;

// Eight elements of a row from `column` on; zeros from head_dim on. Scope: thread.
template <class Load>
FT_DEVICE void load_chunk(const float* row, i32 column, i32 head_dim, float (&x)[8]) {
#pragma unroll
  for (i32 half = 0; half < 2; ++half) {
    i32 first = column + 4 * half;
    if constexpr (Load::kIsAligned16) {
      float4 four = first < head_dim ? *reinterpret_cast<const float4*>(row + first) : make_float4(0, 0, 0, 0);
      x[4 * half] = four.x, x[4 * half + 1] = four.y, x[4 * half + 2] = four.z, x[4 * half + 3] = four.w;
    } else {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) x[4 * half + e] = first + e < head_dim ? row[first + e] : 0.0f;
    }
  }
}

// What half_t parts of a row must satisfy. Scope: thread.
struct RowLimits {
  float scale;      // of the operand, a power of two
  float low, high;  // a row's largest element, scaled, is 0 or between them

  // Parts below 2^-24 are lost. In a product that sums rows, that must be small against each row. In scores it is an
  // absolute error, which must be below 2^-22: the larger the elements of the other operand, the larger it is.
  FT_DEVICE RowLimits(const Sm90F32Params& params, Operand operand) {
    const Params& p = params.base;
    scale = power_of_two(scale_exponent(*params.range, operand));
    low = operand == Operand::v || params.dout_parts != nullptr ? 0.125f : 0.0f;
    high = 32768.0f;
    if (operand == Operand::q || operand == Operand::k) {
      Operand other = operand == Operand::q ? Operand::k : Operand::q;
      float other_scale = power_of_two(scale_exponent(*params.range, other));
      high = fminf(high, 8.0f * other_scale * scale / (p.scale * sqrtf(static_cast<float>(p.head_dim))));
    }
  }
};

// Splits rows [0, num_rows) of a tile of kRows; row(r) is the address of row r. Scope: block.
template <class Config, bool kStores, i32 kRows, i32 kSlabs, class Load, class Row>
FT_DEVICE void split_tile(const Sm90F32Params& params, Operand operand, u16* tile, i32 num_rows, i32 head_dim,
                          Row row) {
  using Parts = typename Config::Parts;
  constexpr bool kIsHalf = Config::kIsHalf;
  constexpr i32 kChunks = 8 * kSlabs;  // of a row; the lanes of a row are neighbours
  constexpr i32 kLanes = kChunks < 32 ? (kChunks <= 8 ? 8 : 16) : 32;
  static_assert(kChunks % 8 == 0);
  float scale = 1.0f, low = 0.0f, high = 0.0f;
  if constexpr (kIsHalf) {
    RowLimits limits(params, operand);
    scale = limits.scale, low = limits.low, high = limits.high;
  }
  bool fits = true;
  if constexpr (mutates(Mutation::fwd_sm90_f32_tail)) num_rows = kRows;
  for (i32 r = threadIdx.x / kLanes; r < kRows; r += kSplitThreads / kLanes) {
    float row_max = 0.0f;
    for (i32 chunk = threadIdx.x % kLanes; chunk < kChunks; chunk += kLanes) {
      float x[8] = {};
      if (r < num_rows) load_chunk<Load>(row(r), 8 * chunk, head_dim, x);
      u32 words[Parts::kNumParts][4];
#pragma unroll
      for (i32 pair = 0; pair < 4; ++pair) {
        float a = x[2 * pair] * scale, b = x[2 * pair + 1] * scale;
        u32 parts[Parts::kNumParts];
        Parts::split(a, b, parts);
#pragma unroll
        for (i32 part = 0; part < Parts::kNumParts; ++part) words[part][pair] = parts[part];
        // Also false for NaN
        if constexpr (kIsHalf) {
          fits = fits && fabsf(a) <= high && fabsf(b) <= high;
          row_max = fmaxf(row_max, fmaxf(fabsf(a), fabsf(b)));
        }
      }
#pragma unroll
      for (i32 part = 0; part < Parts::kNumParts && kStores; ++part) {
        uint4* slab = reinterpret_cast<uint4*>(tile + ((part * kSlabs + chunk / 8) * kRows + r) * 64);
        slab[chunk % 8 ^ r % 8] = make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
      }
    }
    if constexpr (kIsHalf) {
      row_max = lanes_max<kLanes>(row_max);
      fits = fits && (row_max == 0.0f || row_max >= low);
    }
  }
  if constexpr (kIsHalf) {
    if (!fits || (params.dout_parts != nullptr && params.base.keep_factor > 128.0f)) params.range->needs_bf16 = 1;
  }
}

// Splits tile number `tile` of the queries of a head and sequence: Q, and dO of a backward pass. Scope: block.
template <class Config, bool kStores, class SeqInfo, class Load>
FT_DEVICE void split_queries(const Sm90F32Params& params, i32 tile, i32 head, i32 batch) {
  const Params& p = params.base;
  Sequence s = find_sequence<SeqInfo>(p, batch);
  i32 i_begin = 64 * tile, num_rows = s.seqlen_q - i_begin;
  if (num_rows <= 0) return;
  i64 at = first_query_tile(p, s, head) + tile;
  const float* q = query_rows(static_cast<const float*>(p.q), p.q_strides, s, head);
  split_tile<Config, kStores, 64, Config::kSlabsQK, Load>(params, Operand::q, params.q_parts + at * Config::kElementsQ,
                                                          num_rows, p.head_dim,
                                                          [&](i32 r) { return q + (i_begin + r) * p.q_strides.row; });
  if (params.dout_parts == nullptr) return;
  const float* dout = query_rows(static_cast<const float*>(p.dout), p.dout_strides, s, head);
  split_tile<Config, kStores, 64, Config::kSlabsV, Load>(
      params, Operand::dout, params.dout_parts + at * Config::kElementsdO, num_rows, p.head_dim_v,
      [&](i32 r) { return dout + (i_begin + r) * p.dout_strides.row; });
}

// Splits tile number `tile` of the keys of a KV head and sequence: K and V. Scope: block.
template <class Config, bool kStores, class SeqInfo, class KvSource, class Load>
FT_DEVICE void split_keys(const Sm90F32Params& params, i32 tile, i32 kv_head, i32 batch) {
  constexpr i32 kRows = Config::kBlockN;
  const Params& p = params.base;
  Sequence s = find_sequence<SeqInfo>(p, batch);
  i32 j_begin = kRows * tile, num_rows = s.seqlen_k - j_begin;
  if (num_rows <= 0) return;
  i64 at = first_key_tile<kRows>(p, s, kv_head) + tile;
  KeyRows<const float, KvSource> k(static_cast<const float*>(p.k), p.k_strides, p, s, kv_head);
  split_tile<Config, kStores, kRows, Config::kSlabsQK, Load>(params, Operand::k,
                                                             params.k_parts + at * Config::kElementsK, num_rows,
                                                             p.head_dim, [&](i32 r) { return k.row(j_begin + r); });
  KeyRows<const float, KvSource> v(static_cast<const float*>(p.v), p.v_strides, p, s, kv_head);
  split_tile<Config, kStores, kRows, Config::kSlabsV, Load>(params, Operand::v,
                                                            params.v_parts + at * Config::kElementsV, num_rows,
                                                            p.head_dim_v, [&](i32 r) { return v.row(j_begin + r); });
}

// Splits all tiles of queries, then all tiles of keys. Scope: grid.
template <class Config, bool kStores, class SeqInfo, class KvSource, class Load>
FT_DEVICE void split_all(const Sm90F32Params& params) {
  const Params& p = params.base;
  i32 num_queries = num_query_indices<SeqInfo>(p, 64, p.heads), grid = static_cast<i32>(gridDim.x);
  for (i32 index = static_cast<i32>(blockIdx.x); index < num_queries; index += grid) {
    TilePlace place = place_queries<SeqInfo>(p, 64, p.heads, index);
    split_queries<Config, kStores, SeqInfo, Load>(params, place.tile, place.row, place.batch);
  }
  // The block after the one of the last queries goes on with the first keys
  i32 num_keys = num_key_indices<SeqInfo>(p, Config::kBlockN, p.heads_kv);
  i32 first = static_cast<i32>(blockIdx.x) - num_queries % grid;
  for (i32 index = first + (first < 0 ? grid : 0); index < num_keys; index += grid) {
    TilePlace place = place_keys<SeqInfo>(p, Config::kBlockN, p.heads_kv, index);
    split_keys<Config, kStores, SeqInfo, KvSource, Load>(params, place.tile, place.row, place.batch);
  }
}

template <class Config, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(kSplitThreads) f32_split_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  if (Config::kIsHalf || params.range->needs_bf16 != 0) split_all<Config, true, SeqInfo, KvSource, Load>(params);
}

template <class Config, class SeqInfo, class KvSource, class Load>
__global__ void __launch_bounds__(kSplitThreads) f32_check_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  static_assert(Config::kIsHalf);
  split_all<Config, false, SeqInfo, KvSource, Load>(params);
}

// The largest element of kSampleRows rows that are spread evenly over num_rows; each warp reads some of them.
// Infinities and NaN do not count. Scope: warp.
template <class Row>
FT_DEVICE float sample_max(i32 num_rows, i32 head_dim, Row row) {
  float largest = 0.0f;
  if (num_rows > 0) {
#pragma unroll
    for (i64 sample = threadIdx.x / 32; sample < kSampleRows; sample += kRangeThreads / 32) {
      const float* elements = row(static_cast<i32>(sample * num_rows / kSampleRows));
      for (i32 column = threadIdx.x % 32; column < head_dim; column += 32) {
        float x = fabsf(elements[column]);
        largest = x <= kLargestFloat ? fmaxf(largest, x) : largest;
      }
    }
  }
  return lanes_max<32>(largest);
}

template <class SeqInfo, class KvSource>
__global__ void __launch_bounds__(kRangeThreads) f32_range_kernel(const FT_GRID_CONSTANT Sm90F32Params params) {
  __shared__ u32 block_max[4];
  const Params& p = params.base;
  i32 head = blockIdx.x % p.heads, kv_head = head / (p.heads / p.heads_kv);
  Sequence s = find_sequence<SeqInfo>(p, blockIdx.x / p.heads);
  if (threadIdx.x < 4) block_max[threadIdx.x] = 0;
  __syncthreads();
  const float* q = query_rows(static_cast<const float*>(p.q), p.q_strides, s, head);
  const float* dout = query_rows(static_cast<const float*>(p.dout), p.dout_strides, s, head);
  KeyRows<const float, KvSource> k(static_cast<const float*>(p.k), p.k_strides, p, s, kv_head);
  KeyRows<const float, KvSource> v(static_cast<const float*>(p.v), p.v_strides, p, s, kv_head);
  float largest[4];
  largest[0] = sample_max(s.seqlen_q, p.head_dim, [&](i32 r) { return q + r * p.q_strides.row; });
  largest[1] = sample_max(s.seqlen_k, p.head_dim, [&](i32 r) { return k.row(r); });
  largest[2] = sample_max(s.seqlen_k, p.head_dim_v, [&](i32 r) { return v.row(r); });
  i32 num_dout = params.dout_parts == nullptr ? 0 : s.seqlen_q;
  largest[3] = sample_max(num_dout, p.head_dim_v, [&](i32 r) { return dout + r * p.dout_strides.row; });
  // Bits of numbers that are not negative compare as they do
#pragma unroll
  for (i32 x = 0; x < 4; ++x) {
    if (threadIdx.x % 32 == 0) atomicMax(&block_max[x], __float_as_uint(largest[x]));
  }
  __syncthreads();
  if (threadIdx.x < 4) atomicMax(&params.range->sample_max[threadIdx.x], block_max[threadIdx.x]);
}

}  // namespace flashtile
