"""The tables of backends and of kernels in docs/support.md: what each takes, where it has run, what it is compiled for.

make_docs.py calls `complaints`, which compares the table of backends with the code and with the kept records of
`flashtile check`, and `families_table`, which writes the table of kernels. What the backends refuse is asked with a GPU
that need not be here, so the answers do not depend on the machine: a backend that is not installed gives one reason for
every call, which then says nothing.
"""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flashtile import families
from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.families import speeds
from flashtile.families.base import REFUSED_FEATURES
from flashtile.plans.arch import ARCHS, MEASURED_ARCH
from flashtile.problem import Problem
from flashtile.testing import Case

RESULTS = Path(__file__).resolve().parent.parent / "results"
GPU = "nvidia-h200"  # the folder of the one GPU that kernels have run on
MARKED = re.compile(r"<!-- support -->\n(?P<table>.*?)<!-- /support -->", re.DOTALL)
HEAD_DIM = re.compile(r"head_dim to (\d+)")
SMALL = Case(seqlen_q=4, seqlen_k=4, head_dim=8, head_dim_v=8, page_size=2)
# The options by the words of the table
OPTIONS = {
    "causal": {"causal": "bottom_right"},
    "window": {"window": (1, 0)},
    "masks": {"mask": "bhqk"},
    "bias": {"bias": "bhqk"},
    "ALiBi": {"alibi": "h"},
    "softcap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "dropout": {"dropout_p": 0.5},
    "packed sequences": {"kind": "varlen"},
    "key lengths": {"kind": "used"},
    "paged keys": {"kind": "paged"},
}
FAMILIES_HEADER = "| kernel | pass | run on | compiled for | dtypes | head_dim | options | what it is |"
NO_BACKWARD = "it has no backward pass"


def complaints(text: str) -> list[str]:
    """Returns what the table of a page says that the code does not; nothing where the page has no such table."""
    match = MARKED.search(text)
    return [] if match is None else list(_complaints(match["table"]))


def _complaints(table: str) -> Iterator[str]:
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines())
    found = {row[0].strip("` "): dict(zip((cell.strip("| ") for cell in header), row, strict=True)) for row in rows}
    names = [backend.name for backend in registry.BACKENDS]
    if list(found) != names:
        yield f"its backends are {', '.join(found)}; there are {', '.join(names)}"
        return
    for backend in registry.BACKENDS:
        cells = found[backend.name]
        for column, device in (("CPU", "cpu"), ("CUDA", "cuda")):
            is_no, is_on = cells[column] == "no", device in backend.devices
            if is_on == is_no and not (device == "cpu" and "interpreter" in cells[column]):
                yield f"{backend.name}, {column}: {cells[column]!r}, but its devices are {', '.join(backend.devices)}"
        if cells["run on"] != (has_run := ", ".join(devices_run_on(backend.name)) or "no kept record"):
            yield f"{backend.name}, run on: {cells['run on']!r}, but the records say {has_run!r}"
        if backend.name == "cuda" and cells["compiled for"] != (archs := _range(list(ARCHS))):
            yield f"{backend.name}, compiled for: {cells['compiled for']!r}, but it is {archs!r}"
        forward, backward = (options_taken(backend, op) for op in ("forward", "backward"))
        if not cells["forward"].startswith(forward):
            yield f"{backend.name}, forward: {cells['forward']!r}, but it takes {forward!r}"
        if cells["backward"] not in (backward, "as forward") or (cells["backward"] == "as forward") > (
            forward == backward
        ):
            yield f"{backend.name}, backward: {cells['backward']!r}, but it takes {backward!r}"
        limits, limit = HEAD_DIM.findall(" ".join(cells.values())), largest_head_dim(backend)
        if limits != ([] if limit == 512 else [str(limit)]):
            yield f"{backend.name}: head_dim to {' and '.join(limits) or '512'}, but it takes {limit}"
        if ("by name only" in cells["what it is"]) != (not _is_automatic(backend)):
            yield f"{backend.name}: 'by name only' is {'missing' if not _is_automatic(backend) else 'wrong'}"


def options_taken(backend: Backend, op: str) -> str:
    """Returns the options that a backend takes, in the words of the table."""
    plain = _refusal(backend, SMALL, op)
    if plain == NO_BACKWARD:
        return "no"
    refused = [words for words, option in OPTIONS.items() if _refusal(backend, replace(SMALL, **option), op) != plain]
    if len(refused) > len(OPTIONS) // 2:
        return _listed([words for words in OPTIONS if words not in refused])
    return f"all but {_listed(refused)}" if refused else "all options"


def _listed(words: Sequence[str]) -> str:
    return " and ".join((*([", ".join(words[:-1])] if words[1:] else []), words[-1]))


def largest_head_dim(backend: Backend) -> int:
    plain = _refusal(backend, SMALL, "forward")
    taken = (dim for dim in (512, 256, 128, 64) if _refusal(backend, _of_dim(dim), "forward") == plain)
    return next(taken, 0)


def _of_dim(dim: int) -> Case:
    return replace(SMALL, head_dim=dim, head_dim_v=dim)


def _refusal(backend: Backend, case: Case, op: str) -> str | None:
    args = case.make(0).args
    problem = Problem.of(args._replace(needs_grad=op == "backward"))
    if "cuda" in backend.devices:
        problem = replace(problem, device="cuda", device_index=0, arch="sm_90")
    return backend.refuse(problem, op)


def _is_automatic(backend: Backend) -> bool:
    """Outside of an interpreter, which a backend is put into for tests."""
    return backend.is_automatic or getattr(backend, "is_interpreted", False)


@functools.cache
def devices_run_on(backend: str) -> list[str]:
    """Returns the devices on which a kept record of `flashtile check` has problems of a backend, all right."""
    devices = set()
    for path in RESULTS.glob("*/check*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["ran"].get(backend, 0) > 0 and record["failed"][backend] == 0:
            devices.add(re.split(r" @|,", record["environment"]["device"])[0])
    return sorted(devices)


@functools.cache
def families_run() -> dict[str, str]:
    """Returns the GPU of each kernel family that has run: one with a time in speeds.csv, or watched by a sanitizer."""
    with speeds.TABLE.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        names = {row["provider"] for row in rows if row["arch"] == MEASURED_ARCH}
    device = ""
    for path in (RESULTS / GPU).glob("sanitize*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        names.update(record.get("calls", ()))
        device = record["environment"]["device"]
    return dict.fromkeys(names, device)


def families_table() -> str:
    """Returns a line for each kernel family: where it has run, what it is compiled for, what it takes."""
    lines = [FAMILIES_HEADER, f"|{'---|' * FAMILIES_HEADER.count(' | ')}---|"]
    for family in families.all_families():
        dims, dims_v = (max(pair[index] for pair in family.head_dims) for index in (0, 1))
        cells = (
            f"`{family.name}`",
            family.op,
            families_run().get(family.name, "no kept record"),
            _range([arch.number for arch in ARCHS.values() if family.runs_on(arch)]),
            ", ".join(family.dtypes),
            f"1 to {dims}" if dims == dims_v else f"1 to {dims}, {dims_v}",
            family.support().replace(REFUSED_FEATURES["is_aligned16"], "unaligned rows").replace("; ", ", "),
            family.summary,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(archs: Sequence[int]) -> str:
    return f"sm_{archs[0]}" if len(archs) == 1 else f"sm_{archs[0]} to sm_{archs[-1]}"
