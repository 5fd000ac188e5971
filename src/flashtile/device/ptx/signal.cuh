// Messages between blocks of one launch: data in global memory, then a flag. Scope of every function: thread.
// (PTX ISA: Memory Consistency Model)
#pragma once

#include "device/ptx/sync.cuh"

namespace flashtile {

// Sets a flag. Whoever sees it there also sees what this thread wrote before, and what other threads of the block wrote
// before a barrier that this thread has passed. (PTX ISA: st.release)
FT_DEVICE void release_flag(u32* flag, u32 value) {
  jitter();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Waits for the flag. (PTX ISA: ld.acquire)
FT_DEVICE void acquire_flag(const u32* flag, u32 value) {
  jitter();
  u32 found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
  } while (found != value);
}

// Loads from L2, where other blocks write. (PTX ISA: ld.global.cg)
FT_DEVICE float4 load_from_l2(const float4* address) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(address));
  return x;
}
FT_DEVICE float2 load_from_l2(const float2* address) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(address));
  return x;
}

}  // namespace flashtile
