"""Checks that a kernel is correct: small problems of odd length, guard zones around the output, float64 results.

A kernel that faults makes the CUDA context of its process unusable, and one that hangs blocks it. A user's kernel is
therefore tried in a separate process first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashtile.errors import Unsupported
from flashtile.lab.bench import timing
from flashtile.lab.bench.accuracy import Check
from flashtile.lab.bench.points import Inputs, Point
from flashtile.lab.ladder import launcher, rungs
from flashtile.lab.ladder.rungs import Rung, Variables
from flashtile.runtime.nvrtc import CompileError

SEQLENS = (1, 77, 200)
LIMIT_S = 120.0
GUARD = 2**16  # elements before and after the output
_CHILD = "import sys; from flashtile.lab.ladder import probe; probe.child(int(sys.argv[1]))"


class KernelFault(RuntimeError):  # noqa: N818, named for the fault
    """A kernel faults, hangs, writes out of bounds, leaves output unwritten or computes wrong results."""


def check(rung: Rung, head_dim: int, variables: Variables) -> float:
    """Runs the kernel on problems of odd lengths, full and causal. Returns its largest error; raises KernelFault."""

    def call(inputs: Inputs, is_causal: bool, out: Tensor) -> None:
        launcher.kernel_for(rung, inputs.q, inputs.k, inputs.v, variables)(inputs.q, inputs.k, inputs.v, is_causal, out)

    return check_call(call, rung.name, head_dim, "cuda", rung.dtype)


def check_call(
    call: Callable[[Inputs, bool, Tensor], None], name: str, head_dim: int, device: str, dtype: str = "fp32"
) -> float:
    """The same for any function that fills an output."""
    worst = 0.0
    for seed, seqlen in enumerate(SEQLENS):
        for is_causal in (False, True):
            point = Point(2, 3, 3, seqlen, seqlen, head_dim, head_dim, dtype, is_causal)
            inputs = point.make(device, seed)
            where = f"{name} at batch 2, heads 3, seqlen {seqlen}, head_dim {head_dim}{', causal' if is_causal else ''}"
            verdict = Check(point, inputs).verdict(_guarded(partial(call, inputs, is_causal), inputs, where), None)
            if verdict.complaint:
                error = (
                    f"largest error against float64 {verdict.max_error:.3g}, plain {dtype} has "
                    f"{verdict.yardstick_error:.3g}"
                )
                raise KernelFault(f"{where}: wrong numbers: {verdict.complaint} ({error})")
            worst = max(worst, verdict.max_error)
    return worst


def _guarded(call: Callable[[Tensor], None], inputs: Inputs, where: str) -> Tensor:
    """Runs the call on an output filled with NaN, between guard zones that must not change. Returns the output."""
    size, device = inputs.q.numel(), inputs.q.device
    buffer = torch.full((size + 2 * GUARD,), torch.nan, device=device, dtype=inputs.q.dtype)
    before = [tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v)]
    out = buffer[GUARD : GUARD + size].view(inputs.q.shape)
    try:
        call(out)
        timing.synchronize(device.type)
    except (CompileError, Unsupported):
        raise
    except RuntimeError as error:
        raise KernelFault(f"{where}: the kernel failed: {_first_line(error)}") from error
    for name, zone in (("before", buffer[:GUARD]), ("behind", buffer[-GUARD:])):
        touched = (~zone.isnan()).nonzero()
        if len(touched):
            first = int(touched[0]) - (GUARD if name == "before" else 0)
            raise KernelFault(
                f"{where}: it wrote out of bounds, {len(touched)} elements {name} its output (first at offset {first})"
            )
    for name, tensor, copy in zip("qkv", (inputs.q, inputs.k, inputs.v), before, strict=True):
        if not torch.equal(tensor, copy):
            raise KernelFault(f"{where}: it changed its input {name}")
    unwritten = int(out.isnan().sum())
    if unwritten:
        raise KernelFault(f"{where}: {unwritten} of {size} output values are NaN: never written, or computed so")
    return out


def check_apart(rung: Rung, head_dim: int, variables: Variables) -> float:
    """Runs `check` on the user's kernel in a separate process, so that a fault or hang does not affect this one."""
    command = [sys.executable, "-c", _CHILD, str(head_dim)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=variables.child_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise KernelFault(
            f"{rung.name}: it did not end within {LIMIT_S:.0f} s; look for a loop or barrier without an end"
        ) from error
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise KernelFault(f"{rung.name}: the process that ran it ended with {done.returncode}: {last[0]}") from None
    if "fault" in report:
        raise KernelFault(report["fault"])
    return float(report["max_error"])


def child(head_dim: int) -> None:
    """Runs in the separate process: checks the kernel that the environment names and prints the result."""
    variables = Variables.read()
    rung = rungs.own(variables)
    assert rung is not None
    try:
        report: dict[str, object] = {"max_error": check(rung, head_dim, variables)}
    except (KernelFault, CompileError, Unsupported, ValueError) as error:
        report = {"fault": str(error)}
    print(json.dumps(report), flush=True)
    # With a broken context a normal exit prints errors
    os._exit(0)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
