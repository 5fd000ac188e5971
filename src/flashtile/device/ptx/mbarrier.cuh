// mbarriers: shared-memory barriers that count arrivals and transferred bytes. Scope of every function: thread.
// (PTX ISA: Parallel Synchronization and Communication, mbarrier)
#pragma once

#include "device/ptx/sync.cuh"

namespace flashtile {

// Builds for racecheck define FT_LANE_ARRIVALS. There every lane of a warp arrives for itself (arrive_warp in
// tile/pipeline.cuh), because racecheck orders only the accesses of threads that arrive. The arrival of a warp then is
// 32 arrivals, and so every other arrival counts 32 times.
#ifdef FT_LANE_ARRIVALS
constexpr u32 kArrivalWeight = 32;
#else
constexpr u32 kArrivalWeight = 1;
#endif

// The barrier waits for num_arrivals calls of the functions below, or of arrive_warp. (PTX ISA: mbarrier.init)
FT_DEVICE void mbarrier_init(u64& barrier, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(num_arrivals * kArrivalWeight)
               : "memory");
}

// Makes initialised barriers visible to TMA. (PTX ISA: fence.mbarrier_init)
FT_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival of any weight. (PTX ISA: mbarrier.arrive)
template <u32 kWeight>
FT_DEVICE void mbarrier_arrive_weighted(u32 barrier_address) {
  if constexpr (kWeight == 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_address) : "memory");
  } else if constexpr (kWeight > 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_address), "n"(kWeight) : "memory");
  }
}

FT_DEVICE void mbarrier_arrive(u64& barrier) {
  jitter();
  mbarrier_arrive_weighted<kArrivalWeight>(shared_address(&barrier));
}

// Arrives; the phase then also waits for num_bytes of copies. (PTX ISA: mbarrier.arrive.expect_tx)
FT_DEVICE void mbarrier_arrive_expect(u64& barrier, u32 num_bytes) {
  mbarrier_arrive_weighted<kArrivalWeight - 1>(shared_address(&barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(num_bytes)
               : "memory");
}

// Waits a bounded time; true if the phase of the given parity has completed. (PTX ISA: mbarrier.try_wait)
FT_DEVICE bool mbarrier_try_wait(u64& barrier, u32 parity) {
  u32 is_done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
               : "=r"(is_done)
               : "r"(shared_address(&barrier)), "r"(parity)
               : "memory");
  return is_done != 0;
}

// Waits until the phase of the given parity has completed.
FT_DEVICE void mbarrier_wait(u64& barrier, u32 parity) {
  jitter();
  while (!mbarrier_try_wait(barrier, parity)) {}
}

}  // namespace flashtile
