"""From a trial that fails to the smallest one that still does."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from flashtile.check.trial import Trial
from flashtile.testing import Case

_PLAIN = Case()
# Dropped one by one, the rarest first: what stays is what the failure needs
_OPTIONS = (
    "num_splits", "has_max_lengths", "is_out_float32", "is_bias_float32", "alibi", "has_sinks", "softcap", "dropout_p", "mask", "bias",
    "scale", "window", "causal", "deterministic", "values", "memory", "kind", "page_size", "layout", "dtype",
)  # fmt: skip
_SIZES = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")


def shrink(trial: Trial, fails: Callable[[Trial], bool], seconds: float) -> Trial:
    """Takes the first smaller trial that fails, again and again, until none does or the time is over."""
    deadline = time.monotonic() + seconds
    tried = {trial}
    while True:
        for smaller in candidates(trial):
            if time.monotonic() > deadline:
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
    for name in _SIZES:
        size = getattr(case, name)
        for smaller in dict.fromkeys((1, size // 4, size // 2, size - 1)):
            if 0 < smaller < size:
                if name == "heads":
                    # Sharing keys is kept for as long as it can be: heads fall to a multiple of heads_kv, or both to one number
                    for heads_kv in dict.fromkeys((min(case.heads_kv, smaller), smaller)):
                        if smaller % heads_kv == 0:
                            yield change(heads=smaller, heads_kv=heads_kv)
                else:
                    yield change(**{name: smaller})
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
