// Products of one warp with all operands in registers. Scope of every function: warp.
#pragma once

#include "device/core/arch.cuh"
#include "device/core/types.cuh"

namespace flashtile {

// D = A B + C with A 16 x 16 (rows), B 16 x 8 (columns) in 16 bits, C and D 16 x 8 in float32. (PTX ISA: mma, m16n8k16)
//   a[0], a[1]   rows lane / 4 and lane / 4 + 8, columns 2 * (lane % 4) and the next; a[2], a[3]: 8 columns further
//   b0, b1       column lane / 4, rows 2 * (lane % 4) and the next; b1: 8 rows further
//   c, d         as tile/fragment.cuh
template <typename T>
FT_DEVICE void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1, float c2, float c3);
template <>
FT_DEVICE void mma_m16n8k16<bf16_t>(float* d, const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1, float c2,
                                    float c3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
// Half of the above: 8 columns of A, 8 rows of B. Turing has only this. (PTX ISA: mma, m16n8k8)
FT_DEVICE void mma_m16n8k8(float* d, u32 a0, u32 a1, u32 b, float c0, float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
template <>
FT_DEVICE void mma_m16n8k16<half_t>(float* d, const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1, float c2,
                                    float c3) {
  if constexpr (!kHasMmaK16) {
    mma_m16n8k8(d, a[0], a[1], b0, c0, c1, c2, c3);
    mma_m16n8k8(d, a[2], a[3], b1, d[0], d[1], d[2], d[3]);
    return;
  }
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// The same of 8 columns of A and 8 rows of B in TF32: floats of which the last 13 bits are ignored. (PTX ISA: mma,
// m16n8k8)
//   a[0], a[1]   rows lane / 4 and lane / 4 + 8, column lane % 4; a[2], a[3]: 4 columns further
//   b0, b1       column lane / 4, row lane % 4; b1: 4 rows further
FT_DEVICE void mma_m16n8k8_tf32(float* d, const u32 (&a)[4], u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

}  // namespace flashtile
