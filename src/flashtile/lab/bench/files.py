"""Result files appear under their name when they are complete.

`NAME.csv` holds a complete run. Until then its rows are in `NAME_unfinished.csv`, where an interrupt or a crash leaves
them. An earlier unfinished file is kept: the next one is `NAME_unfinished2.csv`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashtile.errors import value_error


def create_unfinished(path: Path) -> Path:
    """Creates the file for the parts of `path`, under the first name that is free."""
    for number in itertools.count(1):
        part = path.with_stem(f"{path.stem}_unfinished{number if number > 1 else ''}")
        try:
            part.open("x").close()
        except FileExistsError:
            continue
        return part
    raise AssertionError  # count does not end


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to. It is renamed to `path` at the end: readers never see a part of the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")


class ResultFile:
    """A text that is written anew as it grows, and gets its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.written = path, path  # where the text is
        self._part: Path | None = None

    def write(self, text: str) -> None:
        if self._part is None:
            self._part = create_unfinished(self.path)
        write_whole(self._part, text)
        self.written = self._part

    def finish(self) -> None:
        if self._part is not None:
            os.replace(self._part, self.path)
            self.written, self._part = self.path, None


def writable_folder(folder: Path, option: str = "--out") -> Path:
    """Creates the folder and checks that it is writable, before minutes of work."""
    folder = Path(os.path.expanduser(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise value_error(
            option, f"{folder} ({error.strerror})", "a folder that can be written", f"Pass another {option}"
        ) from error
    return folder
