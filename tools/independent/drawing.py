"""Random numbers, shapes and memory layouts; no attention."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Draw:
    """Draws of one problem."""

    def __init__(self, seed: int, index: int) -> None:
        self.rng = np.random.default_rng([seed, index])

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, items: Items[T]) -> T:
        return items[int(self.rng.integers(len(items)))]

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return int(self.rng.integers(low, high, endpoint=True))

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape)

    def length(self) -> int:
        if self.chance(0.04):
            return self.pick([63, 64, 65, 100, 127, 128, 129, 200, 257])
        return self.pick([0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 20, 24, 31, 32, 33])

    def head_dim(self) -> int:
        if self.chance(0.04):
            return self.pick([96, 100, 127, 128, 130, 192, 256, 300, 512])
        return self.pick([1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 64])

    def broadcast_shape(self, full: tuple[int, int, int, int]) -> tuple[int, ...]:
        shape = tuple(1 if self.chance(0.4) else n for n in full)
        while shape and shape[0] == 1 and self.chance(0.5):
            shape = shape[1:]
        return shape


def rounded(values: Any, dtype: str) -> tuple[Tensor, Any]:
    """The values as a tensor of the dtype, and what it then holds."""
    t = torch.empty(np.shape(values), dtype=DTYPES[dtype])
    t.copy_(torch.from_numpy(np.array(values, np.float64)))
    return t, t.double().numpy()


def place(d: Draw, t: Tensor, constant: int | None = None, any_last: bool = False, negated: bool = False) -> Tensor:
    """t in other memory: reordered, cut from a larger tensor full of NaN, with gaps, unaligned, or negated twice.

    A `constant` dimension, along which all values are the same, gets a stride of 0. `any_last` lets the last dimension
    have any stride."""
    if constant is not None and t.shape[constant] > 1:
        return t.narrow(constant, 0, 1).clone().expand(t.shape)
    filler: Any = d.chance(0.5) if t.dtype == torch.bool else float("nan")
    styles = ["plain", "plain", "order", "cut", "step", "shift"]
    style = d.pick(styles + ["last"] * any_last + ["negated"] * negated)
    if t.dim() == 0 or t.numel() == 0:
        return t.clone()
    lead = t.dim() - 1
    if style == "order":
        order = [int(n) for n in d.rng.permutation(t.dim() if any_last else lead)]
        order += [] if any_last else [lead]
        return t.permute(order).contiguous().permute([order.index(n) for n in range(t.dim())])
    if style == "cut":
        before = [d.integer(0, 2) for _ in t.shape]
        big = torch.full([n + a + d.integer(0, 2) for n, a in zip(t.shape, before, strict=True)], filler, dtype=t.dtype)
        view = big[tuple(slice(a, a + n) for n, a in zip(t.shape, before, strict=True))]
        view.copy_(t)
        return view
    if style == "last" or (style == "step" and lead > 0):
        dim = lead if style == "last" else d.integer(0, lead - 1)
        step = d.integer(2, 3)
        big = torch.full([n * step if m == dim else n for m, n in enumerate(t.shape)], filler, dtype=t.dtype)
        view = big[tuple(slice(None, None, step if m == dim else None) for m in range(t.dim()))]
        view.copy_(t)
        return view
    if style == "shift":
        start = d.integer(1, 7)
        big = torch.full([t.numel() + start], filler, dtype=t.dtype)
        view = big[start:].view(t.shape)
        view.copy_(t)
        return view
    if style == "negated":
        return torch._neg_view(t.neg())
    return t.clone(memory_format=torch.contiguous_format)
