#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "../cpu/run.h"
#include "kept.h"

namespace flashtile {
namespace {

constexpr i64 kWorkspaceAlignment = 256;
constexpr u64 kAnyStride = 16;                        // bytes, along an axis of length 1
constexpr int kMapSwizzle128 = 3;                     // CUtensorMapSwizzle
constexpr u32 kBoxBytes = 128;                        // of a row
constexpr LaunchAttribute kStartsEarly{6, 0, 1, {}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr i32 kMaxBlocks = 32;                        // of a persistent grid, for each multiprocessor
constexpr i32 kMaxCluster = 16, kMaxThreads = 1024;   // blocks of a cluster; threads of a block
constexpr i32 kMaxInt = std::numeric_limits<i32>::max();
// The first values are not the plan's own
constexpr i32 kNumSplits = 0, kNumMultiprocessors = 1, kFirstValue = 2;

// Reads the numbers of a plan. Each function throws std::out_of_range where the next number does not fit.
class Reader {
 public:
  Reader(const i64* numbers, i64 count) : first_(numbers), next_(numbers), end_(numbers + count) {}
  i64 number() {
    if (next_ == end_) throw std::out_of_range("a plan ends too early");
    return *next_++;
  }
  // From 0 to limit - 1.
  i32 index(i32 limit) {
    i64 place = next_ - first_, found = number();
    if (found < 0 || found >= limit)
      throw refusal("number " + std::to_string(place) + " of a plan", found, 0, limit - 1);
    return static_cast<i32>(found);
  }
  // From 1 to most; `name` is for the message.
  i32 positive(const char* name, i32 most = kMaxInt) {
    i64 found = number();
    if (found < 1 || found > most) throw refusal(name, found, 1, most);
    return static_cast<i32>(found);
  }
  Rule rule() {
    auto kind = static_cast<RuleKind>(index(static_cast<i32>(RuleKind::kScalar) + 1));
    i32 limit = kMaxTensors;
    bool is_of_value = kind >= RuleKind::kShare && kind <= RuleKind::kValue;
    if (is_of_value || kind == RuleKind::kWorkspace) limit = kMaxValues;
    if (kind == RuleKind::kScalar) limit = kMaxScalars;
    i32 place = index(limit);
    i32 axis = -1 - index(kMaxDim);
    bool is_more_value = kind >= RuleKind::kBroadcastSize && kind <= RuleKind::kLeast;
    i64 more = is_more_value                 ? index(kMaxValues)
               : kind == RuleKind::kQuotient ? positive("divisor of a plan's value")
                                             : number();
    return {kind, place, axis, more};
  }
  bool is_done() const { return next_ == end_; }

 private:
  static std::out_of_range refusal(const std::string& name, i64 got, i32 least, i32 most) {
    return std::out_of_range(name + ": got " + std::to_string(got) + "; accepted: " + std::to_string(least) + " to " +
                             std::to_string(most));
  }

  const i64 *first_, *next_, *end_;
};

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

bool multiply(i64& product, i64 factor) { return !__builtin_mul_overflow(product, factor, &product); }

// A rule that is neither a pointer nor a scalar.
i64 whole(const Rule& rule, const Call& call, const i64* values) {
  const View& tensor = call.tensors[rule.index < kMaxTensors ? rule.index : 0];
  switch (rule.kind) {
    case RuleKind::kStride: return tensor.stride(rule.axis);
    case RuleKind::kBroadcastStride: return tensor.size(rule.axis) == 1 ? 0 : tensor.stride(rule.axis);
    case RuleKind::kSize: return tensor.size(rule.axis) + rule.more;
    case RuleKind::kElements: return tensor.numel();
    case RuleKind::kBroadcastSize: return tensor.size(rule.axis) == 1 ? 1 : values[rule.more];
    case RuleKind::kDistinctSize:
      return tensor.size(rule.axis) == 1 || tensor.stride(rule.axis) == 0 ? 1 : values[rule.more];
    case RuleKind::kBounded: {
      i64 size = tensor.size(rule.axis), value = values[rule.more];
      return size == 1 || size > value ? value : size;
    }
    case RuleKind::kShare: return divide_up(values[rule.index], std::max<i64>(1, values[rule.more]));
    case RuleKind::kLeast: return std::min(values[rule.index], values[rule.more]);
    case RuleKind::kQuotient: return divide_up(values[rule.index], rule.more);
    case RuleKind::kValue: return values[rule.index];
    case RuleKind::kScalar: return static_cast<i64>(call.scalars[rule.index]);
    default: return 0;
  }
}

template <typename T>
bool put(u8* place, i64 number) {
  if (number < static_cast<i64>(std::numeric_limits<T>::min()) ||
      number > static_cast<i64>(std::numeric_limits<T>::max()))
    return false;
  T value = static_cast<T>(number);
  std::memcpy(place, &value, sizeof(T));
  return true;
}

bool put_float(u8* place, double number) {
  if (std::isfinite(number) && std::fabs(number) > std::numeric_limits<float>::max()) return false;
  float value = static_cast<float>(number);
  std::memcpy(place, &value, sizeof(value));
  return true;
}

bool is_fitting(const Operand& operand, const View& tensor) {
  if (operand.dtype != Dtype::kNone && operand.dtype != tensor.dtype) return false;
  if (operand.layout == Layout::kContiguous) return tensor.is_contiguous();
  return operand.layout == Layout::kAny || operand.layout == Layout::kPairs || tensor.size(-1) <= 1 ||
         tensor.stride(-1) == 1;
}

// As executor.py: has_pairs
bool has_pairs(const View& tensor) {
  if (size_of(tensor.dtype) >= 4) return true;
  for (i32 axis : {-1, -2}) {
    if (tensor.size(axis) == 1 || tensor.stride(axis) == 0) return true;
  }
  i64 bytes = reinterpret_cast<i64>(tensor.data), extent = 1, distinct = 1;
  for (i32 axis = -tensor.dim; axis < 0; ++axis) {
    if (tensor.stride(axis) == 0) continue;
    extent += (tensor.size(axis) - 1) * tensor.stride(axis);
    if (!multiply(distinct, tensor.size(axis))) return true;
  }
  if (extent < distinct) return true;
  for (i32 axis = -kMaxDim; axis < -1; ++axis) {
    if (tensor.size(axis) > 1) bytes |= tensor.stride(axis) * size_of(tensor.dtype);
  }
  return tensor.stride(-1) == 1 && bytes % 4 == 0;
}

// As runtime/driver.py: _MAP_TYPES, of CUtensorMapDataType; -1 where there is no map. TMA moves float8 as bytes.
int map_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return 6;
    case Dtype::kFloat32: return 7;
    case Dtype::kBfloat16: return 9;
    case Dtype::kFloat8E4m3fn:
    case Dtype::kFloat8E5m2: return 0;
    default: return -1;
  }
}

// TMA can read the tensor: its last axis is contiguous, and rows begin on 16-byte boundaries.
bool is_mappable(const View& tensor) {
  i64 bytes = reinterpret_cast<i64>(tensor.data);
  for (i32 axis = 2; axis <= kMaxDim; ++axis) {
    if (tensor.size(-axis) > 1) bytes |= tensor.stride(-axis) * size_of(tensor.dtype);
  }
  return tensor.size(-1) > 1 && tensor.stride(-1) == 1 && bytes % 16 == 0;
}

}  // namespace

