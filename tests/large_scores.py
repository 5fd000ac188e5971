"""Checks of scores at the edge of float32, for every backend: tests/cpu, tests/interpreter and tests/gpu call them."""

from __future__ import annotations

import torch
from torch import Tensor

import flashtile
from flashtile.testing import Case, run

LARGEST = torch.finfo(torch.float32).max
# dtype of the call and a bias that masks by its size
SMALLEST = {
    "float32": (torch.float32, torch.finfo(torch.float32).min),
    "bfloat16": (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "float16": (torch.float16, torch.finfo(torch.float16).min),
    "half of float32": (torch.float32, torch.finfo(torch.float32).min / 2),
}
SINKS = (LARGEST, 2.4e38, -2.4e38, -LARGEST)
LARGE_SOFTCAPS = (1e25, 2.4e38, 3e38, LARGEST)
SMALL_SOFTCAPS = (1e-30, 1e-38, 1.1e-38, 1e-42, 1e-45, 1e-60, 5e-324)
# The smallest is the smallest positive float64 number
SMALL_SCALES = (1e-30, 1e-44, 7e-46, 1e-46, 1e-300, 5e-324)
SCALES_AND_SOFTCAPS = ((1e20, 1e-25), (1e38, 0.5), (1e38, 1e-45), (1.7e38, 1.0), (-1e20, 1e-25))
LARGE_DROPOUTS = (0.99, 0.9999, 0.99999)
# Numbers of few bits: the scores of a row are exact, and so alike, whatever the order in which a BLAS library adds
LARGE_VALUES = (1300.0, 133120.0, 2.0**30, 2.0**50)


def random_qkv(device: str, seqlen_q: int = 5, seqlen_k: int = 150, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = (seqlen_q, seqlen_k, seqlen_k)
    return [torch.randn(1, 2, size, 64, device=device).to(dtype).requires_grad_() for size in sizes]


def assert_finite_gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> None:
    grads = torch.autograd.grad((out, lse), inputs, (torch.randn_like(out), torch.randn_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)


def check_the_smallest_number_everywhere(backend: str, device: str, kind: str) -> None:
    """Row 2 has the same bias everywhere: its weights are equal, up to q.k where the bias does not round that away."""
    dtype, smallest = SMALLEST[kind]
    q, k, v = random_qkv(device, dtype=dtype)
    bias = torch.zeros(5, 150, dtype=dtype, device=device)
    bias[0, :100] = smallest
    bias[2] = smallest
    bias.requires_grad_()
    out, lse = flashtile.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    ref, ref_lse = flashtile.attention(
        *(tensor.double() for tensor in (q, k, v)), bias=bias.double(), return_lse=True, backend="reference"
    )
    torch.testing.assert_close(out.double(), ref, rtol=0, atol=8 * torch.finfo(dtype).eps)
    if abs(smallest) > 1e30:
        torch.testing.assert_close(ref[:, :, 2], v.double().mean(2))
    assert lse.isfinite().all()
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-6, atol=1e-5)
    assert_finite_gradients(out, lse, [q, k, v, bias])


def check_that_biases_are_told_apart(backend: str, device: str) -> None:
    q, k, v = random_qkv(device, seqlen_q=6, seqlen_k=7)
    bias = torch.full((6, 7), -LARGEST, device=device)
    bias[0, 3] = -3.3e38
    bias[1, 3] = -2.4e38
    bias[2, 3] = 2.4e38
    bias[3, 2], bias[3, 3] = 3.3e38, LARGEST
    bias[4, 2], bias[4, 3] = -torch.inf, -LARGEST / 2
    bias[5] = torch.tensor([-LARGEST, -2.4e38, -1.0, 0.0, 1e38, 2.4e38, LARGEST])
    bias.requires_grad_()
    out, lse = flashtile.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    torch.testing.assert_close(out[:, :, :5], v[:, :, 3:4].expand(-1, -1, 5, -1))
    torch.testing.assert_close(out[:, :, 5], v[:, :, 6])
    torch.testing.assert_close(lse, bias.max(-1).values.expand_as(lse))
    dout = torch.randn_like(out)
    dq, dk, dv, dbias = torch.autograd.grad(out, (q, k, v, bias), dout)
    assert all(grad.isfinite().all() for grad in (dq, dk, dbias))
    torch.testing.assert_close(dv[:, :, 3], dout[:, :, :5].sum(2))
    torch.testing.assert_close(dv[:, :, 6], dout[:, :, 5])


def check_a_sink_of_any_size(backend: str, device: str, sink: float, has_bias: bool) -> None:
    q, k, v = random_qkv(device)
    sinks = torch.full((2,), sink, device=device, requires_grad=True)
    bias = torch.zeros(1, 150, device=device) if has_bias else None
    out, lse = flashtile.attention(q, k, v, sinks=sinks, bias=bias, return_lse=True, backend=backend)
    if sink > 0:
        assert (out == 0).all()
        # Without a bias scores are in base 2, where float32 ends at 2.36e38
        torch.testing.assert_close(lse, torch.full_like(lse, sink), rtol=1e-6 if has_bias else 0.4, atol=0)
    else:
        torch.testing.assert_close(out, flashtile.attention(q, k, v, backend=backend))
    assert_finite_gradients(out, lse, [q, k, v, sinks])


def check_alibi_slopes_of_any_size(backend: str, device: str) -> None:
    """The key at distance 0 takes the row."""
    q, k, v = random_qkv(device, seqlen_q=150)
    slopes = torch.tensor([2.4e38, LARGEST], device=device)
    torch.testing.assert_close(flashtile.attention(q, k, v, alibi_slopes=slopes, backend=backend), v)


def check_a_softcap_too_large_to_cap_anything(backend: str, device: str, softcap: float, has_bias: bool) -> None:
    q, k, v = random_qkv(device)
    bias = torch.randn(5, 150, device=device) if has_bias else None
    plain = flashtile.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    capped = flashtile.attention(q, k, v, bias=bias, softcap=softcap, return_lse=True, backend=backend)
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(result[0].square().sum() + result[1].sum(), (q, k, v)) for result in (capped, plain)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def check_a_softcap_too_small_to_leave_anything(backend: str, device: str, softcap: float) -> None:
    """Every score is 0. A query of zeros is where scale / softcap * 0 must not be NaN."""
    q, k, v = random_qkv(device)
    with torch.no_grad():
        q[0, 0, 0] = 0.0
    out, lse = flashtile.attention(q, k, v, softcap=softcap, return_lse=True, backend=backend)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 150.0).log())
    assert_finite_gradients(out, lse, [q, k, v])


