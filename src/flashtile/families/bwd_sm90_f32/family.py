"""The Hopper backward pass in float32 by wgmma on split operands: bwd_sm90_f32.cuh,
docs/float32.md.

A preprocess step, the pre-pass, then one kernel for dK and dV and one for dQ, each for float16 and for bfloat16 parts.
The gradient of a bias is that of bwd_simt. Every result has one owner, so all of it is deterministic. Head dims over
128 have kernels of their own (wide.cuh).
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.bwd_simt.family import dbias
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
from flashtile.families.steps import ROW_STATS, dsinks, key_grid, preprocess, query_grid, unowned, unwanted_keys
from flashtile.families.tiles import Kernel, Knobs, Row, Tile
from flashtile.plans.plan import Step
from flashtile.plans.spec import CallLayout, PlanKey

_ROWS = 64  # of every tile; of the wide kernels what a block owns
_SLOTS = 2  # kNumSlots (wide.cuh)
_QUERY_TILES, _KEY_TILE_BYTES, _QUERY_BLOCK_BYTES = 96, 72, 80  # StreamedQueryTile[8], KeyTile, QueryBlock
_WIDE = 128  # over this head dim the wide kernels do the work


def _shared_bytes(row: Row) -> int:
    return -(-(_wide_bytes(row) if row.head_dim > _WIDE else _narrow_bytes(row)) // 1024) * 1024


def _wide_bytes(row: Row) -> int:
    slot = row["parts"] * _ROWS * 128  # a slab of 64 columns
    owned = _ROWS * row_bytes(row)[0] if row["parts"] <= 2 else _SLOTS * slot
    tiles = 2 * (owned + row.streamed * row_bytes(row)[0])
    handed_over, barriers = 4 * _ROWS * row.streamed, 2 * 16 * _SLOTS + 4 * 8
    if _owns_queries(row):
        return tiles + 4 * handed_over + barriers + _QUERY_BLOCK_BYTES
    return tiles + handed_over + 8 * row.streamed + _QUERY_TILES + barriers + 2 * 8 + _KEY_TILE_BYTES


def _narrow_bytes(row: Row) -> int:
    tile, stages = _ROWS * sum(row_bytes(row)), row["stages"]  # a tile of Q and dO, or of K and V
    if _owns_queries(row):
        consumers = row.owned // WARPGROUP_ROWS
        return tile * (consumers + stages) + 16 * consumers + 32 * stages + _QUERY_BLOCK_BYTES
    handed_over, stats, barriers = 4 * _ROWS * _ROWS, 8 * _ROWS * stages, 8 * (4 + 4 * stages)
    return tile * (1 + stages) + handed_over + stats + _QUERY_TILES + barriers + _KEY_TILE_BYTES


def _kernel(gradient: str, parts_name: str, owns: str) -> Kernel:
    name = f"bwd_sm90_f32_{gradient}_{parts_name}"
    return Kernel(
        name,
        "bwd_sm90_f32/bwd_sm90_f32",
        f"Sm90F32Config<{parts(name)}, {{d}}, {{d_v}}, {{consumer_rows}}, {{knobs}}>",
        f"BwdSm90F32{{wide}}{gradient.capitalize()}Storage<{{config}}>",
        _shared_bytes,
        knobs=("part_rows", *KNOBS),
        owns=owns,
        struct=Sm90F32Params,
    )


class BwdSm90F32(Family):
    name = "bwd_sm90_f32"
    op = "backward"
    summary = "float32 by wgmma on operands split into 16-bit parts, on Hopper"
    kernel_types = (
        _kernel("dkdv", "half", "keys"),
        _kernel("dkdv", "bf16", "keys"),
        _kernel("dq", "half", "queries"),
        _kernel("dq", "bf16", "queries"),
    )
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    # Split operands would take far more memory than such tensors do
    takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)
    length_classes = (SHARES,)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "bwd_sm90_"}
    fault_needs: ClassVar = {
        "wide_rows": {"head_dim": 256, "head_dim_v": 256},
        "wide_half": {"head_dim": 256, "head_dim_v": 256},
        "wide_stale": {"head_dim": 256, "head_dim_v": 256, "seqlen_k": 300},
        # float16 parts do not hold the factor of such a dropout
        "wide_slab": {"head_dim": 256, "head_dim_v": 256, "kind": "dense", "dropout_p": 0.995},
    }

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        return parts_knob(tile, key)

    def drawback(self, key: PlanKey) -> str | None:
        rows = [self.select(kernel, key) for kernel in self.kernels]
        return small_call(key) or padding([row for row in rows if _owns_queries(row)], key)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        has_keys, has_queries = "dk" in key.grads or "dv" in key.grads, "dq" in key.grads
        rows = {kernel: self.select(kernel, key) for kernel in self.kernels}
        # Both kernels read tiles of the same form
        dq_rows = [row for row in rows.values() if _owns_queries(row)]
        steps = [preprocess(key, layout), *dsinks(key)]
        if has_keys or has_queries:
            steps += pre_pass(dq_rows, key, layout)
        steps += [
            self.step(row, key, layout) for row in rows.values() if (has_queries if _owns_queries(row) else has_keys)
        ]
        if "dbias" in key.grads:
            steps.append(dbias(key, layout))
        # Scores outside every sequence have no owner either
        scratch, zeroed = unwanted_keys(key) if has_keys else (), unowned(key, layout, always=("dbias",))
        has_parts = has_keys or has_queries
        workspaces = ROW_STATS + (part_workspaces(dq_rows, layout, is_backward=True) if has_parts else ())
        return Launch(tuple(steps), workspaces, scratch=scratch, zeroed=zeroed, struct=Sm90F32Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        grid = (query_grid if _owns_queries(row) else key_grid)(layout, row.owned)
        return tile_step(row, key.features, grid)


def _owns_queries(row: Row) -> bool:
    """True in the kernels of dQ."""
    return row.of.owns == "queries"
