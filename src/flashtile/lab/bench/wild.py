"""`flashtile bench --grid wild`: random calls of the kinds that models make, ours beside the peers that take them.

On a GPU each call is timed twice: by its kernels alone (a CUDA graph) and in an eager loop. Every round has its own
random order; where the best peer is not clearly behind, the call is timed again with more rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flashtile.lab.bench import compare, join, protocol, tables, timing
from flashtile.lab.bench.calls import KINDS, Call, FirstSequence, make_inputs
from flashtile.lab.bench.points import Inputs, Point
from flashtile.lab.bench.protocol import Protocol
from flashtile.lab.bench.providers import AUTOMATIC, Attend, Provider, missing
from flashtile.lab.bench.random_runs import Job, Lost, Selection, release
from flashtile.lab.bench.rows import Environment
from flashtile.lab.bench.sweep import MAX_GRAPHS, Refusal, make_thunk, num_copies, refusing, run
from flashtile.lab.bench.timing import Contender

GPU_PROVIDERS = "flashtile,sdpa-cudnn,sdpa-flash,sdpa-efficient,torch-varlen"
CPU_PROVIDERS = "flashtile,sdpa,torch-varlen"
BEHIND = 0.97  # ratios below are behind
CLOSE = 1.03  # ratios below are measured again
_MAX_COPIES = 32
ROUNDS = Protocol("wild", 0.004, 0.0, 5, 0.0, timing.MAX_CALLS, least_batches=5)
AGAIN = replace(ROUNDS, num_batches=20, least_batches=20)


@dataclass(frozen=True)
class WildRow:
    """One provider at one call, in one pass and mode. Without a measurement times are None, and `reason` says why."""

    seed: int
    call: int  # its number among those of the seed
    kind: str
    words: str  # the call
    direction: str  # fwd or fwd+bwd
    mode: str  # kernel: a CUDA graph is replayed; eager: calls in a loop
    provider: str
    is_baseline: bool
    detail: str
    status: str  # ok, refused, oom, inaccurate or crashed
    reason: str
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    num_rounds: int | None
    env: Environment

    @property
    def us(self) -> float | None:
        """Returns the time of an accurate result."""
        return self.median_us if self.status == "ok" else None


@dataclass(frozen=True)
class Prepared:
    """A provider that has taken a call: its contenders by mode."""

    attend: Attend
    contenders: dict[str, Contender]
    refused: dict[str, Refusal]  # by mode: calls that cannot be captured have no kernel time
    complaint: str


@dataclass(frozen=True)
class Bench:
    """The device, the providers and the order that the calls of a run share."""

    device: str
    cache_bytes: int
    providers: Sequence[Provider]
    env: Environment
    seed: int
    order: random.Random
    absent: dict[str, str]  # provider -> why its package cannot be used

    @property
    def modes(self) -> tuple[str, ...]:
        return ("kernel", "eager") if self.device == "cuda" else ("eager",)

    def measure(self, call: Call, on_step: Callable[[str], None]) -> list[WildRow]:
        """Returns the rows of a call: of every pass, mode and provider. Raises Lost with those it has."""
        found = list[WildRow]()
        for direction in ("fwd", "fwd+bwd") if call.is_trained else ("fwd",):
            try:
                found += self._measure(call, direction, on_step)
            except Lost as lost:
                raise Lost([*found, *lost.rows], str(lost)) from lost
        return found

    def _measure(self, call: Call, direction: str, on_step: Callable[[str], None]) -> list[WildRow]:
        point, rows, prepared = call.in_pass(direction), list[WildRow](), dict[str, Prepared]()
        blank = {one.name: self._blank(call, direction, one) for one in self.providers}
        with lost_on(call, direction, "inputs", self.device, rows):
            try:
                with refusing():
                    copies = make_inputs(point, self.device, min(_MAX_COPIES, num_copies(point, self.cache_bytes)))
                    check = FirstSequence(point, copies[0])
            except Refusal as refusal:
                return [replace(row, status=refusal.status, reason=refusal.reason) for row in blank.values()]
        for provider in self.providers:
            on_step(f"{direction} {provider.name}")
            row = blank[provider.name]
            with lost_on(call, direction, provider.name, self.device, rows, row):
                try:
                    if provider.name in self.absent:
                        raise Refusal("refused", self.absent[provider.name])
                    prepared[provider.name] = prepare_call(
                        provider, point, copies, check, self.device, has_graph="kernel" in self.modes
                    )
                except Refusal as refusal:
                    rows.append(replace(row, status=refusal.status, reason=refusal.reason))
                    if refusal.status == "oom":
                        release(self.device)
        for mode in self.modes:
            on_step(f"{direction} {mode}")
            with lost_on(call, direction, f"timing of {', '.join(prepared)}", self.device, rows):
                rows += self._time({blank[name]: one for name, one in prepared.items()}, mode)
        return rows

    def _time(self, prepared: Mapping[WildRow, Prepared], mode: str) -> list[WildRow]:
        """Returns the rows of one mode."""
        refused = {row: one.refused[mode] for row, one in prepared.items() if mode in one.refused}
        timed = {row: one for row, one in prepared.items() if mode not in one.refused}
        contenders = [one.contenders[mode] for one in timed.values()]
        try:
            with refusing():
                protocol.run(ROUNDS, contenders, self.device, self.order)
                ratio = ratio_of([self._timed(row, one, mode) for row, one in timed.items()])
                if ratio is not None and ratio < CLOSE:
                    protocol.run(AGAIN, contenders, self.device, self.order)
        except Refusal as refusal:  # of one of them: what has been measured so far has gaps
            refused |= dict.fromkeys(timed, refusal)
            timed = {}
        found = [self._timed(row, one, mode) for row, one in timed.items()]
        return found + [
            replace(row, mode=mode, status=refusal.status, reason=refusal.reason) for row, refusal in refused.items()
        ]

    def _blank(self, call: Call, direction: str, provider: Provider) -> WildRow:
        names = (provider.name, provider.is_baseline)
        return WildRow(
            *(call.seed, call.number, call.kind, call.words(), direction, "", *names, "", "refused", ""),
            *(None, None, None, None, self.env),
        )

    def _timed(self, row: WildRow, one: Prepared, mode: str) -> WildRow:
        timed = one.contenders[mode].timed[ROUNDS.name]
        median, p20, p80 = (timing.quantile(timed.seconds, part) * 1e6 for part in (0.5, 0.2, 0.8))
        status = "inaccurate" if one.complaint else "ok"
        times = {"median_us": median, "p20_us": p20, "p80_us": p80, "num_rounds": len(timed.seconds)}
        row = replace(row, mode=mode, detail=one.attend.detail, status=status, reason=one.complaint)
        return replace(row, **times)  # type: ignore[arg-type]


@contextmanager
def lost_on(
    call: Call,
    direction: str,
    name: str,
    device: str,
    rows: list[WildRow],
    row: WildRow | None = None,
) -> Iterator[None]:
    """Raises Lost if the GPU takes no more work at the end: a fault in a kernel is reported by some later call."""
    try:
        yield
        timing.synchronize(device)
    except Exception as error:
        if is_alive(device):
            raise
        what = f"Call {call.number} ({direction} {call.words()}), {name}, left the GPU unusable: "
        reason = " ".join(str(error).split())[:200]
        if row is not None:  # in place of what it said before
            rows = [one for one in rows if one.provider != row.provider]
            rows.append(replace(row, status="crashed", reason=reason))
        raise Lost(rows, f"{what}{reason}.") from error


def is_alive(device: str) -> bool:
    """True if the device still takes work."""
    try:
        timing.synchronize(device)
        return torch.ones(1, device=device).item() == 1.0
    except RuntimeError:
        return False


def prepare_call(
    provider: Provider,
    point: Point,
    copies: Sequence[Inputs],
    check: FirstSequence,
    device: str,
    has_graph: bool,
) -> Prepared:
    """Builds the provider's call, checks its result and makes what is timed. Raises Refusal."""
    has_grad = point.direction != "fwd"
    stream = torch.cuda.Stream() if has_graph else None
    with refusing():
        # Inputs that require gradients, so that `detail` names the kernels of both passes
        attend = provider.build(point, replace(copies[0].leaves("bhsd", has_grad), extras=copies[0].extras))
        with calling(attend, has_grad, stream):
            some = copies[: MAX_GRAPHS if has_grad else None]
            leaves = [inputs.leaves(provider.layout, has_grad, device == "cuda") for inputs in some]
            leaves = leaves if attend.arrange is None else [attend.arrange(inputs) for inputs in leaves]
            (out, grads), _ = timing.once(partial(run, attend, leaves[0], has_grad), device)
            same = None if grads is None else [_heads_first(grad, provider) for grad in grads[:3]]
            complaint = check.complaint(_heads_first(out, provider), same, provider.max_relative_error)
            del out, grads, same
            thunks = [make_thunk(attend, inputs, point.direction) for inputs in leaves]
            call_s = min(timing.once(thunk, device)[1] for thunk in (thunks * 2)[:2])
            context = partial(calling, attend, has_grad, None)
            contenders = {"eager": Contender(provider.name, thunks, call_s, context)}
            refused = dict[str, Refusal]()
            if stream is not None:
                try:
                    with refusing():
                        graph = timing.capture(thunks, stream)
                        replay_s = min(timing.once(graph, device)[1] for _ in range(2)) / len(thunks)
                    contenders["kernel"] = Contender(provider.name, [graph], replay_s, context, len(thunks))
                except Refusal as refusal:
                    refused["kernel"] = refusal
    return Prepared(attend, contenders, refused, complaint)


