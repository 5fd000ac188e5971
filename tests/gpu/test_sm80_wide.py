"""The mma.sync families for wide heads: every row by the error rule, every option, lengths around their tiles, rows
that are aligned to nothing, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_sm80 import ALL_FEATURES, OTHERS, problem, taken_for
from test_sm90 import assert_accurate

import flashtile
from flashtile.backends import cuda
from flashtile.kernels import families
from flashtile.kernels.assemble import clear_plans
from flashtile.testing import Case

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0")
FORWARD, BACKWARD = "fwd_sm80_wide_kernel", "bwd_sm80_dq_kernel"
HEAD_DIMS = ((512, 512), (320, 320), (384, 384), (448, 448), (264, 264), (320, 256), (512, 40))
# Up to 256 the backward takes what bwd_sm80 refuses
BACKWARD_HEAD_DIMS = (*HEAD_DIMS, (256, 256), (192, 160), (128, 128), (64, 64))
ODD_HEAD_DIMS = ((257, 257), (300, 290), (511, 65))
LENGTHS = ((1, 1), (1, 700), (150, 300), (200, 64), (193, 1025), (600, 513), (370, 700))
# The backward refuses pages and results in float32
NOT_BACKWARD = ("paged", "single rows as pages", "pages of 48", "paged with options", "float32 results")


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    clear_plans()
    with families.forced("fwd_sm80_wide", "bwd_sm80_wide"):
        yield
    cuda._arch.cache_clear()
    clear_plans()


def forward_problems() -> list[tuple[Case, int]]:
    """A causal mask meets every pair of head dims, each other feature one; lengths and dtypes take turns."""
    problems = []
    for start, (feature, options) in enumerate((ALL_FEATURES | OTHERS).items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    for start, feature in enumerate(("causal", "varlen", "paged", "gqa", "splits", "offset")):
        options = (ALL_FEATURES | OTHERS)[feature]
        problems.append(problem(start, ODD_HEAD_DIMS[start % 3], LENGTHS[2 + start % 5], **options))
    return problems


def backward_problems() -> list[tuple[Case, int]]:
    problems = []
    for start, (feature, options) in enumerate((ALL_FEATURES | OTHERS).items()):
        if feature in NOT_BACKWARD or "splits" in feature:
            continue
        for place, head_dims in enumerate(BACKWARD_HEAD_DIMS):
            if feature == "causal" or place == start % len(BACKWARD_HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    for start, feature in enumerate(("causal", "varlen", "gqa", "offset", "bias")):
        options = (ALL_FEATURES | OTHERS)[feature]
        problems.append(problem(start, ODD_HEAD_DIMS[start % 3], LENGTHS[2 + start % 5], **options))
    # Each way to broadcast a bias
    for start, axes in enumerate(("q", "k", "b", "h", "bh", "qk", "bhq", "hk")):
        options = {"bias": axes, "is_bias_float32": start % 2 == 0, "causal": "bottom_right", "heads": 3, "heads_kv": 3}
        dims = ((64, 64), (320, 320))[start // 4]
        problems.append(problem(start, dims, LENGTHS[2 + start % 5], **options))
    return problems


def length_problems() -> list[tuple[Case, int]]:
    lengths = (1, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 257)
    features = ("causal", "top left", "window and causal", "varlen", "window", "gqa", "plain")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim, options = (512, 320)[number % 2], ALL_FEATURES[features[number % len(features)]]
        problems.append(problem(number, (dim, dim), (seqlen, lengths[-1 - number]), **options))
    return problems


@pytest.mark.parametrize("part", range(2))
def test_forward_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(forward_problems()[part::2], FORWARD, monkeypatch)


@pytest.mark.long(25)
@pytest.mark.parametrize("part", range(2))
def test_backward_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(backward_problems()[part::2], BACKWARD, monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(length_problems(), BACKWARD, monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries of heads that share a KV head; groups that do and do not divide a tile."""
    problems = []
    for number, feature in enumerate(("plain", "causal", "everything", "paged", "varlen")):
        heads, heads_kv = ((8, 2), (3, 1), (32, 8), (14, 2), (64, 1))[number % 5]
        options = ALL_FEATURES[feature] | {"heads": heads, "heads_kv": heads_kv}
        lengths = ((1, 700), (5, 333), (16, 64), (40, 1025))[number % 4]
        problems.append(problem(number, HEAD_DIMS[number], lengths, **options))
    assert_accurate(problems, FORWARD, monkeypatch)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_rows_of_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles, within their shared memory, compiled for the GPU at hand. Turing takes float16 to head dim 256."""
    head_dims = ((256, 256), (192, 160), (64, 64)) if arch == "sm_75" else HEAD_DIMS[:4]
    taken_for(monkeypatch, arch)
    problems = []
    for start, feature in enumerate(("plain", "causal")):
        for place, dims in enumerate(head_dims):
            number = 2 * (place + start) + 1 if arch == "sm_75" else place + start
            lengths = LENGTHS[(place + start) % len(LENGTHS)]
            problems.append(problem(number, dims, lengths, **ALL_FEATURES[feature]))
    assert_accurate(problems, BACKWARD, monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((512, 100, 130), (320, 65, 200), (290, 77, 99)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda", dtype=torch.bfloat16)
            tensors.append(around[:, :, 35:-35, 20:-20].normal_().requires_grad_())
        out = flashtile.attention(*tensors, causal=True, backend="cuda")
        assert torch.isfinite(out).all()
        for grad in torch.autograd.grad(out, tensors, torch.ones_like(out)):
            assert torch.isfinite(grad).all()
