// The kernels of the ops, for CPU and CUDA tensors alike. torch's dispatcher calls them, below autograd and whatever
// else intercepts a call, with the GIL released.
//
// A kernel reads its arguments, looks its plan up and launches. A call that it cannot handle, or has no plan for, falls
// back: the op of the same arguments whose name ends in _fallback is a Python kernel (ops.py), which may register a
// plan for the next call of the kind.
#include "ops.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "executor.h"
#include "new_rows.h"

namespace flashtile {
namespace {

// The GIL, which threads of torch may want when Python has already ended: they would hang.
class Gil {
 public:
  Gil() {
    require_python();
    state_ = PyGILState_Ensure();
  }
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

  static void require_python() {
    if (!Py_IsInitialized()) throw std::runtime_error("flashtile: this call needs Python, which has ended");
  }

 private:
  PyGILState_STATE state_;
};

// Throws the text of Python's current exception, which Python keeps.
[[noreturn]] void throw_python_error() {
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  std::string text = keep(error);
  Py_XDECREF(type), Py_XDECREF(error), Py_XDECREF(trace);
  throw std::runtime_error(text);
}

// A non-empty variable of the environment, or null.
const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

bool is_text(const char* text, const char* other) { return std::strcmp(text, other) == 0; }

// The switches of torch that only Python can read. Throws what Python raises.
void read_switches(bool follows_deterministic, bool has_precision, Options& options) {
  if (!follows_deterministic && !has_precision) return;
  Gil gil;
  if (follows_deterministic) {
    PyObject* answer = PyObject_CallNoArgs(executor().is_deterministic);
    int truth = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    if (truth < 0) throw_python_error();
    options.is_deterministic = truth > 0;
  }
  if (has_precision) {
    PyObject* answer = PyObject_CallNoArgs(executor().matmul_precision);
    // "highest", "high" and "medium" differ in their lengths
    Py_ssize_t length = answer == nullptr ? -1 : PyUnicode_GetLength(answer);
    Py_XDECREF(answer);
    if (length < 0) throw_python_error();
    options.matmul_precision = static_cast<char>(length);
  }
}

template <Overload kOverload>
bool read_attention(const Arguments<kOverload>& args, Request& request) {
  static_assert(argument::kCount == 32,
                "a new argument: read it here and note it in the key (attention.cpp: prepare_attention)");
  if (!args.is_valid()) return false;
  for (i32 index = 0; index < kNumInputs; ++index) {
    AtenTensorHandle tensor = args.tensor(index);
    if (tensor != nullptr && !view_of(tensor, request.call.tensors[index])) return false;
  }
  const View& q = request.call.tensors[kQ];
  // In tests CPU tensors stand in for a GPU's: then they are not the CPU engine's
  bool is_on_cpu = q.device.type == aoti_torch_device_type_cpu();
  request.is_on_host =
      is_on_cpu && executor().is_host_open && !(executor().is_open && executor().device_type == q.device.type);
  if (request.is_on_host) {
    // Python reads the lengths of packed sequences and of backward passes, and chooses the instruction set where one
    // is named
    for (i32 index = kCuSeqlensQ; index < kNumInputs; ++index) {
      bool is_read_here = request.pass == Pass::kForward && index != kCuSeqlensQ && index != kCuSeqlensK;
      if (request.call.tensors[index].is_given() && !is_read_here) return false;
    }
    if (variable("FLASHTILE_CPU_ISA") != nullptr) return false;
  }
  Options& options = request.options;
  if (args.template read<argument::kMaxSeqlenQ>(options.max_seqlen_q) && options.max_seqlen_q < 0) return false;
  if (args.template read<argument::kMaxSeqlenK>(options.max_seqlen_k) && options.max_seqlen_k < 0) return false;
  options.has_scale = args.template read<argument::kScale>(options.scale);
  const char *causal = "none", *layout = "bhsd", *backend = nullptr;
  args.template read<argument::kCausal>(causal);
  if (is_text(causal, "bottom_right")) {
    options.causal = Causal::kBottomRight;
  } else if (is_text(causal, "top_left")) {
    options.causal = Causal::kTopLeft;
  } else if (!is_text(causal, "none")) {
    return false;
  }
  args.template read<argument::kWindowLeft>(options.window_left);
  args.template read<argument::kWindowRight>(options.window_right);
  args.template read<argument::kSoftcap>(options.softcap);
  args.template read<argument::kDropoutP>(options.dropout_p);
  args.template read<argument::kFirstQuery>(options.first_query);
  args.template read<argument::kFirstKey>(options.first_key);
  args.template read<argument::kFirstHead>(options.first_head);
  args.template read<argument::kTotalHeads>(options.total_heads);
  bool follows_deterministic = !args.template read<argument::kDeterministic>(options.is_deterministic);
  args.template read<argument::kNumSplits>(options.num_splits);
  i32 out_dtype = -1;
  if (args.template read<argument::kOutDtype>(out_dtype) && (options.out_dtype = dtype_of(out_dtype)) == Dtype::kNone)
    return false;
  args.template read<argument::kLayout>(layout);
  options.is_bshd = is_text(layout, "bshd");
  if (!options.is_bshd && !is_text(layout, "bhsd")) return false;
  options.is_named = args.template read<argument::kBackend>(backend);
  if (options.is_named && !is_text(backend, request.is_on_host ? "cpu" : "cuda")) return false;
  args.template read<argument::kNeedsGrad>(options.needs_grad);
  args.template read<argument::kNeedsBiasGrad>(options.needs_bias_grad);
  read_switches(follows_deterministic, q.dtype == Dtype::kFloat32 && !request.is_on_host, options);
  return true;
}

// Makes a device the current one.
class OnDevice {
 public:
  explicit OnDevice(Device device) {
    int32_t current = 0;
    if (device.type == aoti_torch_device_type_cpu() || aoti_torch_get_current_device_index(&current) != 0) return;
    if (current != device.index) aoti_torch_create_device_guard(device.index, &guard_);
  }
  ~OnDevice() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

struct Results {
  Owned tensors[kMaxTensors];
};

constexpr i32 kMaxStack = argument::kCount + 5;  // arguments of an op: those of a backward pass

// The plan of a call that was read, or null where Python has to handle it.
std::shared_ptr<const Plan> find_plan(Request& request) {
  bool is_open = executor().is_open && request.call.tensors[0].device.type == executor().device_type;
  if (!request.is_on_host && !is_open) return nullptr;
  if (executor().prepare(request) != Executor::State::kReady) return nullptr;
  std::shared_ptr<const Plan> plan = executor().plans.find(request.key);
  return plan != nullptr && plan->takes(request.call) ? plan : nullptr;
}

// Everything went well. False where Python has to handle the call; throws where a launch has failed.
bool is_done(Outcome outcome, const Failure& failure) {
  if (outcome == Outcome::kFailed) {
    Gil gil;
    Py_XDECREF(PyObject_CallFunction(executor().fail, "is", failure.status, failure.text.c_str()));
    if (PyErr_Occurred() != nullptr) throw_python_error();
    throw std::runtime_error(failure.text);
  }
  return outcome == Outcome::kDone;
}

// What a step of a cache does before it attends.
struct Before {
  const NewRows* rows = nullptr;  // to be written, on the CPU
  Request* append = nullptr;      // to be launched, on a GPU
  Filled* appended = nullptr;     // room for it
  const View* lengths = nullptr;  // on a GPU: all to be set to `length`
  i64 length = 0;
};

Outcome fill_lengths(const Before& before, void* stream, Failure& failure) {
  const Driver& driver = executor().driver;
  const View& lengths = *before.lengths;
  int status = driver.in_context(lengths.device.index, [&] {
    return driver.cuMemsetD32Async(reinterpret_cast<u64>(lengths.data), static_cast<u32>(before.length),
                                   static_cast<size_t>(lengths.numel()), stream);
  });
  failure = {status, "cuMemsetD32Async of the lengths"};
  return failure.status == 0 ? Outcome::kDone : Outcome::kFailed;
}

// Launches a call that was read. False, and nothing was launched, where Python has to handle it. Throws where a launch
// fails.
bool run(Request& request, Results& results, const Before& before = {}) {
  std::shared_ptr<const Plan> plan = find_plan(request), append_plan;
  if (plan == nullptr) return false;
  if (before.append != nullptr && (append_plan = find_plan(*before.append)) == nullptr) return false;
  Call& call = request.call;
  bool is_gpu = call.device.type != aoti_torch_device_type_cpu();
  if (is_gpu && !current_stream(call.device.index, &call.stream)) return false;
  OnDevice guard(call.device);
  Pass pass = request.pass;
  i32 first = pass == Pass::kForward ? kOut : kDq, count = pass == Pass::kForward    ? 2
                                                           : pass == Pass::kBackward ? kNumGrads
                                                                                     : 0;
  bool is_returned[kMaxTensors] = {};
  for (i32 index = first; index < first + count; ++index) {
    is_returned[index] = index != call.unwanted && call.tensors[index].is_given();
    if (is_returned[index] && !results.tensors[index].allocate(call.tensors[index])) return call.note_no_memory();
  }
  const Driver& driver = executor().driver;
  Failure failure;
  Filled filled;
  if (append_plan != nullptr) {
    before.append->call.stream = call.stream;
    if (!is_done(append_plan->make_ready(before.append->call, nullptr, driver, *before.appended, failure), failure))
      return false;
  }
  if (!is_done(plan->make_ready(call, results.tensors, driver, filled, failure), failure)) return false;
  if (before.rows != nullptr && !before.rows->write()) return false;
  if (before.lengths != nullptr) is_done(fill_lengths(before, call.stream, failure), failure);
  if (append_plan != nullptr) {
    is_done(append_plan->launch(before.append->call, nullptr, driver, *before.appended, failure), failure);
  }
  Outcome outcome = plan->launch(call, results.tensors, driver, filled, failure);
  // Frees outputs that kernels write and the call does not return (Operand::like)
  for (i32 index = first; index < first + count; ++index) {
    if (!is_returned[index]) results.tensors[index] = Owned();
  }
  return is_done(outcome, failure);
}

// Hands the call to Python, which takes the arguments and leaves the results on the stack, and may register a plan for
// the request. Null: it may not.
void fall_back(const char* op, const char* overload, Request* request, StableIValue* stack, uint64_t num_outputs) {
  Gil::require_python();
  ++executor().num_fallbacks;
  Raised error;
  Request* outer_request = std::exchange(fallen_back(), request);
  Raised* outer_error = std::exchange(raised(), &error);
  AOTITorchError status = torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION);
  fallen_back() = outer_request, raised() = outer_error;
  if (error.has_value()) {
    for (uint64_t index = 0; status == 0 && index < num_outputs; ++index) release<AtenTensorHandle>(stack[index]);
    throw std::runtime_error(*error);
  }
  if (status != 0) throw std::runtime_error(std::string(op) + " could not be called");
}

// Runs a call, or hands it to Python: that registers a plan and leaves the call to C++, or does everything. `read`
// fills a request, `copy` writes duplicates of the arguments. True: the results are here. False: they are on the stack,
// and the owner of the arguments has no more to do.
template <typename Held, typename Read, typename Copy>
bool serve(const char* op, const char* overload, Held& owner, StableIValue* stack, uint64_t num_outputs,
           Request& request, Results& results, Read read, Copy copy) {
  bool is_waiting = is_usable() && read(request), is_checked = is_checking();
  if (is_waiting && !is_checked && run(request, results)) return true;
  is_waiting = is_waiting && !request.call.lacks_memory;  // else Python tries, and raises torch's error
  if (is_waiting) {
    // Read anew: `run` may have put copies into the place of tensors
    request = Request{request.pass, {}, {}, {}}, results = Results();
    is_waiting = read(request);
  }
  if (is_waiting) {
    StableIValue arguments[kMaxStack];
    copy(arguments);
    fall_back(op, overload, &request, arguments, num_outputs);
    if (!request.is_planned) {
      owner.free();
      std::copy(arguments, arguments + num_outputs, stack);
      return false;
    }
    for (uint64_t index = 0; index < num_outputs; ++index) release<AtenTensorHandle>(arguments[index]);
    if (run(request, results)) return true;
  }
  results = Results();  // frees what `run` has allocated: Python allocates it anew
  owner.pass_on();
  fall_back(op, overload, nullptr, stack, num_outputs);
  return false;
}

// Makes all of the tensors ones that a stack may have: a missing one becomes an undefined tensor.
void complete(Owned* tensors, uint64_t count) {
  for (uint64_t index = 0; index < count; ++index) {
    if (tensors[index].get() == nullptr) tensors[index] = Owned::undefined();
  }
}

// Leaves complete tensors on the stack.
void hand_out(Owned* tensors, uint64_t count, StableIValue* stack) {
  for (uint64_t index = 0; index < count; ++index) stack[index] = torch::stable::detail::from(tensors[index].release());
}

// A tensor without elements, which stands for a gradient that is not needed.
void make_empty(const View& like, Owned& tensor) {
  View view;
  view.dim = 1, view.dtype = like.dtype, view.device = like.device;
  view.sizes[kMaxDim - 1] = 0, view.strides[kMaxDim - 1] = 1;
  if (!tensor.allocate(view)) throw std::runtime_error("no memory for a result");
}

// (arguments) -> (out, lse). The dense overload returns no lse unless its mode has needs_grad.
template <bool kIsDense>
void forward(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  Arguments<kIsDense ? Overload::kDense : Overload::kFull> args(stack);
  Owner owner([&] { args.release_all(); });
  Request request{Pass::kForward, {}, {}, {}};
  Results results;
  auto read = [&](Request& request) {
    bool is_read = read_attention(args, request);
    if (kIsDense && !request.options.needs_grad) request.call.unwanted = kLse;
    return is_read;
  };
  auto copy = [&](StableIValue* to) {
    std::copy(stack, stack + num_inputs, to);
    args.duplicate_all(stack, to);
  };
  if (!serve("flashtile::forward_fallback", kIsDense ? "dense" : "", owner, stack, num_outputs, request, results, read,
             copy))
    return;
  complete(&results.tensors[kOut], num_outputs);
  owner.free();
  hand_out(&results.tensors[kOut], num_outputs, stack);
}

// What forward.cache takes beside the arguments of the other overloads, where it stands on the stack.
enum CacheStack : i32 { kNewKAt = argument::kCacheMode + 1, kNewVAt, kRotaryCosAt, kRotarySinAt, kLengthAt, kFlagsAt };
// Bits of `flags`; num_splits takes the bits from kSplitsShift up.
constexpr i64 kWantsLse = 1, kInterleaved = 2, kSplitsShift = 2;

bool view_of(StableIValue value, View& view) {
  AtenTensorHandle tensor = borrow<std::optional<AtenTensorHandle>>(value).value_or(nullptr);
  return tensor == nullptr || view_of(tensor, view);
}

// Reads the lengths before the call, the new rows, and their places. `used`: the lengths with them, which seqused_k
// becomes.
bool read_new_rows(const StableIValue* stack, Request& request, NewRows& rows, std::vector<i32>& used) {
  View *tensors = request.call.tensors, &seqused = tensors[kSequsedK], angles;
  if (!view_of(stack[kNewKAt], rows.k) || !view_of(stack[kNewVAt], rows.v)) return false;
  if (!view_of(stack[kRotaryCosAt], angles) || !view_of(stack[kRotarySinAt], angles) || angles.is_given()) return false;
  i64 length = borrow<i64>(stack[kLengthAt]), batch = tensors[kQ].size(-4);
  if (tensors[kQ].dim != kMaxDim || rows.k.is_given() != rows.v.is_given()) return false;
  if (length >= 0 && length <= std::numeric_limits<i32>::max() && !seqused.is_given()) {
    used.assign(static_cast<size_t>(batch), static_cast<i32>(length));
  } else if (seqused.is_given()) {
    if (seqused.dim != 1 || seqused.dtype != Dtype::kInt32 || seqused.size(-1) != batch) return false;
    for (i64 b = 0; b < batch; ++b) used.push_back(seqused.i32_at(b));
  } else {
    return length == -1 && !rows.is_given();  // the whole cache
  }
  // The padding lies in front of the new rows
  if (const View& pad = tensors[kLeftpadK]; pad.is_given()) {
    if (pad.dim != 1 || pad.dtype != Dtype::kInt32 || pad.size(-1) != batch) return false;
    for (i64 b = 0; b < batch; ++b) {
      if (pad.i32_at(b) > used[b]) return false;
    }
  }
  if (rows.is_given()) {
    rows.k_cache = tensors[kK], rows.v_cache = tensors[kV], rows.table = tensors[kBlockTable];
    rows.is_bshd = request.options.is_bshd;
    if (!rows.place(tensors[kQ], used)) return false;
    for (i32& count : used) count += static_cast<i32>(rows.count());
  }
  seqused.data = used.data(), seqused.dim = 1, seqused.dtype = Dtype::kInt32, seqused.device = tensors[kQ].device;
  seqused.sizes[kMaxDim - 1] = batch, seqused.strides[kMaxDim - 1] = 1;
  return true;
}

// A step on the CPU.
bool run_on_host(const StableIValue* stack, Request& request, Results& results) {
  NewRows rows;
  std::vector<i32> used;
  if (!read_new_rows(stack, request, rows, used)) return false;
  Before before;
  if (rows.is_given()) before.rows = &rows;
  return run(request, results, before);
}

// Reads the append of a step on a GPU; false where there is none, or Python has to handle the call.
bool read_append(const StableIValue* stack, const Request& read, Request& append) {
  const View* tensors = read.call.tensors;
  View* given = append.call.tensors;
  constexpr std::pair<i32, i32> kNew[] = {
      {kNewK, kNewKAt}, {kNewV, kNewVAt}, {kRotaryCos, kRotaryCosAt}, {kRotarySin, kRotarySinAt}};
  for (auto [tensor, at] : kNew) {
    if (!view_of(stack[at], given[tensor])) return false;
  }
  if (!given[kNewK].is_given() || !given[kNewV].is_given()) return false;
  constexpr std::pair<i32, i32> kShared[] = {
      {kKCache, kK}, {kVCache, kV}, {kCacheSeqlens, kSequsedK}, {kTable, kBlockTable}};
  for (auto [tensor, other] : kShared) given[tensor] = tensors[other];
  const Options& options = read.options;
  append.options.is_bshd = options.is_bshd;
  append.options.is_interleaved = (borrow<i64>(stack[kFlagsAt]) & kInterleaved) != 0;
  append.options.is_ordered =
      options.causal != Causal::kNone || options.window_left != -1 || options.window_right != -1;
  const View &q = tensors[kQ], &k = given[kNewK], &v = given[kNewV];
  if (q.dim != kMaxDim || k.dim != kMaxDim || v.dim != kMaxDim || k.size(-4) != q.size(-4)) return false;
  for (const View* tensor : {&q, &k, &v, &tensors[kK], &tensors[kV]}) {
    if (tensor->numel() == 0) return false;
  }
  if (!is_safe_to_write(tensors[kK], tensors[kV], q, k, v)) return false;
  lay_out_step(append.options, q, append.call);
  return true;
}

// A step on a GPU: one kernel appends, rotates the queries and writes the lengths that the others read.
bool run_on_gpu(const StableIValue* stack, Request& request, Results& results) {
  View *tensors = request.call.tensors, &seqused = tensors[kSequsedK];
  i64 length = borrow<i64>(stack[kLengthAt]);
  bool has_new = borrow<std::optional<AtenTensorHandle>>(stack[kNewKAt]).has_value();
  bool is_plain = !has_new && !borrow<std::optional<AtenTensorHandle>>(stack[kNewVAt]) &&
                  !borrow<std::optional<AtenTensorHandle>>(stack[kRotaryCosAt]) &&
                  !borrow<std::optional<AtenTensorHandle>>(stack[kRotarySinAt]);
  bool has_length = length >= 0 && length <= std::numeric_limits<i32>::max() && !seqused.is_given();
  if (!has_length && length != -1) return false;
  if (is_plain && !has_length) return run(request, results);  // lengths of a tensor, or the whole cache
  if (tensors[kQ].dim != kMaxDim || (!is_plain && !has_length && !seqused.is_given())) return false;
  Request append{Pass::kAppend, {}, {}, {}};
  append.options.length = has_length ? length : -1;
  if (is_plain) lay_out_step(append.options, tensors[kQ], append.call);
  if (!is_plain && !read_append(stack, request, append)) return false;

  OnDevice guard(tensors[kQ].device);
  constexpr i64 kAlignment = 256;
  View &rotated = append.call.tensors[kRotatedQ], &lengths = append.call.tensors[kStepSeqused];
  i64 rotated_bytes = rotated.is_given() ? rotated.numel() * size_of(rotated.dtype) : 0;
  i64 offset = (rotated_bytes + kAlignment - 1) / kAlignment * kAlignment;
  Scratch scratch;
  auto* base = static_cast<u8*>(scratch.allocate(offset + lengths.numel() * size_of(lengths.dtype), lengths.device));
  if (base == nullptr) return false;
  lengths.data = base + offset;
  seqused = lengths;
  if (rotated.is_given()) rotated.data = base, tensors[kQ] = rotated;
  Before before;
  Filled appended;
  if (is_plain) {
    before.lengths = &lengths, before.length = length;
  } else {
    before.append = &append, before.appended = &appended;
  }
  return run(request, results, before);
}

// (q, caches, lengths, options, mode, new_k, new_v, cos, sin, length, flags) -> (out, lse): a step of a cache. Writes
// the new rows behind the first seqused_k or `length` rows of each sequence, and attends to all of them. Returns no
// tensors, and has written nothing, where Python has to handle the call.
void forward_cache(StableIValue* stack, uint64_t, uint64_t num_outputs) {
  Arguments<Overload::kCache> args(stack);
  Owner owner([&] {
    args.release_all();
    for (i32 at : {kNewKAt, kNewVAt, kRotaryCosAt, kRotarySinAt}) release<std::optional<AtenTensorHandle>>(stack[at]);
  });
  Request request{Pass::kForward, {}, {}, {}};
  i64 flags = borrow<i64>(stack[kFlagsAt]);
  if ((flags & kWantsLse) == 0) request.call.unwanted = kLse;
  Results results;
  bool is_read = is_usable() && !is_checking() && read_attention(args, request);
  request.options.num_splits = flags >> kSplitsShift;
  bool is_run = is_read && (request.is_on_host ? run_on_host : run_on_gpu)(stack, request, results);
  Results none;
  Owned* returned = &(is_run ? results : none).tensors[kOut];
  complete(returned, num_outputs);
  owner.free();
  hand_out(returned, num_outputs, stack);
}

// The tensors of a backward pass beside the arguments of its forward pass, where they stand on the stack.
struct BackwardStack {
  i32 dlse, first, out, lse, needs;  // -1: none
};
constexpr BackwardStack kBackward = {1, 2, 2 + argument::kCount, 3 + argument::kCount, 4 + argument::kCount};
constexpr BackwardStack kDenseBackward = {-1, 1, 1 + argument::kNumDense, 2 + argument::kNumDense, -1};

bool read_needs(StableIValue value, Options& options) {
  auto list = torch::stable::detail::to<StableListHandle>(value);
  size_t size = 0;
  if (torch_list_size(list, &size) != 0 || size != kNumGrads) return false;
  bool is_any = false;
  for (size_t index = 0; index < size; ++index) {
    StableIValue flag = 0;
    if (torch_list_get_item(list, index, &flag) != 0) return false;
    options.is_wanted[index] = torch::stable::detail::to<bool>(flag);
    is_any = is_any || options.is_wanted[index];
  }
  return is_any;
}

// Puts a contiguous copy in the place of a tensor on the stack. autograd hands over gradients of any strides: that of
// a sum has stride 0 along every axis.
bool replace_by_copy(StableIValue& value, View& view) {
  Owned copy;
  if (!copy.copy(borrow<AtenTensorHandle>(value), view)) return false;
  release<AtenTensorHandle>(value);
  value = torch::stable::detail::from(copy.release());
  return true;
}

template <Overload kOverload>
bool read_backward(StableIValue* stack, const Arguments<kOverload>& args, Request& request) {
  constexpr bool kIsDense = kOverload == Overload::kDense;
  constexpr BackwardStack kAt = kIsDense ? kDenseBackward : kBackward;
  if (!read_attention(args, request)) return false;
  View* tensors = request.call.tensors;
  for (auto [index, tensor] : {std::pair<i32, i32>{0, kDout}, {kAt.out, kOut}, {kAt.lse, kLse}}) {
    if (!view_of(borrow<AtenTensorHandle>(stack[index]), tensors[tensor])) return false;
  }
  if constexpr (kIsDense) {
    for (i32 grad : {kDq, kDk, kDv}) request.options.is_wanted[grad - kDq] = true;
  } else {
    if (!read_needs(stack[kAt.needs], request.options)) return false;
    if (auto* dlse = torch::stable::detail::to<StableIValue*>(stack[kAt.dlse])) {
      if (!view_of(borrow<AtenTensorHandle>(*dlse), tensors[kDlse])) return false;
      if (!tensors[kDlse].is_contiguous() && !replace_by_copy(*dlse, tensors[kDlse])) return false;
    }
  }
  // As backends/call.py: backward_tensors
  View& dout = tensors[kDout];
  bool is_read_in_place = dout.size(-1) <= 1 || dout.stride(-1) == 1;
  if (!request.is_on_host) {
    bool can_align = dout.size(-1) * size_of(dout.dtype) % 16 == 0;
    is_read_in_place =
        is_read_in_place && rows_disjoint(dout, request.options.is_bshd) && (!can_align || dout.is_aligned16());
  }
  return is_read_in_place || replace_by_copy(stack[0], dout);
}

// (dout, dlse, arguments, out, lse, needs) -> (dq, dk, dv, dbias, dsinks). Dense: (dout, arguments, out, lse) -> (dq,
// dk, dv).
template <bool kIsDense>
void backward(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  constexpr BackwardStack kAt = kIsDense ? kDenseBackward : kBackward;
  Arguments<kIsDense ? Overload::kDense : Overload::kFull> args(stack + kAt.first);
  Owner owner([&] {
    for (i32 index : {0, kAt.out, kAt.lse}) release<AtenTensorHandle>(stack[index]);
    if constexpr (!kIsDense) {
      release<std::optional<AtenTensorHandle>>(stack[kAt.dlse]);
      release<StableListHandle>(stack[kAt.needs]);
    }
    args.release_all();
  });
  Request request{Pass::kBackward, {}, {}, {}};
  Results results;
  auto read = [&](Request& request) { return read_backward(stack, args, request); };
  auto copy = [&](StableIValue* to) {
    std::copy(stack, stack + num_inputs, to);
    for (i32 index : {0, kAt.out, kAt.lse}) to[index] = duplicate<AtenTensorHandle>(stack[index]);
    if constexpr (!kIsDense) {
      to[kAt.dlse] = duplicate<std::optional<AtenTensorHandle>>(stack[kAt.dlse]);
      to[kAt.needs] = duplicate<StableListHandle>(stack[kAt.needs]);
    }
    args.duplicate_all(stack, to);
  };
  if (!serve("flashtile::backward_fallback", kIsDense ? "dense" : "", owner, stack, num_outputs, request, results, read,
             copy))
    return;
  for (i32 index = kDq; !kIsDense && index <= kDsinks; ++index) {
    if (results.tensors[index].get() == nullptr) make_empty(request.call.tensors[kQ], results.tensors[index]);
  }
  complete(&results.tensors[kDq], num_outputs);
  owner.free();
  hand_out(&results.tensors[kDq], num_outputs, stack);
}

// The arguments of flashtile::append_kv (backends/kvcache.py: AppendArgs): tensors, the last of them optional,
// rotary_interleaved, layout. A step has q and is_ordered behind them, and returns rotated_q and seqused_k.
template <bool kIsStep>
void append_kv(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  constexpr i32 kInterleavedAt = kNumAppendInputs, kLayout = kInterleavedAt + 1, kQAt = kLayout + 1,
                kOrderedAt = kQAt + 1;
  Owner owner([&] {
    for (i32 index = 0; index < kTable; ++index) release<AtenTensorHandle>(stack[index]);
    for (i32 index = kTable; index < kNumAppendInputs; ++index) release<std::optional<AtenTensorHandle>>(stack[index]);
    release<const char*>(stack[kLayout]);
    if constexpr (kIsStep) release<AtenTensorHandle>(stack[kQAt]);
  });
  Request request{Pass::kAppend, {}, {}, {}};
  Results results;
  auto read = [&](Request& request) {
    View* tensors = request.call.tensors;
    const char* layout = borrow<const char*>(stack[kLayout]);
    request.options.is_bshd = is_text(layout, "bshd");
    request.options.is_interleaved = borrow<bool>(stack[kInterleavedAt]);
    if (!request.options.is_bshd && !is_text(layout, "bhsd")) return false;
    for (i32 index = 0; index < kNumAppendInputs; ++index) {
      AtenTensorHandle tensor = index < kTable
                                    ? borrow<AtenTensorHandle>(stack[index])
                                    : borrow<std::optional<AtenTensorHandle>>(stack[index]).value_or(nullptr);
      if (tensor == nullptr ? index < kTable : !view_of(tensor, tensors[index])) return false;
    }
    if constexpr (kIsStep) {
      View q;
      if (!view_of(borrow<AtenTensorHandle>(stack[kQAt]), q) || !are_fitting_queries(q, tensors[kNewK])) return false;
      request.options.is_ordered = borrow<bool>(stack[kOrderedAt]);
      lay_out_step(request.options, q, request.call);
      for (i32 index : {kRotatedQ, kStepSeqused}) {
        if (tensors[index].is_given() && !results.tensors[index].allocate(tensors[index])) return false;
      }
    }
    return true;
  };
  auto copy = [&](StableIValue* to) {
    std::copy(stack, stack + num_inputs, to);
    for (i32 index = 0; index < kTable; ++index) to[index] = duplicate<AtenTensorHandle>(stack[index]);
    for (i32 index = kTable; index < kNumAppendInputs; ++index)
      to[index] = duplicate<std::optional<AtenTensorHandle>>(stack[index]);
    to[kLayout] = duplicate<const char*>(stack[kLayout]);
    if constexpr (kIsStep) to[kQAt] = duplicate<AtenTensorHandle>(stack[kQAt]);
  };
  if (!serve("flashtile::append_kv_fallback", kIsStep ? "step" : "", owner, stack, num_outputs, request, results, read,
             copy))
    return;
  complete(&results.tensors[kRotatedQ], num_outputs);
  owner.free();
  hand_out(&results.tensors[kRotatedQ], num_outputs, stack);
}

}  // namespace

std::string keep(PyObject* error) {
  PyObject* text = PyObject_CallFunctionObjArgs(executor().keep, error, nullptr);
  char* bytes = nullptr;
  Py_ssize_t length = 0;
  bool is_found = text != nullptr && PyBytes_AsStringAndSize(text, &bytes, &length) == 0;
  std::string found = is_found ? std::string(bytes, static_cast<size_t>(length)) : "flashtile";
  PyErr_Clear();
  Py_XDECREF(text);
  return found;
}

bool is_usable() {
  const Executor& found = executor();
  return (found.is_open || found.is_host_open) && !found.is_python_only;
}

bool is_checking() {
  const char* value = variable("FLASHTILE_CHECK");
  return value != nullptr && std::strcmp(value, "0") != 0;
}

bool is_deterministic() {
  Options options;
  read_switches(true, false, options);
  return options.is_deterministic;
}

void call_python(const char* op, StableIValue* stack, uint64_t num_outputs) {
  fall_back(op, "", nullptr, stack, num_outputs);
}

void forward_dense(StableIValue* stack) { forward<true>(stack, argument::kNumDense, 2); }

void backward_dense(StableIValue* stack) { backward<true>(stack, argument::kNumDense + 3, 3); }

bool register_ops() {
  using Kernel = void (*)(StableIValue*, uint64_t, uint64_t);
  constexpr std::pair<const char*, Kernel> kKernels[] = {
      {"forward", forward<false>},        {"forward.dense", forward<true>}, {"backward", backward<false>},
      {"backward.dense", backward<true>}, {"append_kv", append_kv<false>},  {"append_kv.step", append_kv<true>},
      {"forward.cache", forward_cache},
  };
  for (const char* key : {"CPU", "CUDA"}) {
    TorchLibraryHandle library = nullptr;  // kept: to delete it would take the kernels back
    if (aoti_torch_library_init_impl("flashtile", key, __FILE__, __LINE__, &library) != 0) return false;
    for (auto [name, kernel] : kKernels) {
      if (torch_library_impl(library, name, kernel, TORCH_ABI_VERSION) != 0) return false;
    }
  }
  return true;
}

}  // namespace flashtile
