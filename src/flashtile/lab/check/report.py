"""What a check is asked for, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashtile.backends.base import Backend
from flashtile.lab.check.trial import Trial


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: whichever of problems and seconds comes first."""

    backends: Sequence[Backend]
    device: str
    seed: int
    problems: int | None = None
    seconds: float | None = None
    direction: str = "both"
    kind: str = ""  # of problems, one of runner.DRAWERS
    reuse: int = 1
    chunk: int = 500  # problems whose kernels are compiled side by side, before the first of them is judged
    jobs: int = 0  # worker processes; 0 judges in this one, where a time limit cannot stop a problem that hangs
    stops_at_failure: bool = False  # at the first, as it came
    clock: Callable[[], float] = time.monotonic  # of `seconds`, the same in all processes

    @property
    def oracle_device(self) -> str:
        """Where float64 is computed. Float32 problems are small: a GPU would launch longer than a core computes."""
        return "cpu" if self.kind == "float32" else self.device


@dataclass(frozen=True)
class Failure:
    """A trial that a backend fails, and the smallest one found that it fails too."""

    backend: str
    complaints: tuple[str, ...]
    trial: Trial
    smallest: Trial
    smallest_complaints: tuple[str, ...]
    is_deadly: bool = False  # to the process that judges it: it stays as it came

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
    kernels: dict[str, set[str]] = field(default_factory=dict)
    families: Counter[str] = field(default_factory=Counter)  # problems that had to be run by these
    values: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    compile_s: float = 0.0
    total_s: float = 0.0
    lost: str = ""  # why the GPU is gone, if it is
    num_deaths: int = 0  # of processes that judged
    unfinished: list[str] = field(default_factory=list)  # cases that were stopped when the time was over
    is_time_over: bool = False
    is_interrupted: bool = False

    def add(self, other: Report) -> None:
        self.num_problems += other.num_problems
        self.num_deaths += other.num_deaths
        for name in ("ran", "failed", "values", "families"):
            getattr(self, name).update(getattr(other, name))
        for name, reasons in other.refused.items():
            self.refused.setdefault(name, Counter()).update(reasons)
        for name, kernels in other.kernels.items():
            self.kernels.setdefault(name, set()).update(kernels)
        self.failures += other.failures
        self.unfinished += other.unfinished
        self.lost = self.lost or other.lost
        self.is_time_over = self.is_time_over or other.is_time_over

    def as_dict(self) -> dict[str, Any]:
        return {
            "problems": self.num_problems,
            "ran": dict(self.ran),
            "failed": {name: self.failed[name] for name in self.ran},
            "refused": {name: dict(reasons.most_common()) for name, reasons in self.refused.items()},
            "kernels": {name: len(kernels) for name, kernels in self.kernels.items()},
            "families": dict(self.families.most_common()),
            "values": dict(self.values.most_common()),
            "compile_s": round(self.compile_s, 1),
            "total_s": round(self.total_s, 1),
            "failures": [failure.as_dict() for failure in self.failures],
            "lost": self.lost,
            "deaths": self.num_deaths,
            "unfinished": self.unfinished,
            "is_interrupted": self.is_interrupted,
        }
