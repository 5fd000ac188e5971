// Rows of global memory to shared memory as float32, 16 bytes at a time or element by element. Scope: block.
#pragma once

#include "flashtile/core/math.cuh"

namespace flashtile {

// Element type and count of one global access.
template <typename T, bool kIsWide>
struct Access {
  static constexpr i32 kElements = kIsWide ? 16 / sizeof(T) : 1;
};

// Asynchronous copy of kBytes (4 or 16) to shared memory, zero-filled when not valid. (PTX ISA: cp.async)
template <i32 kBytes>
FT_DEVICE void copy_async(float* shared, const void* global, bool is_valid) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
  i32 bytes = is_valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  }
}

FT_DEVICE void copy_commit() {
  if constexpr (kHasAsyncCopy) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's copy groups are under way.
template <i32 kPending>
FT_DEVICE void copy_wait() {
  if constexpr (kHasAsyncCopy) asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One access of global memory to consecutive float32 in shared memory; zeros when not valid.
template <typename T, bool kIsWide>
FT_DEVICE void copy_access(float* shared, const T* global, bool is_valid) {
  constexpr i32 kElements = Access<T, kIsWide>::kElements;
  if constexpr (kIsSame<T, float> && kHasAsyncCopy) {
    copy_async<kElements * 4>(shared, global, is_valid);
  } else if constexpr (kIsWide) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (is_valid) raw = *reinterpret_cast<const uint4*>(global);
    const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (i32 e = 0; e < kElements; e += 4) {
      float4 four = make_float4(to_float(values[e]), to_float(values[e + 1]), to_float(values[e + 2]), to_float(values[e + 3]));
      *reinterpret_cast<float4*>(shared + e) = four;
    }
  } else {
    *shared = is_valid ? to_float(*global) : 0.0f;
  }
}

// Four consecutive float32 of a row to global memory, those below num_columns.
template <typename T, bool kIsWide>
FT_DEVICE void store_four(T* row, i32 column, i32 num_columns, float4 x) {
  T values[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)};
  if constexpr (kIsWide) {
    if (column >= num_columns) return;
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<uint4*>(values);
    } else {
      *reinterpret_cast<uint2*>(row + column) = *reinterpret_cast<uint2*>(values);
    }
  } else {
#pragma unroll
    for (i32 e = 0; e < 4; ++e) {
      if (column + e < num_columns) row[column + e] = values[e];
    }
  }
}

}  // namespace flashtile
