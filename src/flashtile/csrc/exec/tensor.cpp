#include "tensor.h"

#include <dlfcn.h>

namespace flashtile {
namespace {

i32 torch_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return aoti_torch_dtype_float64();
    case Dtype::kFloat32:
      return aoti_torch_dtype_float32();
    case Dtype::kFloat16:
      return aoti_torch_dtype_float16();
    case Dtype::kBfloat16:
      return aoti_torch_dtype_bfloat16();
    default:
      return aoti_torch_dtype_uint8();
  }
}

// The allocator behind CUDA tensors, of a library that a torch without CUDA does not have. Making no tensor saves 2 us.
struct CudaAllocator {
  AOTITorchError (*allocate)(uint64_t, void**) = nullptr;
  AOTITorchError (*free)(void*) = nullptr;

  CudaAllocator() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    allocate = reinterpret_cast<decltype(allocate)>(dlsym(library, "aoti_torch_cuda_caching_allocator_raw_alloc"));
    free = reinterpret_cast<decltype(free)>(dlsym(library, "aoti_torch_cuda_caching_allocator_raw_delete"));
  }
  bool is_there() const { return allocate != nullptr && free != nullptr; }
};

const CudaAllocator& cuda_allocator() {
  static const CudaAllocator found;
  return found;
}

}  // namespace

Scratch::~Scratch() {
  if (raw_ != nullptr) cuda_allocator().free(raw_);
}

void* Scratch::allocate(i64 bytes, Device device) {
  if (device.type != aoti_torch_device_type_cpu() && cuda_allocator().is_there()) {
    return cuda_allocator().allocate(static_cast<u64>(bytes), &raw_) == 0 ? raw_ : nullptr;
  }
  View view;
  view.sizes[kMaxDim - 1] = bytes, view.strides[kMaxDim - 1] = 1;
  view.dim = 1, view.dtype = Dtype::kUint8, view.device = device;
  return owned_.allocate(view) ? view.data : nullptr;
}

bool Owned::allocate(View& view) {
  int64_t sizes[kMaxDim], strides[kMaxDim];
  i32 first = kMaxDim - view.dim;
  for (i32 axis = 0; axis < view.dim; ++axis) {
    sizes[axis] = view.sizes[first + axis];
    strides[axis] = view.strides[first + axis];
  }
  i32 dtype = torch_dtype(view.dtype);
  if (aoti_torch_empty_strided(view.dim, sizes, strides, dtype, view.device.type, view.device.index, &handle_) != 0) return false;
  return aoti_torch_get_data_ptr(handle_, &view.data) == 0;
}

}  // namespace flashtile
