"""The Hopper forward pass in float32 for few queries and heads: include/flashtile/kernels/fwd_sm90_f32_direct.cuh,
docs/float32.md.

One launch, no pre-pass and no workspace: a cluster of blocks shares the keys of a query tile and merges its results in
shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.kernels import speeds
from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import query_grid
from flashtile.kernels.length_class import FewQueries, SmallGrid
from flashtile.kernels.plan import Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CallLayout, Features, PlanKey, cpp_bool

_KERNEL = "fwd_sm90_f32_direct"
_HEAD_DIM, _BLOCK_M, _BLOCK_N, _STAGES, _PARTS = 64, 128, 64, 2, 3
_SMALL_GRID, _FEW = SmallGrid(_BLOCK_M), FewQueries(64, 1)
_CLUSTER = 8  # blocks that share the keys of a tile
_WORK_ITEMS, _ITEM_BYTES = 3, 104  # WorkItemRing, WorkItem (attn/work_item.cuh)


@dataclass(frozen=True)
class FwdSm90F32DirectRow(Row):
    cluster: int  # blocks that share the keys of a query tile
    overlaps: bool  # scores of a tile with P V of the one before it

    @property
    def header(self) -> str:
        return _KERNEL

    @property
    def num_threads(self) -> int:
        return 2 * self.block_m + 128

    @property
    def config(self) -> str:
        return f"Sm90F32DirectConfig<{self.cluster}, {cpp_bool(self.overlaps)}>"

    @property
    def label(self) -> str:
        words = f"{self.block_m} x {self.block_n}, {self.num_threads // 32} warps, clusters of {self.cluster}"
        return words if self.overlaps else f"{words}, no overlap"

    @property
    def shared_bytes(self) -> int:
        row = _PARTS * 128
        tiles = row * (self.block_m + 2 * _STAGES * self.block_n)
        barriers, scheduler = 16 * (self.block_m // 64) + 32 * _STAGES, 16
        storage = -(-(tiles + barriers + scheduler + _WORK_ITEMS * _ITEM_BYTES) // 1024) * 1024
        return storage + 8 * self.block_m

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        mask, _, _, lengths = (qualified(f"flashtile::{policy}") for policy in features.policies()[:4])
        storage = f"flashtile::FwdSm90F32DirectStorage<flashtile::{self.config}, {mask}, {lengths}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm90F32Direct(Family[FwdSm90F32DirectRow]):
    name = _KERNEL
    op = "forward"
    summary = "float32 by wgmma, split in the kernel, on Hopper: few queries and heads"
    kernels = (_KERNEL,)
    dtypes = ("float32",)
    head_dims = ((_HEAD_DIM, _HEAD_DIM),)
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = False
    length_classes = (_SMALL_GRID, _FEW)
    needs_wgmma = True
    takes_any_scale = False

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and not key.length(_SMALL_GRID):
            reason = f"tiles of {_BLOCK_M} queries give every multiprocessor a block: a pre-pass is faster"
        if reason is None and key.length(_FEW):
            reason = "at most 64 queries: a tile would be half empty"
        if reason is None and key.is_deterministic:
            reason = "deterministic sums: those of a call with more sequences would have other bits"
        return reason

    def every_row(self, dtype: str) -> Iterator[FwdSm90F32DirectRow]:
        for overlaps in (True, False):
            yield _row(overlaps)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[FwdSm90F32DirectRow]:
        """With options an overlap would spill registers."""
        for overlaps in (True, False) if key.features.num_options == 0 else (False,):
            yield _row(overlaps)

    def timed_as(self, key: PlanKey) -> str:
        """Faster than simt at every measured length; preferred to a pre-pass for its memory (docs/float32.md)."""
        return "fwd_sm90_f32" if key.length(speeds.SIZE) else "fwd_simt"

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        return self.launch_row(self.select(_KERNEL, key), key, layout)

    def launch_row(self, row: FwdSm90F32DirectRow, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key),))

    def _step(self, row: FwdSm90F32DirectRow, key: PlanKey) -> Step:
        return tile_step(row, key.features, query_grid(row.block_m), cluster=row.cluster)


def _row(overlaps: bool) -> FwdSm90F32DirectRow:
    sizes = _HEAD_DIM, _HEAD_DIM, _BLOCK_M, _BLOCK_N
    return FwdSm90F32DirectRow(_KERNEL, "float32", "float32", *sizes, _CLUSTER, overlaps)
