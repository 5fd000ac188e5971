#include "tensor.h"

#include <dlfcn.h>

#include <stdexcept>

#include "../old_symbols.h"

namespace flashtile {
namespace {

// What is asked once is asked when the library is loaded: whoever asks at its first use may be forked in the middle,
// and the child would wait for ever.

// torch's numbers of the dtypes, in the order of Dtype from 1 on.
struct TorchDtypes {
  i32 numbers[static_cast<i32>(Dtype::kCount)];
  TorchDtypes()
      : numbers{-1,
                aoti_torch_dtype_float64(),
                aoti_torch_dtype_float32(),
                aoti_torch_dtype_float16(),
                aoti_torch_dtype_bfloat16(),
                aoti_torch_dtype_int64(),
                aoti_torch_dtype_int32(),
                aoti_torch_dtype_bool(),
                aoti_torch_dtype_uint8(),
                aoti_torch_dtype_float8_e4m3fn(),
                aoti_torch_dtype_float8_e5m2()} {}
};

const TorchDtypes kTorchDtypes;

// Functions of libtorch_cuda.so, which a torch without CUDA does not have. Scratch memory without a tensor saves 2 us.
struct TorchCuda {
  AOTITorchError (*allocate)(uint64_t, void**) = nullptr;
  AOTITorchError (*free)(void*) = nullptr;
  AOTITorchError (*current_stream)(int32_t, void**) = nullptr;

  TorchCuda() {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    allocate = reinterpret_cast<decltype(allocate)>(dlsym(library, "aoti_torch_cuda_caching_allocator_raw_alloc"));
    free = reinterpret_cast<decltype(free)>(dlsym(library, "aoti_torch_cuda_caching_allocator_raw_delete"));
    current_stream = reinterpret_cast<decltype(current_stream)>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }
};

const TorchCuda kTorchCuda;

}  // namespace

Dtype dtype_of(i32 torch_dtype) {
  for (i32 dtype = 1; dtype < static_cast<i32>(Dtype::kCount); ++dtype) {
    if (kTorchDtypes.numbers[dtype] == torch_dtype) return static_cast<Dtype>(dtype);
  }
  return Dtype::kNone;
}

bool view_of(AtenTensorHandle tensor, View& view) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  i32 dtype = 0;
  if (aoti_torch_get_dim(tensor, &dim) != 0 || dim < 1 || dim > kMaxDim) return false;
  if (aoti_torch_get_dtype(tensor, &dtype) != 0 || (view.dtype = dtype_of(dtype)) == Dtype::kNone) return false;
  if (aoti_torch_get_device_type(tensor, &view.device.type) != 0 ||
      aoti_torch_get_device_index(tensor, &view.device.index) != 0)
    return false;
  if (aoti_torch_get_sizes(tensor, &sizes) != 0 || aoti_torch_get_strides(tensor, &strides) != 0) return false;
  if (aoti_torch_get_data_ptr(tensor, &view.data) != 0) return false;
  if (view.device.index < 0) view.device.index = 0;
  view.dim = static_cast<i32>(dim);
  for (i32 axis = 0; axis < view.dim; ++axis) {
    view.sizes[kMaxDim - view.dim + axis] = sizes[axis];
    view.strides[kMaxDim - view.dim + axis] = strides[axis];
  }
  return view.data != nullptr || view.numel() == 0;
}

bool current_stream(i32 device_index, void** stream) {
  return kTorchCuda.current_stream != nullptr && kTorchCuda.current_stream(device_index, stream) == 0;
}

Scratch::~Scratch() {
  if (raw_ != nullptr) kTorchCuda.free(raw_);
}

void* Scratch::allocate(i64 bytes, Device device) {
  const TorchCuda& cuda = kTorchCuda;
  if (device.type != aoti_torch_device_type_cpu() && cuda.allocate != nullptr && cuda.free != nullptr) {
    return cuda.allocate(static_cast<u64>(bytes), &raw_) == 0 ? raw_ : nullptr;
  }
  View view;
  view.sizes[kMaxDim - 1] = bytes, view.strides[kMaxDim - 1] = 1;
  view.dim = 1, view.dtype = Dtype::kUint8, view.device = device;
  return owned_.allocate(view) ? view.data : nullptr;
}

Owned Owned::undefined() {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_uninitialized_tensor(&handle) != 0) throw std::runtime_error("no memory for a result");
  return Owned(handle);
}

bool Owned::allocate(View& view) {
  int64_t sizes[kMaxDim], strides[kMaxDim];
  i32 first = kMaxDim - view.dim;
  for (i32 axis = 0; axis < view.dim; ++axis) {
    sizes[axis] = view.sizes[first + axis];
    strides[axis] = view.strides[first + axis];
  }
  i32 dtype = kTorchDtypes.numbers[static_cast<i32>(view.dtype)];
  if (aoti_torch_empty_strided(view.dim, sizes, strides, dtype, view.device.type, view.device.index, &handle_) != 0)
    return false;
  return aoti_torch_get_data_ptr(handle_, &view.data) == 0;
}

bool Owned::allocate_aligned(View& view, bool is_written) {
  i64 columns = 16 / size_of(view.dtype), end = 1;
  for (i32 axis = -1; axis >= -view.dim; --axis) {
    i64 size = view.size(axis), padded = axis == -1 ? (size + columns - 1) / columns * columns : size;
    if (axis < -1 && size > 1 && view.stride(axis) == 0 && !is_written) continue;
    view.strides[kMaxDim + axis] = end;
    end *= padded > 1 ? padded : 1;
  }
  View memory;
  memory.dim = 1, memory.dtype = view.dtype, memory.device = view.device;
  memory.sizes[kMaxDim - 1] = end, memory.strides[kMaxDim - 1] = 1;
  bool is_allocated = allocate(memory);
  view.data = memory.data;
  bool is_padded = view.size(-1) % columns != 0 && !is_written;
  return is_allocated && (!is_padded || zero());
}

bool copy_elements(const View& from, const View& to) {
  AtenTensorHandle handles[2] = {};
  int64_t sizes[kMaxDim], strides[2][kMaxDim];
  i32 first = kMaxDim - to.dim;
  for (i32 axis = 0; axis < to.dim; ++axis) {
    sizes[axis] = to.strides[first + axis] == 0 ? 1 : to.sizes[first + axis];
    strides[0][axis] = from.strides[first + axis], strides[1][axis] = to.strides[first + axis];
  }
  bool is_done = true;
  for (i32 place = 0; place < 2; ++place) {
    const View& view = place == 0 ? from : to;
    is_done = is_done && aoti_torch_create_tensor_from_blob(view.data, view.dim, sizes, strides[place], 0,
                                                            kTorchDtypes.numbers[static_cast<i32>(view.dtype)],
                                                            view.device.type, view.device.index, &handles[place]) == 0;
  }
  is_done = is_done && aoti_torch_copy_(handles[1], handles[0], 0) == 0;
  for (AtenTensorHandle handle : handles) {
    if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }
  return is_done;
}

bool Owned::copy(AtenTensorHandle from, View& view) {
  view.make_contiguous();
  return allocate(view) && aoti_torch_copy_(handle_, from, 0) == 0;
}

}  // namespace flashtile
