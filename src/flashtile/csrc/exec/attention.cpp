#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashtile {
namespace {

#define FT_LIMIT(name, words, value) constexpr i64 name = value;
#include "arguments.inc"
constexpr i64 kMaxTiles = (i64{1} << 30) - 1;                   // backends/cuda.py: MAX_TILES
constexpr i64 kWidestWindow = std::numeric_limits<i32>::max();  // plans/params.py: kernel_window
// As in plans/params.py: kernel_softcap, kernel_scale_log2
constexpr double kSmallestSoftcap = 0x1p-100, kLargestSoftcap = 0x1p100, kSmallestFloat = 0x1p-149;
constexpr double kSmallestFactor = 0x1p-126, kLargestFactor = 0x1p126, kLargestFactorF64 = 0x1p1022;
constexpr double kLargestScale = 0x1p127;  // problem.py: LARGEST_SCALE
constexpr double kLog2e = 1.4426950408889634;

struct Axes {
  i32 head, row;
};

Axes axes_of(bool is_bshd) { return is_bshd ? Axes{-2, -3} : Axes{-3, -2}; }

bool is_on_one_device(const Call& call, i32 count) {
  for (i32 index = 0; index < count; ++index) {
    if (call.tensors[index].is_given() && !(call.tensors[index].device == call.device)) return false;
  }
  return true;
}

bool has_plain_rows(const View& tensor) { return tensor.size(-1) <= 1 || tensor.stride(-1) == 1; }

// As problem.py: _bound
i64 bound(const Call& call, i64 most, i64 max_seqlen, i32 axis) {
  i64 length = max_seqlen >= 0 ? std::min(most, max_seqlen) : most;
  for (Tensor index : {kMask, kBias}) {
    const View& tensor = call.tensors[index];
    if (tensor.is_given() && tensor.size(axis) != 1) length = std::min(length, tensor.size(axis));
  }
  return length;
}

bool check_scalars(const Options& options) {
  if (options.window_left < -1 || options.window_right < -1 || options.num_splits < 0) return false;
  // Larger ones are for float64 alone: Python takes or refuses them
  if (options.has_scale && !(std::fabs(options.scale) <= kLargestScale)) return false;
  if (!(options.softcap >= 0.0 && options.softcap <= std::numeric_limits<float>::max())) return false;
  if (!(options.dropout_p >= 0.0 && options.dropout_p < 1.0)) return false;
  for (i64 index : {options.first_query, options.first_key, options.first_head, options.total_heads}) {
    if (index < 0 || index > kMaxLength) return false;
  }
  if (options.first_key % 8 != 0) return false;
  return options.max_seqlen_q <= kMaxLength && options.max_seqlen_k <= kMaxLength;
}

// As backends/cuda.py: num_tiles
i64 num_tiles(const Shape& shape, bool is_packed) {
  i64 tiles = is_packed ? divide_up(saturating_product(shape.expected_q, shape.batch), 64) + shape.batch
                        : saturating_product(divide_up(shape.seqlen_q, 64), shape.batch);
  return saturating_product(tiles, shape.heads);
}

bool check_sizes(const Call& call, const Shape& shape, Axes axes) {
  const View *tensors = call.tensors, &q = tensors[kQ], &k = tensors[kK], &v = tensors[kV];
  for (const View* tensor : {&q, &k, &v}) {
    // Empty tensors are rare: Python handles them
    if (tensor->numel() == 0 || !has_plain_rows(*tensor)) return false;
    for (i64 size : tensor->sizes) {
      if (size > kMaxLength) return false;
    }
  }
  if (shape.seqlen_k > kMaxLength) return false;  // pages of a sequence
  if (q.size(-1) > kMaxHeadDim || v.size(-1) > kMaxHeadDim || k.size(-1) != q.size(-1)) return false;
  if (shape.heads % shape.heads_kv != 0 || v.size(axes.head) != shape.heads_kv || v.size(axes.row) != k.size(axes.row))
    return false;
  if (shape.batch < 1 || v.size(-4) != k.size(-4)) return false;
  bool is_packed = tensors[kCuSeqlensQ].is_given(), is_paged = tensors[kBlockTable].is_given();
  if (!is_packed && !is_paged && k.size(-4) != shape.batch) return false;
  struct {
    Tensor tensor;
    i64 rows;
  } lists[] = {{kCuSeqlensK, shape.batch + 1}, {kSequsedK, shape.batch}, {kLeftpadK, shape.batch}};
  for (auto [index, rows] : lists) {
    if (tensors[index].is_given() && tensors[index].size(-1) != rows) return false;
  }
  if (is_paged && tensors[kBlockTable].size(-2) != shape.batch) return false;
  return !tensors[kRngState].is_given() || tensors[kRngState].size(-1) == 2;
}

// (batch, heads, seqlen_q, seqlen_k), each 1 or whole. Packed rows and keys without a bound may exceed every length.
bool check_broadcast(const View& tensor, const Shape& shape, const Options& options, bool is_packed) {
  if (!tensor.is_given()) return true;
  i64 full[] = {shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_k};
  if (is_packed && options.max_seqlen_q >= 0) full[2] = options.max_seqlen_q;
  if (is_packed && options.max_seqlen_k >= 0) full[3] = options.max_seqlen_k;
  for (i32 axis = 0; axis < kMaxDim; ++axis) {
    bool is_open = is_packed && ((axis == 2 && options.max_seqlen_q < 0) || (axis == 3 && options.max_seqlen_k < 0));
    if (tensor.sizes[axis] != 1 && tensor.sizes[axis] != full[axis] && !is_open) return false;
    if (tensor.sizes[axis] == 0) return false;
  }
  return true;
}

bool check_score_tensors(const Options& options, const Call& call, const Shape& shape) {
  const View *tensors = call.tensors, &slopes = tensors[kAlibiSlopes], &sinks = tensors[kSinks];
  bool is_packed = tensors[kCuSeqlensQ].is_given();
  for (Tensor index : {kBias, kMask}) {
    if (!check_broadcast(tensors[index], shape, options, is_packed)) return false;
  }
  if (sinks.is_given() && sinks.size(-1) != shape.heads) return false;
  if (!slopes.is_given()) return true;
  return slopes.size(-1) == shape.heads && (slopes.dim == 1 || slopes.size(-2) == shape.batch);
}

void lay_out_outputs(const Options& options, Call& call, Axes axes) {
  const View& q = call.tensors[kQ];
  View &out = call.tensors[kOut], &lse = call.tensors[kLse];
  out = q;
  out.data = nullptr;
  out.dtype = options.out_dtype == Dtype::kNone ? q.dtype : options.out_dtype;
  out.sizes[kMaxDim - 1] = call.tensors[kV].size(-1);
  // In q's memory order: axes of smaller strides come later, those of stride 0 keep their places
  i32 order[kMaxDim] = {0, 1, 2, 3};
  for (i32 pass = 0; pass < 2; ++pass) {
    for (i32 last = -1, axis = kMaxDim - q.dim; axis < kMaxDim - 1; ++axis) {
      if (q.strides[order[axis]] == 0) continue;
      if (last >= 0 && q.strides[order[last]] < q.strides[order[axis]]) std::swap(order[last], order[axis]);
      last = axis;
    }
  }
  i64 stride = 1;
  for (i32 place = kMaxDim - 1; place >= kMaxDim - q.dim; --place) {
    out.strides[order[place]] = stride;
    stride *= std::max<i64>(out.sizes[order[place]], 1);
  }
  lse = View{};
  lse.dim = q.dim - 1, lse.dtype = q.dtype == Dtype::kFloat64 ? q.dtype : Dtype::kFloat32, lse.device = q.device;
  lse.sizes[3] = q.size(axes.row), lse.sizes[2] = q.size(axes.head), lse.sizes[1] = q.size(-4);
  lse.make_contiguous();
}

bool has_sizes_of(const View& tensor, const View& other) {
  return tensor.dim == other.dim && std::memcmp(tensor.sizes, other.sizes, sizeof(tensor.sizes)) == 0;
}

bool is_like(const View& tensor, const View& other) {
  return tensor.dtype == other.dtype && has_sizes_of(tensor, other);
}

// A backward pass gets out and lse, and returns gradients like the inputs.
bool lay_out_grads(const Options& options, Call& call, Axes axes) {
  View out = call.tensors[kOut], lse = call.tensors[kLse];
  lay_out_outputs(options, call, axes);
  std::swap(out, call.tensors[kOut]), std::swap(lse, call.tensors[kLse]);
  const View *tensors = call.tensors, &dlse = tensors[kDlse];
  if (!is_like(tensors[kOut], out) || !is_like(tensors[kDout], out) || !is_like(tensors[kLse], lse)) return false;
  if (dlse.is_given() && !is_like(dlse, lse)) return false;
  constexpr Tensor kOf[] = {kQ, kK, kV, kBias, kSinks};
  for (i32 index = 0; index < kNumGrads; ++index) {
    if (options.is_wanted[index] && tensors[kOf[index]].is_given())
      lay_out_like(tensors[kOf[index]], call.tensors[kDq + index]);
  }
  return true;
}

void fill_softcap(double softcap, double scale, Call& call) {
  bool is_float64 = call.tensors[kQ].dtype == Dtype::kFloat64;
  double factor = 0.0, largest_factor = is_float64 ? kLargestFactorF64 : kLargestFactor;
  if (softcap != 0.0) {
    double largest = std::fmin(kLargestSoftcap, std::fabs(scale) / kSmallestFactor);
    if (!is_float64) softcap = std::fmax(std::fmin(softcap, largest), kSmallestSoftcap);
    factor = std::fmax(-largest_factor, std::fmin(scale / softcap, largest_factor));
  }
  call.scalars[kSoftcap] = softcap;
  call.scalars[kSoftcapFactor] = factor;
}

void fill_scalars(const Options& options, const Shape& shape, Call& call, double scale) {
  i64 right = options.causal == Causal::kNone ? options.window_right : 0;
  // Half to even, as Python rounds
  double threshold = std::fmin(std::nearbyint(options.dropout_p * 65536.0), 65535.0);
  call.scalars[kWindowLeft] = static_cast<double>(options.window_left > kWidestWindow ? -1 : options.window_left);
  call.scalars[kWindowRight] = static_cast<double>(right > kWidestWindow ? -1 : right);
  call.scalars[kScale] = scale;
  call.scalars[kScaleLog2] = scale > 0.0 ? std::fmax(scale * kLog2e, kSmallestFloat) : scale * kLog2e;
  fill_softcap(options.softcap, scale, call);
  call.scalars[kDropoutThreshold] = threshold;
  call.scalars[kKeepFactor] = 65536.0 / (65536.0 - threshold);
  call.scalars[kFirstQuery] = static_cast<double>(options.first_query);
  call.scalars[kFirstKeyGroup] = static_cast<double>(options.first_key / 8);
  call.scalars[kFirstHead] = static_cast<double>(options.first_head);
  call.scalars[kTotalHeads] = static_cast<double>(options.total_heads != 0 ? options.total_heads : shape.heads);
  call.scalars[kMaxSeqlenQ] = static_cast<double>(options.max_seqlen_q < 0 ? 0 : options.max_seqlen_q);
  call.scalars[kMaxSeqlenK] = static_cast<double>(options.max_seqlen_k < 0 ? 0 : options.max_seqlen_k);
  call.asked_splits = options.num_splits != 0 ? options.num_splits : static_cast<i64>(options.is_deterministic);
}

// Over how many tasks of the CPU engine's backward pass the keys of a head are dealt out, as backends/cpu.py:
// _num_splits.
void fill_splits(const Options& options, const Shape& shape, i64 num_threads, Call& call) {
  i64 tasks = shape.heads_kv * shape.batch, wanted = (num_threads + tasks - 1) / tasks,
      blocks = (shape.seqlen_k + 127) / 128;
  i64 splits = wanted < blocks ? wanted : blocks;
  if (splits < 1 || options.is_deterministic) splits = 1;
  call.scalars[kKeySplits] = static_cast<double>(splits);
  call.scalars[kKeyShares] = static_cast<double>(splits > 1 ? splits : 0);
}

void note_tensors(const Call& call, i32 count, Key& key) {
  key.device = static_cast<u8>(call.device.index);
  for (i32 index = 0; index < count; ++index) {
    const View& tensor = call.tensors[index];
    if (tensor.is_given()) key.tensors[index] = static_cast<u8>(static_cast<i32>(tensor.dtype) * 8 + tensor.dim);
  }
}

}  // namespace

