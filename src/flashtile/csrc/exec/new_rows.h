// New rows of a cache on the CPU: whether and where they are written, and the writing, as backends/kvcache.py: append.
#pragma once

#include <vector>

#include "tensor.h"

namespace flashtile {

// The caches can be written row by row, and neither q nor a new row may be part of one.
bool is_safe_to_write(const View& k_cache, const View& v_cache, const View& q, const View& k, const View& v);

struct NewRows {
  View k_cache, v_cache, k, v;
  View table;  // or none: every sequence has its own row of the cache
  bool is_bshd = false;

  bool is_given() const { return k.is_given(); }
  i64 count() const { return k.size(is_bshd ? -3 : -2); }
  // Finds the place of each row behind the first `lengths` rows of its sequence. False where Python has to write them
  // or to refuse: they do not fit, a cache cannot be written row by row, or q or a new row may be part of a cache.
  bool place(const View& q, const std::vector<i32>& lengths);
  // Writes them, after `place`.
  bool write() const;

 private:
  struct Place {
    i64 batch, row;  // of the cache
  };
  std::vector<Place> places_;  // (batch, count)

  bool has_fitting_sizes(const View& q) const;
  static void copy_rows(int64_t begin, int64_t end, void* rows);
};

}  // namespace flashtile
