// Appends new rows of k and v to each sequence of a cache, and rotates k by the angles of its position (rotary
// embedding) if asked.
//
// Grid:    one block of 4 warps per (new row, batch). Threads run over heads and dims, one rotated pair per thread. A
//          row that does not fit into the cache, or whose page does not exist, is dropped: bad lengths never write out
//          of bounds.
#pragma once

#include "flashtile/core/math.cuh"

namespace flashtile {

constexpr i32 kAppendThreads = 128;

// In elements.
struct CacheStrides {
  i64 batch, row, head, dim;
};

struct AppendParams {
  void* k_cache;             // (num_pages, page_size, heads_kv, head_dim) by strides; dense: one page per sequence
  void* v_cache;             // as k_cache, with head_dim_v
  const void* k;             // (batch, new_rows, heads_kv, head_dim) by strides
  const void* v;             // as k, with head_dim_v
  const i32* cache_seqlens;  // (batch)
  const i32* block_table;    // (batch, pages_per_sequence), or null
  const void* rotary_cos;    // (num_positions, rotary_half), or null
  const void* rotary_sin;    // (num_positions, rotary_half), or null
  CacheStrides k_cache_strides, v_cache_strides, k_strides, v_strides;
  i64 table_stride;
  i32 batch, new_rows, heads_kv, head_dim, head_dim_v, num_pages, page_size, pages_per_sequence, num_positions;
  i32 rotary_half;     // rotated pairs per head
  i32 is_interleaved;  // pairs are (0, 1), (2, 3), ...; else (0, half), (1, half + 1), ...
};

template <typename T, typename Angle>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const FT_GRID_CONSTANT AppendParams p) {
  // Find the row's position in the cache
  i32 batch_idx = blockIdx.x / p.new_rows, i = blockIdx.x % p.new_rows;
  i64 position = static_cast<i64>(p.cache_seqlens[batch_idx]) + i;
  if (position < 0 || position >= static_cast<i64>(p.page_size) * p.pages_per_sequence) return;
  i64 page = p.block_table == nullptr ? batch_idx : p.block_table[batch_idx * p.table_stride + position / p.page_size];
  if (page < 0 || page >= p.num_pages) return;
  i64 row = position % p.page_size;
  const T* gK = static_cast<const T*>(p.k) + batch_idx * p.k_strides.batch + i * p.k_strides.row;
  const T* gV = static_cast<const T*>(p.v) + batch_idx * p.v_strides.batch + i * p.v_strides.row;
  T* gK_cache = static_cast<T*>(p.k_cache) + page * p.k_cache_strides.batch + row * p.k_cache_strides.row;
  T* gV_cache = static_cast<T*>(p.v_cache) + page * p.v_cache_strides.batch + row * p.v_cache_strides.row;

  // Rotate pairs of k; round after each operation, as PyTorch does
  i64 angle_row = (position < p.num_positions ? position : p.num_positions - 1) * p.rotary_half;
  for (i32 at = threadIdx.x; at < p.heads_kv * p.rotary_half; at += kAppendThreads) {
    i32 head = at / p.rotary_half, pair = at % p.rotary_half;
    i32 one = p.is_interleaved ? 2 * pair : pair, other = p.is_interleaved ? one + 1 : pair + p.rotary_half;
    float c = to_float(static_cast<const Angle*>(p.rotary_cos)[angle_row + pair]);
    float s = to_float(static_cast<const Angle*>(p.rotary_sin)[angle_row + pair]);
    float x = to_float(gK[head * p.k_strides.head + one * p.k_strides.dim]);
    float y = to_float(gK[head * p.k_strides.head + other * p.k_strides.dim]);
    T* target = gK_cache + head * p.k_cache_strides.head;
    target[one * p.k_cache_strides.dim] = from_float<T>(__fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s)));
    target[other * p.k_cache_strides.dim] = from_float<T>(__fadd_rn(__fmul_rn(x, s), __fmul_rn(y, c)));
  }
  // Copy the rest of k, and v
  i32 first = 2 * p.rotary_half, num_plain = p.head_dim - first;
  for (i32 at = threadIdx.x; at < p.heads_kv * num_plain; at += kAppendThreads) {
    i32 head = at / num_plain, d = first + at % num_plain;
    gK_cache[head * p.k_cache_strides.head + d * p.k_cache_strides.dim] =
        gK[head * p.k_strides.head + d * p.k_strides.dim];
  }
  for (i32 at = threadIdx.x; at < p.heads_kv * p.head_dim_v; at += kAppendThreads) {
    i32 head = at / p.head_dim_v, d = at % p.head_dim_v;
    gV_cache[head * p.v_cache_strides.head + d * p.v_cache_strides.dim] =
        gV[head * p.v_strides.head + d * p.v_strides.dim];
  }
}

}  // namespace flashtile
