"""Worker processes of a check: how they start, begin and end, and what an interrupt does meanwhile."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from flashtile.lab.check.report import Settings

Result = TypeVar("Result")

GRACE_S = 2.0  # for a worker to finish its problem when the time is over
TICK_S = 1.0  # between two looks at the clock, and at what was judged meanwhile
# Each process is forked from one that has imported everything and never touched a GPU, whose context cannot be forked
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_WORK = "flashtile.lab.check.runner"  # the module whose functions workers run
_ON_INTERRUPT = signal.SIG_IGN  # in a worker


class TimeOver(Exception):  # noqa: N818, it is what happened
    """The time was over before worker processes had started, or done what was asked for."""


def _begin(interrupt: Any, environment: dict[str, str]) -> None:
    """What a worker does first. It ignores interrupts, which are for the process that asked, and takes the environment
    of that process."""
    signal.signal(signal.SIGINT, interrupt)
    os.environ.clear()
    os.environ.update(environment)


def _get_ready() -> None:
    """Judges no problem at all, which imports everything that judging one needs."""
    importlib.import_module(_WORK).judge_all((), Settings(backends=(), device="cpu", seed=0))


@contextmanager
def processes(
    jobs: int, device: str, end: float = math.inf, clock: Callable[[], float] = time.monotonic, is_ready: bool = True
) -> Iterator[ProcessPoolExecutor]:
    """Fresh worker processes. What they still work on at the end is not wanted any more: they are killed.

    is_ready: all have started. Raises TimeOver where that takes longer than until the clock says `end`.
    """
    context = multiprocessing.get_context(_START)
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(_ON_INTERRUPT, dict(os.environ)))
    try:
        if is_ready:
            start_forkserver(device)
            with interrupts_held():
                started = [pool.submit(_get_ready) for _ in range(jobs)]
            for one in as_done(started, end, clock):
                one.result()
        yield pool
    finally:
        if pool._pending_work_items:
            kill(pool)
        pool.shutdown(wait=True, cancel_futures=True)


def as_done(
    futures: Iterable[Future[Result]], end: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Future[Result]]:
    """Futures as they are done. Raises TimeOver where one is not by `end`."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, max(0.0, min(TICK_S, end - clock())), FIRST_COMPLETED)
        yield from done
        if waiting and clock() >= end:
            raise TimeOver


def kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


def start_forkserver(device: str) -> None:
    """With interrupts ignored: one that comes while it imports torch would end it, and the workers wait for it."""
    if _START != "forkserver":
        return
    from multiprocessing import forkserver  # not on every platform

    # On the CPU workers poison memory (runner.py: _fresh_memory), for which torch imports the second
    preloaded = [_WORK, *(["torch._inductor.config"] if device == "cpu" else [])]
    multiprocessing.get_context(_START).set_forkserver_preload(preloaded)
    with _interrupts_handled_by(signal.SIG_IGN):
        forkserver.ensure_running()


@contextmanager
def interrupts_held() -> Iterator[None]:
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
