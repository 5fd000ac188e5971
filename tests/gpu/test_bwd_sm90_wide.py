"""The Hopper backward for wide heads: every option by the error rule, and bits that do not depend on timing."""

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
    problem,
    random_tensors,
    views,
)

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


def assert_close_to_float64(tensors: list[torch.Tensor], dout: torch.Tensor, what: str, **options: object) -> None:
    """Gradients of q, k and v by 2 % of their largest element."""
    exact = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }
    found = gradients(tensors, dout, backend="cuda", **options)
    expected = gradients([x.double() for x in tensors], dout.double(), backend="reference", **exact)
    for name, one, other in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert torch.isfinite(one).all(), f"{name}: {what}"
        error, largest = (one.double() - other).abs().max().item(), other.abs().max().item()
        assert error <= 0.02 * largest + 1e-4, f"{name}: {what}: {error} of {largest}"


# Masks become bits in pieces of 16 bytes or key by key
@pytest.mark.parametrize("seqlen_k", [320, 301])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_masks_in_memory(head_dim: int, seqlen_k: int) -> None:
    *tensors, dout = random_tensors(203, seqlen_k, head_dim, heads_kv=2 if seqlen_k == 301 else 4)
    for name, mask in views(203, seqlen_k, lambda *sizes: torch.rand(sizes, device="cuda") > 0.3).items():
        assert_close_to_float64(tensors, dout, name, mask=mask)


# The kernel of dK and dV copies a bias in pieces of 16, 4 and 2 bytes, that of dQ loads pairs or single elements
@pytest.mark.parametrize("seqlen_k", [320, 302, 301])
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_in_memory(head_dim: int, seqlen_k: int, dtype: torch.dtype) -> None:
    *tensors, dout = random_tensors(203, seqlen_k, head_dim, heads_kv=2 if seqlen_k == 302 else 4)
    for name, bias in views(203, seqlen_k, lambda *sizes: torch.randn(sizes, device="cuda", dtype=dtype)).items():
        assert_close_to_float64(tensors, dout, name, bias=bias)


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [136, 256])
def test_masks_by_tiles(head_dim: int) -> None:
    """Skipped at both ends of a block's range; with a band over them, and with grouped heads."""
    *tensors, dout = random_tensors(384, 512, head_dim, heads_kv=2)
    for name, mask in masks_by_tiles(384, 512).items():
        assert_close_to_float64(tensors, dout, name, mask=mask)
        assert_close_to_float64(tensors, dout, f"{name}, causal", mask=mask, causal=True)
        assert_close_to_float64(tensors, dout, f"{name}, window", mask=mask, window=(150, 30))


@pytest.mark.parametrize("head_dim", [192, 256])
def test_many_tiles_of_a_mask(head_dim: int) -> None:
    """More than one word of the map; heads that differ."""
    *tensors, dout = random_tensors(130, 4500, head_dim, heads_kv=1)
    starts = torch.randint(0, 4400, (2, 4, 130, 1), device="cuda")
    keys = torch.arange(4500, device="cuda")
    assert_close_to_float64(tensors, dout, "short runs", mask=(keys >= starts) & (keys < starts + 90))
    assert_close_to_float64(
        tensors, dout, "the last word", mask=(keys >= 4250 + 50 * torch.arange(4)[:, None, None].cuda())[None]
    )


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [192, 256])
def test_biases_that_mask(head_dim: int) -> None:
    *tensors, dout = random_tensors(200, 333, head_dim)
    bias = bias_that_masks(200, 333)
    for dtype in (torch.bfloat16, torch.float32):
        assert_close_to_float64(tensors, dout, str(dtype), bias=bias.to(dtype))


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [192, 256])
def test_hidden_rows_and_keys_have_no_gradient(head_dim: int) -> None:
    """By a mask and by a bias: exact zeros."""
    *tensors, dout = random_tensors(200, 333, head_dim)
    mask = torch.rand(2, 1, 200, 333, device="cuda") > 0.3
    mask[:, :, 64:150] = False
    mask[..., 130:260] = False
    bias = torch.zeros(mask.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
    for options in ({"mask": mask}, {"bias": bias}, {"mask": mask, "softcap": 5.0}):
        dq, dk, dv = gradients(tensors, dout, backend="cuda", **options)
        assert not dq[:, :, 64:150].any()
        assert not dk[:, :, 130:260].any()
        assert not dv[:, :, 130:260].any()


@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [192, 256])
def test_alibi_slopes_of_both_signs(head_dim: int) -> None:
    *tensors, dout = random_tensors(200, 333, head_dim)
    slopes = torch.tensor([0.05, -0.02, 0.3, -0.001], device="cuda")
    assert_close_to_float64(tensors, dout, "slopes of both signs", alibi_slopes=slopes)


@pytest.mark.parametrize("softcap", [0.1, 30.0, 255.0, 257.0, 1e6])
def test_softcaps(softcap: float) -> None:
    *tensors, dout = random_tensors(200, 333, 256)
    tensors[0] *= 4.0
    assert_close_to_float64(tensors, dout, str(softcap), softcap=softcap)


