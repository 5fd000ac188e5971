"""The facades: exact signatures, and agreement with torch wherever both are defined."""

from __future__ import annotations

import inspect
import itertools
from contextlib import nullcontext, suppress

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import flashtile
from flashtile import facades
from flashtile.backends import native

SIGNATURES = {
    "scaled_dot_product_attention": (
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    ),
    "flash_attn_func": (
        "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
        "softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False, block_table=None"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, "
        "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(flashtile, name)).parameters.values()
    assert (
        ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)
        == SIGNATURES[name]
    )


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_flash_attn_leaves_determinism_to_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy, asked = pytest.importorskip("numpy"), []

    def attend(*tensors: torch.Tensor, deterministic: object, **options: object) -> tuple[torch.Tensor, None]:
        asked.append(deterministic)
        return tensors[0], None

    for target in ("attention", "attention_varlen"):
        monkeypatch.setattr(facades, target, attend)
    q = torch.zeros(1, 2, 1, 8)
    lengths = (q, q, 2, 2) if name == "flash_attn_varlen_func" else ()
    for value in (False, 0, None, numpy.bool_(False), True, 1):
        getattr(flashtile, name)(q, q, q, *lengths, deterministic=value)
    assert asked == [None, None, None, None, True, True]


def compare(dtype: torch.dtype, *sizes: tuple[int, ...], attn_mask: torch.Tensor | None = None, **options) -> None:
    """flashtile's facade against torch's, outputs and gradients, the mask's too."""
    q, k, v = (torch.randn(size, dtype=dtype) for size in sizes)
    results = []
    for function in (F.scaled_dot_product_attention, flashtile.scaled_dot_product_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        mask = attn_mask
        if attn_mask is not None and attn_mask.is_floating_point():
            mask = attn_mask.clone().requires_grad_()
            leaves.append(mask)
        torch.manual_seed(0)
        out = function(*leaves[:3], attn_mask=mask, **options)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        tolerance = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, 3e-2)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.*float64 is not among its dtypes:flashtile.SlowPathWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (33, 70), (70, 33), (1, 19)])
def test_plain_and_causal(rows: int, keys: int, is_causal: bool, dtype: torch.dtype, seed: int) -> None:
    compare(dtype, (2, 3, rows, 16), (2, 3, keys, 16), (2, 3, keys, 16), is_causal=is_causal)


@pytest.mark.parametrize(
    "shape", [(7, 9), (1, 9), (7, 1), (3, 7, 9), (2, 1, 7, 9), (2, 3, 7, 9), (1, 3, 1, 9)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(kind: str, shape: tuple[int, ...], seed: int) -> None:
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)
    if kind == "bool":
        mask[..., 0] = True  # torch and flashtile agree on empty rows too, but not every torch version does
    compare(torch.float32, (2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8), attn_mask=mask)


@pytest.mark.parametrize("executor", ["python", "c++"])
@pytest.mark.parametrize(
    ("shape", "lead"),
    [
        *(((7, 9), (2, 3)), ((1, 9), (2, 3)), ((7, 1), (2, 3)), ((2, 1, 7, 9), (2, 3)), ((2, 3, 1, 1), (2, 3))),
        *(((3, 7, 9), (3,)), ((7, 9), ()), ((2, 1, 3, 7, 9), (2, 2, 3))),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_is_causal_both_apply(
    kind: str, shape: tuple[int, ...], lead: tuple[int, ...], executor: str, seed: int
) -> None:
    """As on torch's CPU path; its other paths refuse it."""
    tensors = [torch.randn(*lead, rows, 8) for rows in (7, 9, 9)]
    mask = torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape)
    seen, dout = torch.ones(7, 9, dtype=torch.bool).tril(), torch.randn(*lead, 7, 8)
    results = []
    for is_ours in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, *([mask] if kind == "float" else []))]
        given = leaves[3] if kind == "float" else mask
        if is_ours:
            with native.python_only() if executor == "python" else nullcontext():
                out = flashtile.scaled_dot_product_attention(*leaves[:3], attn_mask=given, is_causal=True)
        else:
            both = given & seen if kind == "bool" else given.masked_fill(~seen, -torch.inf)
            out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=both)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    with suppress(RuntimeError), torch.no_grad():
        theirs = F.scaled_dot_product_attention(*tensors, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(results[1][0], theirs, rtol=2e-5, atol=2e-5)


def test_a_mask_and_is_causal_both_apply_in_a_graph(seed: int) -> None:
    q, k, mask = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 9, 8), torch.randn(7, 9)

    def attend(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return flashtile.scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, mask), attend(q, k, mask))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)], ids=str)
