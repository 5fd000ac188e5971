// A ring of shared-memory stages between a producer and its consumers. Each side counts the tiles it has been through;
// stage and phase follow from the count. full[stage] completes when a tile has arrived, empty[stage] when every
// consumer warp has released it. All stages start empty.
#pragma once

#include "device/ptx/cp_async.cuh"
#include "device/ptx/mbarrier.cuh"

namespace flashtile {

template <i32 kNumStages>
struct Ring {
  // Scope of all: thread.
  FT_DEVICE static u32 stage(u32 count) { return count % kNumStages; }
  FT_DEVICE static u32 phase(u32 count) { return count / kNumStages % 2; }
  // Consumer: waits for tile number count.
  FT_DEVICE static void wait_full(u64 (&full)[kNumStages], u32 count) {
    mbarrier_wait(full[stage(count)], phase(count));
  }
  // Producer: waits until the stage of tile number count is free.
  FT_DEVICE static void wait_empty(u64 (&empty)[kNumStages], u32 count) {
    mbarrier_wait(empty[stage(count)], phase(count) ^ 1);
  }
};

// Named barriers, one of each kind per consumer warpgroup, and that of the producer. Barrier 0 is __syncthreads.
constexpr i32 kPingPongBarrier = 1;
constexpr i32 kConsumerBarrier = 8;
constexpr i32 kProducerBarrier = 15;

// Ping-pong of consumers, two of which meet at a barrier: one waits for its turn to issue products, another gives it
// the turn. Stores to shared memory before give_turn are visible after wait_turn. Scope: warpgroup.
template <bool kIsOn = true>
FT_DEVICE void wait_turn(i32 consumer) {
  if constexpr (kIsOn) named_barrier_sync(kPingPongBarrier + consumer, 256);
}
template <bool kIsOn = true>
FT_DEVICE void give_turn(i32 consumer) {
  if constexpr (kIsOn) named_barrier_arrive(kPingPongBarrier + consumer, 256);
}

// One arrival for the warp, after a __syncwarp if all lanes must be done. Lane 31 arrives; in builds for racecheck
// every lane does, with its part of the weight. Scope: warp.
FT_DEVICE void arrive_warp(u64& barrier) {
  if constexpr (kArrivalWeight == 32) {
    mbarrier_arrive_weighted<1>(shared_address(&barrier));
  } else {
    if (threadIdx.x % 32 == 31) mbarrier_arrive(barrier);
  }
}

// One arrival of this thread, once its cp.async copies so far have completed. Scope: thread.
FT_DEVICE void arrive_after_copies(u32 barrier_address) {
  mbarrier_arrive_weighted<kArrivalWeight - 1>(barrier_address);
  cp_async_arrive(barrier_address);
}

// Releases a stage: one arrival per consumer warp. Scope: warp.
FT_DEVICE void release_stage(u64& empty) { arrive_warp(empty); }

// Waits for a work item and its Q. The lanes leave together: once one of them releases this Q, the producer may
// overwrite the item before it and complete the next phase, so no lane may still read the one or wait for the other.
// Scope: warp.
FT_DEVICE void wait_item(u64& full_q, u32 index) {
  mbarrier_wait(full_q, index % 2);
  __syncwarp();
}

}  // namespace flashtile
