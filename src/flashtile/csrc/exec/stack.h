// The arguments of an op as torch's stable ABI hands them to a kernel: one 64-bit value each, which the kernel owns.
// They are borrowed here until the call is known to be handled; then they are released. A call that is not handled
// passes them on untouched.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "device/core/types.cuh"

namespace flashtile {

// Indices into the schema of flashtile::forward.
namespace argument {
enum Index : i32 {
#define FT_ARGUMENT(index, type, schema) index,
#include "arguments.inc"
  kCount
};

// The arguments of the `dense` overloads, in the order of their schemas; `mode` comes behind them.
constexpr Index kDense[] = {kQ, kK, kV, kScale};
constexpr i32 kMode = sizeof(kDense) / sizeof(kDense[0]), kNumDense = kMode + 1;
// Those of `forward.cache`, likewise.
constexpr Index kCache[] = {
#define FT_CACHE(index, words) index,
#include "arguments.inc"
};
constexpr i32 kCacheMode = sizeof(kCache) / sizeof(kCache[0]);

// A bit field of `mode`.
struct DenseField {
  i32 shift = 0;
  i64 mask = 0;               // 0: `mode` does not hold the argument
  const char* texts[4] = {};  // of its values
};

template <Index kIndex>
constexpr DenseField kDenseField = {};
#define FT_DENSE(index, words, shift, mask, ...) \
  template <>                                    \
  constexpr DenseField kDenseField<index> = {shift, mask, {__VA_ARGS__}};
#include "arguments.inc"

constexpr i64 kModeMask = 0
#define FT_DENSE(index, words, shift, mask, ...) | (i64{mask} << shift)
#include "arguments.inc"
    ;

template <Index kIndex>
struct TypeAt;
#define FT_ARGUMENT(index, type, schema) \
  template <>                            \
  struct TypeAt<index> {                 \
    using Type = type;                   \
  };
#include "arguments.inc"
}  // namespace argument

template <typename T>
struct Optional : std::false_type {};
template <typename T>
struct Optional<std::optional<T>> : std::true_type {
  using Inner = T;
};

// What an argument of type T holds, without taking it. Texts and tensors stay the stack's.
template <typename T>
T borrow(StableIValue value) {
  if constexpr (Optional<T>::value) {
    auto* inner = torch::stable::detail::to<StableIValue*>(value);
    return inner == nullptr ? T() : T(borrow<typename Optional<T>::Inner>(*inner));
  } else if constexpr (std::is_same_v<T, const char*>) {
    const char* text = nullptr;
    return torch_string_c_str(torch::stable::detail::to<StringHandle>(value), &text) == 0 ? text : "";
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

// Frees what an argument of type T owns.
template <typename T>
void release(StableIValue value) {
  if constexpr (Optional<T>::value) {
    auto* inner = torch::stable::detail::to<StableIValue*>(value);
    if (inner != nullptr) release<typename Optional<T>::Inner>(*inner);
    delete inner;  // torch made it by `new`
  } else if constexpr (std::is_same_v<T, const char*>) {
    torch_delete_string(torch::stable::detail::to<StringHandle>(value));
  } else if constexpr (std::is_same_v<T, AtenTensorHandle>) {
    aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(value));
  } else if constexpr (std::is_same_v<T, StableListHandle>) {
    torch_delete_list(torch::stable::detail::to<StableListHandle>(value));
  }
}

// The same argument once more, with what it owns.
template <typename T>
StableIValue duplicate(StableIValue value) {
  bool is_made = true;
  if constexpr (Optional<T>::value) {
    auto* inner = torch::stable::detail::to<StableIValue*>(value);
    if (inner == nullptr) return value;
    return torch::stable::detail::from(new StableIValue(duplicate<typename Optional<T>::Inner>(*inner)));
  } else if constexpr (std::is_same_v<T, const char*>) {
    const char* text = borrow<const char*>(value);
    StringHandle made = nullptr;
    is_made = torch_new_string_handle(text, std::strlen(text), &made) == 0;
    value = torch::stable::detail::from(made);
  } else if constexpr (std::is_same_v<T, AtenTensorHandle>) {
    AtenTensorHandle made = nullptr;
    is_made = aoti_torch_new_tensor_handle(torch::stable::detail::to<AtenTensorHandle>(value), &made) == 0;
    value = torch::stable::detail::from(made);
  } else if constexpr (std::is_same_v<T, StableListHandle>) {  // of numbers
    auto list = torch::stable::detail::to<StableListHandle>(value);
    StableListHandle made = nullptr;
    size_t size = 0;
    is_made = torch_list_size(list, &size) == 0 && torch_new_list_reserve_size(size, &made) == 0;
    for (size_t index = 0; is_made && index < size; ++index) {
      StableIValue element = 0;
      is_made = torch_list_get_item(list, index, &element) == 0 && torch_list_push_back(made, element) == 0;
    }
    value = torch::stable::detail::from(made);
  }
  if (!is_made) throw std::runtime_error("flashtile: torch does not copy an argument");
  return value;
}

// The arguments of a kernel while it runs, freed by a function at the end of its scope or before.
template <typename Free>
class Owner {
 public:
  explicit Owner(Free free) : free_(std::move(free)) {}
  ~Owner() {
    if (is_owner_) free_();
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  void free() {
    is_owner_ = false;
    free_();
  }
  // Somebody else frees them.
  void pass_on() { is_owner_ = false; }

 private:
  Free free_;
  bool is_owner_ = true;
};

enum class Overload : u8 { kFull, kDense, kCache };

// The arguments of flashtile::forward among those of an op; the other overloads have some of them.
template <Overload kOverload>
class Arguments {
 public:
  explicit Arguments(const StableIValue* first) {
    if constexpr (kOverload == Overload::kFull) {
      for (i32 index = 0; index < argument::kCount; ++index) values_[index] = first + index;
    } else {
      constexpr bool kIsDense = kOverload == Overload::kDense;
      constexpr i32 kMode = kIsDense ? argument::kMode : argument::kCacheMode;
      constexpr const argument::Index* kIndices = kIsDense ? argument::kDense : argument::kCache;
      for (i32 index = 0; index < kMode; ++index) values_[kIndices[index]] = first + index;
      mode_ = borrow<i64>(first[kMode]);
    }
  }

  // No bit of `mode` is outside of its fields.
  bool is_valid() const { return (mode_ & ~argument::kModeMask) == 0; }

  // False, and `to` stays its default, where the overload has no such argument or it is None.
  template <argument::Index kIndex, typename T>
  bool read(T& to) const {
    using Type = typename argument::TypeAt<kIndex>::Type;
    if constexpr (constexpr auto& kField = argument::kDenseField<kIndex>;
                  kOverload != Overload::kFull && kField.mask != 0) {
      i64 value = mode_ >> kField.shift & kField.mask;
      if constexpr (std::is_same_v<T, const char*>) {
        if (kField.texts[value] == nullptr) return false;
        to = kField.texts[value];
      } else {
        to = value != 0;
      }
      return true;
    } else if (values_[kIndex] == nullptr) {
      return false;
    } else if constexpr (Optional<Type>::value) {
      static_assert(std::is_same_v<typename Optional<Type>::Inner, T>);
      Type found = borrow<Type>(*values_[kIndex]);
      if (found) to = *found;
      return found.has_value();
    } else {
      static_assert(std::is_same_v<Type, T>);
      to = borrow<Type>(*values_[kIndex]);
      return true;
    }
  }

  // A tensor by its index; null where there is none.
  AtenTensorHandle tensor(i32 index) const {
    if (values_[index] == nullptr) return nullptr;
    if (index < kNumRequiredTensors) return borrow<AtenTensorHandle>(*values_[index]);
    return borrow<std::optional<AtenTensorHandle>>(*values_[index]).value_or(nullptr);
  }

  // Puts duplicates of the arguments where they stand in a copy of the stack.
  void duplicate_all(const StableIValue* stack, StableIValue* copy) const {
#define FT_ARGUMENT(index, type, schema)   \
  if (values_[argument::index] != nullptr) \
    copy[values_[argument::index] - stack] = duplicate<type>(*values_[argument::index]);
#include "arguments.inc"
  }

  void release_all() const {
#define FT_ARGUMENT(index, type, schema) \
  if (values_[argument::index] != nullptr) release<type>(*values_[argument::index]);
#include "arguments.inc"
  }

 private:
  static constexpr i32 kNumRequiredTensors = 3;
  static_assert(std::is_same_v<argument::TypeAt<argument::kV>::Type, AtenTensorHandle>);
  static_assert(std::is_same_v<argument::TypeAt<argument::kBias>::Type, std::optional<AtenTensorHandle>>);

  const StableIValue* values_[argument::kCount] = {};
  i64 mode_ = 0;  // of the overloads that have one
};

}  // namespace flashtile
