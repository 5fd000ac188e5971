// The copy engine: boxes of a tensor, described by a map the host encodes, to shared memory. Scope: thread.
// (PTX ISA: Data Movement, cp.async.bulk.tensor)
#pragma once

#include "flashtile/ptx/mbarrier.cuh"

namespace flashtile {

// What cuTensorMapEncodeTiled writes. Kernels take it as a grid constant.
struct alignas(64) TensorMap {
  u64 words[16];
};

// (PTX ISA: prefetch.tensormap)
FT_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box that starts at (column, row, head, batch); what lies outside the tensor arrives as zeros. Its bytes count on the barrier.
FT_DEVICE void load_box(void* shared, const TensorMap& map, u64& barrier, i32 column, i32 row, i32 head, i32 batch) {
  jitter();
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                   shared_address(shared)),
               "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// The other way: the box in shared memory to the tensor; what lies outside is dropped.
FT_DEVICE void store_box(const void* shared, const TensorMap& map, i32 column, i32 row, i32 head, i32 batch) {
  jitter();
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(shared_address(shared)), "r"(column),
               "r"(row), "r"(head), "r"(batch)
               : "memory");
}

// Closes a group of this thread's stores. (PTX ISA: cp.async.bulk.commit_group)
FT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but kPending of its groups have read their shared memory. (PTX ISA: cp.async.bulk.wait_group)
template <i32 kPending>
FT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashtile
