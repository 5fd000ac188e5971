// Thread block clusters: rank, barrier, arrivals at barriers of another block, and TMA loads to several blocks. One
// instruction per wrapper. (PTX ISA: Cluster, mapa, mbarrier.arrive, cp.async.bulk.tensor)
#pragma once

#include "device/ptx/tma.cuh"

namespace flashtile {

// The rank of this block in its cluster. Scope: thread. (PTX ISA: %cluster_ctarank)
FT_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for every thread of the cluster. Scope: cluster. (PTX ISA: barrier.cluster)
FT_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the barrier of the block with this rank that has the place of `barrier` there. Scope: thread.
// (PTX ISA: mapa, mbarrier.arrive)
FT_DEVICE void mbarrier_arrive_at(u64& barrier, u32 rank) {
  jitter();
  if constexpr (kArrivalWeight == 1) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [remote], %2; }" ::"r"(shared_address(&barrier)),
        "r"(rank), "n"(kArrivalWeight)
        : "memory");
  }
}

// Loads 16 bytes at the place of `shared` in the block with this rank. Scope: thread.
// (PTX ISA: mapa, ld.shared::cluster)
FT_DEVICE float4 load_at(const float4* shared, u32 rank) {
  jitter();
  float4 x;
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5; "
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote]; }"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "r"(shared_address(shared)), "r"(rank)
      : "memory");
  return x;
}

// As load_box, to the same place in every block whose bit is set in `blocks`; each block's barrier counts its bytes.
// Scope: thread. (PTX ISA: cp.async.bulk.tensor, multicast)
FT_DEVICE void load_box_multicast(void* shared, const TensorMap& map, u64& barrier, i32 column, i32 row, i32 head,
                                  i32 batch, u16 blocks) {
  jitter();
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks)
      : "memory");
}

}  // namespace flashtile
