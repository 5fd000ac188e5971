// The tile of the Hopper kernels for float32: sizes, warpgroup roles, parts of the operands.
//
// Each consumer warpgroup owns 64 of the kBlockM queries; one more warpgroup holds the producer.
//
// Contract: ../tiles.py says what fills the template and which sizes of it family.py repeats.
#pragma once

#include "families/sm90_f32/split_operand.cuh"

namespace flashtile {

template <class Parts_, i32 kHeadDim_, i32 kHeadDimV_, i32 kBlockM_, i32 kBlockN_, i32 kNumStages_, i32 kColumns_,
          bool kOverlaps_>
struct Sm90F32Config {
  using Parts = Parts_;
  static constexpr bool kIsHalf = kIsSame<typename Parts::Element, half_t>;
  static constexpr i32 kHeadDim = kHeadDim_;    // padded
  static constexpr i32 kHeadDimV = kHeadDimV_;  // padded
  static constexpr i32 kBlockM = kBlockM_;
  static constexpr i32 kBlockN = kBlockN_;
  static constexpr i32 kNumStages = kNumStages_;  // of K and of V
  static constexpr i32 kColumns = kColumns_;      // of O that one product computes
  static constexpr bool kOverlaps = kOverlaps_;  // scores of a tile and P V of the one before it are in flight together
  static constexpr bool kPacksHeads = false;
  static constexpr i32 kNumParts = Parts::kNumParts;
  static constexpr i32 kNumConsumers = kBlockM / 64;  // warpgroups
  static constexpr i32 kNumThreads = 128 * (kNumConsumers + 1);
  // Registers per thread that setmaxnreg assigns, out of 65536 per multiprocessor
  static constexpr i32 kProducerRegisters = kNumConsumers == 3 ? 32 : kNumConsumers == 1 ? 64 : kOverlaps ? 40 : 56;
  static constexpr i32 kConsumerRegisters = kNumConsumers == 3 ? 160 : kNumConsumers == 1 ? 248 : kOverlaps ? 232 : 224;
  // setmaxnreg would wait forever for more registers than the block was launched with
  static_assert(kNumConsumers * kConsumerRegisters + kProducerRegisters <=
                65536 / kNumThreads / 8 * 8 * (kNumConsumers + 1));
  // Tiles are slabs of 64 columns, part by part; the last slab of a part may be padded
  static constexpr i32 kSlabsQK = (kHeadDim + 63) / 64;
  static constexpr i32 kSlabsV = (kHeadDimV + 63) / 64;
  static constexpr i32 kElementsQ = kNumParts * 64 * 64 * kSlabsQK;  // per consumer
  static constexpr i32 kElementsdO = kNumParts * 64 * 64 * kSlabsV;
  static constexpr i32 kElementsK = kNumParts * kBlockN * 64 * kSlabsQK;
  static constexpr i32 kElementsV = kNumParts * kBlockN * 64 * kSlabsV;
  static_assert(kHeadDim % 16 == 0 && kHeadDimV % kColumns == 0 && (kColumns % 64 == 0 || kColumns == kHeadDimV));
  static_assert(kBlockM % 64 == 0 && kBlockN % 32 == 0 && kBlockN <= 256);
};

}  // namespace flashtile
