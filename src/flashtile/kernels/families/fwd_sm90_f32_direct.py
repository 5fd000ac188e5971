"""The Hopper forward pass in float32 for few queries and heads: include/flashtile/kernels/fwd_sm90_f32_direct.cuh,
docs/float32.md.

No workspace: the kernel splits the operands itself, and a cluster of blocks shares the keys of a query tile and merges
its results in shared memory. Short calls and calls with options are one launch, with bfloat16 parts. Long ones look
first whether float16 parts hold the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.kernels import speeds
from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.sm90_f32 import RANGE, check_pass
from flashtile.kernels.families.steps import query_grid
from flashtile.kernels.length_class import FewQueries, ManyScores, SmallGrid
from flashtile.kernels.params import Sm90F32Params, Struct
from flashtile.kernels.plan import Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CallLayout, Features, PlanKey, cpp_bool

_HEADER = "fwd_sm90_f32_direct"
_HALF, _BF16 = "fwd_sm90_f32_direct_half", "fwd_sm90_f32_direct_bf16"
_HEAD_DIM, _BLOCK_M, _BLOCK_N, _STAGES = 64, 128, 64, 2
_NUM_PARTS = {_HALF: 2, _BF16: 3}
# With as many scores float16 parts save more time than looking at the numbers takes: one head of 6144 keys on an H200
_MANY = ManyScores(25)
_CHECKED = (
    f"Sm90F32Config<flashtile::HalfParts<2>, {_HEAD_DIM}, {_HEAD_DIM}, {_BLOCK_M}, {_BLOCK_N}, {_STAGES}, 64, true>"
)
_SMALL_GRID, _FEW = SmallGrid(_BLOCK_M), FewQueries(64, 1)
# Blocks that share the keys of a tile of queries, without and with a band, by the class of a call: the fastest for one
# head on an H200 (docs/float32.md). Under a band tiles differ in their keys, and larger clusters balance them
_FEW_TILES, _SOME_TILES = SmallGrid(40), SmallGrid(64)
_CLUSTERS = {_FEW_TILES: (8, 8), _SOME_TILES: (2, 4)}
_CLUSTERS_OF_MANY = (1, 2)
_SIZES = (1, 2, 4, 8)
_WORK_ITEMS, _ITEM_BYTES = 3, 104  # WorkItemRing, WorkItem (attn/work_item.cuh)


@dataclass(frozen=True)
class FwdSm90F32DirectRow(Row):
    cluster: int  # blocks that share the keys of a query tile
    overlaps: bool  # scores of a tile with P V of the one before it

    @property
    def header(self) -> str:
        return _HEADER

    @property
    def struct(self) -> Struct:
        return Sm90F32Params

    @property
    def num_threads(self) -> int:
        return 2 * self.block_m + 128

    @property
    def config(self) -> str:
        parts = "HalfParts<2>" if self.kernel == _HALF else "Bf16Parts"
        return f"Sm90F32DirectConfig<flashtile::{parts}, {self.cluster}, {cpp_bool(self.overlaps)}>"

    @property
    def label(self) -> str:
        words = f"{self.block_m} x {self.block_n}, {self.num_threads // 32} warps, clusters of {self.cluster}"
        return words if self.overlaps else f"{words}, no overlap"

    @property
    def shared_bytes(self) -> int:
        row = _NUM_PARTS[self.kernel] * 128
        tiles = row * (self.block_m + 2 * _STAGES * self.block_n)
        barriers, scheduler = 16 * (self.block_m // 64) + 32 * _STAGES, 16
        storage = -(-(tiles + barriers + scheduler + _WORK_ITEMS * _ITEM_BYTES) // 1024) * 1024
        return storage + 8 * self.block_m

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        mask, _, _, lengths = (qualified(f"flashtile::{policy}") for policy in features.policies()[:4])
        storage = f"flashtile::FwdSm90F32DirectStorage<flashtile::{self.config}, {mask}, {lengths}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm90F32Direct(Family[FwdSm90F32DirectRow]):
    name = _HEADER
    op = "forward"
    summary = "float32 by wgmma, split in the kernel, on Hopper: few queries and heads"
    kernels = (_HALF, _BF16)
    dtypes = ("float32",)
    head_dims = ((_HEAD_DIM, _HEAD_DIM),)
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = False
    length_classes = (_SMALL_GRID, *_CLUSTERS, _MANY, _FEW)
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
        for kernel in self.kernels:
            for cluster in _SIZES:
                for overlaps in (True, False):
                    yield _row(kernel, cluster, overlaps)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[FwdSm90F32DirectRow]:
        """With options an overlap would spill registers."""
        sizes = next((sizes for fits, sizes in _CLUSTERS.items() if key.length(fits)), _CLUSTERS_OF_MANY)
        preferred = sizes[key.features.has_band]
        for cluster in (preferred, *(size for size in _SIZES if size != preferred)):
            for overlaps in (True, False) if key.features.num_options == 0 else (False,):
                yield _row(kernel, cluster, overlaps)

    def timed_as(self, key: PlanKey) -> str:
        """Faster than simt at every measured length; preferred to a pre-pass for its memory (docs/float32.md)."""
        return "fwd_sm90_f32" if key.length(speeds.SIZE) else "fwd_simt"

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        half, bf16 = (self.select(kernel, key) for kernel in self.kernels)
        if not key.length(_MANY) or dataclasses.replace(key.features, has_band=False) != Features():
            return self.launch_row(bf16, key, layout)
        steps = (
            *check_pass(_CHECKED, half.block_n, key, layout),
            self._step(half, key, layout),
            self._step(bf16, key, layout),
        )
        return Launch(steps, (RANGE,), struct=Sm90F32Params)

    def launch_row(self, row: FwdSm90F32DirectRow, key: PlanKey, layout: CallLayout) -> Launch:
        workspaces = (RANGE,) if row.kernel == _HALF else ()
        return Launch((self._step(row, key, layout),), workspaces, struct=Sm90F32Params)

    def _step(self, row: FwdSm90F32DirectRow, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, query_grid(layout, row.block_m), cluster=row.cluster)


def _row(kernel: str, cluster: int, overlaps: bool) -> FwdSm90F32DirectRow:
    sizes = _HEAD_DIM, _HEAD_DIM, _BLOCK_M, _BLOCK_N
    return FwdSm90F32DirectRow(kernel, "float32", "float32", *sizes, cluster, overlaps)
