#include "new_rows.h"

#include <algorithm>
#include <cstring>

namespace flashtile {
namespace {

constexpr i64 kBytesPerThread = 1 << 16;  // at least, where several threads copy

// No two elements share memory. As backends/kvcache.py: is_writable.
bool has_own_elements(const View& cache) {
  i32 order[kMaxDim] = {0, 1, 2, 3};
  std::sort(order, order + kMaxDim, [&](i32 a, i32 b) { return cache.strides[a] < cache.strides[b]; });
  i64 extent = 1;
  for (i32 axis : order) {
    if (cache.sizes[axis] <= 1) continue;
    if (cache.strides[axis] < extent) return false;
    extent += (cache.sizes[axis] - 1) * cache.strides[axis];
  }
  return true;
}

bool has_plain_rows(const View& tensor) { return tensor.size(-1) == 1 || tensor.stride(-1) == 1; }

// From the first byte to behind the last.
std::pair<u64, u64> extent(const View& tensor) {
  i64 last = 0;
  for (i32 axis = 0; axis < kMaxDim; ++axis) last += (tensor.sizes[axis] - 1) * tensor.strides[axis];
  u64 start = reinterpret_cast<u64>(tensor.data);
  return {start, start + static_cast<u64>((last + 1) * size_of(tensor.dtype))};
}

bool may_overlap(const View& a, const View& b) {
  auto [a_start, a_end] = extent(a);
  auto [b_start, b_end] = extent(b);
  return a_start < b_end && b_start < a_end;
}

u8* row_of(const View& tensor, i64 batch, i64 head, i64 row, bool is_bshd) {
  i64 offset =
      batch * tensor.stride(-4) + head * tensor.stride(is_bshd ? -2 : -3) + row * tensor.stride(is_bshd ? -3 : -2);
  return static_cast<u8*>(tensor.data) + offset * size_of(tensor.dtype);
}

}  // namespace

bool NewRows::has_fitting_sizes(const View& q) const {
  i32 head = is_bshd ? -2 : -3, row = is_bshd ? -3 : -2;
  for (auto [rows, cache] : {std::pair{&k, &k_cache}, {&v, &v_cache}}) {
    if (rows->dim != kMaxDim || cache->dim != kMaxDim || rows->dtype != cache->dtype) return false;
    if (rows->numel() == 0 || cache->numel() == 0 || !(rows->device == cache->device)) return false;
    if (rows->size(head) != cache->size(head) || rows->size(-1) != cache->size(-1)) return false;
    if (!has_plain_rows(*rows) || !has_plain_rows(*cache)) return false;
  }
  if (q.dim != kMaxDim || q.numel() == 0 || k.size(-4) != q.size(-4)) return false;
  for (i32 axis : {-4, head, row}) {
    if (v.size(axis) != k.size(axis) || v_cache.size(axis) != k_cache.size(axis)) return false;
  }
  if (!table.is_given()) return k_cache.size(-4) == k.size(-4);
  return table.dim == 2 && table.dtype == Dtype::kInt32 && table.size(-2) == k.size(-4) && table.device == k.device;
}

bool is_safe_to_write(const View& k_cache, const View& v_cache, const View& q, const View& k, const View& v) {
  if (k_cache.data == v_cache.data || !has_own_elements(k_cache) || !has_own_elements(v_cache)) return false;
  for (const View* cache : {&k_cache, &v_cache}) {
    if (may_overlap(*cache, q) || may_overlap(*cache, k) || may_overlap(*cache, v)) return false;
  }
  return true;
}

bool NewRows::place(const View& q, const std::vector<i32>& lengths) {
  if (!has_fitting_sizes(q) || lengths.size() != static_cast<size_t>(k.size(-4))) return false;
  if (!is_safe_to_write(k_cache, v_cache, q, k, v)) return false;
  i64 page_size = k_cache.size(is_bshd ? -3 : -2), num_pages = k_cache.size(-4);
  i64 room = table.is_given() ? page_size * table.size(-1) : page_size;
  std::vector<i32> pages;  // that rows are written to
  places_.clear();
  for (i64 b = 0; b < k.size(-4); ++b) {
    i64 first = lengths[b], end = first + count();
    if (first < 0 || end > room) return false;
    for (i64 position = first; position < end; ++position) {
      if (!table.is_given()) {
        places_.push_back({b, position});
        continue;
      }
      if (position == first || position % page_size == 0) pages.push_back(table.i32_at(b, position / page_size));
      if (pages.back() < 0 || pages.back() >= num_pages) return false;
      places_.push_back({pages.back(), position % page_size});
    }
  }
  std::sort(pages.begin(), pages.end());
  return std::adjacent_find(pages.begin(), pages.end()) == pages.end();
}

void NewRows::copy_rows(int64_t begin, int64_t end, void* rows) {
  const NewRows& self = *static_cast<const NewRows*>(rows);
  bool is_bshd = self.is_bshd;
  i64 count = self.count(), heads = self.k.size(is_bshd ? -2 : -3);
  for (i64 index = begin; index < end; ++index) {
    auto [batch, row] = self.places_[index];
    for (auto [from, to] : {std::pair{&self.k, &self.k_cache}, {&self.v, &self.v_cache}}) {
      auto num_bytes = static_cast<size_t>(from->size(-1) * size_of(from->dtype));
      for (i64 head = 0; head < heads; ++head) {
        std::memcpy(row_of(*to, batch, head, row, is_bshd), row_of(*from, index / count, head, index % count, is_bshd),
                    num_bytes);
      }
    }
  }
}

bool NewRows::write() const {
  i64 rows = static_cast<i64>(places_.size()), bytes = (k.numel() + v.numel()) * size_of(k.dtype);
  i64 grain = std::max<i64>(1, rows * kBytesPerThread / bytes);
  return torch_parallel_for(0, rows, grain, copy_rows, const_cast<NewRows*>(this)) == 0;
}

}  // namespace flashtile
