// The fragment of a 64-row warpgroup product in registers. Scope: thread, but for the exchanges within a quad (4 lanes that share rows).
//
// Warp w of the group has rows 16 w .. 16 w + 15. A thread has rows lane / 4 and that + 8 of them, and of every 8 columns the two from
// 2 * (lane % 4) on: register 4 b + 2 r + e is row r, column 8 b + 2 * (lane % 4) + e. Packed to 16 bits, registers 8 k .. 8 k + 7 are
// the A fragment of columns 16 k .. 16 k + 15 for the next product.
#pragma once

#include "flashtile/core/math.cuh"
#include "flashtile/ptx/sync.cuh"

namespace flashtile {

// The first of this thread's two rows inside the warpgroup; the other is 8 further down.
FT_DEVICE i32 fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
// The first of its two columns in every 8.
FT_DEVICE i32 fragment_column() { return threadIdx.x % 4 * 2; }

// A packed fragment to shared memory as a tile of swizzled slabs of 64 columns, ready for the copy engine and, from rows of its own warp, for
// its products. Scope: warp. (PTX ISA: stmatrix)
template <typename T, i32 kCount>
FT_DEVICE void store_fragment(T* tile, const u32 (&packed)[kCount]) {
  i32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  // Chunk c of 16 bytes of a row lies in place c ^ (row % 8)
  u32 first = shared_address(tile) + row * 128 + (lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (i32 step = 0; step < kCount / 4; ++step) {
    const u32* a = packed + 4 * step;
    u32 address = (first ^ step % 4 * 32) + step / 4 * (64 * 128);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
  }
  fence_proxy_async();
  __syncwarp();
}

// Two values to one register, the first in the low half. (PTX ISA: cvt)
template <typename T>
FT_DEVICE u32 pack_two(float low, float high);
template <>
FT_DEVICE u32 pack_two<bf16_t>(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
FT_DEVICE u32 pack_two<half_t>(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

FT_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
FT_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Lane t of a quad gives v[b] for b = 0..3 and gets v[s] = what lane s gave as its v[t].
FT_DEVICE void quad_transpose(u32 (&v)[4]) {
#pragma unroll
  for (i32 distance = 1; distance <= 2; ++distance) {
    bool is_upper = threadIdx.x & distance;
#pragma unroll
    for (i32 pair = 0; pair < 2; ++pair) {
      i32 a = distance == 1 ? 2 * pair : pair, b = a + distance;
      u32 got = __shfl_xor_sync(0xffffffffu, is_upper ? v[a] : v[b], distance);
      v[a] = is_upper ? got : v[a];
      v[b] = is_upper ? v[b] : got;
    }
  }
}

}  // namespace flashtile
