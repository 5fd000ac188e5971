"""Standings of our providers against the best of all peers, by protocol (bench/protocol.py): point by point, and over
all points with the worst one named. Accurate rows only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashtile.lab.bench import compare, join
from flashtile.lab.bench.protocol import NAMES
from flashtile.lab.bench.rows import Row

BEHIND = 0.995  # ratios below are behind


@dataclass(frozen=True)
class Place:
    """One point: the best peer's time over ours."""

    ours: Row
    peer: Row
    ratio: float


@dataclass(frozen=True)
class Standing:
    """All points of one pass."""

    provider: str
    direction: str
    protocol: str
    num_points: int
    geometric_mean: float
    num_behind: int
    worst: Place


def milliseconds(row: Row, protocol: str) -> float | None:
    """Returns a row's time by that protocol; None where it was not measured, or the row is not accurate."""
    found = getattr(row, f"{protocol}_ms") if row.is_ok else None
    return found if found is None or 0 < found < math.inf else None


def places(rows: Sequence[Row], provider: str, protocol: str) -> list[Place]:
    """Returns the provider's place at every point that it has in common with a peer."""
    found = []
    for here in join.groups(rows, lambda row: row.point).values():
        timed = join.unique((row for row in here if milliseconds(row, protocol)), lambda row: row.provider)
        peers = [row for row in timed.values() if row.is_baseline]
        if provider in timed and peers:
            ours, peer = timed[provider], min(peers, key=lambda row: milliseconds(row, protocol) or math.inf)
            ratio = (milliseconds(peer, protocol) or math.nan) / (milliseconds(ours, protocol) or math.nan)
            found.append(Place(ours, peer, ratio))
    return found


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Each of our providers in each pass by each protocol that was measured."""
    found = []
    for direction in dict.fromkeys(row.direction for row in rows):
        some = [row for row in rows if row.direction == direction]
        for provider in dict.fromkeys(row.provider for row in some if not row.is_baseline):
            for protocol in NAMES:
                if here := places(some, provider, protocol):
                    ratios = [place.ratio for place in here]
                    behind = sum(ratio < BEHIND for ratio in ratios)
                    worst = min(here, key=lambda place: place.ratio)
                    mean = compare.geometric_mean(ratios)
                    found.append(Standing(provider, direction, protocol, len(here), mean, behind, worst))
    return found
