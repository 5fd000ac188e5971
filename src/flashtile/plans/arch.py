"""The limits of each architecture, and the GPUs of each: the only place that knows an sm number."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from flashtile.errors import value_error

_TURING_DTYPES = frozenset({"float16"})
_AMPERE_DTYPES = frozenset({"float16", "bfloat16", "float32"})


@dataclass(frozen=True)
class Arch:
    """One compile target and what a multiprocessor of it holds."""

    number: int  # 10 * major + minor
    shared_bytes: int  # that one block may use
    shared_bytes_per_multiprocessor: int
    max_warps: int
    max_blocks: int
    reserved_shared_bytes: int  # the system's own share of each block
    mma_dtypes: frozenset[str] = _AMPERE_DTYPES  # that mma.sync multiplies; float32 as TF32
    has_fast_tf32: bool = False  # 8 times the rate of FMA. Elsewhere it has about the same: three products are slower
    suffix: str = ""  # "a": with the instructions that only this architecture has
    has_wgmma: bool = False
    target: str = ""  # what is compiled for, where it is not the architecture itself (FLASHTILE_ARCH)

    @property
    def base(self) -> int:
        """The number of the architecture in ARCHS whose limits and tiles count."""
        return max(number for number in ARCHS if number // 10 == self.number // 10 and number <= self.number)

    @property
    def name(self) -> str:
        """The compile target."""
        return self.target or self.own_name

    @property
    def own_name(self) -> str:
        return f"sm_{self.number}{self.suffix}"

    @property
    def label(self) -> str:
        """Text for people: the compile target, and whose rows and limits count where they are another's."""
        return f"{self.target} as sm_{self.number}" if self.target not in ("", self.own_name) else self.name

    def blocks_per_multiprocessor(self, num_threads: int, registers: int, shared_bytes: int) -> int:
        """Returns how many blocks a multiprocessor can hold at a time, by warps, registers and shared memory."""
        warps = -(-num_threads // 32)
        # Registers are handed out to a warp in units, and each of four schedulers has a quarter of them
        per_warp = max(1, -(-registers * 32 // _REGISTER_UNIT)) * _REGISTER_UNIT
        by_registers = _REGISTERS // _SCHEDULERS // per_warp * _SCHEDULERS // warps
        shared = -(-shared_bytes // _SHARED_UNIT) * _SHARED_UNIT + self.reserved_shared_bytes
        by_shared = self.shared_bytes_per_multiprocessor // shared if shared else self.max_blocks
        return min(self.max_warps // warps, self.max_blocks, by_registers, by_shared)


_REGISTERS, _REGISTER_UNIT, _SCHEDULERS, _SHARED_UNIT = 65536, 256, 4, 128
_KB = 1024
ARCHS = {
    arch.number: arch
    for arch in (
        Arch(61, 48 * _KB, 96 * _KB, 64, 32, 0, frozenset()),
        Arch(75, 64 * _KB, 64 * _KB, 32, 16, 0, _TURING_DTYPES),
        Arch(80, 163 * _KB, 164 * _KB, 64, 32, _KB, has_fast_tf32=True),
        Arch(86, 99 * _KB, 100 * _KB, 48, 16, _KB),
        Arch(89, 99 * _KB, 100 * _KB, 48, 24, _KB),
        Arch(90, 227 * _KB, 228 * _KB, 64, 32, _KB, has_fast_tf32=True, suffix="a", has_wgmma=True),
        Arch(100, 227 * _KB, 228 * _KB, 64, 32, _KB, has_fast_tf32=True),
        Arch(120, 99 * _KB, 100 * _KB, 48, 24, _KB),
    )
}


def arch_of(major: int, minor: int) -> Arch | None:
    """The target for a GPU: its own number, else the closest older one of its major version under its own number."""
    number = 10 * major + minor
    if number in ARCHS:
        return ARCHS[number]
    older = [arch for arch in ARCHS.values() if arch.number // 10 == major and arch.number < number]
    if not older:
        return None
    # Its rate of TF32 is not known
    return replace(max(older, key=lambda arch: arch.number), number=number, has_fast_tf32=False)


@dataclass(frozen=True)
class Gpu:
    """A GPU that need not be here."""

    name: str
    number: int  # of its architecture: 10 * major + minor
    multiprocessors: int


# Names and numbers of multiprocessors, for questions about GPUs that are not here. The first of an architecture stands
# for those without a name
_NAMES = {
    61: "GTX 1080 Ti 28, GTX 1080 20, P40 30",
    75: "T4 40, RTX 2080 Ti 68, RTX 2080 46, RTX 2070 36, RTX 2060 30, Quadro RTX 6000 72",
    80: "A100 108, A30 56",
    86: "RTX A6000 84, RTX A5000 64, RTX A4000 48, A40 84, A10 72, A10G 80, "
    "RTX 3090 Ti 84, RTX 3090 82, RTX 3080 Ti 80, RTX 3080 68, RTX 3070 46, RTX 3060 28",
    89: "L40S 142, L40 142, L4 58, RTX 6000 Ada 142, "
    "RTX 4090 128, RTX 4080 76, RTX 4070 Ti 60, RTX 4070 46, RTX 4060 Ti 34, RTX 4060 24",
    90: "H200 132, H100 132, H100 PCIe 114, H20 78, GH200 132",
    100: "B200 148, GB200 148",
    120: "RTX 5090 170, RTX 5080 84, RTX 5070 Ti 70, RTX 5070 48, RTX 5060 Ti 36, RTX 5060 30, RTX PRO 6000 188",
}
GPUS = tuple(
    Gpu(name, number, int(multiprocessors))
    for number, text in _NAMES.items()
    for name, multiprocessors in (entry.rsplit(" ", 1) for entry in text.split(", "))
)
_MAKERS = ("nvidia", "geforce", "tesla")  # words that may stand before a name


def _bare(name: str) -> str:
    """A name without case, spaces, dashes and the words before it."""
    text = re.sub(r"[\s_-]", "", name.lower())
    for maker in _MAKERS:
        text = text.removeprefix(maker)
    return text


_BY_NAME = {_bare(gpu.name): gpu for gpu in GPUS}


def gpu_named(name: str) -> Gpu | None:
    """The GPU of a name such as "RTX 4090", or None. Case, spaces and dashes do not count."""
    return _BY_NAME.get(_bare(name))


MEASURED_ARCH = "sm_90"  # whose times in speeds.csv stand in for GPUs that are not there


def has_mma_sync_alone(name: str) -> bool:
    """True if the tensor cores of an architecture have neither wgmma nor tcgen05."""
    return not 90 <= int(name.removeprefix("sm_").removesuffix("a")) < 120


def typical_multiprocessors(arch: Arch) -> int:
    closest = max(number for number in ARCHS if number <= arch.number)
    return next(gpu.multiprocessors for gpu in GPUS if gpu.number == closest)


_SWITCH = "FLASHTILE_ARCH"


def arch_named(name: str) -> Arch | None:
    """The architecture of a name such as sm_80, sm_90a or A100, or None."""
    digits = name.removeprefix("sm_").removesuffix("a")
    if digits.isdigit():
        return arch_of(int(digits) // 10, int(digits) % 10)
    gpu = gpu_named(name)
    return None if gpu is None else ARCHS[gpu.number]


def known_names() -> str:
    """The names of architectures and of GPUs, for messages."""
    return f"{', '.join(f'sm_{number}' for number in ARCHS)}, or a GPU: {', '.join(gpu.name for gpu in GPUS)}"


def arch_here(major: int, minor: int) -> Arch | None:
    """Returns what a GPU is taken for: itself, or under FLASHTILE_ARCH a GPU of that architecture, with its rows and
    its limits, whose kernels are compiled for this one. For tests, check and bench."""
    own, other = arch_of(major, minor), named_arch()
    if other is None or own is None:
        return own
    if other.shared_bytes > own.shared_bytes:
        fitting = [arch.name for arch in ARCHS.values() if arch.shared_bytes <= own.shared_bytes]
        raise value_error(_SWITCH, other.name, f"one that fits this GPU: {', '.join(fitting)}", "Unset it")
    return replace(other, target=own.name)


def named_arch() -> Arch | None:
    """Returns what FLASHTILE_ARCH names, if anything."""
    name = os.environ.get(_SWITCH)
    if not name:
        return None
    found = arch_named(name)
    if found is None:
        raise value_error(_SWITCH, repr(name), known_names(), "Unset it")
    return found
