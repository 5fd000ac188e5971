// The kernels of the ops, for those who call them without torch's dispatcher.
#pragma once

#include <string>

#include "python.h"
#include "stack.h"

namespace flashtile {

// The kernels of flashtile's ops for CPU and CUDA tensors. False where torch refuses them.
bool register_ops();

// Hands an exception to Python (backends/native.py: keep), which keeps it for the function that waits for it: torch
// drops all but the text, which is returned. The GIL is held.
std::string keep(PyObject* error);

// C++ may handle calls; otherwise Python handles all of them.
bool is_usable();
// FLASHTILE_CHECK: Python reads and checks index tensors in every call, before C++ runs it.
bool is_checking();
// torch's switch, which only Python can read. The executor is usable.
bool is_deterministic();
// Hands a call to an op with a Python kernel, which takes the arguments and leaves its tensors on the stack. Throws
// what it raises.
void call_python(const char* op, StableIValue* stack, uint64_t num_outputs);

// The kernels of forward.dense and backward.dense: the stack has the arguments of the schema, then what it returns.
void forward_dense(StableIValue* stack);
void backward_dense(StableIValue* stack);

}  // namespace flashtile
