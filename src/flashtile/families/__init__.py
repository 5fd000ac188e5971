"""The kernel families there are, and which of them a call takes.

Each has a folder, and `register` adds it. `_fastest` chooses among them by speeds.csv; FLASHTILE_FAMILY names families
that are taken whatever their speed. backends/cuda.py asks for the choice, `check`, `bench` and the tests force it.
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

_VARIABLE = "FLASHTILE_FAMILY"
SIZE_AT = 0  # the place of speeds.SIZE among the length classes
# From these numbers of queries and keys on, unaligned rows may be copied to aligned memory: a copy costs more than it
# saves on shorter ones (docs/limits.md)
COPIES = {"forward": LongLengths(1024, 1024), "backward": LongLengths(256, 256)}
_COPY_COST = 1.25  # at those lengths, the time of a call with copies over that of the same kernel alone
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
    """Removes a family that a test has added."""
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
    """Returns the family of that name."""
    for family in _families:
        if family.name == name:
            return family
    raise value_error("family", repr(name), "one of " + ", ".join(family.name for family in _families))


# The order breaks ties. A family that uses another family's times (`timed_as`) ties with it and is registered before
# it: decode_sm90 and fwd_sm90_short before fwd_sm90, fwd_sm90_f32_direct before fwd_simt and fwd_sm90_f32
# (tests/cpu/test_families.py)
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
    """Takes these families whatever their speed inside the context, as FLASHTILE_FAMILY does; none: all may be taken.

    Kept plans do not know of it: call assemble.clear_plans() after entering and after leaving.
    """
    global _forced
    before, _forced = _forced, names
    try:
        yield
    finally:
        _forced = before


def forced_names() -> tuple[str, ...]:
    """Returns the names of the families that are taken whatever their speed, by `forced` or FLASHTILE_FAMILY."""
    if _forced is not None:
        return _forced
    text = os.environ.get(_VARIABLE, "")
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if all(family.name != name for family in _families):
            raise value_error(_VARIABLE, repr(name), ", ".join(family.name for family in _families), "Unset it")
    return names


def refusals(key: PlanKey) -> Mapping[str, str | None]:
    """Returns for each family of the key's op why it does not take the call, or None."""
    allowed = _allowed(_of_op[key.op], forced_names())
    reason = f"{_VARIABLE} names {', '.join(family.name for family in allowed)}"
    return {
        family.name: family.refuse(key) or (None if family in allowed else reason) for family in all_families(key.op)
    }


def _allowed(known: tuple[Family, ...], names: tuple[str, ...]) -> tuple[Family, ...]:
    """Returns the families of an op that may be taken: those that are forced, if any is."""
    return tuple(family for family in known if family.name in names) or known


def fastest(key: PlanKey) -> Family | None:
    """Returns the family that takes the call, or None."""
    return _fastest(key, forced_names(), _of_op[key.op])


@functools.lru_cache(maxsize=4096)
def _fastest(key: PlanKey, names: tuple[str, ...], known: tuple[Family, ...]) -> Family | None:
    """Returns the fastest family that takes the call without a drawback (base.py), else the fastest that takes it.

    Times are those of speeds.csv for large calls: a small call takes as long as its launch, whichever kernel runs.
    Families without a time come last. Of equals, and of those without a time, the first registered comes first.
    """
    kind = kind_of(key)._replace(is_large=True)
    timed = [(_us_of(family, key, kind), family) for family in _allowed(known, names) if key.dtype in family.dtypes]
    timed.sort(key=itemgetter(0))  # stable
    with_drawback = None
    for _, family in timed:
        if family.refuse(key) is None:
            if family.drawback(key) is None:
                return family
            with_drawback = with_drawback or family
    return with_drawback


def select(key: PlanKey) -> Family:
    """Returns the family that takes the call. Raises if there is none."""
    family = fastest(key)
    if family is None:
        words = "; ".join(f"{name!r} refuses: {reason}" for name, reason in refusals(key).items())
        raise Unsupported(f"no kernel family takes this call. {words}")
    return family


