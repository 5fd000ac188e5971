// The interface of the CPU engine, which is built for three instruction sets and for float32 and float64 arithmetic:
// engine_baseline.cpp, engine_avx2.cpp, engine_avx512.cpp, and the same with _f64.
//
// A pass is a set of independent tasks, each with its own scratch. They may run in any order, on any threads: every
// output element is written by one task, which sums in a fixed order.
#pragma once

#include "device/attn/params.cuh"

namespace flashtile {

enum class Element : i32 { kFloat32, kFloat16, kBfloat16, kFloat64 };

// The parameters of a float64 call. Its lse, dlse, sinks, slopes and workspaces are float64 as well. plans/params.py
// mirrors the struct.
struct WideParams {
  Params base;  // without the numbers below
  double scale, scale_log2, softcap, softcap_factor, keep_factor;
};

// Rows of one sequence; the same fields as SequenceSpan in problem.py.
struct Span {
  i32 q_start, seqlen_q, k_start, seqlen_k;
};

struct EngineCall {
  const Params* params;      // of a float64 call: the base of a WideParams
  const Span* spans;         // (batch), or null: every sequence has all rows and keys
  Element element;           // of q, k, v and dq
  Element out_element;       // of out and dout
  Element bias_element;      // of bias and dbias
  Element key_grad_element;  // of dk and dv: that of the arithmetic for pages, where the gradients of several sequences
                             // add up
  i32 num_threads;
};

struct EnginePass {
  i64 num_tasks;
  i64 scratch_bytes;  // of each running task
  void (*run)(const EngineCall& call, i64 task, void* scratch);
};

constexpr i32 kNumBackwardPasses = 5;

// The passes for one instruction set and one arithmetic.
struct EnginePasses {
  EnginePass (*forward)(const EngineCall& call);
  EnginePass (*backward[kNumBackwardPasses])(const EngineCall& call);  // run in this order
};

extern const EnginePasses kBaselinePasses, kBaselinePassesF64;
#if defined(__x86_64__)
extern const EnginePasses kAvx2Passes, kAvx2PassesF64, kAvx512Passes, kAvx512PassesF64;
#endif

}  // namespace flashtile
