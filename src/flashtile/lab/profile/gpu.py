"""The architecture of the GPU at hand, or of one that `--arch` names, for `flashtile profile` and `bench --tiles`."""

from __future__ import annotations

import functools

from flashtile.backends.base import capability, device_arch
from flashtile.errors import unsupported, value_error
from flashtile.plans.arch import ARCHS, Arch, arch_named, known_names


@functools.cache
def current_arch(index: int = 0) -> Arch:
    """Returns what the GPU is taken for. Raises Unsupported where it is too old."""
    arch = device_arch(index)
    if arch is None:
        major, minor = capability(index)
        raise unsupported("GPU", f"compute capability {major}.{minor}", "6.1 or newer")
    return arch


def arch_option(name: str) -> Arch:
    """The architecture of `--arch`: sm_90, sm_90a and H100 are the same."""
    found = arch_named(name)
    if found is None or found.number not in ARCHS:
        raise value_error("--arch", repr(name), known_names())
    return found