Plan::Plan(const i64* numbers, i64 count, std::string image, const std::string& names) : image_(std::move(image)) {
  if (image_.size() > kMaxImageBytes) throw std::out_of_range("a plan has more parameters than a launch takes");
  Reader in(numbers, count);
  num_multiprocessors_ = in.number();
  split_rows_ = in.index(kMaxInt);
  split_columns_ = split_rows_ == 0 ? in.number() : in.positive("keys of a plan's split");
  split_blocks_ = in.number();
  expected_q_ = in.index(kMaxValues), seqlen_k_ = in.index(kMaxValues), heads_ = in.index(kMaxValues),
  batch_ = in.index(kMaxValues);
  operands_.resize(in.index(kMaxTensors + 1));
  for (Operand& operand : operands_) {
    operand.tensor = in.index(kMaxTensors);
    operand.layout = static_cast<Layout>(in.index(5));
    operand.dtype = static_cast<Dtype>(in.index(static_cast<i32>(Dtype::kCount)));
    operand.like = in.index(kMaxTensors + 1) - 1;
    operand.is_written = in.index(2) != 0;
  }
  values_.resize(in.index(kMaxValues - kFirstValue + 1));
  for (Product& value : values_) {
    value.rules.resize(in.index(8));
    for (Rule& rule : value.rules) rule = in.rule();
  }
  workspaces_.resize(in.index(kMaxValues));
  for (Workspace& workspace : workspaces_) {
    workspace.element_bytes = in.number();
    workspace.is_zeroed = in.index(2) != 0;
    workspace.is_for_splits = in.index(2) != 0;
    workspace.is_kept = in.index(2) != 0;
    workspace.num_padding = in.number();
    for (std::vector<i32>* values : {&workspace.values, &workspace.padding}) {
      values->resize(in.index(8));
      for (i32& value : *values) value = in.index(kMaxValues);
    }
    workspace.quotients.resize(in.index(8));
    for (auto& [value, divisor] : workspace.quotients)
      value = in.index(kMaxValues), divisor = in.positive("divisor of a plan's workspace");
  }
  patches_.resize(in.index(1024));
  for (Patch& patch : patches_) {
    patch.offset = in.index(static_cast<i32>(image_.size()) - 3);
    patch.code = static_cast<char>(in.index(128));
    patch.rule = in.rule();
    bool is_64_bits = patch.code == 'P' || patch.code == 'q' || patch.code == 'd';
    if (is_64_bits && patch.offset + 8 > static_cast<i32>(image_.size()))
      throw std::out_of_range("a plan patches outside of its parameters");
  }
  maps_.resize(in.index(8));
  for (MapPatch& map : maps_) {
    map.offset = in.index(static_cast<i32>(image_.size()) - kTensorMapBytes + 1);
    map.tensor = in.index(kMaxTensors);
    for (i32& axis : map.axes) axis = -1 - in.index(kMaxDim);
    map.box_rows = static_cast<u32>(in.number()), map.box_heads = static_cast<u32>(in.number());
    map.is_optional = in.index(2) != 0;
    map.is_paged = in.index(2) != 0;
    i64 l2_bytes = in.number();
    map.promotion = l2_bytes == 256 ? 3 : static_cast<int>(l2_bytes / 64);
  }
  steps_.resize(in.index(32));
  size_t start = 0;
  for (Step& step : steps_) {
    step.kind = static_cast<StepKind>(in.index(3));
    if (step.kind == StepKind::kMemset) step.tensor = in.index(kMaxTensors);
    if (step.kind == StepKind::kEngine) {
      step.is_backward = in.index(2) != 0;
      for (int& element : step.elements) element = in.index(4);
    }
    if (step.kind != StepKind::kKernel) continue;
    step.kernel = nullptr;
    step.grid.resize(in.index(8));
    for (Factor& factor : step.grid) {
      factor.value = in.index(kMaxValues), factor.divisor = in.positive("divisor of a plan's grid");
      factor.plus = in.index(kMaxValues + 1) - 1;
    }
    step.num_threads = static_cast<unsigned>(in.positive("threads of a plan's step", kMaxThreads));
    step.shared_bytes = static_cast<unsigned>(in.number());
    step.is_for_splits = in.index(2) != 0;
    step.max_blocks = in.index(kMaxBlocks + 1);
    step.cluster = in.positive("cluster of a plan's step", kMaxCluster);
    step.starts_early = in.index(2) != 0;
    size_t end = names.find('\n', start);
    step.name = names.substr(start, end - start);
    start = end + 1;
  }
  if (!in.is_done()) throw std::out_of_range("a plan does not end where it should");
}

