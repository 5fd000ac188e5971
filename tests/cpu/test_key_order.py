"""The order in which blocks that own keys start, by the header that kernels include, compiled for the host."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flashtile.runtime.nvrtc import INCLUDE

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ on PATH")
SOURCE = """
#include "device/attn/key_order.cuh"
extern "C" int group_of(int num_rows, int num_tiles, int num_multiprocessors) {
  return flashtile::order_group(num_rows, num_tiles, num_multiprocessors);
}
extern "C" void block_of(int index, int num_n_blocks, int num_rows, int group, int* n, int* row) {
  flashtile::KeyBlock block = flashtile::key_block(index, num_n_blocks, num_rows, group);
  *n = block.n, *row = block.row;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("key_order")
    (folder / "unit.cpp").write_text(SOURCE)
    names = ("-D__device__=", "-D__forceinline__=inline", f"-I{INCLUDE}")
    command = [str(COMPILER), "-std=c++17", "-shared", "-fPIC", *names, "-o", "unit.so", "unit.cpp"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "unit.so"))


@pytest.fixture
def block_of(library: ctypes.CDLL) -> Callable[..., tuple[int, int]]:
    def find(*sizes: int) -> tuple[int, int]:
        n, row = ctypes.c_int(), ctypes.c_int()
        library.block_of(*sizes, ctypes.byref(n), ctypes.byref(row))
        return n.value, row.value

    return find


def test_every_block_once_and_after_those_before_it(block_of: Callable[..., tuple[int, int]], seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        num_n_blocks, num_rows = draw.randint(1, 20), draw.randint(1, 40)
        group = draw.randint(1, num_rows)
        blocks = [block_of(index, num_n_blocks, num_rows, group) for index in range(num_n_blocks * num_rows)]
        assert sorted(blocks) == [(n, row) for n in range(num_n_blocks) for row in range(num_rows)]
        for row in range(num_rows):
            assert [n for n, found in blocks if found == row] == list(range(num_n_blocks))


def test_one_head_after_the_other_without_groups(block_of: Callable[..., tuple[int, int]]) -> None:
    assert [block_of(index, 3, 2, 1) for index in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(("num_tiles", "group"), [(8, 33), (32, 9), (1000, 1), (1, 64), (0, 64)])
def test_short_blocks_need_more_heads_between_them(library: ctypes.CDLL, num_tiles: int, group: int) -> None:
    assert library.group_of(64, num_tiles, 132) == group
