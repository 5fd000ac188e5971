"""The measured time of every family, backend and torch kernel, from speeds.csv.

tools/measure_speeds.py writes the table on a GPU. A row is the median time in microseconds of one reference call: an
arch or "cpu", an op, a dtype, a head dim, an option, and a size. "large" calls are bound by their arithmetic; "small"
ones, under ManyScores' limit, by the host's launch. Times are compared within one kind of call and say nothing about
others.

Selection takes the fastest backend that accepts a call; what is more than SLOW times behind the best known warns
(backends/registry.py). Kernel families are told apart by large calls alone (families/__init__.py).
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flashtile.plans.arch import MEASURED_ARCH, has_mma_sync_alone
from flashtile.plans.length_class import ManyScores
from flashtile.plans.spec import Features

TABLE = Path(__file__).with_name("speeds.csv")
SIZE = ManyScores(22)  # 4 million scores: under that, launches take longer than the products of any kernel
SLOW = 2.0
# The reference calls: (batch, heads, length)
LARGE = {"cuda": (2, 16, 4096), "cpu": (1, 4, 1024)}
# 16-bit products of these are wgmma on the measured GPU, and mma.sync on a GPU that has nothing else
BY_WGMMA = frozenset({"triton", "flex", "sdpa-cudnn"})
OPS = ("forward", "backward")


class Kind(NamedTuple):
    """The calls whose times are compared."""

    arch: str  # sm_90 and so on, without a suffix, or "cpu"
    op: str
    dtype: str
    head_dim: int  # the larger of the two
    options: tuple[str, ...]  # some of OPTIONS; none: plain, causal or with a window
    is_large: bool


OPTIONS = ("mask", "bias", "alibi", "softcap", "dropout", "lengths", "paged")  # the slowest of a call counts
PLAIN = "plain"


def kind(arch: str, op: str, dtype: str, head_dims: tuple[int, int], features: Features, is_large: bool) -> Kind:
    """The kind of a call by its features."""
    has = {
        "mask": features.has_bool_mask,
        "bias": features.bias_dtype is not None,
        "alibi": features.has_alibi,
        "softcap": features.has_softcap,
        "dropout": features.has_dropout,
        "lengths": features.has_lengths,
        "paged": features.is_paged,
    }
    return Kind(arch, op, dtype, max(head_dims), tuple(name for name in OPTIONS if has[name]), is_large)


class _Row(NamedTuple):
    arch: str
    op: str
    dtype: str
    option: str
    size: str
    head_dim: int
    us: dict[str, float]  # by provider


@functools.cache
def _table() -> tuple[_Row, ...]:
    found: dict[tuple[str, str, str, str, str, int], dict[str, float]] = {}
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                key = (row["arch"], row["op"], row["dtype"], row["option"], row["size"], int(row["head_dim"]))
                found.setdefault(key, {})[row["provider"]] = float(row["us"])
    return tuple(_Row(*key, us) for key, us in found.items())


@functools.cache
def is_measured(arch: str) -> bool:
    """True if the table has times of calls on the architecture, or on a CPU."""
    return any(row.arch == arch for row in _table())


@functools.cache
def _row(kind: Kind, option: str) -> _Row | None:
    """Returns the row of one option: that of the smallest measured head dim that holds the call's, else of the largest.
    Kernels take float16 and bfloat16 in the same time."""
    dtype = "bfloat16" if kind.dtype == "float16" else kind.dtype
    arch = kind.arch if is_measured(kind.arch) else MEASURED_ARCH
    same = [
        row
        for row in _table()
        if (row.arch, row.op, row.dtype, row.option) == (arch, kind.op, dtype, option)
        and row.size == ("large" if kind.is_large else "small")
    ]
    if not same or (arch != kind.arch and kind.arch == "cpu"):
        return None
    holding = [row for row in same if row.head_dim >= kind.head_dim]
    return min(holding, key=lambda row: row.head_dim) if holding else max(same, key=lambda row: row.head_dim)


def time_us(provider: str, kind: Kind, by_mma_sync: Iterable[str]) -> float | None:
    """The provider's time for this kind of call, that of its slowest option; None where it is not known.

    On a GPU with mma.sync alone, a provider that was measured with wgmma is taken to need at least the time of the
    fastest of `by_mma_sync` for a plain call, and for an option what it costs the provider on the measured GPU."""
    if provider not in BY_WGMMA or not _has_mma_sync_alone(kind):
        return _measured_us(provider, kind)
    plain = kind._replace(options=())
    least = [us for name in by_mma_sync if (us := _measured_us(name, plain)) is not None]
    us, plain_us = _measured_us(provider, kind), _measured_us(provider, plain)
    if not least or us is None or plain_us is None:
        return None
    return max(min(least) * (us / plain_us), us)


def _has_mma_sync_alone(kind: Kind) -> bool:
    """A 16-bit call on a GPU that was not measured and has neither wgmma nor tcgen05."""
    if kind.arch == "cpu" or is_measured(kind.arch) or kind.dtype not in ("float16", "bfloat16"):
        return False
    return has_mma_sync_alone(kind.arch)


def _measured_us(provider: str, kind: Kind) -> float | None:
    options = kind.options or (PLAIN,)
    known = [us for option in options if (us := _option_us(provider, kind, option)) is not None]
    if known:
        return max(known)
    plain = _row(kind, PLAIN)
    return None if plain is None else plain.us.get(provider)


def _option_us(provider: str, kind: Kind, option: str) -> float | None:
    """Measured, or as if the option cost the provider as much as it costs the one that loses most by it."""
    row = _row(kind, option)
    if row is None or provider in row.us:
        return None if row is None else row.us[provider]
    plain = _row(kind._replace(head_dim=row.head_dim), PLAIN)
    if plain is None or provider not in plain.us or row.head_dim < kind.head_dim:
        return None
    costs = [us / plain.us[name] for name, us in row.us.items() if name in plain.us]
    return plain.us[provider] * max(costs) if costs else None


def best_known(kind: Kind, absent: frozenset[str] = frozenset()) -> tuple[str, float] | None:
    """(provider, its time): the fastest of all that were measured for this kind of call, torch's kernels among them.
    absent: what the GPU does not have, where the times are those of another."""
    rows = [_row(kind, option) for option in kind.options or (PLAIN,)]
    times = [{} if row is None else row.us for row in rows]
    # One that was not measured with every option may not take it
    providers = frozenset(times[0]).intersection(*times[1:]) - absent
    if _has_mma_sync_alone(kind):
        providers -= BY_WGMMA
    us, name = min(((max(us[name] for us in times), name) for name in providers), default=(math.inf, ""))
    return (name, us) if name else None
