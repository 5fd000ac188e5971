#include "executor.h"

#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>

namespace flashtile {
namespace {

constexpr u8 kHostDevice = 255;  // in keys

}  // namespace

size_t KeyHash::operator()(const Key& key) const {
  u64 words[sizeof(Key) / 8], hash = 1469598103934665603ull;
  std::memcpy(words, &key, sizeof(words));
  for (u64 word : words) hash = (hash ^ word) * 1099511628211ull, hash ^= hash >> 29;
  return hash;
}

std::shared_ptr<const Plan> Plans::find(const Key& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = plans_.find(key);
  return found == plans_.end() ? nullptr : found->second;
}

void Plans::add(const Key& key, std::shared_ptr<const Plan> plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_[key] = std::move(plan);
}

void Plans::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_.clear();
}

size_t Plans::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_.size();
}

// Never destroyed: threads may still make calls at exit
static Executor* const kExecutor = [] {
  auto unlock = [] { executor().plans.unlock(); };
  pthread_atfork([] { executor().plans.lock(); }, unlock, unlock);
  return new Executor;
}();

Executor& executor() { return *kExecutor; }

Request*& fallen_back() {
  thread_local Request* request = nullptr;
  return request;
}

Raised*& raised() {
  thread_local Raised* error = nullptr;
  return error;
}

void Executor::set_gpu(i32 index, const Gpu& gpu) {
  const Gpu* known = gpus[index];
  // Another thread may be reading the one before: it stays
  if (known == nullptr || !(*known == gpu)) gpus[index] = new Gpu(gpu);
}

Executor::State Executor::prepare(Request& request) const {
  auto answer = [](bool is_ready) { return is_ready ? State::kReady : State::kFallback; };
  if (request.pass == Pass::kAppend) return answer(prepare_append(request.options, request.call, request.key));
  if (request.is_on_host) {
    uint32_t num_threads = 1;
    Gpu host;
    if (torch_get_num_threads(&num_threads) != 0) return State::kFallback;
    host.num_threads = num_threads;
    bool is_ready = prepare_attention(request.pass, request.options, host, request.call, request.key) &&
                    read_spans(request.options, request.call, request.spans);
    request.call.spans = request.spans.empty() ? nullptr : request.spans.data();
    request.key.device = kHostDevice;
    return answer(is_ready);
  }
  i32 index = request.call.tensors[kQ].device.index;
  if (index < 0 || index >= kMaxGpus) return State::kFallback;
  const Gpu* gpu = gpus[index];
  if (gpu == nullptr) return State::kUnknownGpu;
  return answer(prepare_attention(request.pass, request.options, *gpu, request.call, request.key));
}

}  // namespace flashtile
