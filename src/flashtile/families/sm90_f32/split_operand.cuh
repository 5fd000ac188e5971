// float32 operands of 16-bit tensor cores, split into parts whose sum is the number: docs/float32.md.
//
//   Bf16Parts      three parts of 8 bits, truncated: all 24 bits, over the whole range of float32; 6 products
//   HalfParts<2>   two parts of 11 bits, rounded: 22 bits and more, for numbers scaled by a power of two; 3 products
//   HalfParts<1>   one part of 11 bits, as many as TF32 has; 1 product. torch.set_float32_matmul_precision("high")
//
// Part 0 is the largest. A product of two split operands is the sum of the products of their parts, without those below
// the last bit that is kept. Tensor cores truncate sums, so the smallest products come first.
#pragma once

#include "device/ptx/wgmma.cuh"
#include "device/tile/fragment.cuh"

namespace flashtile {

// Which part of each operand a product takes.
struct PartPair {
  i32 a, b;
};

template <i32 kCount>
struct HalfParts {
  using Element = half_t;
  static constexpr i32 kNumParts = kCount, kNumProducts = kCount == 1 ? 1 : 3;
  static_assert(kCount == 1 || kCount == 2);

  // Which parts product number `product` takes; the largest product is the last.
  FT_DEVICE static constexpr PartPair pair(i32 product) {
    return product == kNumProducts - 1 ? PartPair{0, 0} : PartPair{product, 1 - product};
  }
  // Splits two numbers; each word holds one part of both. Scope: thread.
  FT_DEVICE static void split(float low, float high, u32 (&parts)[kNumParts]) {
    parts[0] = pack_two<half_t>(low, high);
    if constexpr (kNumParts == 2) {
      low -= to_float(half_t{static_cast<u16>(parts[0])});
      high -= to_float(half_t{static_cast<u16>(parts[0] >> 16)});
      parts[1] = pack_two<half_t>(low, high);
    }
  }
};

struct Bf16Parts {
  using Element = bf16_t;
  static constexpr i32 kNumParts = 3, kNumProducts = 6;

  FT_DEVICE static constexpr PartPair pair(i32 product) {
    if (product < 3) return {product, 2 - product};
    return product < 5 ? PartPair{product - 3, 4 - product} : PartPair{0, 0};
  }
  FT_DEVICE static void split(float low, float high, u32 (&parts)[kNumParts]) {
#pragma unroll
    for (i32 part = 0; part < kNumParts; ++part) {
      // The upper halves of both
      u32 a = __float_as_uint(low), b = __float_as_uint(high);
      parts[part] = __byte_perm(a, b, 0x7632);
      low -= __uint_as_float(a & 0xffff0000u);
      high -= __uint_as_float(b & 0xffff0000u);
    }
  }
};

// Returns x, which must be equal in all lanes. The compiler does not know the value, so it computes the descriptors
// that follow from it where they are used, instead of holding all of them in registers over the loop. Scope: warp.
FT_DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return uniform(x);
}

// D = A B^T: A is 64 rows, B kColumns rows, both with their parts behind each other in shared memory. Commits one
// group. Over 64 products, whose descriptors would spill registers, run in a loop that waits for each pair of parts.
// Scope: warpgroup.
template <class Parts, i32 kColumns, i32 kDepth>
FT_DEVICE void gemm_abt_split(float (&rD)[kColumns / 2], u32 a, u32 b) {
  constexpr i32 kSlabs = (kDepth + 63) / 64, kNumProducts = Parts::kNumProducts;
  constexpr bool kIsLong = kNumProducts * kDepth / 16 > 64;
  if constexpr (!kIsLong) wgmma_fence();
#pragma unroll(kIsLong ? 1 : kNumProducts)
  for (i32 product = 0; product < kNumProducts; ++product) {
    constexpr i32 kSlabA = 64 * 128 >> 4, kSlabB = kColumns * 128 >> 4;
    PartPair pair = Parts::pair(product);
    u32 a_part = a + pair.a * kSlabs * kSlabA, b_part = b + pair.b * kSlabs * kSlabB;
    if constexpr (kIsLong) wgmma_fence();
#pragma unroll
    for (i32 step = 0; step < kDepth / 16; ++step) {
      i32 slab = step / 4, column = step % 4 * 2;
      Wgmma<typename Parts::Element, kColumns>::template ss<false>(rD, tile_descriptor(a_part + slab * kSlabA + column),
                                                                   tile_descriptor(b_part + slab * kSlabB + column),
                                                                   product != 0 || step != 0);
    }
    if constexpr (kIsLong) {
      wgmma_commit();
      wgmma_wait<0>();
      pin_registers(rD);
    }
  }
  if constexpr (!kIsLong) wgmma_commit();
}

