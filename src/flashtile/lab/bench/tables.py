"""Rows as small text tables, for the terminal and for the documentation.

CSV files keep the provider names as measured (`cuda`, `cpu`, ...). Tables and figures print `labels` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashtile.backends import registry
from flashtile.errors import value_error
from flashtile.lab.bench import compare, join, overhead, standing
from flashtile.lab.bench.protocol import NAMES as PROTOCOLS
from flashtile.lab.bench.protocol import SUSTAINED
from flashtile.lab.bench.providers import AUTOMATIC
from flashtile.lab.bench.rows import ColdRow, OverheadRow, Row

DEFAULT_BACKENDS = ("cuda", "cpu")  # what `backend=None` takes on each device


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.header[1:])]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.lines))


def labels(names: Iterable[str]) -> dict[str, str]:
    """The printed name of each provider in one table or figure.

    A default backend is `flashtile` where it is the only backend of ours; where several are compared each is
    `flashtile (<backend>)`. Baselines and the rungs of the ladder keep their names.
    """
    known = registry.names()
    unique = list(dict.fromkeys(names))
    ours = [name for name in unique if name in known]
    is_alone = len(ours) == 1 and ours[0] in DEFAULT_BACKENDS
    return {name: name if name not in ours else "flashtile" if is_alone else f"flashtile ({name})" for name in unique}


def number(value: float) -> str:
    """Three significant digits, without an exponent between 1e-4 and 1e6."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def known(value: float | None) -> str:
    """A number, or nothing where there is none."""
    return "" if value is None else number(value)


def percent(part: float, whole: float = 1.0) -> str:
    """Two digits of a share as a percentage."""
    found = 100 * part / whole
    return f"{found:.0f} %" if found >= 9.5 else f"{found:.2g} %"


_CELLS: dict[str, tuple[str, Callable[[Row], float | None]]] = {
    "latency": ("Median time, ms", lambda row: row.median_ms),
    "throughput": ("TFLOP/s", lambda row: row.tflops),
    "bandwidth": ("GB/s", lambda row: row.gb_per_s),
    "memory": (
        "Peak memory beyond the inputs, MiB",
        lambda row: None if row.memory_bytes is None else row.memory_bytes / 2**20,
    ),
    "accuracy": ("Largest error against float64", lambda row: row.max_error),
}
KINDS = (*_CELLS, "ratios", "options", "float32", "serving", "standings", "places", "power")


def of(rows: Sequence[Row], kind: str) -> Table:
    """The table of that name, one of KINDS. A column for each measured provider, a line for each point."""
    if kind == "serving":
        return serving_table(rows)
    if rows and rows[0].sweep == "decode":
        rows = [row for row in rows if not row.option]  # the others have a table of their own
    if kind in _BY_PROTOCOL:
        return _BY_PROTOCOL[kind](rows)
    if kind == "ratios":
        return ratio_table(rows)
    if kind == "options":
        return options_table(rows)
    if kind == "float32":
        return float32_table(rows)
    if kind not in _CELLS:
        raise value_error("table", repr(kind), ", ".join(KINDS))
    title, value = _CELLS[kind]
    names = measured_labels(rows)
    points = point_labels(rows)
    lines = []
    for point, here in join.groups(rows, lambda row: points[id(row)]).items():
        lines.append((point, *_cells(here, names, value)))
    return Table(title, ("", *names.values()), tuple(lines))


def measured_labels(rows: Sequence[Row]) -> dict[str, str]:
    """The labels of the providers that were timed at one point or more, in the order of the rows."""
    timed = {row.provider for row in rows if row.median_ms is not None}
    return labels(row.provider for row in rows if row.provider in timed)


def _cells(rows: Sequence[Row], names: Iterable[str], value: Callable[[Row], float | None]) -> list[str]:
    """The cells of one line: one row at most for each provider."""
    found = join.unique(rows, lambda row: row.provider)
    return [_cell(found[name], value) if name in found else "" for name in names]


def _micros(row: Row) -> float | None:
    return row.median_ms and row.median_ms * 1e3


def _cell(row: Row, value: Callable[[Row], float | None]) -> str:
    if row.status == "inaccurate":
        return "inaccurate"
    found = value(row)
    return row.status if found is None else number(found)


