"""The backward pass in float32 arithmetic: include/flashtile/kernels/bwd_simt.cuh, docs/simt.md.

A preprocess step, then one kernel for dK and dV, one for dQ and one for the gradient of a bias, each launched where its
result is wanted. Every result has one owner, so all of it is deterministic.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.simt import SMALL_TILES, SimtFamily, SimtRow, Tile
from flashtile.kernels.families.steps import ROW_STATS, bias_grid, dsinks, key_grid, preprocess, query_grid
from flashtile.kernels.plan import Grid, Operand, Step
from flashtile.kernels.spec import CallLayout, PlanKey


class BwdSimt(SimtFamily):
    name = "bwd_simt"
    op = "backward"
    summary = "float32 arithmetic on CUDA cores, on every GPU"
    kernels = ("bwd_dq_simt", "bwd_dkdv_simt", "bwd_dbias_simt")
    features = Family.features - {"is_paged"}
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))
    # Measured on an NVIDIA H200 at B=4 H=16 S=4096, float32: docs/simt.md
    tiles: ClassVar = {
        "bwd_dq_simt": {
            32: (Tile(64, 64, 4), *SMALL_TILES),
            64: (Tile(128, 32, 4, max_options=0), Tile(64, 64, 4), *SMALL_TILES),
            96: (Tile(64, 32, 4), *SMALL_TILES),
            128: (Tile(64, 32, 4), *SMALL_TILES),
            192: SMALL_TILES,
            256: SMALL_TILES,
        },
        "bwd_dkdv_simt": {
            32: (Tile(64, 64, 4), *SMALL_TILES),
            64: (Tile(64, 64, 4, max_options=1), Tile(64, 32, 4), *SMALL_TILES),
            96: (Tile(64, 32, 4), *SMALL_TILES),
            128: (Tile(64, 32, 4, max_options=1, no_lengths_on=100), *SMALL_TILES),
            192: SMALL_TILES,
            256: (Tile(32, 32, 4, no_lengths_on=100), *SMALL_TILES[1:]),
        },
        "bwd_dbias_simt": {
            32: (Tile(64, 32, 4), *SMALL_TILES),
            64: (Tile(64, 32, 4), *SMALL_TILES),
            96: (Tile(64, 32, 4), *SMALL_TILES),
            128: (Tile(64, 32, 4), *SMALL_TILES),
            192: SMALL_TILES,
            256: SMALL_TILES,
        },
    }

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        for kernel, grads in (
            ("bwd_dkdv_simt", ("dk", "dv")),
            ("bwd_dq_simt", ("dq",)),
            ("bwd_dbias_simt", ("dbias",)),
        ):
            if any(grad in key.grads for grad in grads):
                steps.append(self._step(self.select(kernel, key), key, layout))
        # One kernel writes both dK and dV
        scratch = [
            Operand(other, like=other[1])
            for name, other in (("dk", "dv"), ("dv", "dk"))
            if name in key.grads and other not in key.grads
        ]
        # Keys outside every sequence have no owner, and neither have the scores there
        unowned = ("dk", "dv", "dbias") if layout.has_lengths else ("dbias",)
        zeroed = tuple(name for name in unowned if name in key.grads)
        return Launch(tuple(steps), ROW_STATS, scratch=tuple(scratch), zeroed=zeroed)

    def launch_row(self, row: SimtRow, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),), ROW_STATS)

    def _step(self, row: SimtRow, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, _grid(row, layout))


def dbias(key: PlanKey, layout: CallLayout) -> Step:
    """The gradient of a bias alone, after `preprocess`: also for families that have no kernel of their own for it."""
    family = BwdSimt()
    return family._step(family.select("bwd_dbias_simt", key), key, layout)


def _grid(row: SimtRow, layout: CallLayout) -> Grid:
    if row.kernel == "bwd_dkdv_simt":
        return key_grid(layout, row.block_m)
    if row.kernel == "bwd_dbias_simt":
        return bias_grid(row.block_m, row.block_n)
    return query_grid(layout, row.block_m)
