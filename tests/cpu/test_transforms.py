"""torch.func and forward-mode differentiation give what the plain calls and PyTorch's own formulas give."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad
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


@pytest.mark.parametrize("sizes", [(3,), (2, 3)], ids=["heads", "batch and heads"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_of_slopes(dim: int, sizes: tuple[int, ...], seed: int) -> None:
    q, k, v = (torch.randn(*SIZES) for _ in range(3))
    slopes = torch.rand(4, *sizes)
    out = vmap(lambda slopes: flashtile.attention(q, k, v, alibi_slopes=slopes), in_dims=dim)(slopes.movedim(0, dim))
    for i in range(4):
        torch.testing.assert_close(out[i], flashtile.attention(q, k, v, alibi_slopes=slopes[i]))


def test_vmap_over_nothing() -> None:
    q, k, v = torch.randn(0, *SIZES), torch.randn(*SIZES), torch.randn(*SIZES)
    bias = torch.randn(0, 5, 5)
    out, lse = vmap(lambda q, bias: flashtile.attention(q, k, v, bias=bias, return_lse=True))(q, bias)
    assert (out.shape, lse.shape) == ((0, *SIZES), (0, *SIZES[:-1]))
    dq, dbias = vmap(grad(lambda q, bias: attend(q, k, v, bias=bias).sum(), argnums=(0, 1)))(q, bias)
    assert (dq.shape, dbias.shape) == (q.shape, bias.shape)
    with pytest.raises(flashtile.Unsupported, match="vmap: got no element; accepted: one or more in a call that"):
        vmap(lambda sinks: flashtile.attention(k, k, v, sinks=sinks))(torch.randn(0, 3))


@pytest.mark.filterwarnings("ignore:.*cannot be folded:flashtile.SlowPathWarning")
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


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """attend(q, k, v, bias, sinks) in PyTorch, which transforms it by itself."""
    scores = 3.0 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5 / 3.0) + bias
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    extra = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores.masked_fill(hidden, -torch.inf), extra], -1).softmax(-1)
    return weights[..., :-1] @ v.repeat_interleave(2, 1)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, bias=bias, sinks=sinks)


ALL = (0, 1, 2, 3, 4)
DIFFERENTIATING: dict[str, Callable] = {
    "grad": lambda f, x: grad(lambda *x: f(*x).square().sum(), argnums=ALL)(*x),
    "vjp": lambda f, x: vjp(f, *x)[1](x[0]),
    "jvp": lambda f, x: jvp(f, x, tuple(t.cos() for t in x)),
    "jacrev": lambda f, x: jacrev(f, argnums=ALL)(*x),
    "jacfwd": lambda f, x: jacfwd(f, argnums=ALL)(*x),
    "hessian": lambda f, x: hessian(lambda *x: f(*x).square().sum(), argnums=(0, 3, 4))(*x),
    "hessian of a sum": lambda f, x: hessian(lambda *x: f(*x).sum(), argnums=(0, 2, 4))(*x),
    "grad of grad": lambda f, x: grad(lambda q: grad(lambda q: f(q, *x[1:]).square().sum())(q).square().sum())(x[0]),
    "vmap of grad": lambda f, x: vmap(
        grad(lambda *x: f(*x).square().sum(), argnums=(0, 1, 2, 3)), (0, 0, None, None, None)
    )(torch.stack([x[0], x[0] * 2]), torch.stack([x[1], x[1].sin()]), *x[2:]),
    "vmap of grad of sinks": lambda f, x: vmap(
        grad(lambda *x: f(*x).square().sum(), argnums=4), (0, None, None, None, 0)
    )(torch.stack([x[0], x[0] * 2]), *x[1:4], torch.stack([x[4], x[4] * 2])),
    "grad of vmap": lambda f, x: grad(lambda b: vmap(f, (None, None, None, 0, None))(*x[:3], b, x[4]).square().sum())(
        torch.stack([x[3], x[3] * 2])
    ),
}


@pytest.mark.filterwarnings("ignore:.*store the N x N scores:flashtile.SlowPathWarning")
@pytest.mark.filterwarnings("ignore:.*cannot be folded:flashtile.SlowPathWarning")
@pytest.mark.parametrize("name", DIFFERENTIATING)
def test_transforms_that_differentiate(name: str, seed: int) -> None:
    shapes = ((1, 2, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 3), (2,))
    inputs = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    results = [torch.utils._pytree.tree_leaves(DIFFERENTIATING[name](f, inputs)) for f in (ours, definition)]
    assert len(results[0]) == len(results[1])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def test_reverse_mode_runs_the_operators_and_warns_of_nothing(seed: int) -> None:
    """One call for a mapped gradient, not one for each element."""
    q, k, v = (torch.randn(4, *SIZES) for _ in range(3))
    function = vmap(grad(lambda q, k, v: attend(q, k, v).square().sum(), argnums=(0, 1, 2)))
    with torch.profiler.profile() as profile:
        grads = function(q, k, v)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["flashtile::forward"] == counts["flashtile::backward"] == 1
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = torch.autograd.grad(sum(attend(*parts).square().sum() for parts in zip(q, k, v, strict=True)), leaves)
    torch.testing.assert_close(grads, expected)


def test_vmap_in_a_graph(seed: int) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(4, *SIZES) for _ in range(3))
    function = vmap(attend, in_dims=(0, None, 0))
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k[0], v), function(q, k[0], v))
    with torch.profiler.profile() as profile:
        compiled(q, k[0], v)
    assert {event.key: event.count for event in profile.key_averages()}["flashtile::forward"] == 1


def test_forward_mode(seed: int) -> None:
    q, k, v = (torch.randn(*SIZES, dtype=torch.float64) for _ in range(3))
    with pytest.warns(flashtile.SlowPathWarning, match="forward-mode derivatives .* store the N x N scores"):
        expected = jvp(lambda q, v: attend(q, k, v), (q, v), (k, q))[1]
    with forward_ad.dual_level():
        out, lse = attend(forward_ad.make_dual(q, k), k, forward_ad.make_dual(v, q), return_lse=True)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
        tangent = forward_ad.unpack_dual(lse).tangent
    step = 1e-6
    lses = [attend(q + h * k, k, v, return_lse=True)[1] for h in (step, -step)]
    torch.testing.assert_close(tangent, (lses[0] - lses[1]) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*store the N x N scores:flashtile.SlowPathWarning")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_forward_mode_of_every_option(layout: str, seed: int) -> None:
    """Against reverse mode: <tangent of out, w> is <gradient by w, tangent>."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    options = {"window": (3, 2), "mask": torch.rand(2, 1, 5, 7) < 0.8, "alibi_slopes": torch.rand(2, 4), "softcap": 2.0}
    options |= {"dropout_p": 0.3, "rng_state": torch.tensor([5, 6]), "layout": layout, "scale": 0.4}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(q, k, v, **options)

    inputs = tuple(tensor.double() for tensor in (q, k, v))
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    out, tangent = jvp(function, inputs, tangents)
    weights = torch.randn_like(out)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grads = torch.autograd.grad((function(*leaves) * weights).sum(), leaves)
    total = sum((grad * t).sum() for grad, t in zip(grads, tangents, strict=True))
    torch.testing.assert_close((tangent * weights).sum(), total)


