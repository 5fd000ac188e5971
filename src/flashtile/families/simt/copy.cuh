// Copies of rows between global memory (float32 or 16-bit) and float32 tiles in shared memory or registers, 16 bytes or
// one element per access. Asynchronous for float32 where the architecture has cp.async.
#pragma once

#include "device/core/math.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/cp_async.cuh"

namespace flashtile {

// Elements of one global access.
template <typename T, bool kIsAligned16>
constexpr i32 kAccessElements = kIsAligned16 ? 16 / sizeof(T) : 1;

// Copies one access to consecutive float32 in shared memory; writes zeros if not valid. Scope: thread.
template <typename T, bool kIsAligned16>
FT_DEVICE void copy_access(float* shared, const T* global, bool is_valid) {
  constexpr i32 kElements = kAccessElements<T, kIsAligned16>;
  if constexpr (kIsSame<T, float> && kHasAsyncCopy) {
    cp_async<kElements * 4>(shared, global, is_valid);
  } else if constexpr (kIsAligned16) {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (is_valid) raw = *reinterpret_cast<const uint4*>(global);
    const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (i32 e = 0; e < kElements; e += 4) {
      float4 four =
          make_float4(to_float(values[e]), to_float(values[e + 1]), to_float(values[e + 2]), to_float(values[e + 3]));
      *reinterpret_cast<float4*>(shared + e) = four;
    }
  } else {
    *shared = is_valid ? to_float(*global) : 0.0f;
  }
}

// Copies rows [first, first + kRows) of a tensor to shared memory; writes zeros from num_rows and num_columns on.
// row_at(r) returns the address of row r. The caller commits and waits for asynchronous copies. Scope: block.
template <class Config, class Load, i32 kRows, typename T, class RowAt>
FT_DEVICE void load_tile(float* sTile, i32 first, i32 num_rows, i32 num_columns, RowAt row_at) {
  constexpr i32 kElements = kAccessElements<T, Load::kIsAligned16>;
  constexpr i32 kPerRow = Config::kHeadDim / kElements;
#pragma unroll 4
  for (i32 index = threadIdx.x; index < kRows * kPerRow; index += Config::kNumThreads) {
    i32 r = index / kPerRow, column = index % kPerRow * kElements;
    bool is_valid = first + r < num_rows && column < num_columns;
    if constexpr (mutates(Mutation::tail_column)) is_valid = first + r < num_rows;
    const T* source = is_valid ? row_at(first + r) + column : row_at(0);
    copy_access<T, Load::kIsAligned16>(sTile + r * Config::kRowStride + column, source, is_valid);
  }
}

// Stores four consecutive float32 to a row in global memory; drops columns from num_columns on. Scope: thread.
template <typename T, bool kIsAligned16>
FT_DEVICE void store_four(T* row, i32 column, i32 num_columns, float4 x) {
  T values[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)};
  if constexpr (kIsAligned16) {
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
