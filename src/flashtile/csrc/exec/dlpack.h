// What is used of DLPack 1: how a tensor is described, and the table of C functions behind torch.Tensor.__dlpack_c_exchange_api__. Written
// from the specification; torch's own header is not among its stable ones.
#pragma once

#include <cstdint>

namespace flashtile::dlpack {

constexpr uint32_t kMajorVersion = 1;

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t { kInt = 0, kFloat = 2, kBfloat = 4, kBool = 6 };

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  const void* older;
  const void *allocate, *managed_from_python, *managed_to_python;
  // Fill what they point at and return 0, or set a Python exception. Shapes and strides stay the tensor's.
  int (*tensor_from_python)(void* object, Tensor* tensor);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace flashtile::dlpack