bool Plan::find_needed(const Call& call, std::vector<i32>& kernels, i64& kept_bytes) const {
  i64 values[kMaxValues];
  if (!takes(call) || !evaluate(call, values)) return false;
  i32 place = 0;
  for (const Step& step : steps_) {
    if (step.kind != StepKind::kKernel) continue;
    i64 blocks = num_blocks(step, values);
    if (blocks < 0 || blocks > kMaxInt) return false;
    if (blocks > 0) kernels.push_back(place);
    ++place;
  }
  kept_bytes = 0;
  for (const Workspace& workspace : workspaces_) {
    if (workspace.is_kept && !num_bytes(workspace, values, kept_bytes)) return false;
  }
  return true;
}

bool Plan::is_complete(const Call& call) const {
  i64 values[kMaxValues];
  if (!takes(call) || !evaluate(call, values)) return false;
  for (const Step& step : steps_) {
    i64 blocks = step.kind == StepKind::kKernel ? num_blocks(step, values) : 0;
    if (blocks < 0 || blocks > kMaxInt || (blocks > 0 && step.kernel == nullptr)) return false;
  }
  return std::none_of(workspaces_.begin(), workspaces_.end(), [](const Workspace& one) { return one.is_kept; });
}

void Plan::set_kernel(i32 place, void* kernel, std::string name) {
  for (Step& step : steps_) {
    if (step.kind != StepKind::kKernel || place-- != 0) continue;
    step.kernel = kernel, step.name = std::move(name);
    return;
  }
  throw std::out_of_range("a plan has no such kernel");
}