def point_labels(rows: Sequence[Row]) -> dict[int, str]:
    """A short name for each row's point, by the row's id: only the parts that vary between the rows."""
    if rows and rows[0].sweep == "decode" and any(row.option for row in rows):
        serving, plain = [row for row in rows if row.option], [row for row in rows if not row.option]
        return point_labels(plain) | {id(row): serving_label(row) for row in serving}
    parts: list[tuple[str, Callable[[Row], str]]] = [
        ("direction", lambda row: row.direction),
        ("head_dim", lambda row: f"d={row.head_dim}"),
        ("is_causal", lambda row: "causal" if row.is_causal else "full"),
        ("batch", lambda row: f"B={row.batch}"),
        ("seqlen_k", lambda row: f"S={row.seqlen_k}"),
    ]
    if any(row.option for row in rows):
        parts = [("option", lambda row: row.option), parts[0]]
    varying = [
        text for name, text in parts if name in ("seqlen_k", "option") or len({getattr(row, name) for row in rows}) > 1
    ]
    return {id(row): " ".join(text(row) for text in varying) for row in rows}


def options_table(rows: Sequence[Row]) -> Table:
    """The times of a grid of options in microseconds, and the fastest peer's time over ours."""
    names, points = measured_labels(rows), point_labels(rows)
    lines = []
    for point, here in join.groups(rows, lambda row: points[id(row)]).items():
        ours = [row.median_ms for row in here if row.is_ok and row.median_ms and not row.is_baseline]
        peers = [row.median_ms for row in here if row.is_ok and row.median_ms and row.is_baseline]
        ratio = f"{min(peers) / min(ours):.2f}" if ours and peers else ""
        lines.append((point, *_cells(here, names, _micros), ratio))
    return Table("Median time, microseconds", ("", *names.values(), "best peer / ours"), tuple(lines))


def float32_table(rows: Sequence[Row]) -> Table:
    """The float32 grid: speed against the fastest peer, what "high" precision gains, and relative errors."""
    lines = []
    for point, group in join.groups(rows, lambda row: row.point).items():
        here = join.unique((row for row in group if row.is_ok), lambda row: row.provider)
        ours, high = here.get("flashtile"), here.get("flashtile-high")
        peer = min(
            (row for row in here.values() if row.is_baseline), key=lambda row: row.median_ms or 0.0, default=None
        )
        label = f"{point.direction} d={point.head_dim} {point.option or ('causal' if point.is_causal else 'full')}"
        lines.append(
            (
                label,
                number(ours.median_ms) if ours and ours.median_ms else "",
                number(ours.tflops) if ours and ours.tflops else "",
                _speed(peer, ours),
                _speed(ours, high),
                *(known(row.relative_error if row else None) for row in (ours, peer, high)),
            )
        )
    peers = ", ".join(dict.fromkeys(row.provider for row in rows if row.is_baseline)) or "no peer"
    header = ("", "ms", "TFLOP/s", f"over {peers}", '"high" over it', "error", f"error of {peers}", 'error of "high"')
    return Table("Float32: speed, and the norm of the error over the norm of the float64 result", header, tuple(lines))


def _speed(slow: Row | None, fast: Row | None) -> str:
    """Times that the second is as fast as the first."""
    return f"{slow.median_ms / fast.median_ms:.2f}" if slow and fast and slow.median_ms and fast.median_ms else ""


def serving_label(row: Row) -> str:
    """A call of serving in a few words. Grouped heads are the rule."""
    heads = f" H{row.heads}" if row.heads == row.heads_kv else ""
    return f"B{row.batch}{heads} {row.seqlen_q} x {row.seqlen_k}, {row.option}"


def serving_table(rows: Sequence[Row]) -> Table:
    """Calls over a cache, dense and in pages. Ours: time over that of the dense cache of the same shape, bandwidth over
    that of a copy; and the fastest peer's time over ours."""
    rows = [row for row in rows if row.sweep == "decode" and row.option]
    names = measured_labels(rows)
    lines = []
    calls = join.groups(rows, serving_label)
    for label, here in calls.items():
        ours = [row for row in here if row.is_ok and not row.is_baseline]
        peers = [row for row in here if row.is_ok and row.is_baseline]
        added = ["", "", ""]
        if ours:
            best = min(ours, key=lambda row: row.median_ms or 0.0)
            dense = join.unique(calls.get(label.partition(", page")[0], []), lambda row: row.provider)
            if ", page" in label and best.provider in dense:
                added[0] = _speed(best, dense[best.provider] if dense[best.provider].is_ok else None)
            if best.gb_per_s and best.copy_gb_per_s:
                added[1] = f"{best.gb_per_s / best.copy_gb_per_s:.2f}"
            if peers and best.median_ms:
                added[2] = f"{min(row.median_ms or 0.0 for row in peers) / best.median_ms:.2f}"
        lines.append((label, *_cells(here, names, _micros), *added))
    header = ("", *names.values(), "over dense", "of a copy's GB/s", "best peer / ours")
    return Table("Calls over a cache: median time, microseconds", header, tuple(lines))


