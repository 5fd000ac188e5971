"""A whole check: draw, compile ahead, judge, shrink what fails, count.

Problems are small, so Python takes most of the time: with `jobs`, worker processes judge them, while others compile for
the next. Kernels of backends that have jobs for compilers are compiled in as many processes as there are cores.

A time limit holds for the whole check: starting the workers, compiling, judging and shrinking. When it is over, a
worker has GRACE_S to finish its problem; then it is killed. What it had judged by then is in its journal, and is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.check.decode import DecodeDrawer
from flashtile.check.draw import Drawer, most_different
from flashtile.check.float32 import Float32Drawer
from flashtile.check.judge import DeviceLost, compile_jobs, forced, is_alive, judge, warm
from flashtile.check.shrink import shrink
from flashtile.check.trial import Trial
from flashtile.errors import Unsupported

_CHUNK = 500  # problems whose kernels are compiled side by side, before the first of them is judged
_BATCH = 10  # problems that are given to a process at a time
_SHRINK_S = 30.0
_SHRINK_SHARE = 0.25  # of a limited time, kept for shrinking as soon as there is a failure
_MAX_SHRUNK = 5  # failures that are made small; the rest is shown as it came
_START_S, _LEAST_S = 15.0, 1.0  # for starting the workers and for judging, however short the time is
GRACE_S = 2.0  # for a worker to finish its problem when the time is over
_TICK_S = 1.0  # between two looks at what was judged meanwhile


@dataclass(frozen=True)
class Settings:
    """What is checked, and for how long: whichever of problems and seconds comes first."""

    backends: Sequence[Backend]
    device: str
    seed: int
    problems: int | None = None
    seconds: float | None = None
    direction: str = "both"
    is_decode: bool = False  # steps over a cache alone (check/decode.py)
    is_float32: bool = False  # float32 by tensor cores alone (check/float32.py)
    reuse: int = 1
    chunk: int = _CHUNK
    jobs: int = 0  # worker processes; 0 judges in this one, where a time limit cannot stop a problem that hangs
    stops_at_failure: bool = False  # at the first, as it came

    @property
    def oracle_device(self) -> str:
        """Where float64 is computed. Float32 problems are small: a GPU would launch longer than a core computes."""
        return "cpu" if self.is_float32 else self.device


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


_NOTHING = Settings(backends=(), device="cpu", seed=0)
Progress = Callable[[str, int], None]  # what goes on, and how many problems are done


def check(settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Draws and judges problems until there are enough of them or the time is over."""
    return check_trials(itertools.islice(drawn(settings), settings.problems), settings, progress)


def drawn(settings: Settings) -> Iterator[Trial]:
    """Problems without end, with lengths at which the backends' tiles end."""
    edges = sorted(set[int]().union(*(backend.tile_sizes() for backend in settings.backends)))
    drawer = DecodeDrawer if settings.is_decode else Float32Drawer if settings.is_float32 else Drawer
    return iter(drawer(settings.seed, settings.device, settings.direction, edges, settings.reuse))


class TimeOver(Exception):  # noqa: N818, it is what happened
    """The time was over while worker processes were started."""


