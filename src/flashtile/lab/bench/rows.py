"""CSV rows as frozen dataclasses; the field order is the column order."""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, get_type_hints

from flashtile.errors import value_error
from flashtile.lab.bench import files
from flashtile.lab.bench.points import Point


@dataclass(frozen=True)
class Environment:
    """The machine and software that a row was measured with."""

    device: str
    driver: str
    torch: str
    cuda: str
    cudnn: str
    triton: str
    python: str
    flashtile: str
    commit: str
    is_dirty: bool
    date: str
    command: str


@dataclass(frozen=True)
class Row:
    """One provider at one point. Without a measurement fields are None, and `reason` says why."""

    sweep: str
    provider: str
    is_baseline: bool
    detail: str  # the kernel or backend that ran
    direction: str  # fwd, bwd, fwd+bwd
    dtype: str
    is_causal: bool
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    option: str  # the name of the call in a grid of options, else empty
    status: str  # ok, refused, oom, slow or inaccurate
    reason: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    num_rounds: int | None
    num_calls: int | None  # per round
    num_copies: int | None  # copies of the inputs, used in rotation
    timer: str  # events, graph or perf_counter
    first_call_ms: float | None
    tflops: float | None
    gb_per_s: float | None  # least possible bytes over the time
    copy_gb_per_s: float | None  # of a large copy in this run, bytes read and written; where bandwidth is what counts
    memory_bytes: int | None  # peak beyond the inputs
    max_error: float | None  # against float64
    yardstick_error: float | None  # of plain math in the input dtype
    relative_error: float | None  # norm of the error over the norm of the float64 result, of the worst tensor
    is_accurate: bool | None
    checked: str  # what the accuracy was computed on
    protocol: str  # of median_ms, p20_ms, p80_ms and what follows from them: sustained, short or rounds
    seed: int | None  # of the order in which providers take turns
    alone_ms: float | None  # median in short bursts without another provider between them
    short_ms: float | None  # median in short bursts, providers in turn
    short_clock_mhz: float | None  # of the multiprocessors, median
    short_power_w: float | None  # of the board, mean
    short_joules: float | None  # of a call: power times time
    sustained_ms: float | None  # the same under sustained load
    sustained_clock_mhz: float | None
    sustained_power_w: float | None
    sustained_joules: float | None
    env: Environment

    @property
    def is_ok(self) -> bool:
        return self.status == "ok" and self.median_ms is not None

    @property
    def point(self) -> Point:
        return Point(**shared_fields(Point, self))


@dataclass(frozen=True)
class OverheadRow:
    """Host time of one call that does next to no work."""

    provider: str
    is_baseline: bool
    mode: str  # one of overhead.MODES
    case: str  # repeated: one shape; growing: one query, with seqlen_k one longer in every call
    dtype: str
    status: str
    reason: str
    median_us: float | None
    p20_us: float | None
    p80_us: float | None
    env: Environment


@dataclass(frozen=True)
class ColdRow:
    """The first call of a new process."""

    provider: str
    is_baseline: bool
    cache: str  # empty or warm
    direction: str
    dtype: str
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    status: str
    reason: str
    import_torch_s: float | None
    import_flashtile_s: float | None
    start_device_s: float | None
    first_call_s: float | None
    second_call_s: float | None
    resident_bytes: int | None  # growth of peak resident memory during the first call
    env: Environment


# Their values in files that were written before the column was added
_LATER_COLUMNS: dict[str, Any] = {
    "option": "",
    "copy_gb_per_s": None,
    "relative_error": None,
    "protocol": "",
    "seed": None,
    "alone_ms": None,
    **{f"{name}_{what}": None for name in ("short", "sustained") for what in ("ms", "clock_mhz", "power_w", "joules")},
    "tensor_ceiling_tflops": 0.0,
    "tensor_percent": None,
}


def shared_fields(kind: type[Any], source: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that the source, another one, has too, with its values."""
    own = {field.name for field in dataclasses.fields(source)}
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(kind) if field.name in own}


AnyRow = TypeVar("AnyRow")  # a frozen dataclass as above: numbers, strings and `env`


def columns(kind: type[Any]) -> list[str]:
    """The header: field names in order, with those of Environment in place of `env`."""
    names: list[str] = []
    for field in dataclasses.fields(kind):
        names += [inner.name for inner in dataclasses.fields(Environment)] if field.name == "env" else [field.name]
    return names


def as_dict(row: Any) -> dict[str, Any]:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(row) if field.name != "env"}
    return {**values, **dataclasses.asdict(row.env)}


class Writer(Generic[AnyRow]):
    """Writes rows as they are measured. They get the name `path` at the end; an interrupted run keeps them in the
    unfinished file (bench/files.py)."""

    def __init__(self, path: Path, kind: type[AnyRow]):
        self.path = path
        self.written = files.create_unfinished(path)  # where the rows are
        self.rows: list[AnyRow] = []  # what was written
        self._file = self.written.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns(kind), lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def add(self, rows: Iterable[AnyRow]) -> None:
        for row in rows:
            self._writer.writerow({name: _to_text(value) for name, value in as_dict(row).items()})
            self.rows.append(row)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Writer[AnyRow]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None:
            os.replace(self.written, self.path)
            self.written = self.path
        elif not self.rows:
            self.written.unlink()


def read(path: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """Reads a CSV that `Writer` wrote."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise value_error("file", f"{path.name} ({why})", "a CSV that `flashtile bench` wrote") from error
    reader = csv.DictReader(text.splitlines())
    header, names = list(reader.fieldnames or ()), columns(kind)
    added = {name: value for name, value in _LATER_COLUMNS.items() if name in names and name not in header}
    if header != [name for name in names if name not in added]:
        raise value_error(
            "file",
            f"{path.name} with other columns",
            f"the columns of {kind.__name__}",
            "Measure again with this version",
        )
    hints = {**get_type_hints(kind), **get_type_hints(Environment)}
    found = []
    for record in reader:
        try:
            values = {name: _from_text(text, str(hints[name])) for name, text in record.items()}
        except (KeyError, TypeError, ValueError) as error:  # cut off, or edited
            line = f"{path.name} with a broken line {reader.line_num}"
            raise value_error("file", line, f"rows of {kind.__name__}", "Remove the line") from error
        env = Environment(**{field.name: values.pop(field.name) for field in dataclasses.fields(Environment)})
        found.append(kind(**added, **values, env=env))  # type: ignore[call-arg]
    return found


def _to_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())


def _from_text(text: str, hint: str) -> Any:
    """Converts a cell to its type; `hint` is the annotation as text."""
    if "None" in hint and text == "":
        return None
    if "bool" in hint:
        return text == "yes"
    if "float" in hint:
        return float(text)
    return int(text) if "int" in hint else text
