"""The ladder's tables: speedups over the previous rung and SDPA, resources, counters, bytes by sequence length."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.errors import value_error
from flashtile.lab.bench import join
from flashtile.lab.bench import tables as bench_tables
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import Row, shared_fields
from flashtile.lab.bench.tables import Table, known, number, percent
from flashtile.lab.ladder.rows import HbmRow, RungRow

KINDS = ("ladder", "ladder-causal", "counters", "counters-causal", "one-head")


def of(rows: Sequence[Row], kernels: Sequence[RungRow], kind: str) -> Table:
    """The table of one of KINDS. `rows`: times of all providers; `kernels`: the rows of the rungs."""
    if kind not in KINDS:
        raise value_error("table", repr(kind), ", ".join(KINDS))
    if kind == "one-head":
        return bench_tables.of([row for row in rows if row.batch * row.heads == 1], "latency")
    is_causal = kind.endswith("causal")
    chosen = [kernel for kernel in kernels if kernel.is_causal == is_causal]
    return counter_table(chosen) if kind.startswith("counters") else ladder_table(rows, chosen)


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """The printed name of each provider. Our default is named by its kernel: it differs from dtype to dtype."""
    names = bench_tables.labels(row.provider for row in rows)
    kernels = {row.provider: row.detail.partition("_kernel ")[0] for row in rows if "_kernel " in row.detail}
    return {name: f"flashtile ({kernels[name]})" if name in kernels else label for name, label in names.items()}


def ladder_table(rows: Sequence[Row], kernels: Sequence[RungRow]) -> Table:
    """Each rung at the large problem, then the baselines."""
    if not kernels:
        return Table("", (), ())
    first = _rungs_of_one_problem(kernels)[0]
    same = [row for row in rows if _is_at(row, first)]
    by_name = join.unique(same, lambda row: row.provider)
    baselines = {name: row.median_ms for name, row in by_name.items() if name.startswith("sdpa") and row.is_ok}
    names = labels(same)
    lines, before = [], None
    for kernel in kernels:
        ms = kernel.median_ms
        speed = (
            [number(ms), number(kernel.tflops or 0.0), percent((kernel.tflops or 0.0) / kernel.ceiling_tflops)]
            if ms
            else ["", "", ""]
        )
        ratios = [_ratio(before, ms), *(_ratio(peer, ms) for peer in baselines.values())]
        takes = [
            str(kernel.registers),
            str(kernel.spill_bytes),
            f"{kernel.shared_bytes / 1024:.1f}",
            percent(kernel.occupancy),
        ]
        lines.append((kernel.rung, *speed, *ratios, *takes))
        before = ms or before
    for row in same:
        if row.is_ok and row.median_ms and row.provider not in {kernel.rung for kernel in kernels}:
            share = percent((row.tflops or 0.0) / first.ceiling_tflops)
            ratios = ["", *(_ratio(peer, row.median_ms) for peer in baselines.values())]
            lines.append(
                (names[row.provider], number(row.median_ms), number(row.tflops or 0.0), share, *ratios, "", "", "", "")
            )
    header = ("", "ms", "TFLOP/s", f"of {first.unit} ceiling", "x step before", *(f"x {name}" for name in baselines))
    title = (
        f"B={first.batch} H={first.heads} S={first.seqlen} d={first.head_dim} {first.dtype}, "
        f"{'causal' if first.is_causal else 'full'}"
    )
    return Table(title, (*header, "registers", "spill bytes", "shared KiB", "occupancy"), tuple(lines))


def counter_table(kernels: Sequence[RungRow]) -> Table:
    """Counters of the rungs that were profiled."""
    lines = []
    for kernel in _rungs_of_one_problem(kernels):
        if kernel.dram_bytes is None or kernel.l2_bytes is None:
            continue
        lines.append(
            (
                kernel.rung,
                number(kernel.dram_bytes / kernel.least_bytes),
                number(kernel.l2_bytes / 1e9),
                known(kernel.l2_percent),
                known(kernel.shared_percent),
                number((kernel.shared_loads or 0.0) / (kernel.flops / 64)),
                _conflicts(kernel),
                known(kernel.unit_percent),
                percent(kernel.achieved_occupancy or 0.0),
                known(kernel.sectors_per_load),
                known(kernel.divergent_branches),
                percent(kernel.global_stall_share or 0.0),
                f"{kernel.top_stall} {percent(kernel.top_stall_share or 0.0)}",
            )
        )
    header = (
        "", "DRAM bytes over least", "L2 GB", "L2 %", "shared %", "shared loads per FMA", "bank conflicts",
        f"{kernels[0].unit if kernels else 'FMA'} pipe %", "occupancy",
        "sectors per load", "divergent branches", "waits for global", "waits most for",
    )  # fmt: skip
    mask = "causal" if kernels and kernels[0].is_causal else "full"
    return Table(f"Counters, {mask}", header, tuple(lines))


def hbm_table(rows: Sequence[HbmRow]) -> Table:
    names = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for seqlen in sorted({row.seqlen for row in rows}):
        here = join.unique((row for row in rows if row.seqlen == seqlen), lambda row: row.provider)
        least = next(iter(here.values())).least_bytes
        cells = [number(here[name].dram_bytes / 1e6) if name in here else "" for name in names]
        lines.append((f"S={seqlen}", number(least / 1e6), *cells))
    return Table("Bytes through device memory, MB", ("", "least", *names), tuple(lines))


def kernel_table(lines: Sequence[tuple[str, ...]]) -> Table:
    header = ("rung", "tile", "threads", "registers", "spill bytes", "shared KiB", "occupancy", "what it does")
    return Table("The ladder", header, tuple(lines))


def _rungs_of_one_problem(kernels: Sequence[RungRow]) -> Sequence[RungRow]:
    """Returns the rows as they are. Raises an error where one would be compared with a rung at other sizes."""
    join.unique(kernels, lambda kernel: kernel.rung)
    problems = join.groups(kernels, lambda kernel: (kernel.problem, kernel.is_causal))
    if len(problems) > 1:
        raise value_error("kernels", f"rows of the problems {list(problems)}", "those of one")
    return kernels


def _is_at(row: Row, kernel: RungRow) -> bool:
    sizes = {"heads_kv": kernel.heads, "seqlen_q": kernel.seqlen, "seqlen_k": kernel.seqlen}
    return row.point == Point(**(shared_fields(Point, kernel) | sizes | {"head_dim_v": kernel.head_dim}))


def _ratio(peer: float | None, own: float | None) -> str:
    return number(peer / own) if peer and own else ""


def _conflicts(kernel: RungRow) -> str:
    """Conflicts as a share of all cycles of the pipe. A few come from requests that only overlap."""
    if not kernel.shared_wavefronts:
        return "0 %"
    return percent((kernel.bank_conflicts or 0.0) / kernel.shared_wavefronts)
