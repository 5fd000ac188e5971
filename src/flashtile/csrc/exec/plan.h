// A launch plan in C++: evaluated for the tensors of a call, as backends/executor.py does, and launched. plans/plan.py
// says what ties the two executors.
//
// It comes as a list of numbers (backends/native.py: serialize), which names tensors, values and numbers of a call by
// index. It knows tensors, bytes and grids, and nothing about attention.
#pragma once

#include <string>
#include <vector>

#include "driver.h"
#include "tensor.h"

namespace flashtile {

constexpr i32 kMaxTensors = 22, kMaxScalars = 16, kMaxValues = 48;
constexpr i32 kMaxImageBytes = 4096;  // what a launch may pass

struct Span;  // cpu/engine.h

// What a plan is evaluated for.
struct Call {
  View tensors[kMaxTensors];
  double scalars[kMaxScalars] = {};
  i64 asked_splits = 0;  // 0: the plan's choice
  i32 unwanted = -1;     // a tensor that is written and not returned: it lies among the workspaces
  Device device;
  void* stream = nullptr;
  const Span* spans = nullptr;  // (batch), for the CPU engine; null: every sequence has all rows and keys
  bool lacks_memory = false;    // torch has given none: no other plan will help

  bool note_no_memory() { return lacks_memory = true, false; }
};

enum class RuleKind : u8 {
  kTensor,
  kWorkspace,
  kStride,
  kBroadcastStride,
  kSize,
  kElements,
  kBroadcastSize,
  kDistinctSize,
  kBounded,
  kShare,
  kLeast,
  kQuotient,
  kValue,
  kScalar
};

struct Rule {
  RuleKind kind;
  i32 index;  // of the tensor, workspace, value or number
  i32 axis;   // from the end
  i64 more;   // kSize: what is added; kBroadcastSize, kDistinctSize, kBounded, kShare, kLeast: a value; kQuotient: the
              // divisor
};

enum class Layout : u8 { kRows, kContiguous, kAny, kAligned, kPairs };

struct Operand {
  i32 tensor;
  Layout layout;
  Dtype dtype;  // kNone: its own
  i32 like;     // -1, or: scratch output shaped like that tensor; discarded
  bool is_written;
};

struct Product {
  std::vector<Rule> rules;
};

struct Factor {
  i32 value;
  i64 divisor;
  i32 plus;  // a value that is added to the quotient; -1: none
};

struct Workspace {
  i64 element_bytes;
  bool is_zeroed, is_for_splits;
  bool is_kept;  // not the call's own: kept.h
  i64 num_padding;
  std::vector<i32> values, padding;
  std::vector<std::pair<i32, i64>> quotients;  // (value, divisor)
};

struct Patch {
  i32 offset;
  char code;  // of Python's struct module
  Rule rule;
};

struct MapPatch {
  i32 offset, tensor;
  i32 axes[3];
  u32 box_rows, box_heads;
  bool is_optional;  // left out where TMA cannot read the tensor
  bool is_paged;     // a box has as many rows as divide both box_rows and a page, a power of two
  int promotion;     // CUtensorMapL2promotion
};

enum class StepKind : u8 { kMemset, kKernel, kEngine };

struct Step {
  StepKind kind;
  i32 tensor;        // of a memset
  bool is_backward;  // of a pass of the CPU engine, as the next: cpu/run.h
  int elements[4];
  void* kernel;  // of a launch, as all below; null: not compiled yet
  std::vector<Factor> grid;
  unsigned num_threads, shared_bytes;
  bool is_for_splits;
  i64 max_blocks;     // for each multiprocessor, of a persistent grid; 0: a block for each work item
  i64 cluster;        // blocks of a cluster: `grid` counts clusters
  bool starts_early;  // may start while the kernel before it ends, and waits for it itself
  std::string name;
};

// What a launch failed with; text names the kernel.
struct Failure {
  int status = 0;
  std::string text;
};

enum class Outcome { kDone, kFallback, kIncomplete, kFailed };

// Memory that stands in a call for a tensor that kernels cannot read or write where it is.
struct Staged {
  i32 tensor;
  bool is_written;
  View original;
  Owned memory;
};

// A call of a plan with everything that its launches need.
struct Filled {
  alignas(64) u8 image[kMaxImageBytes];
  i64 values[kMaxValues];
  u8* workspaces[kMaxValues];  // null: not needed
  i64 sizes[kMaxValues];       // of the workspaces, in bytes
  Scratch scratch;
  std::vector<Staged> staged;
};

class Plan {
 public:
  // From numbers, the image of the parameters and the names of the kernels, one a line. Throws std::out_of_range where
  // they do not fit.
  Plan(const i64* numbers, i64 count, std::string image, const std::string& names);

  // Finds the kernels that a call launches, by their places among the plan's kernels, and the bytes of its kept
  // workspace. False where Python has to handle the call.
  bool find_needed(const Call& call, std::vector<i32>& kernels, i64& kept_bytes) const;
  // Everything is there that the call needs. False where a workspace is kept: it may have to grow.
  bool is_complete(const Call& call) const;
  // A kernel by its place among the plan's kernels. Throws std::out_of_range where there is none.
  void set_kernel(i32 place, void* kernel, std::string name);
  // Every tensor can be read and written in place, or staged: as a contiguous copy, or with aligned rows.
  bool takes(const Call& call) const;
  // Fills in everything and launches nothing. `owned` are the tensors that the call writes. With kFallback, and with
  // kIncomplete (a kernel is not compiled yet), Python has to handle the call.
  Outcome make_ready(Call& call, Owned* owned, const Driver& driver, Filled& filled, Failure& failure) const;
  // Launches everything.
  Outcome launch(const Call& call, Owned* owned, const Driver& driver, Filled& filled, Failure& failure) const;

 private:
  bool stage(Call& call, Filled& filled) const;
  bool evaluate(const Call& call, i64* values) const;
  bool num_bytes(const Workspace& workspace, const i64* values, i64& bytes) const;
  bool allocate(Call& call, Owned* owned, const Driver& driver, Filled& filled) const;
  bool fill(const Call& call, Filled& filled) const;
  bool zero_workspaces(const Call& call, const Filled& filled, const Driver& driver, Failure& failure) const;
  bool encode_maps(const Call& call, Filled& filled, const Driver& driver, Failure& failure) const;
  i64 num_blocks(const Step& step, const i64* values) const;

  std::string image_;
  i64 num_multiprocessors_ = 0;
  i64 split_rows_ = 0, split_columns_ = 0, split_blocks_ = 0;  // 0: keys are not split
  i32 expected_q_ = 0, seqlen_k_ = 0, heads_ = 0, batch_ = 0;  // which values they are, where keys are split
  std::vector<Operand> operands_;
  std::vector<Product> values_;
  std::vector<Workspace> workspaces_;
  std::vector<Patch> patches_;
  std::vector<MapPatch> maps_;
  std::vector<Step> steps_;
};

// The strides that torch.empty_like would choose.
void lay_out_like(const View& from, View& to);

}  // namespace flashtile
