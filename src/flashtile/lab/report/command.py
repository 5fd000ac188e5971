"""`flashtile report`: one HTML page from a results folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from flashtile.errors import value_error
from flashtile.lab.bench.files import writable_folder, write_whole
from flashtile.lab.report import collect, page

MAX_BYTES = 5 * 2**20


def prepare(results: Path, out: Path) -> Callable[[], int]:
    """Reads the results and returns the job."""
    if out.is_dir() or not out.suffix:
        raise value_error("--out", str(out), "the name of a file, such as report.html")
    writable_folder(out.parent)
    return partial(_write, page.build(collect.collect(results)), out)


def _write(text: str, out: Path) -> int:
    write_whole(out, text)
    size = len(text.encode())
    note = f" It is over {MAX_BYTES / 2**20:.0f} MiB." if size > MAX_BYTES else ""
    print(f"Written: {out} ({size / 2**20:.2f} MiB).{note} Open it in a browser; it needs no network.")
    return 0
