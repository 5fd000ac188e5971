"""The mma.sync backward: every option it takes by the error rule, and lengths around its tiles."""

from __future__ import annotations

import pytest
import torch
from family_tests import FEATURES, LENGTHS, assert_accurate, forced, needs_ampere, problem, taken_by, taken_for

import flashtile
from flashtile.families.bwd_sm80.family import BwdSm80

pytestmark = needs_ampere
forced_families = forced("bwd_sm80")
KERNEL = "bwd_sm80_kernel"
HEAD_DIMS = (
    (64, 64),
    (128, 128),
    (256, 256),
    (96, 96),
    (8, 8),
    (40, 72),
    (128, 64),
    (120, 112),
    (200, 136),
    (256, 192),
)
# Tests poison memory by torch's switch for deterministic algorithms, under which the family refuses: calls say False
NOT_DETERMINISTIC = {"deterministic": False}
# The family refuses the gradient of a bias
TAKEN = [name for name in FEATURES if name not in ("everything", "bias", "bias in float32")]
OTHERS: dict[str, dict] = {
    "negative scale": {"scale": -0.3, "causal": "bottom_right"},
    "huge": {"values": "huge", "causal": "bottom_right"},
    "rising": {"values": "rising"},
    "dominant": {"values": "dominant"},
    "options together": {"mask": "hqk", "alibi": "bh", "has_sinks": True, "dropout_p": 0.1, "softcap": 3.0},
}


@pytest.mark.parametrize("part", range(4))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for start, feature in enumerate((*TAKEN, *OTHERS)):
        options = (FEATURES | OTHERS)[feature] | NOT_DETERMINISTIC
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::4], KERNEL, monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        dim = (64, 128, 256)[number % 3]
        options = FEATURES[features[number % len(features)]] | NOT_DETERMINISTIC
        problems.append(problem(number, (dim, dim), (seqlen, lengths[-1 - number]), **options))
    assert_accurate(problems, KERNEL, monkeypatch, is_forward=False)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_120"])
def test_rows_of_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles, within their shared memory, compiled for the GPU at hand."""
    head_dims = taken_by(BwdSm80(), arch, HEAD_DIMS, ("dq", "dk", "dv"))
    taken_for(monkeypatch, arch)
    problems = []
    for start, feature in enumerate(("causal", "varlen", "dropout")):
        for place, dims in enumerate(head_dims):
            if feature == "causal" or place % 3 == start:
                number = 2 * (place + start) + 1 if arch == "sm_75" else place + start  # Turing: float16 alone
                options = FEATURES[feature] | NOT_DETERMINISTIC
                problems.append(problem(number, dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems, KERNEL, monkeypatch, is_forward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_many_heads(head_dim: int, causal: bool) -> None:
    """More blocks than fit the GPU at a time: against float64 on a few heads."""
    shape = (2, 40, 1500, head_dim)
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    flashtile.attention(q, k, v, causal=causal, deterministic=False, backend="cuda").backward(dout)
    for batch, head in ((0, 0), (1, 17), (1, 39)):
        parts = [x.detach()[batch, head].double().requires_grad_() for x in (q, k, v)]
        scores = parts[0] @ parts[1].T * head_dim**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        (scores.softmax(-1) @ parts[2]).backward(dout[batch, head].double())
        for ours, part in zip((q, k, v), parts, strict=True):
            assert ours.grad is not None
            assert part.grad is not None
            torch.testing.assert_close(ours.grad[batch, head].double(), part.grad, rtol=3e-2, atol=2e-2)


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert "bwd_sm80: deterministic sums" in str(flashtile.explain(q, k, v, deterministic=True))
