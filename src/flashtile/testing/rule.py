"""The error rule: the oracle in float64, the yardstick in the input dtype, and what a result may differ by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashtile import ops
from flashtile.backends import reference
from flashtile.backends.base import GradNeeds
from flashtile.problem import AttentionArgs, shape_of
from flashtile.testing.cases import GRADS, OUTPUTS, Inputs, Result
from flashtile.testing.floor import rounding_floor

_GRAD_OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}


def run(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """The call itself, through the ops and autograd."""
    args, dout, dlse = inputs
    if not has_backward:
        return Result(*ops.forward(*args))
    leaves = _leaves(args)
    out, lse = ops.forward(*_with(args, leaves))
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout, dlse), allow_unused=True)
    return Result(out.detach(), lse.detach(), *_by_name(leaves, grads))


def oracle(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """The definition in float64, differentiated by autograd: shares no backward formula with any backend."""
    args, dout, dlse = inputs
    leaves = _leaves(args, torch.float64)
    out, lse = (torch.zeros_like(like, dtype=torch.float64) for like in ops.empty_outputs(args))
    reference.attend(_with(args, leaves), out, lse, torch.float64)
    if not has_backward:
        return Result(out.detach(), lse.detach())
    if not out.requires_grad:  # nothing was attended to at all
        return Result(out, lse, *_by_name(leaves, tuple(torch.zeros_like(leaf) for leaf in leaves.values())))
    finite_dlse = torch.where(lse == -torch.inf, 0.0, dlse.double())
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout.double(), finite_dlse), allow_unused=True)
    filled = tuple(
        torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves.values(), strict=True)
    )
    return Result(out.detach(), lse.detach(), *_by_name(leaves, filled))


def yardstick(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """Returns the results of plain math in the input dtype; the stored output is rounded to it before the backward pass
    uses it."""
    args, dout, dlse = inputs
    out, lse = ops.empty_outputs(args)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        reference.attend(args, out, lse, args.q.dtype)
        if not has_backward:
            return Result(out, lse)
        grads = ops.empty_grads(args, GradNeeds(True, True, True, args.bias is not None, args.sinks is not None))
        reference.attend_backward(args, dout, dlse, out, lse, grads, args.q.dtype)
        return Result(out, lse, *grads)
    finally:
        torch.set_float32_matmul_precision(precision)


def _leaves(args: AttentionArgs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    tensors = {name: getattr(args, name) for name in _GRAD_OF.values()}
    return {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def _with(args: AttentionArgs, tensors: dict[str, Tensor]) -> AttentionArgs:
    changes: dict[str, Any] = dict(tensors)
    return args._replace(**changes)


def _by_name(leaves: dict[str, Tensor], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    found = dict(zip(leaves, grads, strict=True))
    return tuple(found.get(_GRAD_OF[name]) for name in GRADS)


def disagreement(
    name: str, ours: Tensor, ref: Tensor, low: Tensor, dtype: torch.dtype, floor: Callable[[], Tensor] | None = None
) -> str | None:
    """The error rule for one tensor of a problem whose inputs have `dtype`: what is wrong, or None.

    `low` is the yardstick's tensor. `floor` gives the a-priori floor; it is asked only where the yardstick does not
    suffice.
    """
    if ours.shape != ref.shape:
        return f"{name}: shape {tuple(ours.shape)} instead of {tuple(ref.shape)}"
    if ours.numel() == 0:
        return None
    eps = torch.finfo(ours.dtype if name == "lse" else dtype).eps
    ours, ref, low = ours.double(), ref.double(), low.double()
    is_infinite = torch.isinf(ref)
    if is_infinite.any():
        if not torch.equal(ours[is_infinite], ref[is_infinite]):
            return f"{name}: not {ref[is_infinite][0]} where it should be"
        ours, ref, low = (tensor.masked_fill(is_infinite, 0.0) for tensor in (ours, ref, low))
    if floor is not None:
        # The product of q and k may overflow float16 before the scale shrinks it: there the floor alone judges
        low = torch.where(torch.isfinite(low), low, ref)
    error, low_error = ours - ref, low - ref
    largest, worst = ref.abs().max().item(), error.abs().max().item()
    if not math.isfinite(largest + worst + low_error.abs().max().item()):
        for what, tensor in (("the reference", ref), ("the yardstick", low), (name, ours)):
            count = int((~torch.isfinite(tensor)).sum())
            if count:
                return f"{name}: {count} values of {what} are NaN or infinite, so that nothing can be judged"
    slack = 2 * eps * largest + (1e-5 * max(1.0, largest) if name in GRADS else 1e-6)
    if worst <= slack:
        return None
    found = _exceeds(name, error, low_error, slack, torch.zeros_like(ref))
    return found if found is None or floor is None else _exceeds(name, error, low_error, slack, floor())


def _exceeds(name: str, error: Tensor, low_error: Tensor, slack: float, floor: Tensor) -> str | None:
    """Says where an error is larger than what the yardstick and the slack allow, and larger than the floor."""
    factor = 3.0 if name in GRADS else 2.0
    allowed = floor.clamp(min=factor * low_error.abs().max().item() + slack)
    excess = error.abs() - allowed
    if not excess.max().item() <= 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        return f"{name}: off by {error[at].abs().item():.3e} at {at}, allowed {allowed[at].item():.3e}"
    row_error, row_low = error.norm(dim=-1), low_error.norm(dim=-1)
    row_allowed = torch.maximum(2 * factor * row_low + slack * error.shape[-1] ** 0.5, floor.norm(dim=-1))
    excess = row_error - row_allowed
    if not excess.max().item() <= 0:
        worst = int(excess.argmax())
        return (
            f"{name}: row {worst} has error norm {row_error.flatten()[worst]:.3e}, allowed "
            f"{row_allowed.flatten()[worst]:.3e}"
        )
    return None


@dataclass(frozen=True)
class Expected:
    """Yardstick, reference and floor by which results of one problem are judged."""

    inputs: Inputs
    ref: Result
    low: Result  # the yardstick

    @cached_property
    def floor(self) -> Result:
        return rounding_floor(self.inputs, self.ref)

    def disagreement(self, name: str, ours: Tensor, *, is_relative: bool = False) -> str | None:
        """The error rule for one tensor. `is_relative` judges it as if its largest number were near 1, so that the
        rule's absolute slack hides no error of tiny numbers."""
        dtype, ref, low = self.inputs.args.q.dtype, getattr(self.ref, name), getattr(self.low, name)

        def floor() -> Tensor:
            return getattr(self.floor, name)

        if not is_relative or name == "lse" or ours.shape != ref.shape or not 0 < (largest := _largest(ref)) < math.inf:
            return disagreement(name, ours, ref, low, dtype, floor)
        unit = 2.0 ** -math.floor(math.log2(largest))
        one, other, third = (tensor.double() * unit for tensor in (ours, ref, low))
        return disagreement(name, one, other, third, dtype, lambda: floor() * unit)