@contextmanager
def calling(attend: Attend, has_grad: bool, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """The context of a provider's calls."""
    side = nullcontext() if stream is None else torch.cuda.stream(stream)
    with attend.context(), torch.set_grad_enabled(has_grad), side:
        yield


def _heads_first(tensor: Tensor, provider: Provider) -> Tensor:
    return tensor.transpose(1, 2) if provider.layout == "bshd" and tensor.dim() == 4 else tensor


def ratio_of(rows: Sequence[WildRow]) -> float | None:
    """Returns the best peer's time over ours, of rows of one call; None where one of both is missing."""
    ours = [row.us for row in rows if row.us and not row.is_baseline]
    peers = [row.us for row in rows if row.us and row.is_baseline]
    return min(peers) / min(ours) if ours and peers else None


@dataclass(frozen=True)
class Outcome:
    """One call in one pass and mode."""

    row: WildRow  # ours
    peer: WildRow
    ratio: float  # the peer's time over ours


def outcomes(rows: Sequence[WildRow]) -> list[Outcome]:
    """Returns the calls that ours and a peer have taken with right results."""
    found = []
    for here in join.groups(rows, lambda row: (row.call, row.direction, row.mode)).values():
        if (ratio := ratio_of(here)) is not None:
            ours, peer = (
                min((row for row in here if row.us and row.is_baseline == is_peer), key=lambda row: row.us or math.inf)
                for is_peer in (False, True)
            )
            found.append(Outcome(ours, peer, ratio))
    return found


def summary(rows: Sequence[WildRow]) -> list[tables.Table]:
    """A table for each pass and mode, a line for each kind; and what was not measured."""
    found = []
    header = ("", "calls", "geometric mean", f"behind (< {BEHIND})", "worst", "call", "peer")
    for (direction, mode), here in join.groups(outcomes(rows), lambda one: (one.row.direction, one.row.mode)).items():
        kinds = join.groups(here, lambda one: one.row.kind)
        groups = {kind: kinds[kind] for kind in KINDS if kind in kinds} | {"all": here}
        title = f"The best peer's time over ours: {direction}, {mode}"
        found.append(tables.Table(title, header, tuple(_line(kind, group) for kind, group in groups.items())))
    reasons = join.groups(
        (row for row in rows if row.status != "ok"), lambda row: (row.provider, row.status, _common(row.reason))
    )
    lines = tuple((*key, f"call {some[0].call}: {some[0].words}", str(len(some))) for key, some in reasons.items())
    return [*found, tables.Table("Not measured", ("provider", "status", "reason", "first", "times"), lines)]


def _common(reason: str) -> str:
    """Returns the beginning of a reason, without the sizes of a call."""
    return reason.split(";")[0][:100]


def _line(kind: str, group: Sequence[Outcome]) -> tuple[str, ...]:
    ratios, worst = [one.ratio for one in group], min(group, key=lambda one: one.ratio)
    behind = sum(ratio < BEHIND for ratio in ratios)
    mean = compare.geometric_mean(ratios)
    place = (f"{worst.ratio:.2f}", str(worst.row.call), worst.peer.provider)
    return kind, str(len(group)), f"{mean:.3f}", str(behind), *place


def alarms(reproduce: Callable[[int], str], rows: Sequence[WildRow]) -> list[str]:
    """Returns a line for every call that is behind, and for what of ours failed, each with how to measure it again."""
    found = []
    for one in sorted(outcomes(rows), key=lambda one: one.ratio):
        if one.ratio < BEHIND:
            row, peer = one.row, one.peer
            times = f"{tables.number(row.us or 0.0)} us, {peer.provider} {tables.number(peer.us or 0.0)}"
            found.append(
                f"{one.ratio:.2f} {row.direction} {row.mode} {row.words} ({row.detail}): {times}: {reproduce(row.call)}"
            )
    failed = [row for row in rows if not row.is_baseline and row.status not in ("ok", "refused")]
    for first, *_ in join.groups(failed, lambda row: (row.call, row.direction)).values():
        found.append(f"{first.status} {first.direction} {first.words}: {first.reason}: {reproduce(first.call)}")
    return found


def closing(rows: Sequence[WildRow]) -> str:
    """Returns the sum of a run in a line."""
    said = []
    for (direction, mode), here in join.groups(outcomes(rows), lambda one: (one.row.direction, one.row.mode)).items():
        ratios = [one.ratio for one in here]
        behind = sum(ratio < BEHIND for ratio in ratios)
        said.append(
            f"{direction} {mode} {compare.geometric_mean(ratios):.3f} ({behind} of {len(ratios)} behind, "
            f"worst {min(ratios):.2f})"
        )
    return f"flashtile, the best peer's time over ours: {'; '.join(said)}" if said else ""


def job(
    selection: Selection,
    providers: Sequence[Provider],
    device: str,
    cache_bytes: int,
    env: Environment,
    device_options: str,
) -> Job[WildRow]:
    """The run over the selected calls. Of ours, flashtile's own choice is measured if nothing else is named."""
    named = list(providers) if any(not one.is_baseline for one in providers) else [AUTOMATIC, *providers]
    absent = {one.name: reason for one in named if (reason := missing(one)) is not None}
    order = random.Random(f"order {selection.seed}")
    bench = Bench(device, cache_bytes, named, env, selection.seed, order, absent)
    made: Job[WildRow] = Job(
        name="wild",
        command="flashtile bench --grid wild",
        count=f" --points {len(selection.numbers)}",
        kind=WildRow,
        selection=selection,
        device=device,
        measure=bench.measure,
        summary=summary,
        alarms=lambda rows: alarms(made.reproduce, rows),
        closing=closing,
        device_options=device_options,
    )
    return made
