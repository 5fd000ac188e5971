"""The dropout bits against an independent Philox4x32-10 and its known answers."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.problem import AttentionArgs
from flashtile.testing import dropout_mask

MASK = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c, (k0, k1) = list(counter), key
    for r in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        key0, key1 = (k0 + r * 0x9E3779B9) & MASK, (k1 + r * 0xBB67AE85) & MASK
        c = [(b >> 32) ^ c[1] ^ key0, b & MASK, (a >> 32) ^ c[3] ^ key1, a & MASK]
    return c


def lane(seed: int, offset: int, heads: int, b: int, h: int, i: int, j: int) -> int:
    words = philox([j // 8, i, b * heads + h, offset & MASK], [seed & MASK, (seed >> 32) & MASK])
    return (words[j % 8 // 2] >> (16 * (j % 2))) & 0xFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_the_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox(counter, key) == answer


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (-1, -1), (2**63 - 1, -(2**63)), (123456789123456789, 2**33 + 7)]
)
def test_bits_are_those_of_philox(first: int, second: int, dropout_p: float) -> None:
    batch, heads, seqlen_q, seqlen_k = 2, 3, 5, 21
    bits = dropout_mask(torch.tensor([first, second]), dropout_p, batch, heads, seqlen_q, seqlen_k)
    threshold = round(dropout_p * 65536)
    expected = [
        lane(first, second, heads, b, h, i, j) >= threshold
        for b in range(batch)
        for h in range(heads)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
    ]
    assert bits.flatten().tolist() == expected


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_backends_drop_exactly_these_elements(backend: str, seed: int) -> None:
    """With v = identity the output is the dropped-out softmax itself."""
    batch, heads, seqlen_q, seqlen_k, p = 2, 2, 140, 270, 0.25
    q, k = torch.randn(batch, heads, seqlen_q, 8), torch.randn(batch, heads, seqlen_k, 8)
    v = torch.eye(seqlen_k).expand(batch, heads, -1, -1)
    rng_state = torch.tensor([seed, 99])
    plain = flashtile.attention(q, k, v, backend=backend)
    dropped = flashtile.attention(q, k, v, dropout_p=p, rng_state=rng_state, backend=backend)
    bits = dropout_mask(rng_state, p, batch, heads, seqlen_q, seqlen_k)
    torch.testing.assert_close(dropped, plain * bits * 65536 / (65536 - 16384))
    assert abs(bits.double().mean().item() - 0.75) < 0.01


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_part_of_a_problem_has_its_elements(backend: str, layout: str) -> None:
    """Queries 5 to 9, keys 16 to 31 and heads 1 and 2 of 4, each sequence for itself."""
    rng_state, p = torch.tensor([123, 45]), 0.3
    bits = dropout_mask(rng_state, p, 3, 4, 10, 32)[1:, 1:3, 5:10, 16:32]
    q, k, v = torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 16, 8), torch.eye(16).expand(2, 2, 16, 16)
    if layout == "bshd":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    args = AttentionArgs(q, k, v, rng_state=rng_state, dropout_p=p, layout=layout, backend=backend)
    args = args._replace(first_query=5, first_key=16, first_head=1 * 4 + 1, total_heads=4)
    for _ in range(2):  # by Python, and by the plan that the first call has registered
        out, _ = ops.forward(*args)
        out = out.transpose(1, 2) if layout == "bshd" else out
        assert torch.equal(out > 0, bits)


@pytest.mark.parametrize(("name", "value"), [("first_key", 4), ("first_query", -1), ("total_heads", 1 << 40)])
def test_indices_that_are_none(name: str, value: int) -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"{name}: got {value}"):
        ops.forward(*AttentionArgs(q, q, q)._replace(**{name: value}))


def test_rng_state_is_drawn_from_torch(seed: int) -> None:
    q, k, v = (torch.randn(1, 1, 30, 8) for _ in range(3))
    torch.manual_seed(7)
    first, second = flashtile.attention(q, k, v, dropout_p=0.5), flashtile.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(7)
    again = flashtile.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_almost_everything_dropped_is_finite(seed: int) -> None:
    q, k, v = (torch.randn(1, 1, 30, 8) for _ in range(3))
    assert flashtile.attention(q, k, v, dropout_p=1 - 1e-9).isfinite().all()
