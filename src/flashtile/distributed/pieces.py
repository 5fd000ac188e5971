"""Pieces of the score matrix: the parts that a rank computes, and the keys that it needs for them.

A rank has ranges of global query rows and gets ranges of global keys. Each pair of ranges is a rectangle of the score
matrix. Causal masks and windows are a band of its diagonals, low <= j - i <= high. A piece is the smallest rectangle
around the band's part, so what lies outside is neither computed nor sent.

The op aligns the last query of a piece with its last key. In the smallest rectangle the last row and the last column
each have an element of the band, so that the band reaches at least one side beyond that diagonal: it is always a window
(left, right) of the op with sides >= 0.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from flashtile.distributed.sharding import Ranges, coalesced

_FAR = 1 << 62  # beyond every position


class Band(NamedTuple):
    """The diagonals j - i that queries may see, both ends included."""

    low: int
    high: int

    @classmethod
    def of(cls, left: int, right: int, offset: int) -> Band:
        """Returns the band of a window around key i + offset; -1 = unbounded."""
        return cls(offset - left if left >= 0 else -_FAR, offset + right if right >= 0 else _FAR)


class Piece(NamedTuple):
    """A rectangle of the score matrix, or with `lengths` a row of them along the diagonal."""

    q: range  # rows in the memory of the rank
    k: range  # rows in the memory of the keys it got
    first_query: int  # global positions of the first row and the first key
    first_key: int
    window: tuple[int, int] = (-1, -1)
    document: int = 0  # of the first row
    document_start: int = 0
    lengths: tuple[int, ...] = ()  # documents inside, which are both its queries and its keys


def bounding_box(rows: range, keys: range, band: Band) -> tuple[range, range] | None:
    """The smallest rectangle around the band's part of one."""
    rows = range(max(rows.start, keys.start - band.high), min(rows.stop, keys.stop - band.low))
    if not rows or not keys:
        return None
    keys = range(max(keys.start, rows.start + band.low), min(keys.stop, rows.stop + band.high))
    return (rows, keys) if keys else None


def _window(rows: range, keys: range, band: Band) -> tuple[int, int]:
    """The band within a bounding box, relative to the diagonal through its last corner; -1 where it hides nothing."""
    diagonal = (keys.stop - 1) - (rows.stop - 1)
    hides_left = band.low > keys.start - (rows.stop - 1)
    hides_right = band.high < keys.stop - 1 - rows.start
    return (diagonal - band.low if hides_left else -1), (band.high - diagonal if hides_right else -1)


@functools.lru_cache(maxsize=4096)
def needed(queries: Ranges, keys: Ranges, band: Band, bounds: tuple[int, ...] | None) -> Ranges:
    """The keys that some query sees; each range is inside one of those given."""
    found: list[range] = []
    for part in keys:
        seen = sorted((box.start, box.stop) for rows in queries for _, box, _ in _boxes(rows, part, band, bounds))
        stop = part.start
        for start, end in seen:
            found.append(range(max(start, stop), end))
            stop = max(stop, end)
    return coalesced(found)


def _boxes(rows: range, keys: range, band: Band, bounds: tuple[int, ...] | None) -> list[tuple[range, range, int]]:
    """The bounding box of each document's part: (rows, keys, document)."""
    if bounds is None:
        box = bounding_box(rows, keys, band)
        return [] if box is None else [(*box, 0)]
    found = []
    of_rows, of_keys = _documents(rows, bounds), _documents(keys, bounds)
    for document in range(max(of_rows.start, of_keys.start), min(of_rows.stop, of_keys.stop)):
        start, stop = bounds[document], bounds[document + 1]
        own_rows = range(max(rows.start, start), min(rows.stop, stop))
        own_keys = range(max(keys.start, start), min(keys.stop, stop))
        box = bounding_box(own_rows, own_keys, band)
        if box is not None:
            found.append((*box, document))
    return found


def _documents(rows: range, bounds: tuple[int, ...]) -> range:
    """Returns the documents that have some of the rows."""
    return range(bisect_right(bounds, rows.start) - 1, bisect_left(bounds, rows.stop))


@functools.lru_cache(maxsize=4096)
def pieces(
    queries: Ranges, keys: Ranges, band: Band, bounds: tuple[int, ...] | None, has_positions: bool, has_dropout: bool
) -> tuple[Piece, ...]:
    """Returns what a rank with these queries computes once it has these keys. has_positions: some option but the band
    looks at global positions, so that rows which are neighbours in memory alone may not be joined."""
    is_joinable = not has_positions and bounds is None
    if is_joinable and len(queries) > 1 and queries == keys and band == Band(-_FAR, 0):
        # Memory has the order of the sequence, so the causal mask is one of the rows in memory
        length = sum(map(len, queries))
        return (Piece(range(length), range(length), queries[0].start, keys[0].start, (-1, 0)),)
    found = []
    q_row = 0
    for rows in queries:
        k_row = 0
        for part in keys:
            if bounds is not None and rows == part:
                found += _packed(rows, q_row, k_row, band, bounds, has_dropout)
            else:
                for box_rows, box_keys, document in _boxes(rows, part, band, bounds):
                    q = _shifted(box_rows, q_row - rows.start)
                    k = _shifted(box_keys, k_row - part.start)
                    window = _window(box_rows, box_keys, band)
                    start = 0 if bounds is None else bounds[document]
                    found.append(Piece(q, k, box_rows.start, box_keys.start, window, document, start))
            k_row += len(part)
        q_row += len(rows)
    return tuple(_joined(found) if is_joinable else found)


def _packed(rows: range, q_row: int, k_row: int, band: Band, bounds: tuple[int, ...], has_dropout: bool) -> list[Piece]:
    """The documents inside one range, whose queries and keys are the same: one packed call. Dropout counts from the
    start of a document, so that a document which starts before the range is a call of its own."""
    documents = _documents(rows, bounds)
    first = documents.start
    ends = [min(bound, rows.stop) for bound in bounds[first + 1 : documents.stop + 1]]
    found = []
    begin = rows.start
    if has_dropout and bounds[first] < rows.start:
        part = range(begin, ends.pop(0))
        window = _window(part, part, band)
        q, k = _shifted(part, q_row - rows.start), _shifted(part, k_row - rows.start)
        found.append(Piece(q, k, begin, begin, window, first, bounds[first]))
        begin, first = part.stop, first + 1
    if ends:
        part = range(begin, rows.stop)
        lengths = tuple(end - start for start, end in zip([begin, *ends], ends, strict=False))
        window = (-band.low if band.low > -_FAR else -1, band.high if band.high < _FAR else -1)
        q, k = _shifted(part, q_row - rows.start), _shifted(part, k_row - rows.start)
        found.append(Piece(q, k, begin, begin, window, first, bounds[first], lengths))
    return found


def _joined(found: list[Piece]) -> list[Piece]:
    """Unmasked pieces that are neighbours in memory become one."""
    done: list[Piece] = []
    for piece in found:
        last = done[-1] if done else None
        if last is None or piece.window != (-1, -1) or last.window != (-1, -1):
            done.append(piece)
        elif last.q == piece.q and last.k.stop == piece.k.start:
            done[-1] = last._replace(k=range(last.k.start, piece.k.stop))
        elif last.k == piece.k and last.q.stop == piece.q.start:
            done[-1] = last._replace(q=range(last.q.start, piece.q.stop))
        else:
            done.append(piece)
    return done


def _shifted(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
