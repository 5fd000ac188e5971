"""Tables of chosen rows and columns of the CSVs under results/.

A choice is `?column=pattern&column=pattern`: rows whose cells match all patterns, in which * stands for any text. The
name of a file may have a *, too; the rows of all these files are one table. `#column,column` after the choice prints
these columns as they are. With `count:column`, `min:column` and `max:column` among them, rows that agree in the other
columns become one line. A column with numbers of a million and more is printed in millions.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from flashtile.errors import value_error
from flashtile.lab.bench.rows import Environment, Row, read
from flashtile.lab.bench.tables import Table, labels, number

NAME = re.compile(r"(?P<file>[\w./*-]+):(?P<kind>[\w-]+)(\?(?P<where>[^#]*))?(#(?P<columns>.+))?")
COMBINED: dict[str, Callable[[Sequence[float]], float]] = {"count": len, "min": min, "max": max}


class Choice(NamedTuple):
    paths: list[Path]
    kind: str
    where: dict[str, str]
    columns: list[str]

    def takes(self, cells: Mapping[str, object]) -> bool:
        return all(fnmatchcase(_text(cells.get(name, "")), pattern) for name, pattern in self.where.items())


def choice(name: str, results: Path) -> Choice:
    """Returns what the name of a marker stands for. Raises ValueError where there is no such file."""
    match = NAME.fullmatch(name)
    if match is None:
        accepted = "<folder>/<csv stem>:<table>, with ?column=pattern&... and, for `columns`, #column,..."
        raise value_error("table", repr(name), accepted)
    paths = sorted(results.glob(f"{match['file']}.csv"), key=_in_order)
    where = [part.partition("=") for part in (match["where"] or "").split("&") if part]
    columns = [column for column in (match["columns"] or "").split(",") if column]
    # A name without * is kept though there is no such file: its reader says so
    return Choice(paths or [results / f"{match['file']}.csv"], match["kind"], {a: b for a, _, b in where}, columns)


def chosen_rows(chosen: Choice) -> list[Row]:
    """Returns the rows of a sweep that the choice takes. Raises ValueError if it takes none."""
    rows = [row for path in chosen.paths for row in read(path, Row)]
    taken = [row for row in rows if chosen.takes(vars(row))]
    if not taken:
        raise value_error("table", f"no row of {chosen.paths[0].name} with {chosen.where}", "patterns that rows match")
    return taken


def columns_table(chosen: Choice) -> tuple[Table, list[Environment]]:
    """Returns the chosen columns of any CSV, and what its rows were measured with."""
    cells = [row for path in chosen.paths for row in _cells(path) if chosen.takes(row)]
    names = [column.rpartition(":")[2] for column in chosen.columns]
    if not cells or not names or any(name not in cells[0] for name in names):
        got = f"{len(cells)} rows of {chosen.paths[0].name} with {chosen.where}, columns {names}"
        raise value_error("table", got, "patterns that rows match, and columns that they have")
    if "provider" in names:
        printed = labels(row["provider"] for row in cells)
        cells = [{**row, "provider": printed[row["provider"]]} for row in cells]
    plain = [column for column in chosen.columns if ":" not in column]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for index, row in enumerate(cells):
        # Every row is a line of its own unless columns are combined
        key = tuple(row[name] for name in plain) if len(plain) < len(names) else (str(index),)
        groups.setdefault(key, []).append(row)
    header, columns = [], []
    for column in chosen.columns:
        texts = [_combined(column, rows) for rows in groups.values()]
        is_large = any(_is_number(text) and float(text) >= 1e6 for text in texts)
        title = "rows" if column.startswith("count:") else column.replace(":", " ")
        header.append(f"{title} / 1e6" if is_large else title)
        columns.append([_shown(text, 1e-6 if is_large else 1.0) for text in texts])
    return Table("", tuple(header), tuple(zip(*columns, strict=True))), [_environment(row) for row in cells]


def origins(environments: Sequence[Environment], line: Callable[[Environment], str]) -> str:
    """Returns a line for each machine and commit that the rows come from, with the first of its commands."""
    commands: dict[tuple[object, ...], dict[str, Environment]] = {}
    for one in environments:
        machine = tuple((name, value) for name, value in asdict(one).items() if name not in ("date", "command"))
        commands.setdefault((*machine, one.date[:10]), {}).setdefault(one.command, one)
    lines = []
    for found in commands.values():
        more = f" and {len(found) - 1} more with other options, in the CSVs" if len(found) > 1 else ""
        lines.append(line(next(iter(found.values()))) + more)
    return "\n\n".join(lines)


def _cells(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise value_error("table", f"no {path.name} ({error.strerror})", "a CSV under results/") from error


def _environment(row: Mapping[str, str]) -> Environment:
    values = {name: row.get(name, "") for name in Environment.__dataclass_fields__}
    return Environment(**{**values, "is_dirty": values["is_dirty"] == "yes"})  # type: ignore[arg-type]


def _combined(column: str, rows: Sequence[Mapping[str, str]]) -> str:
    how, _, name = column.rpartition(":")
    return str(COMBINED[how]([float(row[name]) for row in rows if row[name]])) if how else rows[0][name]


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?(e[-+]?\d+)?", text) is not None


def _shown(text: str, factor: float) -> str:
    """Returns integers and words as they are, other numbers with three digits."""
    is_fraction = _is_number(text) and not text.lstrip("-").isdigit()
    return number(float(text) * factor) if is_fraction or (factor != 1.0 and _is_number(text)) else text


def _text(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _in_order(path: Path) -> list[object]:
    """Returns a key by which d64 comes before d128, and a name before those that it begins."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]