def test_leading_dimensions(lead: tuple[int, ...], seed: int) -> None:
    compare(torch.float32, (*lead, 7, 8), (*lead, 9, 8), (*lead, 9, 5))
    compare(torch.float32, (*lead, 7, 8), (*lead, 9, 8), (*lead, 9, 5), attn_mask=torch.randn(*lead, 7, 9))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((4, 3, 7, 8), (1, 3, 9, 8), (4, 3, 9, 8)),
        ((2, 1, 7, 8), (2, 4, 9, 8), (2, 4, 9, 5)),
        ((2, 4, 7, 8), (2, 1, 9, 8), (2, 1, 9, 5)),
        ((2, 4, 7, 8), (2, 4, 9, 8), (2, 1, 9, 5)),
        ((2, 4, 7, 8), (2, 1, 9, 8), (2, 4, 9, 5)),
        ((2, 1, 7, 8), (2, 1, 9, 8), (2, 4, 9, 5)),
        ((3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    ],
    ids=str,
)
def test_broadcasting(query: tuple, key: tuple, value: tuple, seed: int) -> None:
    compare(torch.float32, query, key, value)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((3, 0, 8), (3, 4, 8)),
        ((0, 8), (4, 8)),
        ((2, 2, 3, 0, 8), (2, 2, 3, 4, 8)),
        ((3, 4, 8), (3, 0, 8)),
        ((0, 2, 3, 8), (0, 2, 3, 8)),
    ],
    ids=str,
)
def test_empty(query: tuple, key: tuple) -> None:
    q, k = torch.randn(query), torch.randn(key)
    torch.testing.assert_close(
        flashtile.scaled_dot_product_attention(q, k, k), F.scaled_dot_product_attention(q, k, k).nan_to_num(0.0)
    )


