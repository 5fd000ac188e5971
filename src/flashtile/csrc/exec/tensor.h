// A tensor as the executor sees it, and tensors of its own from torch's allocator.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <utility>

#include "device/core/types.cuh"

namespace flashtile {

constexpr i32 kMaxDim = 4;

enum class Dtype : u8 {
  kNone,
  kFloat64,
  kFloat32,
  kFloat16,
  kBfloat16,
  kInt64,
  kInt32,
  kBool,
  kUint8,
  kFloat8E4m3fn,
  kFloat8E5m2,
  kCount
};

// In bytes.
inline i64 size_of(Dtype dtype) {
  constexpr i64 kSizes[] = {0, 8, 4, 2, 2, 8, 4, 1, 1, 1, 1};
  static_assert(sizeof(kSizes) / sizeof(kSizes[0]) == static_cast<i32>(Dtype::kCount));
  return kSizes[static_cast<i32>(dtype)];
}

struct Device {
  i32 type = 0;  // torch's, as aoti_torch_device_type_cuda()
  i32 index = 0;
};

inline bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }

// Sizes and strides in elements, the last axis in [kMaxDim - 1]. A missing axis has size 1 and stride 0.
struct View {
  void* data = nullptr;
  i64 sizes[kMaxDim] = {1, 1, 1, 1};
  i64 strides[kMaxDim] = {0, 0, 0, 0};
  i32 dim = 0;
  Dtype dtype = Dtype::kNone;  // kNone: there is no such tensor
  Device device;

  bool is_given() const { return dtype != Dtype::kNone; }
  // By an axis counted from the end: -1 is the last.
  i64 size(i32 axis) const { return sizes[kMaxDim + axis]; }
  i64 stride(i32 axis) const { return strides[kMaxDim + axis]; }
  i64 numel() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
  bool is_contiguous() const {
    i64 expected = 1;
    for (i32 axis = kMaxDim - 1; axis >= kMaxDim - dim; --axis) {
      if (sizes[axis] != 1 && strides[axis] != expected) return false;
      expected *= sizes[axis];
    }
    return true;
  }
  // An element of an index tensor of 1 or 2 dimensions, read once: another thread may write it.
  i32 i32_at(i64 column) const {
    return __atomic_load_n(static_cast<i32*>(data) + column * stride(-1), __ATOMIC_RELAXED);
  }
  i32 i32_at(i64 row, i64 column) const {
    return __atomic_load_n(static_cast<i32*>(data) + row * stride(-2) + column * stride(-1), __ATOMIC_RELAXED);
  }
  // As problem.py: is_aligned16
  bool is_aligned16() const {
    i64 size = size_of(dtype);
    if (reinterpret_cast<u64>(data) % 16 != 0 || sizes[kMaxDim - 1] * size % 16 != 0) return false;
    for (i32 axis = 0; axis < kMaxDim - 1; ++axis) {
      if (sizes[axis] > 1 && strides[axis] * size % 16 != 0) return false;
    }
    return true;
  }
  void make_contiguous() {
    i64 stride = 1;
    for (i32 axis = kMaxDim - 1; axis >= kMaxDim - dim; --axis) {
      strides[axis] = stride;
      stride *= sizes[axis] > 1 ? sizes[axis] : 1;
    }
  }
};

// What an op was given. False where no plan could take such a tensor.
bool view_of(AtenTensorHandle tensor, View& view);
// From torch's number of a dtype; kNone where no plan could take it.
Dtype dtype_of(i32 torch_dtype);
// torch's current stream on a CUDA device. False where it cannot be told.
bool current_stream(i32 device_index, void** stream);

// Memory for the view from torch's allocator, uninitialised; sets view.data. Null where torch gives none.
class Owned {
 public:
  Owned() = default;
  explicit Owned(AtenTensorHandle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  // A tensor that stands for none.
  static Owned undefined();

  bool allocate(View& view);
  // The same with rows on 16-byte boundaries, as executor.py: aligned_rows; sets the view's strides, too.
  bool allocate_aligned(View& view, bool is_written);
  // A contiguous copy; sets the view to it.
  bool copy(AtenTensorHandle from, View& view);
  bool zero() { return aoti_torch_zero_(handle_) == 0; }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Copies the elements. Those that are one in `to` are read once.
bool copy_elements(const View& from, const View& to);

// Memory for one call: it lives until the launches are queued, no longer, since torch's allocator orders reuse on the
// same stream.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // On the current stream of the device, which is the current one. Null where torch gives none.
  void* allocate(i64 bytes, Device device);

 private:
  void* raw_ = nullptr;  // from the caching allocator itself
  Owned owned_;          // where that cannot be reached
};

}  // namespace flashtile
