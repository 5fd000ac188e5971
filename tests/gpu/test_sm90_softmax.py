"""The Hopper forward where probabilities by the maxima of earlier tiles grow, and where blocks take tiles in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_tests import forced, needs_hopper

import flashtile
from flashtile.lab.check import mutants

pytestmark = needs_hopper
forced_families = forced("fwd_sm90")
# Tests poison memory by torch's switch for deterministic algorithms, under which lengths that do not fill tiles of 192
# queries take smaller tiles with another softmax
OPTIONS: dict[str, Any] = {"deterministic": False, "backend": "cuda"}


def is_right(values: str, head_dim: int, causal: bool, seqlen: int = 900, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Against float64. There are more tiles than blocks. Key tiles go from last to first: with `growing` values the
    first keys have the largest scores."""
    q, k, v = (torch.randn(4, 60, seqlen, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    sizes = torch.linspace(8.0, 0.05, seqlen, device="cuda", dtype=dtype)[:, None]
    if values == "peaked":
        q *= 12.0
    elif values == "growing":
        k *= sizes
    elif values == "shrinking":
        k *= sizes.flip(0)
    elif values == "huge":
        q, k = torch.full_like(q, 40000.0), torch.full_like(k, 40000.0)
    out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True, **OPTIONS)
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").triu(1)
    for b in range(len(q)):
        scores = q[b].double() @ k[b].double().transpose(-1, -2) * head_dim**-0.5
        scores = scores.masked_fill(hidden, float("-inf")) if causal else scores
        expected = scores.softmax(-1) @ v[b].double()
        if not torch.allclose(out[b].double(), expected, rtol=2e-2, atol=2e-2):
            return False
        if not torch.allclose(lse[b].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4):
            return False
    return True


@pytest.mark.parametrize("values", ["plain", "peaked", "growing", "shrinking", "huge"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, True), (256, False)])
def test_probabilities_that_grow(values: str, head_dim: int, causal: bool) -> None:
    assert is_right(values, head_dim, causal)


@pytest.mark.parametrize("values", ["peaked", "growing"])
def test_probabilities_that_grow_in_float16(values: str) -> None:
    assert is_right(values, 64, False, dtype=torch.float16)


@pytest.mark.parametrize(("head_dim", "seqlen"), [(96, 512), (128, 512), (128, 1024), (64, 700)])
def test_tiles_in_rotation(head_dim: int, seqlen: int) -> None:
    q = torch.empty(4, 60, seqlen, head_dim, device="meta", dtype=torch.bfloat16)
    assert "tile 192 queries x 128 keys" in str(flashtile.explain(q, q, q, **OPTIONS))
    assert is_right("plain", head_dim, False, seqlen)


@pytest.mark.parametrize(
    ("name", "values", "head_dim", "dtype"),
    [
        # bfloat16 holds probabilities far over 1, float16 does not
        ("fwd_sm90_guess", "growing", 64, torch.float16),
        ("fwd_sm90_stale_max", "growing", 128, torch.float16),
        ("fwd_sm90_rotation", "plain", 128, torch.bfloat16),
    ],
)
def test_faults_are_seen(name: str, values: str, head_dim: int, dtype: torch.dtype) -> None:
    with mutants.broken(name):
        assert not is_right(values, head_dim, False, 512, dtype)
