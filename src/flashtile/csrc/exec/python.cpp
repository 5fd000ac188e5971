// The executor as functions of the Python module.
#include "python.h"

#include <stdexcept>
#include <vector>

#include "executor.h"
#include "kept.h"
#include "ops.h"
#include "torch_flash.h"

namespace flashtile {
namespace {

// (keep): from now on C++ kernels handle the ops, and fall back to Python. `keep` takes an exception that a kernel
// raises, and returns its text as bytes.
PyObject* register_ops_once(PyObject*, PyObject* keep) {
  executor().keep = Py_NewRef(keep);
  if (!register_ops()) {
    PyErr_SetString(PyExc_RuntimeError, "torch does not take the C++ kernels of flashtile's ops");
    return nullptr;
  }
  Py_RETURN_NONE;
}

// (dispatch key): C++ kernels for torch's flash attention operators. A number for restore_torch_flash.
PyObject* override_torch_flash_by_key(PyObject*, PyObject* args) {
  const char* key = nullptr;
  if (!PyArg_ParseTuple(args, "s", &key)) return nullptr;
  TorchLibraryHandle library = override_torch_flash(key);
  if (library == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "torch does not take C++ kernels of its flash attention operators");
    return nullptr;
  }
  return PyLong_FromVoidPtr(library);
}

// Takes them back.
PyObject* restore_torch_flash(PyObject*, PyObject* number) {
  void* library = PyLong_AsVoidPtr(number);
  if (library != nullptr) aoti_torch_delete_library_object(static_cast<TorchLibraryHandle>(library));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Py_RETURN_NONE;
}

// (exception): what a fallback raises; the C++ kernel that called it throws its text. False where none has.
PyObject* raise_in_kernel(PyObject*, PyObject* error) {
  if (raised() == nullptr) Py_RETURN_FALSE;
  *raised() = keep(error);
  Py_RETURN_TRUE;
}

// The call of this thread that has fallen back to Python and waits for a plan; null where there is none of that pass,
// or C++ cannot handle it.
Request* waiting_request(int pass) {
  Request* request = fallen_back();
  if (executor().is_python_only || request == nullptr || request->pass != static_cast<Pass>(pass)) return nullptr;
  return executor().prepare(*request) == Executor::State::kReady ? request : nullptr;
}

PyObject* number_or_none(bool is_there, i64 number) {
  return is_there ? PyLong_FromLongLong(number) : Py_NewRef(Py_None);
}

// The length classes of a call by a GPU's kernels, or None.
PyObject* classes_of(const Request& request) {
  if (request.is_on_host) return Py_NewRef(Py_None);
  const Gpu& gpu = *executor().gpus[request.call.device.index];
  i32 count = gpu.num_classes[request.pass == Pass::kBackward];
  PyObject* classes = PyTuple_New(count);
  for (i32 index = 0; classes != nullptr && index < count; ++index)
    PyTuple_SetItem(classes, index, PyLong_FromLong(request.key.classes[index]));
  return classes;
}

// (pass): the call of a forward or backward pass that waits for a plan, which is valid: (the fields of problem.py:
// Shape, those of problem.py: Facts). None where there is no such call, or Python has to check it.
PyObject* waiting_call(PyObject*, PyObject* args) {
  int pass = 0;
  if (!PyArg_ParseTuple(args, "i", &pass)) return nullptr;
  Request* request = waiting_request(pass);
  if (request == nullptr || !has_right_tensors(request->options, request->call)) Py_RETURN_NONE;
  const Options& options = request->options;
  const Key& key = request->key;
  const View *tensors = request->call.tensors, &q = tensors[kQ], &k = tensors[kK], &v = tensors[kV];
  Shape shape = shape_of(options, request->call);
  bool is_packed = tensors[kCuSeqlensQ].is_given(), has_shares = is_packed && !tensors[kBlockTable].is_given();
  auto truth = [](bool flag) { return flag ? Py_True : Py_False; };
  return Py_BuildValue("((LLLLLLLNNN)(dOOOOON))", shape.batch, shape.heads, shape.heads_kv, shape.seqlen_q,
                       shape.seqlen_k, q.size(-1), v.size(-1), number_or_none(is_packed, shape.expected_q),
                       number_or_none(has_shares && options.max_seqlen_k < 0, shape.share_k),
                       number_or_none(has_shares, shape.share_k), request->call.scalars[kScale],
                       truth(options.is_deterministic), truth(key.has_aligned_rows()), truth(key.has_disjoint_rows()),
                       truth(q.stride(options.is_bshd ? -2 : -3) != 0), truth(is_v_in_k(k, v)), classes_of(*request));
}

// (pass, numbers of a plan, image, names): a plan for the call that waits for one. (The places of the kernels that it
// launches, the bytes of its kept workspace), or None where C++ cannot handle the call.
PyObject* draft_plan(PyObject*, PyObject* args) {
  int pass = 0;
  const char *numbers = nullptr, *image = nullptr, *names = nullptr;
  Py_ssize_t num_bytes = 0, image_bytes = 0;
  if (!PyArg_ParseTuple(args, "iy#y#s", &pass, &numbers, &num_bytes, &image, &image_bytes, &names)) return nullptr;
  Request* request = waiting_request(pass);
  if (request == nullptr) Py_RETURN_NONE;
  std::vector<i64> values(static_cast<size_t>(num_bytes) / sizeof(i64));
  std::memcpy(values.data(), numbers, values.size() * sizeof(i64));
  try {
    request->draft = std::make_shared<Plan>(values.data(), values.size(), std::string(image, image_bytes), names);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
    return nullptr;
  }
  std::vector<i32> kernels;
  i64 kept_bytes = 0;
  if (!request->draft->find_needed(request->call, kernels, kept_bytes)) Py_RETURN_NONE;
  PyObject* places = PyTuple_New(static_cast<Py_ssize_t>(kernels.size()));
  for (size_t index = 0; places != nullptr && index < kernels.size(); ++index)
    PyTuple_SetItem(places, static_cast<Py_ssize_t>(index), PyLong_FromLong(kernels[index]));
  return places == nullptr ? nullptr : Py_BuildValue("NL", places, static_cast<long long>(kept_bytes));
}

// (pass): whether C++ has a plan for the call that waits, with all that it needs. C++ then makes the call when Python
// returns.
PyObject* has_plan(PyObject*, PyObject* args) {
  int pass = 0;
  if (!PyArg_ParseTuple(args, "i", &pass)) return nullptr;
  Request* request = waiting_request(pass);
  if (request == nullptr) Py_RETURN_FALSE;
  std::shared_ptr<const Plan> plan = executor().plans.find(request->key);
  request->is_planned = plan != nullptr && plan->is_complete(request->call);
  return Py_NewRef(request->is_planned ? Py_True : Py_False);
}

// (pass, a tuple of (place, address, name) of the kernels): registers the plan of `draft_plan` with these kernels. C++
// makes the call when Python returns.
PyObject* register_plan(PyObject*, PyObject* args) {
  int pass = 0;
  PyObject* kernels = nullptr;
  if (!PyArg_ParseTuple(args, "iO!", &pass, &PyTuple_Type, &kernels)) return nullptr;
  Request* request = waiting_request(pass);
  if (request == nullptr || request->draft == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "no call waits for a plan");
    return nullptr;
  }
  for (Py_ssize_t index = 0; index < PyTuple_Size(kernels); ++index) {
    int place = 0;
    unsigned long long address = 0;
    const char* name = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GetItem(kernels, index), "iKs", &place, &address, &name)) return nullptr;
    try {
      request->draft->set_kernel(place, reinterpret_cast<void*>(address), name);
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
      return nullptr;
    }
  }
  executor().plans.add(request->key, std::exchange(request->draft, nullptr));
  request->is_planned = true;
  Py_RETURN_NONE;
}

