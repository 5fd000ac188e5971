"""The limits of each architecture: the only place that knows an sm number."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Arch:
    """One compile target and what a multiprocessor of it holds."""

    number: int  # 10 * major + minor
    shared_bytes: int  # that one block may use
    shared_bytes_per_multiprocessor: int
    max_warps: int
    max_blocks: int
    reserved_shared_bytes: int  # the system's own share of each block
    max_thread_scores: int = 64  # of a tile, that the compiler keeps in a thread's registers without a spill
    suffix: str = ""  # "a": with the instructions that only this architecture has
    has_wgmma: bool = False

    @property
    def name(self) -> str:
        return f"sm_{self.number}{self.suffix}"

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
        Arch(61, 48 * _KB, 96 * _KB, 64, 32, 0),
        Arch(75, 64 * _KB, 64 * _KB, 32, 16, 0),
        Arch(80, 163 * _KB, 164 * _KB, 64, 32, _KB),
        Arch(86, 99 * _KB, 100 * _KB, 48, 16, _KB),
        Arch(89, 99 * _KB, 100 * _KB, 48, 24, _KB),
        Arch(90, 227 * _KB, 228 * _KB, 64, 32, _KB, suffix="a", has_wgmma=True),
        Arch(100, 227 * _KB, 228 * _KB, 64, 32, _KB, max_thread_scores=32),
        Arch(120, 99 * _KB, 100 * _KB, 48, 24, _KB, max_thread_scores=32),
    )
}


def arch_of(major: int, minor: int) -> Arch | None:
    """The target for a GPU: its own number, else the closest older one of its major version with its own number as the name."""
    number = 10 * major + minor
    if number in ARCHS:
        return ARCHS[number]
    older = [arch for arch in ARCHS.values() if arch.number // 10 == major and arch.number < number]
    if not older:
        return None
    return replace(max(older, key=lambda arch: arch.number), number=number)