bool Gpu::operator==(const Gpu& other) const {
  return num_multiprocessors == other.num_multiprocessors && num_threads == other.num_threads &&
         std::equal(num_classes, num_classes + 2, other.num_classes) &&
         std::equal(classes[0], classes[0] + 2 * kMaxLengthClasses, other.classes[0]);
}

Shape shape_of(const Options& options, const Call& call) {
  Axes axes = axes_of(options.is_bshd);
  const View *tensors = call.tensors, &q = tensors[kQ], &k = tensors[kK];
  bool is_paged = tensors[kBlockTable].is_given();
  i64 total_q = q.size(axes.row), total_k = k.size(axes.row) * (is_paged ? tensors[kBlockTable].size(-1) : 1);
  Shape shape{q.size(-4), q.size(axes.head), k.size(axes.head), total_q, total_k, total_q, total_k, 0};
  i64 share_k = total_k;
  if (tensors[kCuSeqlensQ].is_given()) {
    shape.batch = tensors[kCuSeqlensQ].size(-1) - 1;
    shape.seqlen_q = bound(call, total_q, options.max_seqlen_q, -2);
    shape.expected_k = shape.seqlen_k = bound(call, total_k, options.max_seqlen_k, -1);
    i64 batch = std::max<i64>(shape.batch, 1);
    shape.expected_q = std::min(divide_up(total_q, batch), shape.seqlen_q);
    share_k = is_paged ? shape.seqlen_k : std::min(divide_up(total_k, batch), shape.seqlen_k);
    if (options.max_seqlen_k < 0) shape.expected_k = share_k;
  }
  shape.least_share = std::min(shape.expected_q, share_k), shape.share_k = share_k;
  return shape;
}

