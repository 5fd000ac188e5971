// Ordering inside a block of Hopper: named barriers, the fence between the two ways to shared memory, registers moved between warpgroups,
// one lane of a warp. One instruction a wrapper.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Defined for a test build: every barrier, copy and product is preceded by a pause of random length.
#ifdef FT_JITTER
constexpr bool kHasJitter = true;
#else
constexpr bool kHasJitter = false;
#endif

// A pause of up to 2 us that differs from warp to warp and call to call. Scope: warp. (PTX ISA: nanosleep)
FT_DEVICE void jitter() {
  if constexpr (kHasJitter) {
    u32 x = static_cast<u32>(clock64()) * 2654435761u ^ (threadIdx.x / 32 + 64 * blockIdx.x) * 2246822519u;
    asm volatile("nanosleep.u32 %0;" ::"r"(x >> 21));
  }
}

// Scope: warpgroup or several; num_threads counts both the waiting and the arriving. (PTX ISA: barrier)
FT_DEVICE void named_barrier_sync(i32 barrier_idx, i32 num_threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}
FT_DEVICE void named_barrier_arrive(i32 barrier_idx, i32 num_threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// This thread's plain stores to shared memory come before what the copy engine and the tensor cores do there. Scope: thread.
// (PTX ISA: membar / fence)
FT_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of each thread from here on. Scope: warpgroup. (PTX ISA: setmaxnreg)
template <i32 kRegisters>
FT_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <i32 kRegisters>
FT_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one lane of the warp. Scope: warp. (PTX ISA: elect.sync)
FT_DEVICE bool elect_lane() {
  u32 is_elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(is_elected));
  return is_elected != 0;
}

// The same number, where the lanes of a warp agree on it: the compiler then knows that they do, and may keep it in a uniform register.
// Scope: warp.
FT_DEVICE i32 uniform(i32 x) { return __shfl_sync(0xffffffffu, x, 0); }

FT_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

}  // namespace flashtile
