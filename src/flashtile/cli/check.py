"""`flashtile check`: options, progress bar, tables and result files."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.bench import device as facts
from flashtile.bench.command import INTERRUPTED, writable_folder
from flashtile.check.draw import PASSES
from flashtile.check.mutants import Hunt, hunt
from flashtile.check.runner import Report, Settings, check, check_trials
from flashtile.check.trial import Trial
from flashtile.errors import value_error
from flashtile.kernels import families
from flashtile.kernels.arch import Arch, arch_of
from flashtile.kernels.mutation import Mutation, mutations
from flashtile.runtime import cache

FOUND, NOTHING_CHECKED = 1, 2
_FILE_WIDTH = 200
_DEFAULT_PROBLEMS = 200
_MUTANT_PROBLEMS = 400
_GPU_JOBS = 8
# Backends that compile: sets of options in a run, least problems per set, and problems per set of an unlimited run
_NUM_SETS, _MIN_REUSE, _REUSE = 40, 10, 25


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    problems: int | None = None
    seconds: float | None = None
    seed: int | None = None
    backends: str | None = None
    direction: str = "both"
    device: str | None = None
    jobs: int | None = None
    case: str | None = None
    mutate: str | None = None
    out: Path | None = None
    as_json: bool = False


def prepare(options: Options, arguments: Sequence[str]) -> Callable[[], int]:
    """Checks the options and returns the job, which returns the exit status."""
    if options.direction not in PASSES:
        raise value_error("--pass", repr(options.direction), ", ".join(PASSES))
    for name, number in (("--problems", options.problems), ("--seconds", options.seconds), ("--jobs", options.jobs)):
        if number is not None and number <= 0:
            raise value_error(name, number, "a number above 0")
    where, line = facts.resolve(options.device)
    backends = _backends(options.backends, where, has_fault=options.mutate is not None)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    has_limit = options.problems is not None or options.seconds is not None
    settings = Settings(
        backends=backends,
        device=where,
        seed=seed,
        problems=options.problems if has_limit else _DEFAULT_PROBLEMS if options.mutate is None else _MUTANT_PROBLEMS,
        seconds=options.seconds,
        direction=options.direction,
        reuse=_reuse(options.problems if has_limit else _DEFAULT_PROBLEMS)
        if any(backend.is_compiled for backend in backends)
        else 1,
        jobs=_default_jobs(where) if options.jobs is None else options.jobs,
    )
    trial = None if options.case is None else Trial.parse(options.case)
    faults = None if options.mutate is None else _faults(options.mutate, arch_of(*torch.cuda.get_device_capability()))
    if options.out is not None:
        writable_folder(options.out)
    console = _console(options.as_json)
    console.print(line, highlight=False, soft_wrap=True)
    command = Command(
        settings, console, options.as_json, options.out, dataclasses.asdict(facts.environment(where, arguments))
    )
    return partial(command.start, partial(command.check, trial) if faults is None else partial(command.hunt, faults))


@dataclass(frozen=True)
class Command:
    """One run of the command."""

    settings: Settings
    console: Console
    as_json: bool
    out: Path | None
    environment: dict[str, Any]

    def start(self, work: Callable[[], int]) -> int:
        try:
            return work()
        except BrokenProcessPool:
            words = "Worker processes died. Pass --jobs 1, or fewer jobs if memory is short."
            self.console.print(f"[red]{words}", highlight=False, soft_wrap=True)
            return NOTHING_CHECKED

    def check(self, trial: Trial | None) -> int:
        """Checks the given problem, or random ones."""
        if trial is not None:
            report = check_trials([trial], self.settings)
        else:
            self.console.print(f"seed {self.settings.seed}", highlight=False)
            with self._progress(self.settings.problems) as (progress, task):
                report = check(
                    self.settings, lambda what, done: progress.update(task, completed=done, description=what)
                )
        self.console.print(_summary(report, self.settings))
        self._show_failures(report)
        if not report.ran and not report.failures:
            reasons = [f"{name}: {reason}" for name, found in report.refused.items() for reason in found]
            self.console.print(
                "[red]Nothing was checked. " + escape("; ".join(reasons)), highlight=False, soft_wrap=True
            )
        self._keep("check.json", {"seed": self.settings.seed, **report.as_dict()})
        if report.is_interrupted:
            self.console.print(f"Interrupted after {report.num_problems} problems.", highlight=False)
            return INTERRUPTED
        return FOUND if report.failures else 0 if report.ran else NOTHING_CHECKED

    def hunt(self, faults: Sequence[Mutation]) -> int:
        """Plants each fault and runs problems until one detects it."""
        hunts, is_interrupted = list[Hunt](), False
        with self._progress(len(faults)) as (progress, task):
            try:
                for found in hunt(faults, self.settings):
                    hunts.append(found)
                    progress.update(task, advance=1, description=found.mutation.name)
                    self._write("mutations.json", self._hunted(hunts))  # keep the results so far
            except KeyboardInterrupt:
                is_interrupted = True
        hunts.sort(key=lambda found: faults.index(found.mutation))
        self.console.print(_hunts(hunts))
        missed = [found.mutation.name for found in hunts if not found.is_found]
        self.console.print(
            f"{len(hunts) - len(missed)} of {len(faults)} faults found"
            + (f"; missed: {', '.join(missed)}" if missed else "")
        )
        self._keep("mutations.json", self._hunted(hunts))
        return INTERRUPTED if is_interrupted else FOUND if missed else 0

    def _hunted(self, hunts: Sequence[Hunt]) -> dict[str, Any]:
        return {"seed": self.settings.seed, "mutations": [found.as_dict() for found in hunts]}

    def _show_failures(self, report: Report) -> None:
        for failure in report.failures:
            self.console.print(
                f"[red]{escape(failure.backend)}: {escape('; '.join(failure.smallest_complaints))}",
                highlight=False,
                soft_wrap=True,
            )
            self.console.print(escape(f"  {failure.reproducer}"), highlight=False, soft_wrap=True)
        if report.num_deaths:
            words = "died (a crash, or out of memory); their problems were run again"
            self.console.print(
                f"[yellow]{report.num_deaths} worker processes {words}.", highlight=False, soft_wrap=True
            )
        if report.lost:
            self.console.print(
                "[red]The GPU no longer works; run the last problem alone, or under compute-sanitizer.", highlight=False
            )

    def _keep(self, name: str, content: dict[str, Any]) -> None:
        if self.as_json:
            print(self._text(content))
        path = self._write(name, content)
        if path is not None:
            self.console.print(f"Written: {path}", highlight=False, markup=False, soft_wrap=True)

    def _write(self, name: str, content: dict[str, Any]) -> Path | None:
        if self.out is None:
            return None
        path, part = self.out / name, self.out / f"{name}.part"
        part.write_text(self._text(content) + "\n", encoding="utf-8")
        os.replace(part, path)  # atomic: readers never see a partial file
        return path

    def _text(self, content: dict[str, Any]) -> str:
        return json.dumps({**content, "environment": self.environment}, indent=1)

    def _progress(self, total: int | None) -> _Bar:
        return _Bar(self.console, total)


class _Bar:
    """A progress bar with one task."""

    def __init__(self, console: Console, total: int | None) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress, self.total = Progress(*columns, console=console, transient=True), total

    def __enter__(self) -> tuple[Progress, Any]:
        self.progress.start()
        return self.progress, self.progress.add_task("", total=self.total)

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


def _backends(names: str | None, device: str, has_fault: bool) -> list[Backend]:
    """The selected backends that run on the device; with a fault, only those whose kernels can have one."""
    here = [backend for backend in registry.BACKENDS if device in backend.devices]
    if has_fault:
        here = [backend for backend in here if backend.takes_mutations]
        if not here:
            raise value_error("--mutate", f"it on {device}", "a GPU: faults are planted in CUDA kernels")
    if names is None:
        return here
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        backend = registry.find(name)
        if backend not in here:
            raise value_error("--backends", name, f"those for {device} here: {', '.join(known.name for known in here)}")
        chosen.append(backend)
    if not chosen:
        raise value_error(
            "--backends", repr(names), f"names of {', '.join(known.name for known in here)}, separated by commas"
        )
    return chosen


def _reuse(problems: int | None) -> int:
    """Number of problems that share a set of options."""
    return _REUSE if problems is None else max(_MIN_REUSE, problems // _NUM_SETS)


def _default_jobs(device: str) -> int:
    """Several processes on a GPU, if they can share kernels through the disk cache; else one."""
    return (
        max(1, min(_GPU_JOBS, (os.cpu_count() or 1) // 2))
        if device == "cuda" and cache.KernelCache.default().directory
        else 1
    )


def _faults(names: str, arch: Arch | None) -> list[Mutation]:
    known = {
        fault.name: fault
        for fault in mutations()
        if fault.tool is None and (arch is None or families.is_reachable(fault, arch))
    }
    if names == "all":
        return list(known.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise value_error("--mutate", name, f"all, or some of {', '.join(known)}")
    return [known[name] for name in chosen]


def _summary(report: Report, settings: Settings) -> Table:
    problems = f"{report.num_problems} problems in {report.total_s:.0f} s"
    table = Table("backend", title=problems, title_justify="left")
    for name in ("ran", "refused", "failed", "kernels"):
        table.add_column(name, justify="right")
    for backend in settings.backends:
        name = backend.name
        refused, failed = sum(report.refused.get(name, {}).values()), report.failed[name]
        cells = [name, str(report.ran[name]), str(refused), str(failed), str(len(report.kernels.get(name, ())) or "-")]
        table.add_row(*cells, style="red" if failed else None)
    return table


def _hunts(hunts: Sequence[Hunt]) -> Table:
    table = Table("fault", "what is wrong", title="faults on purpose", title_justify="left")
    table.add_column("problems", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("seen as", overflow="fold")
    for found in hunts:
        seen = escape(found.report.failures[0].complaints[0]) if found.is_found else "not found"
        cells = [found.mutation.name, found.mutation.what, str(found.num_problems), f"{found.report.total_s:.1f}", seen]
        table.add_row(*cells, style=None if found.is_found else "red")
    return table


def _console(as_json: bool) -> Console:
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=_FILE_WIDTH)
