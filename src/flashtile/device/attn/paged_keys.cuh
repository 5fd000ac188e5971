// Copies tiles of paged keys to swizzled shared memory (tile/smem_tile.cuh). The producer's warps work together.
//
// A tile arrives in one of two ways, the same for the whole launch:
//   boxes   by TMA, box_rows rows each, none of which crosses a page. Each lane copies a box; the warps take turns,
//           since a warp issues the boxes of its lanes one after the other.
//   rows    by cp.async, 16 bytes per lane: where boxes would have under 8 rows, or left padding shifts the tiles.
// Table entries are read for rows of the sequence only, so entries behind its last page may hold anything. A box that
// begins behind the last key is left out: its rows keep what shared memory held before. Rows behind the last key are
// zeros where rows are copied. Consumers mask the scores and clear V in both cases.
#pragma once

#include "device/attn/sequence.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/tma.cuh"
#include "device/tile/pipeline.cuh"

namespace flashtile {

constexpr i32 kSmallestBox = 8;  // rows: smaller ones are slower than cp.async

// kIsOnce: no other block reads these keys. kSavesRegisters: what follows from the thread's number is computed where it
// is used.
template <i32 kRows, i32 kNumWarps, bool kIsOnce = false, bool kSavesRegisters = false>
struct PagedKeys {
  static constexpr i32 kWarpRows = kRows / kNumWarps;    // that a warp copies by cp.async
  static constexpr i32 kUnrolledRows = kIsOnce ? 4 : 1;  // few warps that copy: each has more copies under way
  static_assert(kWarpRows * kNumWarps == kRows && kWarpRows % 4 == 0 && kWarpRows <= 32 && kRows / kSmallestBox <= 32);

  const Params& p;

  // This lane's box or row: its page, -1 if it is behind the last key, and its row there.
  struct Place {
    i32 page, row;
  };

  // Scope of all up to copy: thread (uniform in a block).

  FT_DEVICE explicit PagedKeys(const Params& params) : p(params) {}
  // The rows of a box of the maps: the largest power of two that divides both a page and a tile.
  FT_DEVICE i32 box_rows() const {
    i32 bits = p.page_size | kRows;
    return bits & -bits;
  }
  FT_DEVICE bool copies_boxes() const { return p.leftpad_k == nullptr && box_rows() >= kSmallestBox; }
  // How often the producer arrives at the barrier of a tile.
  FT_DEVICE u32 num_arrivals() const { return copies_boxes() ? 1 : 32 * kNumWarps; }

  // The thread's number. The compiler keeps nothing that follows from a volatile read.
  FT_DEVICE static u32 thread() {
    u32 x = threadIdx.x;
    if constexpr (kSavesRegisters) asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  FT_DEVICE static i32 warp() { return static_cast<i32>(thread() / 32 % kNumWarps); }
  // This lane's box of a tile, if the tile has so many.
  FT_DEVICE static i32 box() { return static_cast<i32>(thread() % 32) * kNumWarps + warp(); }

  // Where this lane's part of tile n is. Scope: thread.
  FT_DEVICE Place find(const Sequence& s, i32 n) const {
    i32 lane = thread() % 32;
    i32 row_in_tile = copies_boxes() ? box() * box_rows() : lane < kWarpRows ? warp() * kWarpRows + lane : kRows;
    i32 j = n * kRows + row_in_tile;
    if (row_in_tile >= kRows || j >= s.seqlen_k) return {-1, 0};
    i32 at = static_cast<i32>(s.k_row) + j, slot = at / p.page_size;
    i32 row = at - slot * p.page_size;
    if constexpr (mutates(Mutation::fwd_sm90_page)) slot = max_of(slot - 1, 0);
    return {clamp(p.block_table[s.batch_idx * p.table_stride + slot], 0, p.num_pages - 1), row};
  }

  // Starts the copy of one head of a tile of K or V, of which num_keys are left; `full` completes with it. Scope: the
  // producer's warps.
  template <i32 kSlabs, typename T>
  FT_DEVICE void copy(T* tile, const TensorMap& map, const T* base, const Strides& strides, i32 num_columns, u64& full,
                      Place place, i32 head, i32 num_keys) const {
    if (copies_boxes()) {
      copy_box<kSlabs>(tile, map, strides, full, place, head, num_keys);
    } else {
      copy_rows<kSlabs>(tile, base + head * strides.head, strides, num_columns, full, place);
    }
  }

 private:
  // Scope: warp.
  template <i32 kSlabs, typename T>
  FT_DEVICE void copy_box(T* tile, const TensorMap& map, const Strides& strides, u64& full, Place place, i32 head,
                          i32 num_keys) const {
    // Lane 0 of warp 0 arrives for all boxes. Some may complete before it: the barrier's count of bytes may be
    // negative.
    if (box() == 0) {
      i32 num_rows = (min_of(num_keys, kRows) + box_rows() - 1) & -box_rows();  // whole boxes
      mbarrier_arrive_expect(full, num_rows * kSlabs * 128);
    }
    if (place.page < 0) return;
    // A map has size 1 along an axis whose stride is 0
    i32 map_head = strides.head == 0 ? 0 : head, map_page = strides.batch == 0 ? 0 : place.page;
#pragma unroll
    for (i32 slab = 0; slab < kSlabs; ++slab) {
      T* box_rows_at = tile + (slab * kRows + box() * box_rows()) * 64;
      if constexpr (kIsOnce) {
        load_box_once(box_rows_at, map, full, slab * 64, place.row, map_head, map_page);
      } else {
        load_box(box_rows_at, map, full, slab * 64, place.row, map_head, map_page);
      }
    }
  }

  // Eight lanes copy 128 bytes of a row. Scope: warp.
  template <i32 kSlabs, typename T>
  FT_DEVICE void copy_rows(T* tile, const T* base, const Strides& strides, i32 num_columns, u64& full,
                           Place place) const {
    i32 lane = thread() % 32, chunk = lane % 8;
    u32 first = shared_address(tile) + warp() * kWarpRows * 128;
#pragma unroll kUnrolledRows
    for (i32 r = lane / 8; r < kWarpRows; r += 4) {
      i32 page = __shfl_sync(0xffffffffu, place.page, r), row = __shfl_sync(0xffffffffu, place.row, r);
      const T* source = base + max_of(page, 0) * strides.batch + row * strides.row + chunk * 8;
      u32 target = first + r * 128 + (chunk ^ (warp() * kWarpRows + r) % 8) * 16;
#pragma unroll
      for (i32 slab = 0; slab < kSlabs; ++slab) {
        bool is_inside = page >= 0 && slab * 64 + chunk * 8 < num_columns;
        cp_async<16>(target + slab * kRows * 128, source + slab * 64, is_inside ? 16 : 0);
      }
    }
    arrive_after_copies(shared_address(&full));
  }
};

// The ring of K or V tiles as consumers see it. Rows that threads copied become visible to wgmma by a fence.
template <i32 kNumStages, bool kIsPaged>
struct KeyRing : Ring<kNumStages> {
  // Scope: thread.
  FT_DEVICE static void wait_full(u64 (&full)[kNumStages], u32 count) {
    Ring<kNumStages>::wait_full(full, count);
    if constexpr (kIsPaged) fence_proxy_async();
  }
};

}  // namespace flashtile
