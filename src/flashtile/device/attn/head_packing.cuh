// The heads and queries of a tile's 64 rows (of each 64 rows of a larger tile): 64 queries of one head; or, with
// kPacksHeads, heads that share a KV head, head by head, with as many queries of each as fit. All that share a KV head
// are in one such tile, or, if they are more than 64, in as few as hold them. Scope of every function: thread.
#pragma once

#include "device/attn/params.cuh"
#include "device/core/math.cuh"

namespace flashtile {

template <bool kPacksHeads>
struct HeadGroups {
  // Heads that share a KV head, and the tiles that they take.
  FT_DEVICE static i32 group(const Params& p) { return p.heads / p.heads_kv; }
  FT_DEVICE static i32 num_tiles(const Params& p) { return ceil_div(group(p), 64); }
  // Tiles of all heads.
  FT_DEVICE static i32 num_rows(const Params& p) { return kPacksHeads ? p.heads_kv * num_tiles(p) : p.heads; }
  // The first head of a tile.
  FT_DEVICE static i32 first_head(const Params& p, i32 row) {
    if (!kPacksHeads) return row;
    i32 kv_head = row / num_tiles(p);
    return kv_head * group(p) + (row - kv_head * num_tiles(p)) * num_heads(p);
  }
  // Heads of a tile: the last tile of a group may have fewer.
  FT_DEVICE static i32 num_heads(const Params& p) { return kPacksHeads ? ceil_div(group(p), num_tiles(p)) : 1; }
  FT_DEVICE static i32 num_heads(const Params& p, i32 first_head) {
    return kPacksHeads ? min_of(num_heads(p), group(p) - first_head % group(p)) : 1;
  }
};

template <class Config>
struct HeadPacking : HeadGroups<Config::kPacksHeads> {
  FT_DEVICE static i32 num_queries(const Params& p) { return 64 / HeadPacking::num_heads(p); }
  FT_DEVICE static i32 block_queries(const Params& p) { return Config::kNumConsumers * num_queries(p); }
};

}  // namespace flashtile
