"""`cpu` and `tiled` need memory linear in the sequence length, and read both layouts in place."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashtile import ops
from flashtile.backends import registry
from flashtile.backends.base import GradNeeds
from flashtile.backends.tiled import Tiles
from flashtile.testing import Case


class Peak(TorchDispatchMode):
    """Peak number of elements in all storages that are allocated within it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.storages = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage, storage.nbytes() // tensor.element_size()
        # A storage that only this table holds is gone
        self.storages = {key: entry for key, entry in self.storages.items() if torch._C._storage_Use_Count(key) > 1}
        self.elements = max(self.elements, sum(elements for _, elements in self.storages.values()))
        return result


def peak(seqlen: int, backend: str, **options) -> int:
    """Peak elements of a forward and a backward pass. Calls the backend: modes do not see inside an op."""
    args, dout, dlse = Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=16, head_dim_v=16, **options).make(0)
    out, lse = ops.empty_outputs(args)
    grads = ops.empty_grads(args, GradNeeds(True, True, True, False, False))
    with Peak() as meter:
        registry.find(backend).forward(args, out, lse)
        registry.find(backend).backward(args, dout, dlse, out, lse, grads)
    return meter.elements


TILES, ROWS = 12 * 2 * 128 * 256, 2 * 16 * 8  # a dozen tiles of two heads; a few vectors of 16 for each row and head


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"softcap": 1.0, "window": (100, 100)}], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_a_few_tiles_and_linear_memory(backend: str, layout: str, options: dict) -> None:
    for seqlen in (1536, 3072):
        assert peak(seqlen, backend, layout=layout, **options) <= TILES + seqlen * ROWS < seqlen * seqlen


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_dropout_is_drawn_by_the_tile(backend: str) -> None:
    assert peak(2048, backend, dropout_p=0.1) <= 2 * TILES + 2048 * ROWS < 2048 * 2048


def test_the_meter_sees_the_scores_of_the_reference() -> None:
    assert peak(512, "reference") >= 2 * 512 * 512


def test_the_meter_sees_tiles_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, scores = [], Tiles.scores
    monkeypatch.setattr(Tiles, "scores", lambda self, *args: (kept.append(scores(self, *args)), kept[-1])[1])
    assert peak(2048, "tiled") >= 2 * 2048 * 2048


class Copies(TorchDispatchMode):
    """Records operations that allocate as much memory as a whole input."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.found = elements, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.numel() >= self.elements
            and not any(result is argument for argument in args)
        ):
            mine = result.untyped_storage().data_ptr()
            if all(
                not isinstance(argument, torch.Tensor) or argument.untyped_storage().data_ptr() != mine
                for argument in args
            ):
                self.found.append(str(function))
        return result


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_inputs_are_read_in_place(backend: str, layout: str, is_swapped: bool) -> None:
    seqlen = 2048
    case = Case(
        layout=layout,
        memory="swapped" if is_swapped else "contiguous",
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=64,
        head_dim_v=64,
    )
    args = case.make(0).args
    out, lse = ops.empty_outputs(args)
    with Copies(args.q.numel()) as meter:
        registry.find(backend).forward(args, out, lse)
    assert meter.found == []