// (index of a device, stream, capture, address, bytes): as runtime/kept.py: KeptZeros.
PyObject* add_kept_zeros(PyObject*, PyObject* args) {
  long long device_index = 0, num_bytes = 0;
  unsigned long long stream = 0, capture = 0, address = 0;
  if (!PyArg_ParseTuple(args, "LKKKL", &device_index, &stream, &capture, &address, &num_bytes)) return nullptr;
  kept_zeros().add({device_index, stream, capture}, reinterpret_cast<u8*>(address), num_bytes);
  Py_RETURN_NONE;
}

PyObject* clear_plans(PyObject*, PyObject*) {
  executor().plans.clear();
  Py_RETURN_NONE;
}

PyObject* num_plans(PyObject*, PyObject*) { return PyLong_FromSize_t(executor().plans.size()); }

// How many calls have fallen back to Python.
PyObject* num_fallbacks(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(executor().num_fallbacks); }

// (flag): whether every call falls back, and no plan is registered.
PyObject* set_python_only(PyObject*, PyObject* flag) {
  int truth = PyObject_IsTrue(flag);
  if (truth < 0) return nullptr;
  executor().is_python_only = truth > 0;
  Py_RETURN_NONE;
}

PyObject* is_python_only(PyObject*, PyObject*) { return Py_NewRef(executor().is_python_only ? Py_True : Py_False); }

