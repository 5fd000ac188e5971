"""A profile as tables: for each problem one with a line for each quantity and a column for the longest kernel of each
call, and one with a line for each of the other kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashtile.lab.bench.points import Point
from flashtile.lab.bench.tables import Table, known, labels, number, percent
from flashtile.lab.profile.measure import TOP_STALLS, by_call, main_kernel
from flashtile.lab.profile.rows import KernelRow

SMALL_SHARE = 0.02  # kernels with less of their call's time are not shown; the sums of the call hold them
_MAX_NAME = 26

Value = Callable[[KernelRow, list[KernelRow]], str]  # of a kernel and all kernels of its call


def tables(rows: Sequence[KernelRow]) -> list[Table]:
    """The tables of each problem and pass."""
    found: list[Table] = []
    for problem in dict.fromkeys(row.problem for row in rows):
        own = [row for row in rows if row.problem == problem]
        found += [one for one in (table(own), other_kernels(own)) if one.lines]
    return found


def table(rows: Sequence[KernelRow]) -> Table:
    """The calls of one problem: a column for the longest kernel of each. Without times every kernel has one."""
    calls = _calls(rows)
    names = labels(row.provider for row in rows)
    columns = [(row, found) for found in calls for row in (found if _has_no_times(found) else [main_kernel(found)])]
    header = ("", *(_heading(names[row.provider], row) for row, _ in columns))
    lines = [(name, *cells) for name, value in LINES if any(cells := [value(row, found) for row, found in columns])]
    return Table(problem_text(rows[0]), header, tuple(lines))


def other_kernels(rows: Sequence[KernelRow]) -> Table:
    """The kernels of each call besides the longest that take a noticeable share of its time."""
    names = labels(row.provider for row in rows)
    lines = [
        (_heading(names[row.provider], row), *(text(row) for _, text in _OTHER_COLUMNS))
        for kernels in _calls(rows)
        if not _has_no_times(kernels)
        for row in shown(kernels)
        if row is not main_kernel(kernels)
    ]
    return Table(f"{problem_text(rows[0])}; other kernels", ("", *(name for name, _ in _OTHER_COLUMNS)), tuple(lines))


def _calls(rows: Sequence[KernelRow]) -> list[list[KernelRow]]:
    return [found for found in by_call(rows).values() if found[0].status == "ok"]


def _has_no_times(kernels: Sequence[KernelRow]) -> bool:
    return all(row.kernel_ms is None for row in kernels)


def refusals(rows: Sequence[KernelRow]) -> Table:
    """The calls that did not run, and why."""
    lines = tuple((row.provider, problem_text(row), row.status, row.reason) for row in rows if row.status != "ok")
    return Table("Not profiled", ("provider", "problem", "status", "reason"), lines)


def shown(kernels: Sequence[KernelRow]) -> list[KernelRow]:
    """The kernels of a call that take a noticeable share of its time."""
    total = sum(row.kernel_ms or 0.0 for row in kernels)
    return [row for row in kernels if not total or (row.kernel_ms or 0.0) >= SMALL_SHARE * total]


def problem_text(row: KernelRow | Point) -> str:
    """A problem and its pass in one line."""
    heads = f"{row.heads}" if row.heads == row.heads_kv else f"{row.heads}/{row.heads_kv}"
    length = f"{row.seqlen_q}" if row.seqlen_q == row.seqlen_k else f"{row.seqlen_q}x{row.seqlen_k}"
    dim = f"{row.head_dim}" if row.head_dim == row.head_dim_v else f"{row.head_dim}/{row.head_dim_v}"
    mask = "causal" if row.is_causal else "full"
    return f"{row.direction}: B={row.batch} H={heads} S={length} d={dim} {row.dtype}, {mask}"


def kernel_label(row: KernelRow) -> str:
    name = row.kernel.removeprefix("cudnn_generated_fort_native_").removesuffix("_kernel")
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _heading(provider: str, row: KernelRow) -> str:
    return f"{provider} {kernel_label(row)}".strip()


def point_labels(rows: Sequence[KernelRow]) -> list[str]:
    """A name for each call in a figure: its provider, and what differs between the calls."""
    names = labels(row.provider for row in rows)
    words = [problem_text(row).replace(",", "").replace(":", "").split() for row in rows]
    varying = [len(set(column)) > 1 for column in zip(*words, strict=True)]
    return [
        " ".join([names[row.provider], *(word for word, varies in zip(own, varying, strict=True) if varies)])
        for row, own in zip(rows, words, strict=True)
    ]


def _main_only(text: Callable[[list[KernelRow]], str]) -> Value:
    """A quantity of the whole call stands in the column of its longest kernel."""
    return lambda row, kernels: text(kernels) if row is main_kernel(kernels) else ""


def _own(text: Callable[[KernelRow], str]) -> Value:
    return lambda row, _: text(row)


def _call_bytes(name: str) -> Callable[[list[KernelRow]], str]:
    """Bytes of all kernels of a call over the least that it can move."""

    def text(kernels: list[KernelRow]) -> str:
        values = [getattr(row, name) for row in kernels]
        if any(value is None for value in values):
            return ""
        return number(sum(values) / kernels[0].least_bytes)

    return text


def _share(value: float | None, whole: float | None = 100.0) -> str:
    if value is None or not whole:
        return ""
    return percent(value, whole)


def _of_ceiling(kernels: list[KernelRow]) -> str:
    first = kernels[0]
    return _share(first.call_tflops, first.ceiling_tflops)


def _conflicts(row: KernelRow) -> str:
    if row.bank_conflicts is None or row.shared_wavefronts is None:
        return ""
    return _share(row.bank_conflicts, row.shared_wavefronts) if row.shared_wavefronts else "0 %"


def _stall(index: int) -> Callable[[KernelRow], str]:
    def text(row: KernelRow) -> str:
        found = list(row.stall_shares().items())[index : index + 1]
        return "".join(f"{name.replace('_', ' ')} {_share(share, 1.0)}" for name, share in found)

    return text


LINES: tuple[tuple[str, Value], ...] = (
    ("call, ms", _main_only(lambda kernels: known(kernels[0].call_ms))),
    ("TFLOP/s", _main_only(lambda kernels: known(kernels[0].call_tflops))),
    ("of the ceiling", _main_only(_of_ceiling)),
    ("kernels", _main_only(lambda kernels: str(kernels[0].num_kernels or ""))),
    ("HBM bytes over least", _main_only(_call_bytes("dram_bytes"))),
    ("L2 bytes over least", _main_only(_call_bytes("l2_bytes"))),
    ("kernel, ms", _own(lambda row: known(row.kernel_ms))),
    ("HBM throughput", _own(lambda row: _share(row.dram_percent))),
    ("L2 throughput", _own(lambda row: _share(row.l2_percent))),
    ("tensor pipe busy", _own(lambda row: _share(row.tensor_percent))),
    ("FMA pipe busy", _own(lambda row: _share(row.fma_percent))),
    ("issue slots used", _own(lambda row: _share(row.issue_percent))),
    ("occupancy, theoretical", _own(lambda row: _share(row.occupancy, 1.0))),
    ("occupancy, achieved", _own(lambda row: _share(row.achieved_occupancy, 1.0))),
    ("blocks", _own(lambda row: known(row.grid_blocks))),
    ("threads of a block", _own(lambda row: known(row.block_threads))),
    ("registers", _own(lambda row: known(row.registers))),
    ("spill bytes, compiled", _own(lambda row: known(row.spill_bytes))),
    ("local MB moved", _own(lambda row: known(row.local_bytes and row.local_bytes / 1e6))),
    ("shared KiB", _own(lambda row: "" if row.shared_bytes is None else f"{row.shared_bytes / 1024:.1f}")),
    ("shared pipe busy", _own(lambda row: _share(row.shared_percent))),
    ("bank conflicts", _own(_conflicts)),
    *((f"stall {index + 1}", _own(_stall(index))) for index in range(TOP_STALLS)),
)


_OTHER_COLUMNS: tuple[tuple[str, Callable[[KernelRow], str]], ...] = (
    ("ms", lambda row: known(row.kernel_ms)),
    ("HBM throughput", lambda row: _share(row.dram_percent)),
    ("HBM bytes over least", lambda row: known(row.dram_bytes and row.dram_bytes / row.least_bytes)),
    ("occupancy", lambda row: _share(row.achieved_occupancy, 1.0)),
    ("registers", lambda row: known(row.registers)),
    ("spills", lambda row: known(row.spill_bytes)),
    ("stall 1", _stall(0)),
)
