"""The order of tiles (device/attn: scheduler, tile_place, key_tile) and the key tiles that a bool mask
leaves (mask_bits), by the headers that kernels include, compiled for the host."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from flashtile.backends import cuda
from flashtile.families.steps import SM90_STEP_ROWS, SM90_STEP_THREADS
from flashtile.problem import MAX_LENGTH, AttentionArgs, Problem
from flashtile.runtime.nvrtc import INCLUDE

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
# What NVRTC has built in, as far as the two headers use it
BUILTINS = """
#include <cmath>
#include <cstdint>
#include <cstring>
struct Index { unsigned x = 0; };
inline thread_local Index blockIdx, blockDim, gridDim, threadIdx;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
#define asm(...)
#define clock64() 0
#define __shfl_sync(mask, x, lane) (x)
#define __cvta_generic_to_shared(pointer) 0
"""
SOURCE = (
    BUILTINS
    + """
#include <vector>
#include "device/ptx/sync.cuh"
int processors = 132;
#define num_multiprocessors() processors
#include "device/attn/key_tile.cuh"
#include "device/attn/mask_bits.cuh"
#include "device/attn/scheduler.cuh"
#include "device/ptx/bulk.cuh"
using namespace flashtile;
// order: 0 as they come, 1 pairs under a band, 2 in rotation. cu_seqlens: of packed sequences, or null.
extern "C" int tiles_of(int block, int grid, int order, int batch, int heads, int seqlen_q, int shares_bias,
                        const int* cu_seqlens, int* tiles) {
  blockIdx.x = block, gridDim.x = grid;
  Params p{};
  p.batch = batch, p.heads = p.heads_kv = heads, p.seqlen_q = seqlen_q, p.num_splits = 1;
  p.bias_strides[0] = shares_bias ? 0 : 1;
  if (cu_seqlens != nullptr) p.cu_seqlens_q = cu_seqlens, p.total_q = cu_seqlens[batch];
  auto walk = [&](auto scheduler) {
    scheduler.init(p, 128);
    int count = 0;
    for (int index = scheduler.first(p, 128); index < scheduler.num_indices;
         index = scheduler.next(p, index, 128), ++count) {
      TileCoord coord = scheduler.coord(p, index, 128);
      tiles[3 * count] = coord.m_block, tiles[3 * count + 1] = coord.head, tiles[3 * count + 2] = coord.batch;
    }
    return count;
  };
  using Lengths = SeqInfo<true>;
  if (order == 1) return walk(TileScheduler<Mask<true, false>, Lengths, false>());
  if (order == 2) return walk(TileScheduler<Mask<false, false>, SeqInfo<false>, false, true, true>());
  return walk(TileScheduler<Mask<false, false>, Lengths, false, true>());
}
// How many indices a persistent grid has for these tiles of 64 queries.
extern "C" int num_indices_of(int order, int batch, int heads, int rows, int is_packed) {
  gridDim.x = 132;
  Params p{};
  p.batch = batch, p.heads = p.heads_kv = heads, p.num_splits = 1, p.seqlen_q = p.total_q = rows;
  if (is_packed) p.cu_seqlens_q = reinterpret_cast<const i32*>(&p);
  auto count = [&](auto scheduler) {
    scheduler.init(p, 64);
    return scheduler.num_indices;
  };
  using Lengths = SeqInfo<true>;
  return order == 1 ? count(TileScheduler<Mask<true, false>, Lengths, false>())
                    : count(TileScheduler<Mask<false, false>, Lengths, false, true>());
}
// The tiles of packed queries that the blocks of a grid get: (tile, tiles of the row, row, sequence) of each block.
extern "C" void places_of(int grid, int tile_rows, int num_rows, int from_last, int batch, const int* cu_seqlens,
                          int* places) {
  Params p{};
  p.batch = batch, p.cu_seqlens_q = cu_seqlens, p.total_q = cu_seqlens[batch];
  for (int index = 0; index < grid; ++index) {
    TilePlace place = place_queries<SeqInfo<true>>(p, tile_rows, num_rows, index, from_last != 0);
    int found[] = {place.tile, place.num_tiles, place.row, place.batch};
    std::memcpy(places + 4 * index, found, sizeof(found));
  }
}
// The same of packed keys, (tile, KV head, sequence), where the sums of dQ have a fixed order or not.
extern "C" void key_tiles_of(int grid, int heads_kv, int batch, int is_banded, int is_ordered, const int* cu_seqlens,
                             int* tiles) {
  Params p{};
  p.batch = batch, p.heads = p.heads_kv = heads_kv, p.window_left = -1, p.window_right = is_banded ? 0 : -1;
  p.cu_seqlens_q = p.cu_seqlens_k = cu_seqlens, p.total_q = p.total_k = p.seqlen_q = p.seqlen_k = cu_seqlens[batch];
  p.dq_order = is_ordered ? reinterpret_cast<i32*>(tiles) : nullptr;
  for (int index = 0; index < grid; ++index) {
    blockIdx.x = index;
    auto tile = is_banded ? KeyTile::find_in_order<64, 128, Mask<true, false>, SeqInfo<true>>(p)
                          : KeyTile::find_in_order<64, 128, Mask<false, false>, SeqInfo<true>>(p);
    tiles[3 * index] = tile.has_keys() ? tile.j_begin / 128 : 1 << 20;
    tiles[3 * index + 1] = tile.kv_head, tiles[3 * index + 2] = tile.s.batch_idx;
  }
}
// The first block, and its query tile, whose turn has not come when all blocks before it have ended, of a backward pass
// with fixed sums of dQ; or -1. A tile is 2 queries and 3 keys.
template <class Mask>
int first_to_wait(const Params& p) {
  std::vector<int> counts(p.lse_size);
  for (int index = 0; index < (ceil_div(p.total_k, 3) + p.batch) * p.heads_kv; ++index) {
    blockIdx.x = index;
    KeyTile tile = KeyTile::find_in_order<2, 3, Mask, SeqInfo<true>>(p);
    bool waits = false;
    if (tile.has_keys()) {
      tile.for_each_query_tile<2>([&](i32 head, i32 i, u32) {
        int& count = counts.at(stat_index(p, tile.s, head, i));
        waits |= !is_due(count++, tile.dq_order<2, 3, Mask>(p, i));
      });
    }
    if (waits) return index;
  }
  return -1;
}
// sizes: batch, total_q, total_k, heads, heads_kv, longest q, longest k, is_banded, multiprocessors
extern "C" int block_that_waits(const int* sizes, const int* cu_seqlens_q, const int* cu_seqlens_k,
                                const int* seqused_k) {
  Params p{};
  i32 unused;
  p.batch = sizes[0], p.total_q = sizes[1], p.total_k = sizes[2], p.heads = sizes[3], p.heads_kv = sizes[4];
  p.seqlen_q = sizes[5], p.seqlen_k = sizes[6], processors = sizes[8];
  p.cu_seqlens_q = cu_seqlens_q, p.cu_seqlens_k = cu_seqlens_k, p.seqused_k = seqused_k;
  p.lse_head_stride = p.total_q, p.lse_size = p.heads * p.total_q, p.dq_order = &unused;
  p.window_left = -1, p.window_right = sizes[7] ? 0 : -1;
  return sizes[7] ? first_to_wait<Mask<true, false>>(p) : first_to_wait<Mask<false, false>>(p);
}
// Of all calls with these sizes and bounds from -1 to the totals, how many have a block that waits. The last of them
// goes to `found`: cu_seqlens_q, cu_seqlens_k.
extern "C" int calls_that_wait(const int* sizes, int* found) {
  int num_bounds = sizes[0] + 1, num_waiting = 0;
  std::vector<int> bounds(2 * num_bounds, -1);
  while (true) {
    if (block_that_waits(sizes, bounds.data(), bounds.data() + num_bounds, nullptr) >= 0) {
      ++num_waiting;
      std::memcpy(found, bounds.data(), bounds.size() * sizeof(int));
    }
    std::size_t place = 0;
    while (place < bounds.size() && bounds[place] == sizes[place < num_bounds ? 1 : 2]) bounds[place++] = -1;
    if (place == bounds.size()) return num_waiting;
    ++bounds[place];
  }
}
// How many counts of turns stay after the blocks of a grid have cleared them.
extern "C" int counts_left(int grid, int threads, int lse_size) {
  Params p{};
  std::vector<int> counts(lse_size + 1, 1);
  p.dq_order = counts.data(), p.lse_size = lse_size, blockDim.x = threads;
  for (int thread = 0; thread < threads * grid; ++thread) {
    blockIdx.x = thread / threads, threadIdx.x = thread % threads;
    KeyTile::clear_order(p);
  }
  threadIdx.x = 0;
  int sum = 0;
  for (int count : counts) sum += count;
  return sum - 1;  // the one behind stays
}
// The key tiles of [n_begin, n_end) that a consumer walks over; the last number says which of them are full.
extern "C" int walk(const uint2* map, int num_rows, int seqlen_k, int i_begin, int i_end, int consumer, int n_begin,
                    int n_end, int* found, int* is_full) {
  Params p{};
  p.batch = p.heads = 1, p.seqlen_q = num_rows, p.seqlen_k = seqlen_k;
  p.mask_strides[2] = num_rows == 1 ? 0 : 1;
  MaskWindow<true, 2> window;
  p.mask_tiles = reinterpret_cast<u32*>(const_cast<uint2*>(map));
  window.find<128>(p, 0, 0, 1, i_begin, i_end);
  window.trim(n_begin, n_end);
  if (n_begin >= n_end) return 0;
  TileWalk<true> walk{window.visible, window.full[consumer]};
  int count = 0;
  for (int n = n_end - 1; n >= n_begin;) {
    is_full[count] = walk.is_full(n);
    found[count++] = n;
    n = walk.next(n, n_begin,
                  [&](int word) { return make_uint2(window.load_visible(word), window.load_full(consumer, word)); });
  }
  return count;
}
// Where a query tile looks for the bits of query i of its head number `head`, and where they are; in words.
template <bool kPacksHeads_, int kNumConsumers_, int kBlockN_>
struct MaskConfig {
  static constexpr bool kPacksHeads = kPacksHeads_;
  static constexpr i32 kNumConsumers = kNumConsumers_, kBlockN = kBlockN_;
};
template <class Config>
void find_bits(const Params& p, int i_begin, int num_heads, int head, int i, int n, i64* found) {
  constexpr i32 kBlockN = Config::kBlockN;
  MaskWindow<true, Config::kNumConsumers> window;
  window.template find<kBlockN>(p, p.batch - 1, p.heads - num_heads, num_heads, i_begin, p.seqlen_q);
  MaskOffset<Config> offset = window.template row_offset<Config>(head, i - (i_begin < 0 ? 0 : i_begin));
  const uint4* words = window.bits + (offset + static_cast<MaskOffset<Config>>(n));
  found[0] = words - reinterpret_cast<const uint4*>(p.mask_bits);
  MaskLayout<kBlockN> layout(p);
  found[1] = layout.bits_index(layout.plane(p.batch - 1, p.heads - num_heads + head), i, n);
}
extern "C" void bits_of(int tile, int batch, int heads, int seqlen_q, int seqlen_k, int i_begin, int num_heads,
                        int head, int i, int n, i64* found) {
  Params p{};
  p.batch = batch, p.heads = heads, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  for (i64& stride : p.mask_strides) stride = 1;
  auto find = tile == 0 ? find_bits<MaskConfig<false, 3, 128>> : tile == 1 ? find_bits<MaskConfig<false, 2, 32>>
                                                                           : find_bits<MaskConfig<true, 1, 64>>;
  find(p, i_begin, num_heads, head, i, n, found);
}
extern "C" unsigned below(int end) { return columns_below(end); }
"""
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("tile_order")
    (folder / "unit.cpp").write_text(SOURCE)
    names = ("-D__device__=", "-D__forceinline__=inline", "-D__shared__=", f"-I{INCLUDE}")
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *names, "-o", "unit.so", "unit.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "unit.so"))


def tiles_of(
    library: ctypes.CDLL, block: int, grid: int, *sizes: int, cu_seqlens: list[int] | None = None
) -> list[tuple[int, int, int]]:
    buffer = (ctypes.c_int * 100_000)()
    count = library.tiles_of(block, grid, *sizes, cu_seqlens and numbers(cu_seqlens), buffer)
    return [tuple(buffer[3 * x : 3 * x + 3]) for x in range(count)]  # type: ignore[misc]


def numbers(values: list[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values))(*values)


def draw_packed(draw: random.Random, tile_rows: int) -> list[int]:
    """The bounds of packed sequences: empty ones, single rows, whole tiles, long ones."""
    lengths = [
        draw.choice((0, 0, 1, 1, tile_rows, 2 * tile_rows, draw.randint(0, 5 * tile_rows)))
        for _ in range(draw.choice((1, 2, 7, 8, 9, 40)))
    ]
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


def packed_tiles(cu_seqlens: list[int], tile_rows: int, num_rows: int) -> Counter[tuple[int, int, int]]:
    return Counter(
        (tile, row, b)
        for b, (start, end) in enumerate(pairwise(cu_seqlens))
        for tile in range(-(-(end - start) // tile_rows))
        for row in range(num_rows)
    )


def cost(m_block: int, num_m_blocks: int) -> int:
    """Key tiles under a causal mask."""
    return m_block + 1 if m_block < num_m_blocks else 0


def test_every_query_tile_once(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        grid, batch, heads, num_m_blocks = (draw.randint(1, high) for high in (20, 5, 9, 12))
        expected = Counter((m, h, b) for m in range(num_m_blocks) for h in range(heads) for b in range(batch))
        for order, shares_bias in ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1)):
            sizes = order, batch, heads, 128 * num_m_blocks, shares_bias
            found = Counter(tile for block in range(grid) for tile in tiles_of(library, block, grid, *sizes))
            # A head without a partner has tiles past the last query, which cost nothing
            assert Counter({tile: n for tile, n in found.items() if tile[0] < num_m_blocks}) == expected


def test_every_query_tile_of_packed_sequences_once(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        grid, heads, cu_seqlens = draw.randint(1, 20), draw.randint(1, 9), draw_packed(draw, 128)
        expected, batch = packed_tiles(cu_seqlens, 128, heads), len(cu_seqlens) - 1
        for order in (0, 1):
            sizes = order, batch, heads, max(cu_seqlens[-1], 1), 0
            tiles = [t for block in range(grid) for t in tiles_of(library, block, grid, *sizes, cu_seqlens=cu_seqlens)]
            found = Counter((m, h, b) for m, h, b in tiles if 128 * m < cu_seqlens[b + 1] - cu_seqlens[b])
            assert found == expected, (order, cu_seqlens)
            assert len(tiles) <= 2 * (cu_seqlens[-1] // 128 + batch) * (heads + 1)


def test_every_tile_of_packed_sequences_has_a_block(library: ctypes.CDLL, seed: int) -> None:
    """In a grid as the host counts it, and every block's tile lies in its own sequence or behind the last."""
    draw = random.Random(seed)
    for _ in range(300):
        tile_rows, num_rows, from_last = draw.choice((4, 64, 80, 192)), draw.randint(1, 9), draw.randint(0, 1)
        cu_seqlens = draw_packed(draw, tile_rows)
        grid = (-(-cu_seqlens[-1] // tile_rows) + len(cu_seqlens) - 1) * num_rows
        places = (ctypes.c_int * (4 * grid))()
        bounds = numbers(cu_seqlens)
        library.places_of(grid, tile_rows, num_rows, from_last, len(cu_seqlens) - 1, bounds, places)
        found: Counter[tuple[int, int, int]] = Counter()
        for tile, num_tiles, row, b in zip(*[iter(places)] * 4, strict=True):
            assert num_tiles == -(-(cu_seqlens[b + 1] - cu_seqlens[b]) // tile_rows)
            assert tile >= 0
            assert 0 <= row < num_rows
            found.update([(tile, row, b)] * (tile < num_tiles))
        assert found == packed_tiles(cu_seqlens, tile_rows, num_rows)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "is_packed"),
    [
        (2**30 - 1, 1, 64, False),
        (8_388_607, 128, 1, False),
        (2**22, 3, 5100, False),
        (8_200_000, 128, 8_200_000, True),
        (1, 200, 330_000_000, True),
        (10**9, 1, 10**9, True),
    ],
)
def test_indices_stay_below_2_to_the_31(
    library: ctypes.CDLL, order: int, batch: int, heads: int, rows: int, is_packed: bool
) -> None:
    """Of the largest calls that are not refused."""
    q = torch.empty(heads, rows, 8, device="meta") if is_packed else torch.empty(batch, heads, rows, 8, device="meta")
    bounds = torch.empty(batch + 1, dtype=torch.int32, device="meta") if is_packed else None
    problem = Problem.of(AttentionArgs(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds))
    assert 0.8 * cuda.MAX_TILES < cuda.num_tiles(problem) <= cuda.MAX_TILES
    assert library.num_indices_of(order, batch, heads, rows, is_packed) >= cuda.num_tiles(problem)


@pytest.mark.parametrize("is_banded", [0, 1])
@pytest.mark.parametrize("is_ordered", [0, 1])
def test_blocks_of_packed_keys(library: ctypes.CDLL, seed: int, is_banded: int, is_ordered: int) -> None:
    """Every tile of keys has one block. Where sums have an order, a block waits for those with smaller numbers alone:
    the first keys come first, or the last ones under a causal mask."""
    draw = random.Random(seed)
    for _ in range(150):
        heads, cu_seqlens = draw.randint(1, 9), draw_packed(draw, 128)
        grid = (-(-cu_seqlens[-1] // 128) + len(cu_seqlens) - 1) * heads
        tiles = (ctypes.c_int * (3 * grid))()
        library.key_tiles_of(grid, heads, len(cu_seqlens) - 1, is_banded, is_ordered, numbers(cu_seqlens), tiles)
        found = [
            (n, h, b) for n, h, b in zip(*[iter(tiles)] * 3, strict=True) if 128 * n < cu_seqlens[b + 1] - cu_seqlens[b]
        ]
        assert Counter(found) == packed_tiles(cu_seqlens, 128, heads)
        if is_ordered:
            ordered = sorted(found, key=lambda tile: (tile[2], tile[1]))
            rows = {(h, b): [m for m, *row in ordered if row == [h, b]] for _, h, b in ordered}
            assert all(row == sorted(row, reverse=bool(is_banded)) for row in rows.values())


@pytest.mark.parametrize("is_banded", [0, 1])
def test_no_turn_waits_for_ever_whatever_the_bounds(library: ctypes.CDLL, is_banded: int) -> None:
    """All bounds of three sequences of at most 4 queries and 7 keys, most of which no call may have. In a fixed order
    of sums each block finds its turn when the blocks before it have ended, so blocks that start in this order all
    end."""
    found = numbers([0] * 8)
    sizes = numbers([3, 4, 7, 1, 1, 4, 7, is_banded, 1])
    assert library.calls_that_wait(sizes, found) == 0, list(found)


def draw_bounds(draw: random.Random, batch: int, total: int) -> list[int]:
    """Bounds that may decrease, now and then, or in any order, or far outside."""
    bounds = [draw.randint(0, total) for _ in range(batch + 1)]
    kind = draw.choice(("any order", "some", "far"))
    if kind != "any order":
        bounds.sort()
        for _ in range(draw.randint(0, 3)):
            b = draw.randrange(batch + 1)
            bounds[b] = draw.randint(-(2**31), 2**31 - 1) if kind == "far" else draw.randint(0, total)
    return bounds


def test_no_turn_waits_for_ever_with_many_sequences(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20_000):
        batch, total_q, total_k = draw.randint(1, 90), draw.randint(1, 60), draw.randint(1, 60)
        heads_kv, group = draw.randint(1, 3), draw.randint(1, 2)
        longest = draw.choice(((total_q, total_k), (draw.randint(1, total_q), draw.randint(1, total_k))))
        used = [draw.randint(-1, total_k) for _ in range(batch)] if draw.random() < 0.3 else None
        sizes = [batch, total_q, total_k, heads_kv * group, heads_kv, *longest, draw.randint(0, 1), draw.choice((1, 9))]
        q, k = draw_bounds(draw, batch, total_q), draw_bounds(draw, batch, total_k)
        waiting = library.block_that_waits(numbers(sizes), numbers(q), numbers(k), used and numbers(used))
        assert waiting < 0, (waiting, sizes, q, k, used)


@pytest.mark.parametrize(("heads", "batch", "rows"), [(1, 1, 1), (3, 1, 31), (2, 5, 4), (1, 1, 1000), (4, 7, 129)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_every_count_of_turns_is_cleared(
    library: ctypes.CDLL, heads: int, batch: int, rows: int, is_packed: bool
) -> None:
    """By the launch before, whose grid follows from the sizes alone."""
    per_head = rows // SM90_STEP_ROWS + batch if is_packed else -(-rows // SM90_STEP_ROWS) * batch
    assert library.counts_left(per_head * heads, SM90_STEP_THREADS, heads * rows * (1 if is_packed else batch)) == 0


@pytest.mark.parametrize(
    ("batch", "heads", "num_m_blocks", "limit"),
    [(4, 16, 22, 5.6), (1, 16, 86, 5.6), (2, 32, 43, 10.6), (16, 16, 6, 6.0), (1, 1, 300, 2.3)],
)
def test_the_last_round_is_no_longer_than_half(
    library: ctypes.CDLL, batch: int, heads: int, num_m_blocks: int, limit: float
) -> None:
    """The longest block, in pairs of tiles."""
    sizes = 1, batch, heads, 128 * num_m_blocks, 0
    costs = [sum(cost(m, num_m_blocks) for m, *_ in tiles_of(library, block, 132, *sizes)) for block in range(132)]
    assert max(costs) / (num_m_blocks + 1) <= limit


@pytest.mark.parametrize(("heads", "num_m_blocks"), [(512, 3), (256, 6), (128, 11)])
def test_in_rotation_every_block_gets_its_share_of_each_tile(
    library: ctypes.CDLL, heads: int, num_m_blocks: int
) -> None:
    """The last tile of a head has fewer queries, and 132 blocks are a multiple of the tiles of a head."""
    spread = {}
    for order in (0, 2):
        blocks = [tiles_of(library, block, 132, order, 1, heads, 128 * num_m_blocks, 0) for block in range(132)]
        counts = [sum(m == num_m_blocks - 1 for m, *_ in tiles) for tiles in blocks]
        spread[order] = max(counts) - min(counts)
    assert spread[0] >= heads * num_m_blocks // 132  # as they come, some blocks get no other tile
    assert spread[2] <= 1


def test_sequences_that_share_a_bias_follow_each_other(library: ctypes.CDLL) -> None:
    tiles = tiles_of(library, 0, 1, 0, 3, 2, 128, 1)
    assert tiles == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 1, 2)]


def test_the_walk_over_key_tiles(library: ctypes.CDLL, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        num_tiles, num_groups = draw.randint(1, 100), draw.randint(1, 3)
        num_rows = 1 if draw.random() < 0.3 else 64 * (num_groups - 1) + draw.randint(2, 64)
        num_groups = -(-num_rows // 64)
        density, num_words = draw.choice((0.02, 0.5, 0.95)), -(-num_tiles // 32)
        seen = [[draw.random() < density for _ in range(num_tiles)] for _ in range(num_groups)]
        full = [[here and draw.random() < 0.5 for here in row] for row in seen]
        words = [
            sum(bit << x for x, bit in enumerate(row[32 * word : 32 * word + 32]))
            for pair in zip(seen, full, strict=True)
            for word in range(num_words)
            for row in pair
        ]
        i_begin = draw.choice((-64, 0, 64)) if num_groups > 1 else draw.choice((-64, 0))
        consumer = draw.choice([c for c in (0, 1) if 0 <= i_begin + 64 * c < num_rows or num_rows == 1])
        n_begin = draw.randrange(num_tiles)
        n_end = draw.randint(n_begin + 1, num_tiles)
        groups = range(max(i_begin, 0) // 64, min(-(-(i_begin + 128) // 64), num_groups)) if num_rows > 1 else [0]
        own = 0 if num_rows == 1 else (i_begin + 64 * consumer) // 64
        expected = [n for n in reversed(range(n_begin, n_end)) if any(seen[group][n] for group in groups)]
        found, is_full = (ctypes.c_int * num_tiles)(), (ctypes.c_int * num_tiles)()
        sizes = num_rows, 128 * num_tiles, i_begin, min(i_begin + 128, max(num_rows, 64)), consumer, n_begin, n_end
        count = library.walk((ctypes.c_uint * len(words))(*words), *sizes, found, is_full)
        assert found[:count] == expected
        assert [bool(x) for x in is_full[:count]] == [full[own][n] for n in expected]


@pytest.mark.parametrize(
    ("tile", "block_n", "sizes", "i_begin", "num_heads"),
    [
        (0, 128, (1, 1, 1 << 19, 1 << 18), 1 << 18, 1),  # sizes: batch, heads, queries, keys
        (0, 128, (2, 3, 1 << 30, 1 << 30), (1 << 30) - 192, 1),
        (0, 128, (1, 1, 192, MAX_LENGTH), 0, 1),
        (0, 128, (1, 1, 192, MAX_LENGTH), -64, 1),
        (1, 32, (1, 1, 128, MAX_LENGTH), 0, 1),
        (2, 64, (1, 64, 64, MAX_LENGTH), 63, 64),
        (2, 64, (3, 64, 64, 1 << 27), 0, 16),
    ],
)
def test_the_bits_of_large_masks(
    library: ctypes.CDLL, tile: int, block_n: int, sizes: tuple[int, ...], i_begin: int, num_heads: int
) -> None:
    """No offset wraps around at 32 bits."""
    found, (_, _, seqlen_q, seqlen_k) = (ctypes.c_int64 * 2)(), sizes
    for head in {0, num_heads - 1}:
        for i in {max(i_begin, 0), seqlen_q - 1 if tile == 2 else min(i_begin + 191, seqlen_q - 1)}:
            for n in (0, -(-seqlen_k // block_n) - 1):
                library.bits_of(tile, *sizes, i_begin, num_heads, head, i, n, found)
                assert found[0] == found[1], (head, i, n)


def test_columns_below_an_end(library: ctypes.CDLL) -> None:
    library.below.restype = ctypes.c_uint
    for end in (-(2**31), -1, *range(130), 2**31 - 1):
        expected = sum(1 << (2 * b + e) for b in range(16) for e in range(2) if 8 * b + e < end)
        assert library.below(end) == expected
