// Messages between blocks of one launch: 8 bytes of data and a mark of 8 bytes in one access of 16, so that whoever
// sees the mark sees the data, without a fence. Scope of every function: thread. (PTX ISA: Memory Consistency Model,
// ld.relaxed, st.relaxed)
#pragma once

#include "flashtile/ptx/sync.cuh"

namespace flashtile {

struct alignas(16) Message {
  float x, y;
  u64 mark;
};

FT_DEVICE void send(Message* to, const Message& message) {
  jitter();
  asm volatile(
      "{ .reg .b64 d; .reg .b128 m; mov.b64 d, {%1, %2}; mov.b128 m, {d, %3}; st.relaxed.gpu.global.b128 [%0], m; }" ::
          "l"(to),
      "f"(message.x), "f"(message.y), "l"(message.mark)
      : "memory");
}

// What is there now.
FT_DEVICE Message receive(const Message* from) {
  Message found;
  asm volatile(
      "{ .reg .b64 d; .reg .b128 m; ld.relaxed.gpu.global.b128 m, [%3]; mov.b128 {d, %2}, m; mov.b64 {%0, %1}, d; }"
      : "=f"(found.x), "=f"(found.y), "=l"(found.mark)
      : "l"(from)
      : "memory");
  return found;
}

}  // namespace flashtile
