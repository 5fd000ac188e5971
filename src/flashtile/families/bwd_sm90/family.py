"""The Hopper backward pass by wgmma and TMA: bwd_sm90.cuh, docs/sm90-backward.md.

Three steps: delta and the zeros of dq_accum, the kernel that owns keys, and the conversion of dq_accum to dQ. Blocks
add their parts of dQ as they come, in a deterministic call in a fixed order. The gradient of a bias has a kernel of its
own.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.steps import (
    ROW_STATS,
    bias_grid,
    dq_accum,
    dq_slabs,
    dsinks,
    key_grid,
    mask_bits,
    mask_workspaces,
    sm90_step,
    unowned,
    unwanted_keys,
)
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.params import Params
from flashtile.plans.plan import MapPatch, Operand, Step, Workspace
from flashtile.plans.spec import CallLayout, Features, PlanKey

MASK_TILE = 128  # kMaskTile of attn/mask_bits.cuh
_TILE_BYTES = 64 + 8 * 32  # KeyTile (attn/key_tile.cuh) and the ring of QueryTileIndex (bwd_sm90.cuh)
_DBIAS_QUERIES = 8 * 64  # of a block; DbiasSm90::kTiles


class BwdSm90Params(ctypes.Structure):
    """Parameters of bwd_sm90_kernel."""

    _fields_ = [
        ("base", Params),
        ("_padding", ctypes.c_char * (-ctypes.sizeof(Params) % 64)),
        *((f"{name}_map", ctypes.c_uint64 * 16) for name in ("q", "dout", "k", "v")),
    ]


def _tile_bytes(row: Row, num_tiles: int) -> int:
    """Tiles of Q and dO, so many tiles of K and V, what the options take, and the stats of queries."""
    slabs = dq_slabs(row.head_dim) + dq_slabs(row.head_dim_v)
    tiles = 128 * slabs * (row["stages"] * row.streamed + num_tiles * row.owned)
    # An empty OptionStorage takes the 16 bytes to the next boundary
    options = option_bytes(row.options, row["bias_stages"], 2) or 16
    return tiles + options + 8 * row["stages"] * row.streamed


def _shared_bytes(row: Row) -> int:
    stages, buffers, dq_buffers = row["stages"], row["buffers"], row["dq_buffers"]
    scores, dq = buffers * 2 * row.owned * row.streamed, dq_buffers * 4 * 64 * 64
    rest = 8 * (2 + 2 * stages + buffers + 2 * dq_buffers) + _TILE_BYTES
    return -(-(_tile_bytes(row, 1) + scores + dq + rest) // 1024) * 1024


def _dbias_bytes(row: Row) -> int:
    stages, buffers = row["stages"], row["buffers"]
    rest = 8 * 4 * 2 * row.streamed + 72 * stages + 16 * (buffers + stages)  # sSum, DbiasTile, barriers
    return -(-(_tile_bytes(row, buffers) + rest) // 1024) * 1024


_CONFIG = "Sm90BwdConfig<{dtype}, {d}, {d_v}, {streamed}, {owned}, {knobs}>"
# stages: of Q and of dO; buffers: of dS, or of K and V in the kernel of dbias; dq_buffers: 64 x 64 parts of dQ
_KNOBS = ("stages", "buffers", "dq_buffers", "bias_stages")


class BwdSm90(Family):
    name = "bwd_sm90"
    op = "backward"
    summary = "wgmma, TMA and warp specialisation, on Hopper"
    kernel_types = (
        Kernel(
            "bwd_sm90",
            "bwd_sm90/bwd_sm90",
            _CONFIG,
            "BwdSm90Storage<{config}, {mask}, {score_mod}>",
            _shared_bytes,
            _KNOBS,
            "keys",
            struct=BwdSm90Params,
        ),
        Kernel(
            "bwd_sm90_dbias",
            "bwd_sm90/bwd_sm90_dbias",
            _CONFIG,
            "DbiasSm90Storage<{config}, {mask}, {score_mod}>",
            _dbias_bytes,
            _KNOBS,
            "keys",
            struct=BwdSm90Params,
        ),
    )
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))
    needs_wgmma = True

    misread_by: ClassVar = {"racecheck": "bwd_sm90_"}

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_options(key)

    def _refuse_options(self, key: PlanKey) -> str | None:
        """Returns which options would take too many registers, or None."""
        count = key.features.num_score_options
        if self.padded(key.head_dim, key.head_dim_v) == (128, 128) and count > 2:
            return f"{count} options that change scores at head dims over 96"
        return None

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        row = self.select("bwd_sm90", key)
        steps = [sm90_step("bwd_sm90_preprocess", key, layout, dq_slabs(row.head_dim)), *dsinks(key)]
        if key.features.has_bool_mask:
            steps.append(mask_bits(MASK_TILE))
        scratch: tuple[Operand, ...] = ()
        if any(name in key.grads for name in ("dq", "dk", "dv")):
            steps.append(self.step(row, key, layout))
            scratch = unwanted_keys(key)
        if "dq" in key.grads:
            steps.append(sm90_step("bwd_convert_dq", key, layout, dq_slabs(row.head_dim)))
        if "dbias" in key.grads:
            steps.append(self.step(self.select("bwd_sm90_dbias", key), key, layout))
        workspaces, maps = _workspaces(row, key), _maps(row, layout)
        return Launch(tuple(steps), workspaces, None, maps, scratch, unowned(key, layout), ("bias",), BwdSm90Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        is_dbias = row.kernel == "bwd_sm90_dbias"
        grid = bias_grid(_DBIAS_QUERIES, row.owned) if is_dbias else key_grid(layout, row.owned)
        return tile_step(row, key.features, grid)


def option_bytes(features: Features, num_bias_stages: int, num_consumers: int) -> int:
    """The size of OptionStorage; 0 where it is empty."""
    bits = num_consumers * (512 + 3 * 8)  # words, barriers and flags
    found = bits * features.has_bool_mask
    if features.bias_dtype is not None:
        element = 4 if features.bias_dtype == "float32" else 2
        found += num_consumers * num_bias_stages * (64 * 64 * element + 2 * 8)
    return found


def _workspaces(row: Row, key: PlanKey) -> tuple[Workspace, ...]:
    order = (Workspace("dq_order", 4, ("lse_size",)),) if key.is_deterministic else ()
    mask = mask_workspaces(MASK_TILE) if key.features.has_bool_mask else ()
    return (*ROW_STATS, *order, *mask, dq_accum(row.head_dim))


def _maps(row: Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    rows = {"q": row.streamed, "dout": row.streamed, "k": row.owned, "v": row.owned}
    return tuple(
        MapPatch(getattr(BwdSm90Params, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in rows.items()
    )
