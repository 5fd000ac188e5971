"""The Hopper backward with `deterministic=True`: the sums of dQ are added in a fixed order."""

from __future__ import annotations

import pytest
import torch
from family_tests import DTYPES, FEATURES, assert_accurate, forced, jitter, needs_hopper
from test_bwd_sm90 import gradients

from flashtile.backends import native
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("bwd_sm90")

HEAD_DIMS = (64, 96, 128)
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (200, 60)},
    "left window": {"window": (100, None)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
}


def tensors_of(head_dim: int, seqlen_q: int, seqlen_k: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Four heads over two, several blocks of keys for each."""
    shapes = ((2, 4, seqlen_q, head_dim), (2, 2, seqlen_k, head_dim), (2, 2, seqlen_k, head_dim))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return tensors, torch.randn_like(tensors[0])


@pytest.mark.smoke
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_runs_have_the_same_bits(name: str, head_dim: int) -> None:
    options = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in CALLS[name].items()}
    for seqlen_q, seqlen_k in ((1000, 1000), (333, 900), (900, 333)):
        tensors, dout = tensors_of(head_dim, seqlen_q, seqlen_k)
        first = gradients(tensors, dout, deterministic=True, **options)
        for _ in range(10):
            for one, other in zip(gradients(tensors, dout, deterministic=True, **options), first, strict=True):
                assert torch.equal(one, other)


def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for number, feature in enumerate(("plain", "causal", "top left", "window", "varlen", "gqa", "dropout")):
        for place, head_dim in enumerate(HEAD_DIMS):
            seqlen_q, seqlen_k = ((300, 700), (700, 300), (513, 513))[(number + place) % 3]
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim}
            options = FEATURES[feature] | {"deterministic": True}
            problems.append((Case(dtype=DTYPES[(number + place) % 2], backend="cuda", **sizes | options), number))
    assert_accurate(problems, "bwd_sm90_kernel", monkeypatch, is_forward=False)


@pytest.mark.long(50)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_jitter_changes_no_bit(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product."""
    tensors, dout = tensors_of(head_dim, 500, 500)
    expected = [gradients(tensors, dout, deterministic=True, causal=causal) for causal in (False, True)]
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(100):
            for causal, first in zip((False, True), expected, strict=True):
                for one, other in zip(gradients(tensors, dout, deterministic=True, causal=causal), first, strict=True):
                    assert torch.equal(one, other)
    assert any("bwd_sm90_kernel" in unit for unit in functions)
