// The conversion of dQ inside bwd_sm90_kernel, where heads share slots of dq_accum (attn/key_order.cuh).
//
// Threads: 8 lanes per row; a consumer warpgroup has 16 rows of a pass. Few passes are in flight: most registers belong
// to accumulators.
#pragma once

#include "flashtile/kernels/bwd_sm90_steps.cuh"
#include "flashtile/ptx/global.cuh"

namespace flashtile {

// A share of dQ to convert: rows [begin, end) of a slot of dq_accum, which has the queries of all heads of a KV head,
// one after the other.
struct DqShare {
  i64 dq_row;  // first row of the slot in a slab of dq_accum
  i32 row;     // of KeyOrder: which KV head and sequence; negative: nothing to convert
  i32 begin, end;
};

// Converts every other 16 rows of a share, from the first or the second on, and zeros their sums. Scope: warpgroup.
template <typename T, i32 kSlabs>
FT_DEVICE void convert_share(const Params& p, const DqShare& share, i32 part) {
  constexpr i32 kPasses = kSlabs == 1 ? 2 : 1, kRows = 32;  // between passes
  i32 lane = threadIdx.x % 8;
#pragma unroll 1
  for (i32 first = share.begin + 16 * part + threadIdx.x % 128 / 8; first < share.end; first += kRows * kPasses) {
    float4 x[kPasses][kSlabs], y[kPasses][kSlabs];
    auto address = [&](i32 row, i32 i) {
      return reinterpret_cast<float4*>(p.dq_accum + (share.dq_row + row) * 64) + 2 * dq_chunk(i, lane);
    };
#pragma unroll
    for (i32 pass = 0; pass < kPasses; ++pass) {
      // Rows past the end are read, but not used
      i32 row = min_of(first + kRows * pass, share.end - 1);
      const float4* sums = address(row, row % p.seqlen_q);
#pragma unroll
      for (i32 slab = 0; slab < kSlabs; ++slab) {
        x[pass][slab] = load_global(sums + slab * 16 * p.lse_size);
        y[pass][slab] = load_global(sums + slab * 16 * p.lse_size + 1);
      }
    }
#pragma unroll
    for (i32 pass = 0; pass < kPasses; ++pass) {
      i32 row = first + kRows * pass, head = row / p.seqlen_q, i = row - head * p.seqlen_q;
      if (row >= share.end) continue;
      float4* sums = address(row, i);
      head += kv_head_of(p, share.row) * (p.heads / p.heads_kv);
      T* gdQ = static_cast<T*>(p.dq) + batch_of(p, share.row) * p.dq_strides.batch + head * p.dq_strides.head +
               i * p.dq_strides.row + 8 * lane;
#pragma unroll
      for (i32 slab = 0; slab < kSlabs; ++slab) {
        if (64 * slab + 8 * lane < p.head_dim) {
          *reinterpret_cast<uint4*>(gdQ + 64 * slab) = converted<T>(x[pass][slab], y[pass][slab], p.scale);
        }
        float4* zeros = sums + slab * 16 * p.lse_size;
        if constexpr (!mutates(Mutation::bwd_sm90_stale_sums))
          zeros[0] = zeros[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
}

}  // namespace flashtile
