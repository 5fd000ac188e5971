// Bulk copies between global and shared memory without a tensor map. One instruction per wrapper. Scope of every
// function: thread. (PTX ISA: Data Movement, cp.async.bulk)
#pragma once

#include "flashtile/ptx/sync.cuh"

namespace flashtile {

// Starts adding num_bytes of floats in shared memory to global memory, each float atomically. Both addresses and the
// size are multiples of 16. (PTX ISA: cp.reduce.async.bulk)
FT_DEVICE void reduce_add(float* global, const float* shared, u32 num_bytes) {
  jitter();
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(num_bytes)
               : "memory");
}

}  // namespace flashtile
