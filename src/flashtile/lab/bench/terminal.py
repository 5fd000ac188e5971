"""Terminal output of all commands of the laboratory: tables, progress bars and the list of written files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from flashtile.lab.bench import tables

INTERRUPTED = 130  # the exit status after ^C
_FILE_WIDTH = 200
_TEXT_COLUMNS = ("reason", "what it does")
T = TypeVar("T")


def make_console(as_json: bool) -> Console:
    """The console for tables and progress: stderr under --json, and wide enough for a table when it is a file."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=_FILE_WIDTH)


def progress_bar(console: Console) -> Progress:
    """Returns a bar that vanishes at the end."""
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


def collect(
    console: Console, total: int, steps: Callable[[Callable[[str], None]], Iterable[T]], take: Callable[[T], object]
) -> None:
    """Takes what each of `total` steps yields, under a bar. `steps` gets the function that shows what goes on. Hides
    what rich says in notebooks about widgets."""
    with warnings.catch_warnings(), progress_bar(console) as progress:
        warnings.simplefilter("ignore", UserWarning)
        task = progress.add_task("", total=total)
        for found in steps(lambda text: progress.update(task, description=text)):
            take(found)
            progress.advance(task)


def show(console: Console, table: tables.Table) -> None:
    """Prints a table if it has a line. Words stand on the left, numbers on the right."""
    if not table.lines:
        return
    console.print(table.title, style="bold", highlight=False)
    shown = RichTable(show_edge=False, pad_edge=False)
    for index, name in enumerate(table.header):
        is_text = index == 0 or table.header[-1] == "reason" or name in _TEXT_COLUMNS
        shown.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for line in table.lines:
        shown.add_row(*line)
    console.print(shown)
    console.print()


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a text as it is, in one line that is never wrapped, so that it can be copied. Nothing if it is empty."""
    if text:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say_files(console: Console, written: Sequence[Path]) -> None:
    say(console, "Written: " + ", ".join(str(path) for path in written))


def say_remark(console: Console, remark: str) -> None:
    """Says why the times are not to be trusted, if they are not."""
    say(console, remark, "yellow")
