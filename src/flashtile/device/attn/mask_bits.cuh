// A bool mask as bits, in the order of a score fragment (tile/fragment.cuh), and a map of its tiles. A kernel of its
// own makes both (steps/mask_bits.cuh). Axes along which the mask is broadcast (stride 0) have length 1 here.
//
// bits   [batch][head][query][key tile][4]  bit 2 b + e of word t is key 8 b + 2 t + e of the tile: what lane t of a
//                                           quad has of the query's row. Keys past the last one have no bit.
// tiles  [batch][head][64 queries][32 key tiles]  bit n of .x: some query sees a key of the tile; of .y: all see all
//
// Scope of every function: thread.
#pragma once

#include "device/attn/sequence.cuh"

namespace flashtile {

constexpr i32 kMaskGroup = 64;  // queries of a bit of the map
constexpr i32 kMaskWord = 32;   // key tiles of a word of the map
constexpr i32 kMaskTile = 128;  // keys of a key tile in the backward kernels

template <i32 kBlockN>
struct MaskLayout {
  static_assert(kBlockN <= 128 && kBlockN % 16 == 0, "a row of a tile is one word for each lane of a quad");
  i32 num_batches, num_heads, num_rows, num_tiles, num_groups, num_words;

  FT_DEVICE explicit MaskLayout(const Params& p)
      : num_batches(p.mask_strides[0] == 0 ? 1 : p.batch),
        num_heads(p.mask_strides[1] == 0 ? 1 : p.heads),
        num_rows(p.mask_strides[2] == 0 ? 1 : p.seqlen_q),
        num_tiles(ceil_div(p.seqlen_k, kBlockN)),
        num_groups(ceil_div(num_rows, kMaskGroup)),
        num_words(ceil_div(num_tiles, kMaskWord)) {}

  // Which of the planes [query][key] belongs to a sequence and head.
  FT_DEVICE i32 plane(i32 batch_idx, i32 head) const {
    return (num_batches == 1 ? 0 : batch_idx) * num_heads + (num_heads == 1 ? 0 : head);
  }
  // The index of the four words of query i in key tile n.
  FT_DEVICE i64 bits_index(i32 plane, i32 i, i32 n) const {
    return (static_cast<i64>(plane) * num_rows + (num_rows == 1 ? 0 : i)) * num_tiles + n;
  }
  // The index of the word of the map with key tile n, for the queries of a group.
  FT_DEVICE i64 tiles_index(i32 plane, i32 group, i32 word) const {
    return (static_cast<i64>(plane) * num_groups + group) * num_words + word;
  }
};

// The bits of a thread's columns below `end`, which counts from the thread's first column.
FT_DEVICE u32 columns_below(i32 end) {
  end = clamp(end, 0, 128);
  i32 count = end / 8 * 2 + min_of(end % 8, 2);
  return count >= 32 ? 0xffffffffu : (1u << count) - 1u;
}

// Walks over the key tiles of a query tile that any of its queries sees, from the last to the first. Without a bool
// mask these are all tiles.
template <bool kHasBool>
struct TileWalk {};
template <>
struct TileWalk<true> {
  u32 visible, full;  // the word of the map with the current tile

  // Every element of tile n, which is the current one, is seen.
  FT_DEVICE bool is_full(i32 n) const { return (full >> n % kMaskWord & 1u) != 0; }
  // The seen tile before n in key order; n_begin - 1 if there is none. Tile n_begin must be seen. load_word(word)
  // returns the words `visible` and `full` of the map.
  template <class LoadWord>
  FT_DEVICE i32 next(i32 n, i32 n_begin, LoadWord load_word) {
    if (n <= n_begin) return n - 1;
    i32 word = n / kMaskWord;
    u32 rest = visible & ((1u << n % kMaskWord) - 1u);
    while (rest == 0) {
      uint2 found = load_word(--word);
      rest = visible = found.x, full = found.y;
    }
    return word * kMaskWord + 31 - __clz(rest);
  }
};

// Counts key tiles over the rows of a query tile, 64 for each consumer, of up to 2^31 keys. The rows of packed heads
// lie in several planes.
template <class Config>
constexpr bool kHasWideMaskOffset = Config::kPacksHeads || (Config::kBlockN < 32 * Config::kNumConsumers);
template <class Config>
using MaskOffset = typename Select<kHasWideMaskOffset<Config>, i64, u32>::Type;

// The part of the map that belongs to a query tile. The producer leaves it in the work item.
template <bool kHasBool, i32 kNumConsumers>
struct MaskWindow {};
template <i32 kNumConsumers>
struct MaskWindow<true, kNumConsumers> {
  const uint2* first;         // the first group of the first plane
  const uint4* bits;          // of the first query in the first plane: the four words of each key tile
  i64 plane_words;            // of the map, from a plane to the next
  i64 bits_plane;             // of the bits, from a plane to the next; 0: there is one
  u32 bits_row;               // and from a row to the next
  i32 num_words, num_groups;  // of a plane
  i32 num_planes;             // more than one only if the tile has several heads
  i32 first_consumer;         // whose queries are the first group
  i32 shares_groups;          // nonzero: all groups belong to every consumer
  u32 visible;                // the word with the last key tile
  u32 full[kNumConsumers];

