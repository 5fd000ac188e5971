// Bulk copies between global and shared memory without a tensor map, groups of bulk copies, and turns between blocks
// that reduce into the same memory. Scope of every function: thread. (PTX ISA: Data Movement, cp.async.bulk)
#pragma once

#include "device/ptx/sync.cuh"

namespace flashtile {

// Starts adding num_bytes of floats in shared memory to global memory, each float atomically. Both addresses and the
// size are multiples of 16. (PTX ISA: cp.reduce.async.bulk)
FT_DEVICE void reduce_add(float* global, const float* shared, u32 num_bytes) {
  jitter();
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
}

// Starts the copy of num_bytes to shared memory. The barrier counts them; addresses and size are multiples of 16.
// (PTX ISA: cp.async.bulk)
FT_DEVICE void load_bulk(void* shared, const void* global, u32 num_bytes, u64& barrier) {
  jitter();
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(num_bytes), "r"(shared_address(&barrier))
               : "memory");
}

// Closes a group of this thread's bulk stores and reductions. (PTX ISA: cp.async.bulk.commit_group)
FT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but kPending of this thread's groups have read their shared memory.
// (PTX ISA: cp.async.bulk.wait_group)
template <i32 kPending>
FT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but kPending of this thread's groups are complete.
template <i32 kPending>
FT_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Blocks that add to the same memory in a fixed order take turns. `count`, in global memory and 0 at first, is the
// number of blocks that are done; `order` is this block's place. After is_turn returns true, this thread's bulk
// reductions come after those that other blocks made before their signal_turn. The count may be past the place where
// bad lengths let sequences share memory: their blocks must end, too.
FT_DEVICE bool is_due(i32 count, i32 order) { return count >= order; }
FT_DEVICE bool is_turn(const i32* count, i32 order) {
  jitter();
  i32 found;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  return is_due(found, order);
}
// Ends this block's turn. The caller has waited for its reductions by bulk_wait.
FT_DEVICE void signal_turn(i32* count) {
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

}  // namespace flashtile
