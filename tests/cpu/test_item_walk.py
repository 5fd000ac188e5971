"""The items and key tiles of the Hopper forward for short sequences (families/fwd_sm90_short/item_walk.cuh), by the
header that the kernel includes, compiled for the host; and its barriers (fwd_sm90_short.cuh), as a model."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_tile_order import BUILTINS, COMPILER

from flashtile.runtime.nvrtc import INCLUDE

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
CONSUMERS, STAGES, BLOCK_N = 3, 4, 64
SOURCE = (
    BUILTINS
    + f"""
#include "families/fwd_sm90_short/item_walk.cuh"
using namespace flashtile;
template <bool kIsOneTile_>
struct Config {{
  static constexpr i32 kBlockN = kIsOneTile_ ? 208 : {BLOCK_N}, kNumConsumers = {CONSUMERS}, kNumStages = {STAGES};
  static constexpr bool kIsOneTile = kIsOneTile_;
}};
// Each item: segment, batch, head, first query, key tiles; of its segment ring, ring_end, item_end, keys.begin.
template <class Walk>
int walk_block(const Params& p, int* out) {{
  int segment = 0, count = 0;
  for (Walk walk(p); walk.first_item < walk.num_items; walk.next(), ++segment) {{
    for (int item = walk.first; item < walk.end; ++item, ++count) {{
      int i = walk.first_query(item);
      Range tiles = walk.key_tiles(i, i + 64);
      int row[] = {{segment, walk.batch, walk.head, i, tiles.begin, tiles.end,
                   (int)walk.ring, (int)walk.ring_end(), walk.item_end(), walk.keys.begin}};
      for (int x = 0; x < 10; ++x) out[10 * count + x] = row[x];
    }}
  }}
  return count;
}}
extern "C" int items_of(int block, int grid, int is_one_tile, int has_band, int batch, int heads, int seqlen_q,
                        int seqlen_k, int left, int right, int* out) {{
  blockIdx.x = block, gridDim.x = grid;
  Params p{{}};
  p.batch = batch, p.heads = p.heads_kv = heads, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.window_left = left, p.window_right = right;
  if (is_one_tile) return walk_block<ItemWalk<Config<true>, Mask<false, false>>>(p, out);
  if (has_band) return walk_block<ItemWalk<Config<false>, Mask<true, false>>>(p, out);
  return walk_block<ItemWalk<Config<false>, Mask<false, false>>>(p, out);
}}
"""
)


class Item(NamedTuple):
    segment: int
    batch: int
    head: int
    i: int
    begin: int
    end: int
    ring: int
    ring_end: int
    item_end: int
    first_key: int


class Call(NamedTuple):
    is_one_tile: bool
    window: tuple[int, int] | None
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("walk")
    (folder / "walk.cpp").write_text(SOURCE, encoding="utf-8")
    names = "-D__device__=", "-D__forceinline__=inline", f"-I{INCLUDE}"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", *names]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, str(folder / "walk.cpp"), "-o", str(folder / "walk.so")], check=True)
    return ctypes.CDLL(str(folder / "walk.so"))


def items_of(library: ctypes.CDLL, call: Call, block: int, grid: int) -> list[Item]:
    size = call.batch * call.heads * -(-call.seqlen_q // 64)
    out = (ctypes.c_int * (10 * size))()
    lengths = call.batch, call.heads, call.seqlen_q, call.seqlen_k
    window = call.window or (-1, -1)
    count = library.items_of(block, grid, call.is_one_tile, call.window is not None, *lengths, *window, out)
    return [Item(*out[10 * x : 10 * x + 10]) for x in range(count)]


def calls() -> list[Call]:
    numbers, found = random.Random(7), []
    for _ in range(120):
        is_one_tile = numbers.random() < 0.3
        window = numbers.choice((None, (-1, 0), (-1, 30), (70, 0), (5, -1), (100, 100)))
        seqlen_q, seqlen_k = numbers.choice((1, 64, 65, 130, 200, 300, 700)), numbers.choice((1, 64, 65, 190, 200, 500))
        keys = min(seqlen_k, 200) if is_one_tile else seqlen_k
        heads, batch = numbers.randint(1, 3), numbers.randint(1, 5)
        found.append(Call(is_one_tile, None if is_one_tile else window, batch, heads, seqlen_q, keys))
    return found


def test_every_query_tile_is_in_one_block(library: ctypes.CDLL) -> None:
    for number, call in enumerate(calls()):
        num_items = call.batch * call.heads * -(-call.seqlen_q // 64)
        grid = min(1 + number % 9, num_items)
        blocks = [items_of(library, call, block, grid) for block in range(grid)]
        found = Counter((item.batch, item.head, item.i) for items in blocks for item in items)
        rows = range(0, call.seqlen_q, 64)
        assert found == Counter((b, h, i) for b in range(call.batch) for h in range(call.heads) for i in rows)
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
        for items in blocks:
            assert [item.segment for item in items] == sorted(item.segment for item in items)
            for item in items:
                assert item.begin >= item.end or item.first_key <= item.begin
                assert item.begin >= item.end or item.end - item.first_key <= item.ring_end - item.ring


# The barriers: each thread is a generator that yields where it waits


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def has_completed(self, parity: int) -> bool:
        """What mbarrier.try_wait.parity says."""
        return self.phase % 2 != parity


class Block:
    """Stages, and which tile each holds."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.full = [Barrier(1) for _ in range(STAGES)]
        self.empty = [Barrier(CONSUMERS) for _ in range(STAGES)]
        self.tiles = [-1] * STAGES
        self.num_read = 0

    def wait(self, barriers: list[Barrier], count: int, is_producer: bool = False) -> Iterator[None]:
        parity = count // STAGES % 2 ^ is_producer
        while not barriers[count % STAGES].has_completed(parity):
            yield

    def produce(self) -> Iterator[None]:
        for count in range(self.items[-1].ring_end):
            yield from self.wait(self.empty, count, is_producer=True)
            self.tiles[count % STAGES] = count
            yield
            self.full[count % STAGES].arrive()

    def skip(self, begin: int, end: int) -> Iterator[None]:
        for count in range(begin, end):
            yield from self.wait(self.full, count)
            self.empty[count % STAGES].arrive()

    def consume(self, consumer: int) -> Iterator[None]:
        index, first = consumer, 0
        while first < len(self.items):
            segment = self.items[first]
            if index >= segment.item_end:
                yield from self.skip(segment.ring, segment.ring_end)
            while index < segment.item_end:
                item, is_last = self.items[index], index + CONSUMERS >= segment.item_end
                begin = item.ring + max(item.begin - item.first_key, 0)
                end = begin + item.end - item.begin
                if is_last:
                    yield from self.skip(item.ring, begin if end > begin else item.ring_end)
                for count in range(begin, end):
                    yield from self.wait(self.full, count)
                    yield  # the product
                    assert self.tiles[count % STAGES] == count, (consumer, item, count)
                    self.num_read += 1
                    if is_last:
                        self.empty[count % STAGES].arrive()
                if is_last and end > begin:
                    yield from self.skip(end, item.ring_end)
                index += CONSUMERS
            first = segment.item_end


def test_no_consumer_waits_for_ever_or_reads_another_tile(library: ctypes.CDLL) -> None:
    numbers = random.Random(1)
    for call in calls():
        items = items_of(library, call, 0, 1)
        block = Block(items)
        threads = [block.produce(), *(block.consume(consumer) for consumer in range(CONSUMERS))]
        weights = [numbers.random() + 0.05 for _ in threads]  # some are slow
        idle = 0
        while threads:
            place = numbers.choices(range(len(threads)), weights)[0]
            before = block.num_read, sum(one.phase for one in (*block.full, *block.empty))
            if next(threads[place], "done") == "done":
                del threads[place], weights[place]
            after = block.num_read, sum(one.phase for one in (*block.full, *block.empty))
            idle = 0 if before != after else idle + 1
            assert idle < 5000, call
        assert block.num_read == sum(max(item.end - item.begin, 0) for item in items)
