"""The kernel families there are, and which of them a call takes.

`register` adds one. Of the families that do not refuse a call the fastest by kernels/speeds.csv is taken; those that
are not in that table come last, in the order of their registration. FLASHTILE_FAMILY names families that are taken
whatever their speed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashtile.errors import Unsupported, value_error
from flashtile.kernels import speeds
from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, Launch, Row, forced_rows
from flashtile.kernels.families.bwd_simt import BwdSimt
from flashtile.kernels.families.bwd_sm90 import BwdSm90
from flashtile.kernels.families.fwd_simt import FwdSimt
from flashtile.kernels.families.fwd_sm90 import FwdSm90
from flashtile.kernels.length_class import LengthClass
from flashtile.kernels.mutation import Mutation
from flashtile.kernels.spec import PlanKey
from flashtile.problem import Shape

__all__ = ["Family", "Launch", "Row", "all_families", "forced_rows", "register"]

_SWITCH = "FLASHTILE_FAMILY"
_families: list[Family[Any]] = []


def register(family: Family[Any]) -> None:
    """Adds a family; its name must be new."""
    if any(known.name == family.name for known in _families):
        raise value_error("family", repr(family.name), "a name that no family has")
    _families.append(family)


def unregister(family: Family[Any]) -> None:
    _families.remove(family)


def all_families(op: str | None = None) -> list[Family[Any]]:
    """Those of an op, or all."""
    return [family for family in _families if op in (None, family.op)]


def find(name: str) -> Family[Any]:
    for family in _families:
        if family.name == name:
            return family
    raise value_error("family", repr(name), "one of " + ", ".join(family.name for family in _families))


register(FwdSm90())
register(FwdSimt())
register(BwdSm90())
register(BwdSimt())


# Selection

_forced: tuple[str, ...] | None = None  # by `forced`; None: what FLASHTILE_FAMILY says


@contextmanager
def forced(*names: str) -> Iterator[None]:
    """Inside, as under FLASHTILE_FAMILY. Plans made before or inside must not cross: see assemble.clear_plans."""
    global _forced
    before, _forced = _forced, names
    try:
        yield
    finally:
        _forced = before


def forced_names() -> tuple[str, ...]:
    """The families that are to be taken whatever their speed: for tests, check and bench."""
    if _forced is not None:
        return _forced
    text = os.environ.get(_SWITCH, "")
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if all(family.name != name for family in _families):
            raise value_error(_SWITCH, repr(name), ", ".join(family.name for family in _families), "Unset it")
    return names


def refusals(key: PlanKey) -> dict[str, str | None]:
    """Each family of the key's op, with the reason why it does not take the call, or None."""
    names = [name for name in forced_names() if find(name).op == key.op]
    found: dict[str, str | None] = {}
    for family in all_families(key.op):
        reason = family.refuse(key)
        if reason is None and names and family.name not in names:
            reason = f"{_SWITCH} names {', '.join(names)}"
        found[family.name] = reason
    return found


def accepting(key: PlanKey) -> list[Family[Any]]:
    """The families that take the call, in the order of their registration."""
    return [find(name) for name, reason in refusals(key).items() if reason is None]


def select(key: PlanKey) -> Family[Any]:
    """The fastest that takes the call; the first registered of those whose time is not known."""
    found = accepting(key)
    if not found:
        reasons = "; ".join(f"{name!r} refuses: {reason}" for name, reason in refusals(key).items())
        raise Unsupported(f"no kernel family takes this call. {reasons}")
    return min(found, key=lambda family: _time_us(family, key))


def _time_us(family: Family[Any], key: PlanKey) -> float:
    us = speeds.time_us(family.name, kind_of(key))
    return math.inf if us is None else us


def kind_of(key: PlanKey) -> speeds.Kind:
    """The kind of calls that this one is compared with."""
    arch, head_dim = f"sm_{key.arch.number}", max(key.head_dim, key.head_dim_v)
    is_large = bool(key.length(speeds.SIZE))
    return speeds.Kind(arch, key.op, key.dtype, head_dim, speeds.options_of(key.features), is_large)


def length_classes(op: str) -> tuple[LengthClass, ...]:
    """Every class that the choice looks at: of a family, or of all."""
    return tuple(dict.fromkeys((speeds.SIZE, *(one for family in all_families(op) for one in family.length_classes))))


def classes_of(op: str, shape: Shape, num_multiprocessors: int) -> tuple[tuple[LengthClass, int], ...]:
    """The length classes of a call, for the key of its plan."""
    return tuple((one, one.of(shape, num_multiprocessors)) for one in length_classes(op))


def is_reachable(mutation: Mutation, arch: Arch) -> bool:
    """A fault in a family's kernel shows only where the family runs."""
    return mutation.family is None or find(mutation.family).runs_on(arch)


def tile_sizes() -> frozenset[int]:
    """Every length of a tile of any family, in queries or keys: where lengths take different ways."""
    return frozenset().union(*(family.tile_sizes() for family in _families))
