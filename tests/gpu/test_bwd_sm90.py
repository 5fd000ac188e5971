"""The Hopper backward: every option it takes by the error rule, and what moves when its warps do."""

from __future__ import annotations

import itertools

import pytest
import torch
from family_tests import (
    DTYPES,
    FEATURES,
    LENGTHS,
    assert_accurate,
    bias_that_masks,
    feature_problems,
    forced,
    jitter,
    masks_by_tiles,
    needs_hopper,
    random_tensors,
    views,
)

import flashtile
from flashtile.backends import native
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("bwd_sm90")

HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (8, 8), (40, 72), (128, 64), (120, 112))
# Tests poison memory by torch's switch for deterministic algorithms, under which sums have a fixed order
# (test_bwd_sm90_order.py): these calls say False
NOT_DETERMINISTIC = {"deterministic": False}
TAKEN = [name for name in FEATURES if name != "everything"]  # not at head_dim 128


@pytest.mark.long(25)
def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = feature_problems(TAKEN, HEAD_DIMS, **NOT_DETERMINISTIC)
    assert_accurate(problems, "bwd_sm90_kernel", monkeypatch, is_forward=False)


OPTIONS: dict[str, dict] = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "hqk"},
    "mask": {"mask": "bqk"},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.long(45)
def test_options_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a band and lengths taking turns."""
    problems = []
    for number, pair in enumerate(itertools.combinations(OPTIONS, 2)):
        for place, head_dim in enumerate((64, 96, 128)):
            seqlen_q, seqlen_k = LENGTHS[(number + place) % len(LENGTHS)]
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim}
            more = ({}, {"causal": "bottom_right"}, {"kind": "varlen", "batch": 3})[(number + place) % 3]
            options = OPTIONS[pair[0]] | OPTIONS[pair[1]] | more
            case = Case(dtype=DTYPES[number % 2], backend="cuda", **sizes | options | NOT_DETERMINISTIC)
            problems.append((case, number + place))
    assert_accurate(problems, "bwd_sm90_kernel", monkeypatch, is_forward=False)


@pytest.mark.long(30)
@pytest.mark.smoke
def test_gradients_of_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every set of axes, in both dtypes, with the options that meet the bias taking turns."""
    problems = []
    axes = ["".join(some) for count in range(5) for some in itertools.combinations("bhqk", count)]
    more = ({}, {"causal": "bottom_right"}, {"kind": "varlen", "batch": 3}, {"alibi": "h"}, {"window": (70, 30)})
    for number, bias in enumerate(axes):
        for place, head_dim in enumerate((64, 128, 40)):
            seqlen_q, seqlen_k = ((150, 300), (700, 513), (64, 1025), (600, 77))[(number + place) % 4]
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim}
            heads = {"heads": 4, "heads_kv": (4, 2, 1)[number % 3]}
            options = {"bias": bias, "is_bias_float32": (number + place) % 3 == 2} | more[(number + place) % len(more)]
            case = Case(dtype=DTYPES[number % 2], backend="cuda", **sizes | heads | options | NOT_DETERMINISTIC)
            problems.append((case, number + place))
    assert_accurate(problems, "bwd_sm90_dbias_kernel", monkeypatch, is_forward=False)


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
    """Of q, k, v and, if there is one, a bias."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out_of = [*leaves]
    if isinstance(options.get("bias"), torch.Tensor):
        options["bias"] = options["bias"].detach().requires_grad_()
        out_of.append(options["bias"])
    out = flashtile.attention(*leaves, **(NOT_DETERMINISTIC | {"backend": "cuda"} | options))  # type: ignore[arg-type]
    return torch.autograd.grad(out, out_of, dout)


def assert_close_to_float64(tensors: list[torch.Tensor], dout: torch.Tensor, what: str, **options: object) -> None:
    """Gradients of q, k, v and a bias by 2 % of their largest element."""
    found = gradients(tensors, dout, **options)
    exact = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }
    tensors, dout = [x.double() for x in tensors], dout.double()
    expected = gradients(tensors, dout, **exact, backend="reference")
    for name, one, other in zip(("dq", "dk", "dv", "dbias"), found, expected, strict=False):
        assert torch.isfinite(one).all(), f"{name}: {what}"
        error, largest = (one.double() - other).abs().max().item(), other.abs().max().item()
        is_zero = name == "dbias" and one.shape[-1] == 1  # a sum of dS over all keys
        floor = error_of_sums(tensors, dout, **exact) if is_zero else 1e-4
        assert error <= 0.02 * largest + floor, f"{name}: {what}: {error} of {largest}"


def error_of_sums(tensors: list[torch.Tensor], dout: torch.Tensor, bias: torch.Tensor, **options: object) -> float:
    """What the roundings of P, dS and out to bfloat16 leave of the gradient of a bias that is the same for all keys: 4
    times the largest rounding, about 9 standard deviations of these errors."""
    out = flashtile.attention(*tensors, bias=bias, **(NOT_DETERMINISTIC | options), backend="reference")  # type: ignore[arg-type]
    full = bias.expand(*out.shape[:3], tensors[1].shape[2]).clone()
    *_, ds = gradients(tensors, dout, bias=full, **options, backend="reference")
    squares = (dout * out).square().sum(-1, keepdim=True) + 2 * ds.square().sum(-1, keepdim=True)
    return 4 * 2**-8 * squares.sum_to_size(bias.shape).max().sqrt().item()


# Keys in pieces of 16, 4 and 2 bytes
@pytest.mark.parametrize("seqlen_k", [320, 302, 301])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_in_memory(head_dim: int, seqlen_k: int) -> None:
    *tensors, dout = random_tensors(203, seqlen_k, head_dim, heads_kv=2 if seqlen_k == 302 else 4)
    for name, mask in views(203, seqlen_k, lambda *sizes: torch.rand(sizes, device="cuda") > 0.3).items():
        assert_close_to_float64(tensors, dout, name, mask=mask)


@pytest.mark.parametrize("seqlen_k", [320, 302, 301])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_in_memory(head_dim: int, seqlen_k: int, dtype: torch.dtype) -> None:
    *tensors, dout = random_tensors(203, seqlen_k, head_dim, heads_kv=2 if seqlen_k == 302 else 4)
    for name, bias in views(203, seqlen_k, lambda *sizes: torch.randn(sizes, device="cuda", dtype=dtype)).items():
        assert_close_to_float64(tensors, dout, name, bias=bias)


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_by_tiles(head_dim: int) -> None:
    """Tiles that are all true, all false or mixed; hidden rows, keys, and blocks of keys; a band over them."""
    *tensors, dout = random_tensors(384, 512, head_dim)
    for name, mask in masks_by_tiles(384, 512).items():
        assert_close_to_float64(tensors, dout, name, mask=mask)
        assert_close_to_float64(tensors, dout, f"{name}, causal", mask=mask, causal=True)


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_that_mask(head_dim: int) -> None:
    """-inf in places, in rows, in blocks of keys; large finite values."""
    *tensors, dout = random_tensors(200, 333, head_dim)
    bias = bias_that_masks(200, 333)
    for dtype in (torch.bfloat16, torch.float32):
        assert_close_to_float64(tensors, dout, str(dtype), bias=bias.to(dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [64, 128])
def test_alibi_slopes_of_both_signs(head_dim: int) -> None:
    """A negative slope favours keys that are far away."""
    *tensors, dout = random_tensors(200, 333, head_dim)
    slopes = torch.tensor([0.05, -0.02], device="cuda").repeat(tensors[0].shape[1] // 2)
    assert_close_to_float64(tensors, dout, "slopes of both signs", alibi_slopes=slopes)


@pytest.mark.parametrize("softcap", [0.1, 30.0, 255.0, 257.0, 1e6])
def test_softcaps(softcap: float) -> None:
    *tensors, dout = random_tensors(200, 333, 128)
    tensors[0] *= 4.0
    assert_close_to_float64(tensors, dout, str(softcap), softcap=softcap)


@pytest.mark.smoke
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_some_gradients(wanted: tuple[int, ...]) -> None:
    tensors = [torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors, dout)
    leaves = [tensor.detach().requires_grad_(index in wanted) for index, tensor in enumerate(tensors)]
    out = flashtile.attention(*leaves, backend="cuda", **NOT_DETERMINISTIC)
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


@pytest.mark.long(40)
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
    assert "bwd_sm90_kernel: tile 128 keys x 128 queries" in str(flashtile.explain(q, k, v, **NOT_DETERMINISTIC))
    q, k, v = (torch.randn(1, 2, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    slopes = torch.ones(2, device="cuda")
    text = str(flashtile.explain(q, k, v, softcap=1.0, dropout_p=0.1, alibi_slopes=slopes, **NOT_DETERMINISTIC))
    assert "bwd_sm90: 3 options that change scores at head dims over 96" in text
