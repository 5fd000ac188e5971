"""The first section of the page: how fast flashtile is against the fastest peer of each point, best and worst."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.lab.bench import join, ratio_colours
from flashtile.lab.bench.compare import geometric_mean
from flashtile.lab.bench.points import DIRECTIONS
from flashtile.lab.bench.rows import Row
from flashtile.lab.bench.tables import DEFAULT_BACKENDS, point_labels
from flashtile.lab.report.collect import ResultCsv
from flashtile.markup import Raw, escape, table

_OURS = (*DEFAULT_BACKENDS, "flashtile")


def summary(files: Sequence[ResultCsv]) -> str:
    """A line for each file and pass that has flashtile beside a peer. Files of one point share a line."""
    groups: dict[tuple[str, ...], list[tuple[str, Row, float]]] = {}
    for one in files:
        for direction, rows in join.groups(one.rows, lambda row: row.direction).items():
            found = ratios(rows)
            first = rows[0]
            alone = (str(first.batch), str(first.heads), first.dtype) if len(found) == 1 else (one.stem,)
            groups.setdefault((direction, *alone), []).extend((one.stem, row, ratio) for ratio, row in found)
    lines = []
    for (direction, *_), group in groups.items():
        if not group:
            continue
        stems = list(dict.fromkeys(stem for stem, _, _ in group))
        name = stems[0] if len(stems) == 1 else f"{stems[0]} and {len(stems) - 1} others"
        labels = _labels([row for _, row, _ in group])
        ordered = sorted(group, key=lambda one: one[2])
        (_, at_worst, worst), (_, at_best, best) = ordered[0], ordered[-1]
        lines.append(
            (
                f"{DIRECTIONS.get(direction, direction)} ({name})",
                str(len(group)),
                marked(ratio_colours.text(geometric_mean([ratio for _, _, ratio in group]))),
                Raw(f"{marked(ratio_colours.text(worst))} {escape(labels[id(at_worst)])}"),
                Raw(f"{marked(ratio_colours.text(best))} {escape(labels[id(at_best)])}"),
                str(sum(ratio < 1 for _, _, ratio in group)),
            )
        )
    header = ("", "points", "geometric mean", "worst", "best", "points below 1")
    note = (
        "<p>The time of the fastest peer over that of flashtile, at each point that both computed in one run: above 1 "
        f"flashtile is faster; below 1, as in {marked('0.90')}, the peer.</p>"
    )
    return note + table(header, lines) if lines else ""


def ratios(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """The fastest peer's time over that of flashtile's default, with the row of flashtile."""
    found = []
    for here in join.groups([row for row in rows if row.is_ok and row.median_ms], lambda row: row.point).values():
        ours = [row for row in here if row.provider in _OURS]
        peers = [row.median_ms or 0.0 for row in here if row.is_baseline]
        if ours and peers:
            own = min(ours, key=lambda row: row.median_ms or 0.0)
            found.append((min(peers) / (own.median_ms or 1.0), own))
    return found


def _labels(rows: Sequence[Row]) -> dict[int, str]:
    """A short name for each row's point, by the row's id. Rows without an option are named by head dim and mask."""
    named = point_labels(rows)
    if not any(row.option for row in rows) or rows[0].sweep == "decode":
        return named
    plain = {id(row): f"d={row.head_dim} {'causal' if row.is_causal else 'full'}" for row in rows if not row.option}
    return named | plain


def marked(text: str) -> Raw:
    """A ratio as a cell's text. Below 1 it is coloured and has a mark."""
    return Raw(f'<span class="bad">▼ {escape(text)}</span>' if float(text) < 1 else escape(text))
