"""Length classes: the only way in which the choice of a kernel may look at the sizes of a call.

A plan's key holds no length. A family (families/) lists the classes it looks at, and the key holds one small
number for each. The thresholds are data: the C++ executor gets `serialized` and computes the same numbers
(csrc/exec/length_class.h), so a threshold is written once. A new kind of class is one type here and one case there;
tests/cpu/test_length_class.py compares the two. `values` are those that lead to different kernels, the value of a long
call first. Classes are dataclasses, not tuples: two of different kinds are never equal, whatever their numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flashtile.problem import Shape


@dataclass(frozen=True)
class LengthClass(ABC):
    """One class; its fields are numbers."""

    code: ClassVar[int]  # csrc/exec/length_class.h: LengthClassKind
    constants: ClassVar[tuple[int, ...]] = ()

    @property
    def values(self) -> tuple[int, ...]:
        """Returns the values that lead to different kernels, that of a long call first."""
        return self.constants

    @abstractmethod
    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        """The value for a call."""

    def serialized(self) -> tuple[int, int, int, int]:
        """(code, fields, zeros)."""
        a, b, c = (*vars(self).values(), 0, 0)[:3]
        return self.code, int(a), int(b), int(c)


@dataclass(frozen=True)
class SmallGrid(LengthClass):
    """1 where tiles of `block_rows` queries make fewer blocks than the GPU has multiprocessors."""

    block_rows: int

    code = 0
    constants = (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_blocks = -(-shape.expected_q // self.block_rows) * shape.heads * shape.batch
        return int(num_blocks < num_multiprocessors)


PACKED_ROWS = 64  # of a tile that holds several heads (attn/head_packing.cuh)


def packed_heads(shape: Shape, tile_rows: int) -> tuple[int, int]:
    """Returns how many heads share a tile of `tile_rows` rows, and the tiles of those that share a KV head: as few as
    hold them. As attn/head_packing.cuh."""
    num_heads = shape.heads // shape.heads_kv
    num_tiles = -(-num_heads // tile_rows)
    return -(-num_heads // num_tiles), num_tiles


@dataclass(frozen=True)
class PackedHeads(LengthClass):
    """Number of heads that share a tile of `tile_rows` rows (`packed_heads`) if that makes fewer tiles than blocks of
    `block_rows` queries would, else 1."""

    tile_rows: int
    block_rows: int

    code = 1
    constants = (1, 4)  # any number above 1: kernels do not know it

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_heads, num_tiles = packed_heads(shape, self.tile_rows)
        num_packed = num_tiles * -(-shape.expected_q // (self.tile_rows // num_heads))
        num_single = shape.heads // shape.heads_kv * -(-shape.expected_q // self.block_rows)
        return num_heads if num_packed < num_single else 1


@dataclass(frozen=True)
class FewQueries(LengthClass):
    """Number of heads that share a tile of `tile_rows` rows (`packed_heads`) where the queries of a sequence make at
    most `max_tiles` tiles for the same heads; else 0."""

    tile_rows: int
    max_tiles: int
    is_one_head_tile: bool = False  # 0 also where the heads that share a KV head take more than one tile

    code = 5
    constants = (0, 4)  # any number above 0: kernels do not know it

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_heads, num_tiles = packed_heads(shape, self.tile_rows)
        if self.is_one_head_tile and num_tiles > 1:
            return 0
        return num_heads if -(-shape.few_q // (self.tile_rows // num_heads)) <= self.max_tiles else 0


@dataclass(frozen=True)
class ManyRows(LengthClass):
    """1 where the queries of a sequence, for the heads that share a tile of `tile_rows` rows (`packed_heads`), do not
    fit one tile."""

    tile_rows: int

    code = 9
    constants = (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q * packed_heads(shape, self.tile_rows)[0] > self.tile_rows)


@dataclass(frozen=True)
class ManyKeyTiles(LengthClass):
    """1 where the tiles of `tile_keys` keys make more than `most` over all sequences and all tiles of `tile_rows` rows
    that the heads of a query take (`packed_heads`)."""

    tile_rows: int
    tile_keys: int
    most: int

    code = 10
    constants = (0,)  # what takes calls of 1 is in use elsewhere

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        row_tiles = shape.batch * shape.heads_kv * packed_heads(shape, self.tile_rows)[1]
        return int(row_tiles * -(-shape.seqlen_k // self.tile_keys) > self.most)


@dataclass(frozen=True)
class RaggedQueries(LengthClass):
    """1 where blocks of `large` queries would hold over `percent` percent of the rows that blocks of `small` would."""

    large: int
    small: int
    percent: int

    code = 2
    constants = (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        rows = -(-shape.expected_q // self.large) * self.large
        return int(100 * rows > self.percent * -(-shape.expected_q // self.small) * self.small)


@dataclass(frozen=True)
class ManyScores(LengthClass):
    """1 where a call has at least 2 ** log2 scores over all heads."""

    log2: int

    code = 3
    constants = (1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.batch * shape.heads * shape.expected_q * shape.expected_k >= 1 << self.log2)


@dataclass(frozen=True)
class ShortLengths(LengthClass):
    """1 where a call has at most so many queries and keys."""

    queries: int
    keys: int

    code = 4
    constants = (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q <= self.queries and shape.expected_k <= self.keys)


@dataclass(frozen=True)
class LongLengths(LengthClass):
    """1 where a call has at least so many queries and keys."""

    queries: int
    keys: int

    code = 7
    constants = (1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q >= self.queries and shape.expected_k >= self.keys)


@dataclass(frozen=True)
class LongShares(LengthClass):
    """Number of these lengths, in rising order, that the rows of a sequence reach on average: of q and of k, whichever
    are fewer."""

    first: int
    second: int
    third: int

    code = 8
    constants = (3, 2, 1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return sum(shape.least_share >= length for length in (self.first, self.second, self.third))


@dataclass(frozen=True)
class KeySteps(LengthClass):
    """Number of steps of 16 keys of a call where it has at most `single` keys, at least 1; 254 where it has at most
    `some`; 255 where it has at most `most`; else 0."""

    single: int
    some: int
    most: int

    code = 6

    @property
    def values(self) -> tuple[int, ...]:
        return (0, self.single // 16, 254)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        if shape.expected_k > self.most:
            return 0
        if shape.expected_k > self.single:
            return 254 if shape.expected_k <= self.some else 255
        return max(-(-shape.expected_k // 16), 1)
