"""The backward pass in float32 arithmetic: bwd_simt.cuh, docs/simt.md.

A preprocess step, then one kernel for dK and dV, one for dQ and one for the gradient of a bias, each launched where its
result is wanted. Every result has one owner, so all of it is deterministic.
"""

from __future__ import annotations

import functools

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.simt import SimtFamily, simt_kernel
from flashtile.families.steps import (
    ROW_STATS,
    bias_grid,
    dsinks,
    key_grid,
    preprocess,
    query_grid,
    unowned,
    unwanted_keys,
)
from flashtile.families.tiles import Row
from flashtile.plans.plan import Grid, Step
from flashtile.plans.spec import CallLayout, PlanKey


class BwdSimt(SimtFamily):
    name = "bwd_simt"
    op = "backward"
    summary = "float32 arithmetic on CUDA cores, on every GPU"
    kernel_types = (
        simt_kernel("bwd_dq_simt", "bwd_simt/bwd_simt", "BwdSimtStorage", own_tiles=2),
        simt_kernel("bwd_dkdv_simt", "bwd_simt/bwd_simt", "BwdSimtStorage", own_tiles=2, owns="keys"),
        simt_kernel("bwd_dbias_simt", "bwd_simt/bwd_simt", "BwdSimtStorage", own_tiles=2),
    )
    features = Family.features - {"is_paged"}
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout), *dsinks(key)]
        for kernel, grads in (
            ("bwd_dkdv_simt", ("dk", "dv")),
            ("bwd_dq_simt", ("dq",)),
            ("bwd_dbias_simt", ("dbias",)),
        ):
            if any(grad in key.grads for grad in grads):
                steps.append(self.step(self.select(kernel, key), key, layout))
        has_keys = "dk" in key.grads or "dv" in key.grads
        # Scores outside every sequence have no owner either
        scratch, zeroed = unwanted_keys(key) if has_keys else (), unowned(key, layout, always=("dbias",))
        return Launch(tuple(steps), ROW_STATS, scratch=scratch, zeroed=zeroed)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, _grid(row, layout))


def dbias(key: PlanKey, layout: CallLayout) -> Step:
    """The gradient of a bias alone, after `preprocess`: also for families that have no kernel of their own for it."""
    family = _family()
    return family.step(family.select("bwd_dbias_simt", key), key, layout)


@functools.cache
def _family() -> BwdSimt:
    return BwdSimt()


def _grid(row: Row, layout: CallLayout) -> Grid:
    if row.kernel == "bwd_dkdv_simt":
        return key_grid(layout, row.owned)
    if row.kernel == "bwd_dbias_simt":
        return bias_grid(row.owned, row.streamed)
    return query_grid(layout, row.owned)
