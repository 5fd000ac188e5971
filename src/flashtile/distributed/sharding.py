"""Sharding: the rows of a sequence that each rank holds, and the helpers that cut a tensor so.

    contiguous   rank r holds part r of n.
    zigzag       the sequence is cut into 2 n parts; rank r holds parts r and 2 n - 1 - r, in this order. Under a causal
                 mask every rank then has the same work.

Parts differ by at most one row. On a 2-D mesh (ring, heads) rank (i, j) counts as rank i * size_j + j: the ranks of one
row of the mesh together hold what one rank of a ring of size_i holds, so the two ways to split compose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.errors import value_error

SHARDINGS = ("zigzag", "contiguous")
Ranges = tuple[range, ...]  # of global rows, rising, neither empty nor adjacent


@dataclass(frozen=True)
class Shards:
    """The rows of a sequence over the ranks."""

    seqlen: int
    num_ranks: int
    sharding: str = "zigzag"

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise value_error("sharding", repr(self.sharding), " or ".join(map(repr, SHARDINGS)))

    def ranges(self, rank: int) -> Ranges:
        """The rows of a rank, in the order in which it stores them."""
        return self.union((rank,))

    def union(self, ranks: Iterable[int]) -> Ranges:
        """The rows of several ranks, in order."""
        return coalesced(range(self._start(part), self._start(part + 1)) for part in sorted(self._parts(ranks)))

    def length(self, *ranks: int) -> int:
        """The number of their rows, symbolic if seqlen is."""
        if len(ranks) == self.num_ranks:
            return self.seqlen
        return sum(self._start(part + 1) - self._start(part) for part in self._parts(ranks))

    def _parts(self, ranks: Iterable[int]) -> list[int]:
        is_zigzag = self.sharding == "zigzag"
        return [part for rank in ranks for part in ((rank, 2 * self.num_ranks - 1 - rank) if is_zigzag else (rank,))]

    def _start(self, part: int) -> int:
        count = 2 * self.num_ranks if self.sharding == "zigzag" else self.num_ranks
        return self.seqlen * part // count


def coalesced(ranges: Iterable[range]) -> Ranges:
    """Returns the ranges without empty ones, adjacent ones joined. The ranges rise and do not overlap."""
    found: list[range] = []
    for part in ranges:
        if not part:
            continue
        if found and found[-1].stop == part.start:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return tuple(found)


def num_rows(ranges: Ranges) -> int:
    return sum(map(len, ranges))


def local_rows(held: Ranges, wanted: Ranges) -> list[range]:
    """Returns where the wanted rows stand in the memory of a rank that holds `held`; each is inside one range of
    `held`."""
    found, first = [], 0
    for part in held:
        for rows in wanted:
            if part.start <= rows.start and rows.stop <= part.stop:
                found.append(range(first + rows.start - part.start, first + rows.stop - part.start))
        first += len(part)
    return found


def put(whole: Tensor, rows: Iterable[range], part: Tensor, axis: int) -> None:
    """Writes the rows of a part, one behind the other, to these rows of the whole."""
    first = 0
    for target in rows:
        whole.narrow(axis, target.start, len(target)).copy_(part.narrow(axis, first, len(target)))
        first += len(target)


def take(tensor: Tensor, rows: list[range], axis: int) -> Tensor:
    """These rows of a tensor; a view where they are one range."""
    parts = [tensor.narrow(axis, part.start, len(part)) for part in rows]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, axis) if parts else tensor.narrow(axis, 0, 0)
