"""`tiled` needs memory linear in the sequence length, and reads both layouts in place."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashtile import ops
from flashtile.backends import registry
from flashtile.backends.base import GradNeeds
from flashtile.testing import Case


class Largest(TorchDispatchMode):
    """The largest tensor with memory of its own that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def largest(seqlen: int, backend: str, **options) -> int:
    """Elements of the largest tensor that a forward and a backward pass make. Modes end at an op: call below it."""
    args, dout, dlse = Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16, head_dim_v=16, **options).make(0)
    out, lse = ops.empty_outputs(args)
    grads = ops.empty_grads(args, GradNeeds(True, True, True, False, False))
    with Largest() as meter:
        registry.find(backend).forward(args, out, lse)
        registry.find(backend).backward(args, dout, dlse, out, lse, grads)
    return meter.elements


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"softcap": 1.0, "window": (100, 100)}], ids=str)
def test_tiled_never_holds_the_scores(layout: str, options: dict) -> None:
    tile, rows = 2 * 128 * 256, 2 * 16
    assert largest(2048, "tiled", layout=layout, **options) == max(tile, 2048 * rows)
    assert largest(4096, "tiled", layout=layout, **options) == max(tile, 4096 * rows)


def test_tiled_draws_dropout_by_the_tile() -> None:
    assert largest(2048, "tiled", dropout_p=0.1) <= max(2 * 128 * 256, 2048 * 2 * 16)


def test_the_meter_sees_the_scores_of_the_reference() -> None:
    assert largest(512, "reference") >= 2 * 512 * 512


class Copies(TorchDispatchMode):
    """Operations that give as much as a whole input in new memory."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements and not any(result is argument for argument in args):
            mine = result.untyped_storage().data_ptr()
            if all(not isinstance(argument, torch.Tensor) or argument.untyped_storage().data_ptr() != mine for argument in args):
                self.found.append(str(function))
        return result


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_inputs_are_read_in_place(layout: str, is_swapped: bool) -> None:
    seqlen = 2048
    case = Case(
        layout=layout, memory="swapped" if is_swapped else "contiguous", seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64, head_dim_v=64
    )
    args = case.make(0).args
    out, lse = ops.empty_outputs(args)
    with Copies(args.q.numel()) as meter:
        registry.find("tiled").forward(args, out, lse)
    assert meter.found == []
