#include "tensor.h"

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

}  // namespace

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