bool prepare_attention(Pass pass, const Options& options, const Gpu& gpu, Call& call, Key& key) {
  const View *tensors = call.tensors, &q = tensors[kQ];
  call.device = q.device;
  Axes axes = axes_of(options.is_bshd);
  if (!check_scalars(options) || !is_on_one_device(call, kMaxTensors)) return false;
  Shape shape = shape_of(options, call);
  if (!check_sizes(call, shape, axes) || !check_score_tensors(options, call, shape)) return false;
  if (gpu.num_threads == 0 && num_tiles(shape, tensors[kCuSeqlensQ].is_given()) > kMaxTiles) return false;
  bool is_backward = pass == Pass::kBackward;
  if (!is_backward) lay_out_outputs(options, call, axes);
  if (is_backward && !lay_out_grads(options, call, axes)) return false;
  double scale = options.has_scale ? options.scale : 1.0 / std::sqrt(static_cast<double>(q.size(-1)));
  fill_scalars(options, shape, call, scale);
  bool is_on_host = gpu.num_threads > 0;
  if (is_on_host && is_backward) fill_splits(options, shape, gpu.num_threads, call);

  key = Key();
  key.pass = pass;
  note_tensors(call, kMaxTensors, key);
  key.matmul_precision = options.matmul_precision;
  key.out_dtype = static_cast<u8>(options.out_dtype);
  key.head_dim = static_cast<i32>(q.size(-1)), key.head_dim_v = static_cast<i32>(tensors[kV].size(-1));
  u32 bit = 1;
  auto note = [&](bool flag) {
    key.flags |= flag ? bit : 0;
    bit <<= 1;
  };
  bool is_aligned = true, is_disjoint = true;
  for (Tensor index : {kQ, kK, kV, kOut, kDout, kDq, kDk, kDv}) {
    is_aligned = is_aligned && (!tensors[index].is_given() || tensors[index].is_aligned16());
  }
  for (Tensor index : {kQ, kK, kV}) is_disjoint = is_disjoint && rows_disjoint(tensors[index], options.is_bshd);
  note(is_aligned);   // the first one: Key::has_aligned_rows
  note(is_disjoint);  // the second one: Key::has_disjoint_rows
  note(options.is_bshd);
  note(options.causal != Causal::kNone);
  note(options.causal == Causal::kTopLeft);
  note(options.window_left != -1);
  note(options.window_right != -1);
  note(options.softcap > 0.0);
  note(options.dropout_p > 0.0);
  note(options.max_seqlen_q >= 0);
  note(options.max_seqlen_k >= 0);
  note(options.is_named);
  note(options.is_deterministic);
  // A forward pass is chosen without regard to the backward one, unless the caller names a backend: it must take both
  bool counts_grads = is_backward || options.is_named;
  note(options.needs_grad && counts_grads);
  note(options.needs_bias_grad && counts_grads);
  note(scale > 0.0);
  note(q.stride(axes.head) == 0);
  note(is_v_in_k(tensors[kK], tensors[kV]));
  for (bool is_wanted : options.is_wanted) note(is_wanted);
  for (i32 index = 0; index < gpu.num_classes[is_backward]; ++index) {
    key.classes[index] = length_class(gpu.classes[is_backward][index], shape, gpu.num_multiprocessors);
  }
  return true;
}