bool Plan::takes(const Call& call) const {
  for (const Operand& operand : operands_) {
    const View& tensor = call.tensors[operand.tensor];
    if (operand.like >= 0 || is_fitting(operand, tensor)) continue;
    if (!tensor.is_given() || (operand.is_written && operand.layout != Layout::kContiguous)) return false;
  }
  return true;
}

bool Plan::stage(Call& call, Filled& filled) const {
  for (const Operand& operand : operands_) {
    View& view = call.tensors[operand.tensor];
    if (operand.like >= 0) continue;
    if (!is_fitting(operand, view)) {
      Staged& staged = filled.staged.emplace_back(Staged{operand.tensor, operand.is_written, view, Owned()});
      if (operand.dtype != Dtype::kNone) view.dtype = operand.dtype;
      view.make_contiguous();
      if (!staged.memory.allocate(view)) return call.note_no_memory();
      continue;
    }
    bool is_odd = operand.layout == Layout::kAligned ? !view.is_aligned16()
                                                     : operand.layout == Layout::kPairs && !has_pairs(view);
    if (!is_odd) continue;
    Staged& staged = filled.staged.emplace_back(Staged{operand.tensor, operand.is_written, view, Owned()});
    if (!staged.memory.allocate_aligned(view, operand.is_written)) return call.note_no_memory();
  }
  return true;
}

bool Plan::evaluate(const Call& call, i64* values) const {
  values[kNumSplits] = 1, values[kNumMultiprocessors] = num_multiprocessors_;
  i64* next = values + kFirstValue;
  for (const Product& value : values_) {
    i64 product = 1;
    for (const Rule& rule : value.rules) {
      if (!multiply(product, whole(rule, call, values))) return false;
    }
    *next++ = product;
  }
  if (split_rows_ != 0) {
    // Left to us: as many as give every multiprocessor its blocks, each with a tile of keys at least
    i64 tiles = divide_up(values[seqlen_k_], split_columns_), blocks = divide_up(values[expected_q_], split_rows_);
    if (!multiply(blocks, values[heads_]) || !multiply(blocks, values[batch_])) return false;
    i64 wanted =
        call.asked_splits != 0 ? call.asked_splits : split_blocks_ * num_multiprocessors_ / (blocks > 1 ? blocks : 1);
    i64 splits = wanted < tiles ? wanted : tiles;
    values[kNumSplits] = splits > 1 ? splits : 1;
  }
  return true;
}

