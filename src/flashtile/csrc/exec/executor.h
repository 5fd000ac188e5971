// The executor of this process: what it was opened with, and the plans that Python has registered, by their keys.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "attention.h"
#include "python.h"

namespace flashtile {

struct KeyHash {
  size_t operator()(const Key& key) const;
};

class Plans {
 public:
  // Or null.
  std::shared_ptr<const Plan> find(const Key& key);
  void add(const Key& key, std::shared_ptr<const Plan> plan);
  void clear();
  size_t size();
  // Around a fork: the child has no thread that would unlock what another one has locked.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, KeyHash> plans_;
};

// A call of an op, read and on its way to a plan.
struct Request {
  Pass pass;
  Options options;
  Call call;
  Key key;
  bool is_on_host = false;                // the CPU engine's
  std::vector<Span> spans = {};           // of such a call with index tensors
  std::shared_ptr<Plan> draft = nullptr;  // that Python has made for this call and not registered yet
  bool is_planned = false;                // Python has registered a plan, and leaves the call to C++
};

constexpr i32 kMaxGpus = 64;

// Filled by `register_ops`, `open_executor` and `set_gpu` under the GIL, and read without it. References to Python
// objects are kept for the life of the process.
struct Executor {
  std::atomic<bool> is_open{false};       // for the tensors of device_type, by kernels
  std::atomic<bool> is_host_open{false};  // for CPU tensors, by the CPU engine
  std::atomic<bool> is_python_only{false};
  Driver driver;  // set before is_open, as device_type
  i32 device_type = -1;
  std::atomic<PyObject*> keep{nullptr};              // keeps an exception and returns its text
  std::atomic<PyObject*> fail{nullptr};              // raises for (status, text)
  std::atomic<PyObject*> is_deterministic{nullptr};  // torch's switch
  std::atomic<PyObject*> matmul_precision{nullptr};  // torch's switch
  std::atomic<const Gpu*> gpus[kMaxGpus] = {};       // null: not known yet
  Plans plans;
  std::atomic<u64> num_fallbacks{0};

  void set_gpu(i32 index, const Gpu& gpu);

  enum class State { kReady, kFallback, kUnknownGpu };
  // Checks the call and computes the key of its plan.
  State prepare(Request& request) const;
};

// Never destroyed: threads of torch may make calls while the process ends.
Executor& executor();

// The call of this thread that has fallen back to Python, which may register a plan for it; or null.
Request*& fallen_back();
// The text of what a Python kernel has raised, if it has.
using Raised = std::optional<std::string>;
// Where the Python kernel that this thread has called leaves it; null where C++ has called none.
Raised*& raised();

}  // namespace flashtile