// A tuple of (kind, a, b, c). -1 with an exception set where it is none.
i32 read_classes(PyObject* tuple, LengthClass (&classes)[kMaxLengthClasses]) {
  Py_ssize_t count = PyTuple_Size(tuple);
  if (count > kMaxLengthClasses)
    PyErr_Format(PyExc_ValueError, "%zd length classes; at most %d fit a key", count, kMaxLengthClasses);
  if (count < 0 || count > kMaxLengthClasses) return -1;
  for (Py_ssize_t index = 0; index < count; ++index) {
    long long kind = 0, a = 0, b = 0, c = 0;
    if (!PyArg_ParseTuple(PyTuple_GetItem(tuple, index), "LLLL", &kind, &a, &b, &c)) return -1;
    auto known = static_cast<LengthClassKind>(kind);
    bool is_right = kind >= 0 && known < LengthClassKind::kCount && a > 0;
    if (known == LengthClassKind::kPackedHeads) is_right = is_right && a <= 255 && b > 0;
    if (known == LengthClassKind::kRaggedQueries) is_right = is_right && b > 0;
    if (known == LengthClassKind::kManyKeyTiles) is_right = is_right && b > 0;
    if (known == LengthClassKind::kManyScores) is_right = is_right && a < 63;
    if (!is_right) {
      PyErr_Format(PyExc_ValueError, "no length class: (%lld, %lld, %lld, %lld)", kind, a, b, c);
      return -1;
    }
    classes[index] = {known, a, b, c};
  }
  return static_cast<i32>(count);
}

// (index of a device, its multiprocessors, length classes of a forward pass, of a backward pass)
PyObject* set_gpu(PyObject*, PyObject* args) {
  int index = 0;
  long long num_multiprocessors = 0;
  PyObject* classes[2] = {};
  if (!PyArg_ParseTuple(args, "iLO!O!", &index, &num_multiprocessors, &PyTuple_Type, &classes[0], &PyTuple_Type,
                        &classes[1]))
    return nullptr;
  Gpu gpu;
  gpu.num_multiprocessors = num_multiprocessors;
  for (i32 pass : {0, 1}) {
    if ((gpu.num_classes[pass] = read_classes(classes[pass], gpu.classes[pass])) < 0) return nullptr;
  }
  if (index >= 0 && index < kMaxGpus) executor().set_gpu(index, gpu);
  Py_RETURN_NONE;
}

// (length classes, (batch, heads, heads_kv, seqlen_q, seqlen_k, expected_q, expected_k, least_share), multiprocessors):
// a tuple of their numbers, for a test.
PyObject* length_classes(PyObject*, PyObject* args) {
  PyObject* tuple = nullptr;
  long long batch = 0, heads = 0, heads_kv = 0, seqlen_q = 0, seqlen_k = 0, expected_q = 0, expected_k = 0,
            least_share = 0, num_multiprocessors = 0;
  if (!PyArg_ParseTuple(args, "O!(LLLLLLLL)L", &PyTuple_Type, &tuple, &batch, &heads, &heads_kv, &seqlen_q, &seqlen_k,
                        &expected_q, &expected_k, &least_share, &num_multiprocessors)) {
    return nullptr;
  }
  Shape shape{batch, heads, heads_kv, seqlen_q, seqlen_k, expected_q, expected_k, least_share};
  LengthClass classes[kMaxLengthClasses];
  i32 count = read_classes(tuple, classes);
  PyObject* found = count < 0 ? nullptr : PyTuple_New(count);
  for (i32 index = 0; found != nullptr && index < count; ++index) {
    u8 number = length_class(classes[index], shape, num_multiprocessors);
    PyTuple_SetItem(found, index, PyLong_FromLong(number));
  }
  return found;
}

