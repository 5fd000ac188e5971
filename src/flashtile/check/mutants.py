"""How many problems it takes to notice each fault that can be planted in a kernel: the check of the check."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from flashtile.check.judge import is_alive
from flashtile.check.runner import GRACE_S, Report, Settings, TimeOver, check_trials, drawn, processes
from flashtile.errors import dtype_name
from flashtile.kernels import assemble, families
from flashtile.kernels.mutation import Mutation, mutations, planted

# A fault is most often seen at once: few problems are compiled for at a time, most of them with options of their own
CHUNK, REUSE = 4, 2
MAX_DEATHS = 3  # of processes, until it is no accident


@dataclass(frozen=True)
class Hunt:
    """A fault, and the first problem that showed it."""

    mutation: Mutation
    is_found: bool
    num_problems: int
    report: Report

    def as_dict(self) -> dict[str, Any]:
        first = self.report.failures[0] if self.is_found else None
        return {
            "mutation": self.mutation.name,
            "what": self.mutation.what,
            "found": self.is_found,
            "problems": self.num_problems,
            "complaint": "" if first is None else "; ".join(first.complaints),
            "case": "" if first is None else str(first.trial),
            "seconds": round(self.report.total_s, 1),
        }


def hunt(mutations: Sequence[Mutation], settings: Settings) -> Iterator[Hunt]:
    """Each fault is planted and checked for until a problem fails, in processes of their own. As they come.

    A time limit holds for all of them together: those that it leaves no time for do not come.
    """
    end = math.inf if settings.seconds is None else time.monotonic() + settings.seconds
    alone = dataclasses.replace(settings, chunk=CHUNK, reuse=REUSE, jobs=0, stops_at_failure=True)
    remaining = list(mutations)
    num_deaths = 0
    while remaining and time.monotonic() < end:
        try:
            with processes(max(1, settings.jobs), settings.device, end) as pool:
                hunts = [pool.submit(hunt_one, mutation, alone, end) for mutation in remaining]
                limit = None if end == math.inf else end - time.monotonic() + GRACE_S
                for future in as_completed(hunts, limit):
                    found = future.result()
                    if found.num_problems:
                        remaining.remove(found.mutation)
                        yield found
                    if found.report.lost:
                        break  # its process cannot use the GPU any more: the rest goes on in new ones
        except (FutureTimeout, TimeOver):
            return
        except BrokenProcessPool:
            num_deaths += 1
            if num_deaths == MAX_DEATHS:
                raise


def hunt_one(mutation: Mutation, settings: Settings, end: float = math.inf) -> Hunt:
    """Checks for one fault until a problem shows it, `settings.problems` do not, or the time is over."""
    if time.monotonic() > end:
        return Hunt(mutation, False, 0, Report(is_time_over=True))
    if not is_alive(settings.device):
        return Hunt(mutation, False, 0, Report(lost="an earlier fault took the GPU from this process"))
    settings = dataclasses.replace(settings, seconds=None if end == math.inf else end - time.monotonic())
    trials = drawn(settings)
    if mutation.family is not None:
        # Other dtypes would not reach the kernel, and a backward pass only costs time where it is in the forward
        family = families.find(mutation.family)
        reaching = (trial for trial in trials if dtype_name(trial.case.dtype) in family.dtypes)
        is_forward = family.op == "forward"
        trials = (dataclasses.replace(trial, has_backward=False) if is_forward else trial for trial in reaching)
    with broken(mutation.name):
        report = check_trials(itertools.islice(trials, settings.problems), settings)
    return Hunt(mutation, bool(report.failures), report.num_problems, report)


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Every kernel that is made inside has the fault, and none that was made outside is used. Calls of the pass take
    the family that has it, though another may be faster, or are refused."""
    family = next(mutation.family for mutation in mutations() if mutation.name == name)
    try:
        with planted(name), families.forced(family) if family else nullcontext():
            assemble.clear_plans()
            yield
    finally:
        assemble.clear_plans()
