"""A whole check: draw, compile ahead, judge, shrink what fails, count.

Problems are small, so Python takes most of the time: with `jobs`, worker processes judge them, while others compile for
the next. Kernels of backends that have jobs for compilers are compiled in as many processes as there are cores.

A time limit holds for compiling, judging and shrinking. It begins when the workers have started, which takes long on a
slow machine. When it is over, a worker has GRACE_S to finish its problem; then it is killed. What it had judged by then
is in its journal, and is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flashtile.backends import registry
from flashtile.backends.base import Backend
from flashtile.errors import Unsupported
from flashtile.lab.check.decode import DecodeDrawer
from flashtile.lab.check.draw import Drawer, most_different
from flashtile.lab.check.float32 import Float32Drawer
from flashtile.lab.check.judge import DeviceLost, compile_jobs, forced, is_alive, judge, warm
from flashtile.lab.check.packed import PackedDrawer
from flashtile.lab.check.report import Failure, Report, Settings
from flashtile.lab.check.shrink import shrink
from flashtile.lab.check.trial import Trial
from flashtile.lab.check.workers import (
    GRACE_S,
    TICK_S,
    TimeOver,
    as_done,
    interrupts_held,
    kill,
    processes,
    start_forkserver,
)

_BATCH = 10  # problems that are given to a process at a time
_SHRINK_S = 30.0
_SHRINK_SHARE = 0.25  # of a limited time, kept for shrinking as soon as there is a failure
_MAX_SHRUNK = 5  # failures that are made small; the rest is shown as it came
_START_S = 120.0  # for starting the workers, which import torch, where the time is limited

# By kind; "" draws any problem
DRAWERS = {"": Drawer, "decode": DecodeDrawer, "float32": Float32Drawer, "packed": PackedDrawer}
Progress = Callable[[str, int], None]  # what goes on, and how many problems are done


def check(settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Draws and judges problems until there are enough of them or the time is over."""
    return check_trials(itertools.islice(drawn(settings), settings.problems), settings, progress)


def drawn(settings: Settings) -> Iterator[Trial]:
    """Problems without end, with lengths at which the backends' tiles end."""
    edges = sorted(set[int]().union(*(backend.tile_sizes() for backend in settings.backends)))
    return iter(DRAWERS[settings.kind](settings.seed, settings.device, settings.direction, edges, settings.reuse))


