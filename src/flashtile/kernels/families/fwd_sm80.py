"""The forward pass by mma.sync, from Ampere on: include/flashtile/kernels/fwd_sm80.cuh, docs/sm80.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.families.base import Launch, tile_step
from flashtile.kernels.families.mma_sync import MmaFamily, MmaRow
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.length_class import PACKED_ROWS, PackedHeads, RaggedQueries
from flashtile.kernels.plan import Factor, SplitRule, Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey, cpp_bool

PACKED_HEADS, _SHORT = PackedHeads(PACKED_ROWS, 128), RaggedQueries(128, 64, 140)
GROUP_ROWS = 64  # rows that are packed together (attn/work_item.cuh)
QUERY_TILE_BYTES = 72  # QueryTile (attn/work_item.cuh)
_NUM_WARPS = 8  # that the registers of a multiprocessor hold


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_m: int
    block_n: int
    num_warps: int
    min_blocks: int  # that should share a multiprocessor
    num_stages: int = 2
    kept_steps: int = 0
    max_options: int = 99  # that change scores or probabilities, that it holds without a spill
    takes_padded: bool = True  # head dims that are not the padded ones
    takes_heavy_bias: bool = True  # a bias of a float16 call or with dropout, without a spill
    takes_unaligned_lengths: bool = True  # sequence lengths with rows off 16 bytes, without a spill


# By padded head_dim and head_dim_v; the first that fits the GPU and takes a call is chosen. Measured on an NVIDIA H200;
# on other GPUs what fits their shared memory with as many warps: docs/sm80.md.
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (32, 32): (Tile(128, 64, 4, 2, kept_steps=2, max_options=0), Tile(64, 64, 4, 3)),
    (64, 64): (Tile(128, 64, 4, 2, kept_steps=4, max_options=0), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)),
    (96, 96): (
        Tile(128, 64, 4, 2, max_options=0),
        Tile(128, 32, 4, 2, max_options=0),
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 2),
        Tile(64, 32, 4, 1),
    ),
    (128, 128): (
        Tile(128, 48, 4, 2, max_options=0, takes_padded=False, takes_unaligned_lengths=False),
        Tile(128, 32, 4, 2, max_options=0),
        Tile(128, 64, 8, 1, max_options=0),
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 2),
        Tile(64, 32, 4, 1),
    ),
    (192, 128): (
        Tile(128, 32, 4, 2, max_options=0),
        Tile(128, 64, 8, 1, max_options=0),
        Tile(128, 32, 8, 1, max_options=0),
        Tile(64, 32, 4, 1),
        Tile(64, 16, 4, 1),
    ),
    (192, 192): (
        Tile(128, 64, 8, 1, max_options=0),
        Tile(128, 32, 8, 1, max_options=0),
        Tile(64, 32, 4, 1),
        Tile(64, 16, 4, 1),
    ),
    (256, 256): (
        Tile(128, 64, 8, 1, kept_steps=8, max_options=0, takes_padded=False, takes_unaligned_lengths=False),
        Tile(128, 64, 8, 1, max_options=0),
        Tile(128, 48, 8, 1, kept_steps=8, max_options=0),
        Tile(128, 16, 8, 1, kept_steps=8, max_options=0),
        Tile(64, 32, 4, 1, takes_heavy_bias=False),
        Tile(64, 16, 4, 1),
    ),
}


@dataclass(frozen=True)
class Sm80Row(MmaRow):
    num_warps: int
    num_stages: int  # of K and of V
    min_blocks: int  # that should share a multiprocessor
    kept_steps: int  # so many 16 columns of Q stay in registers
    packs_heads: bool
    is_scale_positive: bool
    is_exact: bool  # the head dims are the padded ones

    @property
    def header(self) -> str:
        return "fwd_sm80"

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def queries(self, packed_heads: int) -> int:
        """Queries of a tile that holds so many heads."""
        return self.block_m // GROUP_ROWS * (GROUP_ROWS // packed_heads)

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_m}, {self.block_n}"
        counts = f"{self.num_warps}, {self.num_stages}, {self.min_blocks}, {self.kept_steps}"
        flags = self.packs_heads, self.is_scale_positive, self.is_exact
        types = f"{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}"
        return f"Sm80Config<{types}, {sizes}, {counts}, {', '.join(map(cpp_bool, flags))}>"

    @property
    def label(self) -> str:
        words = [f"{self.block_m} x {self.block_n}, {self.num_warps} warps"]
        words += [f"{self.min_blocks} blocks"] if self.min_blocks > 1 else []
        words += [] if self.num_stages == 2 else [f"{self.num_stages} stages"]
        words += [f"{16 * self.kept_steps} columns of Q in registers"] if self.kept_steps else []
        return ", ".join(words)

    @property
    def shared_bytes(self) -> int:
        keys = self.num_stages * self.block_n * (self.head_dim + self.head_dim_v)
        tiles = 2 * (self.block_m * self.head_dim + keys)
        return -(-(tiles + QUERY_TILE_BYTES) // 128) * 128

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        storage = f"flashtile::FwdSm80Storage<flashtile::{self.config}, {policies[0]}, {policies[3]}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm80(MmaFamily[Sm80Row]):
    name = "fwd_sm80"
    op = "forward"
    summary = "mma.sync and ldmatrix: float16 from Turing on, bfloat16 from Ampere on"
    kernels = ("fwd_sm80",)
    head_dims = tuple(sorted(_TILES))
    length_classes = (PACKED_HEADS, _SHORT)

    def packed_heads(self, key: PlanKey) -> int:
        """How many heads share a tile."""
        return key.length(PACKED_HEADS)

    def every_row(self, dtype: str) -> Iterator[Sm80Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dtype, dtype, dims)

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = self.packed_heads(key)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm80Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_packed = self.packed_heads(key) > 1
        is_exact = (key.head_dim, key.head_dim_v) == dims
        features = key.features
        num_options = features.num_score_options + (not key.is_scale_positive)
        has_heavy_bias = features.bias_dtype is not None and (key.dtype == "float16" or features.has_dropout)
        has_unaligned_lengths = features.has_lengths and not features.is_aligned16
        for tile in _tiles(dims, key, is_packed):
            takes = num_options <= tile.max_options and (is_exact or tile.takes_padded)
            takes = takes and (tile.takes_heavy_bias or not has_heavy_bias)
            if takes and (tile.takes_unaligned_lengths or not has_unaligned_lengths):
                yield _row(tile, key.dtype, key.out_dtype, dims, is_packed, key.is_scale_positive, is_exact)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80", key)
        plain, packed_heads = self.launch_row(row, key, layout), self.packed_heads(key)
        heads = "head_tiles" if packed_heads > 1 else "heads"
        # A multiprocessor has 8 warps, and each split should have a few tiles of keys
        splits = SplitRule(row.queries(packed_heads), 4 * row.block_n, heads, _NUM_WARPS // row.num_warps)
        return Launch((*plain.steps, combine(key, layout)), partial_results(key), splits)

    def launch_row(self, row: Sm80Row, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),))

    def _step(self, row: Sm80Row, key: PlanKey, layout: CallLayout) -> Step:
        packed_heads = self.packed_heads(key) if row.packs_heads else 1
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row.packs_heads else "heads")
        return tile_step(row, key.features, (Factor("num_splits"), *grid))


def _tiles(dims: tuple[int, int], key: PlanKey, is_packed: bool) -> list[Tile]:
    """The tiles in order of preference: where few rows of a tile have a query, the small tiles come first."""
    is_short = is_packed or key.length(_SHORT)
    return sorted(_TILES[dims], key=lambda tile: bool(is_short and tile.block_m > GROUP_ROWS))


def _row(
    tile: Tile,
    dtype: str,
    out_dtype: str,
    dims: tuple[int, int],
    packs_heads: bool = False,
    is_scale_positive: bool = True,
    is_exact: bool = True,
) -> Sm80Row:
    sizes = tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.min_blocks, tile.kept_steps
    return Sm80Row("fwd_sm80", dtype, out_dtype, *dims, *sizes, packs_heads, is_scale_positive, is_exact)
