"""The Hopper backward: every option it takes by the error rule, and what moves when its warps do."""

from __future__ import annotations

import pytest
import torch
from test_sm90 import DTYPES, FEATURES, LENGTHS, assert_accurate, jitter, pytestmark  # noqa: F401

import flashtile
from flashtile.backends import native
from flashtile.kernels import assemble, families
from flashtile.testing import Case

HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (8, 8), (40, 72), (128, 64), (120, 112))
# Tests poison memory by torch's switch for deterministic algorithms, under which sums have a fixed order
# (test_bwd_sm90_order.py): these calls say False
NOT_DETERMINISTIC = {"deterministic": False}
# The family refuses two options at head_dim 128 and the gradient of a bias
TAKEN = [name for name in FEATURES if name not in ("everything", "bias", "bias in float32")]


@pytest.fixture(autouse=True)
def forced():
    """This family, whatever its speed."""
    with families.forced("bwd_sm90"):
        assemble.clear_plans()
        yield
    assemble.clear_plans()


def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for start, feature in enumerate(TAKEN):
        for place, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
            if feature in ("plain", "causal", "varlen") or place % 3 == start % 3:
                number = place + start
                seqlen_q, seqlen_k = LENGTHS[number % len(LENGTHS)]
                sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
                layout = ("bhsd", "bshd")[number // 2 % 2]
                case = Case(
                    dtype=DTYPES[number % 2],
                    layout=layout,
                    backend="cuda",
                    **(sizes | FEATURES[feature] | NOT_DETERMINISTIC),
                )
                problems.append((case, number))
    assert_accurate(problems, "bwd_sm90_kernel", monkeypatch, is_forward=False)


@pytest.mark.smoke
def test_lengths_around_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile has 64 or 128 queries and 128 keys; a consumer has 64 of them."""
    lengths = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193)
    features = ("plain", "causal", "top left", "window", "varlen", "gqa")
    problems = []
    for number, seqlen in enumerate(lengths):
        sizes = {"seqlen_q": seqlen, "seqlen_k": lengths[-1 - number], "head_dim": (64, 128)[number % 2]}
        sizes["head_dim_v"] = sizes["head_dim"]
        options = FEATURES[features[number % len(features)]]
        problems.append((Case(dtype=DTYPES[number % 2], backend="cuda", **sizes | options | NOT_DETERMINISTIC), number))
    assert_accurate(problems, "bwd_sm90_kernel", monkeypatch, is_forward=False)


def gradients(tensors: list[torch.Tensor], dout: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = flashtile.attention(*leaves, **(NOT_DETERMINISTIC | options))  # type: ignore[arg-type]
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bias_without_its_gradient(head_dim: int) -> None:
    q, k, v, dout = (torch.randn(2, 4, 300, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, 4, 300, 300, device="cuda", dtype=torch.bfloat16)
    found = gradients([q, k, v], dout, bias=bias)
    expected = gradients([q.double(), k.double(), v.double()], dout.double(), bias=bias.double(), backend="reference")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.0, atol=0.02 * other.abs().max().item())


@pytest.mark.smoke
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    tensors = [torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout)
    leaves = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    out = flashtile.attention(*leaves, **NOT_DETERMINISTIC)
    found = torch.autograd.grad(out, [leaves[index] for index in wanted], dout)
    for index, one in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, expected[index], rtol=0.0, atol=1e-2)


def test_broadcast_gradients_of_out() -> None:
    """Of a sum over rows, heads or batches. TMA takes no rows with a stride of 0."""
    tensors = [torch.randn(2, 3, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    whole = torch.randn(2, 3, 200, 64, device="cuda", dtype=torch.bfloat16)
    for broadcast in (whole[:, :, :1], whole[:, :1], whole[:1], whole[:1, :1, :1, :1]):
        dout = broadcast.expand_as(whole)
        found, expected = gradients(tensors, dout), gradients(tensors, dout.contiguous())
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_jitter_changes_no_sum_of_one_owner(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product: dK and dV, which have one owner, keep their bits;
    dQ is a sum in no fixed order."""
    tensors = [torch.randn(2, 24, 300, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    expected = [gradients(tensors, dout, causal=causal) for causal in (False, True)]
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(50):
            for causal, (dq, dk, dv) in zip((False, True), expected, strict=True):
                found = gradients(tensors, dout, causal=causal)
                assert torch.equal(found[1], dk)
                assert torch.equal(found[2], dv)
                torch.testing.assert_close(found[0], dq, rtol=0.0, atol=1e-2 * dq.abs().max().item())
    assert any("bwd_sm90_kernel" in unit for unit in functions)


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert "bwd_sm90_kernel: tile 128 x 128" in str(flashtile.explain(q, k, v, **NOT_DETERMINISTIC))
    bias = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert "bwd_sm90: the gradient of a bias" in str(flashtile.explain(q, k, v, bias=bias, **NOT_DETERMINISTIC))
