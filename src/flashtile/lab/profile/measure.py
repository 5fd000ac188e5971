"""Turns timed calls into the rows of a profile: counters where ncu gives them, else what the compiler knows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashtile import api
from flashtile.backends import cuda, registry
from flashtile.errors import Unsupported
from flashtile.families import assemble
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import Environment, Row, shared_fields
from flashtile.lab.profile import ncu
from flashtile.lab.profile.ceilings import Ceilings
from flashtile.lab.profile.ncu import Kernel
from flashtile.lab.profile.rows import KernelRow
from flashtile.plans.arch import Arch
from flashtile.plans.plan import Step
from flashtile.runtime import cache
from flashtile.runtime.nvrtc import Resources

TOP_STALLS = 5
_FIELDS = tuple(field.name for field in dataclasses.fields(KernelRow))
_METRICS = ncu.METRICS | {
    "grid_blocks": "launch__grid_size",
    "block_threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "static_shared": "launch__shared_mem_per_block_static",
    "dynamic_shared": "launch__shared_mem_per_block_dynamic",
    "local_loads": "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "local_stores": "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
    "occupancy": "sm__maximum_warps_per_active_cycle_pct",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
}
# Names of one counter on different architectures
_TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
)
METRICS = (*_METRICS.values(), *_TENSOR, *map(ncu.STALL.format, ncu.STALLS))
# Names that changed between architectures and versions of ncu
_OPTIONAL = (
    *(_METRICS[name] for name in ("local_loads", "local_stores", "occupancy", "dram_percent", "issue_percent")),
    *_TENSOR,
    *map(ncu.STALL.format, ("gmma", "imc_miss")),
)


def rows_of(
    timed: Row, kernels: Sequence[Kernel] | None, no_counters: str, roofs: Ceilings | None, arch: Arch
) -> list[KernelRow]:
    """The rows of one call. Without counters: a row for each of our kernels with what the compiler knows."""
    known = compiled_kernels(timed.provider, timed.point) if timed.is_ok else []
    if kernels is None:
        parts = _compiled_parts(known, arch)
    else:
        spills = {step.name: resources.spill_bytes for step, resources in known}
        parts = [_counted_fields(kernel) for kernel in kernels]
        parts = [part | {"spill_bytes": spills.get(part["kernel"])} for part in parts]
    return _rows(_call_fields(timed, roofs) | {"no_counters": no_counters}, parts)


def compiled_rows(point: Point, arch: Arch, no_counters: str, env: Environment) -> list[KernelRow]:
    """Returns what the compiler knows about our kernels for a GPU that need not be here."""
    known = compiled_kernels("cuda", point, f"sm_{arch.number}")
    call = shared_fields(KernelRow, point) | {
        "provider": "cuda",
        "is_baseline": False,
        "status": "ok",
        "reason": "",
        "no_counters": no_counters,
    }
    call |= {"flops": point.flops(), "least_bytes": point.least_bytes(), "env": env}
    return _rows(call, _compiled_parts(known, arch))


def _rows(call: dict[str, Any], kernels: Sequence[dict[str, Any]]) -> list[KernelRow]:
    """A row for each kernel, or one without a kernel."""
    empty: dict[str, Any] = dict.fromkeys(_FIELDS) | {
        "kernel": "",
        "full_name": "",
        "stalls": "",
        "num_kernels": len(kernels),
    }
    return [
        KernelRow(**(empty | call | {"kernel_index": index} | kernel)) for index, kernel in enumerate(kernels or [{}])
    ]


def compiled_kernels(provider: str, point: Point, arch: str | None = None) -> list[tuple[Step, Resources]]:
    """The kernels that a call launches on the GPU at hand, or on another architecture, with what each takes. Empty for
    calls of other libraries and of other backends."""
    if provider not in ("cuda", "flashtile"):
        return []
    name = "cuda" if provider == "cuda" else None
    given = point.make_empty("meta").leaves("bhsd", point.direction != "fwd")
    problem = api.explain(given.q, given.k, given.v, arch=arch, causal=point.is_causal, backend=name).problem
    steps: list[tuple[Step, Resources]] = []
    for op in {"fwd": ("forward",), "bwd": ("backward",), "fwd+bwd": ("forward", "backward")}[point.direction]:
        if registry.choose(problem, name, op)[0].name != "cuda":
            continue
        key = cuda.problem_key(problem, op)
        for step in assemble.kernels(key):
            compiled = cache.compile_cached(step.unit, key.arch.name, [step.entry])
            steps.append((step, compiled.resources(step.entry)))
    return steps


def _call_fields(timed: Row, roofs: Ceilings | None) -> dict[str, Any]:
    found, point = shared_fields(KernelRow, timed), timed.point
    found |= {
        "call_ms": timed.median_ms,
        "call_tflops": timed.tflops,
        "flops": point.flops(),
        "least_bytes": point.least_bytes(),
    }
    if roofs is not None:
        found |= shared_fields(KernelRow, roofs)
    return found


def _compiled_parts(known: Sequence[tuple[Step, Resources]], arch: Arch) -> list[dict[str, Any]]:
    """Returns all kernels but the one that merges splits: whether there are any is decided by the call."""
    return [_compiled_fields(step, resources, arch) for step, resources in known if not step.is_for_splits]


def _compiled_fields(step: Step, resources: Resources, arch: Arch) -> dict[str, Any]:
    shared = step.shared_bytes + resources.static_shared_bytes
    blocks = arch.blocks_per_multiprocessor(step.num_threads, resources.registers, shared)
    blocks = min(blocks, step.max_blocks) if step.max_blocks else blocks
    return {
        "kernel": step.name,
        "full_name": step.entry,
        "block_threads": step.num_threads,
        "registers": resources.registers,
        "spill_bytes": resources.spill_bytes,
        "shared_bytes": shared,
        "occupancy": blocks * -(-step.num_threads // 32) / arch.max_warps,
    }


def _counted_fields(kernel: Kernel) -> dict[str, Any]:
    metrics = kernel.metrics
    value = {name: metrics.get(metric) for name, metric in _METRICS.items()}
    tensor = [metrics[name] for name in _TENSOR if name in metrics]
    stalls = list(ncu.stalls(metrics).items())[:TOP_STALLS]
    whole = {name: None if value[name] is None else int(value[name]) for name in _WHOLE}  # type: ignore[arg-type]
    return {
        "kernel": short_name(kernel.name),
        "full_name": kernel.name,
        "kernel_ms": _scaled(value["duration"], 1e-6),
        **whole,
        "local_bytes": _sum(value["local_loads"], value["local_stores"]),
        "shared_bytes": _whole(_sum(value["static_shared"], value["dynamic_shared"])),
        "occupancy": _scaled(value["occupancy"], 0.01),
        "achieved_occupancy": _scaled(value["achieved_occupancy"], 0.01),
        "dram_bytes": sum(metrics[name] for name in ncu.BYTES),
        "tensor_percent": max(tensor, default=None),
        "stalls": " ".join(f"{name}={share:.3g}" for name, share in stalls if share > 0),
        **{name: value[name] for name in _AS_THEY_ARE},
    }


_WHOLE = ("grid_blocks", "block_threads", "registers")
_AS_THEY_ARE = (
    "dram_percent", "l2_bytes", "l2_percent", "shared_wavefronts", "shared_percent", "bank_conflicts", "fma_percent",
    "issue_percent",
)  # fmt: skip


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def short_name(name: str) -> str:
    """The function's own name: without return type, namespaces, template arguments and parameters."""
    plain = re.sub(r"^(void|static|inline)\s+", "", name.strip()).replace("(anonymous namespace)::", "")
    plain = re.split(r"[<(]", plain, maxsplit=1)[0]
    return plain.rpartition("::")[2].strip() or name


def counters_of(calls: Sequence[Row]) -> tuple[list[list[Kernel]] | None, str]:
    """The kernels of each timed call by Nsight Compute, or None and the reason."""
    if not calls:
        return [], ""
    try:
        wanted = [ncu.Call(row.provider, row.point) for row in calls]
        return ncu.run(wanted, METRICS, optional=_OPTIONAL), ""
    except Unsupported as error:
        return None, str(error)


def main_kernel(rows: Sequence[KernelRow]) -> KernelRow:
    """The kernel of a call that takes the most time."""
    return max(rows, key=lambda row: row.kernel_ms or 0.0)


def by_call(rows: Sequence[KernelRow]) -> Mapping[tuple[object, ...], list[KernelRow]]:
    found: dict[tuple[object, ...], list[KernelRow]] = {}
    for row in rows:
        found.setdefault(row.call, []).append(row)
    return found
