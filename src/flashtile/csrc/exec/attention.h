// A call of the ops: its arguments, whether C++ can handle it, the key of its plan, and the tensors it returns.
//
// The checks are those of problem.py: validate and backends/kvcache.py: validate, less what the key holds. The head of
// problem.py says what ties them. A call that fails one falls back to Python, which words the refusal.
#pragma once

#include <cstring>
#include <vector>

#include "../cpu/engine.h"
#include "length_class.h"
#include "plan.h"

namespace flashtile {

enum class Pass : u8 { kForward, kBackward, kAppend };

// The tensors of a forward or backward pass by index. backends/native.py looks the names of a plan up in kTensorNames
// and in the lists of names below.
enum Tensor : i32 {
#define FT_TENSOR(index, name) index,
#include "arguments.inc"
  kOut,
  kLse,
  kDout,
  kDlse,
  kDq,
  kDk,
  kDv,
  kDbias,
  kDsinks
};
constexpr i32 kNumInputs = kOut, kNumGrads = 5;
constexpr const char* kTensorNames[] = {
#define FT_TENSOR(index, name) name,
#include "arguments.inc"
    "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks"};
static_assert(kDsinks + 1 == kMaxTensors, "a new tensor: raise kMaxTensors (plan.h)");
// The tensors of an append. The last three belong to a step, which also rotates its queries and writes the new lengths.
enum AppendTensor : i32 {
  kKCache,
  kVCache,
  kNewK,
  kNewV,
  kCacheSeqlens,
  kTable,
  kRotaryCos,
  kRotarySin,
  kStepQ,
  kRotatedQ,
  kStepSeqused
};
constexpr i32 kNumAppendInputs = kStepQ, kNumAppendTensors = kStepSeqused + 1;
constexpr const char* kAppendNames[] = {"k_cache",    "v_cache",    "k", "v",         "cache_seqlens", "block_table",
                                        "rotary_cos", "rotary_sin", "q", "rotated_q", "seqused_k"};
static_assert(kNumAppendTensors <= kMaxTensors);

enum Scalar : i32 {
  kWindowLeft,
  kWindowRight,
  kScale,
  kScaleLog2,
  kSoftcap,
  kSoftcapFactor,
  kDropoutThreshold,
  kKeepFactor,
  kFirstQuery,
  kFirstKeyGroup,
  kFirstHead,
  kTotalHeads,
  kMaxSeqlenQ,
  kMaxSeqlenK,
  kKeySplits,
  kKeyShares
};
constexpr const char* kScalarNames[] = {
    "window_left",       "window_right", "scale",       "scale_log2",      "softcap",    "softcap_factor",
    "dropout_threshold", "keep_factor",  "first_query", "first_key_group", "first_head", "total_heads",
    "max_seqlen_q",      "max_seqlen_k", "num_splits",  "num_shares"};
static_assert(kKeyShares < kMaxScalars, "a new scalar: raise kMaxScalars (plan.h)");
enum AppendScalar : i32 { kIsInterleaved, kIsOrdered, kLength };
constexpr const char* kAppendScalarNames[] = {"is_interleaved", "is_ordered", "length"};

enum class Causal : u8 { kNone, kTopLeft, kBottomRight };

// The arguments of a call that are no tensors. A length that is None is -1.
struct Options {
  i64 max_seqlen_q = -1, max_seqlen_k = -1;
  bool has_scale = false;
  double scale = 0.0;
  Causal causal = Causal::kNone;
  i64 window_left = -1, window_right = -1;
  double softcap = 0.0, dropout_p = 0.0;
  i64 first_query = 0, first_key = 0, first_head = 0, total_heads = 0;
  bool is_deterministic = false;
  i64 num_splits = 0;
  Dtype out_dtype = Dtype::kNone;
  bool is_bshd = false;
  bool is_named = false;  // the backend was asked for by name
  bool needs_grad = false, needs_bias_grad = false;
  char matmul_precision = 0;       // for float32: the length of "highest", "high" or "medium"
  bool is_wanted[kNumGrads] = {};  // of a backward pass
  bool is_interleaved = false;     // of an append, as the next two
  bool is_ordered = false;         // each query of a step has a position of its own
  i64 length = -1;                 // of every sequence; -1: cache_seqlens has them
};

// What selection looks at beside the call.
struct Gpu {
  i64 num_multiprocessors = 0;
  i32 num_classes[2] = {};  // of a forward pass, of a backward pass
  LengthClass classes[2][kMaxLengthClasses] = {};
  i64 num_threads = 0;  // of the CPU engine, where that is the device

  bool operator==(const Gpu& other) const;
};

// Everything that Python's choice of a plan looks at. Of lengths it holds their classes alone.
struct Key {
  Pass pass = Pass::kForward;
  u8 device = 0;
  // Dtype and rank, 0 where there is none: q, k and v may differ in dtype. Two more than needed: keys are compared as
  // bytes, and may have no padding
  u8 tensors[kMaxTensors + 2] = {};
  u8 classes[kMaxLengthClasses] = {};
  char matmul_precision = 0;
  u8 out_dtype = 0;
  i32 head_dim = 0, head_dim_v = 0;
  u32 flags = 0;

  // Of q, k, v and of the results that a kernel reads or writes by rows.
  bool has_aligned_rows() const { return (flags & 1) != 0; }
  // Of q, k and v each.
  bool has_disjoint_rows() const { return (flags & 2) != 0; }
};
static_assert(sizeof(Key) == 64, "Key: no padding");

inline bool operator==(const Key& a, const Key& b) { return std::memcmp(&a, &b, sizeof(Key)) == 0; }

// Checks a call of the two passes, fills its numbers and lays out the tensors it returns. False: Python has to handle
// it.
bool prepare_attention(Pass pass, const Options& options, const Gpu& gpu, Call& call, Key& key);
// Whether its tensors have the dtypes and ranks, and are there, as problem.py: validate asks. The key holds all that:
// nobody has to ask for a call that has a plan.
bool has_right_tensors(const Options& options, const Call& call);
// The sizes of a call, as problem.py: shape_of
Shape shape_of(const Options& options, const Call& call);
// As problem.py: is_v_in_k
bool is_v_in_k(const View& k, const View& v);
// No two rows of a head overlap in memory.
bool rows_disjoint(const View& tensor, bool is_bshd);
// Where the queries and keys of each sequence stand, by the index tensors of a forward call on the CPU that
// prepare_attention has checked, as problem.py: check_values. False where a value is out of bounds. None: all rows.
bool read_spans(const Options& options, const Call& call, std::vector<Span>& spans);
// The same for an append. The tensors that a step writes have been laid out.
bool prepare_append(const Options& options, Call& call, Key& key);
// As backends/kvcache.py: validate_queries
bool are_fitting_queries(const View& q, const View& k);
// Lays out what a step of these queries, new rows and angles writes beside the caches.
void lay_out_step(const Options& options, const View& q, Call& call);

}  // namespace flashtile
