"""The architecture of the GPU at hand, or of one that is named."""

from __future__ import annotations

import functools

import torch

from flashtile.errors import unsupported, value_error
from flashtile.kernels.arch import ARCHS, Arch, arch_named, arch_of


@functools.cache
def current_arch(index: int = 0) -> Arch:
    major, minor = torch.cuda.get_device_capability(index)
    arch = arch_of(major, minor)
    if arch is None:
        raise unsupported("GPU", f"compute capability {major}.{minor}", "6.1 or newer")
    return arch


def arch_option(name: str) -> Arch:
    """The architecture of `--arch`: sm_90 and sm_90a are the same."""
    found = arch_named(name)
    if found is None or found.number not in ARCHS:
        raise value_error("--arch", repr(name), ", ".join(f"sm_{number}" for number in ARCHS))
    return found
