"""The forward pass in float32 arithmetic: include/flashtile/kernels/fwd_simt.cuh, docs/simt.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from flashtile.kernels.families.base import Launch, tile_step
from flashtile.kernels.families.simt import SMALL_TILES, SimtFamily, SimtRow, Tile
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.length_class import SmallGrid
from flashtile.kernels.plan import Factor, SplitRule, Step
from flashtile.kernels.spec import CallLayout, PlanKey

_SMALL_GRID, _SMALL_BLOCK_M = SmallGrid(128), 64


class FwdSimt(SimtFamily):
    name = "fwd_simt"
    op = "forward"
    summary = "float32 arithmetic on CUDA cores, on every GPU"
    kernels = ("fwd_simt",)
    length_classes = (_SMALL_GRID,)
    # Measured on an NVIDIA H200 at B=4 H=16 S=4096, float32: docs/simt.md
    tiles: ClassVar = {
        "fwd_simt": {
            32: (Tile(128, 64, 4, max_options=0), Tile(64, 64, 4), *SMALL_TILES),
            64: (Tile(128, 64, 4, max_options=0), Tile(64, 64, 4), *SMALL_TILES),
            96: (Tile(64, 64, 4, max_options=2), Tile(64, 32, 4), *SMALL_TILES),
            128: (Tile(128, 64, 8), Tile(64, 32, 4), *SMALL_TILES),
            192: (Tile(64, 32, 4), *SMALL_TILES),
            256: (Tile(128, 32, 8, max_options=1), Tile(64, 32, 4, max_options=1), *SMALL_TILES),
        },
    }

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[SimtRow]:
        """Where a large tile would leave multiprocessors idle, it comes last."""
        rows, is_small = super().candidates(kernel, key), key.length(_SMALL_GRID)
        yield from sorted(rows, key=lambda row: bool(is_small and row.block_m > _SMALL_BLOCK_M))

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_simt", key)
        splits = SplitRule(row.block_m, row.block_n)
        return Launch((self._step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def launch_row(self, row: SimtRow, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),))

    def _step(self, row: SimtRow, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.block_m)))
