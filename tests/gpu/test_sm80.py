"""The mma.sync family: every row by the error rule, every option, lengths around its tiles, and rows that are aligned
to nothing."""

from __future__ import annotations

import pytest
import torch
from family_tests import (
    ALL_FEATURES,
    FEATURES,
    LENGTHS,
    OTHERS,
    assert_accurate,
    assert_many_heads_are_right,
    forced,
    needs_ampere,
    problem,
    taken_by,
    taken_for,
)

import flashtile
from flashtile.families.fwd_sm80.family import FwdSm80

pytestmark = needs_ampere
forced_families = forced("fwd_sm80")
KERNEL = "fwd_sm80_kernel"
HEAD_DIMS = (*FwdSm80().head_dims, (8, 8), (40, 72), (136, 200), (192, 40))
ODD_HEAD_DIMS = ((1, 1), (33, 33), (50, 50), (63, 65), (100, 100), (127, 31), (130, 250), (255, 255))


@pytest.mark.parametrize("part", range(4))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask meets every pair of head dims, each other feature one of them; lengths and dtypes take turns."""
    problems = []
    for start, (feature, options) in enumerate(ALL_FEATURES.items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::4], KERNEL, monkeypatch)


@pytest.mark.smoke
@pytest.mark.parametrize("part", range(4))
def test_unaligned_rows(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims that are no multiples of 8, odd or even: rows of 2-byte and of 4-byte alignment."""
    problems = []
    for start, (_, options) in enumerate((ALL_FEATURES | OTHERS).items()):
        for place, head_dims in enumerate(ODD_HEAD_DIMS):
            if place == start % len(ODD_HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::4], KERNEL, monkeypatch)


@pytest.mark.smoke
def test_scales_splits_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for start, (_, options) in enumerate(OTHERS.items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems, KERNEL, monkeypatch)


def test_lengths_around_a_tile_under_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is the one with fewer queries: some of its warps may have none."""
    lengths = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 320, 385)
    features = ("causal", "top left", "window and causal", "varlen", "window", "gqa")
    problems = []
    for place, seqlen in enumerate(lengths):
        for number, dim in enumerate((64, 128, 256), start=place):
            options = FEATURES[features[(number + place) % len(features)]]
            problems.append(problem(number, (dim, dim), (seqlen, (seqlen, 300, 700)[number % 3]), **options))
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.smoke
def test_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries of heads that share a KV head, with every feature; groups that do and do not divide a tile."""
    problems = []
    for number, feature in enumerate(name for name in ALL_FEATURES if name not in ("gqa", "swapped", "expanded")):
        heads, heads_kv = ((8, 2), (3, 1), (32, 8), (14, 2), (64, 1))[number % 5]
        lengths = ((1, 700), (5, 333), (16, 64), (40, 1025))[number % 4]
        options = ALL_FEATURES[feature] | {"heads": heads, "heads_kv": heads_kv}
        problems.append(problem(number, HEAD_DIMS[number % len(HEAD_DIMS)], lengths, **options))
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_120"])
def test_rows_of_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles, within their shared memory, compiled for the GPU at hand."""
    head_dims = taken_by(FwdSm80(), arch, HEAD_DIMS)
    taken_for(monkeypatch, arch)
    problems = []
    for start, feature in enumerate(("causal", "varlen", "everything", "paged")):
        for place, dims in enumerate(head_dims):
            if feature == "causal" or place % 5 == start:
                number = 2 * (place + start) + 1 if arch == "sm_75" else place + start  # Turing: float16 alone
                lengths = LENGTHS[(place + start) % len(LENGTHS)]
                problems.append(problem(number, dims, lengths, **ALL_FEATURES[feature]))
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_many_heads(head_dim: int, causal: bool) -> None:
    """More blocks than fit the GPU at a time: against float64 on a few heads."""
    assert_many_heads_are_right(head_dim, causal)


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (256, 65, 81), (50, 77, 99), (33, 20, 65)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda", dtype=torch.bfloat16)
            tensors.append(around[:, :, 35:-35, 20:-20].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=True, backend="cuda")).all()
