// The few functions of the CUDA driver that a launch needs, from the library that runtime/driver.py has opened as well.
#pragma once

#include <cstddef>

#include "device/core/types.cuh"

namespace flashtile {

constexpr i32 kTensorMapBytes = 128;

// CUlaunchAttribute, whose value here is a number.
struct LaunchAttribute {
  int id, padding, value, rest[15];
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Driver {
  using Handle = void*;
  int (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,
                        void**) = nullptr;
  int (*cuLaunchKernelEx)(const LaunchConfig*, Handle, void**, void**) = nullptr;
  int (*cuTensorMapEncodeTiled)(void*, int, u32, void*, const u64*, const u64*, const u32*, const u32*, int, int, int,
                                int) = nullptr;
  int (*cuMemsetD8Async)(u64, u8, size_t, Handle) = nullptr;
  int (*cuMemsetD32Async)(u64, u32, size_t, Handle) = nullptr;
  int (*cuStreamGetId)(Handle, u64*) = nullptr;
  int (*cuStreamGetCaptureInfo_v2)(Handle, int*, u64*, void*, void*, void*) = nullptr;
  int (*cuCtxGetCurrent)(Handle*) = nullptr;
  int (*cuCtxSetCurrent)(Handle) = nullptr;
  int (*cuDeviceGet)(int*, int) = nullptr;
  int (*cuDevicePrimaryCtxRetain)(Handle*, int) = nullptr;

  // Null, or the name of what is missing.
  const char* open(const char* library);
  // The status of a call of the driver. A backward pass may run in a thread of torch's that has no context yet: then
  // the call is made once more, in the device's primary context.
  template <typename Function>
  int in_context(i32 device_index, Function call) const {
    int status = call();
    return status != 0 && ensure_context(device_index) ? call() : status;
  }

 private:
  // Makes the device's primary context current if the thread has none. True if it had none.
  bool ensure_context(i32 device_index) const;
};

}  // namespace flashtile
