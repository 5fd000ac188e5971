"""Measures a plan point by point: accuracy, memory and time of every provider on the same inputs."""

from __future__ import annotations

import gc
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.lab.bench import memory, nvml, protocol, timing
from flashtile.lab.bench.accuracy import Check, Verdict
from flashtile.lab.bench.device import cache_bytes, free_bytes
from flashtile.lab.bench.points import Inputs, Plan, Point
from flashtile.lab.bench.providers import Attend, Provider, missing
from flashtile.lab.bench.rows import Environment, Row, shared_fields
from flashtile.lab.bench.timing import Contender, Thunk

MAX_COPIES = 256
MAX_GRAPHS = 8  # copies whose autograd graph is kept for the backward pass
_LONG_S = 0.1  # after an interrupt slower calls are not repeated
_ROTATION = 1.5  # bytes of all copies over the cache size


@dataclass(frozen=True)
class Settings:
    """Limits of a run. Seconds are wall time."""

    device: str
    cache_bytes: int
    budget_s: float  # for the timed calls of one provider at one point
    call_limit_s: float  # calls expected to take longer are skipped
    compile_limit_s: float  # first calls of one provider, summed over the run
    use_graph: bool = False
    copy_gb_per_s: float | None = None  # measured where bandwidth is what counts
    seed: int = 0  # of the order in which providers take turns
    protocols: tuple[protocol.Protocol, ...] = ()  # none: plain rounds
    probe: nvml.Probe = field(default_factory=nvml.Probe)


def gpu_settings(budget_s: float = 0.08) -> Settings:
    """Returns the limits of a run of fixed problems on the GPU."""
    return Settings("cuda", cache_bytes("cuda"), budget_s, call_limit_s=6.0, compile_limit_s=150.0)


@dataclass(frozen=True)
class _LastCall:
    """Time and memory of the last call of a provider, and its point."""

    point: Point
    seconds: float
    memory_bytes: int


@dataclass
class _Measured:
    provider: Provider
    attend: Attend
    contender: Contender
    first_s: float
    memory_bytes: int
    verdict: Verdict


