// Zeros that launches leave as they find them (runtime/kept.py), by the stream and capture whose launches share them.
// Python allocates them; here they are found without it.
#pragma once

#include <mutex>
#include <unordered_map>

#include "driver.h"

namespace flashtile {

class KeptZeros {
 public:
  // Whose launches run one after another: as Owner in runtime/kept.py.
  struct Owner {
    i64 device_index;
    u64 stream, capture;

    bool operator==(const Owner& other) const {
      return device_index == other.device_index && stream == other.stream && capture == other.capture;
    }
  };

  // Those of a stream, at least so many bytes; null where Python has registered none.
  u8* find(const Driver& driver, i32 device_index, void* stream, i64 num_bytes);
  void add(const Owner& owner, u8* address, i64 num_bytes);
  void clear();

 private:
  struct Hash {
    size_t operator()(const Owner& owner) const;
  };
  struct Region {
    u8* address;
    i64 num_bytes;
  };

  std::mutex mutex_;
  std::unordered_map<Owner, Region, Hash> regions_;
};

// Those of this process.
KeptZeros& kept_zeros();

}  // namespace flashtile
