"""Time of the first call in a new process, with an empty and with a warm kernel cache.

Each measurement is a child process that starts a clock, imports torch and flashtile, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flashtile.lab.bench.device import child_environment
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.providers import Provider, by_name, missing
from flashtile.lab.bench.rows import ColdRow, Environment
from flashtile.lab.bench.sweep import Refusal, refusing, run
from flashtile.lab.bench.timing import once, synchronize

CHILD_LIMIT_S = 300
_CHILD = """
import sys, time
begin = time.perf_counter()
import torch
torch_at = time.perf_counter()
from flashtile.lab.bench import cold
cold.child(sys.argv[1], begin, torch_at)
"""
_CACHE_VARIABLES = ("FLASHTILE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def rows(
    providers: Sequence[Provider],
    point: Point,
    device: str,
    env: Environment,
    on_step: Callable[[str], None] = lambda name: None,
) -> Iterator[list[ColdRow]]:
    """Two rows per provider: with empty caches, then with the caches that the first run filled."""
    for provider in providers:
        on_step(provider.name)
        empty = ColdRow(
            provider=provider.name, is_baseline=provider.is_baseline, cache="empty", direction=point.direction,
            dtype=point.dtype,
            batch=point.batch, heads=point.heads, seqlen_q=point.seqlen_q, seqlen_k=point.seqlen_k,
            head_dim=point.head_dim,
            status="refused", reason="", import_torch_s=None, import_flashtile_s=None, start_device_s=None,
            first_call_s=None, second_call_s=None,
            resident_bytes=None, env=env,
        )  # fmt: skip
        reason = missing(provider)
        if reason is not None:
            yield [replace(empty, reason=reason)]
            continue
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                report = in_child(provider.name, point, device, folder)
                found.append(replace(empty, cache=cache, **report))
        yield found


def in_child(provider: str, point: Point, device: str, cache_folder: str) -> dict[str, Any]:
    """The report of a new process about its first call. Its caches are below the folder."""
    variables = {name: os.path.join(cache_folder, name.lower()) for name in _CACHE_VARIABLES}
    request = json.dumps({"provider": provider, "device": device, "point": asdict(point)})
    command = [sys.executable, "-c", _CHILD, request]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, env=child_environment(variables)
        )
    except subprocess.TimeoutExpired:
        return {"status": "slow", "reason": f"the child process took over {CHILD_LIMIT_S} s"}
    try:
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"status": "refused", "reason": f"the child process ended with {done.returncode}: {done.stderr[-300:]}"}
    return report


def child(request: str, begin: float, torch_at: float) -> None:
    """Runs in the child and prints its report. The clock was started before torch was imported."""
    print(json.dumps(_report(json.loads(request), begin, torch_at)))


def _report(request: dict[str, Any], begin: float, torch_at: float) -> dict[str, Any]:
    flashtile_at = time.perf_counter()
    device, point = request["device"], Point(**request["point"])
    provider, has_grad = by_name(request["provider"]), point.direction != "fwd"
    inputs = point.make(device, seed=0).leaves(provider.layout, has_grad)
    synchronize(device)
    started_at = time.perf_counter()
    times = {
        "import_torch_s": torch_at - begin,
        "import_flashtile_s": flashtile_at - torch_at,
        "start_device_s": started_at - flashtile_at,
    }
    try:
        with refusing():
            before = _resident_peak()
            attend = provider.build(point, inputs)
            with attend.context(), torch.set_grad_enabled(has_grad):
                _, first_s = once(lambda: run(attend, inputs, has_grad), device)
                grown = _resident_peak() - before
                _, second_s = once(lambda: run(attend, inputs, has_grad), device)
    except Refusal as refusal:
        return {"status": refusal.status, "reason": refusal.reason, **times}
    return {
        "status": "ok",
        "reason": "",
        **times,
        "first_call_s": first_s,
        "second_call_s": second_s,
        "resident_bytes": grown,
    }


def _resident_peak() -> int:
    """Peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux ru_maxrss of a child starts at its parent's value; VmHWM starts at 0
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match:
            return int(match[1]) * 1024
    import resource  # not on every platform

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