bool has_right_tensors(const Options& options, const Call& call) {
  const View *tensors = call.tensors, &q = tensors[kQ], &cu_q = tensors[kCuSeqlensQ], &cu_k = tensors[kCuSeqlensK];
  auto is_given = [&](Tensor index) { return tensors[index].is_given(); };
  // Of rank `least` to `most`
  auto is_right = [&](Tensor index, bool is_dtype, i32 least, i32 most) {
    return !is_given(index) || (is_dtype && tensors[index].dim >= least && tensors[index].dim <= most);
  };
  auto is_like_q = [&](Dtype dtype) { return dtype == q.dtype || dtype == Dtype::kFloat32; };
  if (q.dtype < Dtype::kFloat64 || q.dtype > Dtype::kBfloat16) return false;
  i32 rank_q = cu_q.is_given() ? 3 : 4, rank_k = is_given(kBlockTable) ? 4 : rank_q;
  for (auto [index, rank] : {std::pair{kQ, rank_q}, {kK, rank_k}, {kV, rank_k}}) {
    if (!is_right(index, tensors[index].dtype == q.dtype, rank, rank)) return false;
  }
  for (Tensor index : {kCuSeqlensQ, kCuSeqlensK, kSequsedK, kLeftpadK}) {
    if (!is_right(index, tensors[index].dtype == Dtype::kInt32, 1, 1)) return false;
  }
  if (!is_right(kBlockTable, tensors[kBlockTable].dtype == Dtype::kInt32, 2, 2)) return false;
  if (!is_right(kRngState, tensors[kRngState].dtype == Dtype::kInt64, 1, 1)) return false;
  if (!is_right(kMask, tensors[kMask].dtype == Dtype::kBool, 4, 4)) return false;
  if (!is_right(kBias, is_like_q(tensors[kBias].dtype), 4, 4)) return false;
  if (!is_right(kAlibiSlopes, is_like_q(tensors[kAlibiSlopes].dtype), 1, 2)) return false;
  if (!is_right(kSinks, is_like_q(tensors[kSinks].dtype), 1, 1)) return false;
  bool has_key_bounds = cu_k.is_given() || (is_given(kBlockTable) && is_given(kSequsedK));
  if (cu_q.is_given() ? !has_key_bounds : cu_k.is_given()) return false;
  if (options.dropout_p > 0.0 && !is_given(kRngState)) return false;
  return options.out_dtype == Dtype::kNone || is_like_q(options.out_dtype);
}

