"""Runs calls in a child process under Nsight Compute (`ncu`) and returns the metrics of every kernel of each call.

The child launches an empty marker kernel before each call, so that the kernels of the report can be assigned to calls.
Inputs, warm-up and, for a backward pass, the forward pass are outside of what is profiled.
"""

from __future__ import annotations

import csv
import ctypes
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashtile.errors import Unsupported, unsupported
from flashtile.lab.bench import device, providers
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.sweep import make_thunk
from flashtile.lab.profile.gpu import current_arch
from flashtile.runtime import cache, driver

LIMIT_S = 300.0
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")  # every run counts them
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {  # by what they say; every profile has these
    "duration": "gpu__time_duration.sum",
    "achieved_occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "fma_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
}
# Stall reasons of a warp. not_selected is left out: such a warp was ready, but another one was issued
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "short_scoreboard", "sleeping",
    "tex_throttle", "wait",
)  # fmt: skip
STALL_WORDS = {  # reason -> what a warp waits for
    "barrier": "other warps at a barrier",
    "branch_resolving": "the target of a branch",
    "dispatch_stall": "the dispatcher",
    "drain": "their last stores",
    "gmma": "products of wgmma",
    "imc_miss": "the constant cache",
    "lg_throttle": "room in the queue to global memory",
    "long_scoreboard": "data from global memory",
    "math_pipe_throttle": "a busy arithmetic unit",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue to shared memory",
    "misc": "other reasons",
    "no_instruction": "instructions to be fetched",
    "short_scoreboard": "shared memory or exponentials",
    "sleeping": "the end of a sleep",
    "tex_throttle": "room in the queue to texture memory",
    "wait": "the fixed time of an instruction",
}
MARKER = "flashtile_marker_kernel"
_MARKER_SOURCE = f'extern "C" __global__ void {MARKER}(const int) {{}}\n'
_CHILD = "import sys; from flashtile.lab.profile import ncu; ncu.child(*sys.argv[1:])"
_OPTIONS = ("--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none")


@dataclass(frozen=True)
class Call:
    """A call to profile: provider name and problem."""

    provider: str
    point: Point
    has_warm_up: bool = True  # libraries initialise on their first call


@dataclass(frozen=True)
class Kernel:
    """One kernel launch: its name as ncu prints it, and its metrics. A metric that the GPU does not have is absent."""

    name: str
    metrics: Mapping[str, float]


def find() -> str:
    """The path of the profiler. Raises Unsupported if it is not installed."""
    folders = ["/usr/local/cuda/bin", *map(str, sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True))]
    found = shutil.which("ncu") or next(
        (path for folder in folders if (path := shutil.which("ncu", path=folder))), None
    )
    if found is None:
        raise unsupported(
            "Nsight Compute",
            "no ncu on PATH",
            "an installed one",
            "Install it; all but the counters is measured without",
        )
    return found


def run(
    calls: Sequence[Call],
    metrics: Iterable[str],
    cache_control: str = "all",
    source: str = providers.__name__,
    environment: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
) -> list[list[Kernel]]:
    """The kernels of each call.

    `cache_control`: "all" flushes the caches before every kernel, "none" leaves them. `source`: the module whose
    `profiled_providers` or `providers` resolve the provider names. Metrics that ncu does not know for this GPU are
    left out; where it complains about metrics without a name, those that are `optional`.
    """
    wanted = list(dict.fromkeys((*BYTES, *metrics)))
    done = _start(calls, wanted, cache_control, source, environment)
    if done.returncode != 0 and (unknown := _unknown_metrics(done.stdout + done.stderr, wanted, optional)):
        wanted = [name for name in wanted if name not in unknown]
        done = _start(calls, wanted, cache_control, source, environment)
    groups = group(parse(done.stdout))
    has_bytes = all(name in kernel.metrics for kernels in groups for kernel in kernels for name in BYTES)
    if done.returncode != 0 or len(groups) != len(calls) or not all(groups) or not has_bytes:
        said = " ".join(
            (done.stderr + "\n".join(line for line in done.stdout.splitlines() if line.startswith("=="))).split()
        )
        raise Unsupported(f"Nsight Compute: got no counters from ncu (exit status {done.returncode}): {said[-600:]}")
    return groups


