"""The tiles of every kernel: tiles.csv, read and checked, and a row of it as a call takes it.

A line is one tile of one kernel. The order of lines is that of preference: a call takes the first one that fits the
GPU and does not refuse it.

    kernel     the C++ function, without `_kernel`
    dtypes     of q, k and v, with spaces between them
    d, d_v     padded head dims; * and *: every pair that the other kernels of the family have
    owned      rows of a block's own tile: queries or keys, as the kernel says (Kernel.owns)
    streamed   rows of the tiles that stream by
    threads    of a block
    knobs      name=value, in the order of the config's template parameters
    refuses    calls that the tile does not take, mostly as it would spill registers: words that hold together, with
               semicolons between alternatives; !word: where the word does not hold
    last       calls in which the tile comes after all others, in the same words
    note       for people

A tile is written three times. `Kernel.config` fills the template of the family's config.cuh with the numbers of a line;
`Kernel.shared_bytes`, in family.py, repeats the size of the kernel's storage struct, so that a tile can be judged
without a compiler. A change of the template or the struct is a change of family.py: the generated unit asserts that the
sizes agree (tests/cpu/test_kernels.py: test_wrong_shared_bytes_are_a_compile_error).

The words are those of WORDS, `options>2` (more than two options that cost registers, as the family counts them), a GPU
(sm_90), and those of the family itself (Family.own_words). A line that begins with # is a comment.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

from flashtile.errors import value_error
from flashtile.plans.arch import ARCHS, Arch
from flashtile.plans.params import Params, Struct
from flashtile.plans.source import qualified
from flashtile.plans.spec import CPP_TYPES, DTYPES, Features, PlanKey

TABLE = Path(__file__).with_name("tiles.csv")
COLUMNS = ("kernel", "dtypes", "d", "d_v", "owned", "streamed", "threads", "knobs", "refuses", "last", "note")
GROUP_ROWS = 64  # rows of heads that are packed together (attn/work_item.cuh)
Knobs = tuple[tuple[str, int], ...]  # a bool is a flag
Dims = tuple[int, int]
_EVERY = "*"
_PLAIN = Features()
_COUNT = re.compile(r"options>\d+")
# What a call may have, by Features, dtype, head dims and precision
WORDS = frozenset(
    {"band", "mask", "softcap", "alibi", "bias", "float_bias", "dropout", "lengths", "paged", "unaligned", "padded"}
    | {"highest"}
    | set(DTYPES)
    | {f"sm_{number}" for number in ARCHS}
)


def words_of(key: PlanKey, dims: Dims, num_options: int) -> frozenset[str]:
    """Returns the words that hold for a call with these padded head dims."""
    features = key.features
    holds = {
        "band": features.has_band,
        "mask": features.has_bool_mask,
        "softcap": features.has_softcap,
        "alibi": features.has_alibi,
        "bias": features.bias_dtype is not None,
        "float_bias": features.bias_dtype == "float32",
        "dropout": features.has_dropout,
        "lengths": features.has_lengths,
        "paged": features.is_paged,
        "unaligned": not features.is_aligned16,
        "padded": (key.head_dim, key.head_dim_v) != dims,
        "highest": key.matmul_precision == "highest",
        key.dtype: True,
        f"sm_{key.arch.base}": True,
    }
    return frozenset(word for word, is_true in holds.items() if is_true) | {
        f"options>{count}" for count in range(num_options)
    }


@dataclass(frozen=True)
class Condition:
    """Words that hold together, and words that do not."""

    needs: frozenset[str]
    lacks: frozenset[str]

    def holds(self, words: frozenset[str]) -> bool:
        return self.needs <= words and not self.lacks & words


@dataclass(frozen=True)
class Tile:
    """A line of the table."""

    kernel: str
    dtypes: tuple[str, ...]
    head_dim: int  # padded; 0 in a line for every pair
    head_dim_v: int
    owned: int
    streamed: int
    num_threads: int
    knobs: Knobs = ()
    refuses: tuple[Condition, ...] = field(default=(), compare=False)
    last: tuple[Condition, ...] = field(default=(), compare=False)
    where: str = field(default="", compare=False)  # file and line, for errors

    dims: ClassVar = property(attrgetter("head_dim", "head_dim_v"))

    def is_refused(self, words: frozenset[str]) -> bool:
        """True if a call of which these words hold does not take the tile."""
        return any(one.holds(words) for one in self.refuses)

    def is_last(self, words: frozenset[str]) -> bool:
        return any(one.holds(words) for one in self.last)

    def needs(self, word: str) -> bool:
        """True if the tile is only for calls of which the word holds."""
        return any(one.lacks == {word} and not one.needs for one in self.refuses)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a family: what its tiles share. `config` and `storage` are C++ with names in braces: those of
    `Row.names` and of knobs. `storage` takes {config}, the policies {mask}, {score_mod} and {lengths}, and {wide}:
    "Wide" for head dims over 128."""

    name: str
    header: str | Path  # the .cuh below families/, without its ending; a path if it is not there
    config: str
    storage: str
    shared_bytes: Callable[[Row], int]  # the size of the storage struct; the generated unit asserts it
    knobs: tuple[str, ...] = ()
    owns: str = "queries"  # what a block owns: "queries" or "keys"; the other streams by
    optional_knobs: tuple[str, ...] = ()  # that may follow
    struct: Struct = Params  # what the kernel is passed
    asserts: Callable[[Row, Features], Mapping[str, tuple[str, object]]] | None = None  # more that C++ must agree on


