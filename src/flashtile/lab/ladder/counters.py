"""Hardware counters of the ladder's kernels, read by Nsight Compute (profile/ncu.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashtile.lab.ladder.rows import Counters
from flashtile.lab.ladder.rungs import Variables
from flashtile.lab.profile import ncu
from flashtile.lab.profile.ncu import Call

_SOURCE = "flashtile.lab.ladder.measure"  # its profiled_providers() resolve the name in a Call
_METRICS = ncu.METRICS | {
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sectors_per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "divergent_branches": "smsp__sass_branch_targets_threads_divergent.sum",
}


def profile(calls: Sequence[Call], variables: Variables | None = None, source: str = _SOURCE) -> list[Counters]:
    """The counters of calls that launch one kernel each."""
    metrics = [*_METRICS.values(), *map(ncu.STALL.format, ncu.STALLS)]
    groups = ncu.run(calls, metrics, "all", source, (variables or Variables.read()).environment())
    return [_counters(kernels[0].metrics) for kernels in groups]


def device_bytes(calls: Sequence[Call], variables: Variables) -> list[tuple[float, int]]:
    """Returns the bytes that the kernels of each call read from and write to device memory, and their number."""
    groups = ncu.run(calls, (), "none", _SOURCE, variables.environment())
    return [(sum(kernel.metrics[name] for kernel in kernels for name in ncu.BYTES), len(kernels)) for kernels in groups]


def _counters(metrics: Mapping[str, float]) -> Counters:
    """Counters from metrics. Those that an architecture does not have stay None."""
    stalls = ncu.stalls(metrics)
    top = next(iter(stalls))
    value = {name: metrics.get(metric) for name, metric in _METRICS.items()}
    duration, occupancy = value.pop("duration"), value.pop("achieved_occupancy")
    return Counters(
        **value,
        profiled_ms=None if duration is None else duration / 1e6,
        dram_bytes=sum(metrics[name] for name in ncu.BYTES),
        achieved_occupancy=None if occupancy is None else occupancy / 100,
        top_stall=top,
        top_stall_share=stalls[top],
        global_stall_share=stalls["long_scoreboard"],
    )
