"""The Hopper forward pass for head dims over 256, by wgmma and TMA: fwd_sm90_wide.cuh,
docs/sm80.md."""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.fwd_sm90.family import FwdSm90Params
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.plan import Factor, MapPatch, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

_QUERY_TILE_BYTES = 72  # QueryTile (attn/work_item.cuh)


def _shared_bytes(row: Row) -> int:
    slabs, slabs_v = row.head_dim // 64, row.head_dim_v // 64
    stages_k, stages_v = row["k_stages"], row["v_stages"]
    tiles = 128 * 64 * (slabs * (1 + stages_k) + slabs_v * stages_v + 2)
    barriers = 8 * (1 + 2 * slabs * stages_k + 4 * stages_v + 4)
    return -(-(tiles + 3 * 4 * 64 + 2 * 4 * 4 + -(-barriers // 16) * 16 + _QUERY_TILE_BYTES) // 1024) * 1024


class FwdSm90Wide(Family):
    name = "fwd_sm90_wide"
    op = "forward"
    summary = "wgmma, TMA and warp specialisation, on Hopper, for head dims over 256"
    kernel_types = (
        Kernel(
            "fwd_sm90_wide",
            "fwd_sm90_wide/fwd_sm90_wide",
            "Sm90FwdWideConfig<{dtype}, {out_dtype}, {d}, {d_v}, {knobs}>",
            "FwdSm90WideStorage<{config}, {mask}, {lengths}>",
            _shared_bytes,
            knobs=("k_stages", "v_stages", "cluster"),  # the blocks of a cluster share K and V
            struct=FwdSm90Params,
        ),
    )
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_overlapping_rows = False
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "fwd_sm90_"}

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm90_wide", key)
        # Each split should have a few tiles of keys
        splits = SplitRule(row["cluster"] * row.owned, 8 * row.streamed, blocks=1)
        steps = self.step(row, key, layout), combine(key, layout)
        return Launch(steps, partial_results(key), splits, _maps(row, layout), struct=FwdSm90Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        grid = Factor("num_splits"), *query_grid(layout, row["cluster"] * row.owned)
        return tile_step(row, key.features, grid, cluster=row["cluster"])


def _maps(row: Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    boxes = {"q": row.owned, "k": row.streamed, "v": row.streamed}
    return tuple(
        MapPatch(getattr(FwdSm90Params, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in boxes.items()
    )
