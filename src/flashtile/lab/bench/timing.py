"""Timing: interleaved rounds over the contenders, and quantiles."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

Thunk = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)

MIN_ROUNDS, MAX_ROUNDS = 3, 60
MAX_CALLS = 200  # per round: more would fill the launch queue of a GPU
_SECONDS_PER_ROUND = 0.004
_SHORT_SECONDS = 0.02  # faster calls get an untimed warm-up call before each round


def quantile(values: Sequence[float], fraction: float) -> float:
    """The quantile, with linear interpolation between neighbouring values."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass
class Contender:
    """A function to time: one thunk per copy of the inputs, and the estimated time of a call."""

    name: str
    thunks: Sequence[Thunk]
    call_s: float
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls_per_thunk: int = 1  # a captured graph holds several calls
    seconds: list[float] = field(default_factory=list)  # per call, one entry per round
    timed: dict[str, Any] = field(default_factory=dict)  # by the protocols of bench/protocol.py: their Timed
    num_calls: int = 1
    _next: int = 0

    def run(self) -> None:
        self.thunks[self._next % len(self.thunks)]()
        self._next += 1


def interleave(
    contenders: Sequence[Contender], device: str, budget_s: float, order: random.Random | None = None
) -> None:
    """Fills `seconds` of each contender. Every round runs all contenders, so that clock drift affects all alike: in
    their order, or with `order` in a new random one.

    A slow contender takes part in fewer, evenly spread rounds, so that its total time stays near the budget.
    """
    named, wanted = {contender.name: contender for contender in contenders}, dict[str, int]()
    for contender in contenders:
        thunk_s = max(contender.call_s * contender.calls_per_thunk, 1e-7)
        contender.num_calls = max(1, min(MAX_CALLS, round(_SECONDS_PER_ROUND / thunk_s)))
        wanted[contender.name] = max(MIN_ROUNDS, min(MAX_ROUNDS, round(budget_s / (thunk_s * contender.num_calls))))
    for name in turns(wanted, order):
        named[name].seconds.append(batch(named[name], device) / named[name].calls_per_thunk)


def turns(wanted: Mapping[Key, int], order: random.Random | None = None) -> Iterator[Key]:
    """Yields each key as often as it is wanted, evenly spread over the rounds; with `order` each round has a random
    order of its own."""
    num_rounds = max(wanted.values(), default=0)
    for index in range(num_rounds):
        keys = list(wanted)
        if order is not None:
            order.shuffle(keys)
        for key in keys:
            share = wanted[key] / num_rounds
            if math.floor((index + 1) * share + 1e-9) > math.floor(index * share + 1e-9):
                yield key


def batch(contender: Contender, device: str) -> float:
    """Average seconds per thunk over one batch of calls."""
    with contender.context():
        if contender.call_s < _SHORT_SECONDS:
            contender.run()
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(contender.num_calls):
                contender.run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / contender.num_calls
        begin = time.perf_counter_ns()
        for _ in range(contender.num_calls):
            contender.run()
        return (time.perf_counter_ns() - begin) / 1e9 / contender.num_calls


def median_ms(thunks: Mapping[Key, Thunk], rounds: int, calls: int = 2) -> dict[Key, float]:
    """Median time of each thunk over interleaved rounds of a few calls, each after an untimed call."""
    times: dict[Key, list[float]] = {key: [] for key in thunks}
    for _ in range(rounds):
        for key, thunk in thunks.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            thunk()
            start.record()
            for _ in range(calls):
                thunk()
            end.record()
            end.synchronize()
            times[key].append(start.elapsed_time(end) / calls)
    return {key: statistics.median(found) for key, found in times.items()}


def once(thunk: Thunk, device: str) -> tuple[Any, float]:
    """Runs one call to completion. Returns its result and the wall time."""
    synchronize(device)
    begin = time.perf_counter_ns()
    result = thunk()
    synchronize(device)
    return result, (time.perf_counter_ns() - begin) / 1e9


def rest(seconds: float) -> None:
    """Leaves the device idle."""
    time.sleep(seconds)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def capture(thunks: Sequence[Thunk], stream: torch.cuda.Stream) -> Thunk:
    """A CUDA graph that contains a call of every thunk. A replay has no host time per call."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for thunk in thunks:
            thunk()
    return partial(_replay, graph, thunks)


def _replay(graph: torch.cuda.CUDAGraph, kept: Sequence[Thunk]) -> None:
    """Replays a graph. `kept` keeps alive the tensors that the graph reads."""
    graph.replay()