// Its size. False where the number overflows.
bool Plan::num_bytes(const Workspace& workspace, const i64* values, i64& bytes) const {
  i64 padding = workspace.element_bytes;
  bytes = workspace.element_bytes;
  for (i32 value : workspace.values) {
    if (!multiply(bytes, values[value])) return false;
  }
  for (auto [value, divisor] : workspace.quotients) {
    if (!multiply(bytes, divide_up(values[value], divisor))) return false;
  }
  if (!multiply(padding, workspace.num_padding)) return false;
  for (i32 value : workspace.padding) {
    if (!multiply(padding, values[value])) return false;
  }
  return !__builtin_add_overflow(bytes, padding, &bytes);
}

bool Plan::allocate(Call& call, Owned* owned, const Driver& driver, Filled& filled) const {
  for (const Operand& operand : operands_) {
    if (operand.like < 0) continue;
    View& view = call.tensors[operand.tensor];
    Owned& memory = owned[operand.tensor];
    bool is_aligned = operand.layout == Layout::kAligned;
    if (is_aligned) view = call.tensors[operand.like];
    if (!is_aligned) lay_out_like(call.tensors[operand.like], view);
    if (!(is_aligned ? memory.allocate_aligned(view, true) : memory.allocate(view))) return call.note_no_memory();
  }
  i64 end = 0;
  auto place_bytes = [&](i64 bytes) {
    i64 start = end;
    end += divide_up(bytes, kWorkspaceAlignment) * kWorkspaceAlignment;
    return start;
  };
  View* unwanted = call.unwanted < 0 ? nullptr : &call.tensors[call.unwanted];
  if (unwanted != nullptr) place_bytes(unwanted->numel() * size_of(unwanted->dtype));
  i64 offsets[kMaxValues];  // -1: not in the scratch memory
  for (size_t place = 0; place < workspaces_.size(); ++place) {
    const Workspace& workspace = workspaces_[place];
    filled.workspaces[place] = nullptr, offsets[place] = -1;
    if (workspace.is_for_splits && filled.values[kNumSplits] == 1) continue;
    i64& bytes = filled.sizes[place];
    if (!num_bytes(workspace, filled.values, bytes)) return false;
    if (workspace.is_kept) {
      filled.workspaces[place] = kept_zeros().find(driver, call.device.index, call.stream, bytes);
      if (filled.workspaces[place] == nullptr) return false;
    } else {
      offsets[place] = place_bytes(bytes);
    }
  }
  if (end == 0) return true;
  auto* base = static_cast<u8*>(filled.scratch.allocate(end, call.device));
  if (base == nullptr) return call.note_no_memory();
  if (unwanted != nullptr) unwanted->data = base;
  for (size_t place = 0; place < workspaces_.size(); ++place) {
    if (offsets[place] >= 0) filled.workspaces[place] = base + offsets[place];
  }
  return true;
}

bool Plan::fill(const Call& call, Filled& filled) const {
  std::memcpy(filled.image, image_.data(), image_.size());
  for (const Patch& patch : patches_) {
    u8* place = filled.image + patch.offset;
    const Rule& rule = patch.rule;
    if (patch.code == 'P') {
      // A workspace that is not needed stays null
      void* address = call.tensors[rule.index].data;
      if (rule.kind == RuleKind::kWorkspace) address = filled.workspaces[rule.index];
      std::memcpy(place, &address, sizeof(address));
      continue;
    }
    bool is_in_range = true;
    if (patch.code == 'd') std::memcpy(place, &call.scalars[rule.index], sizeof(double));
    if (patch.code == 'f') is_in_range = put_float(place, call.scalars[rule.index]);
    if (patch.code == 'q') is_in_range = put<int64_t>(place, whole(rule, call, filled.values));
    if (patch.code == 'i') is_in_range = put<i32>(place, whole(rule, call, filled.values));
    if (patch.code == 'I') is_in_range = put<u32>(place, whole(rule, call, filled.values));
    if (!is_in_range) return false;
  }
  return true;
}

