"""The float32 forward by mma.sync, three TF32 products for each: fwd_sm80_f32.cuh,
docs/float32.md."""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.fwd_sm80.family import QUERY_TILE_BYTES
from flashtile.families.mma_sync import MASKED, NARROW_LOADS, refuse_slow_tf32, small_call
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Kernel, Knobs, Row, Tile
from flashtile.plans.arch import Arch
from flashtile.plans.length_class import FewQueries
from flashtile.plans.plan import Factor, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

_FEW = FewQueries(64, 1)


def _shared_bytes(row: Row) -> int:
    keys = row["stages"] * row.streamed * (row.head_dim + row.head_dim_v)
    return -(-(4 * (row.owned * row.head_dim + keys) + QUERY_TILE_BYTES) // 128) * 128


class FwdSm80F32(Family):
    name = "fwd_sm80_f32"
    op = "forward"
    summary = "float32 by mma.sync, three TF32 products for each, on sm_80, sm_90 and sm_100"
    kernel_types = (
        Kernel(
            "fwd_sm80_f32",
            "fwd_sm80_f32/fwd_sm80_f32",
            "Sm80F32Config<{d}, {d_v}, {owned}, {streamed}, {warps}, {knobs}, {call}>",
            "FwdSm80Storage<{config}, {mask}, {lengths}>",
            _shared_bytes,
            knobs=("stages", "blocks"),
        ),
    )
    features = Family.features - {"is_paged"}
    length_classes = (_FEW,)
    takes_out_dtypes = False

    misread_by: ClassVar = {"memcheck": NARROW_LOADS, "synccheck": MASKED}

    def refuse_arch(self, arch: Arch) -> str | None:
        return refuse_slow_tf32(arch)

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and key.length(_FEW):
            reason = f"at most {_FEW.tile_rows} queries: most rows of its tiles would be empty"
        return reason

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key)

    def num_options(self, key: PlanKey) -> int:
        return super().num_options(key) + (not key.is_scale_positive)

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        is_exact = key is None or (key.head_dim, key.head_dim_v) == tile.dims
        return ("is_scale_positive", key is None or key.is_scale_positive), ("is_exact", is_exact)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80_f32", key)
        splits = SplitRule(row.owned, 4 * row.streamed, "heads", row["blocks"])
        return Launch((self.step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.owned)))
