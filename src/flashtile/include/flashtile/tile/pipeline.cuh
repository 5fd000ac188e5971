// Where a producer or a consumer stands in a ring of stages: the number of tiles it has been through. Scope: thread.
#pragma once

#include "flashtile/ptx/mbarrier.cuh"

namespace flashtile {

// A consumer waits for full[stage] with `phase`, a producer for empty[stage] with the other parity: all stages begin empty.
template <i32 kNumStages>
struct Ring {
  static_assert((kNumStages & (kNumStages - 1)) == 0);
  FT_DEVICE static u32 stage(u32 count) { return count % kNumStages; }
  FT_DEVICE static u32 phase(u32 count) { return count / kNumStages % 2; }
};

}  // namespace flashtile
