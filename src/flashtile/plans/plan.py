"""A launch plan: how a pass is launched, as data. Steps, workspaces, an image of the parameters, and a patch table.

A plan knows no sequence length. Whoever executes it evaluates the rules below for the tensors of a call; none of them
needs to know what attention is. There are two executors: backends/executor.py, and csrc/exec/plan.cpp, to which
backends/native.py hands plans as numbers (`serialize`). A new kind of rule, or a field, is a change of all four places;
tests/cpu/test_native.py compares what both launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashtile.errors import value_error

_MAX_CLUSTER = 16  # blocks, of any GPU

# Rules: each gives one number of a call


class Pointer(NamedTuple):
    """The address of a tensor or workspace."""

    name: str


class Stride(NamedTuple):
    """Stride in elements; 0 along an axis that the tensor does not have."""

    tensor: str
    axis: int  # from the end


class BroadcastStride(NamedTuple):
    """Stride in elements; 0 along an axis of length 1."""

    tensor: str
    axis: int


class Size(NamedTuple):
    tensor: str
    axis: int
    plus: int = 0


class Elements(NamedTuple):
    """The number of elements."""

    tensor: str


class BroadcastSize(NamedTuple):
    """1 where a tensor is broadcast along the axis, else the value."""

    tensor: str
    axis: int
    value: str


class DistinctSize(NamedTuple):
    """1 where all elements along the axis are one in memory (length 1 or stride 0), else the value."""

    tensor: str
    axis: int
    value: str


class Bounded(NamedTuple):
    """The value, or the size of a tensor along the axis where that is smaller and not 1."""

    tensor: str
    axis: int
    value: str


class Share(NamedTuple):
    """A value divided among as many as another value counts, rounded up."""

    value: str
    among: str


class Least(NamedTuple):
    """The smaller one of two values."""

    value: str
    other: str


class Quotient(NamedTuple):
    """A value divided by a number, rounded up."""

    value: str
    divisor: int


class Value(NamedTuple):
    """One of the plan's values."""

    name: str


class Scalar(NamedTuple):
    """A number that comes with the call."""

    name: str


Rule = (
    Pointer
    | Stride
    | BroadcastStride
    | Size
    | Elements
    | BroadcastSize
    | DistinctSize
    | Bounded
    | Share
    | Least
    | Quotient
    | Value
    | Scalar
)


class Patch(NamedTuple):
    """One field of the parameters."""

    offset: int
    code: str  # of the struct module: P pointer, q int64, i int32, I uint32, f float32, d float64
    rule: Rule


class MapPatch(NamedTuple):
    """A tensor map in the parameters: a tensor as (last, row, head, batch), in boxes of 128 bytes of its last axis,
    box_rows rows and box_heads heads. No box of a paged tensor crosses a page: its rows are the largest power of two
    that divides both box_rows and the rows of a page."""

    offset: int
    tensor: str
    axes: tuple[int, int, int]  # row, head, batch, from the end; an axis that is missing or of stride 0 has length 1
    box_rows: int
    box_heads: int = 1
    is_optional: bool = False  # left out where TMA cannot read the tensor
    is_paged: bool = False
    l2_bytes: int = 256  # that a miss of L2 brings: 0, 64, 128 or 256


class Operand(NamedTuple):
    """A tensor of the call, and what kernels expect of it. A tensor that does not fit is replaced by a copy, which is
    copied back if it is written."""

    name: str
    # "rows": the last dimension is contiguous; "contiguous": all are; "any"; "aligned": as "rows", and every row starts
    # on a 16-byte boundary. Its copy has zeros behind each row, up to a multiple of 16 bytes, that kernels may read.
    # "pairs": as "any", and rows that are not one in memory have their pairs of elements on 4-byte boundaries
    strides: str = "rows"
    dtype: str | None = None  # None: its own
    is_written: bool = False
    like: str | None = None  # not a tensor of the call: scratch output shaped like this tensor, discarded