def expect(inputs: Inputs, *, has_backward: bool = True) -> Expected:
    return Expected(inputs, oracle(inputs, has_backward=has_backward), yardstick(inputs, has_backward=has_backward))


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def disagreements(
    ours: Result, inputs: Inputs, expected: Expected | None = None, *, is_relative: bool = False
) -> list[str]:
    """Every tensor of the result that breaks the error rule, in words. `expected` spares the oracle where it ran
    already; `is_relative`: see Expected.disagreement."""
    has_backward = any(getattr(ours, name) is not None for name in GRADS)
    expected = expected or expect(inputs, has_backward=has_backward)
    found: list[str | None] = []
    for name in OUTPUTS + GRADS:
        mine = getattr(ours, name)
        if mine is None and getattr(expected.ref, name) is not None:
            found.append(f"{name}: missing")
        elif mine is not None:
            found.append(expected.disagreement(name, mine, is_relative=is_relative))
    return [text for text in found if text is not None]


def assert_agrees(ours: Result, inputs: Inputs) -> None:
    """Raises AssertionError naming every tensor that breaks the error rule."""
    found = disagreements(ours, inputs)
    if found:
        shape = shape_of(inputs.args)
        raise AssertionError("; ".join(found) + f" ({shape}, {inputs.args.q.dtype}, backend {inputs.args.backend})")
