"""The environment variables of flashtile: what each says, and who reads it.

They are read when they count, so a process may change one. `check` reads all of them at import: nonsense is refused
there, not by the first call that it would concern.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashtile.backends import native, registry
from flashtile.errors import is_switched_on
from flashtile.kernels import arch, families
from flashtile.problem import is_checking
from flashtile.runtime import extension, toolchain

MEANINGS = {
    "FLASHTILE_STRICT": "1: a call that would fall back to a slower path raises instead of warning",
    "FLASHTILE_CHECK": "1: check lengths and block tables on a GPU, which synchronises with it",
    "FLASHTILE_NVRTC": "the libnvrtc file to compile with; default: the first one found",
    "FLASHTILE_CACHE_DIR": "folder of compiled kernels; default: flashtile/ below XDG_CACHE_HOME or ~/.cache",
    "FLASHTILE_CACHE": "0: keep compiled kernels in memory only",
    "FLASHTILE_EXECUTOR": "python: launch CUDA kernels from Python instead of from the C++ extension",
    "FLASHTILE_CPU_ISA": "the instruction set of the CPU engine: avx512, avx2 or baseline; default: the best",
    "FLASHTILE_FAMILY": "kernel families, separated by commas, that CUDA calls take whatever their speed",
    "FLASHTILE_ARCH": "the architecture that a GPU is taken for, with its rows and limits; for tests and bench",
    "FLASHTILE_COMMIT": "the commit that result files name, for a source copy without git history",
}
# Those that do not take any text
READERS: dict[str, Callable[[], object]] = {
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
