// The executor as functions of the Python module (runtime/extension.py calls them).
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

namespace flashtile {

// Adds the functions and the lists of names to the module. False, with an exception set, where that fails.
bool add_executor(PyObject* module);

}  // namespace flashtile
