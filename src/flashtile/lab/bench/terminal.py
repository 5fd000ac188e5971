"""Terminal output: tables, progress bars and the list of written files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from flashtile.lab.bench import tables

_FILE_WIDTH = 200
_TEXT_COLUMNS = ("reason", "what it does")


def make_console(as_json: bool) -> Console:
    """The console for tables and progress: stderr under --json, and wide enough for a table when it is a file."""
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=_FILE_WIDTH)


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with warnings.catch_warnings(), Progress(*columns, console=console, transient=True) as progress:
        warnings.simplefilter("ignore", UserWarning)
        yield progress


def show(console: Console, table: tables.Table) -> None:
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


def say_files(console: Console, written: Sequence[Path]) -> None:
    console.print("Written: " + ", ".join(str(path) for path in written), highlight=False, markup=False, soft_wrap=True)


def say_remark(console: Console, remark: str) -> None:
    """Says why the times are not to be trusted, if they are not."""
    if remark:
        console.print(remark, style="yellow", highlight=False, markup=False, soft_wrap=True)
