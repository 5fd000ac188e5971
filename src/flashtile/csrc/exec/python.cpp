// From Python's objects to a Call and back; the plans that Python has made, by their keys.
//
// Tensors are read through DLPack's C functions, which cost nothing; those that a call returns are torch's own, from its allocator. Each
// function takes the arguments of an op as one tuple and returns the op's results, or
//   None   C++ does not serve this call: Python has to
//   False  there is no plan for it yet: Python makes one and hands it to `learn`
// `attend` and `attention` stand above autograd. Where a call is to be differentiated they return ((arguments, results, whether lse is
// wanted),): the arguments say that a backward pass follows, and the results, not yet in a graph, are None where C++ does not serve it.
// `serve_nodes` puts C++ into autograd's graph.
#include "python.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "attention.h"
#include "dlpack.h"

namespace flashtile {
namespace {

constexpr i32 kNumArguments = 28, kNeedsGrad = 26, kNeedsBiasGrad = 27, kMaxGpus = 64;
constexpr u8 kHostDevice = 255;  // among those of keys

struct KeyHash {
  size_t operator()(const Key& key) const {
    u64 words[sizeof(Key) / 8], hash = 1469598103934665603ull;
    std::memcpy(words, &key, sizeof(words));
    for (u64 word : words) hash = (hash ^ word) * 1099511628211ull, hash ^= hash >> 29;
    return hash;
  }
};

// Plans by their keys.
class Plans {
 public:
  // Or null.
  std::shared_ptr<const Plan> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = plans_.find(key);
    return found == plans_.end() ? nullptr : found->second;
  }
  void learn(const Key& key, std::shared_ptr<const Plan> plan) {
    std::lock_guard<std::mutex> lock(mutex_);
    plans_[key] = std::move(plan);
  }
  void forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    plans_.clear();
  }
  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return plans_.size();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, KeyHash> plans_;
};

// What `open_executor` was told. References are kept for the life of the process.
struct State {
  bool is_open = false;       // for the tensors of device_type, by kernels
  bool is_host_open = false;  // for CPU tensors, by the CPU engine
  const dlpack::ExchangeApi* exchange = nullptr;
  Driver driver;
  i32 device_type = -1;
  PyObject *tensor_type = nullptr, *parameter_type = nullptr;
  PyObject* wrap = nullptr;              // from a list of capsules with tensors' handles, which it takes, to a list of the tensors
  PyObject* fail = nullptr;              // raises for (status, text)
  PyObject* is_deterministic = nullptr;  // torch's switch
  PyObject* matmul_precision = nullptr;  // torch's switch
  PyObject* is_autocasting = nullptr;
  PyObject* listeners = nullptr;  // functions, each true where somebody wants to see what happens between the call and the kernel
  PyObject* dtypes[static_cast<i32>(Dtype::kCount)] = {};
};

State state;
Plans plans;
Gpu gpus[kMaxGpus];
PyObject* python_backward_of_node = nullptr;  // ops.py: _backward_of_node
PyObject *text_to_save, *text_saved_tensors, *text_materialize_grads, *text_needs_input_grad, *text_others;  // of autograd's contexts
PyObject *text_requires_grad, *text_is_neg, *text_contiguous, *text_none, *text_top_left, *text_bottom_right, *unbounded, *zero;

// Arguments

bool is_text(PyObject* value, const char* text) { return PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, text) == 0; }

bool is_plain_tensor(PyObject* value) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == state.tensor_type || type == state.parameter_type;
}

