// Loads from shared memory by 32-bit addresses. Scope of every function: thread.
#pragma once

#include "device/core/types.cuh"

namespace flashtile {

// Four floats from a multiple of 16 bytes. (PTX ISA: ld)
FT_DEVICE void load_shared_four(float (&r)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace flashtile
