"""A whole check: draw, compile ahead, judge, shrink what fails, count.

Problems are small, so Python takes most of the time: with `jobs`, processes of their own judge them, while this one
compiles for the next. Kernels of backends that have jobs for compilers are compiled by processes too, as many as there
are cores.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.check.draw import Drawer, most_different
from flashtile.check.judge import DeviceLost, compile_jobs, is_alive, judge, warm
from flashtile.check.shrink import shrink
from flashtile.check.trial import Trial
from flashtile.errors import Unsupported

_CHUNK = 500  # problems whose kernels are compiled side by side, before the first of them is judged
_BATCH = 10  # problems that are given to a process at a time
_SHRINK_S = 30.0
_MAX_SHRUNK = 5  # failures that are made small; the rest is shown as it came


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
    jobs: int = 1
    stops_at_failure: bool = False  # at the first, as it came


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
    values: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    compile_s: float = 0.0
    total_s: float = 0.0
    lost: str = ""  # why the GPU is gone, if it is
    num_deaths: int = 0  # of processes that judged
    is_interrupted: bool = False

    def add(self, other: Report) -> None:
        self.num_problems += other.num_problems
        self.num_deaths += other.num_deaths
        for mine, its in ((self.ran, other.ran), (self.failed, other.failed), (self.values, other.values)):
            mine.update(its)
        for name, reasons in other.refused.items():
            self.refused.setdefault(name, Counter()).update(reasons)
        for name, kernels in other.kernels.items():
            self.kernels.setdefault(name, set()).update(kernels)
        self.failures += other.failures
        self.lost = self.lost or other.lost

    def as_dict(self) -> dict[str, Any]:
        return {
            "problems": self.num_problems,
            "ran": dict(self.ran),
            "failed": {name: self.failed[name] for name in self.ran},
            "refused": {name: dict(reasons.most_common()) for name, reasons in self.refused.items()},
            "kernels": {name: len(kernels) for name, kernels in self.kernels.items()},
            "values": dict(self.values.most_common()),
            "compile_s": round(self.compile_s, 1),
            "total_s": round(self.total_s, 1),
            "failures": [failure.as_dict() for failure in self.failures],
            "lost": self.lost,
            "deaths": self.num_deaths,
            "is_interrupted": self.is_interrupted,
        }


_NOTHING = Settings(backends=(), device="cpu", seed=0)
Progress = Callable[[str, int], None]  # what goes on, and how many problems are done


def check(settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Draws and judges problems until there are enough of them or the time is over."""
    return check_trials(itertools.islice(drawn(settings), settings.problems), settings, progress)


def drawn(settings: Settings) -> Iterator[Trial]:
    """Problems without end, with lengths at which the backends' tiles end."""
    edges = sorted(set[int]().union(*(backend.tile_sizes() for backend in settings.backends)))
    return iter(Drawer(settings.seed, settings.device, settings.direction, edges, settings.reuse))


