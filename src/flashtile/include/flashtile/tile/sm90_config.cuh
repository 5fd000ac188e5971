// The tile of a Hopper kernel: sizes, threads and registers of each role.
#pragma once

#include "flashtile/core/types.cuh"

namespace flashtile {

// Each consumer warpgroup owns 64 of the kBlockM queries; a warpgroup more holds the producer. With kTakesTurns the consumers issue their
// products one after the other, so that one has the tensor cores while the others are at their softmax. With kScalesLazily a row's maximum
// is raised, and O rescaled, only when the old one is too far off. With kStoresP a consumer's P goes through shared memory instead of staying in
// registers. With kPacksHeads its rows are queries of all heads that share a KV head.
template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumStages_, bool kTakesTurns_, bool kScalesLazily_, bool kStoresP_, bool kPacksHeads_>
struct Sm90Config {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumStages = kNumStages_;  // of K and of V
  static constexpr bool kTakesTurns = kTakesTurns_;
  static constexpr bool kScalesLazily = kScalesLazily_;
  static constexpr bool kStoresP = kStoresP_;
  static constexpr bool kPacksHeads = kPacksHeads_;
  static constexpr i32 kNumConsumers = kBlockM / 64;  // warpgroups
  static constexpr i32 kNumThreads = 128 * (kNumConsumers + 1);
  // What setmaxnreg hands out of the 65536 registers
  static constexpr i32 kProducerRegisters = kNumConsumers == 3 ? 32 : kNumConsumers == 2 ? 40 : 64;
  static constexpr i32 kConsumerRegisters = kNumConsumers == 3 ? 160 : kNumConsumers == 2 ? 232 : 248;
  // More than the block was launched with would wait forever
  static_assert(kNumConsumers * kConsumerRegisters + kProducerRegisters <= 65536 / kNumThreads / 8 * 8 * (kNumConsumers + 1));
  // Tiles lie in slabs of 64 columns; the last one may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsQ = 64 * 64 * kSlabsQK;  // of one consumer
  static constexpr i32 kElementsK = kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * kSlabsV;
  static constexpr i32 kElementsP = kStoresP ? 64 * 64 * ((kBlockN + 63) / 64) : 8;  // of one consumer
  static_assert(sizeof(T) == 2 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0);
  static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kBlockN <= 256);
};

}  // namespace flashtile