def ratio_table(rows: Sequence[Row]) -> Table:
    names = measured_labels(rows)
    lines = tuple(
        (
            f"{names[one.provider]} over {names[one.peer]}",
            one.direction,
            str(one.num_points),
            number(one.geometric_mean),
            number(one.lowest),
            number(one.highest),
        )
        for one in compare.ratios(rows)
    )
    header = ("speed", "pass", "points", "geometric mean", "lowest", "highest")
    return Table("Speed against each peer: peer's time over ours, accurate rows only", header, lines)


def standing_table(rows: Sequence[Row]) -> Table:
    """Our speed over the best of all peers by each protocol, with the worst point and the peer that is best there."""
    names, points = measured_labels(rows), point_labels(rows)
    lines = tuple(
        (
            names[one.provider],
            one.direction,
            one.protocol,
            str(one.num_points),
            f"{one.geometric_mean:.3f}",
            str(one.num_behind),
            f"{one.worst.ratio:.3f}",
            f"{points[id(one.worst.ours)]}, {names[one.worst.peer.provider]}",
        )
        for one in standing.standings(rows)
    )
    header = (
        "speed",
        "pass",
        "protocol",
        "points",
        "geometric mean",
        f"behind (< {standing.BEHIND})",
        "worst",
        "worst point, best peer there",
    )
    return Table("Speed over the best of all peers: the best peer's time over ours", header, lines)


def places_table(rows: Sequence[Row]) -> Table:
    """Our default's speed over the best of all peers, point by point, by each protocol that was measured."""
    ours, points = our_default(rows), point_labels(rows)
    found = {name: [] if ours is None else standing.places(rows, ours, name) for name in PROTOCOLS}
    lines: dict[str, list[str]] = {}
    measured = [name for name in PROTOCOLS if found[name]]
    for index, name in enumerate(measured):
        for place in found[name]:
            cells = lines.setdefault(points[id(place.ours)], [""] * 2 * len(measured))
            cells[2 * index : 2 * index + 2] = f"{place.ratio:.3f}", place.peer.provider
    header = ("", *(text for name in measured for text in (name, "best peer")))
    return Table("The best peer's time over ours", header, tuple((label, *cells) for label, cells in lines.items()))


def power_table(rows: Sequence[Row]) -> Table:
    """Clock, power and energy of a call under sustained load; where that was not measured, in short bursts."""
    name = next((name for name in reversed(PROTOCOLS) if any(getattr(row, f"{name}_power_w") for row in rows)), "")
    if not name:
        return Table("Clock and power", ("",), ())

    def cell(row: Row) -> str:
        clock, power, joules = (getattr(row, f"{name}_{what}") for what in ("clock_mhz", "power_w", "joules"))
        return "" if power is None else f"{clock:.0f} MHz {power:.0f} W {number(joules)} J"

    names, points, lines = measured_labels(rows), point_labels(rows), []
    for label, here in join.groups(rows, lambda row: points[id(row)]).items():
        found = join.unique(here, lambda row: row.provider)
        lines.append((label, *(cell(found[one]) if one in found else "" for one in names)))
    return Table(f"Clock, power, energy of a call ({name})", ("", *names.values()), tuple(lines))


_BY_PROTOCOL = {"standings": standing_table, "places": places_table, "power": power_table}


def our_default(rows: Sequence[Row]) -> str | None:
    """Returns the provider of ours that a run is summed up by; None where none was timed."""
    timed = [row.provider for row in rows if not row.is_baseline and row.median_ms is not None]
    return next((name for name in (AUTOMATIC.name, *DEFAULT_BACKENDS, *timed) if name in timed), None)