def time_us(key: PlanKey) -> float | None:
    """Returns the measured time of the family that takes the call; None if there is no such family or time."""
    family = fastest(key)
    kind = kind_of(key)
    us = None if family is None else provider_us(family.timed_as(key), kind)
    # A small call takes as long as its launch: copies add nothing
    return us * _COPY_COST if us is not None and key.copies_rows and kind.is_large else us


def provider_us(provider: str, kind: speeds.Kind) -> float | None:
    """Returns the time of a family, a backend or a torch kernel for calls of a kind; None if it is not known."""
    return speeds.time_us(provider, kind, (family.name for family in _of_op[kind.op] if family.is_by_mma_sync))


def _us_of(family: Family, key: PlanKey, kind: speeds.Kind) -> float:
    us = provider_us(family.timed_as(key), kind)
    return math.inf if us is None else us


def clear_choices() -> None:
    """Forgets the kept choices: they do not know of a change of the speeds."""
    _fastest.cache_clear()


def with_copies(key: PlanKey) -> PlanKey:
    """Returns the key of the call with aligned copies of its rows, if that is faster; else the key itself.

    Callers pass no call over a cache, whose lengths are in a tensor: the whole cache would be copied.
    """
    if key.features.is_aligned16 or key.mixed or not key.length(COPIES[key.op]):
        return key
    width = 4 if key.dtype == "float32" else 8  # elements of 16 bytes
    if key.out_dtype != key.dtype and key.head_dim_v % width:
        # Rows of out would end before those of the copies: float32 rows are padded to 4 columns, bfloat16 ones to 8
        return key
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
    """Returns the key of a pass. `grads`: those that a backward pass wants; None: a forward pass."""
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
        dtype=dtype_name(problem.dtype),
        out_dtype=dtype_name(problem.out_dtype),
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        features=features_of(problem),
        arch=arch,
        grads=grads,
        is_scale_positive=problem.scale > 0.0,
        rows_disjoint=problem.rows_disjoint,
        heads_disjoint=problem.heads_disjoint,
        classes=classes,
        is_deterministic=problem.deterministic,
        matmul_precision=matmul_precision,
        k_dtype=dtype_name(problem.k_dtype) if problem.k_dtype != problem.dtype else None,
        v_dtype=dtype_name(problem.v_dtype) if problem.v_dtype != problem.dtype else None,
        is_v_in_k=problem.is_v_in_k,
    )


def kind_of(key: PlanKey) -> speeds.Kind:
    """Returns the kind of calls whose times stand for this one's."""
    arch, head_dims = f"sm_{key.arch.number}", (key.head_dim, key.head_dim_v)
    return speeds.kind(arch, key.op, key.dtype, head_dims, key.features, bool(key.length(speeds.SIZE)))


def absent(arch: str) -> frozenset[str]:
    """Returns the names of the families that do not run on an architecture, named as in speeds.Kind."""
    known_arch = arch_named(arch)
    return frozenset(family.name for family in _families if known_arch is not None and not family.runs_on(known_arch))


def length_classes(op: str) -> tuple[LengthClass, ...]:
    """Returns the length classes that the choice of a family looks at, or a family itself."""
    return _classes[op]


# Planted faults


def fault_family(fault: Mutation) -> Family | None:
    """Returns the family whose kernels alone have the fault, or None: the fault's name begins with the family's, and of
    several such names the longest counts."""
    prefixes = [family for family in _families if fault.name.startswith(f"{family.name}_")]
    return max(prefixes, key=lambda family: len(family.name), default=None)


def families_with(fault: Mutation) -> tuple[Family, ...]:
    """Returns the families in which a fault is looked for: its own, or those with all shared code."""
    own = fault_family(fault)
    return tuple(family for family in _families if family.has_all_shared_code) if own is None else (own,)


def fault_kind(fault: Mutation) -> str:
    """Returns the name of a fault without that of its family."""
    own = fault_family(fault)
    return fault.name if own is None else fault.name.removeprefix(f"{own.name}_")


def is_reachable(fault: Mutation, arch: Arch) -> bool:
    """True if some family with the fault runs on the architecture."""
    own = fault_family(fault)
    return own is None or own.runs_on(arch)


def tile_sizes() -> frozenset[int]:
    """Returns every length of a tile of any family, in queries or keys: calls on either side take different paths."""
    return frozenset().union(*(family.tile_sizes() for family in _families))