// (library of the driver, type of the device or "host" for the CPU engine, which needs no driver, then the functions of
// Executor in their order): None, or what is missing.
PyObject* open_executor(PyObject*, PyObject* args) {
  const char *library = nullptr, *device_type = nullptr;
  PyObject *fail = nullptr, *is_deterministic = nullptr, *matmul_precision = nullptr;
  if (!PyArg_ParseTuple(args, "ssOOO", &library, &device_type, &fail, &is_deterministic, &matmul_precision))
    return nullptr;
  Executor& found = executor();
  bool is_host = std::strcmp(device_type, "host") == 0;
  if (!is_host) {
    Driver driver;
    if (const char* missing = driver.open(library)) return PyUnicode_FromFormat("%s cannot be found", missing);
    found.is_open = false;
    found.driver = driver;
    found.device_type =
        std::strcmp(device_type, "cuda") == 0 ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    found.plans.clear();
    kept_zeros().clear();
  }
  Py_INCREF(args);  // and with it the functions
  found.fail = fail, found.is_deterministic = is_deterministic, found.matmul_precision = matmul_precision;
  (is_host ? found.is_host_open : found.is_open) = true;
  Py_RETURN_NONE;
}

PyObject* close_executor(PyObject*, PyObject*) {
  executor().is_open = false;
  executor().plans.clear();
  Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"register_ops", register_ops_once, METH_O, nullptr},
    {"override_torch_flash", override_torch_flash_by_key, METH_VARARGS, nullptr},
    {"restore_torch_flash", restore_torch_flash, METH_O, nullptr},
    {"raise_in_kernel", raise_in_kernel, METH_O, nullptr},
    {"waiting_call", waiting_call, METH_VARARGS, nullptr},
    {"draft_plan", draft_plan, METH_VARARGS, nullptr},
    {"register_plan", register_plan, METH_VARARGS, nullptr},
    {"has_plan", has_plan, METH_VARARGS, nullptr},
    {"add_kept_zeros", add_kept_zeros, METH_VARARGS, nullptr},
    {"clear_plans", clear_plans, METH_NOARGS, nullptr},
    {"num_plans", num_plans, METH_NOARGS, nullptr},
    {"num_fallbacks", num_fallbacks, METH_NOARGS, nullptr},
    {"set_python_only", set_python_only, METH_O, nullptr},
    {"is_python_only", is_python_only, METH_NOARGS, nullptr},
    {"set_gpu", set_gpu, METH_VARARGS, nullptr},
    {"length_classes", length_classes, METH_VARARGS, nullptr},
    {"open_executor", open_executor, METH_VARARGS, nullptr},
    {"close_executor", close_executor, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// The arguments that these kernels were built for, as a schema lists them.
constexpr const char* kSchema[] = {
#define FT_ARGUMENT(index, type, schema) schema,
#define FT_DENSE(index, words, ...) words,
#define FT_CACHE(index, words) words,
#define FT_LIMIT(name, words, value) words,
#include "arguments.inc"
};

template <size_t kCount>
bool add_names(PyObject* module, const char* name, const char* const (&names)[kCount]) {
  PyObject* tuple = PyTuple_New(kCount);
  for (size_t index = 0; tuple != nullptr && index < kCount; ++index)
    PyTuple_SetItem(tuple, index, PyUnicode_FromString(names[index]));
  bool is_added = tuple != nullptr && PyModule_AddObjectRef(module, name, tuple) == 0;
  Py_XDECREF(tuple);
  return is_added;
}

}  // namespace

bool add_executor(PyObject* module) {
  return PyModule_AddFunctions(module, kMethods) == 0 && add_names(module, "ARGUMENTS", kSchema) &&
         add_names(module, "TENSORS", kTensorNames) && add_names(module, "APPEND_TENSORS", kAppendNames) &&
         add_names(module, "SCALARS", kScalarNames) && add_names(module, "APPEND_SCALARS", kAppendScalarNames);
}

}  // namespace flashtile