def check_queries_and_keys_that_are_all_alike(
    backend: str, device: str, value: float, dtype: torch.dtype, seqlen: int = 300
) -> None:
    """Scores of 1e12 and more: a float32 exponent is off by thousands, but all of a row are off alike."""
    q = torch.full((1, 2, seqlen, 64), value, dtype=dtype, device=device, requires_grad=True)
    k = q.detach().clone().requires_grad_()
    v = torch.randn(1, 2, seqlen, 64, device=device).to(dtype).requires_grad_()
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    counts = torch.arange(1.0, seqlen + 1.0, device=device)[:, None]
    torch.testing.assert_close(out, (v.float().cumsum(2) / counts).to(dtype), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, torch.full_like(lse, q[0, 0, 0, 0].item() ** 2 * 8), rtol=1e-5, atol=0)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(grad.isfinite().all() for grad in grads)


def check_huge_logits(backend: str, device: str, scale: float, seed: int) -> None:
    """One key takes each row; gradients stay finite though lse has lost the digits that they need."""
    inputs = Case(seqlen_q=70, seqlen_k=140, scale=scale, backend=backend).make(seed, device)
    found, ref = run(inputs), run(inputs._replace(args=inputs.args._replace(backend="reference")))
    torch.testing.assert_close(found.out, ref.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, ref.lse, rtol=1e-5, atol=0)
    assert all(tensor.isfinite().all() for tensor in found if tensor is not None)


def check_a_scale_too_small_to_leave_anything(backend: str, device: str, scale: float, dtype: torch.dtype) -> None:
    """Every score is 0, and a masked one is not NaN: -inf times a scale that is 0 in float32."""
    q, k, v = random_qkv(device, seqlen_q=70, seqlen_k=70, dtype=dtype)
    out, lse = flashtile.attention(q, k, v, causal=True, scale=scale, return_lse=True, backend=backend)
    counts = torch.arange(1.0, 71.0, device=device)
    torch.testing.assert_close(out, (v.float().cumsum(2) / counts[:, None]).to(dtype), rtol=0.01, atol=0.02)
    torch.testing.assert_close(lse, counts.log().expand_as(lse), rtol=1e-6, atol=1e-6)
    assert_finite_gradients(out, lse, [q, k, v])


def assert_as_reference(backend: str, inputs: list[Tensor], dtype: torch.dtype, **options: float) -> None:
    """Results and gradients, each relative to its largest number: both passes multiply by the scale."""
    dout = torch.randn(inputs[0].shape, device=inputs[0].device).to(dtype)
    results = []
    for name, tensors in ((backend, inputs), ("reference", [x.detach().double().requires_grad_() for x in inputs])):
        out, lse = flashtile.attention(*tensors, return_lse=True, backend=name, **options)
        grads = torch.autograd.grad(out, tensors, dout.to(out.dtype))
        results.append([tensor.double() for tensor in (out, lse, *grads)])
    for ours, ref in zip(*results, strict=True):
        assert ref.isfinite().all()
        limit = (1e-5 if dtype == torch.float32 else 0.03) * ref.abs().max()
        assert (ours - ref).abs().max() <= limit  # false for NaN


