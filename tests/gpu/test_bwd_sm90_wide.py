"""The Hopper backward for wide heads: every option by the error rule, and bits that do not depend on timing."""

from __future__ import annotations

import pytest
import torch
from family_tests import DTYPES, FEATURES, assert_accurate, feature_problems, forced, jitter, needs_hopper

import flashtile
from flashtile.backends import native
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("bwd_sm90_wide")

HEAD_DIMS = ((256, 256), (192, 128), (192, 192), (136, 136), (200, 72), (248, 240), (64, 256))
# The family refuses the gradient of a bias
TAKEN = [name for name in FEATURES if name not in ("everything", "bias", "bias in float32")]


@pytest.mark.long(40)
def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = feature_problems(TAKEN, HEAD_DIMS)
    assert_accurate(problems, "bwd_sm90_dkdv_kernel", monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of dK and dV has tiles of 64 keys and 64 queries, that of dQ of 128 queries and 64 keys."""
    lengths = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        head_dim, head_dim_v = HEAD_DIMS[number % 3]
        sizes = {"seqlen_q": seqlen, "seqlen_k": lengths[-1 - number], "head_dim": head_dim, "head_dim_v": head_dim_v}
        options = FEATURES[features[number % len(features)]]
        problems.append((Case(dtype=DTYPES[number % 2], backend="cuda", **sizes | options), number))
    assert_accurate(problems, "bwd_sm90_dq_kernel", monkeypatch, is_forward=False)


def gradients(tensors: list[torch.Tensor], dout: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(flashtile.attention(*leaves, **options), leaves, dout)  # type: ignore[arg-type]


def test_bias_without_its_gradient() -> None:
    q, k, v, dout = (torch.randn(2, 4, 300, 256, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, 4, 300, 300, device="cuda", dtype=torch.bfloat16)
    found = gradients([q, k, v], dout, bias=bias, backend="cuda")
    expected = gradients([q.double(), k.double(), v.double()], dout.double(), bias=bias.double(), backend="reference")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=0.02 * other.abs().max().item())


@pytest.mark.smoke
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    """Bit by bit those of a call that wants all."""
    tensors = [torch.randn(1, 2, 200, 192, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout, backend="cuda")
    leaves = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    found = torch.autograd.grad(flashtile.attention(*leaves, backend="cuda"), [leaves[index] for index in wanted], dout)
    for index, one in zip(wanted, found, strict=True):
        assert torch.equal(one, expected[index])


@pytest.mark.long(50)
@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128)])
def test_jitter_changes_no_bit(head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product. Every gradient has one owner."""
    shapes = ((2, 12, 300, head_dims[0]), (2, 6, 300, head_dims[0]), (2, 6, 300, head_dims[1]))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    dout = torch.randn(2, 12, 300, head_dims[1], device="cuda", dtype=torch.bfloat16)
    expected = [gradients(tensors, dout, causal=causal, deterministic=True) for causal in (False, True)]
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(50):
            for causal, whole in zip((False, True), expected, strict=True):
                found = gradients(tensors, dout, causal=causal, deterministic=True)
                assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    assert any("bwd_sm90_dq_kernel" in unit for unit in functions)
    assert any("bwd_sm90_dkdv_kernel" in unit for unit in functions)


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert "bwd_sm90_dkdv_kernel: tile 64 x 64" in str(flashtile.explain(q, k, v, deterministic=True))
    bias = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert "bwd_sm90_wide: the gradient of a bias" in str(flashtile.explain(q, k, v, bias=bias))
