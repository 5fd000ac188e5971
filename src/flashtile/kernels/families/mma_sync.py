"""What the families by mma.sync have in common: from Turing on, where tensor cores take float16 alone."""

from __future__ import annotations

from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, RowT
from flashtile.kernels.spec import PlanKey

_TURING, _AMPERE = 75, 80


class MmaFamily(Family[RowT]):
    dtypes = ("float16", "bfloat16")

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
