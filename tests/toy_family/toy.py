"""A kernel family from outside the package: this file, fwd_toy.cuh, tiles.csv and one line of registration are all that
it takes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.steps import query_grid
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, PlanKey

_FOLDER = Path(__file__).parent


def _shared_bytes(row: Row) -> int:
    return 2 * 4 * row.streamed * 32


class FwdToy(Family):
    name = "fwd_toy"
    op = "forward"
    summary = "a thread for each query"
    kernel_types = (
        Kernel(
            "fwd_toy",
            _FOLDER / "fwd_toy.cuh",
            "ToyConfig<{owned}, {streamed}>",
            "FwdToyStorage<{config}>",
            _shared_bytes,
        ),
    )
    table = _FOLDER / "tiles.csv"
    misread_by: ClassVar = {"racecheck": "fwd_toy_"}
    fault_needs: ClassVar = {"rescale": {"head_dim": 32}}
    features = frozenset({"has_band", "has_lengths", "is_aligned16"})

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or (None if key.out_dtype == "float32" else "results in another dtype")

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self.step(self.select("fwd_toy", key), key, layout),))

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, query_grid(layout, row.owned))
