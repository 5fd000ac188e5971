"""The float32 backward by mma.sync, three TF32 products for each: bwd_sm80_f32.cuh,
docs/sm80.md.

A preprocess step, then one kernel for dK and dV and one for dQ, each launched where its result is wanted. Every result
has one owner, so all of it is deterministic. The gradient of a bias is that of bwd_simt.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.bwd_simt.family import dbias
from flashtile.families.mma_sync import NARROW_LOADS, refuse_slow_tf32, small_call
from flashtile.families.steps import ROW_STATS, dsinks, key_grid, preprocess, query_grid, unowned, unwanted_keys
from flashtile.families.tiles import Kernel, Knobs, Row, Tile
from flashtile.plans.arch import Arch
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, PlanKey

_BLOCK_BYTES = 64  # OwnedRows (attn/owned_rows.cuh)


def _shared_bytes(row: Row) -> int:
    streamed = row["stages"] * row.streamed
    stats = 8 * (row.owned if row.of.owns == "queries" else streamed)
    return -(-(4 * (row.owned + streamed) * (row.head_dim + row.head_dim_v) + stats + _BLOCK_BYTES) // 128) * 128


def _kernel(gradient: str, owns: str, is_dq: str) -> Kernel:
    return Kernel(
        f"bwd_sm80_f32_{gradient}",
        "bwd_sm80_f32/bwd_sm80_f32",
        f"Sm80F32BwdConfig<{{d}}, {{d_v}}, {{owned}}, {{streamed}}, {{warps}}, {{knobs}}, {is_dq}, {{call}}>",
        "BwdSm80F32Storage<{config}>",
        _shared_bytes,
        knobs=("stages", "blocks"),
        owns=owns,
    )


class BwdSm80F32(Family):
    name = "bwd_sm80_f32"
    op = "backward"
    summary = "float32 by mma.sync, three TF32 products for each, on sm_80, sm_90 and sm_100"
    kernel_types = (_kernel("dkdv", "keys", "false"), _kernel("dq", "queries", "true"))
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)

    misread_by: ClassVar = {"memcheck": NARROW_LOADS}

    def refuse_arch(self, arch: Arch) -> str | None:
        return refuse_slow_tf32(arch)

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key)

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        return (("is_exact", key is None or (key.head_dim, key.head_dim_v) == tile.dims),)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout), *dsinks(key)]
        has_keys = "dk" in key.grads or "dv" in key.grads
        if has_keys:
            steps.append(self.step(self.select("bwd_sm80_f32_dkdv", key), key, layout))
        if "dq" in key.grads:
            steps.append(self.step(self.select("bwd_sm80_f32_dq", key), key, layout))
        if "dbias" in key.grads:
            steps.append(dbias(key, layout))
        # Scores outside every sequence have no owner either
        scratch, zeroed = unwanted_keys(key) if has_keys else (), unowned(key, layout, always=("dbias",))
        return Launch(tuple(steps), ROW_STATS, scratch=scratch, zeroed=zeroed)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        grid = (query_grid if row.of.owns == "queries" else key_grid)(layout, row.owned)
        return tile_step(row, key.features, grid)
