"""The CPU engine: accuracy on every instruction set, threads, splits, its details, and the fallback without it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import random
import sys
import warnings

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.plans.params import WideParams
from flashtile.runtime import extension
from flashtile.testing import Case, Result, assert_agrees, dropout_mask, oracle, run

ISAS = extension.instruction_sets() if extension.missing() is None else ("none",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Lengths around its tiles (128 queries, 64 or 128 keys), micro-kernel rows (6) and vectors (4 to 16)
LONG = {"batch": 1, "seqlen_q": 135, "seqlen_k": 203}
OPTIONS: dict[str, dict] = {
    "plain": LONG,
    "whole tiles": {"batch": 1, "seqlen_q": 128, "seqlen_k": 256, "head_dim": 64, "head_dim_v": 64},
    "causal": {"causal": "bottom_right", **LONG},
    "causal, top left, swapped": {"causal": "top_left", "memory": "swapped", **LONG},
    "window": {"window": (40, 7), **LONG},
    "softcap": {"softcap": 1.5, **LONG},
    "a wide softcap": {"softcap": 30.0, **LONG},
    "mask, bias and alibi": {"mask": "hqk", "bias": "bhqk", "alibi": "h", "has_sinks": True, **LONG},
    "a bias of one row": {"bias": "k", **LONG},
    "a bias of one column, float32": {"bias": "bq", "is_bias_float32": True, "causal": "bottom_right", **LONG},
    "dropout": {"dropout_p": 0.2, **LONG},
    "dropout of a part": {"dropout_p": 0.2, "origin": (1000, 4096, 5, 40), **LONG},
    "few queries of many heads": {"heads": 12, "seqlen_q": 3, "seqlen_k": 90, "causal": "bottom_right", "bias": "hqk"},
    "head dims 21 and 40": {"head_dim": 21, "head_dim_v": 40, "seqlen_q": 70, "memory": "sliced"},
    "head dims 200 and 70": {"head_dim": 200, "head_dim_v": 70, "seqlen_q": 40, "seqlen_k": 140},
    "varlen": {
        "kind": "varlen",
        "batch": 4,
        "causal": "bottom_right",
        "seqlen_q": 140,
        "seqlen_k": 140,
        "bias": "bhqk",
    },
    "paged": {"kind": "paged", "batch": 3, "page_size": 7, "window": (20, 3)},
    "padded": {"kind": "padded", "batch": 4, "layout": "bshd"},
}


def test_the_extension_is_built() -> None:
    """The tests need the extension; `make` builds it or says why not."""
    assert extension.missing() is None
    assert extension.instruction_sets()[-1] == "baseline"
    assert extension.params_bytes() == ctypes.sizeof(WideParams)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_instruction_set(option: str, isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    for dtype in DTYPES:
        inputs = Case(dtype=dtype, backend="cpu", **OPTIONS[option]).make(seed)
        assert_agrees(run(inputs), inputs)


@pytest.mark.parametrize("isa", ISAS)
def test_every_conversion(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key the output is v, converted to float32 and back. Every 16-bit pattern; denormals may become 0."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        v = patterns.view(dtype).view(1, 128, 1, 512)
        q = k = torch.ones(1, 128, 1, 8, dtype=dtype)
        out = flashtile.attention(q, k, v, backend="cpu")
        kept = v.isfinite() & ((v == 0) | (v.float().abs() >= torch.finfo(torch.float32).tiny))
        assert torch.equal(out[kept], v[kept])
        wide, _ = ops.forward(*Case(dtype=dtype, batch=1, heads=128, heads_kv=128, backend="cpu").make(0).args._replace(
            q=q, k=k, v=v, out_dtype=torch.float32))  # fmt: skip
        assert torch.equal(wide[kept], v[kept].float())
        assert out[v.isnan()].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_is_to_nearest_even(isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two equal keys out = (v1 + v2) / 2, exact in float32, must round as torch does."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    for dtype in (torch.float16, torch.bfloat16):
        v = (torch.randn(4, 8, 2, 512) * 10 ** torch.linspace(-5, 4, 512)).to(dtype)
        out = flashtile.attention(
            torch.zeros(4, 8, 1, 8, dtype=dtype), torch.zeros(4, 8, 2, 8, dtype=dtype), v, backend="cpu"
        )
        assert torch.equal(out, v.float().mean(2, keepdim=True).to(dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_nan_is_not_hidden(isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in a query affects that query only; a NaN in a key affects every query that sees it."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    q, k, v = (torch.randn(1, 1, 40, 24) for _ in range(3))
    q[0, 0, 7, 3] = torch.nan
    is_nan = flashtile.attention(q, k, v, backend="cpu").isnan().all(-1)[0, 0]
    assert is_nan.nonzero().flatten().tolist() == [7]
    k[0, 0, 30, 5] = torch.nan
    out, lse = flashtile.attention(q, k, v, causal=True, return_lse=True, backend="cpu")
    assert out.isnan().all(-1)[0, 0].tolist() == lse.isnan()[0, 0].tolist() == [i == 7 or i >= 30 for i in range(40)]


@pytest.mark.parametrize("isa", ISAS)
def test_the_dropout_bits(isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal scores and v the identity, out is the dropout mask."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    keys, rng = 203, torch.tensor([seed << 20, seed])
    q, k, v = torch.zeros(2, 3, 9, 4), torch.zeros(2, 3, keys, 4), torch.eye(keys).expand(2, 3, keys, keys)
    out = flashtile.attention(q, k, v, dropout_p=0.3, rng_state=rng, backend="cpu")
    assert torch.equal(out > 0, dropout_mask(rng, 0.3, 2, 3, 9, keys))


def bits(result: Result) -> list[torch.Tensor]:
    return [tensor for tensor in result if tensor is not None]


@pytest.mark.parametrize(
    "case", [Case(batch=3, heads=6, heads_kv=2), Case(batch=1, heads=1, heads_kv=1, bias="k", seqlen_k=700)]
)
def test_the_number_of_threads_changes_no_bit(case: Case, threads: None, seed: int) -> None:
    """Deterministic, as the tests are. The second has fewer heads than threads."""
    inputs = dataclasses.replace(case, seqlen_q=300, causal="bottom_right", has_sinks=True, backend="cpu").make(seed)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(bits(run(inputs)))
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["dense", "varlen", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_split_over_several_tasks(dtype: torch.dtype, kind: str, threads: None, seed: int) -> None:
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(4)
    case = Case(
        dtype=dtype,
        kind=kind,
        batch=1,
        heads=2,
        heads_kv=1,
        seqlen_q=100,
        seqlen_k=600,
        head_dim=21,
        bias="hqk",
        backend="cpu",
    )
    inputs = case.make(seed)
    assert_agrees(run(inputs), inputs)


@pytest.mark.parametrize("isa", ISAS)
def test_a_maximum_that_rises_with_every_tile(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 rescalings must not accumulate 500 rounding errors."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    for seed, head_dim in enumerate((64, 128)):
        case = Case(
            batch=1, seqlen_q=5, seqlen_k=64000, head_dim=head_dim, head_dim_v=head_dim, values="rising", backend="cpu"
        )
        inputs = case.make(seed)
        assert_agrees(run(inputs, has_backward=False), inputs)


def test_a_bias_broadcast_along_every_axis() -> None:
    """Its gradient is a sum of 56,160 terms that cancel: a plain float32 sum is too inaccurate."""
    options = {
        "mask": "h",
        "bias": "1",
        "alibi": "h",
        "dropout_p": 0.2,
        "causal": "top_left",
        "values": "denormal",
        "backend": "cpu",
    }
    sizes = {
        "batch": 4,
        "heads": 156,
        "heads_kv": 52,
        "seqlen_q": 10,
        "seqlen_k": 9,
        "head_dim": 160,
        "head_dim_v": 160,
    }
    inputs = Case(layout="bshd", kind="padded", memory="offset", **sizes, **options).make(48)
    ref, found = oracle(inputs).dbias, run(inputs).dbias
    assert found is not None
    assert ref is not None
    # A plain float32 sum is off by 2e-5 here
    torch.testing.assert_close(found.double(), ref, rtol=0, atol=5e-6)


def test_an_infinite_gradient_of_a_bias() -> None:
    inputs = Case(bias="k", values="tiny", backend="cpu").make(1)
    inputs.dlse[0, 0, 3] = torch.inf
    found, bias = run(inputs).dbias, inputs.args.bias
    assert found is not None
    assert bias is not None
    assert (found[bias > -torch.inf] == torch.inf).all()


def test_a_call_among_others_gives_the_same_bits(seed: int) -> None:
    """The bits of a row do not depend on the other rows of its task or batch. Many draws: few of them show a product
    that is fused with a sum in one micro-kernel and not in another."""
    for draw in range(100):
        inputs = Case(batch=3, heads=8, heads_kv=2, seqlen_q=5, seqlen_k=150, causal="bottom_right").make(seed + draw)
        q, k, v = inputs.args.q, inputs.args.k, inputs.args.v
        whole = flashtile.attention(q, k, v, causal=True, backend="cpu")
        for b, h, i in ((0, 0, 4), (2, 5, 0), (1, 3, 2)):
            mine = slice(h // 4, h // 4 + 1)
            row = flashtile.attention(
                *(q[b : b + 1, h : h + 1, i : i + 1], k[b : b + 1, mine, : 146 + i], v[b : b + 1, mine, : 146 + i]),
                backend="cpu",
            )
            assert torch.equal(row[0, 0, 0], whole[b, h, i])


def test_the_far_tail_of_a_softmax_is_zero_and_fast(seed: int) -> None:
    """Scores hundreds below the maximum, where 2^x is denormal or 0."""
    q = torch.full((1, 1, 4, 1), 1.0)
    k = -torch.arange(0.0, 400.0, 2.0)[None, None, :, None]
    v = torch.randn(1, 1, 200, 5)
    out, lse = flashtile.attention(q, k, v, scale=1.0, return_lse=True, backend="cpu")
    expected = flashtile.attention(q.double(), k.double(), v.double(), scale=1.0, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert lse.isfinite().all()


def test_only_wanted_gradients(seed: int) -> None:
    inputs = Case(bias="hqk", has_sinks=True, backend="cpu", seqlen_q=70).make(seed)
    args = inputs.args
    out, lse = ops.forward(*args)
    everything = ops.backward(inputs.dout, inputs.dlse, *args, out, lse, [True] * 5)
    for _ in range(6):
        needs = [random.random() < 0.5 for _ in range(5)]
        some = ops.backward(inputs.dout, inputs.dlse, *args, out, lse, needs)
        for is_wanted, mine, whole in zip(needs, some, everything, strict=True):
            assert torch.equal(mine, whole) if is_wanted else mine.numel() == 0


@pytest.mark.parametrize("isa", ISAS)
def test_float64_has_the_accuracy_of_float64(isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores from 0 to -800: every exponent of 2^x. A scale, a softcap and a keep factor that float32 would round."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    q = torch.full((1, 1, 30, 1), 1.0, dtype=torch.float64)
    k = -torch.linspace(0, 800, 203, dtype=torch.float64)[None, None, :, None]
    v, rng = torch.randn(1, 1, 203, 5, dtype=torch.float64), torch.tensor([seed, 0])
    options: tuple[dict, ...] = (
        {},
        {"softcap": 0.7},
        {"softcap": 1e-40},
        {"dropout_p": 0.1, "rng_state": rng},
        {"scale": 1e100},
    )
    for more in options:
        more = {"scale": 1 / 3, "return_lse": True, **more}
        found = flashtile.attention(q, k, v, backend="cpu", **more)
        expected = flashtile.attention(q, k, v, backend="reference", **more)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == torch.float64
            torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("scale", "softcap", "size"),
    [
        (2.0**-1000, 2.0**60, 2.0**1003),  # scale / softcap is subnormal
        (-(2.0**-1020), 2.0**100, 2.0**1019),  # or 0
        (2.0**-1030, 3.0, 2.0**1020),  # so is the scale
        (1.0, 2.0**-1060, 1.0),  # or the softcap
        (2.0**900, 2.0**-900, 1.0),  # their quotient is no number
        (2.0**600, 5.0, 2.0**600),  # nor is a score before the softcap
    ],
)
def test_any_softcap_and_scale_in_float64(
    scale: float, softcap: float, size: float, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    q, k, v = (torch.randn(1, 2, 5, 1, dtype=torch.float64) for _ in range(3))
    q[:, :, :, 0] *= 2.0 ** (math.log2(size) // 2)
    k[:, :, :, 0] *= size / 2.0 ** (math.log2(size) // 2)
    leaf = v.requires_grad_()
    out, lse = flashtile.attention(q, k, leaf, scale=scale, softcap=softcap, return_lse=True)
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * scale / softcap)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    weights = scores.softmax(-1)
    torch.testing.assert_close(out, weights @ v, rtol=1e-13, atol=1e-13)
    dv = torch.autograd.grad(out.sum(), leaf)[0]
    torch.testing.assert_close(dv, weights.sum(-2)[..., None], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_exp2_in_float64(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With v = (1, 0) and scores (x, 0), out / (1 - out) = e^x."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    x = -torch.linspace(0, 700, 10007, dtype=torch.float64)
    k = torch.stack([x, torch.zeros_like(x)], -1)[:, None, :, None]
    v = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1).expand(len(x), 1, 2, 1)
    q = torch.ones(len(x), 1, 1, 1, dtype=torch.float64)
    out = flashtile.attention(q, k, v, scale=1.0, backend="cpu").flatten()
    # The product with log2(e) rounds x: half a unit of the last place of up to 1010
    torch.testing.assert_close(out, x.exp() / (1 + x.exp()), rtol=1.5e-13, atol=0)
    near = slice(0, 15)  # scores above -1
    torch.testing.assert_close(out[near], x.exp()[near] / (1 + x.exp()[near]), rtol=1e-15, atol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_finite_differences(isa: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)

    def attend(*tensors: torch.Tensor) -> object:
        q, k, v, bias, sinks = tensors
        return flashtile.attention(
            q, k, v, bias=bias, sinks=sinks, softcap=1.5, causal=True, return_lse=True, backend="cpu"
        )

    shapes = ((1, 2, 5, 3), (1, 1, 7, 3), (1, 1, 7, 2), (1, 2, 1, 7), (2,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(attend, inputs)


def test_float64_with_float32_slopes_sinks_and_bias(seed: int) -> None:
    """They are converted; their gradients keep their dtype."""
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
    bias, slopes, sinks = torch.randn(1, 2, 40, 40), torch.rand(2), torch.randn(2)
    found = []
    for backend in ("cpu", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v, bias, sinks)]
        out = flashtile.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4], alibi_slopes=slopes, backend=backend)
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        tolerance = 1e-12 if mine.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_float64_is_served_without_a_warning(seed: int) -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashtile.attention(q, q, q)
    explained = flashtile.explain(q, q, q)
    assert explained.backend == "cpu"
    assert explained.details["arithmetic"] == "float64"


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CPU_ISA", "sse9")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"FLASHTILE_CPU_ISA: got 'sse9'; accepted: .*baseline"):
        flashtile.attention(q, q, q)


class Blocker:
    """Makes one import fail."""

    def __init__(self, error: Exception | None):
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "flashtile._C":
            raise self.error or ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (None, "the C\\+\\+ extension is not built"),
        (ImportError("undefined symbol: torch_parallel_for"), "does not load: undefined symbol: torch_parallel_for"),
    ],
)
def test_without_the_extension(error: Exception | None, words: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Calls fall back to `tiled`, with one warning that says why."""
    q = torch.randn(1, 1, 4, 8)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "meta_path", [Blocker(error), *sys.meta_path])
            patch.delitem(sys.modules, "flashtile._C", raising=False)
            extension._load.cache_clear()
            with pytest.warns(flashtile.SlowPathWarning, match=f"'tiled' serves this call .*'cpu' refuses: .*{words}"):
                out = flashtile.attention(q, q, q)
            with pytest.raises(flashtile.Unsupported, match=words):
                extension.cpu_forward(0)
    finally:
        extension._load.cache_clear()
    assert torch.equal(out, flashtile.attention(q, q, q, backend="tiled"))
    assert flashtile.explain(q, q, q).backend == "cpu"


def test_a_stale_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "params_bytes", lambda: 8)
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(flashtile.Unsupported, match="built from other sources"):
        flashtile.attention(q, q, q, backend="cpu")


def test_partial_sums_of_long_rows_are_scaled_together() -> None:
    """Over 128 columns a dot product has several partial sums. Divided by a tiny softcap, they are infinities of both
    signs; the whole one is not NaN."""
    q, k, v = torch.ones(1, 1, 3, 300), torch.ones(1, 1, 5, 300), torch.randn(1, 1, 5, 16)
    q[..., :128] = -1e10
    q[..., 128:] = 2e10
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = flashtile.attention(*leaves, softcap=1e-30, backend="cpu")
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))
