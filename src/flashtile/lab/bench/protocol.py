"""Protocols of timing (docs/bench.md): each provider alone, all in short bursts after a rest, all under sustained load.
Providers take turns in a random order that each round draws anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashtile.errors import value_error
from flashtile.lab.bench import nvml, timing
from flashtile.lab.bench.timing import Contender


@dataclass(frozen=True)
class Protocol:
    """Batches of calls of one provider after the other."""

    name: str
    batch_s: float  # of calls back to back
    rest_s: float  # before each batch
    num_batches: int  # of each provider, at least
    sample_s: float  # from one look at the sensors to the next
    max_calls: int = 10**6  # in a batch
    least_batches: int = timing.MIN_ROUNDS  # of calls that are longer than a batch


ALONE = Protocol("alone", 0.004, 0.015, 5, 0.001, timing.MAX_CALLS)
SHORT = Protocol("short", 0.004, 0.015, 10, 0.001, timing.MAX_CALLS)
SUSTAINED = Protocol("sustained", 0.2, 0.0, 3, 0.02)
PROTOCOLS = {"short": (SHORT,), "sustained": (SUSTAINED,), "both": (SHORT, SUSTAINED)}
NAMES = (SHORT.name, SUSTAINED.name)  # those with columns of their own
ROUNDS = "rounds"  # the name of what timing.interleave measures


@dataclass
class Timed:
    """The batches of one provider: seconds per call in each, and what the sensors said meanwhile."""

    num_calls: int = 1  # in a batch
    seconds: list[float] = field(default_factory=list)
    samples: list[nvml.Sample] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return timing.quantile(self.seconds, 0.5)

    @property
    def joules(self) -> float | None:
        """Returns the energy of a call, power times time; None where power is not known."""
        watts = nvml.power_w(self.samples)
        return None if watts is None else watts * self.median_s


def chosen(name: str | None, default: str | None) -> tuple[Protocol, ...]:
    """Returns the protocols of an option; none where there is neither an option nor a default."""
    name = default if name is None else name
    if name is not None and name not in PROTOCOLS:
        raise value_error("--protocol", repr(name), ", ".join(PROTOCOLS))
    return () if name is None else PROTOCOLS[name]


def measure(
    contenders: Sequence[Contender],
    device: str,
    protocols: Sequence[Protocol],
    order: random.Random,
    budget_s: float,
    probe: nvml.Probe,
) -> None:
    """Fills `timed` of each contender: each alone first, in random order, then the protocols one after the other."""
    for contender in order.sample(list(contenders), len(contenders)):
        run(ALONE, [contender], device, order, 0.0, probe)
        contender.call_s = contender.timed[ALONE.name].median_s  # without the host's part of the first estimate
    for protocol in protocols:
        run(protocol, contenders, device, order, budget_s, probe)


def run(
    protocol: Protocol,
    contenders: Sequence[Contender],
    device: str,
    order: random.Random,
    budget_s: float = 0.0,
    probe: nvml.Probe | None = None,
) -> None:
    """Runs one protocol and fills `timed[protocol.name]` of each contender. Calls that are longer than a batch take
    part in fewer rounds."""
    probe = probe or nvml.Probe()
    named, wanted = {contender.name: contender for contender in contenders}, dict[str, int]()
    for contender in contenders:
        thunk_s = max(contender.call_s * contender.calls_per_thunk, 1e-7)
        contender.num_calls = max(1, min(protocol.max_calls, round(protocol.batch_s / thunk_s)))
        total_s = max(budget_s, protocol.num_batches * protocol.batch_s)
        most = max(protocol.num_batches, timing.MAX_ROUNDS)
        rounds = round(total_s / max(thunk_s * contender.num_calls, protocol.batch_s))
        wanted[contender.name] = max(protocol.least_batches, min(most, rounds))
        contender.timed[protocol.name] = Timed(contender.num_calls * contender.calls_per_thunk)
    for name in timing.turns(wanted, order):
        contender = named[name]
        timed = contender.timed[protocol.name]
        if protocol.rest_s:
            timing.rest(protocol.rest_s)
        with probe.during(protocol.sample_s) as samples:
            seconds = timing.batch(contender, device) / contender.calls_per_thunk
        timed.seconds.append(seconds)
        timed.samples += samples


def complete(contender: Contender, name: str) -> Timed | None:
    """Returns what a protocol measured of a contender; None where it has too few batches, as after an interrupt."""
    timed = contender.timed.get(name)
    return timed if timed is not None and len(timed.seconds) >= timing.MIN_ROUNDS else None


def leading(contender: Contender) -> tuple[str, Timed]:
    """Returns what a row's figures rest on, with its name: sustained load, else short bursts, else plain rounds."""
    for name in reversed(NAMES):
        if (timed := complete(contender, name)) is not None:
            return name, timed
    return ROUNDS, Timed(contender.num_calls * contender.calls_per_thunk, contender.seconds)
