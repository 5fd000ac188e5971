// What the three builds of the CPU engine (engine_baseline.cpp, engine_avx2.cpp, engine_avx512.cpp) offer, and what they are told.
//
// A pass is a number of independent tasks, each with its own scratch. Whoever runs them may do so in any order, on any threads:
// every output element is written by one task, which sums in a fixed order.
#pragma once

#include "flashtile/attn/params.cuh"

namespace flashtile {

enum class Element : i32 { kFloat32, kFloat16, kBfloat16 };

// Where one sequence stands, as problem.py: SequenceSpan.
struct Span {
  i32 q_start, seqlen_q, k_start, seqlen_k;
};

struct EngineCall {
  const Params* params;
  const Span* spans;                       // (batch), or null: all rows and keys
  Element element, out_element, bias_element;  // of q, k, v and their gradients; of out and dout; of bias and dbias
  Element key_grad_element;                // of dk and dv: float32 where pages gather what several sequences add to them
  i32 num_threads;
};

struct EnginePass {
  i64 num_tasks;
  i64 scratch_floats;  // for each task that runs at a time
  void (*run)(const EngineCall& call, i64 task, float* scratch);
};

constexpr i32 kNumBackwardPasses = 5;

struct Engine {
  EnginePass (*forward)(const EngineCall& call);
  EnginePass (*backward[kNumBackwardPasses])(const EngineCall& call);  // to be run one after the other
};

extern const Engine kBaselineEngine;
#if defined(__x86_64__)
extern const Engine kAvx2Engine, kAvx512Engine;
#endif

}  // namespace flashtile