bool Plan::encode_maps(const Call& call, Filled& filled, const Driver& driver, Failure& failure) const {
  for (const MapPatch& map : maps_) {
    const View& tensor = call.tensors[map.tensor];
    u64 sizes[kMaxDim] = {static_cast<u64>(tensor.size(-1)), 1, 1, 1},
        strides[kMaxDim - 1] = {kAnyStride, kAnyStride, kAnyStride};
    auto element = static_cast<u32>(size_of(tensor.dtype));
    u32 box[kMaxDim] = {kBoxBytes / element, map.box_rows, map.box_heads, 1}, steps[kMaxDim] = {1, 1, 1, 1};
    if (map.is_optional && !is_mappable(tensor)) continue;
    for (i32 place = 0; place < 3; ++place) {
      // An axis of stride 0 is one of length 1: kernels ask for its first element
      i64 size = tensor.size(map.axes[place]), stride = tensor.stride(map.axes[place]);
      if (stride <= 0 || size <= 1) continue;
      sizes[place + 1] = size;
      strides[place] = stride * size_of(tensor.dtype);
    }
    u32 bits = map.box_rows | static_cast<u32>(tensor.size(map.axes[0]));
    if (map.is_paged) box[1] = bits & -bits;
    int type = map_type(tensor.dtype);
    if (type < 0) {
      failure = {-1, "cuTensorMapEncodeTiled of a tensor whose dtype has no map"};
      return false;
    }
    failure.status = driver.in_context(call.device.index, [&] {
      return driver.cuTensorMapEncodeTiled(filled.image + map.offset, type, kMaxDim, tensor.data, sizes, strides, box,
                                           steps, 0, kMapSwizzle128, map.promotion, 0);
    });
    if (failure.status != 0) {
      failure.text = "cuTensorMapEncodeTiled";
      return false;
    }
  }
  return true;
}

i64 Plan::num_blocks(const Step& step, const i64* values) const {
  if (step.is_for_splits && values[kNumSplits] == 1) return 0;
  i64 blocks = step.cluster, limit = step.max_blocks * num_multiprocessors_;
  for (const Factor& factor : step.grid) {
    i64 more = factor.plus < 0 ? 0 : values[factor.plus],
        number = divide_up(values[factor.value], factor.divisor) + more;
    if (number == 0) return 0;
    bool is_counted = multiply(blocks, number);
    if (step.max_blocks != 0 && (!is_counted || blocks > limit))
      blocks = limit;
    else if (!is_counted)
      return -1;
  }
  return blocks;
}

bool Plan::zero_workspaces(const Call& call, const Filled& filled, const Driver& driver, Failure& failure) const {
  for (size_t index = 0; index < workspaces_.size(); ++index) {
    u8* start = filled.workspaces[index];
    if (!workspaces_[index].is_zeroed || start == nullptr || filled.sizes[index] == 0) continue;
    if (call.device.type == aoti_torch_device_type_cpu()) {
      std::memset(start, 0, filled.sizes[index]);
      continue;
    }
    failure.status = driver.in_context(call.device.index, [&] {
      return driver.cuMemsetD8Async(reinterpret_cast<u64>(start), 0, filled.sizes[index], call.stream);
    });
    if (failure.status != 0) {
      failure.text = "cuMemsetD8Async of a workspace";
      return false;
    }
  }
  return true;
}

Outcome Plan::make_ready(Call& call, Owned* owned, const Driver& driver, Filled& filled, Failure& failure) const {
  if (!stage(call, filled) || !evaluate(call, filled.values)) return Outcome::kFallback;
  for (const Step& step : steps_) {
    i64 blocks = step.kind == StepKind::kKernel ? num_blocks(step, filled.values) : 0;
    if (blocks < 0 || blocks > kMaxInt) return Outcome::kFallback;
    if (blocks > 0 && step.kernel == nullptr) return Outcome::kIncomplete;
  }
  if (!allocate(call, owned, driver, filled) || !fill(call, filled)) return Outcome::kFallback;
  return encode_maps(call, filled, driver, failure) ? Outcome::kDone : Outcome::kFailed;
}

