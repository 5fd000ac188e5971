// The CPU engine as the executor calls it (exec/plan.cpp), which knows nothing of what it computes.
#pragma once

namespace flashtile {

// A pass over whole sequences by the best engine of this processor: Params, and the Element of q, of out, of bias, of dk and dv (engine.h).
// Null, or what failed.
const char* run_on_host(bool is_backward, const void* params, const int (&elements)[4]);

}  // namespace flashtile
