"""Fully masked rows: output 0, lse -inf or the sink, gradients 0, never NaN."""

from __future__ import annotations

import pytest
import torch

import flashtile

BACKENDS = ["cpu", "tiled", "reference"]


def leaves(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, size, 8, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window", "no keys"])
def test_a_row_without_keys(how: str, backend: str, seed: int) -> None:
    q, k, v = leaves(6, 4, 4) if how != "no keys" else leaves(6, 0, 0)
    options: dict = {
        "mask": {"mask": torch.tensor([True, False, True, False, True, True])[:, None]},
        "bias": {"bias": torch.tensor([0.0, -torch.inf, 0.0, -torch.inf, 0.0, 0.0], requires_grad=True)[:, None]},
        "causal": {"causal": True},  # two more queries than keys: the first two see nothing
        "window": {"window": (0, 0), "causal": "top_left"},  # queries 4 and 5 are past the last key
        "no keys": {},
    }[how]
    empty = {"mask": [1, 3], "bias": [1, 3], "causal": [0, 1], "window": [4, 5], "no keys": [0, 1, 2, 3, 4, 5]}[how]
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend, **options)
    is_empty = torch.zeros(6, dtype=torch.bool)
    is_empty[empty] = True
    assert (out[:, :, is_empty] == 0).all()
    assert (lse[:, :, is_empty] == -torch.inf).all()
    assert lse[:, :, ~is_empty].isfinite().all()
    inputs = [
        q,
        k,
        v,
        *(tensor for tensor in options.values() if isinstance(tensor, torch.Tensor) and tensor.requires_grad),
    ]
    grads = torch.autograd.grad(
        out.square().sum() + lse.square().masked_fill(is_empty, 0.0).sum(), inputs, retain_graph=True
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, is_empty] == 0).all()
    # Whatever dO holds in a masked row has no effect
    dout = torch.where(is_empty[:, None], torch.inf, torch.ones(8)).expand_as(out)
    dlse = torch.where(lse == -torch.inf, torch.inf, 1.0)
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_takes_the_row(backend: str, seed: int) -> None:
    q, k, v = leaves(5, 7, 7)
    sinks = torch.randn(2, requires_grad=True)
    out, lse = flashtile.attention(
        q, k, v, sinks=sinks, mask=torch.zeros(5, 7, dtype=torch.bool), return_lse=True, backend=backend
    )
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand_as(lse))
    (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(dsinks, torch.full((2,), 10.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_none(backend: str, seed: int) -> None:
    q, k, v = leaves(5, 7, 7)
    mask = torch.tensor([True, True, False, True, True])[:, None]
    plain = flashtile.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    sinks = torch.full((2,), -torch.inf, requires_grad=True)
    sunk = flashtile.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend)
    torch.testing.assert_close(sunk, plain)
    grads = torch.autograd.grad(sunk[0].sum() + sunk[1][:, :, 0].sum(), [q, sinks])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_scores_may_hold_anything(backend: str, seed: int) -> None:
    """Masked keys may have infinite or NaN scores: they are replaced by -inf, not added to."""
    q, k, v = (tensor.detach() for tensor in leaves(5, 7, 7))
    mask = torch.ones(7, dtype=torch.bool)
    mask[3] = False
    expected = flashtile.attention(q, k, v, mask=mask, backend=backend)
    k[:, :, 3] = torch.tensor([torch.inf, torch.nan, *[1e38] * 6])
    torch.testing.assert_close(flashtile.attention(q, k, v, mask=mask, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_does_not_hide_nan(backend: str, seed: int) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(5, 7, 7))
    bias = torch.zeros(7)
    bias[3] = -torch.inf
    assert flashtile.attention(q, k, v, bias=bias, backend=backend).isfinite().all()
    k[0, 0, 3] = torch.nan
    out, lse = flashtile.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_visible_key_is_not_hidden(backend: str, seed: int) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(5, 7, 7))
    k[0, 0, 2] = torch.nan
    out, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert out[1].isfinite().all()
