// Kernels that overlap in a stream (programmatic dependent launch): the next one may start before this one has ended,
// and must then wait before it reads or writes global memory. Scope of both functions: thread.
// (PTX ISA: griddepcontrol)
#pragma once

#include "device/core/arch.cuh"
#include "device/core/types.cuh"

namespace flashtile {

// Lets the next kernel of the stream start once every block has called this or ended; nothing where that kernel was not
// launched to start early.
FT_DEVICE void launch_dependents() {
  if constexpr (kHasDependentLaunch) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and its stores can be seen; returns at once where this kernel was
// not launched to start early. Kernels before that one have ended too if each that started early has waited.
FT_DEVICE void wait_for_previous() {
  if constexpr (kHasDependentLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Prefetches kernel parameters to the constant cache, which would otherwise miss on each line of 64 bytes in turn. The
// callers share the lines; `caller` is this warp's number among num_callers. Each overwrites 4 bytes of shared memory
// at `scratch`: the compiler would drop a load whose result is not used. Scope: warp.
template <class T>
FT_DEVICE void preload_params(const T& params, i32 caller, i32 num_callers, void* scratch) {
  const u32* words = reinterpret_cast<const u32*>(&params);
  u32 used = 0;
#pragma unroll 1
  for (u32 word = 16 * caller; word < sizeof(T) / 4; word += 16 * num_callers) used ^= words[word];
  if (threadIdx.x % 32 == 0) static_cast<volatile u32*>(scratch)[caller] = used;
}

}  // namespace flashtile
