// One sequence of the batch: its lengths, its first rows, and the addresses of its keys. Lengths come from device
// memory and are clamped, so that bad values never lead out of bounds. Scope of every function: thread (uniform in a
// block).
#pragma once

#include "device/attn/config.cuh"
#include "device/attn/params.cuh"
#include "device/core/math.cuh"
#include "device/core/mutation.cuh"

namespace flashtile {

struct Sequence {
  i32 batch_idx, seqlen_q, seqlen_k;
  i32 offset;    // query i is aligned with key i + offset
  i64 q_row;     // first row of q in a packed tensor, else 0
  i64 k_row;     // first row of k in its tensor or pages, past the left padding
  i64 stat_row;  // index of its first element of lse, head 0
};

// Finds sequence number batch_idx of the batch.
template <class SeqInfo>
FT_DEVICE Sequence find_sequence(const Params& p, i32 batch_idx) {
  Sequence s{batch_idx, p.seqlen_q, p.seqlen_k, 0, 0, 0, batch_idx * p.lse_batch_stride};
  if constexpr (SeqInfo::kHasLengths) {
    if (p.cu_seqlens_q != nullptr) {
      i32 start = clamp(p.cu_seqlens_q[batch_idx], 0, p.total_q);
      s.seqlen_q = clamp(p.cu_seqlens_q[batch_idx + 1], start, p.total_q) - start;
      s.seqlen_q = min_of(s.seqlen_q, p.seqlen_q);
      s.q_row = start;
      s.stat_row = start;
    }
    if (p.cu_seqlens_k != nullptr) {
      i32 total = p.block_table != nullptr ? 0x7fffffff : p.total_k;
      i32 start = clamp(p.cu_seqlens_k[batch_idx], 0, total);
      s.seqlen_k = min_of(clamp(p.cu_seqlens_k[batch_idx + 1], start, total) - start, p.seqlen_k);
      s.k_row = p.block_table != nullptr ? 0 : start;
      // clang-format off
      if constexpr (mutates(Mutation::neighbour_length)) s.seqlen_k = min_of(start - p.cu_seqlens_k[max_of(batch_idx - 1, 0)], total - start);
      // clang-format on
    }
    if (p.seqused_k != nullptr) s.seqlen_k = clamp(p.seqused_k[batch_idx], 0, s.seqlen_k);
    if (p.leftpad_k != nullptr) {
      i32 pad = clamp(p.leftpad_k[batch_idx], 0, s.seqlen_k);
      s.k_row += pad;
      s.seqlen_k -= pad;
    }
  }
  s.offset = p.is_top_left ? 0 : s.seqlen_k - s.seqlen_q;
  return s;
}

// The index of query i in lse, score_lse and delta.
FT_DEVICE i64 stat_index(const Params& p, const Sequence& s, i32 head, i32 i) {
  return s.stat_row + head * p.lse_head_stride + i;
}

// Row 0 of the sequence in q or a tensor shaped like it. Packed tensors have no batch axis: their strides.batch is 0.
template <typename T>
FT_DEVICE T* query_rows(T* base, const Strides& strides, const Sequence& s, i32 head) {
  return base + s.batch_idx * strides.batch + head * strides.head + s.q_row * strides.row;
}

// The rows of k, v or their gradients that belong to one sequence and head.
template <typename T, class KvSource>
struct KeyRows {
  T* base;
  i64 row_stride, page_stride;
  const i32* table;
  i32 page_size, num_pages, first;

  FT_DEVICE KeyRows(T* tensor, const Strides& strides, const Params& p, const Sequence& s, i32 head)
      : row_stride(strides.row) {
    if constexpr (KvSource::kIsPaged) {
      base = tensor + head * strides.head;
      page_stride = strides.batch;
      table = p.block_table + s.batch_idx * p.table_stride;
      page_size = p.page_size;
      num_pages = p.num_pages;
      first = static_cast<i32>(s.k_row);
    } else {
      base = tensor + s.batch_idx * strides.batch + head * strides.head + s.k_row * strides.row;
    }
  }

  // The address of key j.
  FT_DEVICE T* row(i32 j) const {
    if constexpr (KvSource::kIsPaged) {
      i32 at = first + j;
      if constexpr (mutates(Mutation::page_index)) at -= at < page_size ? 0 : page_size;
      i64 page = clamp(table[at / page_size], 0, num_pages - 1);
      return base + page * page_stride + (at % page_size) * row_stride;
    } else {
      return base + j * row_stride;
    }
  }
};

}  // namespace flashtile
