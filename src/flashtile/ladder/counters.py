"""Hardware counters from Nsight Compute: runs a child process under `ncu` and parses its CSV output."""

from __future__ import annotations

import csv
import ctypes
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashtile.bench import providers
from flashtile.bench.points import Point
from flashtile.errors import Unsupported, unsupported
from flashtile.ladder.launcher import current_arch
from flashtile.ladder.rows import Counters
from flashtile.ladder.rungs import Variables
from flashtile.runtime import cache, driver

LIMIT_S = 300.0
_MARKER = "ladder_marker_kernel"
_MARKER_SOURCE = f'extern "C" __global__ void {_MARKER}(const int) {{}}\n'
_CHILD = "import sys; from flashtile.ladder import counters; counters.child(*sys.argv[1:])"
_SOURCE = "flashtile.ladder.measure"  # module whose profiled_providers() resolve the name in a Call
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Stall reasons of a warp. not_selected is left out: such a warp was ready, but another one was issued
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle",
    "membar", "mio_throttle", "misc", "no_instruction", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
_BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
_METRICS = {
    "duration": "gpu__time_duration.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "sectors_per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "divergent_branches": "smsp__sass_branch_targets_threads_divergent.sum",
}


@dataclass(frozen=True)
class Call:
    """A call to profile: provider name and problem."""

    provider: str
    point: Point


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


def profile(calls: Sequence[Call], variables: Variables | None = None, source: str = _SOURCE) -> list[Counters]:
    """The counters of calls that launch one kernel each."""
    metrics = [*_BYTES, *_METRICS.values(), *map(_STALL.format, _STALLS)]
    groups = _run(calls, variables or Variables.read(), metrics, "all", source)
    return [_counters(kernels[0]) for kernels in groups]


def device_bytes(calls: Sequence[Call], variables: Variables) -> list[tuple[float, int]]:
    """For each call: bytes read from and written to device memory by all its kernels, and the number of kernels."""
    groups = _run(calls, variables, _BYTES, "none", _SOURCE)
    return [(sum(kernel[name] for kernel in kernels for name in _BYTES), len(kernels)) for kernels in groups]


def _counters(kernel: Mapping[str, float]) -> Counters:
    """Counters from metrics. Those that an architecture does not have stay None."""
    stalls = {name: kernel.get(_STALL.format(name), 0.0) for name in _STALLS}
    top, total = max(stalls, key=lambda name: stalls[name]), max(sum(stalls.values()), 1e-9)
    value = {name: kernel.get(metric) for name, metric in _METRICS.items()}
    duration, occupancy = value["duration"], value["occupancy"]
    return Counters(
        profiled_ms=None if duration is None else duration / 1e6,
        dram_bytes=sum(kernel[name] for name in _BYTES),
        l2_bytes=value["l2_bytes"],
        l2_percent=value["l2_percent"],
        shared_loads=value["shared_loads"],
        shared_wavefronts=value["shared_wavefronts"],
        shared_percent=value["shared_percent"],
        bank_conflicts=value["bank_conflicts"],
        achieved_occupancy=None if occupancy is None else occupancy / 100,
        fma_percent=value["fma_percent"],
        sectors_per_load=value["sectors_per_load"],
        divergent_branches=value["divergent_branches"],
        top_stall=top,
        top_stall_share=stalls[top] / total,
        global_stall_share=stalls["long_scoreboard"] / total,
    )


def _run(
    calls: Sequence[Call], variables: Variables, metrics: Iterable[str], cache_control: str, source: str
) -> list[list[dict[str, float]]]:
    """Metrics of every kernel of each call."""
    request = json.dumps([{"provider": call.provider, "point": asdict(call.point)} for call in calls])
    options = [
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--clock-control",
        "none",
    ]
    options += ["--cache-control", cache_control, "--metrics", ",".join(metrics)]
    command = [find(), *options, sys.executable, "-c", _CHILD, source, request]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=variables.child_environment()
        )
    except subprocess.TimeoutExpired as error:
        got = f"no answer of ncu within {LIMIT_S:.0f} s"
        raise unsupported("Nsight Compute", got, "one", "Measure less at a time") from error
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        hint = "Run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        raise unsupported(
            "Nsight Compute", "ERR_NVGPUCTRPERM: this user may not read the counters", "a user who may", hint
        )
    groups = group(parse(done.stdout))
    has_bytes = all(name in kernel for kernels in groups for kernel in kernels for name in _BYTES)
    if done.returncode != 0 or len(groups) != len(calls) or not all(groups) or not has_bytes:
        said = " ".join(
            (done.stderr + "\n".join(line for line in done.stdout.splitlines() if line.startswith("=="))).split()
        )
        raise Unsupported(f"Nsight Compute: got no counters from ncu (exit status {done.returncode}): {said[-600:]}")
    return groups


def parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """Kernel names and metrics from ncu's raw CSV: a header, a line of units, one line per kernel."""
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
        found.append((line[name_at], values))
    return found


def group(kernels: Iterable[tuple[str, dict[str, float]]]) -> list[list[dict[str, float]]]:
    """Splits kernels into calls: each marker kernel begins a call."""
    groups: list[list[dict[str, float]]] = []
    for name, values in kernels:
        if _MARKER in name:
            groups.append([])
        elif groups:
            groups[-1].append(values)
    return groups


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
    known = importlib.import_module(source).profiled_providers()
    arch = current_arch()
    compiled = cache.compile_cached(_MARKER_SOURCE, arch.name, [_MARKER])
    marker = driver.load(compiled.cubin).function(compiled.symbols[_MARKER])
    for entry in json.loads(request):
        point = Point(**entry["point"])
        provider = providers.by_name(entry["provider"], known)
        inputs = point.make("cuda", 0)
        attend = provider.build(point, inputs)
        with attend.context(), torch.no_grad():
            if provider.is_baseline:
                # Libraries initialise on their first call. Rungs do not, and a warm-up call of a slow rung takes long
                attend.call(inputs.q, inputs.k, inputs.v)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            marker.launch((1, 1, 1), (1, 1, 1), 0, torch.cuda.current_stream().cuda_stream, _NoParams())
            attend.call(inputs.q, inputs.k, inputs.v)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        del inputs, attend
        torch.cuda.empty_cache()
