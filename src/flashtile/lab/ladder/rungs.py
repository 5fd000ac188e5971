"""The kernels of the ladder: numbered files, each with a launch line in its head comment.

    // launch: block_m=64 block_n=64|32 threads=256 shared=4*2*block_n*d arch=61

A block has `threads` threads and owns `block_m` queries. `block_n` lists the key tiles that the kernel accepts, the
preferred one first. `shared` is the dynamic shared memory in bytes, `arch` the oldest architecture. Values are integer
expressions over d (head_dim rounded up to a multiple of 32), arch, block_m and block_n, and may use
`(A if x < y else B)`. A second launch line continues the first. The values are passed to the compiler as HEAD_DIM,
BLOCK_M, BLOCK_N, NUM_THREADS, SHARED_BYTES and IS_WIDE (rows are 16-byte aligned), so a tile is written only once.

Three more fields may follow. `dtype` is that of the tensors, fp32 where it is absent. `last_arch` is the newest
architecture. `maps=1`: the argument is MappedParams, with tensor maps of q, k and v, whose boxes have 64 columns and
block_m or block_n rows; rows must be 16-byte aligned. `blocks` limits the grid to so many blocks for each
multiprocessor.
"""

from __future__ import annotations

import ast
import functools
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashtile.errors import unsupported, value_error
from flashtile.lab.bench import device
from flashtile.plans.arch import Arch

FOLDER = Path(__file__).resolve().parent
MAX_HEAD_DIM = 128
DTYPES = ("fp32", "bf16")
_PADDING = 32
_FIELDS = ("block_m", "block_n", "threads", "shared", "arch")
_OPTIONAL = {"dtype": "fp32", "last_arch": "1000", "maps": "0", "blocks": "0"}  # and their defaults
_EXAMPLE = "// launch: block_m=64 block_n=64|32 threads=256 shared=4*2*block_n*d arch=61"


@dataclass(frozen=True)
class Variables:
    """The environment variables of an experiment."""

    is_debug: bool = False  # FLASH_DEBUG
    shared_kb: int | None = None  # FLASH_SMEM_KB
    block_n: int | None = None  # FLASH_BLOCK_N
    source: Path | None = None  # FLASH_KERNEL_SRC
    function: str | None = None  # FLASH_KERNEL_FN

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Variables:
        debug = environment.get("FLASH_DEBUG", "")
        if debug not in ("", "0", "1"):
            raise value_error("FLASH_DEBUG", repr(debug), "0 or 1")
        source, function = environment.get("FLASH_KERNEL_SRC"), environment.get("FLASH_KERNEL_FN")
        if source and not Path(source).is_file():
            raise value_error(
                "FLASH_KERNEL_SRC",
                f"{source}, which is no file",
                "the path of a .cu file",
                "Start from one of the ladder's",
            )
        if function and not source:
            raise value_error(
                "FLASH_KERNEL_FN", f"{function!r} alone", "FLASH_KERNEL_SRC too, the file that holds the kernel"
            )
        return cls(
            debug == "1",
            _positive(environment, "FLASH_SMEM_KB"),
            _positive(environment, "FLASH_BLOCK_N"),
            Path(source) if source else None,
            function or None,
        )

    @property
    def change_kernels(self) -> bool:
        """True if a variable but FLASH_DEBUG is set: what runs is not the ladder as it is."""
        return self != Variables(is_debug=self.is_debug)

    def environment(self) -> dict[str, str]:
        """Returns the variables as a dictionary."""
        values = {
            "FLASH_DEBUG": "1" if self.is_debug else None,
            "FLASH_SMEM_KB": self.shared_kb,
            "FLASH_BLOCK_N": self.block_n,
            "FLASH_KERNEL_SRC": self.source,
            "FLASH_KERNEL_FN": self.function,
        }
        return {name: "" if value is None else str(value) for name, value in values.items()}

    def child_environment(self) -> dict[str, str]:
        """The environment of a child process that runs this package with the same variables."""
        return device.child_environment(self.environment())


