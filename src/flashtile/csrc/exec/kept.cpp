#include "kept.h"

namespace flashtile {

size_t KeptZeros::Hash::operator()(const Owner& owner) const {
  u64 hash = static_cast<u64>(owner.device_index) * 1099511628211ull ^ owner.stream;
  return static_cast<size_t>(hash * 1099511628211ull ^ owner.capture);
}

u8* KeptZeros::find(const Driver& driver, i32 device_index, void* stream, i64 num_bytes) {
  Owner owner{device_index, 0, 0};
  int is_captured = 0;
  int status = driver.in_context(device_index, [&] {
    return driver.cuStreamGetCaptureInfo_v2(stream, &is_captured, &owner.capture, nullptr, nullptr, nullptr);
  });
  if (status != 0) return nullptr;
  if (is_captured != 0) {
    owner.stream = reinterpret_cast<u64>(stream);  // cuStreamGetId would end the capture
  } else {
    owner.capture = 0;
    if (driver.cuStreamGetId(stream, &owner.stream) != 0) return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = regions_.find(owner);
  return found != regions_.end() && found->second.num_bytes >= num_bytes ? found->second.address : nullptr;
}

void KeptZeros::add(const Owner& owner, u8* address, i64 num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  regions_[owner] = {address, num_bytes};
}

void KeptZeros::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  regions_.clear();
}

static KeptZeros* const kKeptZeros = new KeptZeros;  // never destroyed: threads may still launch at exit

KeptZeros& kept_zeros() { return *kKeptZeros; }

}  // namespace flashtile
