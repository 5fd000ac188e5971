// The tile of a Hopper kernel: sizes, warpgroup roles and registers per role.
//
// Each consumer warpgroup owns 64 of the kBlockM queries; one more warpgroup holds the producer.
//   kPingPong         consumers issue their products in turn, so that one uses the tensor cores while the others
//                     compute their softmax
//   kRescalesLazily   a row's maximum is raised, and O rescaled, only if the old maximum is too far off
//   kStoresP          a consumer's P goes through shared memory instead of staying in registers
//   kPacksHeads       a consumer's rows are queries of all heads that share a KV head
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

template <typename T, typename Out, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumStages_,
          bool kPingPong_, bool kRescalesLazily_, bool kStoresP_, bool kPacksHeads_>
struct Sm90Config {
  using Element = T;
  using OutElement = Out;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumStages = kNumStages_;  // of K and of V
  static constexpr bool kPingPong = kPingPong_;
  static constexpr bool kRescalesLazily = kRescalesLazily_;
  static constexpr bool kStoresP = kStoresP_;
  static constexpr bool kPacksHeads = kPacksHeads_;
  static constexpr i32 kNumConsumers = kBlockM / 64;  // warpgroups
  static constexpr i32 kNumThreads = 128 * (kNumConsumers + 1);
  // Registers per thread that setmaxnreg assigns, out of 65536 per multiprocessor
  static constexpr i32 kProducerRegisters = kNumConsumers >= 3 ? 32 : kNumConsumers == 2 ? 40 : 64;
  // What the block was launched with: setmaxnreg would wait forever for more
  static constexpr i32 kAllRegisters = 65536 / kNumThreads / 8 * 8 * (kNumConsumers + 1);
  FT_DEVICE static constexpr i32 consumer_registers(i32 producer_registers) {
    i32 rest = (kAllRegisters - producer_registers) / kNumConsumers / 8 * 8;
    return rest < 248 ? rest : 248;
  }
  static constexpr i32 kConsumerRegisters = consumer_registers(kProducerRegisters);
  // Up to 128 columns the softmax limits the loop, with more the products: loops differ
  static constexpr bool kIsSoftmaxBound = kHeadDimV <= 128;
  // Tiles are slabs of 64 columns; the last slab may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsQ = 64 * 64 * kSlabsQK;  // per consumer
  static constexpr i32 kElementsK = kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kBlockN * 64 * kSlabsV;
  static constexpr i32 kElementsP = kStoresP ? 64 * 64 * ((kBlockN + 63) / 64) : 8;  // per consumer
  static_assert(sizeof(T) == 2 && kHeadDim % 16 == 0 && kHeadDimV % 32 == 0);
  static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0 && kBlockN <= 256);
};

}  // namespace flashtile
