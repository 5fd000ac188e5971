// The executor of this process: what it was opened with, and the plans that Python has registered, by their keys.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
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
  bool is_on_host = false;       // the CPU engine's
  std::vector<Span> spans = {};  // of such a call with index tensors
};

constexpr i32 kMaxGpus = 64;

// Filled by `open_executor`. References to Python objects are kept for the life of the process.
struct Executor {
  bool is_open = false;       // for the tensors of device_type, by kernels
  bool is_host_open = false;  // for CPU tensors, by the CPU engine
  bool is_python_only = false;
  Driver driver;
  i32 device_type = -1;
  PyObject* fail = nullptr;              // raises for (status, text)
  PyObject* is_deterministic = nullptr;  // torch's switch
  PyObject* matmul_precision = nullptr;  // torch's switch
  Gpu gpus[kMaxGpus];
  Plans plans;
  std::atomic<u64> num_fallbacks{0};

  enum class State { kReady, kFallback, kUnknownGpu };
  // Checks the call and computes the key of its plan.
  State prepare(Request& request) const;
};

Executor& executor();

// The call of this thread that has fallen back to Python, which may register a plan for it; or null.
Request*& fallen_back();
// What that call has raised in Python, or null. Owned.
PyObject*& raised();

}  // namespace flashtile
