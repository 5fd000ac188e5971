"""The kernel families there are, and which of them a call takes.

Each has a folder, and `register` adds it. Of the families that do not refuse a call the fastest by speeds.csv is taken,
of equals the first registered; those that are not in that table come last, in the order of their registration.
FLASHTILE_FAMILY names families that are taken whatever their speed.

Small calls, too, go by the times of large ones: their own are those of the host's launches, in which the kernels of
every family are hidden. Families with a drawback (base.py) come last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter

import torch

from flashtile.errors import Unsupported, dtype_name, value_error
from flashtile.families import speeds
from flashtile.families.base import Family, Launch, forced_rows
from flashtile.families.bwd_simt.family import BwdSimt
from flashtile.families.bwd_sm80.family import BwdSm80
from flashtile.families.bwd_sm80_f32.family import BwdSm80F32
from flashtile.families.bwd_sm80_wide.family import BwdSm80Wide
from flashtile.families.bwd_sm90.family import BwdSm90
from flashtile.families.bwd_sm90_f32.family import BwdSm90F32
from flashtile.families.bwd_sm90_wide.family import BwdSm90Wide
from flashtile.families.decode_sm90.family import DecodeSm90
from flashtile.families.fwd_simt.family import FwdSimt
from flashtile.families.fwd_sm80.family import FwdSm80
from flashtile.families.fwd_sm80_f32.family import FwdSm80F32
from flashtile.families.fwd_sm80_wide.family import FwdSm80Wide
from flashtile.families.fwd_sm90.family import FwdSm90
from flashtile.families.fwd_sm90_f32.family import FwdSm90F32
from flashtile.families.fwd_sm90_f32_direct.family import FwdSm90F32Direct
from flashtile.families.fwd_sm90_short.family import FwdSm90Short
from flashtile.families.fwd_sm90_wide.family import FwdSm90Wide
from flashtile.families.tiles import TABLE, Row, Tile, check_kernels
from flashtile.plans.arch import Arch, arch_named
from flashtile.plans.length_class import LengthClass, LongLengths
from flashtile.plans.mutation import Mutation
from flashtile.plans.spec import PlanKey, features_of
from flashtile.problem import Problem

__all__ = ["Family", "Launch", "Row", "Tile", "all_families", "forced_rows", "register"]

_SWITCH = "FLASHTILE_FAMILY"
SIZE_AT = 0  # the place of speeds.SIZE among the length classes
# Where rows that are not aligned may be copied to where they are: with fewer keys to a row a copy takes longer than it
# saves (docs/limits.md)
COPIES = {"forward": LongLengths(1024, 1024), "backward": LongLengths(256, 256)}
_COPY_COST = 1.25  # the time with copies over that without: a quarter more at those lengths
_families: list[Family] = []
_of_op: dict[str, tuple[Family, ...]] = {}
_classes: dict[str, tuple[LengthClass, ...]] = {}  # by op: length_classes


def register(family: Family) -> None:
    """Adds a family; its name must be new, and its tiles in order."""
    if any(known.name == family.name for known in _families):
        raise value_error("family", repr(family.name), "a name that no family has")
    if missing := [kernel for kernel, tiles in family.tiles.items() if not tiles]:
        raise value_error("family", f"{family.name!r} without a tile of {missing[0]}", "one with tiles of each kernel")
    _families.append(family)
    _sort()


def unregister(family: Family) -> None:
    _families.remove(family)
    _sort()


def _sort() -> None:
    for op in speeds.OPS:
        _of_op[op] = tuple(family for family in _families if family.op == op)
        of_families = (one for family in _of_op[op] for one in family.length_classes)
        # The first one is at SIZE_AT
        _classes[op] = tuple(dict.fromkeys((speeds.SIZE, COPIES[op], *of_families)))


def all_families(op: str | None = None) -> tuple[Family, ...]:
    """Returns the families of an op, or all."""
    return tuple(_families) if op is None else _of_op[op]


def find(name: str) -> Family:
    for family in _families:
        if family.name == name:
            return family
    raise value_error("family", repr(name), "one of " + ", ".join(family.name for family in _families))


register(DecodeSm90())
register(FwdSm90Short())
register(FwdSm90())
register(FwdSm80())
register(FwdSm90Wide())
register(FwdSm80Wide())
register(FwdSm90F32Direct())
register(FwdSimt())
register(FwdSm90F32())
register(FwdSm80F32())
register(BwdSm90())
register(BwdSm90Wide())
register(BwdSm80())
register(BwdSm80Wide())
register(BwdSimt())
register(BwdSm90F32())
register(BwdSm80F32())
check_kernels(TABLE, (kernel for family in _families for kernel in family.kernels))


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


def refusals(key: PlanKey) -> Mapping[str, str | None]:
    """Returns for each family of the key's op why it does not take the call, or None."""
    names = _named(key)
    return {
        family.name: family.refuse(key) or (f"{_SWITCH} names {', '.join(names)}" if family.name not in names else None)
        for family in all_families(key.op)
    }


