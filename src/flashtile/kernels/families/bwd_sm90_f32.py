"""The Hopper backward pass in float32 by wgmma on split operands: include/flashtile/kernels/bwd_sm90_f32.cuh,
docs/float32.md.

A preprocess step, the pre-pass, then one kernel for dK and dV and one for dQ, each for float16 and for bfloat16 parts.
The gradient of a bias is that of bwd_simt. Every result has one owner, so all of it is deterministic. Head dims over
128 have kernels of their own (bwd_sm90_f32_wide.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.bwd_simt import dbias
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
from flashtile.kernels.families.steps import ROW_STATS, dsinks, key_grid, preprocess, query_grid
from flashtile.kernels.params import Sm90F32Params
from flashtile.kernels.plan import Operand, Step
from flashtile.kernels.spec import CallLayout, Features, PlanKey

_ROWS = 64  # of every tile; of the wide kernels what a block owns
_STREAM_ROWS, _SLOTS = 32, 2  # kStreamRows, kNumSlots (bwd_sm90_f32_wide.cuh)
_QUERY_TILES, _KEY_TILE_BYTES, _QUERY_BLOCK_BYTES = 96, 72, 80  # StreamedQueryTile[8], KeyTile, QueryBlock


class Tile(NamedTuple):
    """The tile of one kernel."""

    block_m: int  # of dQ: its queries. 128 where two warpgroups share the work on 64 rows
    num_stages: int
    columns: int  # that one product computes


_TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "bwd_sm90_f32_dkdv_half": {
        (64, 64): Tile(128, 2, 64),
        (128, 128): Tile(128, 2, 64),
        (256, 256): Tile(128, 1, 64),
    },
    "bwd_sm90_f32_dkdv_bf16": {
        (64, 64): Tile(128, 2, 64),
        (128, 128): Tile(128, 1, 64),
        (256, 256): Tile(128, 1, 64),
    },
    "bwd_sm90_f32_dq_half": {
        (64, 64): Tile(128, 2, 64),
        (128, 128): Tile(128, 1, 64),
        (256, 256): Tile(128, 1, 128),
    },
    "bwd_sm90_f32_dq_bf16": {
        (64, 64): Tile(128, 2, 64),
        (128, 128): Tile(64, 1, 64),
        (256, 256): Tile(128, 1, 128),
    },
}


class BwdSm90F32Row(Sm90F32Row):
    @property
    def header(self) -> str:
        return "bwd_sm90_f32"

    @property
    def is_dq(self) -> bool:
        return "_dq_" in self.kernel

    @property
    def is_wide(self) -> bool:
        return self.head_dim > 128

    @property
    def wide_bytes(self) -> int:
        """Shared memory of a kernel for wide heads."""
        slot = self.num_parts * _ROWS * 128  # a slab of 64 columns
        owned = _ROWS * self.row_bytes[0] if self.num_parts <= 2 else _SLOTS * slot
        tiles = 2 * (owned + _STREAM_ROWS * self.row_bytes[0])
        handed_over, barriers = 4 * _ROWS * _STREAM_ROWS, 2 * 16 * _SLOTS + 4 * 8
        if self.is_dq:
            return tiles + 4 * handed_over + barriers + _QUERY_BLOCK_BYTES
        return tiles + handed_over + 8 * _STREAM_ROWS + _QUERY_TILES + barriers + 2 * 8 + _KEY_TILE_BYTES

    @property
    def shared_bytes(self) -> int:
        if self.is_wide:
            return -(-self.wide_bytes // 1024) * 1024
        tile = _ROWS * sum(self.row_bytes)  # of Q and dO, or of K and V
        if self.is_dq:
            consumers = self.block_m // WARPGROUP_ROWS
            total = tile * (consumers + self.num_stages) + 16 * consumers + 32 * self.num_stages + _QUERY_BLOCK_BYTES
        else:
            handed_over, stats = 4 * _ROWS * _ROWS, 8 * _ROWS * self.num_stages
            barriers = 8 * (4 + 4 * self.num_stages)
            total = tile * (1 + self.num_stages) + handed_over + stats + _QUERY_TILES + barriers + _KEY_TILE_BYTES
        return -(-total // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        storage = f"BwdSm90F32{'Wide' if self.is_wide else ''}{'Dq' if self.is_dq else 'Dkdv'}Storage"
        return {"shared bytes": (f"sizeof(flashtile::{storage}<flashtile::{self.config}>)", self.shared_bytes)}


class BwdSm90F32(Family[BwdSm90F32Row]):
    name = "bwd_sm90_f32"
    op = "backward"
    summary = "float32 by wgmma on operands split into 16-bit parts, on Hopper"
    kernels = tuple(_TILES)
    dtypes = ("float32",)
    head_dims = tuple(sorted(_TILES["bwd_sm90_f32_dq_half"]))
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    # Split operands would take far more memory than such tensors do
    takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)
    length_classes = (SHARES,)
    needs_wgmma = True
    takes_any_scale = False

    def drawback(self, key: PlanKey) -> str | None:
        rows = [self.select(kernel, key) for kernel in self.kernels]
        return small_call(key) or padding([row for row in rows if row.is_dq], key)

    def every_row(self, dtype: str) -> Iterator[BwdSm90F32Row]:
        for kernel, by_dims in _TILES.items():
            for dims in by_dims:
                yield _row(kernel, dims, 2 if kernel.endswith("_half") else 3)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm90F32Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        yield _row(kernel, dims, num_parts(kernel, key))

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        has_keys, has_queries = "dk" in key.grads or "dv" in key.grads, "dq" in key.grads
        rows = {kernel: self.select(kernel, key) for kernel in self.kernels}
        # Both kernels read tiles of the same form
        dq_rows = [row for row in rows.values() if row.is_dq]
        steps = [preprocess(key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        if has_keys or has_queries:
            steps += pre_pass(dq_rows, key, layout)
        steps += [_grad_step(row, key, layout) for row in rows.values() if (has_queries if row.is_dq else has_keys)]
        if "dbias" in key.grads:
            steps.append(dbias(key, layout))
        # One kernel writes both dK and dV
        scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if has_keys and name not in key.grads)
        # Keys outside every sequence have no owner, and neither have the scores there
        unowned = ("dk", "dv", "dbias") if layout.has_lengths else ("dbias",)
        zeroed = tuple(name for name in unowned if name in key.grads)
        has_parts = has_keys or has_queries
        workspaces = ROW_STATS + (part_workspaces(dq_rows, layout, is_backward=True) if has_parts else ())
        return Launch(tuple(steps), workspaces, scratch=scratch, zeroed=zeroed, struct=Sm90F32Params)

    def launch_row(self, row: BwdSm90F32Row, key: PlanKey, layout: CallLayout) -> Launch:
        workspaces = ROW_STATS + part_workspaces([row], layout, is_backward=True)
        return Launch((_grad_step(row, key, layout),), workspaces, struct=Sm90F32Params)


def _row(kernel: str, dims: tuple[int, int], num_parts: int) -> BwdSm90F32Row:
    tile = _TILES[kernel][dims]
    sizes = tile.block_m, _ROWS, tile.num_stages, tile.columns
    return BwdSm90F32Row(kernel, "float32", "float32", *dims, *sizes, True, num_parts)


def _grad_step(row: BwdSm90F32Row, key: PlanKey, layout: CallLayout) -> Step:
    grid = key_grid(layout, _ROWS)
    if row.is_dq:
        grid = query_grid(layout, _ROWS if row.is_wide else row.block_m)
    return tile_step(row, key.features, grid)
