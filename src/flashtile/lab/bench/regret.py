"""`flashtile bench --regret N`: what the choice of a kernel costs. For random calls every kernel family of ours that
takes the call is timed, on a CPU every backend; then the chosen one and the fastest are timed again as a pair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flashtile import families
from flashtile.backends import registry
from flashtile.families import assemble
from flashtile.lab.bench import compare, join, protocol, tables
from flashtile.lab.bench.calls import KINDS, Call, FirstSequence, make_inputs
from flashtile.lab.bench.points import Inputs, Point
from flashtile.lab.bench.providers import AUTOMATIC, Provider, by_name, explained
from flashtile.lab.bench.random_runs import Job, Lost, Selection, release
from flashtile.lab.bench.rows import Environment
from flashtile.lab.bench.sweep import Refusal, num_copies, refusing
from flashtile.lab.bench.timing import Contender
from flashtile.lab.bench.wild import AGAIN, ROUNDS, is_alive, prepare_call

HIGH = 1.15  # regrets above are listed
_MAX_COPIES = 8
_CHOSEN = "chosen"
_CUDA = "cuda"  # the backend that has families


@dataclass(frozen=True)
class RegretRow:
    """One call in one pass: the time of what was chosen over that of the fastest."""

    seed: int
    call: int
    kind: str
    words: str
    direction: str  # fwd or bwd
    status: str  # ok, refused, oom or crashed
    reason: str
    chosen: str  # a family; on a CPU and of other backends the backend
    best: str
    regret: float | None  # 1 where the fastest was chosen
    chosen_us: float | None
    best_us: float | None
    others: str  # every other one with its time, or why it is not among them
    env: Environment


@dataclass(frozen=True)
class Candidate:
    """A way to run the call: one of our backends, and of the CUDA engine one of its families."""

    name: str
    provider: Provider
    family: str | None = None


def candidates(device: str, op: str) -> list[Candidate]:
    """Returns what a call may run on, whether it takes it or not: all families and the other automatic backends; on a
    CPU all backends that are no simulators."""
    if device == "cpu":
        names = [one.name for one in registry.BACKENDS if device in one.devices and one.name not in ("numba", "triton")]
        return [Candidate(name, by_name(name)) for name in names]
    named = [Candidate(family.name, by_name(_CUDA), family.name) for family in families.all_families(op)]
    other = [one for one in registry.BACKENDS if device in one.devices and one.is_automatic and one.name != _CUDA]
    return named + [Candidate(one.name, by_name(one.name)) for one in other if one.name != "tiled"]


@contextmanager
def forced(family: str | None) -> Iterator[None]:
    """Inside, calls on the CUDA engine take that family or are refused. No plan survives either end."""
    if family is None:
        yield
        return
    try:
        with families.forced(family):
            assemble.clear_plans()
            yield
    finally:
        assemble.clear_plans()


@dataclass(frozen=True)
class Bench:
    """The device and the order that the calls of a run share."""

    device: str
    cache_bytes: int
    env: Environment
    order: random.Random

    @property
    def mode(self) -> str:
        return "kernel" if self.device == "cuda" else "eager"

    def measure(self, call: Call, on_step: Callable[[str], None]) -> list[RegretRow]:
        """Returns a row for each pass."""
        found = list[RegretRow]()
        for direction in ("fwd", "bwd") if call.is_trained else ("fwd",):
            identity = (call.seed, call.number, call.kind, call.words(), direction)
            row = RegretRow(*identity, "refused", "", "", "", None, None, None, "", self.env)
            try:
                found.append(self._measure(call.in_pass(direction), row, on_step))
            except Refusal as refusal:
                found.append(replace(row, status=refusal.status, reason=refusal.reason))
            if not is_alive(self.device):
                crashed = replace(found[-1], status="crashed")
                said = f"Call {call.number} ({direction} {call.words()}) left the GPU unusable: {crashed.reason[:200]}."
                raise Lost([*found[:-1], crashed], said)
        return found

    def _measure(self, point: Point, row: RegretRow, on_step: Callable[[str], None]) -> RegretRow:
        with refusing():
            copies = make_inputs(point, self.device, min(_MAX_COPIES, num_copies(point, self.cache_bytes)))
            check = FirstSequence(point, copies[0])
        on_step(f"{point.direction} {_CHOSEN}")
        chosen, name = self._prepare(Candidate(_CHOSEN, AUTOMATIC), point, copies, check), ""
        contenders, left_out = {_CHOSEN: chosen}, list[str]()
        for one in candidates(self.device, "forward" if point.direction == "fwd" else "backward"):
            on_step(f"{point.direction} {one.name}")
            try:
                contenders[one.name] = self._prepare(one, point, copies, check)
            except Refusal as refusal:
                if not is_alive(self.device):
                    raise Refusal("crashed", f"{one.name}: {refusal.reason}") from refusal
                left_out.append(f"{one.name} {refusal.status}: {refusal.reason[:120]}")
                if refusal.status == "oom":
                    release(self.device)
        on_step(f"{point.direction} timing")
        with refusing():
            name = chosen_name(point, copies[0])
            protocol.run(ROUNDS, list(contenders.values()), self.device, self.order)
            times = {key: one.timed[ROUNDS.name].median_s for key, one in contenders.items() if key != _CHOSEN}
            best = min(times, key=lambda key: times[key], default=name)
            mine, fastest = times.get(name, chosen.timed[ROUNDS.name].median_s), times.get(best, 0.0)
            regret = 1.0
            if best != name:
                pair = [chosen, contenders[best]]
                protocol.run(AGAIN, pair, self.device, self.order)
                mine, fastest = (one.timed[AGAIN.name].median_s for one in pair)
                regret = max(1.0, mine / fastest)
        others = [f"{key} {tables.number(seconds * 1e6)}" for key, seconds in times.items() if key not in (name, best)]
        return replace(
            row,
            status="ok",
            chosen=name,
            best=best,
            regret=regret,
            chosen_us=mine * 1e6,
            best_us=fastest * 1e6,
            others="; ".join(others + left_out),
        )

    def _prepare(self, one: Candidate, point: Point, copies: Sequence[Inputs], check: FirstSequence) -> Contender:
        """Raises Refusal where the candidate does not take the call, or its result is wrong."""
        with forced(one.family):
            made = prepare_call(one.provider, point, copies, check, self.device, has_graph=self.mode == "kernel")
        if made.complaint:
            raise Refusal("inaccurate", made.complaint)
        if self.mode in made.refused:
            raise made.refused[self.mode]
        return replace(made.contenders[self.mode], name=one.name)


def chosen_name(point: Point, inputs: Inputs) -> str:
    """Returns the family that our call takes in the point's pass; of a backend without families its name."""
    has_grad = point.direction != "fwd"
    found = explained(None, point, inputs.leaves("bhsd", has_grad))
    backend = found.details.get("backward", found.backend) if has_grad else found.backend
    if backend != _CUDA:
        return backend
    known = families.all_families("backward" if has_grad else "forward")
    # Of the families all but the chosen one have a line that says why not
    return next((family.name for family in known if f"not {family.name}" not in found.details), backend)