def test_packed_sequences(seed: int) -> None:
    q, k, v = (torch.randn(9, 3, 8) for _ in range(3))
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)

    def function(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_varlen(q, k, v, lengths, lengths, causal=True).square().sum()

    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad(function)(q), torch.autograd.grad(function(leaf), leaf)[0])
    with pytest.warns(flashtile.SlowPathWarning, match="runs once for each element"):
        mapped = vmap(grad(function))(torch.stack([q, q * 2]))
    torch.testing.assert_close(mapped, torch.stack([grad(function)(x) for x in (q, q * 2)]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flashtile.SlowPathWarning)
        with pytest.raises(flashtile.Unsupported, match="packed sequences inside forward-mode"):
            jvp(function, (q,), (q,))


@pytest.mark.parametrize("transform", [vmap, functionalize], ids=["vmap", "functionalize"])
def test_the_cache_is_refused_inside_transforms(transform: Callable) -> None:
    cache = torch.zeros(2, 8, 3, 8)

    def step(q: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_kvcache(q, cache, cache.clone(), k=q, v=q, cache_seqlens=2)

    x = torch.randn(2, 1, 3, 8)
    with pytest.raises(flashtile.Unsupported, match=r"attention_kvcache: got a call inside a torch\.func transform"):
        transform(step)(x[None] if transform is vmap else x)
    assert not torch.count_nonzero(cache)
