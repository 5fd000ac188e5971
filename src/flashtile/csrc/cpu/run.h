// Runs the passes of an engine on torch's threads, with scratch from torch's allocator.
#pragma once

#include "engine.h"

namespace flashtile {

// The best first.
constexpr const char* kInstructionSets[] = {"avx512", "avx2", "baseline"};

// The engine of that name, or null where this processor or this build has none.
const Engine* find_engine(const char* name);

// Null, or what failed.
const char* run_forward(const Engine& engine, EngineCall& call);
const char* run_backward(const Engine& engine, EngineCall& call);
// Either by the best engine, over whole sequences: Params, and the Element of q, of out, of bias, of dk and dv.
const char* run_best(bool is_backward, const void* params, const int (&elements)[4]);

}  // namespace flashtile
