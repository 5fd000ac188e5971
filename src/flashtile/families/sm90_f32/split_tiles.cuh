// Q, K, V and dO as split operands (split_operand.cuh) in global memory: tile by tile the bytes that a kernel
// needs in shared memory, so that one bulk copy loads a tile. Rows past the end of a sequence and columns past the head
// dim are zeros. f32_split.cuh writes them, fwd_sm90_f32/fwd_sm90_f32.cuh and bwd_sm90_f32/bwd_sm90_f32.cuh read them.
//
// A tile has kRows rows: [part][slab of 64 columns][row][64], swizzled (tile/smem_tile.cuh). The tiles of one head and
// sequence are consecutive. Packed sequences share the rows of the batch: each begins a tile of its own, so tile
// numbers are those of its first row plus the number of sequences before it.
//
// half_t parts need numbers in its range. Each tensor is scaled by a power of two that follows from the largest element
// of a sample of its rows. While a tensor is split into half_t parts, every row is checked; where one does not fit,
// `needs_bf16` is raised, and the kernels for bf16_t do the work. Scope of every function: thread.
#pragma once

#include "device/attn/sequence.cuh"

namespace flashtile {

// What the pre-pass finds out about the numbers of a call. Zeroed before it.
struct SplitRange {
  u32 sample_max[4];  // of |q|, |k|, |v|, |dout|: the bits of a float
  u32 needs_bf16;     // nonzero: some row does not fit half_t parts
  u32 unused[3];
};

struct Sm90F32Params {
  Params base;
  u16* q_parts;     // (heads, tiles of 64 queries)
  u16* k_parts;     // (heads_kv, tiles of kBlockN keys)
  u16* v_parts;     // as k_parts
  u16* dout_parts;  // as q_parts; null in a forward pass
  SplitRange* range;
};

// Which operand; the index of its maximum.
enum class Operand : i32 { q, k, v, dout };

// The first tile of a head and sequence; `rows` are those of the longest sequence.
FT_DEVICE i32 first_tile(bool is_packed, i32 batch, i32 num_heads, i32 rows, i32 total_rows, i32 tile_rows, i32 head,
                         i32 batch_idx, i64 first_row) {
  if (is_packed) return head * (total_rows / tile_rows + batch) + static_cast<i32>(first_row) / tile_rows + batch_idx;
  return (batch_idx * num_heads + head) * ceil_div(rows, tile_rows);
}
FT_DEVICE i32 first_query_tile(const Params& p, const Sequence& s, i32 head) {
  return first_tile(p.cu_seqlens_q != nullptr, p.batch, p.heads, p.seqlen_q, p.total_q, 64, head, s.batch_idx, s.q_row);
}
template <i32 kRows>
FT_DEVICE i32 first_key_tile(const Params& p, const Sequence& s, i32 kv_head) {
  bool is_packed = p.cu_seqlens_k != nullptr && p.block_table == nullptr;
  return first_tile(is_packed, p.batch, p.heads_kv, p.seqlen_k, p.total_k, kRows, kv_head, s.batch_idx, s.k_row);
}

// Exponents of two that scale an operand for half_t parts: the largest of the sample comes to [2^10, 2^11), which
// leaves five bits for what was not in it.
FT_DEVICE i32 scale_exponent(const SplitRange& range, Operand operand) {
  i32 exponent = static_cast<i32>(range.sample_max[static_cast<i32>(operand)] >> 23) - 127;
  return clamp(10 - exponent, -126, 126);
}
// 2^exponent, or the nearest that is neither 0 nor infinite.
FT_DEVICE float power_of_two(i32 exponent) { return __int_as_float(clamp(exponent + 127, 1, 254) << 23); }

}  // namespace flashtile
