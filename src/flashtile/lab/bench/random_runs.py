"""Runs over random calls: which ones, rows as they are measured, and how a run goes on behind a call that ended it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from rich.console import Console

from flashtile.errors import value_error
from flashtile.lab.bench import tables
from flashtile.lab.bench.calls import Call, draw_call
from flashtile.lab.bench.load import Load
from flashtile.lab.bench.rows import Writer, as_dict, read
from flashtile.lab.bench.terminal import INTERRUPTED, progress_bar, say_files, say_remark, show

STOPPED = 3  # the exit status after a call that left the GPU unusable
DEFAULT_POINTS = {"cuda": 150, "cpu": 20}


class HasCall(Protocol):
    """A row of a random call."""

    @property
    def call(self) -> int:
        """Number of the call."""


AnyRow = TypeVar("AnyRow", bound=HasCall)


class Lost(Exception):  # noqa: N818, an outcome rather than an error
    """A call left the GPU unusable. Has the rows of the call, one of them with the status `crashed`."""

    def __init__(self, rows: Sequence[Any], message: str) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Selection:
    """The calls of a run, by their numbers."""

    seed: int
    numbers: tuple[int, ...]
    first: int  # calls before it are taken from the unfinished file of the run that stopped
    is_part: bool = False  # some calls by number

    @property
    def suffix(self) -> str:
        """Returns the end of the file's name."""
        return f"seed{self.seed}" + ("_some" if self.is_part else "")


def select(seed: int, points: int | None, first: int | None, calls: str | None, device: str) -> Selection:
    """The calls that --seed, --points, --from and --calls name."""
    if calls is not None:
        for option, value in (("--points", points), ("--from", first)):
            if value is not None:
                raise value_error(option, "it with --calls", "one of both", f"Drop {option}")
        parts = [part.strip() for part in calls.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts):
            raise value_error("--calls", repr(calls), "numbers of random calls, separated by commas")
        return Selection(seed, tuple(sorted({int(part) for part in parts})), 0, is_part=True)
    points = DEFAULT_POINTS[device] if points is None else points
    if points < 1:
        raise value_error("--points", points, "an integer >= 1")
    first = first or 0
    if not 0 <= first <= points:
        raise value_error("--from", first, f"the number of the first call that is left, 0 to {points}")
    return Selection(seed, tuple(range(points)), first)


@dataclass(frozen=True)
class Job(Generic[AnyRow]):
    """A run: what it measures of a call, and what it shows."""

    name: str  # the file's name begins with it
    command: str  # the command line that selects this kind of run
    count: str  # the option, if any, that says of how many calls
    kind: type[AnyRow]
    selection: Selection
    device: str
    measure: Callable[[Call, Callable[[str], None]], list[AnyRow]]
    summary: Callable[[Sequence[AnyRow]], list[tables.Table]]
    alarms: Callable[[Sequence[AnyRow]], list[str]]  # lines that are shown in red
    closing: Callable[[Sequence[AnyRow]], str]
    device_options: str = ""  # further options of the command line, such as --device

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}_{self.selection.suffix}.csv"

    def reproduce(self, number: int) -> str:
        """Returns the options that measure one call again."""
        return f"{self.command} --seed {self.selection.seed} --calls {number}{self.device_options}"


def prepare(job: Job[AnyRow], folder: Path, console: Console, as_json: bool) -> Callable[[], int]:
    """Reads what a run that stopped has left, and returns the rest of it as a job."""
    earlier, source = list[AnyRow](), None
    if job.selection.first:
        earlier, source = _earlier(job, folder)
    return partial(_run, job, earlier, source, folder, console, as_json)


def _earlier(job: Job[AnyRow], folder: Path) -> tuple[list[AnyRow], Path | None]:
    """Returns the rows of the calls before the first one, and their file if it holds nothing else."""
    path, first = job.path(folder), job.selection.first
    found = sorted(folder.glob(f"{path.stem}_unfinished*.csv"), key=lambda one: one.stat().st_mtime)
    if not found:
        raise value_error(
            "--from", f"{first} without {path.stem}_unfinished.csv", "the folder of the run that stopped", "Pass --out"
        )
    rows = read(found[-1], job.kind)
    kept = [row for row in rows if row.call < first]
    return kept, found[-1] if len(kept) == len(rows) else None


def _run(
    job: Job[AnyRow], earlier: list[AnyRow], source: Path | None, folder: Path, console: Console, as_json: bool
) -> int:
    numbers = [number for number in job.selection.numbers if number >= job.selection.first]
    rows, load, status, stopped = list(earlier), Load(job.device), 0, ""
    writer, next_call = Writer(job.path(folder), job.kind), job.selection.first
    writer.add(earlier)
    left_out = sorted(set(range(job.selection.first)) - {row.call for row in earlier})
    if left_out:
        said = f"Calls before --from that the unfinished file does not have: {', '.join(map(str, left_out))}."
        console.print(said, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if source is not None:
        source.unlink()  # all of its rows are in the new file
    try:
        with writer, progress_bar(console) as progress:
            total = len(job.selection.numbers)
            task = progress.add_task("", total=total, completed=total - len(numbers))
            for number in numbers:
                next_call = number
                call = draw_call(job.selection.seed, number, job.device)
                say = partial(_say, progress, task, call)
                try:
                    found = job.measure(call, say)
                except Lost as lost:
                    writer.add(lost.rows)
                    rows += lost.rows
                    raise
                writer.add(found)
                rows += found
                progress.advance(task)
                release(job.device)
    except KeyboardInterrupt:
        status, stopped = INTERRUPTED, "Interrupted."
    except Lost as lost:
        status, stopped, next_call = STOPPED, str(lost), next_call + 1
    return _report(job, rows, writer, load.remark(), status, stopped, next_call, console, as_json)


def release(device: str) -> None:
    """Frees memory for what comes next."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _say(progress: Any, task: Any, call: Call, what: str) -> None:
    progress.update(task, description=f"{call.number} {call.words()}: {what}")


def _report(
    job: Job[AnyRow],
    rows: list[AnyRow],
    writer: Writer[AnyRow],
    remark: str,
    status: int,
    stopped: str,
    next_call: int,
    console: Console,
    as_json: bool,
) -> int:
    for table in job.summary(rows):
        show(console, table)
    alarms = job.alarms(rows)
    for line in alarms:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if writer.rows:
        say_files(console, [writer.written])
    say_remark(console, remark)
    if stopped and job.selection.is_part:
        console.print(stopped, style="red", highlight=False, markup=False, soft_wrap=True)
    elif stopped:
        selection = job.selection
        again = f"{job.command}{job.count} --seed {selection.seed} --from {next_call}{job.device_options}"
        hint = f"{stopped} Go on with {again}"
        console.print(hint, style="red", highlight=False, markup=False, soft_wrap=True)
    closing = "" if status else job.closing(rows)
    if closing:
        console.print(closing, style="bold", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        payload = {"rows": [as_dict(row) for row in rows], "alarms": alarms, "remark": remark, "closing": closing}
        print(json.dumps(payload, indent=1))
    return status
