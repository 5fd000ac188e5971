// Integer types, the two 16-bit float formats, and FT_DEVICE. Includes nothing, so NVRTC needs no search path.
#pragma once

#define FT_DEVICE __device__ __forceinline__

namespace flashtile {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Storage formats only: arithmetic is float32.
struct half_t {
  u16 bits;
};
struct bf16_t {
  u16 bits;
};

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// A if kIsFirst, else B.
template <bool kIsFirst, typename A, typename B>
struct Select {
  using Type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
  using Type = B;
};

// A compile-time bool passed as a function argument.
template <bool kValue_>
struct Constant {
  static constexpr bool kValue = kValue_;
};

}  // namespace flashtile
