// The CPU engine as the executor calls it (exec/plan.cpp), which knows nothing of what it computes.
#pragma once

namespace flashtile {

// A forward pass over whole sequences by the best engine of this processor: Params, and the Element of q, of out and of bias (engine.h).
// Null, or what failed.
const char* run_on_host(const void* params, const int (&elements)[3]);

}  // namespace flashtile
