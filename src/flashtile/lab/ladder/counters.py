"""Hardware counters of the ladder's kernels, read by Nsight Compute (profile/ncu.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flashtile.lab.ladder.rows import Counters
from flashtile.lab.ladder.rungs import Variables
from flashtile.lab.profile import ncu
from flashtile.lab.profile.ncu import Call

_SOURCE = "flashtile.lab.ladder.measure"  # its profiled_providers() resolve the name in a Call
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
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sectors_per_load": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "divergent_branches": "smsp__sass_branch_targets_threads_divergent.sum",
}


def profile(calls: Sequence[Call], variables: Variables | None = None, source: str = _SOURCE) -> list[Counters]:
    """The counters of calls that launch one kernel each."""
    metrics = [*_METRICS.values(), *map(ncu.STALL.format, ncu.STALLS)]
    groups = ncu.run(calls, metrics, "all", source, (variables or Variables.read()).child_environment())
    return [_counters(kernels[0].metrics) for kernels in groups]


def device_bytes(calls: Sequence[Call], variables: Variables) -> list[tuple[float, int]]:
    """For each call: bytes read from and written to device memory by all its kernels, and the number of kernels."""
    groups = ncu.run(calls, (), "none", _SOURCE, variables.child_environment())
    return [(sum(kernel.metrics[name] for kernel in kernels for name in ncu.BYTES), len(kernels)) for kernels in groups]


def _counters(metrics: Mapping[str, float]) -> Counters:
    """Counters from metrics. Those that an architecture does not have stay None."""
    stalls = ncu.stalls(metrics)
    top = next(iter(stalls))
    value = {name: metrics.get(metric) for name, metric in _METRICS.items()}
    duration, occupancy = value["duration"], value["occupancy"]
    return Counters(
        profiled_ms=None if duration is None else duration / 1e6,
        dram_bytes=sum(metrics[name] for name in ncu.BYTES),
        l2_bytes=value["l2_bytes"],
        l2_percent=value["l2_percent"],
        shared_loads=value["shared_loads"],
        shared_wavefronts=value["shared_wavefronts"],
        shared_percent=value["shared_percent"],
        bank_conflicts=value["bank_conflicts"],
        achieved_occupancy=None if occupancy is None else occupancy / 100,
        fma_percent=value["fma_percent"],
        tensor_percent=value["tensor_percent"],
        sectors_per_load=value["sectors_per_load"],
        divergent_branches=value["divergent_branches"],
        top_stall=top,
        top_stall_share=stalls[top],
        global_stall_share=stalls["long_scoreboard"],
    )