bool is_v_in_k(const View& k, const View& v) {
  if (k.data != v.data || k.dtype != v.dtype || v.size(-1) > k.size(-1)) return false;
  for (i32 axis : {-4, -3, -2}) {
    if (k.size(axis) != v.size(axis) || (k.size(axis) > 1 && k.stride(axis) != v.stride(axis))) return false;
  }
  return true;
}

bool rows_disjoint(const View& tensor, bool is_bshd) {
  i32 row = axes_of(is_bshd).row;
  return tensor.size(row) <= 1 || tensor.stride(row) >= tensor.size(-1);
}

bool read_spans(const Options& options, const Call& call, std::vector<Span>& spans) {
  const View *tensors = call.tensors, &k = tensors[kK];
  const View &used = tensors[kSequsedK], &leftpad = tensors[kLeftpadK], &table = tensors[kBlockTable];
  spans.clear();
  if (!used.is_given() && !leftpad.is_given() && !table.is_given()) return true;
  for (const View* index : {&used, &leftpad, &table}) {
    if (index->is_given() && index->dtype != Dtype::kInt32) return false;
  }
  Axes axes = axes_of(options.is_bshd);
  Shape shape = shape_of(options, call);
  i64 room = shape.seqlen_k, page_size = k.size(axes.row), num_pages = k.size(-4);
  for (i64 b = 0; b < shape.batch; ++b) {
    i64 end = used.is_given() ? used.i32_at(b) : room, start = leftpad.is_given() ? leftpad.i32_at(b) : 0;
    if (end < 0 || end > room || start < 0 || start > end) return false;
    for (i64 slot = start / page_size; table.is_given() && start < end && slot <= (end - 1) / page_size; ++slot) {
      i32 page = table.i32_at(b, slot);
      if (page < 0 || page >= num_pages) return false;
    }
    spans.push_back({0, static_cast<i32>(shape.seqlen_q), static_cast<i32>(start), static_cast<i32>(end - start)});
  }
  return true;
}

