"""The forward pass in float32 arithmetic: fwd_simt.cuh, docs/simt.md."""

from __future__ import annotations

from flashtile.families.base import Launch, tile_step
from flashtile.families.simt import SimtFamily, simt_kernel
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Dims, Row
from flashtile.plans.length_class import SmallGrid
from flashtile.plans.plan import Factor, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

_SMALL_GRID = SmallGrid(128)


class FwdSimt(SimtFamily):
    name = "fwd_simt"
    op = "forward"
    summary = "float32 arithmetic on CUDA cores, on every GPU"
    kernel_types = (simt_kernel("fwd_simt", "fwd_simt/fwd_simt", "FwdSimtStorage", own_tiles=1),)
    own_words = frozenset({"small_grid"})
    length_classes = (_SMALL_GRID,)

    def words(self, key: PlanKey, dims: Dims) -> frozenset[str]:
        return super().words(key, dims) | ({"small_grid"} if key.length(_SMALL_GRID) else set())

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_simt", key)
        splits = SplitRule(row.owned, row.streamed)
        return Launch((self.step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.owned)))
