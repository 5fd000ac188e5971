"""What the two simt families share: rows of kernels in float32 arithmetic (FFMA), which every GPU has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, Row
from flashtile.kernels.spec import CPP_TYPES, DTYPES, Features, PlanKey

_FLOAT = 4  # bytes
# Tiles of the head dimension in shared memory: of the block's own rows, and of the streaming rows. Scores come on top.
_SHARED_TILES = {"fwd_simt": (1, 2), "bwd_dq_simt": (2, 2), "bwd_dkdv_simt": (2, 2), "bwd_dbias_simt": (2, 2)}
HEAD_DIMS = (32, 64, 96, 128, 192, 256)


class Tile(NamedTuple):
    """One tile, and how many of the options that cost registers it holds without a spill."""

    block_m: int
    block_n: int
    num_warps: int
    max_options: int = 99
    no_lengths_on: int | None = None  # the arch on which it spills with sequence lengths


# Take any option and fit any GPU. 64 x 64 is the reference tile.
SMALL_TILES = (Tile(32, 32, 4), Tile(16, 16, 4), Tile(16, 8, 4), Tile(8, 8, 2))


@dataclass(frozen=True)
class SimtRow(Row):
    num_warps: int

    @property
    def header(self) -> str:
        return "fwd_simt" if self.kernel == "fwd_simt" else "bwd_simt"

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def spills(self, arch: Arch) -> bool:
        return self.block_m * self.block_n // self.num_threads > arch.max_thread_scores

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.block_m}, {self.block_n}, {self.num_warps}"
        return f"SimtConfig<{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}, {sizes}>"

    @property
    def label(self) -> str:
        return f"{self.block_m} x {self.block_n}, {self.num_warps} warps"

    @property
    def shared_bytes(self) -> int:
        own, streaming = _SHARED_TILES[self.kernel]
        rows = own * self.block_m + streaming * self.block_n
        return _FLOAT * (rows * (self.head_dim + 4) + self.block_m * (self.block_n + 8))

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        storage = "FwdSimtStorage" if self.kernel == "fwd_simt" else "BwdSimtStorage"
        return {"shared bytes": (f"sizeof(flashtile::{storage}<flashtile::{self.config}>)", self.shared_bytes)}


class SimtFamily(Family[SimtRow]):
    dtypes = DTYPES
    head_dims = tuple((dim, dim) for dim in HEAD_DIMS)
    tiles: ClassVar[Mapping[str, Mapping[int, tuple[Tile, ...]]]]  # kernel -> padded head dim -> the fastest first

    def every_row(self, dtype: str) -> Iterator[SimtRow]:
        for kernel, by_dim in self.tiles.items():
            for dim, tiles in by_dim.items():
                for tile in tiles:
                    yield SimtRow(kernel, dtype, dtype, dim, dim, *tile[:3])

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[SimtRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        for tile in self.tiles[kernel][dims[0]]:
            spills = key.features.has_lengths and tile.no_lengths_on == key.arch.number
            if key.features.num_options <= tile.max_options and not spills:
                yield SimtRow(kernel, key.dtype, key.out_dtype, *dims, *tile[:3])
