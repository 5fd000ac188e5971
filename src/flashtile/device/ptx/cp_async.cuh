// Asynchronous copies from global to shared memory by the threads themselves. One instruction per wrapper. Where the
// architecture has no cp.async, a copy to a 32-bit shared address is a load and a store, and commit and wait do
// nothing. Scope of every function: thread. (PTX ISA: Data Movement, cp.async)
#pragma once

#include "device/core/arch.cuh"
#include "device/core/types.cuh"

namespace flashtile {

// Starts a copy of kBytes (4 or 16) to shared memory; writes zeros if not valid. Needs kHasAsyncCopy.
// (PTX ISA: cp.async)
template <i32 kBytes>
FT_DEVICE void cp_async(float* shared, const void* global, bool is_valid) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
  i32 bytes = is_valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  }
}

// cp_async below without the instruction: a load and a store. num_bytes is 0, 2 or 4 of 4 bytes, 0 or 16 of 16.
template <i32 kBytes>
FT_DEVICE void copy_now(u32 address, const void* global, i32 num_bytes) {
  if constexpr (kBytes == 16) {
    uint4 x = num_bytes > 0 ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  } else {
    u32 x = num_bytes == 4 ? *static_cast<const u32*>(global) : 0;
    if (num_bytes == 2) x = *static_cast<const u16*>(global);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
  }
}

// Builds for memcheck define FT_EXACT_COPIES. memcheck checks all bytes of a cp.async, although one with a source size
// of 2 out of 4 reads 2. There such a copy is a load of 2 bytes.
#ifdef FT_EXACT_COPIES
constexpr bool kCopiesExactly = true;
#else
constexpr bool kCopiesExactly = false;
#endif

// Starts a copy of num_bytes out of kBytes (4 or 16) to a 32-bit shared address; the rest becomes zeros. A copy of 16
// bytes prefetches its line of 128 bytes to L2. (PTX ISA: cp.async)
template <i32 kBytes>
FT_DEVICE void cp_async(u32 address, const void* global, i32 num_bytes) {
  if constexpr (kCopiesExactly && kBytes == 4) {
    if (num_bytes == 2) {
      copy_now<kBytes>(address, global, num_bytes);
      return;
    }
  }
  if constexpr (!kHasAsyncCopy) {
    copy_now<kBytes>(address, global, num_bytes);
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(num_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(num_bytes) : "memory");
  }
}

// Arrives at an mbarrier once this thread's copies so far have completed. The barrier counts one arrival for each
// thread. (PTX ISA: cp.async.mbarrier.arrive)
FT_DEVICE void cp_async_arrive(u32 barrier_address) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier_address) : "memory");
}

// Closes the current group of this thread's copies. (PTX ISA: cp.async.commit_group)
FT_DEVICE void cp_async_commit() {
  if constexpr (kHasAsyncCopy) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups are in flight. (PTX ISA: cp.async.wait_group)
template <i32 kPending>
FT_DEVICE void cp_async_wait() {
  if constexpr (kHasAsyncCopy) asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashtile
