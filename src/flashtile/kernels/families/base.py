"""What a kernel family is: one object that knows everything about one kernel of one op, or a group launched together.

A family says why it refuses a call, which rows (tiles) it has, which features it takes, and what its plan launches.
Everything else loops over the families: selection, plans, `compile`, `explain`, `check`, `bench --tiles`, the
sanitizers, prewarm and the support table of README. docs/map.md, "Adding a kernel", has the list of files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, TypeVar

from flashtile.kernels.arch import Arch
from flashtile.kernels.length_class import LengthClass
from flashtile.kernels.params import Params, Struct
from flashtile.kernels.plan import Grid, MapPatch, Operand, SplitRule, Step, Workspace
from flashtile.kernels.source import unit
from flashtile.kernels.spec import CallLayout, Features, PlanKey


@dataclass(frozen=True)
class Row(ABC):
    """One kernel for one dtype, padded head dims and tile: a row of a family's table."""

    kernel: str  # with `_kernel` behind it, the C++ function
    dtype: str  # of q, k and v
    out_dtype: str
    head_dim: int  # padded
    head_dim_v: int
    block_m: int  # kBlockM of the kernel: queries of a tile. In bwd_dkdv_simt, whose code is that of bwd_dq_simt: keys
    block_n: int  # kBlockN: keys; there queries

    @property
    @abstractmethod
    def header(self) -> str | Path:
        """The .cuh under include/flashtile/kernels/, without its ending; a path where it is not part of this
        package."""

    @property
    def struct(self) -> Struct:
        """What the kernel is passed."""
        return Params

    @property
    @abstractmethod
    def num_threads(self) -> int: ...

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """The size of the kernel's storage struct; `facts` asserts it."""

    @property
    @abstractmethod
    def config(self) -> str:
        """The C++ config type, without its namespace."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What tells it from the other tiles of its kernel and head dims, in words."""

    @abstractmethod
    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        """What Python and C++ must agree on: the message of the static_assert -> (C++ expression, value)."""

    def unfit(self, arch: Arch) -> str | None:
        """Why the row cannot run on the architecture, or None."""
        if self.shared_bytes > arch.shared_bytes:
            kib, limit = self.shared_bytes / 1024, arch.shared_bytes // 1024
            return f"{kib:.0f} KiB of shared memory, and a block of {arch.name} may have {limit}"
        return None

    def spills(self, arch: Arch) -> bool:
        """It is known to spill registers there, so that it is not taken."""
        return False


@dataclass(frozen=True)
class Launch:
    """What a family contributes to a plan; kernels/assemble.py adds operands, values and patches."""

    steps: tuple[Step, ...]
    workspaces: tuple[Workspace, ...] = ()
    splits: SplitRule | None = None
    maps: tuple[MapPatch, ...] = ()
    scratch: tuple[Operand, ...] = ()  # outputs that a kernel writes and the call does not want
    zeroed: tuple[str, ...] = ()  # outputs that the kernels do not write everywhere
    in_pairs: tuple[str, ...] = ()  # tensors that kernels would read one element at a time where pairs are not aligned
    struct: Struct = Params


RowT = TypeVar("RowT", bound=Row)


class Family(ABC, Generic[RowT]):
    """One family. Its name is the stem of its .cuh and what FLASHTILE_FAMILY names."""

    name: str
    op: str  # "forward" or "backward"
    summary: str  # one line, for docs and `explain`
    kernels: tuple[str, ...]  # those with tiles
    dtypes: tuple[str, ...]
    head_dims: tuple[tuple[int, int], ...]  # padded (head_dim, head_dim_v), in rising order
    features: frozenset[str] = frozenset(item.name for item in fields(Features))  # that need not have their defaults
    length_classes: tuple[LengthClass, ...] = ()
    takes_out_dtypes = True  # an output in another dtype than q
    takes_overlapping_rows = True  # in memory; TMA does not
    takes_any_scale = True  # 0 and negative ones, too
    needs_wgmma = False
    grad_sets: tuple[tuple[str, ...], ...] = ()  # of a backward family: gradients that together launch every kernel

    def runs_on(self, arch: Arch) -> bool:
        return self.refuse_arch(arch) is None

    def refuse_arch(self, arch: Arch) -> str | None:
        """Why the family has nothing for the architecture, or None."""
        return f"{arch.name} has no wgmma" if self.needs_wgmma and not arch.has_wgmma else None

    def refuse(self, key: PlanKey) -> str | None:
        """Why the family does not take the call, or None. Subclasses add their own reasons."""
        reason = self.refuse_arch(key.arch)
        if reason is not None:
            return reason
        if key.dtype not in self.dtypes:
            return f"{key.dtype} is not among its dtypes ({', '.join(self.dtypes)})"
        if key.mixed:
            return f"{' and '.join(key.mixed)} in another dtype than q"
        if self.padded(key.head_dim, key.head_dim_v) is None:
            return f"head_dim {key.head_dim}, {key.head_dim_v} is over its {', '.join(map(str, self.head_dims[-1]))}"
        for item in fields(Features):
            if item.name not in self.features and getattr(key.features, item.name) != item.default:
                return REFUSED_FEATURES[item.name]
        if not self.takes_out_dtypes and key.out_dtype != key.dtype:
            return f"an output in {key.out_dtype}"
        if not self.takes_overlapping_rows and not key.rows_disjoint:
            return "rows that overlap in memory"
        if not self.takes_any_scale and not key.is_scale_positive:
            return "a scale that is not positive"
        return None

    def drawback(self, key: PlanKey) -> str | None:
        """Why any other family that takes the call goes first, whatever its speed, or None."""
        return None

    def padded(self, head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
        """The first pair of head dims that holds a call's, or None."""
        return next((pair for pair in self.head_dims if head_dim <= pair[0] and head_dim_v <= pair[1]), None)

    @abstractmethod
    def every_row(self, dtype: str) -> Iterator[RowT]:
        """The whole table, with results in the same dtype."""

    def tile_sizes(self) -> frozenset[int]:
        """Every length of a tile, in queries or keys: where lengths take different ways."""
        return frozenset(size for row in self.every_row(self.dtypes[0]) for size in (row.block_m, row.block_n))

    @abstractmethod
    def candidates(self, kernel: str, key: PlanKey) -> Iterator[RowT]:
        """Every row of one of its kernels that takes the call, the preferred first, whether or not it fits the GPU."""

    def rows(self, kernel: str, key: PlanKey) -> list[RowT]:
        """The candidates that fit the GPU."""
        found = self.candidates(kernel, key)
        return [row for row in found if row.unfit(key.arch) is None and not row.spills(key.arch)]

    def select(self, kernel: str, key: PlanKey) -> RowT:
        """The row that a call takes."""
        rows = self.rows(kernel, key)
        return rows[min(_forced_rows.get(kernel, 0), len(rows) - 1)]

    @abstractmethod
    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        """What the plan of a call launches."""

    @abstractmethod
    def launch_row(self, row: RowT, key: PlanKey, layout: CallLayout) -> Launch:
        """The same by one row, which need not be one that `candidates` gives, without splits."""

    def timed_as(self, key: PlanKey) -> str:
        """The family whose times stand for its own: another where it was measured to be faster than that one."""
        return self.name

    def tile_note(self, key: PlanKey) -> str:
        """What `explain` adds to the tile of a call."""
        return ""

    def support(self) -> str:
        """One line of README's support table: which features it takes."""
        refused = [REFUSED_FEATURES[item.name] for item in fields(Features) if item.name not in self.features]
        return "all but " + "; ".join(refused) if refused else "all"


# What a call has that a family without the feature refuses
REFUSED_FEATURES = {
    "has_band": "causal and window",
    "has_bool_mask": "boolean masks",
    "has_softcap": "softcap",
    "has_alibi": "ALiBi",
    "bias_dtype": "a bias",
    "has_dropout": "dropout",
    "has_lengths": "sequence lengths",
    "is_paged": "paged keys",
    "is_aligned16": "rows that are not multiples of 16 bytes on 16-byte boundaries",
}


def tile_step(
    row: Row,
    features: Features,
    grid: Grid,
    *,
    max_blocks: int = 0,
    cluster: int = 1,
    starts_early: bool = False,
) -> Step:
    """The launch of a kernel with tiles."""
    text, entry = unit(row.header, row.kernel, row.config, row.struct, features, row.facts(features))
    return Step(
        text,
        entry,
        grid,
        row.block_m,
        row.block_n,
        row.num_threads,
        row.shared_bytes,
        max_blocks=max_blocks,
        cluster=cluster,
        starts_early=starts_early,
    )


# Rows other than the preferred, for the sanitizers


_forced_rows: dict[str, int] = {}


@contextmanager
def forced_rows(indices: dict[str, int]) -> Iterator[None]:
    """Inside, each of these kernels takes the row at this index among those that would do, or the last. Plans made
    before or inside must not cross: see assemble.clear_plans."""
    before = dict(_forced_rows)
    _forced_rows.clear()
    _forced_rows.update(indices)
    try:
        yield
    finally:
        _forced_rows.clear()
        _forced_rows.update(before)
