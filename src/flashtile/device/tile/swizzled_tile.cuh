// Tiles of 16-bit elements in shared memory for ldmatrix: [rows][kColumns], with 16-byte chunks swizzled so that eight
// rows of one column of chunks lie on different banks. Chunk c of row r is stored at chunk c ^ (r % 8) of its segment
// of 128 bytes; in rows of an odd number of 64 bytes at chunk c ^ (r / 2 % 4) of its segment of 64 bytes.
//
// Rows come by cp.async, 16 bytes per thread. Unaligned rows come in copies of 4 bytes, or element by element.
#pragma once

#include "device/core/math.cuh"
#include "device/core/mutation.cuh"
#include "device/ptx/cp_async.cuh"

namespace flashtile {

template <i32 kColumns>
struct SwizzledTile {
  static constexpr i32 kNumColumns = kColumns;
  static constexpr i32 kPitch = 2 * kColumns;                  // bytes of a row
  static constexpr i32 kSegment = kColumns % 64 == 0 ? 8 : 4;  // chunks
  static constexpr i32 kNumSegments = kPitch / (16 * kSegment);
  static_assert(kColumns % 32 == 0);

  // The first column that this thread copies (for_each_row). Scope: thread.
  FT_DEVICE static i32 copy_column() { return threadIdx.x % kSegment * 8; }

  // The byte offset of a chunk of the first segment. Adding multiples of 8 rows or of whole segments is linear.
  // Scope: thread.
  FT_DEVICE static u32 chunk_offset(i32 row, i32 chunk) {
    i32 swizzle = kSegment == 8 ? row % 8 : row / 2 % 4;
    return row * kPitch + (chunk ^ swizzle) * 16;
  }

  // Where this lane reads its row of the 16 x 16 matrix at (0, 0) for ldmatrix. With kRowsFirst the second of the four
  // 8 x 8 matrices is the one below the first: an A operand, or a transposed B. Else it is the one to the right: a B
  // operand, whose two registers must be neighbours. Scope: warp.
  template <bool kRowsFirst>
  FT_DEVICE static u32 lane_offset() {
    i32 lane = threadIdx.x % 32;
    return kRowsFirst ? chunk_offset(lane % 16, lane / 16) : chunk_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // The address for the 16 x 16 matrix number (row_step, column_step). Scope: thread.
  FT_DEVICE static u32 step_address(u32 lane_address, i32 row_step, i32 column_step) {
    i32 segment = 2 * column_step / kSegment, chunk = 2 * column_step % kSegment;
    return (lane_address ^ chunk * 16) + row_step * 16 * kPitch + segment * kSegment * 16;
  }
};

// Copies up to 8 elements of a row that is aligned to nothing but its elements; zeros from num_elements on.
// Scope: thread.
template <typename T>
FT_DEVICE void copy_unaligned_chunk(u32 address, const T* source, i32 num_elements) {
  if (reinterpret_cast<u64>(source) % 4 == 0) {
#pragma unroll
    for (i32 w = 0; w < 4; ++w) {
      cp_async<4>(address + 4 * w, source + 2 * w, 2 * clamp(num_elements - 2 * w, 0, 2));
    }
  } else {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (i32 e = 0; e < 8; ++e) {
      if (e < num_elements) words[e / 2] |= static_cast<u32>(source[e].bits) << (16 * (e % 2));
    }
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
}

// Starts the copy of this thread's chunks of a row, one in each segment; source and target are those of the first
// segment. num_columns counts from there; segments behind it are not written (clear_tile). Zeros inside the last
// segment, or everywhere if the row is missing. kIsExact: all columns are there. Scope: thread.
template <i32 kColumns, bool kIsExact, class Load, typename T>
FT_DEVICE void copy_row_chunks(u32 target, const T* source, bool is_row, i32 num_columns) {
  using Tile = SwizzledTile<kColumns>;
  constexpr i32 kSegmentColumns = 8 * Tile::kSegment;
  // Unrolled, the checks of unknown columns would take a predicate each
  i32 num_segments = kIsExact ? Tile::kNumSegments : ceil_div(num_columns + Tile::copy_column(), kSegmentColumns);
#pragma unroll(kIsExact&& Load::kIsAligned16 ? Tile::kNumSegments : 1)
  for (i32 segment = 0; segment < num_segments; ++segment) {
    i32 column = kSegmentColumns * segment;
    i32 num_elements = kIsExact ? 8 : num_columns - column;
    if constexpr (mutates(Mutation::fwd_sm80_column)) num_elements = num_columns - column + 8;
    if (!is_row) num_elements = 0;
    if constexpr (Load::kIsAligned16) {
      cp_async<16>(target + 2 * column, source + column, num_elements > 0 ? 16 : 0);
    } else {
      copy_unaligned_chunk(target + 2 * column, source + column, num_elements);
    }
  }
}

// Zeros num_bytes of shared memory, a multiple of 16. The caller synchronises the block. Scope: block.
template <i32 kNumThreads>
FT_DEVICE void clear_tile(void* tile, i32 num_bytes) {
  uint4* chunks = static_cast<uint4*>(tile);
  for (i32 x = threadIdx.x; x < num_bytes / 16; x += kNumThreads) chunks[x] = make_uint4(0, 0, 0, 0);
}

// Calls copy(first, r, target) for each row first + r of a tile of which this thread copies chunks; target is the
// shared address of its chunk of the first segment. With kUnrolls the compiler knows r; not for rows with checks, whose
// code is long. Scope: block.
template <i32 kColumns, i32 kRows, i32 kNumThreads, bool kUnrolls, class Copy>
FT_DEVICE void for_each_row(u32 tile, Copy copy) {
  using Tile = SwizzledTile<kColumns>;
  constexpr i32 kPassRows = kNumThreads / Tile::kSegment;
  i32 first = threadIdx.x / Tile::kSegment;
  u32 target = tile + Tile::chunk_offset(first, threadIdx.x % Tile::kSegment);
#pragma unroll(kUnrolls ? kRows / kPassRows + 1 : 1)
  for (i32 r = 0; r < kRows; r += kPassRows) {
    if (kRows % kPassRows == 0 || first + r < kRows) copy(first, r, target + r * Tile::kPitch);
  }
}

}  // namespace flashtile
