"""The environment variables of flashtile: what each says, when it is read, and by whom.

A process may change one that is read more than once. `check` reads all those that do not take any text at import:
nonsense is refused there, not by the first call that it would concern.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from flashtile import families
from flashtile.backends import native, registry
from flashtile.errors import is_switched_on, value_error
from flashtile.plans import arch
from flashtile.problem import is_checking
from flashtile.runtime import extension, toolchain


class Variable(NamedTuple):
    name: str
    accepted: str
    default: str
    meaning: str
    is_read: str


_FIRST = "by the first call of a kind, and by explain"
_COMPILES = "when a kernel is compiled or loaded"
_LADDER = "by `flashtile ladder`"
_BUILD = "when the package is built"

# What flashtile.integrations.launch can switch on
LAUNCHED = ("transformers", "install", "flash_attn", "xformers")

# docs/environment.md has a table for each of these groups, `flashtile info` a line for each variable
GROUPS: dict[str, tuple[Variable, ...]] = {
    "Every call": (
        Variable(
            "FLASHTILE_STRICT",
            "0 or 1",
            "0",
            "1: what would fall back to a slower path raises instead of warning",
            _FIRST,
        ),
        Variable(
            "FLASHTILE_CHECK",
            "0 or 1",
            "0",
            "1: check lengths and block tables on a GPU, which synchronises with it",
            "by every call",
        ),
        Variable(
            "FLASHTILE_EXECUTOR",
            "c++ or python",
            "c++",
            "python: launch CUDA kernels from Python instead of from the C++ extension",
            "once, by the first call on a GPU",
        ),
        Variable(
            "FLASHTILE_CPU_ISA",
            "avx512, avx2 or baseline",
            "the best that processor and build have",
            "the instruction set of the CPU engine",
            "by calls on the CPU",
        ),
        Variable(
            "FLASHTILE_FAMILY",
            "names of kernel families, separated by commas",
            "none",
            "families that CUDA calls take whatever their speed; for tests, check and bench",
            _FIRST,
        ),
        Variable(
            "FLASHTILE_ARCH",
            "a name such as sm_86",
            "the GPU's own",
            "the architecture that a GPU is taken for, with its rows and limits; for tests and bench",
            _FIRST,
        ),
    ),
    "Compiling kernels": (
        Variable("FLASHTILE_NVRTC", "a file", "the first one found", "the libnvrtc to compile with", _COMPILES),
        Variable(
            "FLASHTILE_CACHE_DIR",
            "a folder",
            "flashtile/ below XDG_CACHE_HOME or ~/.cache",
            "the folder of compiled kernels",
            _COMPILES,
        ),
        Variable("FLASHTILE_CACHE", "0 or 1", "1", "0: keep compiled kernels in memory only", _COMPILES),
    ),
    "Starting programs": (
        Variable(
            "FLASHTILE_LAUNCH",
            f"{', '.join(LAUNCHED)}, separated by commas",
            "none",
            "what `python -m flashtile.integrations.launch` switches on in the processes of a program",
            "when Python starts",
        ),
    ),
    "Measuring": (
        Variable(
            "FLASHTILE_COMMIT",
            "text",
            "what git says",
            "the commit that result files name, for a source copy without git history",
            "by commands that write results",
        ),
        Variable("FLASH_DEBUG", "0 or 1", "0", "1: print the compiler's log and each launch, and wait for it", _LADDER),
        Variable(
            "FLASH_SMEM_KB", "an integer from 1", "the rung's", "shared memory that a block may use, in KiB", _LADDER
        ),
        Variable(
            "FLASH_BLOCK_N",
            "an integer from 1",
            "the rung's",
            "keys of a tile, one of those in the launch line",
            _LADDER,
        ),
        Variable(
            "FLASH_KERNEL_SRC",
            "a .cu file",
            "none",
            "a file with a kernel to check and measure beside the rungs",
            _LADDER,
        ),
        Variable("FLASH_KERNEL_FN", "a name", "the only kernel", "the kernel in that file", _LADDER),
    ),
    "Building": (
        Variable("FLASHTILE_EXTENSION", "0 or 1", "1", "0: build without the C++ extension", _BUILD),
        Variable("FLASHTILE_ARCHS", "names such as sm_90", "none", "architectures whose kernels are embedded", _BUILD),
        Variable("FLASHTILE_SANITIZE", "address or undefined", "none", "the sanitizer of the C++ extension", _BUILD),
    ),
    "Of other programs": (
        Variable("CUDA_HOME", "a folder", "none", "a toolkit whose libnvrtc is tried after the packages", _COMPILES),
        Variable("CUDA_PATH", "a folder", "none", "a toolkit that is tried after that of CUDA_HOME", _COMPILES),
        Variable(
            "XDG_CACHE_HOME", "a folder", "~/.cache", "the folder in which that of compiled kernels lies", _COMPILES
        ),
        Variable("TRITON_INTERPRET", "0 or 1", "0", "1: Triton's kernels run in its interpreter", "at import"),
        Variable("NUMBA_ENABLE_CUDASIM", "0 or 1", "0", "1: Numba's kernels run in its simulator", _FIRST),
        Variable("CC", "a command", "cc", "the C compiler that Triton needs", _FIRST),
        Variable("CXX", "a command", "Python's own", "the C++ compiler of the extension", _BUILD),
    ),
}
MEANINGS = {variable.name: variable.meaning for group in GROUPS.values() for variable in group}


def _launched() -> None:
    named = os.environ.get("FLASHTILE_LAUNCH", "")
    if not set(filter(None, named.split(","))).issubset(LAUNCHED):
        raise value_error("FLASHTILE_LAUNCH", repr(named), f"{', '.join(LAUNCHED)}, separated by commas")


# Variables that do not take any text
READERS: dict[str, Callable[[], object]] = {
    "FLASHTILE_LAUNCH": _launched,
    "FLASHTILE_STRICT": registry.is_strict,
    "FLASHTILE_CHECK": is_checking,
    "FLASHTILE_NVRTC": toolchain.named_file,
    "FLASHTILE_CACHE": partial(is_switched_on, "FLASHTILE_CACHE", default=True),
    "FLASHTILE_EXECUTOR": native.named_executor,
    "FLASHTILE_CPU_ISA": extension.named_instruction_set,
    "FLASHTILE_FAMILY": families.forced_names,
    "FLASHTILE_ARCH": arch.named_arch,
}


def check() -> None:
    for read in READERS.values():
        read()
