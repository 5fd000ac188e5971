"""torch.func: vmap and functionalize give what the plain calls give; transforms that differentiate are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import flashtile

SIZES = (2, 3, 5, 8)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    return flashtile.attention(q, k, v, causal=True, softcap=3.0, **options)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 1), (2, 0, None)], ids=str)
def test_vmap(in_dims: tuple, requires_grad: bool, seed: int) -> None:
    given = [torch.randn(*SIZES, requires_grad=requires_grad) for _ in range(3)]
    stacked = [
        tensor if dim is None else torch.stack([tensor + 1.0, tensor, tensor * 0.5], dim=dim)
        for tensor, dim in zip(given, in_dims, strict=True)
    ]
    out = vmap(attend, in_dims=in_dims)(*stacked)
    singles = [[t if d is None else t.select(d, i) for t, d in zip(stacked, in_dims, strict=True)] for i in range(3)]
    expected = torch.stack([attend(*single) for single in singles])
    torch.testing.assert_close(out, expected)
    if requires_grad:
        weights = torch.randn_like(out)
        ours, theirs = (torch.autograd.grad((x * weights).sum(), given, retain_graph=True) for x in (out, expected))
        torch.testing.assert_close(ours, theirs)


def test_vmap_of_options(seed: int) -> None:
    q, k, v = (torch.randn(4, *SIZES) for _ in range(3))
    bias, mask = torch.randn(4, 5, 5), torch.rand(4, 5, 5) < 0.7
    out, lse = vmap(lambda *a: flashtile.attention(*a[:3], bias=a[3], mask=a[4], return_lse=True))(q, k, v, bias, mask)
    for i in range(4):
        single = flashtile.attention(q[i], k[i], v[i], bias=bias[i], mask=mask[i], return_lse=True)
        torch.testing.assert_close((out[i], lse[i]), single)
    nested = vmap(vmap(flashtile.scaled_dot_product_attention))(q, k, v)  # over two batches, of (heads, rows, dim)
    torch.testing.assert_close(nested[3, 1], flashtile.attention(q[3], k[3], v[3])[1])


def test_vmap_of_dropout(seed: int) -> None:
    q, k, v = (torch.randn(*SIZES) for _ in range(3))
    state = torch.tensor([[1, 2], [3, 4]])
    out = vmap(lambda state: flashtile.attention(q, k, v, dropout_p=0.5, rng_state=state))(state)
    for i in range(2):
        torch.testing.assert_close(out[i], flashtile.attention(q, k, v, dropout_p=0.5, rng_state=state[i]))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda q: flashtile.attention(q, k, v, dropout_p=0.5))(q[None])


def test_functionalize(seed: int) -> None:
    q, k, v = (torch.randn(*SIZES) for _ in range(3))
    assert torch.equal(functionalize(attend)(q, k, v), attend(q, k, v))
    graph = make_fx(functionalize(lambda q, k, v: attend(q, k, v)))(q, k, v)
    assert torch.ops.flashtile.forward.default in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(q, k, v), attend(q, k, v))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    ours, theirs = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (functionalize(attend), attend))
    torch.testing.assert_close(ours, theirs)


DIFFERENTIATING: dict[str, Callable] = {
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vjp": vjp,
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda x: f(x).sum()))(x[None]),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(f)(x).sum())(x[None]),
}


@pytest.mark.parametrize("name", DIFFERENTIATING)
def test_transforms_that_differentiate_are_refused(name: str) -> None:
    k, v = torch.randn(*SIZES), torch.randn(*SIZES)
    for function in (flashtile.attention, flashtile.scaled_dot_product_attention):
        with pytest.raises(flashtile.Unsupported, match=r"torch\.func transform; accepted: reverse mode"):
            DIFFERENTIATING[name](lambda q, function=function: function(q, k, v), torch.randn(*SIZES))


@pytest.mark.parametrize("transform", [vmap, functionalize], ids=["vmap", "functionalize"])
def test_the_cache_is_refused_inside_transforms(transform: Callable) -> None:
    cache = torch.zeros(2, 8, 3, 8)

    def step(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_kvcache(q, cache, cache.clone(), k=q, v=q, cache_seqlens=2)

    x = torch.randn(2, 1, 3, 8)
    with pytest.raises(flashtile.Unsupported, match=r"attention_kvcache: got a call inside a torch\.func transform"):
        transform(step)(x[None] if transform is vmap else x)
    assert not torch.count_nonzero(cache)