@pytest.mark.parametrize(
    ("query", "key"),
    [((0, 4, 8), (0, 5, 8)), ((2, 0, 4, 8), (2, 0, 5, 8)), ((3, 2, 0, 4, 8), (3, 2, 0, 5, 8))],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_heads(query: tuple, key: tuple, is_causal: bool, seed: int) -> None:
    compare(torch.float32, query, key, (*key[:-1], 6), is_causal=is_causal)
    keys = torch.randn(*key[:-3], 2, *key[-2:])
    out = flashtile.scaled_dot_product_attention(torch.randn(query), keys, keys, enable_gqa=True)
    assert out.shape == query
    with pytest.raises(ValueError, match="value: got 0 heads; accepted: 2, as key"):
        flashtile.scaled_dot_product_attention(torch.randn(query), keys, torch.randn(key), enable_gqa=True)
    with pytest.raises(ValueError, match="key: got head_dim 7; accepted: 8, as query"):
        flashtile.scaled_dot_product_attention(torch.randn(query), keys[..., 1:], keys, enable_gqa=True)


# Memory order: out is laid out as the query is

ORDERS = list(itertools.permutations(range(3)))


def in_order(order: tuple[int, ...], *sizes: int) -> torch.Tensor:
    """A tensor of these sizes whose axes lie in memory in this order, the last one last."""
    axes = (*order, len(sizes) - 1)
    return torch.randn([sizes[axis] for axis in axes]).permute([axes.index(axis) for axis in range(len(sizes))])


@pytest.mark.parametrize("executor", ["python", "c++"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_out_has_the_memory_order_of_the_query(order: tuple[int, ...], executor: str, seed: int) -> None:
    q, k, v = in_order(order, 4, 3, 6, 8), torch.randn(4, 3, 7, 8), torch.randn(4, 3, 7, 5)
    expected = F.scaled_dot_product_attention(q, k, v)
    with native.python_only() if executor == "python" else nullcontext():
        outs = [flashtile.scaled_dot_product_attention(q, k, v) for _ in range(2)]
        outs.append(flashtile.attention(q, k, v, bias=torch.zeros(7), return_lse=True)[0])
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        outs.append(flashtile.attention(*leaves))
        (outs[-1] * torch.arange(5.0)).sum().backward()
    for out in outs:
        assert out.permute(*order, 3).is_contiguous()
        torch.testing.assert_close(out, expected)
    swapped = flashtile.attention(q, *(torch.randn(4, 7, 6, 8) for _ in range(2)), layout="bshd")
    assert swapped.permute(*order, 3).is_contiguous()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_packed_out_has_the_memory_order_of_the_query(order: tuple[int, ...], seed: int) -> None:
    q, k = in_order(order, 9, 3, 8), torch.randn(9, 3, 8)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    for _ in range(2):
        assert flashtile.attention_varlen(q, k, k, lengths, lengths).permute(*order, 2).is_contiguous()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_expanded_query_has_a_dense_out(axis: int, seed: int) -> None:
    sizes = [4, 3, 6, 8]
    sizes[axis] = 1
    q, k = torch.randn(sizes).expand(4, 3, 6, 8), torch.randn(4, 3, 7, 8)
    for _ in range(2):
        assert flashtile.attention(q, k, k).is_contiguous()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_compiled_out_has_the_memory_order_of_the_query(order: tuple[int, ...], seed: int) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: flashtile.attention(q, k, v), backend=graphs, fullgraph=True, dynamic=True)
    for batch, heads, rows in ((4, 3, 6), (5, 2, 9), (2, 7, 11)):
        q, k = in_order(order, batch, heads, rows, 8), torch.randn(batch, heads, 7, 8)
        assert compiled(q, k, k).stride() == flashtile.attention(q, k, k).stride()
    assert graphs.frame_count == 1


def test_strided_last_dimension_is_copied_as_torch_does(seed: int) -> None:
    q, k, v = (torch.randn(2, 3, 8, 8).transpose(-1, -2) for _ in range(3))
    torch.testing.assert_close(flashtile.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    flashtile.flash_attn_func(q, k, v)


def test_scale_and_gqa(seed: int) -> None:
    compare(torch.float32, (2, 6, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), enable_gqa=True, scale=0.1, is_causal=True)
    compare(torch.float32, (6, 7, 8), (2, 9, 8), (2, 9, 8), enable_gqa=True)


def test_autocast_casts_as_torch_does(seed: int) -> None:
    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = flashtile.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
        biased = flashtile.attention(q, k, v, bias=torch.randn(9, 9), window=(2, 2))
        assert biased.dtype == torch.bfloat16
        assert flashtile.attention(q.double(), k.double(), v.double(), backend="tiled").dtype == torch.float64


def test_autocast_leaves_calls_with_float64_queries_alone(seed: int) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(9, 9)
    expected = flashtile.attention(q, k, v, bias=bias)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flashtile.attention(q, k, v, bias=bias), expected)
        assert torch.equal(flashtile.scaled_dot_product_attention(q, k, v, bias), expected)
        ends = torch.tensor([0, 9], dtype=torch.int32)
        in_one = flashtile.attention_varlen(*packed, ends, ends, bias=bias)
        torch.testing.assert_close(in_one.transpose(0, 1)[None], expected)
        with pytest.raises(TypeError, match="k: got float32; accepted: float64, as q"):
            flashtile.attention(q, k.float(), v)


def test_causal_meets_in_the_corner_that_is_named(seed: int) -> None:
    q, k, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    last_sees_all = torch.ones(3, 5, dtype=torch.bool).tril(2)
    first_sees_one = torch.ones(3, 5, dtype=torch.bool).tril()
    for causal, mask in ((True, last_sees_all), ("bottom_right", last_sees_all), ("top_left", first_sees_one)):
        torch.testing.assert_close(flashtile.attention(q, k, v, causal=causal), flashtile.attention(q, k, v, mask=mask))
    torch.testing.assert_close(
        flashtile.scaled_dot_product_attention(q, k, v, is_causal=True), flashtile.attention(q, k, v, causal="top_left")
    )


def test_flash_attn_func(seed: int) -> None:
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    slopes = torch.rand(4)
    options = {"softcap": 2.0, "alibi_slopes": slopes}
    out, lse, probabilities = flashtile.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=0.2,
        causal=True,
        window_size=(3, 0),
        deterministic=True,
        return_attn_probs=True,
        **options,
    )
    expected, expected_lse = flashtile.attention(
        *(t.transpose(1, 2) for t in (q, k, v)), scale=0.2, causal=True, window=(3, -1), return_lse=True, **options
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    assert probabilities.numel() == 0
    assert isinstance(flashtile.flash_attn_func(q, k, v), torch.Tensor)


def test_flash_attn_varlen_func(seed: int) -> None:
    q, k, v = torch.randn(7, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cu_q, cu_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 5, 9], dtype=torch.int32)
    out, lse, _ = flashtile.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 7)
    for rows, keys in ((slice(0, 3), slice(0, 5)), (slice(3, 7), slice(5, 9))):
        torch.testing.assert_close(
            out[rows], flashtile.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True)[0]
        )
