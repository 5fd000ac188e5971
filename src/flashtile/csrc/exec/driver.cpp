#include "driver.h"

#include <dlfcn.h>

#include <type_traits>

#include "../old_symbols.h"

namespace flashtile {

const char* Driver::open(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return library;
  const char* missing = nullptr;
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
  find(cuLaunchKernel, "cuLaunchKernel");
  find(cuLaunchKernelEx, "cuLaunchKernelEx");
  find(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled");
  find(cuMemsetD8Async, "cuMemsetD8Async");
  find(cuMemsetD32Async, "cuMemsetD32Async");
  find(cuStreamGetId, "cuStreamGetId");
  find(cuStreamGetCaptureInfo_v2, "cuStreamGetCaptureInfo_v2");
  find(cuCtxGetCurrent, "cuCtxGetCurrent");
  find(cuCtxSetCurrent, "cuCtxSetCurrent");
  find(cuDeviceGet, "cuDeviceGet");
  find(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  return missing;
}

bool Driver::ensure_context(i32 device_index) const {
  Handle context = nullptr;
  int device = 0;
  if (cuCtxGetCurrent(&context) != 0 || context != nullptr) return false;
  // Retained for the life of the process, as torch does
  return cuDeviceGet(&device, device_index) == 0 && cuDevicePrimaryCtxRetain(&context, device) == 0 &&
         cuCtxSetCurrent(context) == 0;
}

}  // namespace flashtile
