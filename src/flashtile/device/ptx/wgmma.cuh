// Ordering of warpgroup products (wgmma) and the shared-memory descriptors of their operands. Scope: warpgroup.
// (PTX ISA: Asynchronous Warpgroup Level Matrix Instructions)
#pragma once

#include "device/ptx/sync.cuh"
#include "device/ptx/wgmma_ops.cuh"

namespace flashtile {

// Call before the first product that reads or accumulates into registers written by other instructions.
// (PTX ISA: wgmma.fence)
FT_DEVICE void wgmma_fence() {
  jitter();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes a group of products. (PTX ISA: wgmma.commit_group)
FT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups are in flight. (PTX ISA: wgmma.wait_group)
template <i32 kPending>
FT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Stops the compiler from moving reads and writes of these registers across this point. Emits no instruction.
FT_DEVICE void pin_register(float& r) { asm volatile("" : "+f"(r)::"memory"); }
template <i32 kCount>
FT_DEVICE void pin_registers(float (&r)[kCount]) {
#pragma unroll
  for (i32 i = 0; i < kCount; ++i) pin_register(r[i]);
}

// Descriptor of a 128-byte swizzled tile: slabs of 64 16-bit columns, each [rows][128 bytes], 1024-byte aligned.
// tile_base is the low half: start address and slab stride; the stride matters only where columns are the N axis. Add
// offsets inside the tile to it, in units of 16 bytes. The high half is the same for every tile. Scope: thread.
// (PTX ISA: Matrix Descriptor Format)
FT_DEVICE u32 tile_base(const void* tile, u32 slab_bytes) {
  return (slab_bytes >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}
FT_DEVICE u64 tile_descriptor(u32 base) {
  constexpr u64 kSwizzle128 = 1ull << 62;
  constexpr u64 kEightRows = static_cast<u64>(1024 >> 4) << 32;  // stride between groups of 8 rows
  return kSwizzle128 | kEightRows | base;
}

}  // namespace flashtile