def _start(
    calls: Sequence[Call],
    metrics: Sequence[str],
    cache_control: str,
    source: str,
    environment: Mapping[str, str] | None,
) -> subprocess.CompletedProcess[str]:
    request = json.dumps([asdict(call) for call in calls])
    options = [*_OPTIONS, "--cache-control", cache_control, "--metrics", ",".join(metrics)]
    command = [find(), *options, sys.executable, "-c", _CHILD, source, request]
    env = device.child_environment(environment or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    except subprocess.TimeoutExpired as error:
        got = f"no answer of ncu within {LIMIT_S:.0f} s"
        raise unsupported("Nsight Compute", got, "one", "Measure less at a time") from error
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        hint = "Run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        raise unsupported(
            "Nsight Compute", "ERR_NVGPUCTRPERM: this user may not read the counters", "a user who may", hint
        )
    return done


def _unknown_metrics(said: str, wanted: Sequence[str], optional: Collection[str]) -> set[str]:
    """The metrics that ncu names in its complaints about metrics; all optional ones where it names none."""
    complaints = " ".join(line for line in said.splitlines() if line.startswith("==") and "metric" in line.lower())
    words = set(re.findall(r"[\w.]+", complaints))
    named = {name for name in wanted if {name, name.partition(".")[0]} & words}
    return named or (set(optional) if complaints else set())


def parse(text: str) -> list[Kernel]:
    """Kernels from ncu's raw CSV: a header, a line of units, one line per kernel."""
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 2:
        return []
    header = table[0]
    name_at = header.index("Kernel Name")
    found = []
    for line in table[2:]:
        values = {
            column: number for column, cell in zip(header, line, strict=True) if (number := _number(cell)) is not None
        }
        found.append(Kernel(line[name_at], values))
    return found


def group(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Splits kernels into calls: each marker kernel begins a call."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def stall_words(reason: str) -> str:
    """Returns what a warp waits for in plain words, with the profiler's name of it."""
    return f"{STALL_WORDS[reason]} ({reason.replace('_', ' ')})" if reason in STALL_WORDS else reason.replace("_", " ")


def stalls(metrics: Mapping[str, float]) -> dict[str, float]:
    """The share of each stall reason in all stall cycles, the largest first."""
    cycles = {name: metrics.get(STALL.format(name), 0.0) for name in STALLS}
    total = max(sum(cycles.values()), 1e-9)
    return {name: cycles[name] / total for name in sorted(cycles, key=lambda name: -cycles[name])}


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


# The child process that runs under ncu


class _NoParams(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_int32),)


def child(source: str, request: str) -> None:
    """Runs the calls of the request, each after a marker kernel. Nothing else is profiled."""
    module = importlib.import_module(source)
    known = module.profiled_providers() if hasattr(module, "profiled_providers") else None
    compiled = cache.compile_cached(_MARKER_SOURCE, current_arch().name, [MARKER])
    marker = driver.load(compiled.cubin).function(compiled.symbols[MARKER])
    for entry in json.loads(request):
        point = Point(**entry["point"])
        provider = providers.by_name(entry["provider"], known)
        has_grad = point.direction != "fwd"
        inputs = point.make("cuda", 0)
        attend = provider.build(point, inputs)
        with attend.context(), torch.set_grad_enabled(has_grad):
            thunk = make_thunk(attend, inputs.leaves(provider.layout, has_grad), point.direction)
            if entry["has_warm_up"]:
                thunk()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # ncu saves and restores all allocated memory for every pass of every kernel
            torch.cuda.profiler.start()
            marker.launch((1, 1, 1), (1, 1, 1), 0, torch.cuda.current_stream().cuda_stream, _NoParams())
            thunk()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        del inputs, attend, thunk
        torch.cuda.empty_cache()