Outcome Plan::launch(const Call& call, Owned* owned, const Driver& driver, Filled& filled, Failure& failure) const {
  if (!zero_workspaces(call, filled, driver, failure)) return Outcome::kFailed;
  auto copy_staged = [&](bool is_written) {
    for (const Staged& staged : filled.staged) {
      const View &copy = call.tensors[staged.tensor], &original = staged.original;
      if (staged.is_written != is_written) continue;
      if (!(is_written ? copy_elements(copy, original) : copy_elements(original, copy))) {
        failure = {-1, "a copy of a tensor that kernels cannot use where it is"};
        return false;
      }
    }
    return true;
  };
  if (!copy_staged(false)) return Outcome::kFailed;
  for (const Step& step : steps_) {
    if (step.kind == StepKind::kMemset) {
      Owned* written = &owned[step.tensor];
      for (Staged& staged : filled.staged) {
        if (staged.tensor == step.tensor) written = &staged.memory;
      }
      if (!written->zero()) {
        failure = {-1, "zeros for a gradient"};
        return Outcome::kFailed;
      }
      continue;
    }
    if (step.kind == StepKind::kEngine) {
      if (const char* error = run_best(step.is_backward, filled.image, call.spans, step.elements)) {
        failure = {-1, error};
        return Outcome::kFailed;
      }
      continue;
    }
    auto blocks = static_cast<unsigned>(num_blocks(step, filled.values));
    if (blocks == 0) continue;
    void* params[] = {filled.image};
    failure.status = driver.in_context(call.device.index, [&] {
      if (step.starts_early) {
        LaunchConfig config{{blocks, 1, 1}, {step.num_threads, 1, 1}, step.shared_bytes, call.stream, &kStartsEarly, 1};
        return driver.cuLaunchKernelEx(&config, step.kernel, params, nullptr);
      }
      return driver.cuLaunchKernel(step.kernel, blocks, 1, 1, step.num_threads, 1, 1, step.shared_bytes, call.stream,
                                   params, nullptr);
    });
    if (failure.status != 0) {
      failure.text = (step.starts_early ? "cuLaunchKernelEx of " : "cuLaunchKernel of ") + step.name + ", grid (" +
                     std::to_string(blocks) + ", 1, 1), block (" + std::to_string(step.num_threads) + ", 1, 1), " +
                     std::to_string(step.shared_bytes) + " bytes shared";
      return Outcome::kFailed;
    }
  }
  return copy_staged(true) ? Outcome::kDone : Outcome::kFailed;
}

void lay_out_like(const View& from, View& to) {
  to = from;
  to.data = nullptr;
  // Axes from the fastest; an axis of stride 0 keeps its place among its neighbours
  i32 order[kMaxDim], count = from.dim;
  for (i32 place = 0; place < count; ++place) order[place] = kMaxDim - 1 - place;
  auto is_slower = [&](i32 a, i32 b) {
    i64 stride_a = from.strides[a], stride_b = from.strides[b];
    if (stride_a == 0 || stride_b == 0) return 0;
    if (stride_a != stride_b) return stride_a > stride_b ? 1 : -1;
    return from.sizes[a] > from.sizes[b] ? 1 : 0;
  };
  for (i32 end = 1; end < count; ++end) {
    i32 moving = end;
    for (i32 place = end - 1; place >= 0; --place) {
      i32 verdict = is_slower(order[place], order[moving]);
      if (verdict < 0) break;
      if (verdict > 0) std::swap(order[place], order[moving]), moving = place;
    }
  }
  i64 stride = 1;
  i64 dense[kMaxDim];
  for (i32 place = 0; place < count; ++place) {
    dense[order[place]] = stride;
    if (from.sizes[order[place]] > 1) stride *= from.sizes[order[place]];
  }
  // Memory without gaps is taken as it is, odd strides along axes of length 1 and all
  i64 covered = 1;
  for (bool is_found = true; is_found;) {
    is_found = false;
    for (i32 axis = kMaxDim - count; axis < kMaxDim && !is_found; ++axis) {
      is_found = from.sizes[axis] > 1 && from.strides[axis] == covered;
      if (is_found) covered *= from.sizes[axis];
    }
  }
  if (covered == from.numel()) return;
  for (i32 axis = kMaxDim - count; axis < kMaxDim; ++axis) to.strides[axis] = dense[axis];
}

}  // namespace flashtile
