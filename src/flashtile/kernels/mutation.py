"""Kernels broken on purpose, one fault at a time, so that tests can be seen to fail. The faults are listed in
core/mutation.cuh.

A unit with a fault begins with a define, so its cache key is its own, and it is never taken for the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LIST = Path(__file__).resolve().parent.parent / "include" / "flashtile" / "core" / "mutation.cuh"
_ENTRY = re.compile(r"^ +(\w+), +// (?:(memcheck|racecheck|initcheck|synccheck): )?(.*)$", re.MULTILINE)
_planted: str | None = None


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str
    what: str
    tool: str | None  # of compute-sanitizer, where that alone is sure to see it

    @property
    def family(self) -> str | None:
        """The family whose kernel alone has it: the prefix of its name, as in fwd_sm90_rescale."""
        found = re.match(r"((?:fwd|bwd|decode)_sm\d+(?:_wide|_short|_f32(?:_direct)?)?)_", self.name)
        return found[1] if found else None


def mutations() -> list[Mutation]:
    """Every fault that can be planted."""
    return [
        Mutation(name, what, tool or None) for name, tool, what in _ENTRY.findall(_LIST.read_text(encoding="utf-8"))
    ]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Units written inside have this fault. Plans made before or inside must not cross: see check/mutants.py."""
    global _planted
    outer, _planted = _planted, name
    try:
        yield
    finally:
        _planted = outer


def defines() -> list[str]:
    """The lines that a unit begins with."""
    return [] if _planted is None else [f"#define FT_MUTATION {_planted}"]
