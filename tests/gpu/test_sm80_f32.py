"""The float32 forward by mma.sync: every option by the error rule, lengths around its tiles, rows that are aligned to
nothing, numbers of other sizes, and the rows of an Ampere GPU."""

from __future__ import annotations

import pytest
import torch
from family_tests import FEATURES, OTHERS, assert_accurate, forced, needs_ampere, taken_for

import flashtile
from flashtile.testing import Case

pytestmark = needs_ampere
forced_families = forced("fwd_sm80_f32")
KERNEL = "fwd_sm80_f32_kernel"
HEAD_DIMS = ((64, 64), (128, 128), (32, 32), (40, 72), (100, 128), (33, 33), (63, 65), (1, 1))
LENGTHS = ((150, 300), (70, 700), (200, 64), (193, 1025), (65, 1), (370, 700), (129, 127))  # it refuses 64 queries


def problem(number: int, head_dims: tuple[int, int], lengths: tuple[int, int], **options: object) -> tuple[Case, int]:
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    layout = ("bhsd", "bshd")[number % 2]
    return Case(dtype=torch.float32, layout=layout, backend="cuda", **sizes | options), number  # type: ignore[arg-type]


@pytest.mark.parametrize("part", range(3))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask meets every pair of head dims, each other feature two of them; lengths take turns."""
    problems = []
    for start, (feature, options) in enumerate((FEATURES | OTHERS).items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or (place - start) % len(HEAD_DIMS) in (0, 3):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::3], KERNEL, monkeypatch)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (65, 66, 79, 81, 95, 97, 111, 127, 128, 129, 159, 191, 192, 193, 257)
    keys = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 129)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim, options = (64, 128)[number % 2], FEATURES[features[number % len(features)]]
        problems.append(problem(number, (dim, dim), (seqlen, keys[number]), **options))
    assert_accurate(problems, KERNEL, monkeypatch)


def test_rows_of_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles, within its shared memory, compiled for the GPU at hand."""
    taken_for(monkeypatch, "sm_80")
    problems = []
    for start, feature in enumerate(("causal", "bias")):
        for place, head_dims in enumerate(HEAD_DIMS[:4]):
            problems.append(
                problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **FEATURES[feature])
            )
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-15, 1.0), (1e15, 1.0), (1.0, 1e30), (1.0, 1e-25)])
def test_numbers_of_any_size(head_dim: int, sizes: tuple[float, float]) -> None:
    """Relative to float64 a few bits of float32, also where Q and K are tiny and huge, or V is."""
    skew, size_v = sizes
    q, k, v = (torch.randn(2, 3, 700, head_dim, device="cuda") for _ in range(3))
    q, k, v = q * skew, k / skew, v * size_v
    out = flashtile.attention(q, k, v, causal=True, backend="cuda").double()
    scores = q.double() @ k.double().transpose(-1, -2) * head_dim**-0.5
    scores = scores.masked_fill(torch.ones(700, 700, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
    want = scores.softmax(-1) @ v.double()
    assert (out - want).norm() <= 1e-6 * want.norm()


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (50, 77, 99), (33, 90, 65)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda")
            tensors.append(around[:, :, 35:-35, 20:-20].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=True, backend="cuda")).all()
