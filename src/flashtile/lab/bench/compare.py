"""Speed ratios: our backends against each peer within a run, and one run against another. Uses accurate rows only."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flashtile.lab.bench import files, join
from flashtile.lab.bench.points import Point
from flashtile.lab.bench.rows import Row, shared_fields

_OF_TORCH = ("sdpa", "torch-")  # names of the providers that are torch's own kernels begin with one of these


@dataclass(frozen=True)
class Ratio:
    """Speedup of a provider over a peer at the points that both have: the peer's time over its own."""

    provider: str
    peer: str
    direction: str
    num_points: int
    geometric_mean: float
    lowest: float
    highest: float


def pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Pairs of timed providers to compare: each of our backends with each baseline, or where none of ours ran each
    baseline with `sdpa`."""
    ours = list(dict.fromkeys(row.provider for row in rows if not row.is_baseline))
    names = list(dict.fromkeys(row.provider for row in rows))
    return (
        [(one, peer) for one in ours for peer in names if peer not in ours]
        if ours
        else [(one, "sdpa") for one in names if one != "sdpa"]
    )


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Each of our backends against each baseline, per direction."""
    ours = dict.fromkeys(row.provider for row in rows if not row.is_baseline)
    peers = dict.fromkeys(row.provider for row in rows if row.is_baseline)
    found = []
    for direction in dict.fromkeys(row.direction for row in rows):
        for provider in ours:
            for peer in peers:
                values = list(speedups([row for row in rows if row.direction == direction], provider, peer).values())
                if values:
                    found.append(
                        Ratio(provider, peer, direction, len(values), geometric_mean(values), min(values), max(values))
                    )
    return found


def against_torch(rows: Sequence[Row], provider: str) -> Ratio | None:
    """The provider against the fastest of torch's kernels at each point that both have, whatever the pass."""
    peers = {row.provider for row in rows if row.is_baseline and row.provider.startswith(_OF_TORCH)}
    best: dict[Point, float] = {}
    for peer in peers:
        for point, value in speedups(rows, provider, peer).items():
            best[point] = min(value, best.get(point, math.inf))
    values = list(best.values())
    if not values:
        return None
    return Ratio(provider, "torch", "", len(values), geometric_mean(values), min(values), max(values))


def speedups(rows: Iterable[Row], provider: str, peer: str) -> dict[Point, float]:
    """The peer's time over the provider's, at every point where both are accurate."""
    timed = [row for row in rows if row.is_ok and row.median_ms]
    own, others = (join.unique((row for row in timed if row.provider == name), _point) for name in (provider, peer))
    return {
        point: (others[point].median_ms or 0.0) / (row.median_ms or 1.0)
        for point, row in own.items()
        if point in others
    }


def _point(row: Row) -> Point:
    return row.point


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Change:
    """One provider at one point in two runs. A ratio above 1 means that the second run is faster."""

    provider: str
    direction: str
    dtype: str
    is_causal: bool
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    option: str
    before_ms: float
    after_ms: float
    speedup: float


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    known, now = (
        join.unique((row for row in rows if row.is_ok), lambda row: (row.provider, row.point))
        for rows in (before, after)
    )
    found = []
    for key, row in now.items():
        old = known.get(key)
        if old is None or old.median_ms is None or row.median_ms is None:
            continue
        shape, speedup = shared_fields(Change, row), old.median_ms / row.median_ms
        found.append(Change(**shape, before_ms=old.median_ms, after_ms=row.median_ms, speedup=speedup))
    return found


def means(found: Sequence[Change]) -> list[tuple[str, int, float, float]]:
    """Returns the number of points, the geometric mean and the minimum of the speedups of each provider."""
    grouped = defaultdict(list)
    for change in found:
        grouped[change.provider].append(change.speedup)
    return [(provider, len(values), geometric_mean(values), min(values)) for provider, values in grouped.items()]


def write(path: Path, found: Sequence[Change]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(Change)], lineterminator="\n")
    writer.writeheader()
    for change in found:
        writer.writerow(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(change).items()}
        )
    files.write_whole(path, text.getvalue())
