"""A whole check: draw, compile ahead, judge, shrink what fails, count."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.check.draw import Drawer
from flashtile.check.judge import DeviceLost, judge, warm
from flashtile.check.shrink import shrink
from flashtile.check.trial import Trial

_CHUNK = 500  # problems whose kernels are compiled side by side, before the first of them is judged
_SHRINK_S = 60.0
_MAX_SHRUNK = 5  # failures that are made small; the rest is counted and shown as it came


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: whichever of problems and seconds comes first."""

    backends: Sequence[Backend]
    device: str
    seed: int
    problems: int | None = None
    seconds: float | None = None
    direction: str = "both"
    reuse: int = 1
    chunk: int = _CHUNK
    stops_at_failure: bool = False  # at the first, as it came


@dataclass(frozen=True)
class Failure:
    """A trial that a backend fails, and the smallest one found that it fails too."""

    backend: str
    complaints: tuple[str, ...]
    trial: Trial
    smallest: Trial
    smallest_complaints: tuple[str, ...]

    @property
    def reproducer(self) -> str:
        return f"flashtile check --case '{self.smallest}' --backends {self.backend}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "complaints": list(self.complaints),
            "case": str(self.trial),
            "smallest": str(self.smallest),
            "smallest_complaints": list(self.smallest_complaints),
            "reproducer": self.reproducer,
        }


@dataclass
class Report:
    """What was run and what came of it."""

    num_problems: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, int] = field(default_factory=dict)
    values: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    compile_s: float = 0.0
    total_s: float = 0.0
    lost: str = ""  # why the GPU is gone, if it is

    def as_dict(self) -> dict[str, Any]:
        return {
            "problems": self.num_problems,
            "ran": dict(self.ran),
            "failed": {name: self.failed[name] for name in self.ran},
            "refused": {name: dict(reasons.most_common()) for name, reasons in self.refused.items()},
            "kernels": self.kernels,
            "values": dict(self.values.most_common()),
            "compile_s": round(self.compile_s, 1),
            "total_s": round(self.total_s, 1),
            "failures": [failure.as_dict() for failure in self.failures],
            "lost": self.lost,
        }


Progress = Callable[[str, int], None]  # what goes on, and how many problems are done


def check(settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Draws and judges problems until there are enough of them or the time is over."""
    edges = sorted(set[int]().union(*(backend.tile_sizes() for backend in settings.backends)))
    drawer = Drawer(settings.seed, settings.device, settings.direction, edges, settings.reuse)
    return check_trials(itertools.islice(drawer, settings.problems), settings, progress)


def check_trials(trials: Iterable[Trial], settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Judges these problems."""
    report, start = Report(), time.monotonic()
    before = {backend.name: backend.loaded_kernels() for backend in settings.backends}
    remaining = iter(trials)

    def is_over() -> bool:
        return settings.seconds is not None and time.monotonic() - start > settings.seconds

    with _fresh_memory(settings.device), suppress(KeyboardInterrupt):
        while not is_over() and not report.lost and (chunk := list(itertools.islice(remaining, settings.chunk))):
            compile_start = time.monotonic()
            _compile(chunk, settings, lambda: progress("compiling", report.num_problems))
            report.compile_s += time.monotonic() - compile_start
            for trial in chunk:
                if is_over() or (settings.stops_at_failure and report.failures):
                    break
                progress(f"{trial.case.kind} {trial.case.values}", report.num_problems)
                _judge(trial, settings, report)
                if report.lost:
                    break
            if settings.stops_at_failure and report.failures:
                break
    report.kernels = {backend.name: len(backend.loaded_kernels() - before[backend.name]) for backend in settings.backends}
    report.kernels = {name: count for name, count in report.kernels.items() if count}
    report.total_s = time.monotonic() - start
    return report


def _judge(trial: Trial, settings: Settings, report: Report) -> None:
    try:
        verdict = judge(trial, settings.backends, settings.device)
    except DeviceLost as error:
        report.lost = str(error)
        report.num_problems += 1
        report.failures.append(Failure("a backend that ran before", (report.lost,), trial, trial, (report.lost,)))
        return
    report.num_problems += 1
    report.values[trial.case.values] += 1
    for name, reason in verdict.refusals.items():
        report.refused.setdefault(name, Counter())[reason] += 1
    for name, complaints in verdict.complaints.items():
        report.ran[name] += 1
        if complaints:
            report.failed[name] += 1
            is_shrunk = not settings.stops_at_failure and len(report.failures) < _MAX_SHRUNK
            report.failures.append(_failure(trial, name, complaints, settings, is_shrunk))


def _failure(trial: Trial, name: str, complaints: Sequence[str], settings: Settings, is_shrunk: bool) -> Failure:
    backend = registry.find(name)
    latest = list(complaints)

    def fails(smaller: Trial) -> bool:
        # Twice: what depends on the timing of threads need not fail every time
        for _ in range(2):
            try:
                found = judge(smaller, [backend], settings.device).complaints.get(name)
            except (ValueError, TypeError, NotImplementedError):
                return False  # no such problem
            if found:
                latest[:] = found
                return True
        return False

    smallest = shrink(trial, fails, _SHRINK_S) if is_shrunk else trial
    return Failure(name, tuple(complaints), trial, smallest, tuple(latest))


def _compile(trials: Sequence[Trial], settings: Settings, tick: Callable[[], None]) -> None:
    """Makes the calls of all trials once on backends that compile, in as many threads as there are cores."""
    compiled = [backend for backend in settings.backends if backend.is_compiled]
    if not compiled:
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(warm, trial, [backend], settings.device) for trial in trials for backend in compiled]
        try:
            for job in jobs:
                with suppress(Exception):  # shown when the trial is judged
                    job.result()
                tick()
        finally:
            for job in jobs:
                job.cancel()


@contextmanager
def _fresh_memory(device: str) -> Iterator[None]:
    """On the CPU whatever torch.empty gives is NaN. One thread: problems are small, and many are drawn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    was_deterministic, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_num_threads(threads)