def _named(key: PlanKey) -> list[str]:
    """Returns the families of an op that may be taken: those that are forced, if any is."""
    known, forced = [family.name for family in all_families(key.op)], forced_names()
    return [name for name in known if name in forced] or known


def fastest(key: PlanKey) -> Family | None:
    """The family that takes the call, or None."""
    return _fastest(key, forced_names(), _of_op[key.op])


@functools.lru_cache(maxsize=4096)
def _fastest(key: PlanKey, forced: tuple[str, ...], known: tuple[Family, ...]) -> Family | None:
    """Asks from the fastest on, and slower ones only while none takes the call without a drawback."""
    named = [family for family in known if family.name in forced] or known
    kind = kind_of(key)._replace(is_large=True)
    asked = [(_us_of(family, key, kind), family) for family in named if key.dtype in family.dtypes]
    asked.sort(key=itemgetter(0))  # of equals the first registered comes first
    slower = None
    for _, family in asked:
        if family.refuse(key) is None:
            if family.drawback(key) is None:
                return family
            slower = slower or family
    return slower


def select(key: PlanKey) -> Family:
    """The family that takes the call; an error where there is none."""
    family = fastest(key)
    if family is None:
        words = "; ".join(f"{name!r} refuses: {reason}" for name, reason in refusals(key).items())
        raise Unsupported(f"no kernel family takes this call. {words}")
    return family


def time_us(key: PlanKey) -> float | None:
    """The measured time of the family that takes the call; None where none does, or it is not known."""
    family = fastest(key)
    kind = kind_of(key)
    us = None if family is None else provider_us(family.timed_as(key), kind)
    # The time of a small call is that of its launch, beside which copies take none
    return us * _COPY_COST if us is not None and key.copies_rows and kind.is_large else us


def provider_us(provider: str, kind: speeds.Kind) -> float | None:
    """The time of a family, a backend or a torch kernel for calls of a kind; None where it is not known."""
    return speeds.time_us(provider, kind, (family.name for family in _of_op[kind.op] if family.is_by_mma_sync))


def _us_of(family: Family, key: PlanKey, kind: speeds.Kind) -> float:
    us = provider_us(family.timed_as(key), kind)
    return math.inf if us is None else us


def clear_choices() -> None:
    """After a change of speeds."""
    _fastest.cache_clear()


