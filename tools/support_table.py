"""The table of backends in README.md against the code: which backends there are, where they run, and what they take.

make_docs.py calls `complaints`. What the backends refuse is asked with a GPU that need not be here, so the answers do
not depend on the machine: a backend that is not installed gives one reason for every call, which then says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.problem import Problem
from flashtile.testing import Case

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
