"""A kernel family: one object that knows everything about one kernel of one op, or about a group launched together.

A family says why it refuses a call, which features it takes, and what its plan launches; its tiles are lines of
tiles.csv. Everything else loops over the families: selection, plans, `compile`, `explain`, `check`, `bench --tiles`,
the sanitizers, prewarm and the table of docs/support.md. docs/map.md, "Adding a kernel", has the list of files.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from flashtile.errors import value_error
from flashtile.families.tiles import TABLE, Dims, Kernel, Knobs, Row, Tile, tiles_of, words_of
from flashtile.plans.arch import Arch
from flashtile.plans.length_class import LengthClass
from flashtile.plans.params import Params, Struct
from flashtile.plans.plan import Grid, MapPatch, Operand, SplitRule, Step, Workspace
from flashtile.plans.source import unit
from flashtile.plans.spec import CallLayout, Features, PlanKey


@dataclass(frozen=True)
class Launch:
    """Contribution of a family to a plan; families/assemble.py adds operands, values and patches."""

    steps: tuple[Step, ...]
    workspaces: tuple[Workspace, ...] = ()
    splits: SplitRule | None = None
    maps: tuple[MapPatch, ...] = ()
    scratch: tuple[Operand, ...] = ()  # outputs that a kernel writes and the call does not want
    zeroed: tuple[str, ...] = ()  # outputs that the kernels do not write everywhere
    in_pairs: tuple[str, ...] = ()  # tensors that kernels would read one element at a time where pairs are not aligned
    struct: Struct = Params


class Family(ABC):
    """One family. Its name is that of its folder and what FLASHTILE_FAMILY names."""

    name: str
    op: str  # "forward" or "backward"
    summary: str  # one line, for docs and `explain`
    kernel_types: tuple[Kernel, ...]  # the kernels with tiles
    table: Path = TABLE  # the file of its tiles
    own_words: frozenset[str] = frozenset()  # words of its lines that no other family has; `words` says when they hold
    features: frozenset[str] = frozenset(item.name for item in fields(Features))  # that need not have their defaults
    length_classes: tuple[LengthClass, ...] = ()
    takes_out_dtypes = True  # an output in another dtype than q
    takes_overlapping_rows = True  # in memory; TMA does not
    takes_any_scale = True  # 0 and negative ones, too
    needs_wgmma = False
    is_by_mma_sync = False  # its 16-bit products; else they are FMA or wgmma
    # What the checks of the kernels ask
    has_all_shared_code = False  # faults in shared headers are looked for in its kernels, which run on every GPU
    # A fault's name without the family's -> what a problem must have, beside what mutants.NEEDS says, for it to show
    fault_needs: ClassVar[Mapping[str, Mapping[str, object]]] = MappingProxyType({})
    # A tool of compute-sanitizer -> pattern of the C++ names of kernels whose machine code it misreads (docs/check.md)
    misread_by: ClassVar[Mapping[str, str]] = MappingProxyType({})
    flags_workspace = ""  # the workspace with flags that its blocks wait for and that nobody has written before
    few_queries: int | None = None  # queries of the calls that check it, where it takes few alone
    grad_sets: tuple[tuple[str, ...], ...] = ()  # of a backward family: gradients that together launch every kernel

    def runs_on(self, arch: Arch) -> bool:
        return self.refuse_arch(arch) is None

    def refuse_arch(self, arch: Arch) -> str | None:
        """Returns why the family has nothing for the architecture, or None."""
        return f"{arch.name} has no wgmma" if self.needs_wgmma and not arch.has_wgmma else None

    def refuse(self, key: PlanKey) -> str | None:
        """Returns why the family does not take the call, or None. Subclasses add their own reasons."""
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
        """Returns why any other family that takes the call goes first, whatever its speed, or None."""
        return None

    def padded(self, head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
        """The first pair of head dims that holds a call's, or None."""
        return next((pair for pair in self.head_dims if head_dim <= pair[0] and head_dim_v <= pair[1]), None)

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        return tuple(kernel.name for kernel in self.kernel_types)

    @cached_property
    def tiles(self) -> Mapping[str, tuple[Tile, ...]]:
        """The tiles of each kernel, the preferred first."""
        return tiles_of(self.table, self.kernel_types, self.own_words)

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(dtype for tiles in self.tiles.values() for tile in tiles for dtype in tile.dtypes))

    @cached_property
    def head_dims(self) -> tuple[Dims, ...]:
        """Padded (head_dim, head_dim_v), in rising order."""
        return tuple(sorted({tile.dims for tiles in self.tiles.values() for tile in tiles}))

    def num_options(self, key: PlanKey) -> int:
        """Returns how many options of a call cost registers: what `options>0` in the table counts."""
        return key.features.num_score_options

    def words(self, key: PlanKey, dims: Dims) -> frozenset[str]:
        """The words of the table that hold for a call. Subclasses add those of their own."""
        return words_of(key, dims, self.num_options(key))

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        """Knobs of a config that the call decides, not the tile. key: None for a plain call of whole head dims."""
        return ()

    def row(self, tile: Tile, dtype: str, key: PlanKey | None = None) -> Row:
        """A tile as a call takes it; without a key as a plain call does."""
        (kernel,) = (kernel for kernel in self.kernel_types if kernel.name == tile.kernel)
        row = Row(kernel, tile, dtype, dtype if key is None else key.out_dtype, self.call_knobs(tile, key))
        return row if key is None else row.with_options(key.features)

    def every_row(self, dtype: str) -> Iterator[Row]:
        """The whole table, with results in the same dtype; without lines that differ from others only under a bias."""
        for tiles in self.tiles.values():
            yield from (self.row(tile, dtype) for tile in tiles if dtype in tile.dtypes and not tile.needs("bias"))

    def tile_sizes(self) -> frozenset[int]:
        """Every length of a tile, in queries or keys: where lengths take different ways."""
        return frozenset(
            size for tiles in self.tiles.values() for tile in tiles for size in (tile.owned, tile.streamed)
        )

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Row]:
        """Every row of one of its kernels that takes the call, the preferred first, whether or not it fits the GPU."""
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        words = self.words(key, dims)
        tiles = (tile for tile in self.tiles[kernel] if tile.dims == dims and key.dtype in tile.dtypes)
        taken = sorted((tile for tile in tiles if not tile.is_refused(words)), key=lambda tile: tile.is_last(words))
        return (self.row(tile, key.dtype, key) for tile in taken)

    def rows(self, kernel: str, key: PlanKey) -> list[Row]:
        """The candidates that fit the GPU."""
        return list(self._fitting(kernel, key))

    def has_row(self, kernel: str, key: PlanKey) -> bool:
        return any(True for _ in self._fitting(kernel, key))

    def _fitting(self, kernel: str, key: PlanKey) -> Iterator[Row]:
        return (row for row in self.candidates(kernel, key) if row.unfit(key.arch) is None)

    def select(self, kernel: str, key: PlanKey) -> Row:
        """The row that a call takes."""
        forced = _forced_rows.get(kernel, 0)
        if isinstance(forced, Row):
            return forced
        found = list(itertools.islice(self._fitting(kernel, key), forced + 1))
        if not found:
            raise self._no_tile(kernel, key)
        return found[-1]

    def _no_tile(self, kernel: str, key: PlanKey) -> Exception:
        """Returns the error for a call that the family does not refuse and its table has no tile for."""
        unfit = "; ".join(f"{row.tile.where}: {row.unfit(key.arch)}" for row in self.candidates(kernel, key))
        where, dims = f"{self.table.name}, {kernel}", f"{key.head_dim}, {key.head_dim_v}"
        came = f"no tile for head dims {dims} in {key.dtype} with {key.features} ({unfit or 'every line refuses it'})"
        return value_error(where, came, f"a line for every call that {self.name} does not refuse")

    @abstractmethod
    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        """Returns what the plan of a call launches."""

    @abstractmethod
    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        """The launch of one row, which need not be one that `candidates` gives."""

    def timed_as(self, key: PlanKey) -> str:
        """Returns the family whose times stand for its own: another if it was measured to be faster than that one. It
        must be registered before the other (families/__init__.py)."""
        return self.name

    def tile_note(self, key: PlanKey) -> str:
        """Returns what `explain` adds to the tile of a call."""
        return ""

    def support(self) -> str:
        """Returns which features it takes, for the table of kernels in docs/support.md."""
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
    kernel, row = row.of, row.with_options(features)
    text, entry = unit(kernel.header, kernel.name, row.config, kernel.struct, features, row.facts(features))
    return Step(
        text,
        entry,
        grid,
        row.owned,
        row.streamed,
        row.num_threads,
        row.shared_bytes,
        max_blocks=max_blocks,
        cluster=cluster,
        starts_early=starts_early,
        owns=kernel.owns,
    )


# Rows other than the preferred, for the sanitizers and the tile study


_forced_rows: dict[str, int | Row] = {}


@contextmanager
def forced_rows(rows: Mapping[str, int | Row]) -> Iterator[None]:
    """Inside, each of these kernels takes the row at this index among those that would do, or the last; or this very
    row, which need not be in the table. Plans made before or inside must not cross: see assemble.clear_plans."""
    before = dict(_forced_rows)
    _forced_rows.clear()
    _forced_rows.update(rows)
    try:
        yield
    finally:
        _forced_rows.clear()
        _forced_rows.update(before)
