// The tiles of the two kernels of the wide Hopper backward: sizes, stages and registers per role. Both have two
// consumer warpgroups; one more warpgroup holds the producer. Tiles are slabs of 64 columns.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// What both kernels share. Registers per thread are those that setmaxnreg assigns, out of 65536 per multiprocessor.
template <typename T, i32 kHeadDim_, i32 kHeadDimV_>
struct Sm90WideConfig {
  using Element = T;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kSlabsQK = kHeadDim / 64;
  static constexpr i32 kSlabsV = kHeadDimV / 64;
  static constexpr i32 kNumThreads = 384;
  static constexpr i32 kProducerRegisters = 24;
  static constexpr i32 kConsumerRegisters = 240;
  static_assert(sizeof(T) == 2 && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 && kHeadDim <= 256 && kHeadDimV <= 256);
};

// bwd_sm90_dkdv_kernel: a block owns 64 keys and streams tiles of 64 queries.
template <typename T, i32 kHeadDim, i32 kHeadDimV, i32 kNumStages_, i32 kNumBiasStages_ = 1>
struct Sm90DkdvConfig : Sm90WideConfig<T, kHeadDim, kHeadDimV> {
  using Base = Sm90WideConfig<T, kHeadDim, kHeadDimV>;
  static constexpr i32 kBlockM = 64;
  static constexpr i32 kBlockN = 64;
  static constexpr i32 kNumStages = kNumStages_;  // of Q and of dO
  static constexpr i32 kNumBuffers = 2;           // of P
  static constexpr i32 kNumBiasStages = kNumBiasStages_;
  static constexpr i32 kNumConsumers = 1;       // of options: the warpgroup that computes P
  static constexpr bool kHasOneProduct = true;  // it has S^T, and no dP^T
  // K and V are register operands where there is room: products then read less shared memory, which is the bound
  static constexpr bool kHoldsKeys = kHeadDim <= 192 && kHeadDimV <= 192;
  static constexpr i32 kElementsQK = 64 * 64 * Base::kSlabsQK;
  static constexpr i32 kElementsV = 64 * 64 * Base::kSlabsV;
  static_assert(kNumStages >= 2);
};

// bwd_sm90_dq_kernel: a block owns 128 queries, 64 for each consumer, and streams tiles of kBlockN keys.
template <typename T, i32 kHeadDim, i32 kHeadDimV, i32 kBlockN_, i32 kStagesK_, i32 kStagesV_>
struct Sm90DqConfig : Sm90WideConfig<T, kHeadDim, kHeadDimV> {
  using Base = Sm90WideConfig<T, kHeadDim, kHeadDimV>;
  static constexpr i32 kBlockM = 128;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kStagesK = kStagesK_;
  static constexpr i32 kStagesV = kStagesV_;
  static constexpr i32 kElementsQ = 64 * 64 * Base::kSlabsQK;  // per consumer
  static constexpr i32 kElementsdO = 64 * 64 * Base::kSlabsV;  // per consumer
  static constexpr i32 kElementsK = kBlockN * 64 * Base::kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * Base::kSlabsV;
  // dO is a register operand where there is room
  static constexpr bool kHoldsdO = kHeadDim <= 192 && kHeadDimV <= 128 && kBlockN <= 64;
  // A tile's K is used again, for dQ, after the scores of the next tile have been started
  static_assert(kStagesK >= 2 && kStagesV >= 1 && kBlockN % 16 == 0);
};

}  // namespace flashtile
