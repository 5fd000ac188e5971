// TMA: copies boxes of a tensor, described by a tensor map, between global and shared memory. Scope of every function:
// thread. (PTX ISA: Data Movement, cp.async.bulk.tensor)
#pragma once

#include "device/ptx/bulk.cuh"
#include "device/ptx/mbarrier.cuh"

namespace flashtile {

// A CUtensorMap as cuTensorMapEncodeTiled writes it. Kernels take it as a grid constant.
struct alignas(64) TensorMap {
  u64 words[16];
};

// (PTX ISA: prefetch.tensormap)
FT_DEVICE void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Starts the copy of the box at (column, row, head, batch) to shared memory. Elements outside the tensor arrive as
// zeros. The barrier counts the bytes of the whole box. (PTX ISA: cp.async.bulk.tensor)
FT_DEVICE void load_box(void* shared, const TensorMap& map, u64& barrier, i32 column, i32 row, i32 head, i32 batch) {
  jitter();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// The same for what is read once: L2 evicts it first. (PTX ISA: createpolicy, cache_hint)
FT_DEVICE void load_box_once(void* shared, const TensorMap& map, u64& barrier, i32 column, i32 row, i32 head,
                             i32 batch) {
  jitter();
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

// Starts the copy of a box from shared memory to the tensor. Elements outside the tensor are dropped.
// (PTX ISA: cp.async.bulk.tensor)
FT_DEVICE void store_box(const void* shared, const TensorMap& map, i32 column, i32 row, i32 head, i32 batch) {
  jitter();
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}

}  // namespace flashtile