def with_copies(key: PlanKey) -> PlanKey:
    """The key of the call with aligned copies of its rows, if that is faster; else the key itself. No length of the
    keys may be in a tensor: of a cache all rows would be copied."""
    if key.features.is_aligned16 or key.mixed or not key.length(COPIES[key.op]):
        return key
    width = 4 if key.dtype == "float32" else 8  # elements of 16 bytes
    if key.out_dtype != key.dtype and key.head_dim_v % width:
        return key  # rows of out on 16-byte boundaries need not hold as many columns as those of the copies
    aligned = dataclasses.replace(
        key,
        head_dim=-(-key.head_dim // width) * width,
        head_dim_v=-(-key.head_dim_v // width) * width,
        features=dataclasses.replace(key.features, is_aligned16=True),
        copies_rows=True,
    )
    family, other, kind = fastest(key), fastest(aligned), kind_of(key)._replace(is_large=True)
    if other is None:
        return key
    other_us = _us_of(other, aligned, kind_of(aligned)._replace(is_large=True))
    return key if family is not None and _us_of(family, key, kind) <= _COPY_COST * other_us else aligned


# The key of a plan


def key_of(problem: Problem, grads: tuple[str, ...] | None, arch: Arch, num_multiprocessors: int) -> PlanKey:
    """The key of a pass; grads: those of a backward pass that are wanted."""
    is_float32 = problem.dtype == torch.float32
    precision = torch.get_float32_matmul_precision() if is_float32 else "highest"
    op = "forward" if grads is None else "backward"
    told_op, told = problem.classes or ("", ())
    values = told if told_op == op else tuple(one.of(problem.shape, num_multiprocessors) for one in _classes[op])
    return _key_of(problem, grads, arch, tuple(zip(_classes[op], values, strict=True)), precision)


@functools.lru_cache(maxsize=1024)
def _key_of(
    problem: Problem,
    grads: tuple[str, ...] | None,
    arch: Arch,
    classes: tuple[tuple[LengthClass, int], ...],
    matmul_precision: str,
) -> PlanKey:
    shape = problem.shape
    return PlanKey(
        dtype_name(problem.dtype),
        dtype_name(problem.out_dtype),
        shape.head_dim,
        shape.head_dim_v,
        features_of(problem),
        arch,
        grads,
        problem.scale > 0.0,
        problem.rows_disjoint,
        problem.heads_disjoint,
        classes,
        problem.deterministic,
        matmul_precision,
        dtype_name(problem.k_dtype) if problem.k_dtype != problem.dtype else None,
        dtype_name(problem.v_dtype) if problem.v_dtype != problem.dtype else None,
        problem.is_v_in_k,
    )


def kind_of(key: PlanKey) -> speeds.Kind:
    """The kind of calls that this one is compared with."""
    arch, head_dims = f"sm_{key.arch.number}", (key.head_dim, key.head_dim_v)
    return speeds.kind(arch, key.op, key.dtype, head_dims, key.features, bool(key.length(speeds.SIZE)))


def absent(arch: str) -> frozenset[str]:
    """The families that have nothing for an architecture, named as in speeds.Kind."""
    found = arch_named(arch)
    return frozenset(family.name for family in _families if found is not None and not family.runs_on(found))


def length_classes(op: str) -> tuple[LengthClass, ...]:
    """Every class that the choice looks at: of a family, or of all."""
    return _classes[op]


# Planted faults


def fault_family(fault: Mutation) -> Family | None:
    """The family whose kernels alone have the fault: the one with the longest name that its name begins with."""
    found = [family for family in _families if fault.name.startswith(f"{family.name}_")]
    return max(found, key=lambda family: len(family.name), default=None)


def families_with(fault: Mutation) -> tuple[Family, ...]:
    """The families in which a fault is looked for: its own, or those with all shared code."""
    own = fault_family(fault)
    return tuple(family for family in _families if family.has_all_shared_code) if own is None else (own,)


def fault_kind(fault: Mutation) -> str:
    """The name of a fault without that of its family."""
    own = fault_family(fault)
    return fault.name if own is None else fault.name.removeprefix(f"{own.name}_")


def is_reachable(fault: Mutation, arch: Arch) -> bool:
    """True if some family with the fault runs on the architecture."""
    own = fault_family(fault)
    return own is None or own.runs_on(arch)


def tile_sizes() -> frozenset[int]:
    """Every length of a tile of any family, in queries or keys: where lengths take different ways."""
    return frozenset().union(*(family.tile_sizes() for family in _families))