  // The queries [i_begin, i_end) of num_heads heads from first_head on.
  template <i32 kBlockN>
  FT_DEVICE void find(const Params& p, i32 batch_idx, i32 first_head, i32 num_heads, i32 i_begin, i32 i_end) {
    MaskLayout<kBlockN> layout(p);
    bool is_one_row = layout.num_rows == 1;
    i32 first_group = is_one_row ? 0 : max_of(i_begin, 0) / kMaskGroup;
    i32 end_group = is_one_row ? 1 : min_of(ceil_div(i_end, kMaskGroup), layout.num_groups);
    num_words = layout.num_words;
    num_groups = end_group - first_group;
    num_planes = layout.num_heads == 1 ? 1 : num_heads;
    plane_words = static_cast<i64>(layout.num_groups) * num_words;
    i32 plane = layout.plane(batch_idx, first_head);
    first = reinterpret_cast<const uint2*>(p.mask_tiles) + layout.tiles_index(plane, first_group, 0);
    bits = reinterpret_cast<const uint4*>(p.mask_bits) + layout.bits_index(plane, max_of(i_begin, 0), 0);
    bits_row = is_one_row ? 0 : static_cast<u32>(layout.num_tiles);
    bits_plane = layout.num_heads == 1 ? 0 : static_cast<i64>(layout.num_rows) * layout.num_tiles;
    first_consumer = i_begin < 0 ? -i_begin / kMaskGroup : 0;
    shares_groups = is_one_row || num_heads > 1;
  }

  // From `bits` to the words of a query: row `row` of the tile's queries, in its head number `plane`.
  template <class Config>
  FT_DEVICE MaskOffset<Config> row_offset(i32 plane, i32 row) const {
    using Offset = MaskOffset<Config>;
    return static_cast<Offset>(row) * bits_row + static_cast<Offset>(plane * bits_plane);
  }

  // The tiles of a word that any query sees; those that all queries of a consumer see completely.
  FT_DEVICE u32 load_visible(i32 word) const {
    u32 found = 0;
#pragma unroll 1
    for (i32 x = 0; x < num_planes * num_groups; ++x) found |= at(x, word).x;
    return found;
  }
  FT_DEVICE u32 load_full(i32 consumer, i32 word) const {
    if (shares_groups == 0) {
      i32 group = consumer - first_consumer;
      return group >= 0 && group < num_groups ? at(group, word).y : 0xffffffffu;
    }
    u32 found = 0xffffffffu;
#pragma unroll 1
    for (i32 x = 0; x < num_planes * num_groups; ++x) found &= at(x, word).y;
    return found;
  }
  FT_DEVICE uint2 at(i32 x, i32 word) const {
    i32 plane = num_planes == 1 ? 0 : x / num_groups;
    return first[plane * plane_words + (x - plane * num_groups) * num_words + word];
  }

  // Lets the key tiles [n_begin, n_end) begin and end with one that is seen, and loads the words of the last one.
  FT_DEVICE void trim(i32& n_begin, i32& n_end) {
    // Find the last tile
    i32 word = (n_end - 1) / kMaskWord;
    visible = load_visible(word);
    u32 rest = visible & 0xffffffffu >> ((word + 1) * kMaskWord - n_end);
    while (rest == 0 && word * kMaskWord > n_begin) rest = visible = load_visible(--word);
    i32 n_last = word * kMaskWord + 31 - __clz(static_cast<i32>(rest));
    if (n_last < n_begin) {
      n_end = n_begin;
      return;
    }
    n_end = n_last + 1;
    for (i32 consumer = 0; consumer < kNumConsumers; ++consumer) full[consumer] = load_full(consumer, word);
    // Find the first tile
    word = n_begin / kMaskWord;
    rest = load_visible(word) & 0xffffffffu << n_begin % kMaskWord;
    while (rest == 0) rest = load_visible(++word);
    n_begin = word * kMaskWord + __ffs(static_cast<i32>(rest)) - 1;
  }
};

}  // namespace flashtile
