"""The edges of the number formats: biases and softcaps to the ends of float32, huge logits, lengths and windows to the
ends of 32 bits, index tensors that change after their check."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import cpu
from flashtile.backends.call import scalars_of
from flashtile.problem import MAX_LENGTH, AttentionArgs
from flashtile.runtime import extension
from flashtile.testing import Case, run

ISAS = extension.instruction_sets() if extension.missing() is None else ("none",)
BACKENDS = [*(f"cpu {isa}" for isa in ISAS), "tiled", "reference"]
LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, isa = request.param.partition(" ")
    if isa:
        monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    return name


def random_qkv(seqlen_q: int = 5, seqlen_k: int = 150, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 2, size, 16).to(dtype).requires_grad_() for size in (seqlen_q, seqlen_k, seqlen_k)]


# Large scores

SMALLEST = {
    "float32": (torch.float32, torch.finfo(torch.float32).min),
    "bfloat16": (torch.bfloat16, torch.finfo(torch.bfloat16).min),
    "float16": (torch.float16, torch.finfo(torch.float16).min),
    "half of float32": (torch.float32, torch.finfo(torch.float32).min / 2),
}


@pytest.mark.parametrize("kind", SMALLEST)
def test_the_smallest_number_in_every_key_is_no_mask(backend: str, kind: str, seed: int) -> None:
    """Row 2 has the same bias everywhere: its weights are equal, up to q.k where the bias does not round that away."""
    dtype, smallest = SMALLEST[kind]
    q, k, v = random_qkv(dtype=dtype)
    bias = torch.zeros(5, 150, dtype=dtype)
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
    grads = torch.autograd.grad((out, lse), (q, k, v, bias), (torch.randn_like(out), torch.randn_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)


def test_biases_over_the_whole_range_are_told_apart(backend: str, seed: int) -> None:
    q, k, v = random_qkv(seqlen_q=6, seqlen_k=7)
    bias = torch.full((6, 7), -LARGEST)
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


@pytest.mark.parametrize("sink", [LARGEST, 2.4e38, -2.4e38, -LARGEST])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sink_of_any_size(backend: str, sink: float, has_bias: bool, seed: int) -> None:
    q, k, v = random_qkv()
    sinks = torch.full((2,), sink, requires_grad=True)
    bias = torch.zeros(1, 150) if has_bias else None
    out, lse = flashtile.attention(q, k, v, sinks=sinks, bias=bias, return_lse=True, backend=backend)
    if sink > 0:
        assert (out == 0).all()
        # Without a bias scores are in base 2, where float32 ends at 2.36e38
        torch.testing.assert_close(lse, torch.full_like(lse, sink), rtol=1e-6 if has_bias else 0.4, atol=0)
    else:
        torch.testing.assert_close(out, flashtile.attention(q, k, v, backend=backend))
    grads = torch.autograd.grad((out, lse), (q, k, v, sinks), (torch.randn_like(out), torch.randn_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)


def test_alibi_slopes_of_any_size(backend: str, seed: int) -> None:
    """The key at distance 0 takes the row."""
    q, k, v = random_qkv(seqlen_q=150)
    out = flashtile.attention(q, k, v, alibi_slopes=torch.tensor([2.4e38, LARGEST]), backend=backend)
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("softcap", [1e25, 2.4e38, 3e38, LARGEST])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_softcap_too_large_to_cap_anything(backend: str, softcap: float, has_bias: bool, seed: int) -> None:
    q, k, v = random_qkv()
    bias = torch.randn(5, 150) if has_bias else None
    plain = flashtile.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
    capped = flashtile.attention(q, k, v, bias=bias, softcap=softcap, return_lse=True, backend=backend)
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(result[0].square().sum() + result[1].sum(), (q, k, v)) for result in (capped, plain)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [1e-30, 1e-38, 1.1e-38, 1e-42, 1e-45, 1e-60, 5e-324])
def test_a_softcap_too_small_to_leave_anything(backend: str, softcap: float, seed: int) -> None:
    """Every score is 0. A query of zeros is where scale / softcap * 0 must not be NaN."""
    q, k, v = random_qkv()
    with torch.no_grad():
        q[0, 0, 0] = 0.0
    out, lse = flashtile.attention(q, k, v, softcap=softcap, return_lse=True, backend=backend)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, 150.0).log())
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [1300.0, 133120.0, 1e9, 1e15])
def test_queries_and_keys_that_are_all_alike_and_large(
    backend: str, value: float, dtype: torch.dtype, seed: int
) -> None:
    """Scores of 1e12 and more: a float32 exponent is off by thousands, but all of a row are off alike."""
    q = torch.full((1, 2, 60, 64), value, dtype=dtype, requires_grad=True)
    k = q.detach().clone().requires_grad_()
    v = torch.randn(1, 2, 60, 64).to(dtype).requires_grad_()
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    counts = torch.arange(1.0, 61.0)[:, None]
    torch.testing.assert_close(out, (v.float().cumsum(2) / counts).to(dtype), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, torch.full_like(lse, q[0, 0, 0, 0].item() ** 2 * 8), rtol=1e-5, atol=0)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.zeros_like(lse)))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("scale", [1e6, 1e11])
def test_huge_logits(backend: str, scale: float, seed: int) -> None:
    """One key takes each row; gradients stay finite though lse has lost the digits that they need."""
    inputs = Case(seqlen_q=70, seqlen_k=140, scale=scale, backend=backend).make(seed)
    found, ref = run(inputs), run(inputs._replace(args=inputs.args._replace(backend="reference")))
    torch.testing.assert_close(found.out, ref.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, ref.lse, rtol=1e-5, atol=0)
    assert all(tensor.isfinite().all() for tensor in found if tensor is not None)


# Long sequences: keys that are one row in memory


def long_keys(length: int) -> torch.Tensor:
    return torch.randn(1, 1, 1, 16).expand(1, 1, length, 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [MAX_LENGTH, MAX_LENGTH - 100])
def test_the_last_keys_of_the_longest_sequence(
    isa: str, length: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window leaves the last six keys to the only query: the rest must cost nothing, and no position overflow."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    q, k = torch.randn(1, 1, 1, 16), long_keys(length)
    out, lse = flashtile.attention(q, k, k, window=(5, 0), return_lse=True, backend="cpu")
    expected = flashtile.attention(q, k[:, :, -6:], k[:, :, -6:], return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), expected)


@pytest.mark.parametrize(
    ("reach", "expected"), [(2**30, 2**30), (2**31 - 1, 2**31 - 1), (2**31, -1), (2**40, -1), (-1, -1), (0, 0)]
)
def test_a_wide_window_is_dropped_only_where_it_hides_nothing(reach: int, expected: int) -> None:
    """Sequences of 1.5 * 2^30 keys exist, so a window of 2^30 must reach the kernels."""
    short = torch.zeros(1, 1, 1, 16)
    scalars = scalars_of(AttentionArgs(short, short, short, window_left=reach, window_right=reach))
    assert (scalars["window_left"], scalars["window_right"]) == (expected, expected)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_sequence_that_is_too_long(name: str) -> None:
    short, long = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 1).expand(1, 1, MAX_LENGTH + 1, 16)
    q, k = (long, short) if name == "q" else (short, long)
    for window in ((-1, -1), (5, 0)):
        with pytest.raises(flashtile.Unsupported, match=rf"{name}: got shape .*; accepted: sizes up to {MAX_LENGTH}"):
            flashtile.attention(q[..., :1], k[..., :1], k[..., :1], window=window)


def test_pages_for_too_many_keys() -> None:
    q, pages = torch.randn(1, 1, 1, 16), torch.randn(2, 2**16, 1, 16)
    table, used = torch.zeros(1, 2**15, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(flashtile.Unsupported, match=r"block_table: got 32768 pages of 65536 keys per sequence"):
        flashtile.attention_kvcache(q, pages, pages, cache_seqlens=used, block_table=table)
    flashtile.attention_kvcache(q, pages, pages, cache_seqlens=used, block_table=table[:, :100])


# Index tensors


@pytest.mark.parametrize("page", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_block_table_that_changes_after_its_check(page: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread. The result is that of some page; nothing is read or written outside."""
    inputs = Case(kind="paged", batch=3, page_size=7, backend="cpu").make(seed)
    table, check = inputs.args.block_table, cpu.check_values
    assert table is not None

    def check_and_change(args):  # type: ignore[no-untyped-def]
        spans = check(args)
        table.fill_(page)
        return spans

    monkeypatch.setattr(cpu, "check_values", check_and_change)
    kept, args = table.clone(), inputs.args
    out, lse = ops.forward(*args)
    table.copy_(kept)
    ops.backward(inputs.dout, inputs.dlse, *args, out, lse, [True, True, True, False, False])
    assert (table == page).all()
