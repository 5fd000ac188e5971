"""Length classes: the only way in which the choice of a kernel may look at the sizes of a call.

A plan's key holds no length. A family (kernels/families/) lists the classes it looks at, and the key holds one small
number for each. The thresholds are data: the C++ executor gets `serialized` and computes the same numbers
(csrc/exec/length_class.h), so a threshold is written once. A new kind of class is one type here and one case there;
tests/cpu/test_length_class.py compares the two. `values` are those that lead to different kernels, the value of a long
call first. Classes are dataclasses, not tuples: two of different kinds are never equal, whatever their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.problem import Shape


@dataclass(frozen=True)
class SmallGrid:
    """1 where tiles of `block_rows` queries make fewer blocks than the GPU has multiprocessors."""

    block_rows: int

    @property
    def values(self) -> tuple[int, int]:
        return (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_blocks = -(-shape.expected_q // self.block_rows) * shape.heads * shape.batch
        return int(num_blocks < num_multiprocessors)

    def serialized(self) -> tuple[int, int, int, int]:
        return 0, self.block_rows, 0, 0


PACKED_ROWS = 64  # of a tile that holds several heads (attn/head_packing.cuh)


def packed_heads(shape: Shape, tile_rows: int) -> tuple[int, int]:
    """How many heads share a tile of `tile_rows` rows, and the tiles of those that share a KV head: as few as hold
    them. As attn/head_packing.cuh."""
    num_heads = shape.heads // shape.heads_kv
    num_tiles = -(-num_heads // tile_rows)
    return -(-num_heads // num_tiles), num_tiles


@dataclass(frozen=True)
class PackedHeads:
    """How many heads share a tile of `tile_rows` rows (`packed_heads`) if that makes fewer tiles than blocks of
    `block_rows` queries would, else 1."""

    tile_rows: int
    block_rows: int

    @property
    def values(self) -> tuple[int, int]:
        return (1, 4)  # any number above 1: kernels do not know it

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_heads, num_tiles = packed_heads(shape, self.tile_rows)
        num_packed = num_tiles * -(-shape.expected_q // (self.tile_rows // num_heads))
        num_single = shape.heads // shape.heads_kv * -(-shape.expected_q // self.block_rows)
        return num_heads if num_packed < num_single else 1

    def serialized(self) -> tuple[int, int, int, int]:
        return 1, self.tile_rows, self.block_rows, 0


@dataclass(frozen=True)
class FewQueries:
    """How many heads share a tile of `tile_rows` rows (`packed_heads`) where the queries of a sequence make at most
    `max_tiles` tiles for the same heads; else 0."""

    tile_rows: int
    max_tiles: int
    is_one_head_tile: bool = False  # 0 also where the heads that share a KV head take more than one tile

    @property
    def values(self) -> tuple[int, int]:
        return (0, 4)  # any number above 0: kernels do not know it

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        num_heads, num_tiles = packed_heads(shape, self.tile_rows)
        if self.is_one_head_tile and num_tiles > 1:
            return 0
        return num_heads if -(-shape.few_q // (self.tile_rows // num_heads)) <= self.max_tiles else 0

    def serialized(self) -> tuple[int, int, int, int]:
        return 5, self.tile_rows, self.max_tiles, int(self.is_one_head_tile)


@dataclass(frozen=True)
class ManyRows:
    """1 where the queries of a sequence, for the heads that share a tile of `tile_rows` rows (`packed_heads`), do not
    fit one tile."""

    tile_rows: int

    @property
    def values(self) -> tuple[int, int]:
        return (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q * packed_heads(shape, self.tile_rows)[0] > self.tile_rows)

    def serialized(self) -> tuple[int, int, int, int]:
        return 9, self.tile_rows, 0, 0


@dataclass(frozen=True)
class RaggedQueries:
    """1 where blocks of `large` queries would hold over `percent` percent of the rows that blocks of `small` would."""

    large: int
    small: int
    percent: int

    @property
    def values(self) -> tuple[int, int]:
        return (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        rows = -(-shape.expected_q // self.large) * self.large
        return int(100 * rows > self.percent * -(-shape.expected_q // self.small) * self.small)

    def serialized(self) -> tuple[int, int, int, int]:
        return 2, self.large, self.small, self.percent


@dataclass(frozen=True)
class ManyScores:
    """1 where a call has at least 2 ** log2 scores over all heads."""

    log2: int

    @property
    def values(self) -> tuple[int, int]:
        return (1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.batch * shape.heads * shape.expected_q * shape.expected_k >= 1 << self.log2)

    def serialized(self) -> tuple[int, int, int, int]:
        return 3, self.log2, 0, 0


@dataclass(frozen=True)
class ShortLengths:
    """1 where a call has at most so many queries and keys."""

    queries: int
    keys: int

    @property
    def values(self) -> tuple[int, int]:
        return (0, 1)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q <= self.queries and shape.expected_k <= self.keys)

    def serialized(self) -> tuple[int, int, int, int]:
        return 4, self.queries, self.keys, 0


@dataclass(frozen=True)
class LongLengths:
    """1 where a call has at least so many queries and keys."""

    queries: int
    keys: int

    @property
    def values(self) -> tuple[int, int]:
        return (1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return int(shape.expected_q >= self.queries and shape.expected_k >= self.keys)

    def serialized(self) -> tuple[int, int, int, int]:
        return 7, self.queries, self.keys, 0


@dataclass(frozen=True)
class LongShares:
    """How many of these lengths, in rising order, the rows of a sequence reach on average: of q and of k, whichever are
    fewer."""

    first: int
    second: int
    third: int

    @property
    def values(self) -> tuple[int, ...]:
        return (3, 2, 1, 0)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        return sum(shape.least_share >= length for length in (self.first, self.second, self.third))

    def serialized(self) -> tuple[int, int, int, int]:
        return 8, self.first, self.second, self.third


@dataclass(frozen=True)
class KeySteps:
    """How many steps of 16 keys a call has where it has at most `single` keys, at least 1; 254 where it has at most
    `some`; 255 where it has at most `most`; else 0."""

    single: int
    some: int
    most: int

    @property
    def values(self) -> tuple[int, ...]:
        return (0, self.single // 16, 254)

    def of(self, shape: Shape, num_multiprocessors: int) -> int:
        if shape.expected_k > self.most:
            return 0
        if shape.expected_k > self.single:
            return 254 if shape.expected_k <= self.some else 255
        return max(-(-shape.expected_k // 16), 1)

    def serialized(self) -> tuple[int, int, int, int]:
        return 6, self.single, self.some, self.most


LengthClass = (
    KeySteps
    | SmallGrid
    | PackedHeads
    | RaggedQueries
    | ManyScores
    | ShortLengths
    | FewQueries
    | LongLengths
    | LongShares
    | ManyRows
)
