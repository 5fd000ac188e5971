"""`flashtile check`: options, progress bar, tables and result files."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashtile import families
from flashtile.backends import registry
from flashtile.backends.base import Backend, device_arch
from flashtile.cli.limits import check_count, check_jobs
from flashtile.cli.options import CheckOptions as Options
from flashtile.errors import value_error
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.command import check_seconds
from flashtile.lab.bench.files import ResultFile, writable_folder
from flashtile.lab.bench.terminal import INTERRUPTED, make_console, progress_bar, say, say_files
from flashtile.lab.check.draw import PASSES
from flashtile.lab.check.mutants import Hunt, hunt
from flashtile.lab.check.report import Report, Settings
from flashtile.lab.check.runner import check, check_trials
from flashtile.lab.check.trial import Trial
from flashtile.plans.arch import Arch
from flashtile.plans.mutation import Mutation, mutations
from flashtile.runtime import cache

FOUND, NOTHING_CHECKED = 1, 2
_DEFAULT_PROBLEMS = 200
_MUTANT_PROBLEMS = 400
_GPU_JOBS = 8
_MAX_UNFINISHED = 5  # cases that are shown
_ORACLE_COPIES = 4  # of the scores and of the inputs, at a time
# Backends that compile: sets of options in a run, least problems per set, and problems per set of an unlimited run
_NUM_SETS, _MIN_REUSE, _REUSE = 40, 10, 25
_NUM_DECODE_SETS = 40  # each needs 4 to 5 kernels: more would take longer to compile than 10,000 problems to judge


def _only_kind(options: Options) -> str:
    """Returns the one kind of problems that is asked for: decode, float32 or packed; "" = any."""
    asked = [name for name in ("decode", "float32", "packed") if getattr(options, f"is_{name}")]
    if len(asked) > 1:
        words = " and ".join(f"--{name}" for name in asked[1:])
        raise value_error(f"--{asked[0]}", f"it with {words}", "problems of one kind", "Drop one of them")
    return asked[0] if asked else ""


def prepare(options: Options, arguments: Sequence[str]) -> Callable[[], int]:
    """Checks the options and returns the job, which returns the exit status."""
    kind = _only_kind(options)
    if options.direction not in PASSES:
        raise value_error("--pass", repr(options.direction), ", ".join(PASSES))
    if options.case is not None:
        _check_alone(options, kind)
    if kind == "decode" and options.direction == "backward":
        raise value_error("--decode", "it with --pass backward", "forward passes", "Drop one of them")
    if kind and options.mutate is not None:
        raise value_error(f"--{kind}", "it with --mutate", "problems of one kind", "Drop one of them")
    check_seconds("--seconds", options.seconds)
    check_count("--problems", options.problems, sys.maxsize)
    check_jobs(options.jobs)
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
        kind=kind,
        reuse=_reuse(options.problems if has_limit else _DEFAULT_PROBLEMS, kind)
        if any(backend.is_compiled for backend in backends)
        else 1,
        jobs=_num_workers(options, where),
    )
    trial = None if options.case is None else _trial(options.case, where)
    faults = None if options.mutate is None else _faults(options.mutate, device_arch())
    out = None if options.out is None else writable_folder(options.out)
    console = make_console(options.as_json)
    say(console, line)
    command = Command(settings, console, options.as_json, out, dataclasses.asdict(facts.environment(where, arguments)))
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
            say(self.console, "Worker processes died. Pass --jobs 1, or fewer jobs if memory is short.", "red")
        except OSError:
            raise  # a file that cannot be written
        except Exception:
            traceback.print_exc()  # an error of the check itself; status 1 says that a backend disagrees
        return NOTHING_CHECKED

    def check(self, trial: Trial | None) -> int:
        """Checks the given problem, or random ones."""
        if trial is not None:
            report = check_trials([trial], self.settings)
        else:
            self.console.print(f"seed {self.settings.seed}", highlight=False)
            with progress_bar(self.console) as progress:
                task = progress.add_task("", total=self.settings.problems)
                report = check(
                    self.settings, lambda what, done: progress.update(task, completed=done, description=what)
                )
        self.console.print(_summary(report, self.settings))
        self._show_failures(report)
        self._show_unfinished(report)
        has_result = bool(report.ran or report.failures)
        if not (has_result or report.is_interrupted):
            reasons = [f"{name}: {reason}" for name, found in report.refused.items() for reason in found]
            if report.is_time_over and not report.num_problems:
                reasons.append("the time was over before a first problem was judged; pass a larger --seconds")
            say(self.console, "Nothing was checked: " + "; ".join(reasons), "red")
        is_whole = has_result and not report.is_interrupted
        name = f"check_{self.settings.kind}.json" if self.settings.kind else "check.json"
        self._keep(self._file(name), {"seed": self.settings.seed, **report.as_dict()}, is_whole)
        if report.is_interrupted:
            self.console.print(f"Interrupted after {report.num_problems} problems.", highlight=False)
            return INTERRUPTED
        return FOUND if report.failures else 0 if report.ran else NOTHING_CHECKED

    def hunt(self, faults: Sequence[Mutation]) -> int:
        """Plants each fault and runs problems until one detects it."""
        hunts, is_interrupted, file = list[Hunt](), False, self._file("mutations.json")
        with progress_bar(self.console) as progress:
            task = progress.add_task("", total=len(faults))
            try:
                for found in hunt(faults, self.settings):
                    hunts.append(found)
                    progress.update(task, advance=1, description=found.mutation.name)
                    if file is not None:
                        file.write(self._text(self._hunted(hunts)) + "\n")  # keeps the results so far
            except KeyboardInterrupt:
                is_interrupted = True
        hunts.sort(key=lambda found: faults.index(found.mutation))
        self.console.print(_hunts(hunts))
        seen = {found.mutation for found in hunts if found.is_found}
        unfinished = {found.mutation for found in hunts if not found.is_found and found.report.is_time_over}
        missed = [found.mutation.name for found in hunts if found.mutation not in seen | unfinished]
        unfinished.update(fault for fault in faults if fault not in {found.mutation for found in hunts})
        left = [fault.name for fault in faults if fault in unfinished]
        say(
            self.console,
            f"{len(seen)} of {len(faults)} faults found"
            + (f"; missed: {', '.join(missed)}" if missed else "")
            + (f"; not finished: {', '.join(left)}" if left else ""),
        )
        self._keep(file, self._hunted(hunts), not left)
        return INTERRUPTED if is_interrupted else FOUND if missed else NOTHING_CHECKED if left else 0

    def _hunted(self, hunts: Sequence[Hunt]) -> dict[str, Any]:
        return {"seed": self.settings.seed, "mutations": [found.as_dict() for found in hunts]}

    def _show_failures(self, report: Report) -> None:
        for failure in report.failures:
            say(self.console, f"{failure.backend}: {'; '.join(failure.smallest_complaints)}", "red")
            say(self.console, f"  {failure.reproducer}")
        if report.num_deaths:
            words = "died (a crash, or out of memory); their problems were run again"
            say(self.console, f"{report.num_deaths} worker processes {words}.", "yellow")
        if report.lost:
            say(self.console, "The GPU no longer works; run the last problem alone, or under compute-sanitizer.", "red")

    def _show_unfinished(self, report: Report) -> None:
        """Problems that a worker was killed at. One that always hangs is found by running it alone."""
        if report.unfinished:
            words = "was still running" if len(report.unfinished) == 1 else "were still running"
            text = f"{len(report.unfinished)} of the problems {words} when the check ended:"
            say(self.console, text, "yellow")
        for case in report.unfinished[:_MAX_UNFINISHED]:
            say(self.console, f"  flashtile check --case '{case}'")

    def _keep(self, file: ResultFile | None, content: dict[str, Any], is_whole: bool) -> None:
        """Prints and writes the result. What is not whole replaces no file that may be."""
        if self.as_json:
            print(self._text(content))
        if file is None:
            return
        file.write(self._text(content) + "\n")
        if is_whole:
            file.finish()
        say_files(self.console, [file.written])

    def _file(self, name: str) -> ResultFile | None:
        return None if self.out is None else ResultFile(self.out / name)

    def _text(self, content: dict[str, Any]) -> str:
        return json.dumps({**content, "environment": self.environment}, indent=1)


def _backends(names: str | None, device: str, has_fault: bool) -> list[Backend]:
    """The selected backends that run on the device; with a fault, only those whose kernels can have one."""
    here = [backend for backend in registry.BACKENDS if device in backend.devices]
    if has_fault:
        here = [backend for backend in here if backend.takes_mutations]
        if not here:
            raise value_error("--mutate", f"it on {device}", "a GPU: faults are planted in CUDA kernels")
    if names is None:
        return here
    known = {backend.name: backend for backend in here}
    chosen = [name for name in (part.strip() for part in names.split(",")) if name]
    for name in chosen:
        if name not in known:
            raise value_error("--backends", repr(name), f"those for {device} here: {', '.join(known)}")
    if not chosen:
        raise value_error("--backends", repr(names), f"names of {', '.join(known)}, separated by commas")
    return [known[name] for name in chosen]


def _check_alone(options: Options, kind: str) -> None:
    """A problem says its own seed and pass. What draws problems or plants faults would be ignored."""
    others = {
        "--problems": options.problems is not None,
        "--seed": options.seed is not None,
        "--pass": options.direction != "both",
        f"--{kind}": bool(kind),
        "--mutate": options.mutate is not None,
    }
    given = ", ".join(name for name, is_given in others.items() if is_given)
    if given:
        raise value_error("--case", f"it with {given}", "--case without them: a problem says its own seed and pass")


def _reuse(problems: int | None, kind: str = "") -> int:
    """Number of problems that share a set of options."""
    num_sets = _NUM_DECODE_SETS if kind == "decode" else _NUM_SETS
    return _REUSE if problems is None else max(_MIN_REUSE, problems // num_sets)


def _num_workers(options: Options, device: str) -> int:
    """Several processes on a GPU, if they can share kernels through the disk cache; else one.

    A single one is this process, unless there is a time limit: only another process can be stopped whatever it does.
    """
    jobs = options.jobs or 1
    if options.jobs is None and device == "cuda" and cache.KernelCache.default().directory:
        jobs = max(1, min(_GPU_JOBS, (os.cpu_count() or 1) // 2))
    return 0 if jobs == 1 and options.seconds is None else jobs


def _trial(case: str, device: str) -> Trial:
    """The problem of --case, if it can be made here."""
    trial = Trial.parse(case)
    shape = trial.case
    dims = max(shape.head_dim, shape.head_dim_v)
    rows = shape.batch * (shape.heads * shape.seqlen_q + shape.heads_kv * shape.seqlen_k)
    # The oracle holds its tensors and a few matrices of scores in float64
    need = 8 * _ORACLE_COPIES * (shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k + rows * dims)
    if need > (free := facts.free_bytes()):
        got = f"a problem whose oracle needs about {need / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"
        raise value_error("--case", got, "smaller lengths, batch or heads")
    try:
        trial.make(device)
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        got = f"{case!r}, which makes no problem ({error})"
        raise value_error("--case", got, "a problem that can be made") from error
    return trial


def _faults(names: str, arch: Arch | None) -> list[Mutation]:
    known = {
        fault.name: fault
        for fault in mutations()
        if fault.tool is None and (arch is None or families.is_reachable(fault, arch))
    }
    if names == "all":
        return list(known.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen or [names]:
        if name not in known:
            raise value_error("--mutate", repr(name), f"all, or some of {', '.join(known)}")
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