class Workspace(NamedTuple):
    """Memory for one call: element_bytes times the product of the values and of the quotients rounded up, and
    num_padding times the product of `padding` more elements.

    A kept workspace is not the call's own: zeros that every launch leaves as it finds them (runtime/kept.py). A plan
    has one at most."""

    name: str
    element_bytes: int
    values: tuple[str, ...]
    is_zeroed: bool = False
    is_for_splits: bool = False  # not needed where the keys are not split
    quotients: tuple[tuple[str, int], ...] = ()  # (value, divisor), rounded up
    num_padding: int = 0
    padding: tuple[str, ...] = ()
    is_kept: bool = False


class SplitRule(NamedTuple):
    """Number of splits that the keys get where the caller does not say: as many as give every multiprocessor its
    blocks, each with at least `split_keys` keys. The executor adds the value num_splits, from the expected queries and
    the most keys of a sequence."""

    block_rows: int
    split_keys: int
    heads: str = "heads"  # the value that counts the heads with tiles of their own
    blocks: int = 2  # that each multiprocessor should have


class Memset(NamedTuple):
    """Zeros for a tensor that the kernels do not write everywhere."""

    tensor: str


class Factor(NamedTuple):
    """Factor of the number of blocks: a value divided and rounded up, and another value added to it."""

    value: str
    divisor: int = 1
    plus: str | None = None

    def of(self, values: dict[str, int]) -> int:
        return -(-values[self.value] // self.divisor) + (0 if self.plus is None else values[self.plus])


Grid = tuple[Factor, ...]


@dataclass(frozen=True)
class Step:
    """One kernel: the unit to compile, its entry, and its launch."""

    unit: str
    entry: str
    grid: Grid
    owned: int  # rows of a block's own tile, 1 in a kernel without tiles
    streamed: int  # rows of the tiles that stream by
    num_threads: int
    shared_bytes: int
    is_for_splits: bool = False  # left out where the keys are not split
    max_blocks: int = 0  # for each multiprocessor, of a persistent grid; 0: a block for each work item
    cluster: int = 1  # blocks of a cluster: `grid` counts clusters; 1 where max_blocks is given
    starts_early: bool = False  # on sm_90 and newer: may start while the kernel before it ends, and waits for it itself
    owns: str = "queries"  # or "keys": what a block owns; the other streams by

    def __post_init__(self) -> None:
        if not 1 <= self.cluster <= _MAX_CLUSTER:
            raise value_error("cluster", self.cluster, f"1 to {_MAX_CLUSTER}")
        if self.cluster > 1 and self.max_blocks > 0:
            raise value_error("cluster", self.cluster, "1 in a persistent grid")

    @property
    def name(self) -> str:
        """The kernel without its template arguments."""
        return self.entry.split("<")[0].removeprefix("flashtile::")

    @property
    def tile(self) -> str:
        """The tile in words, as in "128 keys x 64 queries"."""
        other = "queries" if self.owns == "keys" else "keys"
        return f"{self.owned} {self.owns} x {self.streamed} {other}"


ENGINE_DTYPES = ("float32", "float16", "bfloat16", "float64")  # csrc/cpu/engine.h: Element


class EnginePass(NamedTuple):
    """A whole pass of the CPU engine."""

    is_backward: bool
    elements: tuple[int, ...]  # of q, of out, of bias, of dk and dv: indices into ENGINE_DTYPES


AnyStep = Memset | Step | EnginePass


@dataclass(frozen=True)
class LaunchPlan:
    steps: tuple[AnyStep, ...]
    operands: tuple[Operand, ...]
    values: tuple[tuple[str, tuple[Rule, ...]], ...]  # a product each; a rule may ask for the values before it
    splits: SplitRule | None
    workspaces: tuple[Workspace, ...]
    image: bytes
    patches: tuple[Patch, ...]
    maps: tuple[MapPatch, ...] = ()
