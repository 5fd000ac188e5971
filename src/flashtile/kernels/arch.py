"""The limits of each architecture: the only place that knows an sm number."""

from __future__ import annotations

import os
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
        """For people: the compile target, and whose rows and limits count where they are another's."""
        return f"{self.target} as sm_{self.number}" if self.target not in ("", self.own_name) else self.name

    def blocks_per_multiprocessor(self, num_threads: int, registers: int, shared_bytes: int) -> int:
        """How many blocks a multiprocessor can hold at a time, by warps, registers and shared memory."""
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


# Multiprocessors of a well-known GPU of each, for questions about GPUs that are not here: GTX 1080 Ti, T4, A100, RTX
# A6000, L40S, H200, B200, RTX 5090
_MULTIPROCESSORS = {61: 28, 75: 40, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}


MEASURED_ARCH = "sm_90"  # whose times in speeds.csv stand in for GPUs that are not there


def has_mma_sync_alone(name: str) -> bool:
    """True if the tensor cores of an architecture have neither wgmma nor tcgen05."""
    return not 90 <= int(name.removeprefix("sm_").removesuffix("a")) < 120


def typical_multiprocessors(arch: Arch) -> int:
    return _MULTIPROCESSORS[max(number for number in _MULTIPROCESSORS if number <= arch.number)]


_SWITCH = "FLASHTILE_ARCH"


def arch_named(name: str) -> Arch | None:
    """The architecture of a name such as sm_80 or sm_90a, or None."""
    digits = name.removeprefix("sm_").removesuffix("a")
    return arch_of(int(digits) // 10, int(digits) % 10) if digits.isdigit() else None


def arch_here(major: int, minor: int) -> Arch | None:
    """What a GPU is taken for: itself, or under FLASHTILE_ARCH a GPU of that architecture, with its rows and its
    limits, whose kernels are compiled for this one. For tests, check and bench."""
    own, other = arch_of(major, minor), named_arch()
    if other is None or own is None:
        return own
    if other.shared_bytes > own.shared_bytes:
        fitting = [arch.name for arch in ARCHS.values() if arch.shared_bytes <= own.shared_bytes]
        raise value_error(_SWITCH, other.name, f"one that fits this GPU: {', '.join(fitting)}", "Unset it")
    return replace(other, target=own.name)


def named_arch() -> Arch | None:
    """What FLASHTILE_ARCH names, if anything."""
    name = os.environ.get(_SWITCH)
    if not name:
        return None
    found = arch_named(name)
    if found is None:
        raise value_error(_SWITCH, repr(name), ", ".join(arch.name for arch in ARCHS.values()), "Unset it")
    return found
