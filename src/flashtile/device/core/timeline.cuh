// Clocks of one block, for a picture of what its warps do and wait for. mark() is empty in every build but one whose
// unit begins with `#define FT_TIMELINE <address>`: there one lane of a warp stores the clock. lab/profile/timeline.py
// makes such a build, allocates the buffer and draws it.
//
// Buffer:   u32 [warp][step][phase], the low half of the multiprocessor's clock; 0 = not reached.
// Meaning:  a phase lasts from its mark to the warp's next mark. A step is what a warp does for one tile of its loop.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// lab/profile/timeline.py reads this list: the name, whether the warp waits or works, and what for.
enum class Phase : i32 {
  wait_tile,     // wait: until a tile of operands has arrived
  wait_turn,     // wait: until it is this warpgroup's turn to issue products
  issue,         // work: products are issued
  wait_scores,   // wait: until the scores are computed
  maximum,       // work: mask and running maximum
  wait_output,   // wait: until the product before has been added
  exponentials,  // work: exponentials, sums and rounding
  issue_scores,  // work: the products of the next scores are issued
  wait_dq,       // wait: until dQ is computed
  add_dq,        // work: dQ is computed and added
  wait_dp,       // wait: until dP is computed
  gradient,      // work: derivative of the softmax
  store,         // work: results are stored
  wait_k_stage,  // wait: until a stage of K, or of Q and dO in a backward pass, is free
  copy_k,        // work: a copy of K, or of Q and dO, is issued
  wait_v_stage,  // wait: until a stage of V is free
  copy_v,        // work: a copy of V is issued
  end,           // work: nothing more in this step
  count,
};

constexpr u32 kTimelineBlock = 1, kTimelineSteps = 64;

#ifdef FT_TIMELINE
constexpr u64 kTimelineAddress = FT_TIMELINE;
#else
constexpr u64 kTimelineAddress = 0;
#endif

// Scope: the lanes of a warp that are active, together.
FT_DEVICE void mark(Phase phase, u32 step) {
  if constexpr (kTimelineAddress != 0) {
    bool is_first_lane = threadIdx.x % 32 == static_cast<u32>(__ffs(__activemask()) - 1);
    if (blockIdx.x == kTimelineBlock && step < kTimelineSteps && is_first_lane) {
      u32 clock;
      asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
      constexpr u32 kPhases = static_cast<u32>(Phase::count);
      u32 index = (threadIdx.x / 32 * kTimelineSteps + step) * kPhases + static_cast<u32>(phase);
      reinterpret_cast<volatile u32*>(kTimelineAddress)[index] = clock;
    }
  }
}

}  // namespace flashtile
