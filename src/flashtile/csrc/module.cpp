// The Python module flashtile._C: functions of plain integers, called by runtime/extension.py alone. Limited API of
// Python 3.10, stable ABI of torch 2.10: one binary for all later ones.
#include "cpu/run.h"
#include "exec/python.h"

namespace flashtile {
namespace {

// Raises what a pass failed with; returns None otherwise.
PyObject* result_of(const char* error) {
  if (error == nullptr) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, error);
  return nullptr;
}

// (address of Params or WideParams, address of Spans or 0, Element of q, of out, of bias, of dk and dv, instruction
// set)
bool parse(PyObject* args, EngineCall& call, const char*& isa) {
  unsigned long long params = 0, spans = 0;
  int element = 0, out = 0, bias = 0, key_grad = 0;
  if (!PyArg_ParseTuple(args, "KKiiiis", &params, &spans, &element, &out, &bias, &key_grad, &isa)) return false;
  call.params = reinterpret_cast<const Params*>(params);
  call.spans = reinterpret_cast<const Span*>(spans);
  call.element = static_cast<Element>(element);
  call.out_element = static_cast<Element>(out);
  call.bias_element = static_cast<Element>(bias);
  call.key_grad_element = static_cast<Element>(key_grad);
  return true;
}

PyObject* run_call(PyObject* args, const char* (*run)(const Engine&, EngineCall&)) {
  EngineCall call{};
  const char* isa = nullptr;
  if (!parse(args, call, isa)) return nullptr;
  const Engine* engine = find_engine(isa);
  if (engine == nullptr) return PyErr_Format(PyExc_ValueError, "no engine for %s on this processor", isa);
  const char* error = nullptr;
  Py_BEGIN_ALLOW_THREADS;
  error = run(*engine, call);
  Py_END_ALLOW_THREADS;
  return result_of(error);
}

PyObject* forward(PyObject*, PyObject* args) { return run_call(args, run_forward); }

PyObject* backward(PyObject*, PyObject* args) { return run_call(args, run_backward); }

// The instruction sets that this processor and this build both have, the best first.
PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (names == nullptr) return nullptr;
  for (const char* name : kInstructionSets) {
    if (find_engine(name) == nullptr) continue;
    PyObject* text = PyUnicode_FromString(name);
    if (text == nullptr || PyList_Append(names, text) != 0) {
      Py_XDECREF(text);
      Py_DECREF(names);
      return nullptr;
    }
    Py_DECREF(text);
  }
  return names;
}

PyMethodDef kMethods[] = {
    {"cpu_forward", forward, METH_VARARGS, nullptr},
    {"cpu_backward", backward, METH_VARARGS, nullptr},
    {"instruction_sets", instruction_sets, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "flashtile._C", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace flashtile

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&flashtile::kModule);
  // What the Python side checks its own mirror against
  bool is_complete =
      module != nullptr && PyModule_AddIntConstant(module, "PARAMS_BYTES", sizeof(flashtile::WideParams)) == 0;
  if (module != nullptr && !(is_complete && flashtile::add_executor(module))) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