bool whole_of(PyObject* value, i64& number) {
  if (Py_TYPE(value) != &PyLong_Type) return false;
  int overflow = 0;
  number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

bool number_of(PyObject* value, double& number) {
  if (Py_TYPE(value) != &PyFloat_Type) return false;
  number = PyFloat_AsDouble(value);
  return true;
}

bool flag_of(PyObject* value, bool& flag) {
  flag = value == Py_True;
  return flag || value == Py_False;
}

// None leaves the number as it is.
bool length_of(PyObject* value, i64& number) { return value == Py_None || (whole_of(value, number) && number >= 0); }

// What a function without arguments says; false where it raises, as a handler of signals may in it. The exception is the caller's.
bool ask(PyObject* function, bool& answer) {
  PyObject* result = PyObject_CallNoArgs(function);
  int truth = result == nullptr ? -1 : PyObject_IsTrue(result);
  Py_XDECREF(result);
  answer = truth > 0;
  return truth >= 0;
}

Dtype dtype_of(dlpack::DataType dtype) {
  if (dtype.lanes != 1) return Dtype::kNone;
  switch (dtype.code * 256 + dtype.bits) {
    case dlpack::kFloat * 256 + 64:
      return Dtype::kFloat64;
    case dlpack::kFloat * 256 + 32:
      return Dtype::kFloat32;
    case dlpack::kFloat * 256 + 16:
      return Dtype::kFloat16;
    case dlpack::kBfloat * 256 + 16:
      return Dtype::kBfloat16;
    case dlpack::kInt * 256 + 64:
      return Dtype::kInt64;
    case dlpack::kInt * 256 + 32:
      return Dtype::kInt32;
    case dlpack::kBool * 256 + 8:
      return Dtype::kBool;
    default:
      return Dtype::kNone;
  }
}

// Not so: zeros that have no memory, and a part of a complex conjugate whose negation is yet to be done; only parts of complex numbers,
// which have even strides alone, are asked.
bool is_in_memory(PyObject* value, const View& view) {
  if (view.data == nullptr) return view.numel() == 0;
  for (i32 axis = 0; axis < kMaxDim; ++axis) {
    if (view.sizes[axis] > 1 && view.strides[axis] % 2 != 0) return true;
  }
  if (view.dtype != Dtype::kFloat64 && view.dtype != Dtype::kFloat32 && view.dtype != Dtype::kFloat16) return true;
  PyObject* answer = PyObject_CallMethodObjArgs(value, text_is_neg, nullptr);
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return answer == Py_False;
}

// False where it is no plain tensor that a plan could take. None is no tensor.
bool view_of(PyObject* value, View& view) {
  if (value == Py_None) return true;
  if (!is_plain_tensor(value)) return false;
  dlpack::Tensor tensor;
  if (state.exchange->tensor_from_python(value, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  view.dtype = dtype_of(tensor.dtype);
  bool is_cuda = tensor.device_type == dlpack::kCuda;
  if (view.dtype == Dtype::kNone || tensor.ndim > kMaxDim || tensor.ndim < 1) return false;
  if (!is_cuda && tensor.device_type != dlpack::kCpu) return false;
  view.device = {is_cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(), tensor.device_id};
  view.data = static_cast<u8*>(tensor.data) + tensor.byte_offset;
  view.dim = tensor.ndim;
  for (i32 axis = 0; axis < tensor.ndim; ++axis) {
    view.sizes[kMaxDim - tensor.ndim + axis] = tensor.shape[axis];
    view.strides[kMaxDim - tensor.ndim + axis] = tensor.strides[axis];
  }
  return is_in_memory(value, view);
}

struct Request {
  Options options;
  Call call;
  Key key{};
  bool is_on_host = false;  // the CPU engine's
};

bool is_any_open() { return state.is_open || state.is_host_open; }

// What a variable of the environment says, or null.
const char* text_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

bool is_tuple_of(PyObject* value, Py_ssize_t size) { return PyTuple_Check(value) && PyTuple_Size(value) == size; }

// The arguments of flashtile::forward (problem.py: AttentionArgs).
struct Arguments {
  PyObject* values[kNumArguments];

  // False where it is no tuple of them.
  bool take(PyObject* tuple) {
    if (!is_tuple_of(tuple, kNumArguments)) return false;
    for (i32 place = 0; place < kNumArguments; ++place) values[place] = PyTuple_GetItem(tuple, place);
    return true;
  }
};

bool read_attention(const Arguments& args, Request& request) {
  for (i32 place = 0; place < kNumInputs; ++place) {
    if (!view_of(args.values[place], request.call.tensors[place])) return false;
  }
  const View& q = request.call.tensors[kQ];
  if (!q.is_given() || !request.call.tensors[kK].is_given() || !request.call.tensors[kV].is_given()) return false;
  request.is_on_host = state.is_host_open && q.device.type == aoti_torch_device_type_cpu();
  if (!request.is_on_host && !(state.is_open && q.device.type == state.device_type)) return false;
  if (request.is_on_host) {
    // Lengths are read and checked in Python; so is which instructions to use
    for (i32 place = kCuSeqlensQ; place < kNumInputs; ++place) {
      if (request.call.tensors[place].is_given()) return false;
    }
    if (text_of("FLASHTILE_CPU_ISA") != nullptr) return false;
  }
  Options& options = request.options;
  auto argument = [&](i32 place) { return args.values[place]; };
  if (!length_of(argument(13), options.max_seqlen_q) || !length_of(argument(14), options.max_seqlen_k)) return false;
  options.has_scale = argument(15) != Py_None;
  if (options.has_scale && !number_of(argument(15), options.scale)) return false;
  if (is_text(argument(16), "bottom_right")) {
    options.causal = Causal::kBottomRight;
  } else if (is_text(argument(16), "top_left")) {
    options.causal = Causal::kTopLeft;
  } else if (!is_text(argument(16), "none")) {
    return false;
  }
  if (!whole_of(argument(17), options.window_left) || !whole_of(argument(18), options.window_right)) return false;
  if (!number_of(argument(19), options.softcap) || !number_of(argument(20), options.dropout_p)) return false;
  PyObject* deterministic = argument(21);
  bool follows = deterministic == Py_None;
  if (follows && !ask(state.is_deterministic, options.is_deterministic)) return false;
  if (!follows && !flag_of(deterministic, options.is_deterministic)) return false;
  if (!whole_of(argument(22), options.num_splits)) return false;
  if (argument(23) != Py_None) {
    for (i32 dtype = 1; dtype < static_cast<i32>(Dtype::kCount); ++dtype) {
      if (argument(23) == state.dtypes[dtype]) options.out_dtype = static_cast<Dtype>(dtype);
    }
    if (options.out_dtype == Dtype::kNone) return false;
  }
  options.is_bshd = is_text(argument(24), "bshd");
  if (!options.is_bshd && !is_text(argument(24), "bhsd")) return false;
  options.is_named = argument(25) != Py_None;
  if (options.is_named && !is_text(argument(25), request.is_on_host ? "cpu" : "cuda")) return false;
  if (!flag_of(argument(kNeedsGrad), options.needs_grad) || !flag_of(argument(kNeedsBiasGrad), options.needs_bias_grad)) return false;
  if (q.dtype == Dtype::kFloat32 && !request.is_on_host) {
    PyObject* precision = PyObject_CallNoArgs(state.matmul_precision);
    if (precision == nullptr) {
      PyErr_Clear();
      return false;
    }
    options.matmul_precision = static_cast<char>(PyUnicode_ReadChar(precision, 0));
    Py_DECREF(precision);
  }
  return true;
}

// What a backward pass is told beside the arguments of its forward pass; `wanted` is a tuple that begins with a flag for each gradient.
struct BackwardArguments {
  PyObject *dout, *dlse, *out, *lse, *wanted;
};

bool read_backward(const Arguments& forward, const BackwardArguments& args, Request& request) {
  if (!read_attention(forward, request)) return false;
  const std::pair<PyObject*, Tensor> kTensors[] = {{args.dout, kDout}, {args.dlse, kDlse}, {args.out, kOut}, {args.lse, kLse}};
  for (auto [value, tensor] : kTensors) {
    if (!view_of(value, request.call.tensors[tensor])) return false;
    if (tensor != kDlse && !request.call.tensors[tensor].is_given()) return false;
  }
  bool is_any = false;
  for (i32 place = 0; place < kNumGrads; ++place) {
    if (!flag_of(PyTuple_GetItem(args.wanted, place), request.options.is_wanted[place])) return false;
    is_any = is_any || request.options.is_wanted[place];
  }
  return is_any;
}

// (dout, dlse, arguments of the forward pass, out, lse, which gradients)
bool read_backward(PyObject* args, Request& request) {
  Arguments forward;
  if (!is_tuple_of(args, 6) || !forward.take(PyTuple_GetItem(args, 2))) return false;
  auto argument = [&](i32 place) { return PyTuple_GetItem(args, place); };
  if (!is_tuple_of(argument(5), kNumGrads)) return false;
  return read_backward(forward, {argument(0), argument(1), argument(3), argument(4), argument(5)}, request);
}

// The arguments of flashtile::append_kv (backends/kvcache.py: AppendArgs).
bool read_append(PyObject* args, Request& request) {
  if (!is_tuple_of(args, kNumAppendTensors + 2)) return false;
  for (i32 place = 0; place < kNumAppendTensors; ++place) {
    View& view = request.call.tensors[place];
    if (!view_of(PyTuple_GetItem(args, place), view) || (place < kTable && !view.is_given())) return false;
  }
  PyObject *is_interleaved = PyTuple_GetItem(args, kNumAppendTensors), *layout = PyTuple_GetItem(args, kNumAppendTensors + 1);
  request.options.is_bshd = is_text(layout, "bshd");
  if (!flag_of(is_interleaved, request.options.is_interleaved) || (!request.options.is_bshd && !is_text(layout, "bhsd"))) return false;
  return state.is_open && request.call.tensors[kKCache].device.type == state.device_type;
}

enum class Reading { kFine, kUnserved, kUnknownGpu };

// From what was read to the key of the plan.
Reading prepare(Pass pass, Request& request) {
  if (pass == Pass::kAppend) return prepare_append(request.options, request.call, request.key) ? Reading::kFine : Reading::kUnserved;
  if (request.is_on_host) {
    uint32_t num_threads = 1;
    if (torch_get_num_threads(&num_threads) != 0) return Reading::kUnserved;
    bool is_served = prepare_attention(pass, request.options, {1, 1, num_threads}, request.call, request.key);
    request.key.device = kHostDevice;
    return is_served ? Reading::kFine : Reading::kUnserved;
  }
  i32 index = request.call.tensors[kQ].device.index;
  if (index < 0 || index >= kMaxGpus) return Reading::kUnserved;
  if (gpus[index].num_multiprocessors == 0) return Reading::kUnknownGpu;
  return prepare_attention(pass, request.options, gpus[index], request.call, request.key) ? Reading::kFine : Reading::kUnserved;
}

// Python reads and checks index tensors in every call.
bool is_checking() {
  const char* value = text_of("FLASHTILE_CHECK");
  return value != nullptr && std::strcmp(value, "0") != 0;
}

Reading read(Pass pass, PyObject* args, Request& request) {
  Arguments forward;
  bool is_read = false;
  if (pass == Pass::kForward) is_read = forward.take(args) && read_attention(forward, request);
  if (pass == Pass::kBackward) is_read = read_backward(args, request);
  if (pass == Pass::kAppend) is_read = read_append(args, request);
  return is_read && !is_checking() ? prepare(pass, request) : Reading::kUnserved;
}

// Calls

// Makes a device current while it lives, if another one is.
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

// A tuple of the tensors as Python knows them, None where there is none, and as many more as `num_more`.
PyObject* wrapped(Owned* tensors, i32 count, i32 num_more) {
  PyObject* handles = PyList_New(0);
  if (handles == nullptr) return nullptr;
  bool is_there[kMaxTensors] = {};
  for (i32 place = 0; place < count; ++place) {
    is_there[place] = tensors[place].get() != nullptr;
    if (!is_there[place]) continue;
    PyObject* handle = PyCapsule_New(tensors[place].get(), nullptr, nullptr);
    bool is_added = handle != nullptr && PyList_Append(handles, handle) == 0;
    Py_XDECREF(handle);
    if (!is_added) {
      Py_DECREF(handles);
      return nullptr;
    }
  }
  for (i32 place = 0; place < count; ++place) tensors[place].release();
  PyObject* made = PyObject_CallFunctionObjArgs(state.wrap, handles, nullptr);
  Py_DECREF(handles);
  PyObject* results = made == nullptr ? nullptr : PyTuple_New(count + num_more);
  for (i32 place = 0, next = 0; results != nullptr && place < count + num_more; ++place) {
    PyObject* tensor = place < count && is_there[place] ? PyList_GetItem(made, next++) : Py_None;
    Py_XINCREF(tensor);
    if (tensor == nullptr || PyTuple_SetItem(results, place, tensor) != 0) Py_CLEAR(results);
  }
  Py_XDECREF(made);
  return results;
}

PyObject* failed(const Failure& failure) {
  PyObject* result = PyObject_CallFunction(state.fail, "is", failure.status, failure.text.c_str());
  Py_XDECREF(result);
  if (result != nullptr) PyErr_SetString(PyExc_RuntimeError, failure.text.c_str());
  return nullptr;
}

// One of the listeners says yes, or raises.
bool is_heard() {
  Py_ssize_t count = PyTuple_Size(state.listeners);
  for (Py_ssize_t place = 0; place < count; ++place) {
    bool answer = false;
    if (!ask(PyTuple_GetItem(state.listeners, place), answer) || answer) return true;
  }
  return false;
}

// None; null where what was asked has raised.
PyObject* unserved() { return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_None); }

PyObject* run(Pass pass, Request& request, Reading reading, bool wants_lse, i32 num_more = 0) {
  if (reading == Reading::kUnserved) return unserved();
  std::shared_ptr<const Plan> plan = reading == Reading::kUnknownGpu ? nullptr : plans.find(request.key);
  if (plan == nullptr) Py_RETURN_FALSE;
  Call& call = request.call;
  if (!plan->takes(call)) Py_RETURN_NONE;
  bool is_gpu = call.device.type != aoti_torch_device_type_cpu();
  if (is_gpu && state.exchange->current_stream(dlpack::kCuda, call.device.index, &call.stream) != 0) return nullptr;
  i32 first = pass == Pass::kForward ? kOut : kDq, count = pass == Pass::kForward ? 2 : pass == Pass::kBackward ? kNumGrads : 0;
  Owned owned[kMaxTensors];
  Failure failure;
  Outcome outcome = Outcome::kDone;
  if (pass == Pass::kForward && !wants_lse) call.unwanted = kLse;
  Py_BEGIN_ALLOW_THREADS;
  OnDevice guard(call.device);
  for (i32 place = first; place < first + count; ++place) {
    View& view = call.tensors[place];
    if (place != call.unwanted && view.is_given() && !owned[place].allocate(view)) outcome = Outcome::kNotServed;
  }
  // A gradient that a plan needs room for and nobody wants is not returned
  bool is_returned[kMaxTensors] = {};
  for (i32 place = first; place < first + count; ++place) is_returned[place] = call.tensors[place].is_given();
  if (outcome == Outcome::kDone) outcome = plan->run(call, owned, state.driver, failure);
  for (i32 place = first; place < first + count; ++place) {
    if (!is_returned[place]) owned[place] = Owned();
  }
  Py_END_ALLOW_THREADS;
  if (outcome == Outcome::kNotServed) Py_RETURN_NONE;
  if (outcome == Outcome::kIncomplete) Py_RETURN_FALSE;
  if (outcome == Outcome::kFailed) return failed(failure);
  return wrapped(owned + first, count, num_more);
}

PyObject* serve(Pass pass, PyObject* args) {
  Request request;
  if (!is_any_open() || is_heard()) return unserved();
  return run(pass, request, read(pass, args, request), true);
}

PyObject* forward(PyObject*, PyObject* args) { return serve(Pass::kForward, args); }

// Not where it is to be differentiated itself.
PyObject* backward(PyObject*, PyObject* args) {
  if (aoti_torch_grad_mode_is_enabled()) Py_RETURN_NONE;
  return serve(Pass::kBackward, args);
}

PyObject* append_kv(PyObject*, PyObject* args) { return serve(Pass::kAppend, args); }

PyObject* tuple_of(const Arguments& args) {
  PyObject* tuple = PyTuple_New(kNumArguments);
  for (i32 place = 0; tuple != nullptr && place < kNumArguments; ++place) {
    Py_INCREF(args.values[place]);
    PyTuple_SetItem(tuple, place, args.values[place]);
  }
  return tuple;
}

// The forward pass as the public functions call it.
PyObject* attend(Arguments& args, bool wants_lse) {
  bool needs_grad = false, needs_bias_grad = false;
  if (is_heard()) return unserved();
  for (i32 place = 0; place <= kSinks && aoti_torch_grad_mode_is_enabled(); ++place) {
    PyObject* tensor = args.values[place];
    if (tensor == Py_None) continue;
    if (!is_plain_tensor(tensor)) Py_RETURN_NONE;
    PyObject* answer = PyObject_GetAttr(tensor, text_requires_grad);
    if (answer == nullptr) return nullptr;
    needs_grad = needs_grad || answer == Py_True;
    if (place == kBias) needs_bias_grad = answer == Py_True;
    Py_DECREF(answer);
  }
  if (needs_grad) args.values[kNeedsGrad] = Py_True, args.values[kNeedsBiasGrad] = needs_bias_grad ? Py_True : Py_False;
  Request request;
  bool is_read = read_attention(args, request);
  if (needs_grad && !is_read) return unserved();
  Reading reading = is_read && !is_checking() ? prepare(Pass::kForward, request) : Reading::kUnserved;
  PyObject* results = run(Pass::kForward, request, reading, wants_lse || needs_grad);
  if (!needs_grad || results == nullptr) return results;
  PyObject* result = Py_BuildValue("((NOO))", tuple_of(args), PyTuple_Check(results) ? results : Py_None, wants_lse ? Py_True : Py_False);
  Py_DECREF(results);
  return result;
}

// (arguments, whether lse is wanted)
PyObject* attend_arguments(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Arguments args;
  if (!is_any_open() || count != 2 || !args.take(given[0])) Py_RETURN_NONE;
  return attend(args, given[1] != Py_False);
}

// `flashtile.attention`: what `attend` returns; or the arguments of the op where C++ does not serve it; or None where arguments.py has more to
// do than to put in defaults.
// (q, k, v, causal, window, scale, mask, bias, alibi_slopes, softcap, sinks, dropout_p, rng_state, deterministic, layout, backend, whether
// lse is wanted)
PyObject* attention(PyObject*, PyObject* const* given, Py_ssize_t count) {
  bool is_autocasting = true;
  if (!is_any_open() || count != 17 || !ask(state.is_autocasting, is_autocasting) || is_autocasting) return unserved();
  PyObject *causal = given[3], *window = given[4], *scale = given[5], *mask = given[6], *bias = given[7], *slopes = given[8];
  PyObject *sinks = given[10], *rng_state = given[12], *deterministic = given[13], *layout = given[14], *backend = given[15];
  if (!is_plain_tensor(given[0]) || !is_plain_tensor(given[1]) || !is_plain_tensor(given[2])) Py_RETURN_NONE;
  for (PyObject* tensor : {mask, bias}) {
    View view;
    if (tensor != Py_None && (!view_of(tensor, view) || view.dim != kMaxDim)) Py_RETURN_NONE;
  }
  for (PyObject* tensor : {sinks, rng_state}) {
    if (tensor != Py_None && !is_plain_tensor(tensor)) Py_RETURN_NONE;
  }
  if (slopes != Py_None && (!is_plain_tensor(slopes) || aoti_torch_grad_mode_is_enabled())) Py_RETURN_NONE;
  double softcap = 0.0, dropout_p = 0.0, number = 0.0;
  bool flag = false;
  if (!number_of(given[9], softcap) || !number_of(given[11], dropout_p) || (dropout_p > 0.0 && rng_state == Py_None)) Py_RETURN_NONE;
  if (window != Py_None || (scale != Py_None && !number_of(scale, number))) Py_RETURN_NONE;
  if ((deterministic != Py_None && !flag_of(deterministic, flag)) || !PyUnicode_Check(layout)) Py_RETURN_NONE;
  if (backend != Py_None && !is_text(backend, "cuda") && !is_text(backend, "cpu")) Py_RETURN_NONE;
  PyObject* word = causal == Py_False ? text_none : causal == Py_True ? text_bottom_right : nullptr;
  if (word == nullptr && is_text(causal, "top_left")) word = text_top_left;
  if (word == nullptr && is_text(causal, "bottom_right")) word = text_bottom_right;
  if (word == nullptr) Py_RETURN_NONE;
  Arguments args = {{given[0],  given[1], given[2],  bias,      mask,      slopes,  sinks,         rng_state, Py_None, Py_None,
                     Py_None,   Py_None,  Py_None,   Py_None,   Py_None,   scale,   word,          unbounded, unbounded, given[9],
                     given[11], deterministic, zero, Py_None,   layout,    backend, Py_False,      Py_False}};
  PyObject* served = attend(args, given[16] != Py_False);
  if (served == nullptr || PyTuple_Check(served)) return served;
  Py_DECREF(served);
  return tuple_of(args);
}

// Nodes of autograd's graph (ops.py: _Attention)

// A context keeps all arguments of the forward pass and its results, tensors where autograd watches over them: `saved` are the first of
// the arguments, then out and lse; `others` are the rest.
PyObject* forward_of_node(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Arguments args;
  PyObject* call = count == 0 ? nullptr : given[count - 1];
  PyObject* results = call != nullptr && is_tuple_of(call, 3) ? PyTuple_GetItem(call, 1) : nullptr;
  if (results == nullptr || !is_tuple_of(results, 2) || !args.take(PyTuple_GetItem(call, 0))) {
    PyErr_SetString(PyExc_TypeError, "a node of attention takes (arguments, (out, lse), whether lse is wanted) last");
    return nullptr;
  }
  i32 num_saved = kBias;
  for (i32 place = kBias; place < kNumInputs; ++place) {
    if (args.values[place] != Py_None) num_saved = kNumInputs;
  }
  PyObject* saved = PyTuple_New(num_saved + 2);
  for (i32 place = 0; saved != nullptr && place < num_saved + 2; ++place) {
    PyTuple_SetItem(saved, place, Py_NewRef(place < num_saved ? args.values[place] : PyTuple_GetItem(results, place - num_saved)));
  }
  PyObject* others = PyTuple_GetSlice(PyTuple_GetItem(call, 0), num_saved, kNumArguments);
  // As save_for_backward and set_materialize_grads do
  bool is_kept = saved != nullptr && others != nullptr && PyObject_SetAttr(given[0], text_to_save, saved) == 0 &&
                 PyObject_SetAttr(given[0], text_others, others) == 0 && PyObject_SetAttr(given[0], text_materialize_grads, Py_False) == 0;
  Py_XDECREF(saved), Py_XDECREF(others);
  return is_kept ? Py_NewRef(PyTuple_GetItem(call, 2) == Py_True ? results : PyTuple_GetItem(results, 0)) : nullptr;
}

// What a context has for the backward pass.
class Context {
 public:
  explicit Context(PyObject* node)
      : saved(PyObject_GetAttr(node, text_saved_tensors)),
        others(saved == nullptr ? nullptr : PyObject_GetAttr(node, text_others)),
        wanted(others == nullptr ? nullptr : PyObject_GetAttr(node, text_needs_input_grad)) {}
  ~Context() { Py_XDECREF(saved), Py_XDECREF(others), Py_XDECREF(wanted); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // False with an exception set, as where what was saved is gone.
  bool is_whole() const { return wanted != nullptr; }

  bool read(PyObject* dout, PyObject* dlse, Request& request) const {
    if (!PyTuple_Check(saved) || !PyTuple_Check(others) || !is_tuple_of(wanted, kNumGrads + 1)) return false;
    Py_ssize_t num_saved = PyTuple_Size(saved) - 2;
    if (num_saved < 0 || num_saved + PyTuple_Size(others) != kNumArguments) return false;
    Arguments forward;
    for (Py_ssize_t place = 0; place < kNumArguments; ++place) {
      forward.values[place] = place < num_saved ? PyTuple_GetItem(saved, place) : PyTuple_GetItem(others, place - num_saved);
    }
    return read_backward(forward, {dout, dlse, PyTuple_GetItem(saved, num_saved), PyTuple_GetItem(saved, num_saved + 1), wanted}, request);
  }

  PyObject *saved, *others, *wanted;
};

// A gradient that autograd hands over, and a copy of it where a plan must have one: that of a sum has strides of 0.
struct Gradient {
  explicit Gradient(PyObject* given) : tensor(Py_NewRef(given)) {}
  ~Gradient() { Py_DECREF(tensor); }
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  // Takes the copy's place unless `is_fine`. False with an exception set.
  bool copy_unless(bool is_fine, View& view) {
    if (is_fine) return true;
    PyObject* copy = PyObject_CallMethodObjArgs(tensor, text_contiguous, nullptr);
    if (copy == nullptr) return false;
    Py_DECREF(std::exchange(tensor, copy));
    view = View();
    return view_of(tensor, view);
  }

  PyObject* tensor;
};

// (dout, and dlse where lse is a result). Not served where it is to be differentiated itself: Python gets all that the context has.
PyObject* backward_of_node(PyObject* node, PyObject* const* given, Py_ssize_t count) {
  if (count != 1 && count != 2) return PyErr_Format(PyExc_TypeError, "a node of attention takes one or two gradients, not %zd", count);
  Context context(node);
  if (!context.is_whole()) return nullptr;
  Gradient dout(given[0]), dlse(count == 2 ? given[1] : Py_None);
  Request request;
  if (is_any_open() && !aoti_torch_grad_mode_is_enabled() && !is_heard() && context.read(dout.tensor, dlse.tensor, request) && !is_checking()) {
    View &of_dout = request.call.tensors[kDout], &of_dlse = request.call.tensors[kDlse];
    bool has_rows = of_dout.size(-1) <= 1 || of_dout.stride(-1) == 1;
    if (!dout.copy_unless(has_rows, of_dout) || !dlse.copy_unless(of_dlse.is_contiguous(), of_dlse)) return nullptr;
    PyObject* grads = run(Pass::kBackward, request, prepare(Pass::kBackward, request), true, 1);  // and None for the call
    if (grads == nullptr || PyTuple_Check(grads)) return grads;
    Py_DECREF(grads);
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  // From the same tensors, so that the next one is served
  return PyObject_CallFunctionObjArgs(python_backward_of_node, context.saved, context.others, context.wanted, dout.tensor, dlse.tensor, nullptr);
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);  // METH_FASTCALL

PyCFunction as_method(FastFunction function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)); }

// (a torch.autograd.Function whose last argument is the call, the function of Python that takes over backward passes)
PyObject* serve_nodes(PyObject*, PyObject* args) {
  static PyMethodDef forward = {"forward", as_method(forward_of_node), METH_FASTCALL, nullptr};
  static PyMethodDef backward = {"apply", as_method(backward_of_node), METH_FASTCALL, nullptr};
  PyObject *function = nullptr, *nodes = nullptr, *fallback = nullptr;
  if (!PyArg_ParseTuple(args, "OO!O", &function, &PyType_Type, &nodes, &fallback)) return nullptr;
  PyObject* of_function = PyCFunction_NewEx(&forward, nullptr, nullptr);
  PyObject* of_nodes = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(nodes), &backward);  // the method that autograd calls
  bool is_set = of_function != nullptr && of_nodes != nullptr && PyObject_SetAttrString(function, "forward", of_function) == 0 &&
                PyObject_SetAttrString(nodes, "apply", of_nodes) == 0;
  Py_XDECREF(of_function), Py_XDECREF(of_nodes);
  if (!is_set) return nullptr;
  Py_XDECREF(std::exchange(python_backward_of_node, Py_NewRef(fallback)));
  Py_RETURN_NONE;
}

// Plans

// (pass, arguments as of that pass, numbers of a plan, image, names): from now on calls with the same key are served.
PyObject* learn(PyObject*, PyObject* args) {
  int pass = 0;
  PyObject* arguments = nullptr;
  const char *numbers = nullptr, *image = nullptr, *names = nullptr;
  Py_ssize_t num_bytes = 0, image_bytes = 0;
  if (!PyArg_ParseTuple(args, "iOy#y#s", &pass, &arguments, &numbers, &num_bytes, &image, &image_bytes, &names)) return nullptr;
  Request request;
  if (!is_any_open() || read(static_cast<Pass>(pass), arguments, request) != Reading::kFine) {
    return PyErr_Occurred() != nullptr ? nullptr : Py_NewRef(Py_False);
  }
  std::vector<i64> values(static_cast<size_t>(num_bytes) / sizeof(i64));
  std::memcpy(values.data(), numbers, values.size() * sizeof(i64));
  try {
    plans.learn(request.key, std::make_shared<const Plan>(values.data(), values.size(), std::string(image, image_bytes), names));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* forget(PyObject*, PyObject*) {
  plans.forget();
  Py_RETURN_NONE;
}

PyObject* num_plans(PyObject*, PyObject*) { return PyLong_FromSize_t(plans.size()); }

// (index of a device, its multiprocessors, rows of the large tile)
PyObject* set_gpu(PyObject*, PyObject* args) {
  int index = 0;
  long long num_multiprocessors = 0, small_rows = 0;
  if (!PyArg_ParseTuple(args, "iLL", &index, &num_multiprocessors, &small_rows)) return nullptr;
  if (index >= 0 && index < kMaxGpus) gpus[index] = {num_multiprocessors, small_rows};
  Py_RETURN_NONE;
}

// (library of the driver, type of the device or "host" for the CPU engine, which needs no driver, exchange API, tensor types, dtypes, then the functions of State in their order)
PyObject* open_executor(PyObject*, PyObject* args) {
  State found;
  const char* library = nullptr;
  const char* device_type = nullptr;
  PyObject *exchange = nullptr, *dtypes = nullptr;
  if (!PyArg_ParseTuple(
          args, "ssO(OO)O!OOOOOO!", &library, &device_type, &exchange, &found.tensor_type, &found.parameter_type, &PyTuple_Type, &dtypes,
          &found.wrap, &found.fail, &found.is_deterministic, &found.matmul_precision, &found.is_autocasting, &PyTuple_Type,
          &found.listeners)) {
    return nullptr;
  }
  bool is_host = std::strcmp(device_type, "host") == 0;
  found.exchange = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  if (found.exchange == nullptr) return nullptr;
  if (found.exchange->major != dlpack::kMajorVersion || found.exchange->tensor_from_python == nullptr) {
    return PyUnicode_FromString("its DLPack functions are not those of version 1");
  }
  if (is_host) {
    found.driver = state.driver, found.is_open = state.is_open, found.device_type = state.device_type;
  } else {
    if (const char* missing = found.driver.open(library)) return PyUnicode_FromFormat("%s cannot be found", missing);
    found.device_type = std::strcmp(device_type, "cuda") == 0 ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    found.is_open = true;
  }
  // CPU tensors that stand in for a GPU's are not the CPU engine's
  found.is_host_open = (is_host || state.is_host_open) && !(found.is_open && found.device_type == aoti_torch_device_type_cpu());
  for (Py_ssize_t place = 0; place < PyTuple_Size(dtypes) && place + 1 < static_cast<Py_ssize_t>(Dtype::kCount); ++place) {
    found.dtypes[place + 1] = PyTuple_GetItem(dtypes, place);
  }
  Py_INCREF(args);  // and with it all that it holds
  state = found;
  if (!is_host) plans.forget();
  Py_RETURN_NONE;
}

PyObject* close_executor(PyObject*, PyObject*) {
  state.is_open = false;
  plans.forget();
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"attend", as_method(attend_arguments), METH_FASTCALL, nullptr},
    {"attention", as_method(attention), METH_FASTCALL, nullptr},
    {"forward", forward, METH_O, nullptr},
    {"backward", backward, METH_O, nullptr},
    {"append_kv", append_kv, METH_O, nullptr},
    {"serve_nodes", serve_nodes, METH_VARARGS, nullptr},
    {"learn", learn, METH_VARARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"num_plans", num_plans, METH_NOARGS, nullptr},
    {"set_gpu", set_gpu, METH_VARARGS, nullptr},
    {"open_executor", open_executor, METH_VARARGS, nullptr},
    {"close_executor", close_executor, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

template <size_t kCount>
bool add_names(PyObject* module, const char* name, const char* const (&names)[kCount]) {
  PyObject* tuple = PyTuple_New(kCount);
  for (size_t place = 0; tuple != nullptr && place < kCount; ++place) PyTuple_SetItem(tuple, place, PyUnicode_FromString(names[place]));
  bool is_added = tuple != nullptr && PyModule_AddObjectRef(module, name, tuple) == 0;
  Py_XDECREF(tuple);
  return is_added;
}

}  // namespace

bool add_executor(PyObject* module) {
  text_requires_grad = PyUnicode_InternFromString("requires_grad");
  text_saved_tensors = PyUnicode_InternFromString("saved_tensors");
  text_others = PyUnicode_InternFromString("others");
  text_needs_input_grad = PyUnicode_InternFromString("needs_input_grad");
  text_to_save = PyUnicode_InternFromString("to_save");
  text_materialize_grads = PyUnicode_InternFromString("materialize_grads");
  text_is_neg = PyUnicode_InternFromString("is_neg");
  text_contiguous = PyUnicode_InternFromString("contiguous");
  text_none = PyUnicode_InternFromString("none");
  text_top_left = PyUnicode_InternFromString("top_left");
  text_bottom_right = PyUnicode_InternFromString("bottom_right");
  unbounded = PyLong_FromLong(-1);
  zero = PyLong_FromLong(0);
  return PyModule_AddFunctions(module, kMethods) == 0 && add_names(module, "TENSORS", kTensorNames) &&
         add_names(module, "APPEND_TENSORS", kAppendNames) && add_names(module, "SCALARS", kScalarNames) &&
         add_names(module, "APPEND_SCALARS", kAppendScalarNames);
}

}  // namespace flashtile
