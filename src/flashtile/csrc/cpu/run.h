// Runs the passes of an engine on torch's threads, with scratch from torch's allocator.
#pragma once

#include "engine.h"

namespace flashtile {

// Best first.
constexpr const char* kInstructionSets[] = {"avx512", "avx2", "baseline"};

// The engine of an instruction set.
struct Engine {
  const EnginePasses *float32, *float64;

  // The passes for calls with tensors of this type.
  const EnginePasses& passes(Element element) const { return element == Element::kFloat64 ? *float64 : *float32; }
};

// The engine of that name, or null if this processor or this build does not support it.
const Engine* find_engine(const char* name);

// Runs all passes. Returns null, or an error message.
const char* run_forward(const Engine& engine, EngineCall& call);
const char* run_backward(const Engine& engine, EngineCall& call);
// Runs the passes with the best engine. `elements`: the Element of q, of out, of bias, of dk and dv.
const char* run_best(bool is_backward, const void* params, const Span* spans, const int (&elements)[4]);

}  // namespace flashtile
