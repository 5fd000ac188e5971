"""The plan of a pass on the CPU: one pass of its engine (csrc/cpu), with the parameters that kernels get."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import NamedTuple

from flashtile.plans.operands import assembled, call_values, forward_operands
from flashtile.plans.params import WIDE_NUMBERS, WideParams, field_at
from flashtile.plans.plan import (
    ENGINE_DTYPES,
    AnyStep,
    EnginePass,
    LaunchPlan,
    Memset,
    Operand,
    Patch,
    Scalar,
    Workspace,
)
from flashtile.plans.spec import CallLayout

HOST_PAD = 16  # head dims in workspaces are padded to a multiple of this (csrc/cpu/tiles.h)


class HostKey(NamedTuple):
    """Key of a pass on the CPU: all that decides its plan."""

    dtype: str
    out_dtype: str
    bias_dtype: str | None
    head_dim: int
    head_dim_v: int
    grads: tuple[str, ...] | None = None  # of a backward pass: those of GRADS that are wanted


@functools.lru_cache(maxsize=4096)
def host_plan(key: HostKey, layout: CallLayout) -> LaunchPlan:
    """Backward, the numbers num_splits and num_shares come with the call."""
    tensors, real = ["q", "k", "v", "out"], arithmetic_of(key.dtype)
    operands = [
        operand._replace(dtype=real) if operand.name in ("alibi_slopes", "sinks") else operand
        for operand in forward_operands(layout, is_written=key.grads is None)
    ]
    values, workspaces, zeroed = call_values(layout), list[Workspace](), list[str]()
    # Sequences may share pages: what they add to them is rounded once, at the end
    is_paged = "block_table" in layout.tensors
    if key.grads is not None:
        key_grads: list[str] = [name for name in ("dk", "dv") if name in key.grads]
        tensors += ["dout", *(name for name in ("dq", "dk", "dv") if name in key.grads)]
        operands.append(Operand("dout", dtype=key.out_dtype))
        operands += [Operand("dq", is_written=True)] if "dq" in key.grads else []
        operands += [Operand(name, dtype=real if is_paged else None, is_written=True) for name in key_grads]
        operands += [Operand("dbias", strides="contiguous", is_written=True)] if "dbias" in key.grads else []
        if "dsinks" in key.grads:
            operands.append(Operand("dsinks", strides="contiguous", dtype=real, is_written=True))
        if "dlse" in layout.tensors:
            operands.append(Operand("dlse", strides="contiguous", dtype=real))
        padded = -(-key.head_dim // HOST_PAD) * HOST_PAD
        values += (("num_splits", (Scalar("num_splits"),)), ("num_shares", (Scalar("num_shares"),)))
        real_bytes = 8 if real == "float64" else 4
        workspaces = [Workspace(name, real_bytes, ("lse_size",)) for name in ("score_lse", "delta")]
        workspaces.append(Workspace("partial_out", real_bytes * padded, ("num_shares", "lse_size")))
        # Keys outside every sequence have no owner
        zeroed = key_grads if layout.has_lengths or is_paged else []
    dtypes = (key.dtype, key.out_dtype, key.bias_dtype or "float32", real if is_paged else key.dtype)
    engine = EnginePass(key.grads is not None, tuple(map(ENGINE_DTYPES.index, dtypes)))
    steps: tuple[AnyStep, ...] = (*(Memset(name) for name in zeroed), engine)
    plan = assembled(steps, operands, tensors, values, None, workspaces, (key.head_dim, key.head_dim_v), layout)
    return _with_wide_numbers(plan) if real == "float64" else plan


def arithmetic_of(dtype: str) -> str:
    """Returns the dtype in which the engine computes for inputs of this dtype."""
    return "float64" if dtype == "float64" else "float32"


def _with_wide_numbers(plan: LaunchPlan) -> LaunchPlan:
    """The plan with WideParams in place of Params."""
    patches = [
        patch for patch in plan.patches if not (isinstance(patch.rule, Scalar) and patch.rule.name in WIDE_NUMBERS)
    ]
    patches += [Patch(*field_at(WideParams, name), Scalar(name)) for name in WIDE_NUMBERS]
    image = plan.image.ljust(ctypes.sizeof(WideParams), b"\0")
    return dataclasses.replace(plan, image=image, patches=tuple(patches))
