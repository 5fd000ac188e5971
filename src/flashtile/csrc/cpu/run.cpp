#include "run.h"

#include <torch/csrc/stable/c/shim.h>

#include <atomic>
#include <cstring>

namespace flashtile {
namespace {

// Uninitialised bytes from torch's CPU allocator, 64-byte aligned.
class Workspace {
 public:
  ~Workspace() {
    if (tensor_ != nullptr) aoti_torch_delete_tensor_object(tensor_);
  }

  char* allocate(i64 count) {
    int64_t size = count, stride = 1;
    void* data = nullptr;
    if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cpu(), 0,
                                 &tensor_) != 0)
      return nullptr;
    if (aoti_torch_get_data_ptr(tensor_, &data) != 0) return nullptr;
    return static_cast<char*>(data);
  }

 private:
  AtenTensorHandle tensor_ = nullptr;
};

// Each thread takes the next task when it is done with one, so that uneven tasks balance out.
struct TaskQueue {
  const EngineCall& call;
  EnginePass pass;
  char* scratch;
  std::atomic<i64> next{0};
};

void run_tasks(int64_t begin, int64_t end, void* context) {
  TaskQueue& queue = *static_cast<TaskQueue*>(context);
  for (int64_t worker = begin; worker < end; ++worker) {
    char* scratch = queue.scratch + worker * queue.pass.scratch_bytes;
    for (i64 task = queue.next++; task < queue.pass.num_tasks; task = queue.next++)
      queue.pass.run(queue.call, task, scratch);
  }
}

const char* run_pass(const EngineCall& call, EnginePass pass) {
  if (pass.num_tasks == 0) return nullptr;
  i64 workers = call.num_threads < pass.num_tasks ? call.num_threads : pass.num_tasks;
  Workspace workspace;
  char* scratch = workspace.allocate(workers * pass.scratch_bytes);
  if (scratch == nullptr && pass.scratch_bytes != 0) return "torch could not allocate the scratch of the CPU engine";
  TaskQueue queue{call, pass, scratch};
  return torch_parallel_for(0, workers, 1, run_tasks, &queue) == 0 ? nullptr
                                                                   : "torch's parallel_for failed in the CPU engine";
}

bool set_threads(EngineCall& call) {
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != 0) return false;
  call.num_threads = static_cast<i32>(threads);
  return true;
}

constexpr Engine kBaselineEngine = {&kBaselinePasses, &kBaselinePassesF64};
#if defined(__x86_64__)
constexpr Engine kAvx2Engine = {&kAvx2Passes, &kAvx2PassesF64};
constexpr Engine kAvx512Engine = {&kAvx512Passes, &kAvx512PassesF64};
#endif

constexpr const char* kNoThreads = "torch_get_num_threads failed";

}  // namespace

const Engine* find_engine(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "avx512") == 0) {
    bool is_supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("fma");
    return is_supported ? &kAvx512Engine : nullptr;
  }
  if (std::strcmp(name, "avx2") == 0) {
    bool is_supported =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return is_supported ? &kAvx2Engine : nullptr;
  }
#endif
  return std::strcmp(name, "baseline") == 0 ? &kBaselineEngine : nullptr;
}

const char* run_forward(const Engine& engine, EngineCall& call) {
  return set_threads(call) ? run_pass(call, engine.passes(call.element).forward(call)) : kNoThreads;
}

const char* run_backward(const Engine& engine, EngineCall& call) {
  if (!set_threads(call)) return kNoThreads;
  for (auto make : engine.passes(call.element).backward) {
    const char* error = run_pass(call, make(call));
    if (error != nullptr) return error;
  }
  return nullptr;
}

static const Engine* const kBest = [] {
  const Engine* found = nullptr;
  for (const char* name : kInstructionSets) found = found != nullptr ? found : find_engine(name);
  return found;
}();

const char* run_best(bool is_backward, const void* params, const Span* spans, const int (&elements)[4]) {
  EngineCall call{};
  call.params = static_cast<const Params*>(params);
  call.spans = spans;
  call.element = static_cast<Element>(elements[0]);
  call.out_element = static_cast<Element>(elements[1]);
  call.bias_element = static_cast<Element>(elements[2]);
  call.key_grad_element = static_cast<Element>(elements[3]);
  return is_backward ? run_backward(*kBest, call) : run_forward(*kBest, call);
}

}  // namespace flashtile