def summary(rows: Sequence[RegretRow]) -> list[tables.Table]:
    """A table of the regrets of each pass and kind, and one of what was not measured."""
    measured = [row for row in rows if row.regret is not None]
    found, header = [], ("", "calls", "geometric mean", f"over {HIGH}", "worst", "call")
    for direction, here in join.groups(measured, lambda row: row.direction).items():
        kinds = join.groups(here, lambda row: row.kind)
        groups = {kind: kinds[kind] for kind in KINDS if kind in kinds} | {"all": here}
        title = f"Time of the choice over that of the fastest: {direction}"
        found.append(tables.Table(title, header, tuple(_line(kind, group) for kind, group in groups.items())))
    lines = tuple(
        (f"{row.call} {row.direction} {row.words}", row.status, row.reason) for row in rows if row.status != "ok"
    )
    return [*found, tables.Table("Not measured", ("call", "status", "reason"), lines)]


def _line(kind: str, group: Sequence[RegretRow]) -> tuple[str, ...]:
    regrets, worst = [row.regret or 1.0 for row in group], max(group, key=lambda row: row.regret or 1.0)
    high = sum(regret > HIGH for regret in regrets)
    mean = compare.geometric_mean(regrets)
    return kind, str(len(group)), f"{mean:.3f}", str(high), f"{worst.regret:.2f}", str(worst.call)


def alarms(reproduce: Callable[[int], str], rows: Sequence[RegretRow]) -> list[str]:
    """Returns a line for every high regret: what was chosen, what would have been better, how to measure it again."""
    high = [row for row in rows if row.regret is not None and row.regret > HIGH]
    return [
        f"{row.regret:.2f} {row.direction} {row.words}: {row.chosen} {tables.number(row.chosen_us or 0.0)} us, "
        f"better {row.best} {tables.number(row.best_us or 0.0)}: {reproduce(row.call)}"
        for row in sorted(high, key=lambda row: -(row.regret or 1.0))
    ]


def closing(rows: Sequence[RegretRow]) -> str:
    """Returns the sum of a run in a line."""
    said = []
    for direction, here in join.groups((row for row in rows if row.regret), lambda row: row.direction).items():
        regrets = [row.regret or 1.0 for row in here]
        mean, count = compare.geometric_mean(regrets), len(regrets)
        said.append(f"{direction} {mean:.3f} ({sum(one > HIGH for one in regrets)} of {count} over {HIGH}, ")
        said[-1] += f"worst {max(regrets):.2f})"
    return f"Regret, time of the choice over that of the fastest: {'; '.join(said)}" if said else ""


def job(selection: Selection, device: str, cache_bytes: int, env: Environment, device_options: str) -> Job[RegretRow]:
    """The run over the selected calls."""
    bench = Bench(device, cache_bytes, env, random.Random(f"order {selection.seed}"))
    made: Job[RegretRow] = Job(
        name="regret",
        command=f"flashtile bench --regret {len(selection.numbers)}",
        count="",
        kind=RegretRow,
        selection=selection,
        device=device,
        measure=bench.measure,
        summary=summary,
        alarms=lambda rows: alarms(made.reproduce, rows),
        closing=closing,
        device_options=device_options,
    )
    return made
