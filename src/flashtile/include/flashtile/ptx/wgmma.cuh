// Ordering of warpgroup products and the descriptors of their operands in shared memory. Scope: warpgroup.
// (PTX ISA: Asynchronous Warpgroup Level Matrix Instructions)
#pragma once

#include "flashtile/ptx/sync.cuh"
#include "flashtile/ptx/wgmma_ops.cuh"

namespace flashtile {

// Before the first product that reads or adds to registers written by other instructions. (PTX ISA: wgmma.fence)
FT_DEVICE void wgmma_fence() {
  jitter();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of products. (PTX ISA: wgmma.commit_group)
FT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending groups are under way. (PTX ISA: wgmma.wait_group)
template <i32 kPending>
FT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving what reads or writes these registers across this point. No instruction.
template <i32 kCount>
FT_DEVICE void pin_registers(float (&r)[kCount]) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// The descriptor of a tile in shared memory, 128-byte swizzled: slabs of 64 16-bit columns, each [rows][128 bytes], on 1024-byte boundaries.
// Its low half says where: start address, and the distance of slabs, which matters where the columns are the N axis. Offsets inside the tile,
// in units of 16 bytes, are added to it. Its high half is always the same. (PTX ISA: Matrix Descriptor Format)
FT_DEVICE u32 tile_base(const void* tile, u32 slab_bytes) { return (slab_bytes >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4; }
FT_DEVICE u64 tile_descriptor(u32 base) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  constexpr u64 kEightRows = static_cast<u64>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | base;
}

}  // namespace flashtile
