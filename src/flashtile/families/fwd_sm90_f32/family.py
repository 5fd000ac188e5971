"""The Hopper forward pass in float32 by wgmma on split operands: fwd_sm90_f32.cuh,
docs/float32.md.

A call launches two kernels, and the numbers in its tensors decide on the GPU which of them does the work: that for
float16 parts where they are in range, else that for bfloat16 parts.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.mma_sync import small_call
from flashtile.families.sm90_f32 import (
    KNOBS,
    SHARES,
    WARPGROUP_ROWS,
    Sm90F32Params,
    padding,
    part_workspaces,
    parts,
    parts_knob,
    pre_pass,
    row_bytes,
)
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Kernel, Knobs, Row, Tile
from flashtile.plans.length_class import FewQueries
from flashtile.plans.plan import Factor, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

_HALF, _BF16 = "fwd_sm90_f32_half", "fwd_sm90_f32_bf16"
_FEW = FewQueries(WARPGROUP_ROWS, 1)
_WORK_ITEMS, _QUERY_TILE_BYTES = 3, 72  # WorkItemRing, QueryTile (attn/work_item.cuh)


def _shared_bytes(row: Row) -> int:
    (qk_bytes, v_bytes), stages = row_bytes(row), row["stages"]
    tiles = row.owned * qk_bytes + stages * row.streamed * (qk_bytes + v_bytes)
    consumers = row.owned // WARPGROUP_ROWS
    barriers, scheduler = 16 * consumers + 32 * stages, 16
    items = _WORK_ITEMS * (_QUERY_TILE_BYTES + -(-(12 * consumers + 8) // 8) * 8)
    return -(-(tiles + barriers + scheduler + items) // 1024) * 1024


def _kernel(name: str) -> Kernel:
    return Kernel(
        name,
        "fwd_sm90_f32/fwd_sm90_f32",
        f"Sm90F32Config<{parts(name)}, {{d}}, {{d_v}}, {{owned}}, {{streamed}}, {{knobs}}>",
        "FwdSm90F32Storage<{config}, {mask}, {lengths}>",
        _shared_bytes,
        knobs=KNOBS,
        struct=Sm90F32Params,
    )


class FwdSm90F32(Family):
    name = "fwd_sm90_f32"
    op = "forward"
    summary = "float32 by wgmma on operands split into 16-bit parts, on Hopper"
    kernel_types = (_kernel(_HALF), _kernel(_BF16))
    # The pre-pass would copy all pages
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    # Split operands would take far more memory than such tensors do
    takes_overlapping_rows = False
    length_classes = (_FEW, SHARES)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "fwd_sm90_"}

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and key.length(_FEW):
            reason = f"at most {WARPGROUP_ROWS} queries: splitting the keys would take longer than attending to them"
        return reason

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key) or padding([self.select(kernel, key) for kernel in self.kernels], key)

    def num_options(self, key: PlanKey) -> int:
        return key.features.num_options

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        return parts_knob(tile, key)

    def tile_note(self, key: PlanKey) -> str:
        return ", or that of the other kernel where the numbers ask for it"

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        rows = [self.select(kernel, key) for kernel in self.kernels]
        workspaces = (*part_workspaces(rows, layout), *partial_results(key))
        # A block fills a multiprocessor, and each split should have a few tiles of keys
        splits = SplitRule(rows[0].owned, 4 * rows[0].streamed, blocks=1)
        steps = (*pre_pass(rows, key, layout), *(self.step(row, key, layout) for row in rows), combine(key, layout))
        return Launch(steps, workspaces, splits, struct=Sm90F32Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.owned)), max_blocks=1)