bool are_fitting_queries(const View& q, const View& k) {
  return q.dim == kMaxDim && q.dtype == k.dtype && q.device == k.device && q.size(-4) == k.size(-4) &&
         q.size(-1) == k.size(-1);
}

bool prepare_append(const Options& options, Call& call, Key& key) {
  const View *tensors = call.tensors, &k = tensors[kNewK], &v = tensors[kNewV], &k_cache = tensors[kKCache],
             &v_cache = tensors[kVCache];
  const View &table = tensors[kTable], &cos = tensors[kRotaryCos], &sin = tensors[kRotarySin], &q = tensors[kStepQ];
  call.device = k_cache.device;
  if (!is_on_one_device(call, kNumAppendTensors)) return false;
  Axes axes = axes_of(options.is_bshd);
  for (i32 index : {kKCache, kVCache, kNewK, kNewV}) {
    if (tensors[index].dim != kMaxDim || tensors[index].numel() == 0) return false;
  }
  for (const View* cache : {&k_cache, &v_cache}) {
    for (i32 axis = 0; axis < kMaxDim; ++axis) {
      if (cache->strides[axis] == 0 && cache->sizes[axis] > 1) return false;
    }
  }
  if (k.size(axes.head) != k_cache.size(axes.head) || k.size(-1) != k_cache.size(-1)) return false;
  if (v.size(axes.head) != v_cache.size(axes.head) || v.size(-1) != v_cache.size(-1)) return false;
  for (i32 axis : {-4, -3, -2}) {
    if (v_cache.size(axis) != k_cache.size(axis)) return false;
  }
  if (v.size(-4) != k.size(-4) || v.size(axes.row) != k.size(axes.row)) return false;
  if (!table.is_given() && k_cache.size(-4) != k.size(-4)) return false;
  bool has_one_length = options.length >= 0;
  if (!has_one_length && tensors[kCacheSeqlens].size(-1) != k.size(-4)) return false;
  if (table.is_given() && (table.size(-2) != k.size(-4) || table.numel() == 0)) return false;
  if (cos.is_given() != sin.is_given()) return false;
  if (cos.is_given() && (2 * cos.size(-1) > k.size(-1) || !has_sizes_of(cos, sin) || cos.numel() == 0)) return false;
  if (q.is_given() && !are_fitting_queries(q, k)) return false;
  call.scalars[kIsInterleaved] = options.is_interleaved, call.scalars[kIsOrdered] = options.is_ordered;
  call.scalars[kLength] = static_cast<double>(has_one_length ? options.length : 0);
  bool is_aligned = !cos.is_given() || cos.size(-1) * size_of(k.dtype) % 16 == 0;
  for (i32 index : {kKCache, kVCache, kNewK, kNewV, kStepQ, kRotatedQ}) {
    const View& tensor = tensors[index];
    is_aligned = is_aligned && (!tensor.is_given() || (has_plain_rows(tensor) && tensor.is_aligned16()));
  }
  key = Key();
  key.pass = Pass::kAppend;
  note_tensors(call, kNumAppendTensors, key);
  // The same plan serves one length for all sequences and a tensor of lengths
  if (has_one_length) key.tensors[kCacheSeqlens] = static_cast<u8>(static_cast<i32>(Dtype::kInt32) * 8 + 1);
  key.flags = static_cast<u32>(is_aligned) | static_cast<u32>(options.is_bshd) << 1;
  return true;
}

void lay_out_step(const Options& options, const View& q, Call& call) {
  View& seqused = call.tensors[kStepSeqused];
  seqused.dim = 1, seqused.dtype = Dtype::kInt32, seqused.device = q.device;
  seqused.sizes[kMaxDim - 1] = q.size(-4), seqused.strides[kMaxDim - 1] = 1;
  if (!call.tensors[kRotaryCos].is_given()) return;
  View& rotated = call.tensors[kRotatedQ];
  call.tensors[kStepQ] = rotated = q;
  rotated.data = nullptr;
  // The heads of a row lie side by side
  Axes axes = axes_of(options.is_bshd);
  i64 stride = 1;
  for (i32 axis : {-1, axes.head, axes.row, -4}) {
    rotated.strides[kMaxDim + axis] = stride;
    stride *= std::max<i64>(q.size(axis), 1);
  }
}

}  // namespace flashtile
