"""Shared parts of the families by mma.sync: from Turing on, where tensor cores take float16 alone."""

from __future__ import annotations

from flashtile.families import speeds
from flashtile.families.base import Family
from flashtile.plans.arch import Arch
from flashtile.plans.spec import PlanKey


def refuse_slow_tf32(arch: Arch) -> str | None:
    """Returns why three TF32 products are not faster than FMA on the architecture, or None."""
    if "float32" not in arch.mma_dtypes:
        return f"{arch.name} has no TF32 products"
    return None if arch.has_fast_tf32 else f"FMA is as fast as three TF32 products on {arch.name}"


def small_call(key: PlanKey) -> str | None:
    """Returns why FFMA goes first in float32, or None."""
    return None if key.length(speeds.SIZE) else "a small call: float32 by tensor cores was not timed there"


# C++ names of kernels that a tool misreads (Family.misread_by)
NARROW_LOADS, MASKED = "_sm80_.*Load<false>", "fwd_sm80_(f32_)?kernel<.*Mask<true"


class MmaFamily(Family):
    is_by_mma_sync = True

    def refuse_arch(self, arch: Arch) -> str | None:
        return None if arch.mma_dtypes else f"{arch.name} has no mma.sync"

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is not None:
            return reason
        if key.dtype not in key.arch.mma_dtypes:
            return f"{key.arch.name} has no mma.sync of {key.dtype}"
        if not all(self.has_row(kernel, key) for kernel in self.kernels):
            return f"no tile of it fits {key.arch.name}"
        return None
