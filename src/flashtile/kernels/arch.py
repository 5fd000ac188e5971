"""The limits of each architecture: the only place that knows an sm number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One compile target. Any newer GPU of the same major version runs what is compiled for it."""

    number: int  # 10 * major + minor
    shared_bytes: int  # that one block may use
    shared_bytes_per_multiprocessor: int

    @property
    def name(self) -> str:
        return f"sm_{self.number}"


_KB = 1024
ARCHS = {
    arch.number: arch
    for arch in (
        Arch(61, 48 * _KB, 96 * _KB),
        Arch(75, 64 * _KB, 64 * _KB),
        Arch(80, 163 * _KB, 164 * _KB),
        Arch(86, 99 * _KB, 100 * _KB),
        Arch(89, 99 * _KB, 100 * _KB),
        Arch(90, 227 * _KB, 228 * _KB),
        Arch(100, 227 * _KB, 228 * _KB),
        Arch(120, 99 * _KB, 100 * _KB),
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
    limits = max(older, key=lambda arch: arch.number)
    return Arch(number, limits.shared_bytes, limits.shared_bytes_per_multiprocessor)
