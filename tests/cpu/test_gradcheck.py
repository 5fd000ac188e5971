"""Gradients by finite differences in float64, for every option; second derivatives on the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.testing import Case

OPTIONS = {
    "plain": Case(),
    "causal": Case(causal="bottom_right"),
    "top left": Case(causal="top_left"),
    "window": Case(window=(1, 2)),
    "mask": Case(mask="bhqk"),
    "masked rows": Case(mask="q"),
    **{f"bias {axes}": Case(bias=axes) for axes in ("bhqk", "hq", "k", "1")},
    "alibi": Case(alibi="h"),
    "softcap": Case(softcap=1.0),
    "sinks": Case(has_sinks=True, mask="q"),
    "dropout": Case(dropout_p=0.3),
    "gqa": Case(heads=4),
    "varlen": Case(kind="varlen", batch=3, causal="bottom_right"),
    "paged": Case(kind="paged", batch=3, page_size=2),
    "padded": Case(kind="padded", batch=3),
    "all": Case(
        heads=4, causal="bottom_right", window=(3, 3), softcap=2.0, bias="hqk", alibi="h", has_sinks=True, dropout_p=0.2
    ),
}
INPUTS = ("q", "k", "v", "bias", "sinks")


def function_of(case: Case, seed: int, wants_lse: bool = True):
    """The call as a function of its differentiable inputs, and those inputs. NaN stands in rows that must not be
    read."""
    case = dataclasses.replace(
        case,
        dtype=torch.float64,
        seqlen_q=4,
        seqlen_k=5,
        head_dim=3,
        head_dim_v=2,
        layout="bshd" if seed % 2 else "bhsd",
    )
    args = case.make(seed).args
    names = [name for name in INPUTS if getattr(args, name) is not None]

    def call(*tensors):
        given = args._replace(**dict(zip(names, tensors, strict=True)))
        if not wants_lse:
            return ops.attend(given, wants_lse)[0]
        out, lse = ops.forward(*given)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    # Finite differences cannot step over -inf and NaN: put numbers there
    leaves = []
    for name in names:
        leaf = torch.nan_to_num(getattr(args, name), nan=0.5, neginf=-2.0)
        leaves.append(leaf.requires_grad_())
    return call, leaves


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients(option: str, backend: str, seed: int) -> None:
    call, leaves = function_of(dataclasses.replace(OPTIONS[option], backend=backend), seed)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=False)


@pytest.mark.parametrize("option", OPTIONS)
def test_second_derivatives_of_the_reference(option: str, seed: int) -> None:
    call, leaves = function_of(dataclasses.replace(OPTIONS[option], backend="reference"), seed)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("option", ["plain", "varlen", "all"])
def test_gradients_without_lse(option: str, seed: int) -> None:
    """lse is no output then, but what is saved of it is differentiated all the same."""
    call, leaves = function_of(dataclasses.replace(OPTIONS[option], backend="reference"), seed, wants_lse=False)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=False)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_second_derivatives_of_tiled_warn_and_are_right(seed: int) -> None:
    call, leaves = function_of(Case(backend="tiled", bias="hqk"), seed)
    with pytest.warns(flashtile.SlowPathWarning, match="second derivatives"):
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_second_derivatives_of_tiled_raise_in_strict_mode(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    call, leaves = function_of(Case(backend="tiled"), seed)
    grad = torch.autograd.grad(call(*leaves)[0].square().sum(), leaves[0], create_graph=False)
    assert grad[0].isfinite().all()
    with pytest.raises(flashtile.Unsupported, match="second derivatives"):
        torch.autograd.grad(call(*leaves)[0].square().sum(), leaves[0], create_graph=True)