OPTIONS = ("softcap", "alibi_slopes", "bias", "mask", "dropout_p")


def option_sets() -> list[tuple[str, ...]]:
    """Pairs, triples with a bias, and all."""
    triples = [some for some in itertools.combinations(OPTIONS, 3) if "bias" in some]
    return [*itertools.combinations(OPTIONS, 2), *triples, OPTIONS]


@pytest.mark.long(40)
@pytest.mark.parametrize("part", range(4))
def test_options_together(part: int) -> None:
    """Head dims, dtypes of the bias, and a band take turns."""
    for number, names in list(enumerate(option_sets()))[part::4]:
        head_dim = (256, 192, 136)[number % 3]
        *tensors, dout = random_tensors(200, 333, head_dim, heads_kv=2)
        bias_dtype = (torch.bfloat16, torch.float32)[number // 2 % 2]
        all_options = {
            "softcap": 2.0,
            "alibi_slopes": torch.tensor([0.05, 0.02, 0.01, 0.1], device="cuda"),
            "bias": torch.randn(1, 4, 200, 333, device="cuda").to(bias_dtype),
            "mask": torch.rand(2, 1, 200, 333, device="cuda") > 0.3,
            "dropout_p": 0.2,
        }
        options = {name: all_options[name] for name in names}
        if "dropout_p" in names:
            options["rng_state"] = torch.tensor([17, number], device="cuda")
        assert_close_to_float64(tensors, dout, str(names), causal=number % 3 == 1, **options)


@pytest.mark.long(30)
def test_pairs_of_options_by_the_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a bias, whose gradient these problems ask for; with a band and lengths taking turns."""
    pairs = itertools.combinations(({"softcap": 1.5}, {"alibi": "bh"}, {"mask": "bqk"}, {"dropout_p": 0.2}), 2)
    more: tuple[dict, ...] = ({}, {"causal": "bottom_right"}, {"kind": "varlen", "batch": 3})
    problems = []
    for number, (one, other) in enumerate(pairs):
        for place, dims in enumerate(((256, 256), (192, 128))):
            turn = number + place
            problems.append(problem(turn, dims, LENGTHS[turn % len(LENGTHS)], **one | other | more[turn % 3]))
    assert_accurate(problems, "bwd_sm90_dkdv_kernel", monkeypatch, is_forward=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_sequences_with_a_bias_and_a_mask(dtype: torch.dtype) -> None:
    """Each as a call of its own."""
    lengths_q, lengths_k, heads, head_dim = (130, 1, 64, 77), (200, 90, 1, 129), 2, 256
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    q, k, v, dout = (
        torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for lengths in (lengths_q, lengths_k, lengths_k, lengths_q)
    )
    bias = torch.randn(4, heads, max(lengths_q), max(lengths_k), device="cuda").to(dtype)
    mask = torch.rand(4, 1, max(lengths_q), max(lengths_k), device="cuda") > 0.2
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flashtile.attention_varlen(
        leaves[0],
        leaves[1],
        leaves[2],
        starts_q,
        starts_k,
        max(lengths_q),
        max(lengths_k),
        bias=bias,
        mask=mask,
        backend="cuda",
    )
    found = torch.autograd.grad(out, leaves, dout)
    for b, (rows_q, rows_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        of_q = slice(int(starts_q[b]), int(starts_q[b]) + rows_q)
        of_k = slice(int(starts_k[b]), int(starts_k[b]) + rows_k)
        one = [
            x[rows].transpose(0, 1)[None].double()
            for x, rows in zip((q, k, v, dout), (of_q, of_k, of_k, of_q), strict=True)
        ]
        options = {"bias": bias[b : b + 1, :, :rows_q, :rows_k].double(), "mask": mask[b : b + 1, :, :rows_q, :rows_k]}
        expected = gradients(one[:3], one[3], backend="reference", **options)
        for got, exact, rows in zip(found, expected, (of_q, of_k, of_k), strict=True):
            error = (got[rows].transpose(0, 1)[None].double() - exact).abs().max().item()
            assert error <= 0.02 * exact.abs().max().item() + 1e-3, (b, error)


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
    mask = torch.rand(2, 1, 300, 300, device="cuda") > 0.2
    bias = torch.randn(2, 12, 300, 300, device="cuda", dtype=torch.bfloat16)
    calls: list[dict] = [{}, {"causal": True}, {"mask": mask, "bias": bias}, {"bias": bias}]
    expected = [gradients(tensors, dout, deterministic=True, **options) for options in calls]
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(25):
            for options, whole in zip(calls, expected, strict=True):
                found = gradients(tensors, dout, deterministic=True, **options)
                assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    assert any("bwd_sm90_dq_kernel" in unit for unit in functions)
    assert any("bwd_sm90_dkdv_kernel" in unit for unit in functions)


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert "bwd_sm90_dkdv_kernel: tile 64 keys x 64 queries" in str(flashtile.explain(q, k, v, deterministic=True))
    bias = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert "bwd_sm90_wide: the gradient of a bias" in str(flashtile.explain(q, k, v, bias=bias))
