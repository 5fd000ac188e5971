"""Rows that are not aligned: long calls take the Hopper kernels on copies, by the error rule, with every option, in any
memory."""

from __future__ import annotations

import pytest
import torch
from family_tests import DTYPES, FEATURES, assert_accurate, forced, needs_hopper

import flashtile
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("fwd_sm90", "bwd_sm90", "bwd_sm90_wide")
LENGTHS = ((1030, 1100), (1025, 2000), (2000, 1024))
HEAD_DIMS = ((65, 65), (33, 33), (127, 127), (100, 50), (1, 1), (63, 128))
MEMORY_DIMS = ((64, 64), (128, 128), (96, 64))  # aligned in themselves
WIDE = ((255, 255), (190, 127))
# Others read a part of the keys, which are not copied then, or take three options
OPTIONS = [options for options in FEATURES.values() if options.get("kind", "varlen") == "varlen" and len(options) < 6]


def problems(head_dims: tuple[tuple[int, int], ...], memories: tuple[str, ...]) -> list[tuple[Case, int]]:
    found = []
    for number, options in enumerate(OPTIONS):
        (dim, dim_v), (rows, keys) = head_dims[number % len(head_dims)], LENGTHS[number % len(LENGTHS)]
        if "kind" in options:  # packed sequences are long by their mean
            rows, keys = 4 * rows, 4 * keys
        sizes = {"batch": 2, "heads": 2, "seqlen_q": rows, "seqlen_k": keys, "head_dim": dim, "head_dim_v": dim_v}
        memory = {"layout": ("bhsd", "bshd")[number % 2], "memory": memories[number % len(memories)]}
        more = {"dtype": DTYPES[number % 2], "backend": "cuda", "has_max_lengths": number % 2 == 0}
        found.append((Case(**sizes | memory | more | options), number))  # type: ignore[arg-type]
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", ["fwd_sm90_kernel", "bwd_sm90_kernel"])
def test_head_dims_that_are_no_multiples_of_8(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = problems(HEAD_DIMS, ("contiguous", "swapped"))
    assert_accurate(found, kernel, monkeypatch, is_forward=kernel.startswith("fwd"))


@pytest.mark.smoke
def test_rows_off_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(problems(MEMORY_DIMS, ("offset", "sliced")), "bwd_sm90_kernel", monkeypatch, is_forward=False)


def test_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [one for one in problems(WIDE, ("contiguous", "offset", "sliced")) if one[0].bias is None]
    assert_accurate(found, "bwd_sm90_dkdv_kernel", monkeypatch, is_forward=False)


@pytest.mark.parametrize("head_dim", [64, 65])
def test_both_executors_give_the_same_bits(head_dim: int) -> None:
    """The first call is Python's, the second is C++'s."""
    larger = torch.randn(3, 2, 1100, 4, head_dim + 1, device="cuda", dtype=torch.bfloat16)
    q, k, v = (tensor[..., 1:].transpose(1, 2).detach().requires_grad_() for tensor in larger)
    dout = torch.randn(q.shape, device="cuda", dtype=torch.bfloat16)
    found = []
    for _ in range(3):
        out = flashtile.attention(q, k, v, causal=True, deterministic=True)
        found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_a_graph_copies_anew() -> None:
    """Replayed with other numbers in the same tensors."""
    larger = torch.randn(3, 1, 2, 1100, 65, device="cuda", dtype=torch.bfloat16)
    q, k, v = larger
    flashtile.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v)
    larger.copy_(torch.randn_like(larger))
    graph.replay()
    assert torch.equal(out, flashtile.attention(q, k, v))
