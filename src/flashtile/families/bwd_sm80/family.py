"""The backward pass by mma.sync, from Ampere on: bwd_sm80.cuh, docs/sm80.md.

Three steps, the first and the last shared with the Hopper family: delta and the zeros of dq_accum, the kernel that owns
keys, and the conversion of dq_accum to dQ. The sums of dQ are added in no fixed order, so a deterministic call is
refused. So is a bias: its loads would spill registers.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.mma_sync import MmaFamily
from flashtile.families.steps import ROW_STATS, dq_accum, dq_slabs, dsinks, key_grid, sm90_step, unowned, unwanted_keys
from flashtile.families.tiles import Kernel, Knobs, Row, Tile
from flashtile.plans.plan import Operand, Step
from flashtile.plans.spec import CallLayout, PlanKey

_TILE_BYTES = 72 + 4 * 8  # OwnedKeys and the ring of QueryTilePlace (bwd_sm80.cuh)


def _shared_bytes(row: Row) -> int:
    dims, stages = row.head_dim + row.head_dim_v, row["stages"]
    num_scores = (2 if row["column_warps"] == 1 else 3) * row.owned * row.streamed
    tiles = 2 * (dims * (row.owned + stages * row.streamed) + num_scores)
    return -(-(tiles + 8 * stages * row.streamed + _TILE_BYTES) // 128) * 128


class BwdSm80(MmaFamily):
    name = "bwd_sm80"
    op = "backward"
    summary = "mma.sync and ldmatrix: float16 from Turing on, bfloat16 from Ampere on"
    kernel_types = (
        Kernel(
            "bwd_sm80",
            "bwd_sm80/bwd_sm80",
            "Sm80BwdConfig<{dtype}, {d}, {d_v}, {streamed}, {owned}, {warps}, {knobs}, {call}>",
            "BwdSm80Storage<{config}>",
            _shared_bytes,
            knobs=("stages", "column_warps", "blocks"),
            owns="keys",
        ),
    )
    features = Family.features - {"is_paged", "is_aligned16", "bias_dtype"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)

    # The preprocess step is that of bwd_sm90
    misread_by: ClassVar = {"racecheck": "bwd_sm90_"}
    fault_needs: ClassVar = {"columns": {"head_dim": 128, "head_dim_v": 128}}

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        return "deterministic sums" if reason is None and key.is_deterministic else reason

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        return (("is_exact", key is None or (key.head_dim, key.head_dim_v) == tile.dims),)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        row = self.select("bwd_sm80", key)
        steps = [sm90_step("bwd_sm90_preprocess", key, layout, dq_slabs(row.head_dim)), *dsinks(key)]
        scratch: tuple[Operand, ...] = ()
        if any(name in key.grads for name in ("dq", "dk", "dv")):
            steps.append(self.step(row, key, layout))
            scratch = unwanted_keys(key)
        if "dq" in key.grads:
            steps.append(sm90_step("bwd_convert_dq", key, layout, dq_slabs(row.head_dim)))
        workspaces = (*ROW_STATS, dq_accum(row.head_dim))
        return Launch(tuple(steps), workspaces, scratch=scratch, zeroed=unowned(key, layout))

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, key_grid(layout, row.owned))
