// The interface of the CPU engine, which is built three times: engine_baseline.cpp, engine_avx2.cpp, engine_avx512.cpp.
//
// A pass is a set of independent tasks, each with its own scratch. They may run in any order, on any threads: every
// output element is written by one task, which sums in a fixed order.
#pragma once

#include "flashtile/attn/params.cuh"

namespace flashtile {

enum class Element : i32 { kFloat32, kFloat16, kBfloat16 };

// Rows of one sequence; the same fields as SequenceSpan in problem.py.
struct Span {
  i32 q_start, seqlen_q, k_start, seqlen_k;
};

struct EngineCall {
  const Params* params;
  const Span* spans;         // (batch), or null: every sequence has all rows and keys
  Element element;           // of q, k, v and dq
  Element out_element;       // of out and dout
  Element bias_element;      // of bias and dbias
  Element key_grad_element;  // of dk and dv: float32 for pages, where the gradients of several sequences add up
  i32 num_threads;
};

struct EnginePass {
  i64 num_tasks;
  i64 scratch_floats;  // of each running task
  void (*run)(const EngineCall& call, i64 task, float* scratch);
};

constexpr i32 kNumBackwardPasses = 5;

struct Engine {
  EnginePass (*forward)(const EngineCall& call);
  EnginePass (*backward[kNumBackwardPasses])(const EngineCall& call);  // run in this order
};

extern const Engine kBaselineEngine;
#if defined(__x86_64__)
extern const Engine kAvx2Engine, kAvx512Engine;
#endif

}  // namespace flashtile