@dataclass(frozen=True)
class Row:
    """A tile as a call takes it: with its dtypes, the knobs that the call decides, and the options that take shared
    memory."""

    of: Kernel
    tile: Tile
    dtype: str  # of q, k and v
    out_dtype: str
    call_knobs: Knobs = ()
    options: Features = _PLAIN

    # As the tile says
    kernel: ClassVar = property(attrgetter("tile.kernel"))
    head_dim: ClassVar = property(attrgetter("tile.head_dim"))
    head_dim_v: ClassVar = property(attrgetter("tile.head_dim_v"))
    owned: ClassVar = property(attrgetter("tile.owned"))
    streamed: ClassVar = property(attrgetter("tile.streamed"))
    num_threads: ClassVar = property(attrgetter("tile.num_threads"))

    @functools.cached_property
    def knobs(self) -> Mapping[str, int]:
        """Returns the knobs of the tile, then those of the call."""
        return dict(self.tile.knobs + self.call_knobs)

    def __getitem__(self, knob: str) -> int:
        return self.knobs[knob]

    @property
    def names(self) -> dict[str, str]:
        """Returns the names that a config may have in braces, beside knobs. Consumer warpgroups have 64 rows each, a
        producer warpgroup none."""
        return {
            "dtype": CPP_TYPES[self.dtype],
            "out_dtype": CPP_TYPES[self.out_dtype],
            "d": str(self.head_dim),
            "d_v": str(self.head_dim_v),
            "owned": str(self.owned),
            "streamed": str(self.streamed),
            "warps": str(self.num_threads // 32),
            "consumer_rows": str((self.num_threads - 128) // 2),
            "knobs": _cpp(self.tile.knobs),
            "call": _cpp(self.call_knobs),
        }

    @property
    def config(self) -> str:
        """The C++ config type, without its namespace."""
        return self.of.config.format(**self.names, **{name: str(value) for name, value in self.knobs.items()})

    @functools.cached_property
    def shared_bytes(self) -> int:
        return self.of.shared_bytes(self)

    @property
    def label(self) -> str:
        """Tells the row from others of its kernel and head dims."""
        knobs = (f"{name}={str(value).lower()}" for name, value in self.knobs.items())
        return ", ".join([f"{self.owned} x {self.streamed}, {self.num_threads // 32} warps", *knobs])

    @property
    def num_queries(self) -> int:
        """Queries of a tile."""
        return self.owned if self.of.owns == "queries" else self.streamed

    @property
    def num_keys(self) -> int:
        """Keys of a tile."""
        return self.streamed if self.of.owns == "queries" else self.owned

    def queries(self, packed_heads: int) -> int:
        """Returns how many queries a tile with so many packed heads holds."""
        return self.owned // GROUP_ROWS * (GROUP_ROWS // packed_heads)

    def with_options(self, features: Features) -> Row:
        """Returns the row with the shared memory that the options of a call take."""
        options = Features(has_bool_mask=features.has_bool_mask, bias_dtype=features.bias_dtype)
        return self if options == self.options else replace(self, options=options)

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        """Returns what Python and C++ must agree on: the message of the static_assert -> (C++ expression, value)."""
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        names = {
            "wide": "Wide" if self.head_dim > 128 else "",
            "mask": policies[0],
            "score_mod": policies[1],
            "lengths": policies[3],
        }
        storage = self.of.storage.format(config=f"flashtile::{self.config}", **names)
        found: dict[str, tuple[str, object]] = {"shared bytes": (f"sizeof(flashtile::{storage})", self.shared_bytes)}
        return found if self.of.asserts is None else found | dict(self.of.asserts(self, features))

    def unfit(self, arch: Arch) -> str | None:
        """Returns why the row cannot run on the architecture, or None. Its knob `blocks` says how many of its blocks
        should share a multiprocessor."""
        if self.shared_bytes > arch.shared_bytes:
            kib, limit = self.shared_bytes / 1024, arch.shared_bytes // 1024
            return f"{kib:.0f} KiB of shared memory, and a block of {arch.name} may have {limit}"
        blocks = self.knobs.get("blocks", 1)
        needed = blocks * (self.shared_bytes + arch.reserved_shared_bytes)
        if blocks > 1 and needed > arch.shared_bytes_per_multiprocessor:
            kib, limit = needed / 1024, arch.shared_bytes_per_multiprocessor // 1024
            return f"{blocks} blocks have {kib:.0f} KiB of shared memory, a multiprocessor {limit}"
        return None


def _cpp(knobs: Knobs) -> str:
    return ", ".join(str(value).lower() for _, value in knobs)


# The table


@functools.cache
def read(path: Path) -> tuple[Tile, ...]:
    """Returns the tile of every line; raises an error that names a line that cannot be read or stands there twice."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    cells = csv.reader(line for _, line in numbered)
    header = tuple(next(cells, ()))
    if header != COLUMNS:
        raise value_error(path.name, f"columns {', '.join(header)}", ", ".join(COLUMNS))
    found: dict[Tile, str] = {}
    for (number, _), values in zip(numbered[1:], cells, strict=True):
        where = f"{path.name}, line {number}"
        tile = _tile(values, where)
        if tile in found:
            raise value_error(where, f"the tile of {found[tile]} again", "a tile that the kernel does not have")
        found[tile] = where
    return tuple(found)


def _tile(values: list[str], where: str) -> Tile:
    if len(values) != len(COLUMNS):
        raise value_error(where, f"{len(values)} cells", f"{len(COLUMNS)}: {', '.join(COLUMNS)}")
    cell = dict(zip(COLUMNS, values, strict=True))
    is_for_every = cell["d"] == cell["d_v"] == _EVERY
    d, d_v = (0 if is_for_every else _number(cell[name], f"{where}, {name}") for name in ("d", "d_v"))
    owned, streamed, threads = (_number(cell[name], f"{where}, {name}") for name in ("owned", "streamed", "threads"))
    dtypes = tuple(cell["dtypes"].split())
    if not dtypes or not set(dtypes) <= set(DTYPES):
        raise value_error(f"{where}, dtypes", repr(cell["dtypes"]), f"some of {', '.join(DTYPES)}")
    knobs = tuple(_knob(text, f"{where}, knobs") for text in cell["knobs"].split())
    refuses, last = (tuple(_conditions(cell[name])) for name in ("refuses", "last"))
    return Tile(cell["kernel"], dtypes, d, d_v, owned, streamed, threads, knobs, refuses, last, where)


def _number(text: str, where: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise value_error(where, repr(text), "a positive number")
    return int(text)


def _knob(text: str, where: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    if not name or not value.isdigit():
        raise value_error(where, repr(text), "name=number, name=true or name=false")
    return name, int(value)


def _conditions(text: str) -> Iterator[Condition]:
    for alternative in text.split(";"):
        if words := alternative.split():
            lacks = frozenset(word[1:] for word in words if word.startswith("!"))
            yield Condition(frozenset(word for word in words if not word.startswith("!")), lacks)


def tiles_of(path: Path, kernels: Iterable[Kernel], own_words: frozenset[str]) -> dict[str, tuple[Tile, ...]]:
    """Returns the tiles of a family by kernel, in order of preference; raises an error that names a line that does not
    agree with the family."""
    known = {kernel.name: kernel for kernel in kernels}
    lines = [tile for tile in read(path) if tile.kernel in known]
    for tile in lines:
        _check(tile, known[tile.kernel], WORDS | own_words)
    pairs = sorted({tile.dims for tile in lines if tile.head_dim})
    found = {
        name: tuple(one for tile in lines if tile.kernel == name for one in _for_dims(tile, pairs)) for name in known
    }
    # Every kernel of a family serves the same calls
    dims = {name: {(dtype, tile.dims) for tile in tiles for dtype in tile.dtypes} for name, tiles in found.items()}
    for name, tiles in found.items():
        for tile in tiles:
            for other, own in dims.items():
                missing = [dtype for dtype in tile.dtypes if (dtype, tile.dims) not in own]
                if missing:
                    what = f"head dims {tile.head_dim}, {tile.head_dim_v} in {missing[0]} for {name} alone"
                    raise value_error(tile.where, what, f"a tile of {other} for them, too")
    return found


def _for_dims(tile: Tile, pairs: Iterable[Dims]) -> Iterator[Tile]:
    if tile.head_dim:
        yield tile
        return
    for head_dim, head_dim_v in pairs:
        yield replace(tile, head_dim=head_dim, head_dim_v=head_dim_v)


def _check(tile: Tile, kernel: Kernel, words: frozenset[str]) -> None:
    names, every = tuple(name for name, _ in tile.knobs), kernel.knobs + kernel.optional_knobs
    if names not in [every[:count] for count in range(len(kernel.knobs), len(every) + 1)]:
        raise value_error(f"{tile.where}, knobs", " ".join(names) or "none", " ".join(kernel.knobs) or "none")
    for one in (*tile.refuses, *tile.last):
        for word in sorted(one.needs | one.lacks):
            if word not in words and not _COUNT.fullmatch(word):
                raise value_error(tile.where, repr(word), f"options>1 or so, or one of {', '.join(sorted(words))}")


def check_kernels(path: Path, kernels: Iterable[str]) -> None:
    """Raises an error if a line names a kernel that no family has."""
    known = set(kernels)
    for tile in read(path):
        if tile.kernel not in known:
            raise value_error(tile.where, repr(tile.kernel), f"one of {', '.join(sorted(known))}")
