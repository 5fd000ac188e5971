"""How the Hopper decode kernel deals out its keys (attn/decode_schedule.cuh), by the header that it includes, compiled
for the host. The lanes of a warp are fibers that take turns at each exchange."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from flashtile.runtime.nvrtc import INCLUDE

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
MAX_UNITS = 7 << 28
SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>
struct Index { unsigned x = 0; };
Index blockIdx, blockDim, gridDim, threadIdx;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
#define asm(...)
#define clock64() 0
#define __cvta_generic_to_shared(pointer) 0

// Lanes: each runs until it exchanges a value, then the next one does.
ucontext_t scheduler, lanes[32];
int64_t slots[32];
void yield() { swapcontext(&lanes[threadIdx.x], &scheduler); }
template <typename T>
T exchange(T x, int from) {
  T found;
  std::memcpy(&slots[threadIdx.x], &x, sizeof(T));
  yield();
  std::memcpy(&found, &slots[from], sizeof(T));
  yield();
  return found;
}
template <typename T>
T __shfl_sync(unsigned, T x, int lane) { return exchange(x, lane & 31); }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) { return exchange(x, threadIdx.x ^ mask); }
template <typename T>
T __shfl_up_sync(unsigned, T x, int distance) {
  int lane = threadIdx.x;
  return exchange(x, lane < distance ? lane : lane - distance);
}
unsigned __ballot_sync(unsigned, bool x) {
  slots[threadIdx.x] = x;
  yield();
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(slots[lane]) << lane;
  yield();
  return found;
}
#include "device/ptx/sync.cuh"
int processors = 132;
#define num_multiprocessors() processors
#include "families/decode_sm90/schedule.cuh"
using namespace flashtile;

struct Config {
  static constexpr i32 kBlockN = 64, kNumBlocks = 2, kFewUnits = 4, kNumConsumers = 1;
  static constexpr bool kPacksHeads = true;
};
using Schedule = DecodeSchedule<Config, Mask<false, false>, SeqInfo<true>>;
Params p;

// The items of lane 0 of a block. The other lanes find the same ones.
void walk() {
  int lane = threadIdx.x;
  Schedule schedule(p);
  while (!schedule.is_done()) {
    DecodeItem item = schedule.take();
    if (lane == 0)
      std::printf("%u %d %d %d %d %d %d %d %d %d\n", blockIdx.x, item.coord.batch, item.coord.head, item.coord.m_block,
                  item.n_begin, item.n_end, static_cast<int>(item.role), item.first_block, item.num_queries,
                  item.s.seqlen_k);
  }
}
bool is_running[32];
void run_lane() {
  walk();
  is_running[threadIdx.x] = false;
  yield();
}
void run_warp() {
  static std::vector<char> stacks(32 << 16);
  for (int lane = 0; lane < 32; ++lane) {
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack = {stacks.data() + (lane << 16), 0, 1 << 16};
    lanes[lane].uc_link = &scheduler;
    makecontext(&lanes[lane], run_lane, 0);
    is_running[lane] = true;
  }
  for (bool is_any = true; is_any;) {
    is_any = false;
    for (int lane = 0; lane < 32; ++lane) {
      if (!is_running[lane]) continue;
      is_any = true;
      threadIdx.x = lane;
      swapcontext(&scheduler, &lanes[lane]);
    }
  }
}

// Numbers between pages that may not be read.
const i32* read_array(int count) {
  if (count == 0) return nullptr;
  const std::size_t page = 4096, size = (count * sizeof(i32) + page - 1) / page * page;
  char* base = static_cast<char*>(mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(base + page, size, PROT_READ | PROT_WRITE);
  i32* numbers = reinterpret_cast<i32*>(base + page + size) - count;
  for (int x = 0; x < count; ++x)
    if (std::scanf("%d", numbers + x) != 1) std::abort();
  return numbers;
}
int main() {
  int grid, num_q, num_k, num_used;
  for (int* number : {&grid, &processors, &p.batch, &p.heads, &p.heads_kv, &p.seqlen_q, &p.seqlen_k, &p.total_q,
                      &p.num_splits, &num_q, &num_k, &num_used})
    if (std::scanf("%d", number) != 1) return 2;
  p.window_left = p.window_right = -1;
  p.cu_seqlens_q = read_array(num_q), p.cu_seqlens_k = read_array(num_k), p.seqused_k = read_array(num_used);
  p.block_table = reinterpret_cast<const i32*>(&p);  // pages: lengths have no total
  gridDim.x = grid;
  for (int block = 0; block < grid; ++block) {
    blockIdx.x = block;
    run_warp();
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("decode_schedule")
    (folder / "unit.cpp").write_text(SOURCE)
    names = ("-D__device__=", "-D__forceinline__=inline", "-D__shared__=", f"-I{INCLUDE}")
    # An addition that overflows ends the program
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-ftrapv", *names, "-o", "unit", "unit.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "unit"


class Item:
    def __init__(self, line: str):
        self.block, self.batch, self.head, self.m_block, self.n_begin, self.n_end, self.role, *rest = map(
            int, line.split()
        )
        self.first_block, self.num_queries, self.seqlen_k = rest

    @property
    def row_tile(self) -> tuple[int, int, int]:
        return self.batch, self.head, self.m_block


WHOLE, PART, JOIN = range(3)


def items_of(program: Path, sizes: list[int], *arrays: list[int]) -> list[Item]:
    """sizes: blocks, multiprocessors, batch, heads, heads_kv, longest q, longest k, total_q, splits; arrays:
    cu_seqlens_q, cu_seqlens_k, seqused_k."""
    numbers = [*sizes, *map(len, arrays), *(number for array in arrays for number in array)]
    given = " ".join(map(str, numbers))
    done = subprocess.run([program], input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.returncode, sizes, [array[:20] for array in arrays])
    return [Item(line) for line in done.stdout.splitlines()]


def check_parts(items: list[Item]) -> None:
    """Every flag that is set is cleared by one join, and every join waits for flags that blocks before it set."""
    flags = Counter(item.block for item in items if item.role == PART)
    joined = Counter(block for item in items if item.role == JOIN for block in range(item.first_block, item.block))
    assert flags == joined
    assert all(count == 1 for count in flags.values())
    parts = {item.block: item.row_tile for item in items if item.role == PART}
    for item in items:
        if item.role == JOIN:
            assert {parts[block] for block in range(item.first_block, item.block)} == {item.row_tile}


def draw_sizes(draw: random.Random) -> list[int]:
    batch = draw.choice((1, 2, 31, 32, 33, 70, 1100))
    heads_kv, group, grid = draw.randint(1, 3), draw.choice((1, 4, 33, 70)), draw.randint(8, 40)
    return [grid, draw.randint(1, grid), batch, heads_kv * group, heads_kv]


def test_every_key_of_every_query_once(program: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        sizes = draw_sizes(draw)
        batch, heads_kv = sizes[2], sizes[4]
        queries = [draw.choice((0, 1, 1, 1, draw.randint(0, 3))) for _ in range(batch)]
        keys = [draw.choice((0, 1, 64, draw.randint(0, 9000))) for _ in range(batch)]
        starts = [sum(queries[:b]) for b in range(batch + 1)]
        used = [2**31 - 1024 if draw.random() < 0.1 else count for count in keys]
        bounds_k = [0] * (batch + 1)
        for b in range(batch):
            bounds_k[b + 1] = bounds_k[b] + keys[b]
        longest_q, longest_k, splits = max([1, *queries]), max([1, *keys]), draw.choice((1, 99))
        items = items_of(program, [*sizes, longest_q, longest_k, starts[-1], splits], starts, bounds_k, used)
        check_parts(items)
        found = Counter((item.row_tile, n) for item in items for n in range(item.n_begin, item.n_end))
        row_tiles = {item.row_tile: item.num_queries for item in items}
        assert found == Counter(
            (row_tile, n) for row_tile in row_tiles for n in range(-(-min(keys[row_tile[0]], longest_k) // 64))
        )
        heads_of_tile = sizes[3] // heads_kv  # of a KV head; more than 64 take two tiles
        for b in range(batch):
            tiles = [count for (batch_idx, *_), count in row_tiles.items() if batch_idx == b]
            assert sum(tiles) == queries[b] * heads_kv * (-(-heads_of_tile // 64))


@pytest.mark.parametrize("kind", ["used keys", "queries"])
def test_lengths_without_limits(program: Path, seed: int, kind: str) -> None:
    """Lengths that no call may have, with more units than 32 bits count: nothing is read out of bounds, no sum
    overflows, and no flag stays set, which the next launch would take for its own."""
    draw = random.Random(seed)
    longest = 2**31 - 1024
    for _ in range(25):
        sizes = draw_sizes(draw)
        batch = sizes[2]
        if kind == "used keys":
            total, starts = batch, list(range(batch + 1))
        else:  # every other sequence has all queries
            total = draw.randint(1, 40)
            starts = [b % 2 * draw.choice((total, 2**31 - 1)) for b in range(batch + 1)]
        longest_k = draw.choice((longest, 2**28))
        used = [draw.choice((2**31 - 1, -(2**31), longest, 2**30, 5)) for _ in range(batch)]
        bounds_k = [draw.choice((0, 2**31 - 1, -5)) for _ in range(batch + 1)] if draw.random() < 0.3 else []
        items = items_of(program, [*sizes, total, longest_k, total, 99], starts, bounds_k, used)
        check_parts(items)
        assert all(0 <= item.batch < batch and 0 <= item.head < sizes[3] for item in items)
        assert sum(max(item.n_end - item.n_begin, 1) for item in items) <= MAX_UNITS
