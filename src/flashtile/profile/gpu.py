"""The architecture of the GPU at hand."""

from __future__ import annotations

import functools

import torch

from flashtile.errors import unsupported
from flashtile.kernels.arch import Arch, arch_of


@functools.cache
def current_arch(index: int = 0) -> Arch:
    major, minor = torch.cuda.get_device_capability(index)
    arch = arch_of(major, minor)
    if arch is None:
        raise unsupported("GPU", f"compute capability {major}.{minor}", "6.1 or newer")
    return arch
