"""The Hopper backward pass for wide heads, by wgmma and TMA: bwd_sm90_dkdv.cuh and
bwd_sm90_dq.cuh, docs/sm90-backward.md.

Two kernels: one owns keys and computes dK and dV, the other owns queries and computes dQ. Each gradient has one owner,
so results do not depend on timing, and only wanted gradients are computed.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.bwd_sm90.family import MASK_TILE, option_bytes
from flashtile.families.steps import (
    ROW_STATS,
    dsinks,
    key_grid,
    mask_bits,
    mask_workspaces,
    query_grid,
    sm90_step,
    unowned,
    unwanted_keys,
)
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.params import Params
from flashtile.plans.plan import MapPatch, Operand, Step, Workspace
from flashtile.plans.spec import CallLayout, PlanKey

_KEYS, _QUERIES = 64, 64  # of a tile of dK and dV
_BUFFERS = 2  # of P
_TILE_BYTES = 64 + 8 * 12  # KeyTile (attn/key_tile.cuh) and the ring of StreamedQueryTile (bwd_sm90_dkdv.cuh)
_BLOCK_BYTES = 72  # QueryBlock (bwd_sm90_dq.cuh)


class BwdSm90WideParams(ctypes.Structure):
    """Parameters of bwd_sm90_dkdv_kernel and bwd_sm90_dq_kernel."""

    _fields_ = [
        ("base", Params),
        ("_padding", ctypes.c_char * (-ctypes.sizeof(Params) % 64)),
        *((f"{name}_map", ctypes.c_uint64 * 16) for name in ("q", "dout", "k", "v", "k_stream", "v_stream")),
    ]


def _slabs(row: Row) -> tuple[int, int]:
    """Slabs of 64 columns of Q or K, and of V or dO."""
    return row.head_dim // 64, row.head_dim_v // 64


def _dkdv_bytes(row: Row) -> int:
    num_slabs, stages = sum(_slabs(row)), row["stages"]
    tiles = 128 * num_slabs * (row.owned + row.streamed * stages)
    probabilities, stats = _BUFFERS * 2 * _KEYS * _QUERIES, 8 * stages * _QUERIES
    barriers = 8 * (4 + (2 + num_slabs) * stages + 2 * _BUFFERS)
    total = tiles + probabilities + stats + barriers + _TILE_BYTES
    options = option_bytes(row.options, row.knobs.get("bias_stages", 0), 1)
    return -(-(-(-total // 128) * 128 + max(options, 1)) // 1024) * 1024


def _dq_bytes(row: Row) -> int:
    (slabs, slabs_v), stages_k, stages_v = _slabs(row), row["k_stages"], row["v_stages"]
    owned = 128 * (slabs + slabs_v) * row.owned
    streamed = 128 * row.streamed * (stages_k * slabs + stages_v * slabs_v)
    barriers = 8 * (6 + 2 * stages_k + 2 * stages_v * slabs_v)
    return -(-(owned + streamed + barriers + _BLOCK_BYTES) // 1024) * 1024


class BwdSm90Wide(Family):
    name = "bwd_sm90_wide"
    op = "backward"
    summary = "wgmma, TMA and warp specialisation, on Hopper, for wide heads"
    kernel_types = (
        Kernel(
            "bwd_sm90_dkdv",
            "bwd_sm90_wide/bwd_sm90_dkdv",
            "Sm90DkdvConfig<{dtype}, {d}, {d_v}, {knobs}>",
            "BwdSm90DkdvStorage<{config}, {mask}, {score_mod}>",
            _dkdv_bytes,
            knobs=("stages",),  # of Q and dO together
            owns="keys",
            optional_knobs=("bias_stages",),
            struct=BwdSm90WideParams,
        ),
        Kernel(
            "bwd_sm90_dq",
            "bwd_sm90_wide/bwd_sm90_dq",
            "Sm90DqConfig<{dtype}, {d}, {d_v}, {streamed}, {knobs}>",
            "BwdSm90DqStorage<{config}>",
            _dq_bytes,
            knobs=("k_stages", "v_stages"),
            struct=BwdSm90WideParams,
        ),
    )
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)
    needs_wgmma = True

    misread_by: ClassVar = {"racecheck": "bwd_sm90_"}

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is not None:
            return reason
        if key.grads is not None and "dbias" in key.grads:
            return "the gradient of a bias"
        return None

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [sm90_step("bwd_sm90_preprocess", key, layout, 0), *dsinks(key)]
        if key.features.has_bool_mask:
            steps.append(mask_bits(MASK_TILE))
        scratch: tuple[Operand, ...] = ()
        if "dk" in key.grads or "dv" in key.grads:
            steps.append(self.step(self.select("bwd_sm90_dkdv", key), key, layout))
            scratch = unwanted_keys(key)
        row = self.select("bwd_sm90_dq", key)
        if "dq" in key.grads:
            steps.append(self.step(row, key, layout))
        workspaces, maps = _workspaces(key), _maps(row, layout)
        return Launch(tuple(steps), workspaces, None, maps, scratch, unowned(key, layout), ("bias",), BwdSm90WideParams)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        grid = (query_grid if row.kernel == "bwd_sm90_dq" else key_grid)(layout, row.owned)
        return tile_step(row, key.features, grid)


def _workspaces(key: PlanKey) -> tuple[Workspace, ...]:
    return ROW_STATS + mask_workspaces(MASK_TILE) if key.features.has_bool_mask else ROW_STATS


def _maps(row: Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    """The maps of both kernels; row: that of dQ."""
    head_axis, row_axis = layout.axes
    boxes = {
        "q": ("q", _QUERIES),
        "dout": ("dout", _QUERIES),
        "k": ("k", _KEYS),
        "v": ("v", _KEYS),
        "k_stream": ("k", row.streamed),
        "v_stream": ("v", row.streamed),
    }
    return tuple(
        MapPatch(getattr(BwdSm90WideParams, f"{name}_map").offset, tensor, (row_axis, head_axis, -4), box)
        for name, (tensor, box) in boxes.items()
    )
