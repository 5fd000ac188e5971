"""Numbers in the running text of the documentation, filled in from results/.

    <!-- value:nvidia-h200/ladder_fp32?provider=00_naive&batch=4&is_causal=no#median_ms -->1494<!-- /value --> ms

A reference is <folder>/<csv stem>?<column>=<value>&...#<column>. The conditions must leave exactly one row, unless the
cells of several are combined: `#max:column`, `#min:column`, `#count:column`. Two references with ` over ` between them
are a ratio. ` times NUMBER` at the end scales.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from flashtile.errors import value_error
from flashtile.lab.bench.tables import number

VALUE = re.compile(r"(<!-- value:(?P<what>.+?) -->)(?P<body>[^<\n]*)(<!-- /value -->)")
MARK = re.compile(r"<!-- /?value\b")
_REFERENCE = re.compile(r"(?P<file>[\w./-]+)\?(?P<where>[^#]*)#((?P<how>max|min|count):)?(?P<column>\w+)")
_COMBINED: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "count": len}

Rows = tuple[dict[str, str], ...]


def fill(text: str, results: Path) -> str:
    """The text with every value filled in again. Raises ValueError for a reference that does not hold."""
    if len(MARK.findall(text)) != 2 * len(VALUE.findall(text)):
        accepted = "<!-- value:... -->NUMBER<!-- /value --> in one line"
        raise value_error("value", "a marker without its partner", accepted)
    rows = functools.cache(lambda file: _rows(results / f"{file}.csv"))
    return VALUE.sub(lambda match: f"{match[1]}{number(_evaluate(match['what'], rows))}{match[4]}", text)


def _evaluate(what: str, rows: Callable[[str], Rows]) -> float:
    expression, _, factor = what.partition(" times ")
    first, _, second = expression.partition(" over ")
    value = _cell(first.strip(), rows)
    if second:
        value /= _cell(second.strip(), rows)
    return value * float(factor) if factor else value


def _cell(reference: str, rows: Callable[[str], Rows]) -> float:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise value_error("value", repr(reference), "<folder>/<csv stem>?<column>=<value>&...#<column>")
    wanted = [part.partition("=")[::2] for part in match["where"].split("&") if part]
    fitting = [row for row in rows(match["file"]) if all(row.get(key) == cell for key, cell in wanted)]
    cells = [float(row[match["column"]]) for row in fitting if row.get(match["column"])]
    if not cells or (match["how"] is None and len(fitting) != 1):
        fit = f"{reference!r}, which {len(fitting)} rows fit, {len(cells)} with a number"
        raise value_error("value", fit, "conditions that leave one")
    return _COMBINED[match["how"]](cells) if match["how"] else cells[0]


def _rows(path: Path) -> Rows:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return tuple(csv.DictReader(file))
    except OSError as error:
        raise value_error("value", f"no {path.name} ({error.strerror})", "a CSV under results/") from error