def check_trials(trials: Iterable[Trial], settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Judges these problems."""
    report, start, remaining = Report(), time.monotonic(), iter(trials)
    judges = _Judges(settings, math.inf if settings.seconds is None else start + settings.seconds)

    def judging_end() -> float:
        has_shrinking = bool(report.failures) and not settings.stops_at_failure
        return judges.end - _SHRINK_SHARE * settings.seconds if settings.seconds and has_shrinking else judges.end

    def is_over() -> bool:
        report.is_time_over = report.is_time_over or time.monotonic() > judging_end()
        return report.is_time_over or bool(report.lost) or (settings.stops_at_failure and bool(report.failures))

    def compile_end() -> float:
        # Half of the time at most goes by before a first problem is judged
        return judges.end if report.num_problems else (start + judges.end) / 2

    def take(batch: Report) -> None:
        report.add(batch)
        progress("", report.num_problems)

    with (
        _interruptible(report),
        _importing_ahead(settings),
        _fresh_memory(settings.device),
        judges,
        _Compilers(settings, judges, is_over, compile_end) as compilers,
    ):
        sizes = _chunk_sizes(settings)

        def tick() -> None:
            judges.collect(take, timeout=0)
            progress("compiling", report.num_problems)

        try:
            if settings.seconds is not None and settings.jobs > 0:
                # One for each worker, which compiles what it needs: something is judged however long compilers take
                for trial in itertools.islice(remaining, settings.jobs):
                    judges.submit([trial])
            # One chunk is compiled for ahead of that which is waited for, so that no process is without work
            chunk = list(itertools.islice(remaining, next(sizes)))
            compiling = compilers.start(chunk)
            while chunk and not is_over():
                compile_start = time.monotonic()
                following = list(itertools.islice(remaining, next(sizes)))
                compiling_next = compilers.start(following)
                compilers.finish(chunk, compiling, tick)
                report.compile_s += time.monotonic() - compile_start
                for batch in _batches(chunk, _BATCH if settings.jobs > 0 else 1):
                    if is_over():
                        break
                    judges.submit(batch)
                    # One chunk is judged while the next is compiled for
                    while len(judges.tasks) > (settings.chunk // _BATCH if settings.jobs > 0 else 0) and not is_over():
                        judges.collect(take, _TICK_S)
                chunk, compiling = following, compiling_next
            while judges.tasks and time.monotonic() < judging_end() + GRACE_S:
                judges.collect(take, _TICK_S)
            report.is_time_over = report.is_time_over or bool(judges.tasks)
        finally:
            judges.stop(report.add)
    report.total_s = time.monotonic() - start
    if not (settings.stops_at_failure or report.lost or report.is_interrupted):
        with _interruptible(report), _fresh_memory(settings.device):
            places = [place for place, failure in enumerate(report.failures) if not failure.is_deadly]
            for number, place in enumerate(places[:_MAX_SHRUNK]):
                progress(f"making failure {number + 1} smaller", report.num_problems)
                report.failures[place] = _made_small_apart(report.failures[place], settings, judges.end)
    return report


@contextmanager
def _interruptible(report: Report) -> Iterator[None]:
    """An interrupt ends the work inside, and so does the end of the time; what was found so far is kept."""
    try:
        yield
    except KeyboardInterrupt:
        report.is_interrupted = True
    except TimeOver:
        report.is_time_over = True


def judge_all(
    trials: Sequence[Trial], settings: Settings, end: float = math.inf, keep: Callable[[Report], None] | None = None
) -> Report:
    """Judges trials one after the other; none in a process that lost the GPU. `keep` gets the report of each."""
    report = Report()
    if trials and not is_alive(settings.device):
        return report
    with _fresh_memory(settings.device):
        for trial in trials:
            if report.lost or time.monotonic() > end:
                break
            one = Report()
            _judge(trial, settings, one)
            report.add(one)
            if keep is not None:
                keep(one)
    report.kernels = {
        backend.name: set(backend.loaded_kernels()) for backend in settings.backends if backend.loaded_kernels()
    }
    return report


def _judge(trial: Trial, settings: Settings, report: Report) -> None:
    report.num_problems += 1
    report.values[trial.case.values] += 1
    try:
        verdict = judge(trial, settings.backends, settings.device, settings.oracle_device)
    except DeviceLost as error:
        report.lost = str(error)
        report.failures.append(Failure(error.backends, (report.lost,), trial, trial, (report.lost,)))
        return
    for name, reason in verdict.refusals.items():
        report.refused.setdefault(name, Counter())[reason] += 1
    if trial.families and verdict.complaints:
        report.families[", ".join(trial.families)] += 1
    for name, complaints in verdict.complaints.items():
        report.ran[name] += 1
        if complaints:
            report.failed[name] += 1
            report.failures.append(Failure(name, tuple(complaints), trial, trial, tuple(complaints)))


def _made_small_apart(failure: Failure, settings: Settings, end: float) -> Failure:
    """In a worker process, where there are such: a smaller problem may kill it or hang. The failure then stays as it
    came."""
    seconds = min(_SHRINK_S, end - time.monotonic())
    if seconds <= 0:
        return failure
    if settings.jobs == 0:
        return _made_small(failure, settings, seconds)
    with suppress(BrokenProcessPool, FutureTimeout, TimeOver), processes(1, settings.device, end) as pool:
        seconds = min(seconds, end - time.monotonic())  # what starting the process left
        return pool.submit(_made_small, failure, settings, seconds).result(seconds + GRACE_S)
    return failure


def _made_small(failure: Failure, settings: Settings, seconds: float) -> Failure:
    backend, latest = registry.find(failure.backend), list(failure.complaints)

    def fails(smaller: Trial) -> bool:
        # Twice: what depends on the timing of threads need not fail every time
        for _ in range(2):
            try:
                verdict = judge(smaller, [backend], settings.device, settings.oracle_device)
                found = verdict.complaints.get(backend.name)
            except (ValueError, TypeError, Unsupported) as error:
                if not hasattr(error, "names_argument"):
                    raise
                return False  # validate refuses such a problem
            if found:
                latest[:] = found
                return True
        return False

    smallest = shrink(failure.trial, fails, seconds)
    return dataclasses.replace(failure, smallest=smallest, smallest_complaints=tuple(latest))


def _chunk_sizes(settings: Settings) -> Iterator[int]:
    """Where the time is limited, the first chunks are small: soon there is something to judge."""
    size = settings.chunk if settings.seconds is None else min(settings.chunk, 2 * max(settings.reuse, _BATCH))
    while True:
        yield size
        size = min(settings.chunk, 2 * size)


def _batches(trials: Sequence[Trial], size: int) -> Iterator[Sequence[Trial]]:
    for first in range(0, len(trials), size):
        yield trials[first : first + size]


@dataclass(frozen=True)
class _Task:
    """Trials that were given to a worker process, which writes the report of each to the journal."""

    pool: ProcessPoolExecutor | None
    journal: Path
    trials: Sequence[Trial]

    @property
    def has_begun(self) -> bool:
        return self.journal.exists()

    def judged(self) -> list[Report]:
        """The reports in the journal. The last one may be cut off."""
        found = list[Report]()
        with suppress(OSError, EOFError, pickle.UnpicklingError), self.journal.open("rb") as file:
            while True:
                found.append(pickle.load(file))
        return found


class _Judges:
    """Where trials are judged: here, or in worker processes, which may die of it or hang.

    One death ends a whole pool. Trials that were being judged then are judged again one by one, the others as if
    nothing had been.
    """

    def __init__(self, settings: Settings, end: float) -> None:
        self.settings, self.end, self.opened = settings, end, ExitStack()
        self.pool: ProcessPoolExecutor | None = None
        self.apart: ProcessPoolExecutor | None = None
        self.tasks: dict[Future[Report], _Task] = {}  # what is not collected
        self.num_tasks = 0

    def __enter__(self) -> _Judges:
        self.folder = Path(self.opened.enter_context(TemporaryDirectory()))
        if self.settings.jobs > 0:
            starting = processes(self.settings.jobs, self.settings.device, max(self.end, time.monotonic() + _START_S))
            self.pool = self.opened.enter_context(starting)
            self.end = max(self.end, time.monotonic() + _LEAST_S)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.opened.__exit__(*error)

    def submit(self, trials: Sequence[Trial]) -> None:
        self.num_tasks += 1
        task = _Task(self.pool, self.folder / str(self.num_tasks), trials)
        done: Future[Report] = Future()
        if self.pool is None:
            done.set_result(judge_all(trials, self.settings, self.end))
        else:
            try:
                done = self.pool.submit(_judge_with_journal, task.journal, trials, self.settings, self.end)
            except BrokenProcessPool as error:
                done.set_exception(error)
        self.tasks[done] = task

    def collect(self, take: Callable[[Report], None], timeout: float) -> None:
        """Hands over what is done, or is within the timeout."""
        for done in wait(self.tasks, timeout, FIRST_COMPLETED).done:
            task = self.tasks[done]
            report = self._result(done, task)
            del self.tasks[done]
            task.journal.unlink(missing_ok=True)
            take(report)

    def stop(self, take: Callable[[Report], None]) -> None:
        """Kills what still judges, and hands over what it had judged by then."""
        for pool in {task.pool for task in self.tasks.values() if task.pool is not None}:
            _kill(pool)
        for done, task in self.tasks.items():
            if done.done() and not done.cancelled() and done.exception() is None:
                take(done.result())
                continue
            judged = task.judged()
            for report in judged:
                take(report)
            if task.has_begun and len(judged) < len(task.trials):
                take(Report(unfinished=[str(task.trials[len(judged)])]))
        self.tasks.clear()

    def _result(self, done: Future[Report], task: _Task) -> Report:
        try:
            return done.result()
        except BrokenProcessPool:
            report = Report(num_deaths=int(task.pool is self.pool))
        if task.pool is self.pool:
            self.pool = self._open(self.settings.jobs)
        if not task.has_begun:
            self.submit(task.trials)
            return report
        judged = task.judged()
        for one in judged:
            report.add(one)
        for trial in task.trials[len(judged) :]:
            report.add(self._judge_apart(trial))
        return report

    def _judge_apart(self, trial: Trial) -> Report:
        """Alone in a process; where that dies, each backend in a fresh one, so that it is known of which."""
        if time.monotonic() > self.end:
            return Report()
        self.apart = self.apart or self._open(1)
        try:
            return self._wait_for(self.apart.submit(judge_all, [trial], self.settings))
        except BrokenProcessPool:
            self.apart = None
        except FutureTimeout:
            self.apart = None
            return Report(unfinished=[str(trial)])
        report = Report(num_problems=1, num_deaths=1, values=Counter([trial.case.values]))
        for backend in self.settings.backends:
            try:
                with processes(1, self.settings.device, self.end) as pool:
                    alone = dataclasses.replace(self.settings, backends=[backend])
                    found = self._wait_for(pool.submit(judge_all, [trial], alone))
                report.add(dataclasses.replace(found, num_problems=0, values=Counter()))
            except BrokenProcessPool:
                complaints = ("the process that judged it died",)
                deadly = Failure(backend.name, complaints, trial, trial, complaints, is_deadly=True)
                report.add(
                    Report(ran=Counter([backend.name]), failed=Counter([backend.name]), failures=[deadly], num_deaths=1)
                )
            except (FutureTimeout, TimeOver):
                report.add(Report(unfinished=[str(trial)]))
                break
        return report

    def _wait_for(self, done: Future[Report]) -> Report:
        return done.result(None if self.end == math.inf else max(0.0, self.end - time.monotonic()) + GRACE_S)

    def _open(self, jobs: int) -> ProcessPoolExecutor:
        return self.opened.enter_context(processes(jobs, self.settings.device, self.end))


def _judge_with_journal(journal: Path, trials: Sequence[Trial], settings: Settings, end: float) -> Report:
    with journal.open("wb", buffering=0) as file:
        return judge_all(trials, settings, end, lambda one: pickle.dump(one, file))


# Each process is forked from one that has imported everything and never touched a GPU, whose context cannot be forked
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


_ON_INTERRUPT = signal.SIG_IGN  # in a worker


def _begin(interrupt: Any, environment: dict[str, str]) -> None:
    """An interrupt is for the process that asked, which ends the others. The environment is that of the asking process,
    too."""
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update(environment)


@contextmanager
def processes(jobs: int, device: str, end: float = math.inf, is_ready: bool = True) -> Iterator[ProcessPoolExecutor]:
    """Fresh worker processes. What they still work on at the end is not wanted any more: they are killed.

    is_ready: all have started. Raises TimeOver where that takes longer than until `end`.
    """
    context = multiprocessing.get_context(_START)
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(_ON_INTERRUPT, dict(os.environ)))
    try:
        if is_ready:
            _start_forkserver(device)
            with _interrupts_held():
                started = [pool.submit(judge_all, (), _NOTHING) for _ in range(jobs)]
            left = None if end == math.inf else max(0.0, end - time.monotonic())
            if wait(started, left).not_done:
                raise TimeOver
            for one in started:
                one.result()
        yield pool
    finally:
        if pool._pending_work_items:
            _kill(pool)
        pool.shutdown(wait=True, cancel_futures=True)


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


@contextmanager
def _importing_ahead(settings: Settings) -> Iterator[None]:
    """The workers' imports run while this process gets ready: on a busy machine they take most of a short time."""
    if settings.jobs > 0:
        _start_forkserver(settings.device)
    yield


def _start_forkserver(device: str) -> None:
    """With interrupts ignored: one that comes while it imports torch would end it, and the workers wait for it."""
    if _START != "forkserver":
        return
    from multiprocessing import forkserver  # not on every platform

    # On the CPU _fresh_memory needs the second
    preloaded = [__name__, *(["torch._inductor.config"] if device == "cpu" else [])]
    multiprocessing.get_context(_START).set_forkserver_preload(preloaded)
    with _interrupts_handled_by(signal.SIG_IGN):
        forkserver.ensure_running()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """An interrupt raises at the end of the block: in the middle of starting a worker it would leave that without a
    parent."""
    came = list[bool]()
    with _interrupts_handled_by(lambda *_: came.append(True)):
        yield
    if came:
        raise KeyboardInterrupt


@contextmanager
def _interrupts_handled_by(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # interrupts are for the main thread
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Compilers:
    """Compiles ahead of the judges what trials need. What is left compiles when it is judged."""

    def __init__(
        self, settings: Settings, judges: _Judges, is_over: Callable[[], bool], end: Callable[[], float]
    ) -> None:
        self.settings, self.judges, self.is_over, self.end, self.opened = settings, judges, is_over, end, ExitStack()
        self.job_backends = [backend for backend in settings.backends if backend.has_compile_jobs]
        self.called_backends = [
            backend for backend in settings.backends if backend.is_compiled and not backend.has_compile_jobs
        ]
        self.started = set[Hashable]()

    def __enter__(self) -> _Compilers:
        device = self.settings.device
        self.pool = self.opened.enter_context(processes(os.cpu_count() or 1, device, is_ready=False))
        # A single judge warms itself up: its kernels may be kept in its memory alone
        self.caller = self.judges.pool
        if self.settings.jobs > 1:
            self.caller = self.opened.enter_context(processes(1, device, is_ready=False))
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self.opened.__exit__(*error)

    def start(self, trials: Sequence[Trial]) -> list[Future[None]]:
        """Starts jobs of the backends that have such, each kernel once."""
        jobs: dict[Hashable, Callable[[], None]] = {}
        for trial, backend in itertools.product(trials, self.job_backends):
            if self.is_over():
                return []
            with suppress(Exception):  # shown when the trial is judged
                jobs |= compile_jobs(trial, backend, self.settings.device)
        new = {kernel: job for kernel, job in jobs.items() if kernel not in self.started}
        self.started.update(new)
        if not new:
            return []
        _start_forkserver(self.settings.device)
        try:
            with _interrupts_held():
                return [self.pool.submit(job) for job in new.values()]
        except BrokenProcessPool:
            return []  # they compile when they are judged

    def finish(self, trials: Sequence[Trial], compiling: Sequence[Future[None]], tick: Callable[[], None]) -> None:
        """Makes calls once on the other backends that compile, and waits for the jobs that were started."""
        pending = set(compiling)
        with ExitStack() as opened:
            if self.called_backends:
                if self.settings.jobs == 0:
                    caller: Any = opened.enter_context(ThreadPoolExecutor(1))
                else:
                    caller = self.caller
                with suppress(BrokenProcessPool), _interrupts_held():
                    pending.add(
                        caller.submit(_warm_all, trials, self.called_backends, self.settings.device, self.end())
                    )
            while pending and not self.is_over() and time.monotonic() < self.end():
                pending = wait(pending, _TICK_S, FIRST_COMPLETED).not_done
                tick()
            for job in pending:
                job.cancel()


def _warm_all(trials: Sequence[Trial], backends: Sequence[Backend], device: str, end: float) -> None:
    """Makes calls in as many threads as there are cores: NVRTC works outside Python's lock."""

    def call(trial: Trial, backend: Backend) -> None:
        if time.monotonic() < end:
            warm(trial, backend, device)  # what goes wrong shows when the trial is judged

    by_families: dict[tuple[str, ...], list[Trial]] = {}
    for trial in most_different(trials):
        by_families.setdefault(trial.families, []).append(trial)
    for names, some in by_families.items():
        with _fresh_memory(device), forced(names), ThreadPoolExecutor(os.cpu_count()) as pool:
            for trial, backend in itertools.product(some, backends):
                pool.submit(call, trial, backend)


@contextmanager
def _fresh_memory(device: str) -> Iterator[None]:
    """On the CPU whatever torch.empty gives is NaN. One thread: problems are small, and many are drawn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if device != "cpu":
            yield  # torch.use_deterministic_algorithms would import torch._inductor, for seconds
            return
        was_deterministic = torch.are_deterministic_algorithms_enabled()
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)
