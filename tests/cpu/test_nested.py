"""Nested tensors in scaled_dot_product_attention: every sequence alone gives the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import flashtile

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
QUERIES, KEYS, DIM = (3, 5, 0, 2), (4, 1, 2, 7), 4


def packed(lengths: tuple[int, ...], heads: int = 3) -> torch.Tensor:
    """(batch, ragged, heads * dim)"""
    parts = [torch.randn(length, heads * DIM) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, ragged, dim)"""
    return tensor.unflatten(-1, (-1, DIM)).transpose(1, 2)


def each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> torch.Tensor:
    """The values (heads, total, dim) of one call for every sequence."""
    rows = [tensor.unbind() for tensor in (q, k, v)]
    return torch.cat([flashtile.scaled_dot_product_attention(*row, **options) for row in zip(*rows, strict=True)], 1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [QUERIES, KEYS], ids=str)
def test_every_sequence_alone(keys: tuple[int, ...], is_causal: bool, seed: int) -> None:
    given = [packed(QUERIES), packed(keys), packed(keys)]
    if keys == QUERIES:
        given[1:] = [given[0] * 2, given[0] * 0.5]
    q, k, v = (with_heads(tensor) for tensor in given)
    out = flashtile.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.7)
    expected = each(q, k, v, is_causal=is_causal, scale=0.7)
    torch.testing.assert_close(out.values(), expected)
    weights = torch.randn_like(expected)
    leaves = [tensor for tensor in given if tensor.is_leaf]
    ours = torch.autograd.grad((out.values() * weights).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.values(), other.values())
    assert (out.transpose(1, 2).flatten(-2) + given[0]).shape == given[0].shape  # the same ragged size


def test_as_torch_does(seed: int) -> None:
    q, k = with_heads(packed((3, 5, 2))), with_heads(packed((4, 1, 7)))
    torch.testing.assert_close(
        flashtile.scaled_dot_product_attention(q, k, k).values(), F.scaled_dot_product_attention(q, k, k).values()
    )


def test_sequences_with_gaps(seed: int) -> None:
    dense = torch.randn(3, 9, 3 * DIM)
    starts, lengths = torch.tensor([0, 4, 1]), torch.tensor([3, 5, 2])
    given = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    q = with_heads(given)
    with pytest.raises(flashtile.Unsupported, match="query: got a nested tensor with gaps"):
        flashtile.scaled_dot_product_attention(q, q, q)
    q = with_heads(given.contiguous())
    torch.testing.assert_close(flashtile.scaled_dot_product_attention(q, q, q).values(), each(q, q, q))


def test_compiled(seed: int) -> None:
    given = packed((3, 5, 2))
    function = torch.compile(
        lambda x: flashtile.scaled_dot_product_attention(with_heads(x), with_heads(x), with_heads(x), is_causal=True),
        backend="aot_eager",
        fullgraph=True,
    )
    x = with_heads(given)
    torch.testing.assert_close(function(given).values(), each(x, x, x, is_causal=True))


def test_refusals(seed: int) -> None:
    q, k = with_heads(packed((3, 5), heads=4)), with_heads(packed((3, 5), heads=2))
    with pytest.raises(flashtile.Unsupported, match="attn_mask: got it with nested tensors; accepted: None"):
        flashtile.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(1))
    with pytest.raises(ValueError, match="key: got 2 heads; accepted: 4, as query"):
        flashtile.scaled_dot_product_attention(q, k, k)
    out = flashtile.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    torch.testing.assert_close(out.values(), each(q, k, k, enable_gqa=True))
    with pytest.raises(ValueError, match=r"query: got .*; accepted: a nested tensor \(batch, heads, ragged, dim\)"):
        flashtile.scaled_dot_product_attention(packed((3, 5)), q, q)
    with pytest.raises(flashtile.Unsupported, match="key: got a nested tensor"):
        flashtile.scaled_dot_product_attention(torch.randn(2, 4, 3, DIM), q, q)


def test_values_of_other_lengths_are_refused(seed: int) -> None:
    """Also where the totals agree: the key's lengths would cut the values into other sequences."""
    q, k, v = (with_heads(packed(lengths)) for lengths in ((3, 5), (4, 2), (2, 4)))
    with pytest.raises(ValueError, match=r"value: got sequences of lengths \[2, 4\]; accepted: \[4, 2\], as key"):
        flashtile.scaled_dot_product_attention(q, k, v)


def test_another_batch_is_refused(seed: int) -> None:
    q, k = with_heads(packed((3, 5))), with_heads(packed((3, 5, 1)))
    with pytest.raises(ValueError, match="key: got batch 3; accepted: 2, as query"):
        flashtile.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="value: got batch 3; accepted: 2, as query"):
        flashtile.scaled_dot_product_attention(q, q, k)
