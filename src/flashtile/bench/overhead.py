"""Host time of one call: no_grad and grad, one repeated shape and keys that grow by one at every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from flashtile.bench import timing
from flashtile.bench.points import Point
from flashtile.bench.providers import Attend, Provider, missing
from flashtile.bench.rows import Environment, OverheadRow
from flashtile.bench.sweep import Refusal, refusing

NUM_ROUNDS = 20
NUM_CALLS = 50  # few enough to fit in the launch queue of a GPU
_SMALL_SEQLEN = 64


def rows(
    providers: Sequence[Provider], point: Point, device: str, env: Environment, on_step: Callable[[str], None] = lambda name: None
) -> Iterator[list[OverheadRow]]:
    """Four rows for each provider."""
    for provider in providers:
        on_step(provider.name)
        yield [_measure(provider, point, device, env, mode, case) for mode in ("no_grad", "grad") for case in ("repeated", "growing")]


def _measure(provider: Provider, point: Point, device: str, env: Environment, mode: str, case: str) -> OverheadRow:
    empty = OverheadRow(provider.name, provider.is_baseline, mode, case, point.dtype, "refused", "", None, None, None, env)
    absent = missing(provider)
    if absent is not None:
        return replace(empty, reason=absent)
    is_growing = case == "growing"
    direction = "fwd" if mode == "no_grad" else "fwd+bwd"
    longest = _SMALL_SEQLEN + NUM_CALLS if is_growing else _SMALL_SEQLEN
    small = replace(point, seqlen_q=1 if is_growing else longest, seqlen_k=longest, has_growing_keys=is_growing, direction=direction)
    try:
        with refusing():
            inputs = small.make(device, seed=0)
            attend = provider.build(replace(small, is_causal=point.is_causal and not is_growing), inputs)
            leaves = inputs.leaves(provider.layout, mode == "grad")
            rows_axis = 1 if provider.layout == "bshd" else 2
            lengths = range(_SMALL_SEQLEN + 1, longest + 1) if is_growing else [longest] * NUM_CALLS
            calls = [(leaves.q, leaves.k.narrow(rows_axis, 0, n), leaves.v.narrow(rows_axis, 0, n)) for n in lengths]
            seconds = _time(attend, calls, device, mode == "grad")
    except Refusal as refusal:
        return replace(empty, status=refusal.status, reason=refusal.reason)
    median, p20, p80 = (timing.quantile(seconds, fraction) * 1e6 for fraction in (0.5, 0.2, 0.8))
    return replace(empty, status="ok", median_us=median, p20_us=p20, p80_us=p80)


def _time(attend: Attend, calls: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], device: str, has_grad: bool) -> list[float]:
    """Seconds per call until the host is free again, one entry a round."""
    seconds = []
    with attend.context(), torch.set_grad_enabled(has_grad):
        for _ in range(NUM_ROUNDS + 2):
            timing.synchronize(device)
            begin = time.perf_counter_ns()
            for q, k, v in calls:
                attend.call(q, k, v)
            seconds.append((time.perf_counter_ns() - begin) / 1e9 / len(calls))
    timing.synchronize(device)
    return seconds[2:]