def check_trials(trials: Iterable[Trial], settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Judges these problems."""
    report, start, remaining = Report(), time.monotonic(), iter(trials)
    deadline: float | None = None

    def is_over() -> bool:
        has_enough = bool(report.lost) or (settings.stops_at_failure and bool(report.failures))
        return has_enough or (deadline is not None and time.monotonic() > deadline)

    def take(batch: Report) -> None:
        report.add(batch)
        progress("", report.num_problems)

    with (
        _interruptible(report),
        _fresh_memory(settings.device),
        _Judges(settings) as judges,
        _compilers(settings) as start_compiling,
    ):
        # Time counts from when all processes are there
        deadline = None if settings.seconds is None else time.monotonic() + settings.seconds

        def tick() -> None:
            judges.collect(take, timeout=0)
            progress("compiling", report.num_problems)

        try:
            # One chunk is compiled for ahead of that which is waited for, so that no process is without work
            chunk = list(itertools.islice(remaining, settings.chunk))
            compiling = start_compiling(chunk)
            while not is_over() and chunk:
                compile_start = time.monotonic()
                following = list(itertools.islice(remaining, settings.chunk))
                compiling_next = start_compiling(following)
                _compile(chunk, settings, compiling, tick)
                report.compile_s += time.monotonic() - compile_start
                for batch in _batches(chunk, _BATCH if settings.jobs > 1 else 1):
                    if is_over():
                        break
                    judges.submit(batch, deadline)
                    # One chunk is judged while the next is compiled for
                    while len(judges.tasks) > (settings.chunk // _BATCH if settings.jobs > 1 else 0):
                        judges.collect(take)
                chunk, compiling = following, compiling_next
            while judges.tasks:
                judges.collect(take)
        except KeyboardInterrupt:
            for future in judges.tasks:
                if future.done() and future.exception() is None:
                    report.add(future.result())
            raise
    report.total_s = time.monotonic() - start
    if not (settings.stops_at_failure or report.lost or report.is_interrupted):
        with _interruptible(report), _fresh_memory(settings.device):
            places = [place for place, failure in enumerate(report.failures) if not failure.is_deadly]
            for number, place in enumerate(places[:_MAX_SHRUNK]):
                progress(f"making failure {number + 1} smaller", report.num_problems)
                report.failures[place] = _made_small_apart(report.failures[place], settings)
    return report


@contextmanager
def _interruptible(report: Report) -> Iterator[None]:
    """An interrupt ends the work inside, and what was found so far is kept."""
    try:
        yield
    except KeyboardInterrupt:
        report.is_interrupted = True


def judge_all(trials: Sequence[Trial], settings: Settings, deadline: float | None = None) -> Report:
    """Judges trials one after the other; none in a process that lost the GPU."""
    report = Report()
    if trials and not is_alive(settings.device):
        return report
    with _fresh_memory(settings.device):
        for trial in trials:
            if report.lost or (deadline is not None and time.monotonic() > deadline):
                break
            _judge(trial, settings, report)
    report.kernels = {
        backend.name: set(backend.loaded_kernels()) for backend in settings.backends if backend.loaded_kernels()
    }
    return report


def _judge(trial: Trial, settings: Settings, report: Report) -> None:
    report.num_problems += 1
    report.values[trial.case.values] += 1
    try:
        verdict = judge(trial, settings.backends, settings.device)
    except DeviceLost as error:
        report.lost = str(error)
        report.failures.append(Failure(error.backends, (report.lost,), trial, trial, (report.lost,)))
        return
    for name, reason in verdict.refusals.items():
        report.refused.setdefault(name, Counter())[reason] += 1
    for name, complaints in verdict.complaints.items():
        report.ran[name] += 1
        if complaints:
            report.failed[name] += 1
            report.failures.append(Failure(name, tuple(complaints), trial, trial, tuple(complaints)))


def _made_small_apart(failure: Failure, settings: Settings) -> Failure:
    """In a process of its own where there are such: a smaller problem may kill it, and the failure stays as it came."""
    if settings.jobs == 1:
        return _made_small(failure, settings)
    with suppress(BrokenProcessPool), processes(1) as pool:
        return pool.submit(_made_small, failure, settings).result()
    return failure


def _made_small(failure: Failure, settings: Settings) -> Failure:
    backend, latest = registry.find(failure.backend), list(failure.complaints)

    def fails(smaller: Trial) -> bool:
        # Twice: what depends on the timing of threads need not fail every time
        for _ in range(2):
            try:
                found = judge(smaller, [backend], settings.device).complaints.get(backend.name)
            except (ValueError, TypeError, Unsupported) as error:
                if not hasattr(error, "names_argument"):
                    raise
                return False  # validate refuses such a problem
            if found:
                latest[:] = found
                return True
        return False

    smallest = shrink(failure.trial, fails, _SHRINK_S)
    return dataclasses.replace(failure, smallest=smallest, smallest_complaints=tuple(latest))


def _batches(trials: Sequence[Trial], size: int) -> Iterator[Sequence[Trial]]:
    for first in range(0, len(trials), size):
        yield trials[first : first + size]


@dataclass(frozen=True)
class _Task:
    """Trials that were given to processes. The mark is a file that is there while one of them judges."""

    pool: ProcessPoolExecutor | None
    mark: Path
    trials: Sequence[Trial]
    deadline: float | None


class _Judges:
    """Where trials are judged: here, or in processes of their own, which may die of it.

    One death ends a whole pool. Trials that were being judged then are judged again one by one, the others as if
    nothing had been.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.opened = settings, ExitStack()
        self.pool: ProcessPoolExecutor | None = None
        self.apart: ProcessPoolExecutor | None = None
        self.tasks: dict[Future[Report], _Task] = {}  # what is not collected
        self.num_tasks = 0

    def __enter__(self) -> _Judges:
        self.folder = Path(self.opened.enter_context(TemporaryDirectory()))
        if self.settings.jobs > 1:
            self.pool = self._open(self.settings.jobs)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.opened.__exit__(*error)

    def submit(self, trials: Sequence[Trial], deadline: float | None) -> None:
        self.num_tasks += 1
        task = _Task(self.pool, self.folder / str(self.num_tasks), trials, deadline)
        done: Future[Report] = Future()
        if self.pool is None:
            done.set_result(judge_all(trials, self.settings, deadline))
        else:
            try:
                done = self.pool.submit(_judge_marked, task.mark, trials, self.settings, deadline)
            except BrokenProcessPool as error:
                done.set_exception(error)
        self.tasks[done] = task

    def collect(self, take: Callable[[Report], None], timeout: float | None = None) -> None:
        """Hands over what is done; without a timeout, at least one."""
        for done in wait(self.tasks, timeout, FIRST_COMPLETED).done:
            report = self._result(done, self.tasks[done])
            del self.tasks[done]
            take(report)

    def _result(self, done: Future[Report], task: _Task) -> Report:
        try:
            return done.result()
        except BrokenProcessPool:
            report = Report(num_deaths=int(task.pool is self.pool))
        if task.pool is self.pool:
            self.pool = self._open(self.settings.jobs)
        if task.mark.exists():
            for trial in task.trials:
                report.add(self._judge_apart(trial, task.deadline))
        else:
            self.submit(task.trials, task.deadline)
        return report

    def _judge_apart(self, trial: Trial, deadline: float | None) -> Report:
        """Alone in a process; where that dies, each backend in a fresh one, so that it is known of which."""
        self.apart = self.apart or self._open(1)
        try:
            return self.apart.submit(judge_all, [trial], self.settings, deadline).result()
        except BrokenProcessPool:
            self.apart = None
        report = Report(num_problems=1, num_deaths=1, values=Counter([trial.case.values]))
        for backend in self.settings.backends:
            try:
                with processes(1) as pool:
                    found = pool.submit(
                        judge_all, [trial], dataclasses.replace(self.settings, backends=[backend])
                    ).result()
                report.add(dataclasses.replace(found, num_problems=0, values=Counter()))
            except BrokenProcessPool:
                complaints = ("the process that judged it died",)
                deadly = Failure(backend.name, complaints, trial, trial, complaints, is_deadly=True)
                report.add(
                    Report(ran=Counter([backend.name]), failed=Counter([backend.name]), failures=[deadly], num_deaths=1)
                )
        return report

    def _open(self, jobs: int) -> ProcessPoolExecutor:
        return self.opened.enter_context(processes(jobs))


def _judge_marked(mark: Path, trials: Sequence[Trial], settings: Settings, deadline: float | None) -> Report:
    mark.touch()
    report = judge_all(trials, settings, deadline)
    mark.unlink()
    return report


# Each process is forked from one that has imported everything and never touched a GPU, whose context cannot be forked
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def _begin(interrupt: Any, environment: dict[str, str]) -> None:
    """An interrupt is for the process that asked, which ends the others. The environment is that of the asking process,
    too."""
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def processes(jobs: int, is_ready: bool = True) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes. What waits is dropped at the end; an interrupt ends what runs, too. is_ready: all have
    started."""
    context = multiprocessing.get_context(_START)
    if _START == "forkserver":
        # The second is what torch.use_deterministic_algorithms imports, for seconds
        context.set_forkserver_preload([__name__, "torch._inductor.config"])
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(signal.SIG_IGN, dict(os.environ)))
    try:
        if is_ready:
            for started in [pool.submit(judge_all, (), _NOTHING) for _ in range(jobs)]:
                started.result()
        yield pool
    except KeyboardInterrupt:
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _compilers(settings: Settings) -> Iterator[Callable[[Sequence[Trial]], list[Future[None]]]]:
    """Starts to compile for trials in processes of their own, each kernel once."""
    backends = [backend for backend in settings.backends if backend.has_compile_jobs]
    started = set[Hashable]()
    with processes(os.cpu_count() or 1, is_ready=False) as pool:

        def start(trials: Sequence[Trial]) -> list[Future[None]]:
            jobs: dict[Hashable, Callable[[], None]] = {}
            for trial, backend in itertools.product(trials, backends):
                with suppress(Exception):  # shown when the trial is judged
                    jobs |= compile_jobs(trial, backend, settings.device)
            new = {kernel: job for kernel, job in jobs.items() if kernel not in started}
            started.update(new)
            try:
                return [pool.submit(job) for job in new.values()]
            except BrokenProcessPool:
                return []  # they compile when they are judged

        yield start


def _compile(
    trials: Sequence[Trial], settings: Settings, compiling: Sequence[Future[None]], tick: Callable[[], None]
) -> None:
    """Makes calls once on the other backends that compile, in as many threads as there are cores, and waits for those
    that compile already.

    What is left compiles when it is judged.
    """
    called = [backend for backend in settings.backends if backend.is_compiled and not backend.has_compile_jobs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(warm, trial, backend, settings.device) for trial in most_different(trials) for backend in called
        ]
        try:
            for job in (*jobs, *compiling):
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
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_num_threads(threads)
