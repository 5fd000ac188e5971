"""From a trial that fails to the smallest one that still does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from flashtile.lab.check.trial import Trial
from flashtile.testing import Case

_PLAIN = Case()
# Dropped one by one, the rarest first: what stays is what the failure needs
_OPTIONS = (
    "num_splits", "has_max_lengths", "is_out_float32", "is_bias_float32", "alibi", "has_sinks", "softcap",
    "origin", "dropout_p", "mask", "bias", "has_junk_pages", "has_leftpad",
    "scale", "window", "causal", "deterministic", "values", "memory", "dout", "kind", "page_size", "layout", "dtype",
)  # fmt: skip
_SIZES = ("batch", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def shrink(trial: Trial, fails: Callable[[Trial], bool], seconds: float, clock: Callable[[], float]) -> Trial:
    """Takes the first smaller trial that fails, again and again, until none does or the time is over."""
    deadline = clock() + seconds
    tried = {trial}
    while True:
        for smaller in candidates(trial):
            if clock() > deadline:
                return trial
            if smaller in tried:
                continue
            tried.add(smaller)
            if fails(smaller):
                trial = smaller
                break
        else:
            return trial


def candidates(trial: Trial) -> Iterator[Trial]:
    """Trials one step smaller, the largest steps first."""
    case = trial.case

    def change(**changes: Any) -> Trial:
        return dataclasses.replace(trial, case=dataclasses.replace(case, **changes))

    if trial.has_backward:
        yield dataclasses.replace(trial, has_backward=False)
    group = case.heads // case.heads_kv
    for heads_kv in _below(case.heads_kv):
        yield change(heads=heads_kv * group, heads_kv=heads_kv)
    for smaller_group in _below(group):
        yield change(heads=case.heads_kv * smaller_group)
    for name in _SIZES:
        for size in _below(getattr(case, name)):
            yield change(**{name: size})
    for name in _OPTIONS:
        if getattr(case, name) != getattr(_PLAIN, name):
            yield change(**{name: getattr(_PLAIN, name)})
    for axes in (case.mask, case.bias):
        name = "mask" if axes is case.mask else "bias"
        for axis in axes or "":
            if len(axes or "") > 1:
                yield change(**{name: (axes or "").replace(axis, "")})
    left, right = case.window
    for smaller_window in dict.fromkeys(((left // 2, right), (left, right // 2))):
        if smaller_window != case.window and min(smaller_window) >= -1:
            yield change(window=smaller_window)


def _below(size: int) -> list[int]:
    """Smaller sizes to try, the smallest first."""
    return [smaller for smaller in dict.fromkeys((1, size // 4, size // 2, size - 1)) if 0 < smaller < size]
