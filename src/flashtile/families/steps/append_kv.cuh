// Appends new rows of k and v to each sequence of a cache, and rotates k by the angles of its position (rotary
// embedding) if asked. A step of a cache also wants its queries rotated and the lengths that the read after it sees.
//
// Contract: gives the bits of the PyTorch version, backends/kvcache.py, which says what ties them. The generated unit
//          asserts that append_kv.py repeats AppendParams.
// Grid:    one block of 4 warps per (new row, batch). Threads run over heads and dims, kVec elements each. A row that
//          does not fit into the cache, or whose page does not exist, is dropped: bad lengths never write out of
//          bounds. The blocks of a sequence share its queries.
#pragma once

#include "device/core/math.cuh"
#include "device/ptx/dependent_launch.cuh"

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
  const i32* cache_seqlens;  // (batch), or null: `length` rows each
  const i32* block_table;    // (batch, pages_per_sequence), or null
  const void* rotary_cos;    // (num_positions, rotary_half), or null
  const void* rotary_sin;    // (num_positions, rotary_half), or null
  const void* q;             // (batch, seqlen_q, heads, head_dim) by strides, or null
  void* rotated_q;           // as q
  i32* seqused_k;            // (batch): the lengths with the new rows, or null
  CacheStrides k_cache_strides, v_cache_strides, k_strides, v_strides, q_strides, rotated_q_strides;
  i64 table_stride;
  i32 batch, new_rows, heads_kv, head_dim, head_dim_v, num_pages, page_size, pages_per_sequence, num_positions;
  i32 rotary_half;     // rotated pairs per head
  i32 is_interleaved;  // pairs are (0, 1), (2, 3), ...; else (0, half), (1, half + 1), ...
  i32 seqlen_q, heads;
  i32 is_ordered;  // query i stands at position length + i; else all stand at `length`
  i32 length;      // where cache_seqlens is null
};

// kVec elements that lie side by side, moved as one.
template <typename T, i32 kVec>
struct alignas(kVec * sizeof(T)) Chunk {
  T values[kVec];
};

// The rows of all heads at one place of a tensor.
template <typename T>
struct HeadRows {
  T* start;
  i64 head, dim;  // strides

  // kVec > 1: the elements of a row lie side by side, on 16-byte boundaries
  template <i32 kVec>
  FT_DEVICE Chunk<T, kVec>& chunk(i32 h, i32 d) const {
    return *reinterpret_cast<Chunk<T, kVec>*>(start + h * head + (kVec > 1 ? d : d * dim));
  }
};

template <typename T>
FT_DEVICE HeadRows<T> head_rows(const void* tensor, const CacheStrides& strides, i64 batch, i64 row) {
  T* start = static_cast<T*>(const_cast<void*>(tensor)) + batch * strides.batch + row * strides.row;
  return {start, strides.head, strides.dim};
}

// Copies elements `first` to `dim` of every head. Scope: block.
template <typename T, i32 kVec>
FT_DEVICE void copy_heads(const HeadRows<T>& from, const HeadRows<T>& to, i32 heads, i32 first, i32 dim) {
  i32 per_head = (dim - first) / kVec;
  for (i32 at = threadIdx.x; at < heads * per_head; at += kAppendThreads) {
    i32 head = at / per_head, d = first + at % per_head * kVec;
    to.template chunk<kVec>(head, d) = from.template chunk<kVec>(head, d);
  }
}

// Rotates the first pairs of every head by the angles of a position, and copies the rest. Rounds after each operation,
// as kvcache.py: rotate does. Scope: block.
template <typename T, typename Angle, i32 kVec>
FT_DEVICE void rotate_heads(const AppendParams& p, i64 position, const HeadRows<T>& from, const HeadRows<T>& to,
                            i32 heads) {
  position = position < 0 ? 0 : position < p.num_positions ? position : p.num_positions - 1;
  const Angle* cos = static_cast<const Angle*>(p.rotary_cos) + position * p.rotary_half;
  const Angle* sin = static_cast<const Angle*>(p.rotary_sin) + position * p.rotary_half;
  i32 per_head = p.rotary_half / kVec;
  for (i32 at = threadIdx.x; at < heads * per_head; at += kAppendThreads) {
    i32 head = at / per_head, pair = at % per_head * kVec;
    i32 one = p.is_interleaved ? 2 * pair : pair, other = p.is_interleaved ? one + kVec : pair + p.rotary_half;
    Chunk<T, kVec> a = from.template chunk<kVec>(head, one), b = from.template chunk<kVec>(head, other);
    auto turn = [&](i32 i, T& first, T& second) {
      float c = to_float(cos[pair + i]), s = to_float(sin[pair + i]), x = to_float(first), y = to_float(second);
      first = from_float<T>(__fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s)));
      second = from_float<T>(__fadd_rn(__fmul_rn(x, s), __fmul_rn(y, c)));
    };
    if (kVec > 1 && p.is_interleaved) {
#pragma unroll
      for (i32 i = 0; i < kVec / 2; ++i) {
        turn(i, a.values[2 * i], a.values[2 * i + 1]);
        turn(kVec / 2 + i, b.values[2 * i], b.values[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (i32 i = 0; i < kVec; ++i) turn(i, a.values[i], b.values[i]);
    }
    to.template chunk<kVec>(head, one) = a, to.template chunk<kVec>(head, other) = b;
  }
  copy_heads<T, kVec>(from, to, heads, 2 * p.rotary_half, p.head_dim);
}

template <typename T, typename Angle, i32 kVec>
__global__ void __launch_bounds__(kAppendThreads) append_kv_kernel(const FT_GRID_CONSTANT AppendParams p) {
  launch_dependents();
  i32 batch_idx = blockIdx.x / p.new_rows, i = blockIdx.x % p.new_rows;
  i64 length = p.cache_seqlens == nullptr ? p.length : p.cache_seqlens[batch_idx];

  // Rotate this block's share of the queries
  for (i32 row = i; p.rotated_q != nullptr && row < p.seqlen_q; row += p.new_rows) {
    rotate_heads<T, Angle, kVec>(p, length + (p.is_ordered ? row : 0), head_rows<T>(p.q, p.q_strides, batch_idx, row),
                                 head_rows<T>(p.rotated_q, p.rotated_q_strides, batch_idx, row), p.heads);
  }
  // Say how many rows the sequence has from now on
  if (p.seqused_k != nullptr && i == 0 && threadIdx.x == 0)
    p.seqused_k[batch_idx] = static_cast<i32>(length + p.new_rows);

  // Find the row's place in the cache
  i64 position = length + i;
  if (position < 0 || position >= static_cast<i64>(p.page_size) * p.pages_per_sequence) return;
  u32 slot = static_cast<u32>(position) / p.page_size, row = static_cast<u32>(position) % p.page_size;
  i64 page = p.block_table == nullptr ? batch_idx : p.block_table[batch_idx * p.table_stride + slot];
  if (page < 0 || page >= p.num_pages) return;

  // Write k, rotated, and v
  rotate_heads<T, Angle, kVec>(p, position, head_rows<T>(p.k, p.k_strides, batch_idx, i),
                               head_rows<T>(p.k_cache, p.k_cache_strides, page, row), p.heads_kv);
  copy_heads<T, kVec>(head_rows<T>(p.v, p.v_strides, batch_idx, i),
                      head_rows<T>(p.v_cache, p.v_cache_strides, page, row), p.heads_kv, 0, p.head_dim_v);
}

}  // namespace flashtile
