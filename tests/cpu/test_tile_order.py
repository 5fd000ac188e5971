"""The order of query tiles (attn/scheduler.cuh) and the key tiles that a bool mask leaves (attn/mask_bits.cuh), by the
headers that kernels include, compiled for the host."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from flashtile.runtime.nvrtc import INCLUDE

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
# What NVRTC has built in, as far as the two headers use it
BUILTINS = """
#include <cmath>
#include <cstdint>
#include <cstring>
struct Index { unsigned x = 0; };
inline thread_local Index blockIdx, gridDim, threadIdx;
struct uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
#define asm(...)
#define clock64() 0
"""
SOURCE = (
    BUILTINS
    + """
#include "flashtile/attn/mask_bits.cuh"
#include "flashtile/attn/scheduler.cuh"
using namespace flashtile;
// order: 0 as they come, 1 pairs under a band, 2 in rotation
extern "C" int tiles_of(int block, int grid, int order, int batch, int heads, int seqlen_q, int shares_bias,
                        int* tiles) {
  blockIdx.x = block, gridDim.x = grid;
  Params p{};
  p.batch = batch, p.heads = p.heads_kv = heads, p.seqlen_q = seqlen_q, p.num_splits = 1;
  p.bias_strides[0] = shares_bias ? 0 : 1;
  auto walk = [&](auto scheduler) {
    scheduler.init(p, 128);
    int count = 0;
    for (int index = scheduler.first(); index < scheduler.num_indices; index = scheduler.next(index), ++count) {
      TileCoord coord = scheduler.coord(p, index);
      tiles[3 * count] = coord.m_block, tiles[3 * count + 1] = coord.head, tiles[3 * count + 2] = coord.batch;
    }
    return count;
  };
  if (order == 1) return walk(TileScheduler<Mask<true, false>, false>());
  if (order == 2) return walk(TileScheduler<Mask<false, false>, false, true, true>());
  return walk(TileScheduler<Mask<false, false>, false, true>());
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


def tiles_of(library: ctypes.CDLL, block: int, grid: int, *sizes: int) -> list[tuple[int, int, int]]:
    buffer = (ctypes.c_int * 100_000)()
    count = library.tiles_of(block, grid, *sizes, buffer)
    return [tuple(buffer[3 * x : 3 * x + 3]) for x in range(count)]  # type: ignore[misc]


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


def test_columns_below_an_end(library: ctypes.CDLL) -> None:
    library.below.restype = ctypes.c_uint
    for end in (-(2**31), -1, *range(130), 2**31 - 1):
        expected = sum(1 << (2 * b + e) for b in range(16) for e in range(2) if 8 * b + e < end)
        assert library.below(end) == expected
