"""Few queries on Hopper: include/flashtile/kernels/decode_sm90.cuh, docs/decode.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import query_grid
from flashtile.kernels.length_class import PACKED_ROWS, FewQueries, ShortLengths
from flashtile.kernels.params import DecodeSm90Params, Struct
from flashtile.kernels.plan import Factor, MapPatch, SplitRule, Step, Workspace
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

_FEW = FewQueries(PACKED_ROWS, 1)
_ONE = ShortLengths(1, 2**31 - 1)  # one query
_FASTEST, _SHORT = FewQueries(16, 1, is_one_head_tile=True), ShortLengths(16, 4095)  # at most 16 rows; and few keys
_ITEM_RING_BYTES = 288  # WorkItemRing<DecodeItem> (attn/decode_schedule.cuh)
_THREADS = 192
_ANY_SPLITS = 1 << 20  # blocks that each multiprocessor could have: the kernel deals out the keys itself


class Tile(NamedTuple):
    block_n: int
    num_stages: int
    num_blocks: int  # per multiprocessor
    few_units: int = 4  # key tiles of a block: with fewer a multiprocessor gets one block
    takes_paged_alibi: bool = True  # without a spill


# By padded head_dim and head_dim_v
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(64, 6, 2),),
    (96, 96): (Tile(64, 3, 2),),
    (128, 128): (Tile(64, 3, 2),),
    (192, 128): (Tile(64, 2, 2, takes_paged_alibi=False), Tile(64, 4, 1)),
    (192, 192): (Tile(64, 4, 1),),
    (256, 256): (Tile(64, 3, 1),),
}


@dataclass(frozen=True)
class DecodeRow(Row):
    num_stages: int
    num_blocks: int
    few_units: int

    @property
    def header(self) -> str:
        return "decode_sm90"

    @property
    def struct(self) -> Struct:
        return DecodeSm90Params

    @property
    def num_threads(self) -> int:
        return _THREADS

    @property
    def config(self) -> str:
        types = f"{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}"
        sizes = (self.head_dim, self.head_dim_v, self.block_n, self.num_stages, self.num_blocks, self.few_units)
        return f"Sm90DecodeConfig<{types}, {', '.join(map(str, sizes))}>"

    @property
    def label(self) -> str:
        return f"{self.block_m} x {self.block_n}, {self.num_stages} stages, {self.num_blocks} blocks, 6 warps"

    @property
    def shared_bytes(self) -> int:
        slabs, slabs_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        tiles = 128 * (slabs * PACKED_ROWS + self.num_stages * self.block_n * (slabs + slabs_v))
        barriers, stats = 16 + 32 * self.num_stages, 8 * PACKED_ROWS
        return -(-(tiles + barriers + _ITEM_RING_BYTES + stats) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        return {"shared bytes": (f"sizeof(flashtile::DecodeSm90Storage<flashtile::{self.config}>)", self.shared_bytes)}


class DecodeSm90(Family[DecodeRow]):
    name = "decode_sm90"
    op = "forward"
    summary = "few queries on Hopper: keys dealt out evenly over the multiprocessors, joined in one launch"
    kernels = ("decode_sm90",)
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_aligned16", "has_bool_mask", "bias_dtype", "has_dropout"}
    takes_overlapping_rows = False
    length_classes = (_FEW, _ONE, _FASTEST, _SHORT)
    needs_wgmma = True
    takes_any_scale = False

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and not key.length(_FEW):
            return f"more queries than fit a tile of {PACKED_ROWS} rows with the heads that share a KV head"
        if reason is None and key.length(_FEW) > 1 and not key.heads_disjoint:
            return "heads of q that share memory: a TMA box has no stride of 0"
        return reason

    def every_row(self, dtype: str) -> Iterator[DecodeRow]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dtype, dtype, dims)

    def timed_as(self, key: PlanKey) -> str:
        """Faster than the forward family at every measured call: one query, and up to 16 rows over 4096 keys
        (docs/decode.md)."""
        is_fastest = key.length(_ONE) or (key.length(_FASTEST) and not key.length(_SHORT))
        return "fwd_sm90" if is_fastest else self.name

    def tile_note(self, key: PlanKey) -> str:
        num_heads = key.length(_FEW)
        return f", the queries of {num_heads} heads of a KV head in one tile" if num_heads > 1 else ""

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[DecodeRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_paged_alibi = key.features.has_alibi and key.features.is_paged
        for tile in _TILES[dims]:
            if tile.takes_paged_alibi or not is_paged_alibi:
                yield _row(tile, key.dtype, key.out_dtype, dims)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("decode_sm90", key)
        num_heads = max(key.length(_FEW), 1)
        # Keys may be split unless the caller forbids it; the kernel finds out where
        splits = SplitRule(PACKED_ROWS // num_heads, row.block_n, "head_tiles", blocks=_ANY_SPLITS)
        blocks = ("num_multiprocessors",)
        workspaces = (
            Workspace("partial_out", 4 * key.head_dim_v * PACKED_ROWS * row.num_blocks, blocks),
            Workspace("partial_stats", 8 * PACKED_ROWS * row.num_blocks, blocks),
            Workspace("part_flags", 4 * row.num_blocks, blocks, is_kept=True),
        )
        maps = _maps(row, key.features, layout, num_heads)
        return Launch((_step(row, key, layout, num_heads),), workspaces, splits, maps, struct=DecodeSm90Params)

    def launch_row(self, row: DecodeRow, key: PlanKey, layout: CallLayout) -> Launch:
        num_heads = max(key.length(_FEW), 1)
        maps = _maps(row, key.features, layout, num_heads)
        return Launch((_step(row, key, layout, num_heads),), maps=maps, struct=DecodeSm90Params)


def _row(tile: Tile, dtype: str, out_dtype: str, dims: tuple[int, int]) -> DecodeRow:
    sizes = tile.block_n, tile.num_stages, tile.num_blocks, tile.few_units
    return DecodeRow("decode_sm90", dtype, out_dtype, *dims, PACKED_ROWS, *sizes)


def _step(row: DecodeRow, key: PlanKey, layout: CallLayout, num_heads: int) -> Step:
    grid = (Factor("num_splits"), *query_grid(layout, PACKED_ROWS // num_heads, "head_tiles"))
    return tile_step(row, key.features, grid, max_blocks=row.num_blocks, starts_early=True)


def _maps(row: DecodeRow, features: Features, layout: CallLayout, num_heads: int) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    axes, params = (row_axis, head_axis, -4), DecodeSm90Params
    return (
        MapPatch(params.q_map.offset, "q", axes, PACKED_ROWS // num_heads, num_heads),
        # With 256 bytes, two slabs, both slabs of a row miss: 5 % slower than with 128 (B 64, S 4096, NVIDIA H200)
        MapPatch(params.k_map.offset, "k", axes, row.block_n, is_paged=features.is_paged, l2_bytes=128),
        MapPatch(params.v_map.offset, "v", axes, row.block_n, is_paged=features.is_paged, l2_bytes=128),
    )
