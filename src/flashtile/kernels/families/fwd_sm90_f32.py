"""The Hopper forward pass in float32 by wgmma on split operands: include/flashtile/kernels/fwd_sm90_f32.cuh,
docs/float32.md.

A call launches two kernels, and the numbers in its tensors decide on the GPU which of them does the work: that for
float16 parts where they are in range, else that for bfloat16 parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.mma_sync import small_call
from flashtile.kernels.families.sm90_f32 import (
    SHARES,
    WARPGROUP_ROWS,
    Sm90F32Row,
    num_parts,
    padding,
    part_workspaces,
    pre_pass,
)
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.length_class import FewQueries
from flashtile.kernels.params import Sm90F32Params
from flashtile.kernels.plan import Factor, SplitRule, Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CallLayout, Features, PlanKey

_HALF, _BF16 = "fwd_sm90_f32_half", "fwd_sm90_f32_bf16"
_FEW = FewQueries(WARPGROUP_ROWS, 1)
_WORK_ITEMS, _QUERY_TILE_BYTES = 3, 72  # WorkItemRing, QueryTile (attn/work_item.cuh)


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_m: int
    block_n: int
    num_stages: int
    columns: int  # of O that one product computes
    overlaps: bool = True  # scores of a tile with P V of the one before it
    max_options: int = 99  # that it holds without a spill
    takes_bias: bool = True  # without a spill
    max_parts: int = 3  # that operands are split into


# By kernel, padded head_dim and head_dim_v; the first that takes a call is chosen
_TILES: dict[str, dict[tuple[int, int], tuple[Tile, ...]]] = {
    _HALF: {
        (64, 64): (Tile(128, 128, 2, 64, max_options=0), Tile(128, 64, 2, 64)),
        (128, 128): (
            Tile(128, 64, 2, 128, max_options=0),
            Tile(128, 64, 2, 64, max_options=3),
            Tile(128, 64, 2, 64, overlaps=False),
        ),
        # Two parts: several chains of sums for a score, which cannot overlap; one part, for "high": one chain
        (256, 256): (
            Tile(128, 32, 1, 64, max_options=0, max_parts=1),
            Tile(128, 32, 1, 64, overlaps=False, takes_bias=False),
            Tile(64, 32, 1, 64, overlaps=False),
        ),
    },
    _BF16: {
        (64, 64): (Tile(128, 64, 2, 64),),
        (128, 128): (Tile(128, 64, 1, 64, max_options=0), Tile(128, 64, 1, 64, overlaps=False)),
        (256, 256): (Tile(64, 32, 1, 64, max_options=0), Tile(64, 32, 1, 64, overlaps=False)),
    },
}


class FwdSm90F32Row(Sm90F32Row):
    @property
    def header(self) -> str:
        return "fwd_sm90_f32"

    @property
    def shared_bytes(self) -> int:
        qk_bytes, v_bytes = self.row_bytes
        tiles = self.block_m * qk_bytes + self.num_stages * self.block_n * (qk_bytes + v_bytes)
        consumers = self.block_m // WARPGROUP_ROWS
        barriers, scheduler = 16 * consumers + 32 * self.num_stages, 16
        items = _WORK_ITEMS * (_QUERY_TILE_BYTES + -(-(12 * consumers + 8) // 8) * 8)
        return -(-(tiles + barriers + scheduler + items) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        config = "flashtile::" + self.config
        mask, _, _, lengths = (qualified(f"flashtile::{policy}") for policy in features.policies()[:4])
        storage = f"flashtile::FwdSm90F32Storage<{config}, {mask}, {lengths}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm90F32(Family[FwdSm90F32Row]):
    name = "fwd_sm90_f32"
    op = "forward"
    summary = "float32 by wgmma on operands split into 16-bit parts, on Hopper"
    kernels = (_HALF, _BF16)
    dtypes = ("float32",)
    head_dims = tuple(sorted(_TILES[_HALF]))
    # The pre-pass would copy all pages
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    # Split operands would take far more memory than such tensors do
    takes_overlapping_rows = False
    length_classes = (_FEW, SHARES)
    needs_wgmma = True
    takes_any_scale = False

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and key.length(_FEW):
            reason = f"at most {WARPGROUP_ROWS} queries: splitting the keys would take longer than attending to them"
        return reason

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key) or padding([self.select(kernel, key) for kernel in self.kernels], key)

    def every_row(self, dtype: str) -> Iterator[FwdSm90F32Row]:
        for kernel, by_dims in _TILES.items():
            for dims, tiles in by_dims.items():
                for tile in tiles:
                    yield _row(kernel, dims, tile, min(2 if kernel == _HALF else 3, tile.max_parts))

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[FwdSm90F32Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        for tile in _TILES[kernel][dims]:
            takes_options = key.features.num_options <= tile.max_options
            takes_bias = tile.takes_bias or key.features.bias_dtype is None
            if takes_options and takes_bias and num_parts(kernel, key) <= tile.max_parts:
                yield _row(kernel, dims, tile, num_parts(kernel, key))

    def tile_note(self, key: PlanKey) -> str:
        return ", or that of the other kernel where the numbers ask for it"

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        rows = [self.select(kernel, key) for kernel in self.kernels]
        workspaces = (*part_workspaces(rows, layout), *partial_results(key))
        # A block fills a multiprocessor, and each split should have a few tiles of keys
        splits = SplitRule(rows[0].block_m, 4 * rows[0].block_n, blocks=1)
        steps = (*pre_pass(rows, key, layout), *(self._step(row, key, layout) for row in rows), combine(key, layout))
        return Launch(steps, workspaces, splits, struct=Sm90F32Params)

    def launch_row(self, row: FwdSm90F32Row, key: PlanKey, layout: CallLayout) -> Launch:
        """The kernel alone; what it reads comes from a pre-pass."""
        return Launch((self._step(row, key, layout),), part_workspaces([row], layout), struct=Sm90F32Params)

    def _step(self, row: FwdSm90F32Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.block_m)), max_blocks=1)


def _row(kernel: str, dims: tuple[int, int], tile: Tile, num_parts: int) -> FwdSm90F32Row:
    sizes = tile.block_m, tile.block_n, tile.num_stages, tile.columns
    return FwdSm90F32Row(kernel, "float32", "float32", *dims, *sizes, tile.overlaps, num_parts)
