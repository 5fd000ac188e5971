"""The forward pass by mma.sync for wide heads, from Ampere on: include/flashtile/kernels/fwd_sm80_wide.cuh,
docs/sm80.md.

No warp holds a row of O: warps that share rows split its columns, and P passes through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.families.base import Launch, Row, tile_step
from flashtile.kernels.families.fwd_sm80 import GROUP_ROWS, PACKED_HEADS, QUERY_TILE_BYTES
from flashtile.kernels.families.mma_sync import MmaFamily
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.plan import Factor, SplitRule
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey, cpp_bool


class WideTile(NamedTuple):
    """Rows that a block owns, rows that stream by, warps, and the slabs of what streams by
    (tile/sm80_wide_config.cuh)."""

    block_m: int
    block_n: int
    row_warps: int
    column_warps: int
    slab_columns: int
    slab_rows: int
    num_stages: int
    row_parts: int = 1

    @property
    def num_threads(self) -> int:
        return 32 * self.row_warps * self.column_warps

    def cpp(self, dtype: str) -> str:
        return f"Sm80WideTile<{CPP_TYPES[dtype]}, {', '.join(map(str, self))}>"

    def slab_bytes(self, row_dim: int) -> int:
        """Of a slab that holds columns of one tensor and rows of so many elements of another."""
        return 2 * max(self.block_n * self.slab_columns, self.slab_rows * row_dim // self.row_parts)


class Choice(NamedTuple):
    """A tile, and which calls take it."""

    tile: WideTile
    takes_options: bool = False  # it has registers for options, and for rows that are not aligned
    takes_band: bool = True
    takes_lengths: bool = True


# By padded head_dim and head_dim_v; the first that fits the GPU and takes a call is chosen: docs/sm80.md
_TILES: dict[tuple[int, int], tuple[Choice, ...]] = {
    # For 64 KiB of shared memory, where fwd_sm80 has no tile of it
    (256, 256): (Choice(WideTile(64, 64, 2, 4, 64, 16, 2), takes_options=True),),
    (320, 320): (
        Choice(WideTile(128, 64, 4, 2, 64, 32, 5), takes_band=False, takes_lengths=False),
        Choice(WideTile(64, 128, 2, 4, 64, 32, 5)),
        Choice(WideTile(64, 64, 2, 4, 64, 16, 4), takes_options=True),
    ),
    (384, 384): (
        Choice(WideTile(64, 128, 2, 4, 128, 32, 4)),
        Choice(WideTile(64, 64, 2, 4, 64, 16, 3), takes_options=True),
    ),
    (448, 448): (
        Choice(WideTile(64, 128, 2, 4, 64, 32, 5)),
        Choice(WideTile(64, 64, 2, 4, 64, 16, 2), takes_options=True),
    ),
    (512, 512): (
        Choice(WideTile(64, 128, 2, 4, 128, 32, 4)),
        Choice(WideTile(64, 128, 2, 4, 64, 16, 5)),
        Choice(WideTile(64, 64, 2, 4, 64, 16, 4), takes_options=True),
        Choice(WideTile(64, 64, 2, 4, 64, 16, 3, 2), takes_options=True),
    ),
}


@dataclass(frozen=True)
class Sm80WideRow(Row):
    tile: WideTile
    packs_heads: bool
    is_scale_positive: bool

    @property
    def header(self) -> str:
        return "fwd_sm80_wide"

    @property
    def num_threads(self) -> int:
        return self.tile.num_threads

    def queries(self, packed_heads: int) -> int:
        """Queries of a tile that holds so many heads."""
        return self.block_m // GROUP_ROWS * (GROUP_ROWS // packed_heads)

    @property
    def config(self) -> str:
        types = f"{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}"
        flags = f"{cpp_bool(self.packs_heads)}, {cpp_bool(self.is_scale_positive)}"
        tile = qualified(f"flashtile::{self.tile.cpp(self.dtype)}")
        return f"Sm80WideConfig<{types}, {self.head_dim}, {self.head_dim_v}, {tile}, {flags}>"

    @property
    def label(self) -> str:
        warps = f"{self.tile.row_warps} x {self.tile.column_warps} warps"
        return f"{self.block_m} x {self.block_n}, {warps}, {self.tile.num_stages} slabs"

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * self.block_m * (self.head_dim + self.block_n)
        slabs = self.tile.num_stages * self.tile.slab_bytes(self.head_dim_v)
        rows = 4 * self.tile.column_warps * self.block_m
        return -(-(tiles + slabs + rows + QUERY_TILE_BYTES) // 128) * 128

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        storage = f"flashtile::FwdSm80WideStorage<flashtile::{self.config}, {policies[0]}, {policies[3]}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm80Wide(MmaFamily[Sm80WideRow]):
    name = "fwd_sm80_wide"
    op = "forward"
    summary = "mma.sync, for head dims over 256"
    kernels = ("fwd_sm80_wide",)
    head_dims = tuple(sorted(_TILES))
    length_classes = (PACKED_HEADS,)

    def every_row(self, dtype: str) -> Iterator[Sm80WideRow]:
        for dims, choices in _TILES.items():
            for choice in choices:
                yield _row(choice.tile, dtype, dtype, dims)

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = key.length(PACKED_HEADS)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm80WideRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_plain = key.features.num_score_options == 0 and key.is_scale_positive and key.features.is_aligned16
        is_packed = key.length(PACKED_HEADS) > 1
        for choice in _TILES[dims]:
            tile = choice.tile
            if is_packed and tile.block_m > GROUP_ROWS:
                continue
            takes_lengths = choice.takes_lengths >= key.features.has_lengths
            if choice.takes_options >= (not is_plain) and choice.takes_band >= key.features.has_band and takes_lengths:
                yield _row(tile, key.dtype, key.out_dtype, dims, is_packed, key.is_scale_positive)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80_wide", key)
        packed_heads = key.length(PACKED_HEADS)
        heads = "head_tiles" if packed_heads > 1 else "heads"
        # Each split should have a few tiles of keys
        splits = SplitRule(row.queries(packed_heads), 4 * row.block_n, heads, 1)
        return Launch((*self.launch_row(row, key, layout).steps, combine(key, layout)), partial_results(key), splits)

    def launch_row(self, row: Sm80WideRow, key: PlanKey, layout: CallLayout) -> Launch:
        packed_heads = key.length(PACKED_HEADS) if row.packs_heads else 1
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row.packs_heads else "heads")
        return Launch((tile_step(row, key.features, (Factor("num_splits"), *grid)),))


def _row(
    tile: WideTile,
    dtype: str,
    out_dtype: str,
    dims: tuple[int, int],
    packs_heads: bool = False,
    is_scale_positive: bool = True,
) -> Sm80WideRow:
    sizes = *dims, tile.block_m, tile.block_n
    return Sm80WideRow("fwd_sm80_wide", dtype, out_dtype, *sizes, tile, packs_heads, is_scale_positive)