def check_trials(trials: Iterable[Trial], settings: Settings, progress: Progress = lambda what, done: None) -> Report:
    """Judges these problems."""
    report, clock, remaining = Report(), settings.clock, iter(trials)
    start = clock()
    judges = _Judges(settings)

    def judging_end() -> float:
        has_shrinking = bool(report.failures) and not settings.stops_at_failure
        return judges.end - _SHRINK_SHARE * settings.seconds if settings.seconds and has_shrinking else judges.end

    def is_over() -> bool:
        report.is_time_over = report.is_time_over or clock() > judging_end()
        return report.is_time_over or bool(report.lost) or (settings.stops_at_failure and bool(report.failures))

    def compile_end() -> float:
        # Half of the time at most goes by before a first problem is judged
        return judges.end if report.num_problems else (judges.start + judges.end) / 2

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
                compile_start = clock()
                following = list(itertools.islice(remaining, next(sizes)))
                compiling_next = compilers.start(following)
                compilers.finish(chunk, compiling, tick)
                report.compile_s += clock() - compile_start
                for batch in _batches(chunk, _BATCH if settings.jobs > 0 else 1):
                    if is_over():
                        break
                    judges.submit(batch)
                    # One chunk is judged while the next is compiled for
                    while len(judges.tasks) > (settings.chunk // _BATCH if settings.jobs > 0 else 0) and not is_over():
                        judges.collect(take, TICK_S)
                chunk, compiling = following, compiling_next
            while judges.tasks and clock() < judging_end() + GRACE_S:
                judges.collect(take, TICK_S)
            report.is_time_over = report.is_time_over or bool(judges.tasks)
        finally:
            judges.stop(report.add)
    report.total_s = clock() - start
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
            report.is_time_over = settings.clock() > end
            if report.lost or report.is_time_over:
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
    """Makes a failure small, in a worker process where there are such: a smaller problem may kill it or hang. The
    failure then stays as it came."""
    clock = settings.clock
    seconds = min(_SHRINK_S, end - clock())
    if seconds <= 0:
        return failure
    if settings.jobs == 0:
        return _made_small(failure, settings, seconds)
    with suppress(BrokenProcessPool, TimeOver), processes(1, settings.device, end, clock) as pool:
        seconds = min(seconds, end - clock())  # what starting the process left
        smaller = pool.submit(_made_small, failure, settings, seconds)
        return next(as_done([smaller], clock() + seconds + GRACE_S, clock)).result()
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

    smallest = shrink(failure.trial, fails, seconds, settings.clock)
    return dataclasses.replace(failure, smallest=smallest, smallest_complaints=tuple(latest))


def _chunk_sizes(settings: Settings) -> Iterator[int]:
    """Yields the sizes of chunks. The first are small where the time is limited: soon there is something to judge."""
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
    """Judges trials, here or in worker processes, which may die of it or hang.

    One death ends a whole pool. Trials that were being judged then are judged again one by one, the others as if
    nothing had been.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.clock, self.opened = settings, settings.clock, ExitStack()
        self._begin()
        self.pool: ProcessPoolExecutor | None = None
        self.apart: ProcessPoolExecutor | None = None
        self.tasks: dict[Future[Report], _Task] = {}  # what is not collected
        self.num_tasks = 0

    def __enter__(self) -> _Judges:
        self.folder = Path(self.opened.enter_context(TemporaryDirectory()))
        if self.settings.jobs > 0:
            limit = math.inf if self.settings.seconds is None else self.clock() + _START_S
            self.pool = self._open(self.settings.jobs, limit)
        self._begin()
        return self

    def _begin(self) -> None:
        """The time begins."""
        self.start = self.clock()
        self.end = math.inf if self.settings.seconds is None else self.start + self.settings.seconds

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
            kill(pool)
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
            self.pool = self._open(self.settings.jobs, self.end)
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
        if self.clock() > self.end:
            return Report()
        self.apart = self.apart or self._open(1, self.end)
        try:
            return self._wait_for(self.apart.submit(judge_all, [trial], self.settings))
        except BrokenProcessPool:
            self.apart = None
        except TimeOver:
            self.apart = None
            return Report(unfinished=[str(trial)])
        report = Report(num_problems=1, num_deaths=1, values=Counter([trial.case.values]))
        for backend in self.settings.backends:
            try:
                with processes(1, self.settings.device, self.end, self.clock) as pool:
                    alone = dataclasses.replace(self.settings, backends=[backend])
                    found = self._wait_for(pool.submit(judge_all, [trial], alone))
                report.add(dataclasses.replace(found, num_problems=0, values=Counter()))
            except BrokenProcessPool:
                complaints = ("the process that judged it died",)
                deadly = Failure(backend.name, complaints, trial, trial, complaints, is_deadly=True)
                report.add(
                    Report(ran=Counter([backend.name]), failed=Counter([backend.name]), failures=[deadly], num_deaths=1)
                )
            except TimeOver:
                report.add(Report(unfinished=[str(trial)]))
                break
        return report

    def _wait_for(self, done: Future[Report]) -> Report:
        return next(as_done([done], max(self.end, self.clock()) + GRACE_S, self.clock)).result()

    def _open(self, jobs: int, end: float) -> ProcessPoolExecutor:
        return self.opened.enter_context(processes(jobs, self.settings.device, end, self.clock))


def _judge_with_journal(journal: Path, trials: Sequence[Trial], settings: Settings, end: float) -> Report:
    with journal.open("wb", buffering=0) as file:
        return judge_all(trials, settings, end, lambda one: pickle.dump(one, file))


@contextmanager
def _importing_ahead(settings: Settings) -> Iterator[None]:
    """The workers' imports run while this process gets ready: on a busy machine they take most of a short time."""
    if settings.jobs > 0:
        start_forkserver(settings.device)
    yield


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
        start_forkserver(self.settings.device)
        try:
            with interrupts_held():
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
                with suppress(BrokenProcessPool), interrupts_held():
                    pending.add(caller.submit(_warm_all, trials, self.called_backends, self.settings, self.end()))
            while pending and not self.is_over() and self.settings.clock() < self.end():
                pending = wait(pending, TICK_S, FIRST_COMPLETED).not_done
                tick()
            for job in pending:
                job.cancel()


def _warm_all(trials: Sequence[Trial], backends: Sequence[Backend], settings: Settings, end: float) -> None:
    """Makes calls in as many threads as there are cores: NVRTC works outside Python's lock."""

    def call(trial: Trial, backend: Backend) -> None:
        if settings.clock() < end:
            warm(trial, backend, settings.device)  # what goes wrong shows when the trial is judged

    by_families: dict[tuple[str, ...], list[Trial]] = {}
    for trial in most_different(trials):
        by_families.setdefault(trial.families, []).append(trial)
    for names, some in by_families.items():
        with _fresh_memory(settings.device), forced(names), ThreadPoolExecutor(os.cpu_count()) as pool:
            for trial, backend in itertools.product(some, backends):
                pool.submit(call, trial, backend)


@contextmanager
def _fresh_memory(device: str) -> Iterator[None]:
    """Fills whatever torch.empty gives on the CPU with NaN, and takes one thread: problems are small, and many are
    drawn."""
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
