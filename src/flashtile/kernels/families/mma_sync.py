"""What the families by mma.sync have in common: from Turing on, where tensor cores take float16 alone."""

from __future__ import annotations

from flashtile.kernels import speeds
from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family
from flashtile.kernels.spec import PlanKey

_TURING, _AMPERE = 75, 80
# TF32 has 8 times the rate of FMA there. On consumer GPUs it has about the same, and three products are slower
_FAST_TF32 = (80, 90, 100)


def refuse_slow_tf32(arch: Arch) -> str | None:
    """Why three TF32 products are not faster than FMA on the architecture, or None."""
    if arch.number < min(_FAST_TF32):
        return f"{arch.name} has no TF32 products"
    return None if arch.number in _FAST_TF32 else f"FMA is as fast as three TF32 products on {arch.name}"


def small_call(key: PlanKey) -> str | None:
    """Why FFMA goes first in float32, or None."""
    return None if key.length(speeds.SIZE) else "a small call: float32 by tensor cores was not timed there"


class MmaFamily(Family):
    def refuse_arch(self, arch: Arch) -> str | None:
        return None if arch.number >= _TURING else f"{arch.name} has no mma.sync"

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is not None:
            return reason
        if key.arch.number < _AMPERE and key.dtype == "bfloat16":
            return f"{key.arch.name} has no mma.sync of bfloat16"
        if not all(self.rows(kernel, key) for kernel in self.kernels):
            return f"no tile of it fits {key.arch.name}"
        return None