def closing_line(rows: Sequence[Row]) -> str:
    """Returns the sum of a run in a line. Under sustained load: our default against the best of all peers, with the
    worst point. Else against the best of torch's kernels. Empty if nothing compares."""
    timed = [row.provider for row in rows if not row.is_baseline and row.median_ms is not None]
    ours, points = our_default(rows), point_labels(rows)
    loaded = [one for one in standing.standings(rows) if (one.provider, one.protocol) == (ours, SUSTAINED.name)]
    if ours is not None and loaded:
        said = "; ".join(
            f"{one.direction} {number(one.geometric_mean)} ({one.num_points} point{'s' * (one.num_points > 1)}, "
            f"worst {number(one.worst.ratio)}: {points[id(one.worst.ours)]}, {one.worst.peer.provider})"
            for one in loaded
        )
        return f"{labels(timed)[ours]}, speed over the best of all peers under sustained load: {said}"
    found = None if ours is None else compare.against_torch(rows, ours)
    if found is None:
        return ""
    count = "1 point" if found.num_points == 1 else f"{found.num_points} points"
    span = "" if found.num_points == 1 else f" ({number(found.lowest)} to {number(found.highest)})"
    mean = number(found.geometric_mean)
    return f"{labels(timed)[found.provider]}: {mean} times the speed of the best torch backend{span}, {count}"


def refusals(rows: Sequence[Row]) -> Table:
    """Lists providers that were not measured, where and why, a line for each reason. Names are as in `--backends`."""
    points, where = point_labels(rows), dict[tuple[str, str, str], list[str]]()
    for row in rows:
        if row.status != "ok":
            where.setdefault((row.provider, row.status, row.reason), []).append(points[id(row)])
    lines = tuple(
        (provider, status, places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more", reason)
        for (provider, status, reason), places in where.items()
    )
    return Table("Not measured, or not counted", ("provider", "status", "where", "reason"), lines)


def overhead_table(rows: Sequence[OverheadRow]) -> Table:
    measured = {(row.mode, row.case) for row in rows}
    cases = [column for column in overhead.COLUMNS if column in measured]
    found = join.unique(rows, lambda row: (row.provider, row.mode, row.case))
    cells = {key: row.status if row.median_us is None else number(row.median_us) for key, row in found.items()}
    timed = {row.provider for row in rows if row.median_us is not None}
    names = labels(row.provider for row in rows if row.provider in timed)
    lines = tuple((label, *(cells.get((name, *case), "") for case in cases)) for name, label in names.items())
    return Table("Host time of one call, microseconds", ("", *(f"{mode}, {case}" for mode, case in cases)), lines)


def change_tables(found: Sequence[compare.Change]) -> list[Table]:
    names = labels(one.provider for one in found)
    lines = tuple(
        (
            names[one.provider],
            one.direction,
            f"B{one.batch} H{one.heads}/{one.heads_kv} {one.seqlen_q}x{one.seqlen_k} d{one.head_dim} {one.dtype}"
            + (" causal" if one.is_causal else "")
            + (f", {one.option}" if one.option else ""),
            number(one.before_ms),
            number(one.after_ms),
            f"{one.speedup:.3f}",
        )
        for one in found
    )
    sums = tuple(
        (names[provider], str(count), f"{mean:.3f}", f"{low:.3f}")
        for provider, count, mean, low in compare.means(found)
    )
    return [
        Table(
            "Point by point; above 1 the second run is faster",
            ("provider", "pass", "problem", "first, ms", "second, ms", "speed"),
            lines,
        ),
        Table("Over all points", ("provider", "points", "geometric mean", "lowest"), sums),
    ]


def cold_table(rows: Sequence[ColdRow]) -> Table:
    names = labels(row.provider for row in rows)
    lines = tuple(
        (
            names[row.provider],
            row.cache,
            row.status,
            *map(known, (row.import_torch_s, row.import_flashtile_s, row.start_device_s)),
            *map(known, (row.first_call_s, row.second_call_s)),
            known(row.resident_bytes and row.resident_bytes / 2**20),
        )
        for row in rows
    )
    header = (
        "provider",
        "cache",
        "status",
        "import torch",
        "import flashtile",
        "start device",
        "first call",
        "second call",
        "resident, MiB",
    )
    return Table("The first call of a new process, seconds", header, lines)
