// The accumulator fragment of a 64-row warpgroup product.
//
// Warp w of the warpgroup has rows 16 w .. 16 w + 15. A thread has rows lane / 4 and lane / 4 + 8 of them, and two
// columns of every 8, starting at 2 * (lane % 4): register 4 b + 2 r + e is row r, column 8 b + 2 * (lane % 4) + e. The
// four lanes that share rows are a quad. Packed to 16 bits, registers 8 k .. 8 k + 7 are the A fragment of columns
// 16 k .. 16 k + 15 of the next product.
#pragma once

#include "device/core/math.cuh"

namespace flashtile {

// The first of this thread's two rows inside the warpgroup; the other is 8 rows further. Scope: thread.
FT_DEVICE i32 fragment_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }
// The first of this thread's two columns in every 8. Scope: thread.
FT_DEVICE i32 fragment_column() { return threadIdx.x % 4 * 2; }

// Packs two values into one register, the first in the low half. Scope: thread. (PTX ISA: cvt)
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
  if constexpr (!kHasMmaK16) {
    packed = from_float<half_t>(low).bits | static_cast<u32>(from_float<half_t>(high).bits) << 16;
    return packed;
  }
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Transposes 4 x 4 words over a quad: lane t passes v[0..3] and gets v[s] = word t of lane s. Scope: warp.
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