class Refusal(Exception):  # noqa: N818, an outcome rather than an error
    """A provider is not measured at a point. Has the status and the reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Interrupted(Exception):  # noqa: N818, an outcome rather than an error
    """A point was interrupted. Has the rows of the providers that were done."""

    def __init__(self, rows: list[Row]):
        super().__init__(f"{len(rows)} rows")
        self.rows = rows


@dataclass
class Sweep:
    """A run. It records time and memory of each provider, to predict and skip calls that exceed the limits."""

    plan: Plan
    providers: Sequence[Provider]
    settings: Settings
    env: Environment
    _seen: dict[tuple[Any, ...], _LastCall] = field(default_factory=dict)
    _compile_s: dict[str, float] = field(default_factory=dict)
    _order: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._order.seed(self.settings.seed)

    def rows(self, on_step: Callable[[Point, str], None] = lambda point, name: None) -> Iterator[list[Row]]:
        """Yields the rows of each point. A package that is not installed gets one row, at the first point. After an
        interrupt it yields the rows of the providers that were done, and passes the interrupt on."""
        absent = {provider.name: reason for provider in self.providers if (reason := missing(provider)) is not None}
        present = [provider for provider in self.providers if provider.name not in absent]
        for index, point in enumerate(self.plan.points):
            refused = [
                self._row(p, point, "refused", absent[p.name])
                for p in self.providers
                if p.name in absent and index == 0
            ]
            try:
                found = self._measure(point, present, on_step)
            except Interrupted as interrupted:
                yield interrupted.rows
                raise KeyboardInterrupt from None
            yield found + refused
            self._release()

    def _measure(self, point: Point, present: Sequence[Provider], on_step: Callable[[Point, str], None]) -> list[Row]:
        device = self.settings.device
        try:
            copies, check = self._inputs(point)
        except Refusal as refusal:
            return [self._row(provider, point, refusal.status, refusal.reason) for provider in present]
        outcomes: dict[str, Row | _Measured] = {}
        try:
            for provider in present:
                on_step(point, provider.name)
                try:
                    self._check_limits(provider, point)
                    outcomes[provider.name] = self._prepare(provider, point, copies, check)
                except Refusal as refusal:
                    outcomes[provider.name] = self._row(provider, point, refusal.status, refusal.reason)
                    if refusal.status == "oom":
                        self._release()
            on_step(point, "timing")
            self._time([one for one in _contenders(outcomes) if not one.seconds])
        except KeyboardInterrupt:
            on_step(point, "the providers that are prepared")
            _finish(_contenders(outcomes), device)
            raise Interrupted(self._rows_of(outcomes, point, len(copies))) from None
        return self._rows_of(outcomes, point, len(copies))

    def _time(self, contenders: Sequence[Contender]) -> None:
        settings = self.settings
        if settings.protocols:
            protocol.measure(
                contenders, settings.device, settings.protocols, self._order, settings.budget_s, settings.probe
            )
        else:
            timing.interleave(contenders, settings.device, settings.budget_s, self._order)

    def _rows_of(self, outcomes: Mapping[str, Row | _Measured], point: Point, copies: int) -> list[Row]:
        return [
            outcome if isinstance(outcome, Row) else self._timed_row(outcome, point, copies)
            for outcome in outcomes.values()
        ]

    def _inputs(self, point: Point) -> tuple[list[Inputs], Check]:
        """The inputs of all providers. Raises Refusal if there is no memory for them."""
        device, count = self.settings.device, num_copies(point, self.settings.cache_bytes)
        need = count * sum(point.sizes()) + point.extra_bytes() + Check.num_bytes(point)
        if device == "cpu" and need > (free := free_bytes()):
            raise Refusal("oom", f"the inputs need {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
        with refusing():
            extras = point.make_extras(device)
            copies = [replace(point.make(device, seed), extras=extras) for seed in range(count)]
            return copies, Check(point, copies[0])

    def _release(self) -> None:
        """Frees memory for the next provider."""
        gc.collect()
        if self.settings.device == "cuda":
            torch.cuda.empty_cache()

    def _check_limits(self, provider: Provider, point: Point) -> None:
        """Raises Refusal if the call is predicted to take too long, or more memory than is free."""
        spent, limit = self._compile_s.get(provider.name, 0.0), self.settings.compile_limit_s
        if spent > limit:
            raise Refusal(
                "slow",
                f"its first calls took {spent:.0f} s of this run already, over {limit:g} s; raise --compile-limit",
            )
        seen = self._seen.get(self._key(provider, point))
        if seen is None:
            return
        growth, limit = point.flops() / seen.point.flops(), self.settings.call_limit_s
        if seen.seconds * growth > limit:
            before = f"{seen.seconds:.2g} s at seqlen {seen.point.seqlen_k}"
            raise Refusal(
                "slow",
                (
                    f"a call would take about {seen.seconds * growth:.1f} s ({before}), over {limit:g} s; "
                    "raise --call-limit"
                ),
            )
        if self.settings.device == "cpu" and seen.memory_bytes * growth > (free := free_bytes()):
            need = f"{seen.memory_bytes * growth / 2**30:.1f} GiB if its memory grows as its work"
            raise Refusal("oom", f"a call may need {need}, and {free / 2**30:.1f} GiB are free")

    def _key(self, provider: Provider, point: Point) -> tuple[Any, ...]:
        return provider.name, point.direction, point.head_dim, point.is_causal, point.dtype, point.option

    def _prepare(self, provider: Provider, point: Point, copies: Sequence[Inputs], check: Check) -> _Measured:
        """Everything but the timing: build, first call, accuracy, memory, thunks to time."""
        device, has_grad = self.settings.device, point.direction != "fwd"
        stream = torch.cuda.Stream() if self.settings.use_graph else None
        with refusing():
            attend = provider.build(point, copies[0])
            with self._context(attend, has_grad, stream):
                # On a GPU memory of its own: what another provider read with a higher priority stays in L2 for long
                is_own = device == "cuda" and attend.arrange is None
                some = copies[: MAX_GRAPHS if has_grad else None]
                leaves = [copy.leaves(provider.layout, has_grad, is_own) for copy in some]
                leaves = leaves if attend.arrange is None else [attend.arrange(inputs) for inputs in leaves]
                (out, grads), first_s = timing.once(partial(run, attend, leaves[0], has_grad), device)
                same = None if grads is None else (*(_bhsd(grad, provider) for grad in grads[:3]), *grads[3:])
                verdict = check.verdict(_bhsd(out, provider), same, provider.max_relative_error)
                del out, grads
                thunks = [make_thunk(attend, inputs, point.direction) for inputs in leaves]
                call_s = timing.once(thunks[0], device)[1]
                if call_s < 0.1:
                    call_s = min(timing.once(thunks[-1], device)[1] for _ in range(2))
                peak = memory.peak_bytes(partial(run, attend, leaves[0], has_grad), device)
                calls_per_thunk = 1
                if stream is not None:
                    calls_per_thunk, thunks = len(thunks), [timing.capture(thunks, stream)]
        self._seen[self._key(provider, point)] = _LastCall(point, call_s, peak)
        self._compile_s[provider.name] = self._compile_s.get(provider.name, 0.0) + max(0.0, first_s - 3.5 * call_s)
        contender = Contender(
            provider.name, thunks, call_s, partial(self._context, attend, has_grad, None), calls_per_thunk
        )
        if call_s > self.settings.call_limit_s:
            contender.seconds.append(call_s)
        return _Measured(provider, attend, contender, first_s, peak, verdict)

    @contextmanager
    def _context(self, attend: Attend, has_grad: bool, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with (
            attend.context(),
            torch.set_grad_enabled(has_grad),
            nullcontext() if stream is None else torch.cuda.stream(stream),
        ):
            yield

    def _timed_row(self, one: _Measured, point: Point, copies: int) -> Row:
        contender, verdict, memory_bytes = one.contender, one.verdict, one.memory_bytes
        name, timed = protocol.leading(contender)
        median, p20, p80 = (timing.quantile(timed.seconds, fraction) for fraction in (0.5, 0.2, 0.8))
        status = "inaccurate" if verdict.complaint else "ok"
        return replace(
            self._row(one.provider, point, status, verdict.complaint),
            detail=one.attend.detail,
            median_ms=median * 1e3,
            p20_ms=p20 * 1e3,
            p80_ms=p80 * 1e3,
            num_rounds=len(timed.seconds),
            num_calls=timed.num_calls,
            num_copies=min(copies, MAX_GRAPHS) if point.direction != "fwd" else copies,
            timer="graph"
            if self.settings.use_graph
            else {"cuda": "events", "cpu": "perf_counter"}[self.settings.device],
            first_call_ms=one.first_s * 1e3,
            tflops=point.flops() / median / 1e12,
            gb_per_s=point.least_bytes() / median / 1e9,
            copy_gb_per_s=self.settings.copy_gb_per_s,
            memory_bytes=memory_bytes,
            max_error=verdict.max_error if verdict.is_checked else None,
            yardstick_error=verdict.yardstick_error if verdict.is_checked else None,
            relative_error=verdict.relative_error if verdict.is_checked else None,
            is_accurate=not verdict.complaint if verdict.is_checked else None,
            checked=verdict.checked,
            protocol=name,
            **_columns(contender),
        )

    def _row(self, provider: Provider, point: Point, status: str, reason: str) -> Row:
        """A row without a measurement."""
        empty: dict[str, Any] = {
            entry.name: "" if entry.type == "str" else None
            for entry in fields(Row)
            if not hasattr(point, entry.name) and entry.name != "env"
        }
        empty.update(
            sweep=self.plan.sweep,
            provider=provider.name,
            is_baseline=provider.is_baseline,
            status=status,
            reason=reason,
            seed=self.settings.seed,
        )
        return Row(**empty, **shared_fields(Row, point), env=self.env)


def _columns(contender: Contender) -> dict[str, Any]:
    """Returns the columns of the protocols by which a contender was timed."""
    alone = protocol.complete(contender, protocol.ALONE.name)
    found: dict[str, Any] = {"alone_ms": None if alone is None else alone.median_s * 1e3}
    for name in protocol.NAMES:
        if (timed := protocol.complete(contender, name)) is not None:
            found |= {
                f"{name}_ms": timed.median_s * 1e3,
                f"{name}_clock_mhz": nvml.clock_mhz(timed.samples),
                f"{name}_power_w": nvml.power_w(timed.samples),
                f"{name}_joules": timed.joules,
            }
    return found


def _contenders(outcomes: Mapping[str, Row | _Measured]) -> list[Contender]:
    return [outcome.contender for outcome in outcomes.values() if isinstance(outcome, _Measured)]


def _finish(contenders: Sequence[Contender], device: str) -> None:
    """Gives those that an interrupt has left without enough rounds the least number of them, or, where that would take
    long, the time of their last call."""
    left = [one for one in contenders if len(protocol.leading(one)[1].seconds) < timing.MIN_ROUNDS]
    for one in left:
        if one.call_s * one.calls_per_thunk > _LONG_S and not one.seconds:
            one.seconds.append(one.call_s)
    timing.interleave([one for one in left if not one.seconds or one.call_s <= _LONG_S], device, budget_s=0.0)


def num_copies(point: Point, cache_bytes: int) -> int:
    """Number of input copies so that, used in rotation, none is still in the cache."""
    return max(1, min(MAX_COPIES, math.ceil(_ROTATION * cache_bytes / max(1, sum(point.sizes())))))


def run(attend: Attend, inputs: Inputs, has_grad: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    out = attend.call(inputs.q, inputs.k, inputs.v)
    if not has_grad:
        return out, None
    return out.detach(), torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v, *attend.leaves), inputs.dout)


def make_thunk(attend: Attend, inputs: Inputs, direction: str) -> Thunk:
    """The function to time."""
    if direction == "fwd":
        return partial(attend.call, inputs.q, inputs.k, inputs.v)
    if direction == "fwd+bwd":
        return partial(run, attend, inputs, True)
    out = attend.call(inputs.q, inputs.k, inputs.v)
    leaves = (inputs.q, inputs.k, inputs.v, *attend.leaves)
    return partial(torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True)


def _bhsd(tensor: Tensor, provider: Provider) -> Tensor:
    return tensor.transpose(1, 2) if provider.layout == "bshd" else tensor


@contextmanager
def refusing() -> Iterator[None]:
    """Turns any exception of a provider into a Refusal. Includes its warnings: SDPA gives its reasons there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except Refusal:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if (
                isinstance(error, (torch.OutOfMemoryError, MemoryError))
                or "allocate memory" in reason
                or "out of memory" in reason
            ):
                raise Refusal("oom", f"out of memory: {reason[:300]}") from error
            said = [
                str(warning.message).partition(" (Triggered")[0]
                for warning in caught
                if issubclass(warning.category, UserWarning)
            ]
            raise Refusal("refused", "; ".join([reason[:400], *dict.fromkeys(said)])[:800]) from error