def check_a_denormal_scale(backend: str, device: str, dtype: torch.dtype) -> None:
    """Dot products near 2^123: the scores are near 1, and a scale flushed to 0 would show."""
    q, k, v = random_qkv(device, dtype=dtype)
    with torch.no_grad():
        q *= 2.0**60
        k *= 2.0**60
    assert_as_reference(backend, [q, k, v], dtype, scale=0.7 * 2.0**-126)


def check_a_scale_over_the_softcap(
    backend: str, device: str, scale: float, softcap: float, dtype: torch.dtype = torch.float32
) -> None:
    """The quotient overflows in float32. A dot product of 0 gives the score 0 and, scores being tiny, has a gradient;
    all others are capped."""
    q, k, v = random_qkv(device, dtype=dtype)
    with torch.no_grad():
        q[0, 0, 0] = 0.0
    out, lse = flashtile.attention(q, k, v, scale=scale, softcap=softcap, return_lse=True, backend=backend)
    wide = [tensor.detach().double() for tensor in (q, k, v)]
    ref, ref_lse = flashtile.attention(*wide, scale=scale, softcap=softcap, return_lse=True, backend="reference")
    torch.testing.assert_close(out.double(), ref, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.02)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    if dtype != torch.float16 and abs(scale) <= 1e20:  # the gradient of q holds the scale
        assert_finite_gradients(out, lse, [q, k, v])


def check_a_softcap_far_over_the_scale(backend: str, device: str, dtype: torch.dtype) -> None:
    """scale / softcap is a denormal, or 0, and nothing is capped: large dot products give scores near 1."""
    power = 6 if dtype == torch.float16 else 16
    q, k, v = random_qkv(device, dtype=dtype)
    with torch.no_grad():
        q *= 2.0**power
        k *= 2.0**power
    assert_as_reference(backend, [q, k, v], dtype, scale=0.7 * 2.0 ** -(2 * power + 4), softcap=1e30)


def state_that_keeps(dropout_p: float, heads: int, seqlen_q: int, seqlen_k: int, device: str) -> tuple[Tensor, Tensor]:
    """An rng_state with which some element is kept, and the elements that are."""
    rng_state = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        rng_state += 1
        keep = flashtile.testing.dropout_mask(rng_state, dropout_p, 1, heads, seqlen_q, seqlen_k)
        if keep.any():
            return rng_state, keep


def check_dropout_of_nearly_everything(backend: str, device: str, dtype: torch.dtype, dropout_p: float) -> None:
    """Checks that results are finite although what is kept is multiplied by up to 65536; float16 holds no such
    probability."""
    q, k, v = (torch.randn(1, 2, 70, 64, device=device).mul(0.1).to(dtype).requires_grad_() for _ in range(3))
    with torch.no_grad():
        q.zero_()  # every score is the row's maximum
    rng_state, _ = state_that_keeps(dropout_p, 2, 70, 70, device)
    options = {"dropout_p": dropout_p, "rng_state": rng_state}
    dout = torch.randn(v.shape, device=device).mul(0.1).to(dtype)
    results = []
    for name, tensors in (
        (backend, [q, k, v]),
        ("reference", [x.detach().double().requires_grad_() for x in (q, k, v)]),
    ):
        out = flashtile.attention(*tensors, **options, backend=name)
        (dv,) = torch.autograd.grad(out, tensors[2], dout.to(out.dtype))
        results.append([out.detach().double(), dv.double()])
    for ours, ref in zip(*results, strict=True):
        assert ref.abs().max() > 0
        assert (ours - ref).abs().max() <= 8 * torch.finfo(dtype).eps * ref.abs().max()  # false for NaN


def check_dropout_of_a_probability_of_1(backend: str, device: str, dtype: torch.dtype) -> None:
    """One key: P is 1 in both passes, and its product with the keep factor, 65536, is no float16 number."""
    q, k, v = (torch.randn(1, 1, rows, 16, device=device).mul(0.2).to(dtype) for rows in (512, 1, 1))
    v.requires_grad_()
    rng_state, keep = state_that_keeps(0.99999, 1, 512, 1, device)
    out = flashtile.attention(q, k, v, dropout_p=0.99999, rng_state=rng_state, backend=backend)
    expected = torch.where(keep, v.double() * 65536, 0.0)
    assert (out.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
    (dv,) = torch.autograd.grad(out, v, torch.full_like(out, 0.25))
    expected = (keep * 65536.0 * 0.25).sum(2, keepdim=True).expand(v.shape)
    assert (dv.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()
