// Synchronisation inside a Hopper block: named barriers, the async-proxy fence, register reallocation, lane election.
// One instruction per wrapper.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// Test builds define FT_JITTER: a random delay before every barrier, copy and product shows missing synchronisation.
#ifdef FT_JITTER
constexpr bool kHasJitter = true;
#else
constexpr bool kHasJitter = false;
#endif

// A delay of up to 2 us that differs by warp and by call. Scope: warp. (PTX ISA: nanosleep)
FT_DEVICE void jitter() {
  if constexpr (kHasJitter) {
    u32 x = static_cast<u32>(clock64()) * 2654435761u ^ (threadIdx.x / 32 + 64 * blockIdx.x) * 2246822519u;
    asm volatile("nanosleep.u32 %0;" ::"r"(x >> 21));
  }
}

// num_threads counts the waiting and the arriving threads. Scope: one or more warpgroups. (PTX ISA: barrier)
FT_DEVICE void named_barrier_sync(i32 barrier_idx, i32 num_threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}
FT_DEVICE void named_barrier_arrive(i32 barrier_idx, i32 num_threads) {
  jitter();
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// The same for num_threads waiting threads; true in all of them if `flag` is in one. (PTX ISA: barrier, red)
FT_DEVICE bool named_barrier_any(i32 barrier_idx, i32 num_threads, bool flag) {
  u32 is_any;
  jitter();
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(is_any)
               : "r"(static_cast<u32>(flag)), "r"(barrier_idx), "r"(num_threads)
               : "memory");
  return is_any != 0;
}

// Orders this thread's ordinary shared-memory stores before later TMA and wgmma accesses. Scope: thread.
// (PTX ISA: membar / fence)
FT_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sets the number of registers per thread. Scope: warpgroup. (PTX ISA: setmaxnreg)
template <i32 kRegisters>
FT_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <i32 kRegisters>
FT_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in exactly one lane. Scope: warp. (PTX ISA: elect.sync)
FT_DEVICE bool elect_lane() {
  u32 is_elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(is_elected));
  return is_elected != 0;
}

// Returns x, which must be equal in all lanes. Tells the compiler so: it may keep x in a uniform register. Scope: warp.
FT_DEVICE i32 uniform(i32 x) { return __shfl_sync(0xffffffffu, x, 0); }

// One more than the largest identifier of a multiprocessor. Scope: thread. (PTX ISA: %nsmid)
FT_DEVICE i32 num_multiprocessors() {
  i32 count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return count;
}

// The 32-bit address of a shared-memory object. Scope: thread.
FT_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

}  // namespace flashtile
