"""The Hopper forward pass in float32 for few queries and heads: fwd_sm90_f32_direct.cuh,
docs/float32.md.

No workspace: the kernel splits the operands itself, and a cluster of blocks shares the keys of a query tile and merges
its results in shared memory. Short calls and calls with options are one launch, with bfloat16 parts. Long ones look
first whether float16 parts hold the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from flashtile.families import speeds
from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.sm90_f32 import RANGE, Sm90F32Params, check_pass, parts
from flashtile.families.steps import query_grid
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.length_class import FewQueries, ManyScores, SmallGrid
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, Features, PlanKey

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
_WORK_ITEMS, _ITEM_BYTES = 3, 104  # WorkItemRing, WorkItem (attn/work_item.cuh)


def _shared_bytes(row: Row) -> int:
    row_bytes = _NUM_PARTS[row.kernel] * 128
    tiles = row_bytes * (row.owned + 2 * _STAGES * row.streamed)
    barriers, scheduler = 16 * (row.owned // 64) + 32 * _STAGES, 16
    storage = -(-(tiles + barriers + scheduler + _WORK_ITEMS * _ITEM_BYTES) // 1024) * 1024
    return storage + 8 * row.owned


def _kernel(name: str) -> Kernel:
    return Kernel(
        name,
        "fwd_sm90_f32_direct/fwd_sm90_f32_direct",
        f"Sm90F32DirectConfig<{parts(name).format(parts=2)}, {{knobs}}>",
        "FwdSm90F32DirectStorage<{config}, {mask}, {lengths}>",
        _shared_bytes,
        # Blocks that share the keys of a query tile; scores of a tile with P V of the one before it
        knobs=("cluster", "overlaps"),
        struct=Sm90F32Params,
    )


class FwdSm90F32Direct(Family):
    name = "fwd_sm90_f32_direct"
    op = "forward"
    summary = "float32 by wgmma, split in the kernel, on Hopper: few queries and heads"
    kernel_types = (_kernel(_HALF), _kernel(_BF16))
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = False
    length_classes = (_SMALL_GRID, *_CLUSTERS, _MANY, _FEW)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "fwd_sm90_"}
    # A single head: its blocks are too few for a pre-pass
    fault_needs: ClassVar = {"tail": {"kind": "used", "batch": 2, "heads": 1, "heads_kv": 1, "seqlen_q": 300}}

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and not key.length(_SMALL_GRID):
            reason = f"tiles of {_BLOCK_M} queries give every multiprocessor a block: a pre-pass is faster"
        if reason is None and key.length(_FEW):
            reason = "at most 64 queries: a tile would be half empty"
        if reason is None and key.is_deterministic:
            reason = "deterministic sums: those of a call with more sequences would have other bits"
        return reason

    def num_options(self, key: PlanKey) -> int:
        return key.features.num_options

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Row]:
        """Yields the tiles; those with the best cluster for the number of tiles come first."""
        sizes = next((sizes for fits, sizes in _CLUSTERS.items() if key.length(fits)), _CLUSTERS_OF_MANY)
        preferred = sizes[key.features.has_band]
        return iter(sorted(super().candidates(kernel, key), key=lambda row: row["cluster"] != preferred))

    def timed_as(self, key: PlanKey) -> str:
        """Returns a family that this one is preferred to: it was faster than simt at every measured length, and needs
        less memory than a pre-pass (docs/float32.md)."""
        return "fwd_sm90_f32" if key.length(speeds.SIZE) else "fwd_simt"

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        half, bf16 = (self.select(kernel, key) for kernel in self.kernels)
        if not key.length(_MANY) or dataclasses.replace(key.features, has_band=False) != Features():
            return Launch((self.step(bf16, key, layout),), struct=Sm90F32Params)
        steps = (
            *check_pass(_CHECKED, half.streamed, key, layout),
            self.step(half, key, layout),
            self.step(bf16, key, layout),
        )
        return Launch(steps, (RANGE,), struct=Sm90F32Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, query_grid(layout, row.owned), cluster=row["cluster"])