// The same with a chain of sums for every kChain columns: one over 256 columns would truncate too much. kTogether of
// them are in flight at a time. Waits for the products. Scope: warpgroup.
template <class Parts, i32 kColumns, i32 kDepth, i32 kChain, i32 kTogether>
FT_DEVICE void gemm_abt_chains(float (&rD)[kColumns / 2], u32 a, u32 b) {
  constexpr i32 kSlabs = kDepth / 64, kChainSlabs = kChain / 64, kSlabA = 64 * 128 >> 4, kSlabB = kColumns * 128 >> 4;
  static_assert(kChain % 64 == 0 && kDepth % (kChain * kTogether) == 0);
#pragma unroll
  for (i32 first = 0; first < kSlabs; first += kChainSlabs * kTogether) {
    float rT[kTogether][kColumns / 2];
    u32 a_first = opaque(a + first * kSlabA), b_first = opaque(b + first * kSlabB);
    wgmma_fence();
#pragma unroll
    for (i32 product = 0; product < Parts::kNumProducts; ++product) {
      PartPair pair = Parts::pair(product);
#pragma unroll
      for (i32 step = 0; step < 4 * kChainSlabs * kTogether; ++step) {
        i32 slab = step / 4, column = step % 4 * 2;
        u32 a_step = a_first + (pair.a * kSlabs + slab) * kSlabA + column;
        u32 b_step = b_first + (pair.b * kSlabs + slab) * kSlabB + column;
        Wgmma<typename Parts::Element, kColumns>::template ss<false>(rT[slab / kChainSlabs], tile_descriptor(a_step),
                                                                     tile_descriptor(b_step),
                                                                     product != 0 || step % (4 * kChainSlabs) != 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (i32 chain = 0; chain < kTogether; ++chain) {
      pin_registers(rT[chain]);
#pragma unroll
      for (i32 x = 0; x < kColumns / 2; ++x) rD[x] = first + chain == 0 ? rT[chain][x] : rD[x] + rT[chain][x];
    }
  }
}

// D = A B^T over one slab of 64 columns, with parts that are a_stride and b_stride apart (in units of 16 bytes).
// Commits one group. Scope: warpgroup.
template <class Parts, i32 kColumns>
FT_DEVICE void gemm_abt_split_slab(float (&rD)[kColumns / 2], u32 a, u32 a_stride, u32 b, u32 b_stride) {
  wgmma_fence();
#pragma unroll
  for (i32 product = 0; product < Parts::kNumProducts; ++product) {
    PartPair pair = Parts::pair(product);
#pragma unroll
    for (i32 step = 0; step < 4; ++step) {
      Wgmma<typename Parts::Element, kColumns>::template ss<false>(
          rD, tile_descriptor(a + pair.a * a_stride + 2 * step), tile_descriptor(b + pair.b * b_stride + 2 * step),
          product != 0 || step != 0);
    }
  }
  wgmma_commit();
}

// D = A B over kColumns of the columns of B, whose parts are part_stride apart (in units of 16 bytes): A (64 x kDepth)
// is in registers, columns 16 * first_step and on of one packed fragment for each part. Commits one group.
// Scope: warpgroup.
template <class Parts, i32 kColumns, i32 kDepth, i32 kCount>
FT_DEVICE void gemm_ab_split(float (&rD)[kColumns / 2], const u32 (&rA)[Parts::kNumParts][kCount], i32 first_step,
                             u32 b, u32 part_stride) {
  wgmma_fence();
#pragma unroll
  for (i32 product = 0; product < Parts::kNumProducts; ++product) {
    PartPair pair = Parts::pair(product);
#pragma unroll
    for (i32 step = 0; step < kDepth / 16; ++step) {
      const u32* a = rA[pair.a] + 4 * (first_step + step);
      u64 b_step = tile_descriptor(b + pair.b * part_stride + step * (16 * 128 >> 4));
      Wgmma<typename Parts::Element, kColumns>::template rs<true>(rD, a[0], a[1], a[2], a[3], b_step,
                                                                  product != 0 || step != 0);
    }
  }
  wgmma_commit();
}

}  // namespace flashtile
