"""Kernels broken on purpose, one fault at a time, so that tests can be seen to fail. The faults are listed in
core/mutation.cuh.

A unit with a fault begins with a define, so its cache key is its own, and it is never taken for the kernel. A unit
whose headers do not have the planted fault stays as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = Path(__file__).resolve().parents[1]  # as runtime/nvrtc.py
_LIST = _INCLUDE / "device" / "core" / "mutation.cuh"
_ENTRY = re.compile(r"^ +(\w+), +// (?:(memcheck|racecheck|initcheck|synccheck): )?(.*)$", re.MULTILINE)
_USE = re.compile(r"mutates\(Mutation::(\w+)\)")
_INCLUDED = re.compile(r'^#include "(.*)"$', re.MULTILINE)
_DEFINE = "#define FT_MUTATION"
_planted: str | None = None


@dataclass(frozen=True)
class Mutation:
    """One fault. If it is in the kernel of one family alone, its name begins with that of the family, as in
    fwd_sm90_rescale (families.fault_family)."""

    name: str
    what: str
    tool: str | None  # of compute-sanitizer, where that alone is sure to see it


def mutations() -> list[Mutation]:
    """Every fault that can be planted."""
    return [
        Mutation(name, what, tool or None) for name, tool, what in _ENTRY.findall(_LIST.read_text(encoding="utf-8"))
    ]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Units written inside have this fault. Plans made before or inside must not cross: see lab/check/mutants.py."""
    global _planted
    outer, _planted = _planted, name
    try:
        yield
    finally:
        _planted = outer


def defines(text: str) -> list[str]:
    """The lines that a unit with this text begins with: none where neither it nor its headers have the fault."""
    return [f"{_DEFINE} {_planted}"] if _planted is not None and _planted in _faults_in(text) else []


def is_broken(unit: str) -> bool:
    """The unit was written with a fault in it."""
    return unit.startswith(_DEFINE)


def _faults_in(text: str) -> frozenset[str]:
    return frozenset(_USE.findall(text)).union(*map(_faults_below, _INCLUDED.findall(text)))


@functools.cache
def _faults_below(header: str) -> frozenset[str]:
    """Returns the faults of a header and of what it includes."""
    return _faults_in((_INCLUDE / header).read_text(encoding="utf-8"))