def _positive(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise value_error(name, repr(text), "an integer >= 1")
    return int(text)


@dataclass(frozen=True)
class Tile:
    """Tile and launch configuration for one head dim and architecture."""

    head_dim: int  # rounded up
    block_m: int
    block_n: int
    num_threads: int
    shared_bytes: int

    def defines(self, is_aligned16: bool) -> list[str]:
        return [
            f"HEAD_DIM={self.head_dim}",
            f"BLOCK_M={self.block_m}",
            f"BLOCK_N={self.block_n}",
            f"NUM_THREADS={self.num_threads}",
            f"SHARED_BYTES={self.shared_bytes}",
            f"IS_WIDE={int(is_aligned16)}",
        ]


@dataclass(frozen=True)
class Rung:
    """One kernel: its file, the function in it and its launch line."""

    path: Path
    source: str
    function: str
    launch: tuple[tuple[str, str], ...]  # fields of the launch line and their expressions
    is_own: bool = False  # the user's own kernel

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def title(self) -> str:
        """The first line of the file, without its number."""
        first = self.source.splitlines()[0].removeprefix("//").strip() if self.source else ""
        return re.sub(r"^\d+ ", "", first)

    @property
    def min_arch(self) -> int:
        return evaluate(dict(self.launch)["arch"], {})

    @property
    def max_arch(self) -> int:
        return evaluate(dict(self.launch)["last_arch"], {})

    @property
    def dtype(self) -> str:
        return dict(self.launch)["dtype"]

    @property
    def has_maps(self) -> bool:
        """True if the kernel takes MappedParams."""
        return evaluate(dict(self.launch)["maps"], {}) != 0

    @property
    def blocks_per_multiprocessor(self) -> int:
        """Returns the blocks of a persistent grid for each multiprocessor; 0: a block for each query tile."""
        return evaluate(dict(self.launch)["blocks"], {})

    def note(self, word: str) -> str:
        """The text of a section of the head comment: Changed, Why, Predicted or Measured."""
        match = re.search(rf"^// {word}:\s+(.*?)(?=^// \w+:|^//\n|^// *$|^[^/])", self.source, re.MULTILINE | re.DOTALL)
        text = " ".join(line.removeprefix("//").strip() for line in match[1].splitlines()) if match else ""
        return text[:1].upper() + text[1:]

    def tile(self, head_dim: int, arch: Arch, variables: Variables) -> Tile:
        """The first tile that fits into shared memory, or the one that FLASH_BLOCK_N selects."""
        if not 1 <= head_dim <= MAX_HEAD_DIM:
            raise unsupported("head_dim", head_dim, f"1 to {MAX_HEAD_DIM} in the ladder")
        if arch.number < self.min_arch:
            raise unsupported(self.name, f"{arch.name}", f"sm_{self.min_arch} or newer")
        if arch.number > self.max_arch:
            raise unsupported(self.name, f"{arch.name}", f"sm_{self.min_arch} to sm_{self.max_arch}")
        budget = self._budget(arch, variables)
        fields, names = dict(self.launch), {"d": -(-head_dim // _PADDING) * _PADDING, "arch": arch.number}
        names["block_m"] = self._value(fields["block_m"], names)
        num_threads = self._value(fields["threads"], names)
        accepted = [self._value(text, names) for text in fields["block_n"].split("|")]
        tiles = [
            Tile(
                names["d"],
                names["block_m"],
                block_n,
                num_threads,
                self._value(fields["shared"], names | {"block_n": block_n}),
            )
            for block_n in accepted
        ]
        fitting = [tile for tile in tiles if tile.shared_bytes <= budget]
        limit = f"{budget // 1024} KiB" + (
            " of FLASH_SMEM_KB" if variables.shared_kb else f" that a block of {arch.name} may have"
        )
        if variables.block_n is not None:
            if variables.block_n not in accepted:
                choices = f"{', '.join(map(str, accepted))} in {self.path.name}"
                raise value_error(
                    "FLASH_BLOCK_N", str(variables.block_n), choices, "Its launch line lists what it takes"
                )
            tile = tiles[accepted.index(variables.block_n)]
            if tile not in fitting:
                got = (
                    f"{tile.block_n}, a tile of {tile.shared_bytes / 1024:.1f} KiB at head_dim "
                    f"{head_dim}, over the {limit}"
                )
                raise value_error(
                    "FLASH_BLOCK_N", got, self._largest(fitting), "Take a smaller tile, or raise FLASH_SMEM_KB"
                )
            return tile
        if not fitting:
            smallest = min(tiles, key=lambda tile: tile.shared_bytes)
            got = (
                f"a tile of {smallest.shared_bytes / 1024:.1f} KiB at head_dim {head_dim}, its smallest, "
                f"over the {limit}"
            )
            raise unsupported(self.name, got, "a tile that fits", "Raise FLASH_SMEM_KB, or take another rung")
        return fitting[0]

    def _budget(self, arch: Arch, variables: Variables) -> int:
        if variables.shared_kb is None:
            return arch.shared_bytes
        if variables.shared_kb * 1024 > arch.shared_bytes:
            accepted = f"at most {arch.shared_bytes // 1024}, what a block of {arch.name} may have"
            raise value_error("FLASH_SMEM_KB", variables.shared_kb, accepted)
        return variables.shared_kb * 1024

    def _largest(self, fitting: list[Tile]) -> str:
        return f"at most {max(tile.block_n for tile in fitting)}" if fitting else "none: no tile of this kernel fits"

    def _value(self, text: str, names: Mapping[str, int]) -> int:
        try:
            return evaluate(text, names)
        except ValueError as error:
            raise value_error(
                "launch line", f"{text!r} in {self.path.name} ({error})", f"arithmetic over {', '.join(names)}"
            ) from error


@functools.cache
def rungs() -> tuple[Rung, ...]:
    """The rungs of every numbered file, in order."""
    return tuple(read(path, None) for path in sorted(FOLDER.glob("[0-9][0-9]_*.cu")))


def own(variables: Variables) -> Rung | None:
    """The user's kernel, if FLASH_KERNEL_SRC names one."""
    if variables.source is None:
        return None
    found = replace(read(variables.source, variables.function), is_own=True)
    if found.name in (rung.name for rung in rungs()):
        raise value_error(
            "FLASH_KERNEL_SRC", f"{found.path.name}, the name of a rung", "a file of another name", "Rename your copy"
        )
    return found


def read(path: Path, function: str | None) -> Rung:
    """Reads a kernel from its file. Without a function name the file must have exactly one kernel."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise value_error("FLASH_KERNEL_SRC", f"{path} ({error})", "a readable text file") from error
    kernels = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(", source)
    if function is None and len(kernels) != 1:
        found = ", ".join(kernels) or "none"
        raise value_error(
            "FLASH_KERNEL_FN",
            f"nothing, and {path.name} has {len(kernels)} kernels ({found})",
            "the name of one of them",
        )
    if function is not None and function not in kernels:
        raise value_error(
            "FLASH_KERNEL_FN", repr(function), f"a kernel of {path.name}: {', '.join(kernels) or 'it has none'}"
        )
    return Rung(path, source, function or kernels[0], _launch_line(path, source))


def _launch_line(path: Path, source: str) -> tuple[tuple[str, str], ...]:
    text = " ".join(re.findall(r"^// launch:(.*)$", source, re.MULTILINE))
    found = {
        name: value.strip() for name, value in re.findall(r"(\w+)=((?:\([^()]* if [^()]* else [^()]*\)|\S)+)", text)
    }
    if not set(_FIELDS) <= set(found) <= {*_FIELDS, *_OPTIONAL}:
        got = f"{path.name} with {', '.join(found) or 'none'}"
        raise value_error(
            "launch line",
            got,
            f"one that gives {', '.join(_FIELDS)}, and no more than {', '.join(_OPTIONAL)}",
            f"Write it into a comment, such as\n{_EXAMPLE}\n",
        )
    found = _OPTIONAL | found
    if found["dtype"] not in DTYPES:
        raise value_error("launch line", f"dtype={found['dtype']} in {path.name}", ", ".join(DTYPES))
    return tuple(found.items())


# Expressions of the launch line

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}


def evaluate(text: str, names: Mapping[str, int]) -> int:
    """Evaluates an integer expression: +, -, *, //, comparisons, conditions, `names`. Raises ValueError for others."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from error
    return int(_walk(tree, names))


def _walk(node: ast.AST, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.IfExp):
        return _walk(node.body if _walk(node.test, names) else node.orelse, names)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        right = _walk(node.right, names)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise ValueError("division by zero")
        return int(_OPERATORS[type(node.op)](_walk(node.left, names), right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        return int(_OPERATORS[type(node.ops[0])](_walk(node.left, names), _walk(node.comparators[0], names)))
    raise ValueError(f"{ast.unparse(node)!r} is not understood")
