"""The Hopper forward for head dims over 256: every row by the error rule, every option it takes, lengths around its
tiles."""

from __future__ import annotations

import pytest
import torch
from family_tests import FEATURES, OTHERS, assert_accurate, forced, needs_hopper, problem

import flashtile
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("fwd_sm90_wide")
HEAD_DIMS = ((512, 512), (320, 320), (384, 384), (448, 448), (264, 264), (320, 256), (512, 136))
LENGTHS = ((1, 1), (1, 700), (150, 300), (200, 64), (193, 1025), (600, 513), (370, 700))
# It refuses these
REFUSED = ("expanded", "sliced", "offset")


def option_problems() -> list[tuple[Case, int]]:
    """A causal mask meets every pair of head dims, each other feature one; lengths and dtypes take turns."""
    problems = []
    for start, (feature, options) in enumerate((FEATURES | OTHERS).items()):
        if feature in REFUSED or "scale" in feature:
            continue
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    return problems


def length_problems() -> list[tuple[Case, int]]:
    lengths = (1, 17, 63, 64, 65, 127, 128, 129, 191, 193, 257, 321)
    features = ("causal", "top left", "window and causal", "varlen", "window", "gqa", "plain")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim, options = (512, 320)[number % 2], FEATURES[features[number % len(features)]]
        problems.append(problem(number, (dim, dim), (seqlen, lengths[-1 - number]), **options))
    return problems


@pytest.mark.parametrize("part", range(2))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(option_problems()[part::2], "fwd_sm90_wide_kernel", monkeypatch)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(length_problems(), "fwd_sm90_wide_kernel", monkeypatch)


@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_many_heads(causal: bool) -> None:
    """More clusters than fit the GPU at a time: against float64 on a few heads."""
    q, k, v = (torch.randn(2, 24, 1500, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True, backend="cuda")
    for batch, head in ((0, 0), (1, 17), (1, 23)):
        scores = q[batch, head].double() @ k[batch, head].double().T * 512**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        torch.testing.assert_close(lse[batch, head].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        expected = scores.softmax(-1) @ v[batch, head].double()
        torch.testing.assert_close(out[batch, head].double(), expected, rtol=2e-2, atol=1e-2)
