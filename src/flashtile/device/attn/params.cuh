// The arguments of every forward and backward kernel, passed by value. plans/params.py mirrors the struct; each
// generated unit asserts every offset.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// In elements.
struct Strides {
  i64 batch, head, row;
};

struct Params {
  const void* q;              // (batch, heads, seqlen_q, head_dim), or (heads, total_q, head_dim) if packed; by strides
  const void* k;              // (batch, heads_kv, seqlen_k, head_dim), packed, or pages (num_pages, page_size, ...)
  const void* v;              // as k, with head_dim_v
  void* out;                  // as q, with head_dim_v
  float* lse;                 // (batch, heads, seqlen_q), or (heads, total_q)
  const void* dout;           // as out
  const float* dlse;          // as lse, or null
  void* dq;                   // as q
  void* dk;                   // as k
  void* dv;                   // as v
  void* dbias;                // bias_sizes, contiguous
  float* dsinks;              // (heads)
  float* score_lse;           // as lse: lse in the unit of scores (score_unit.cuh); +inf for a fully masked row
  float* delta;               // as lse: rowsum(dO * O) - dlse
  float* dq_accum;            // (slabs of head_dim, as lse, 64): sums of dS K; swizzled (bwd_sm90_steps.cuh)
  i32* dq_order;              // as lse: parts of dQ added so far, at the first row of each query tile; or null
  float* partial_out;         // (num_splits, as lse, head_dim_v): each split's sum of P V
  float* partial_stats;       // (num_splits, as lse, 2): each split's m (in the unit of scores) and l
  const void* bias;           // (batch, heads, seqlen_q, seqlen_k) by strides; stride 0 where broadcast
  const u8* mask;             // (batch, heads, seqlen_q, seqlen_k) by strides; nonzero = attend
  u32* mask_bits;             // the mask as bits (mask_bits.cuh), or null
  u32* mask_tiles;            // the map of its tiles (pairs of words), or null
  const float* alibi_slopes;  // (heads) or (batch, heads)
  const float* sinks;         // (heads)
  const i64* rng_state;       // (2): seed, offset
  const i32* cu_seqlens_q;    // (batch + 1) or null
  const i32* cu_seqlens_k;    // (batch + 1) or null
  const i32* seqused_k;       // (batch) or null
  const i32* leftpad_k;       // (batch) or null
  const i32* block_table;     // (batch, pages per sequence) or null
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, dk_strides, dv_strides;
  i64 lse_batch_stride, lse_head_stride, lse_size;
  i64 bias_strides[4], mask_strides[4], bias_sizes[4];
  i64 alibi_batch_stride, table_stride;
  i32 batch, heads, heads_kv, seqlen_q, seqlen_k, total_q, total_k, head_dim, head_dim_v, num_pages, page_size;
  i32 num_splits;                                             // parts that the keys of a query tile are split into
  i32 window_left, window_right, is_top_left;                 // windows: -1 = unbounded
  float scale, scale_log2, softcap, softcap_factor;           // softcap_factor: scale / softcap
  u32 dropout_threshold;                                      // drop where the 16-bit random number is below
  float keep_factor;                                          // of the elements kept
  u32 first_query, first_key_group, first_head, total_heads;  // dropout indices within a larger problem
};

}  // namespace flashtile
