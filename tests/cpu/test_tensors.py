"""What stands in for a tensor: subclasses, sparse and nested tensors, torch's CausalBias, proxies of torch.fx. Each is
served right or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.utils._pytree import tree_map_only

import flashtile
from flashtile import families
from flashtile.plans.arch import ARCHS
from flashtile.problem import AttentionArgs, Problem, is_v_in_k, shape_of

BIASES = {"upper_left": (causal_upper_left, "top_left"), "lower_right": (causal_lower_right, "bottom_right")}


def qkv(*sizes: int, rows: int = 5, keys: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lead = sizes or (2, 3)
    return torch.randn(*lead, rows, 8), torch.randn(*lead, keys, 8), torch.randn(*lead, keys, 8)


def causal_mask(bias: CausalBias) -> torch.Tensor:
    shift = bias.seq_len_kv - bias.seq_len_q if bias.variant.name == "LOWER_RIGHT" else 0
    return torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool).tril(shift)


# torch's CausalBias, whose memory holds nothing


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", BIASES)
def test_causal_bias_in_the_facade(kind: str, lead: tuple[int, ...], seed: int) -> None:
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 8)
    bias = BIASES[kind][0](5, 7)
    ours = flashtile.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert type(ours) is torch.Tensor
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(bias)))


@pytest.mark.parametrize("argument", ["mask", "bias"])
@pytest.mark.parametrize("kind", BIASES)
def test_causal_bias_is_causal(kind: str, argument: str, seed: int) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    make, corner = BIASES[kind]
    results = []
    for options in ({argument: make(5, 7)}, {"causal": corner}):
        out = flashtile.attention(q, k, v, **options)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    assert flashtile.explain(q, k, v, **{argument: make(5, 7)}).problem.causal == corner


@pytest.mark.parametrize("argument", ["mask", "bias"])
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("options", [{"window": (2, 1)}, {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0])}], ids=str)
def test_causal_bias_moves_no_other_option(options: dict, kind: str, argument: str, seed: int) -> None:
    q, k, v = qkv()
    bias = BIASES[kind][0](5, 7)
    torch.testing.assert_close(
        flashtile.attention(q, k, v, **{argument: bias}, **options),
        flashtile.attention(q, k, v, mask=causal_mask(bias), **options),
    )


def test_causal_bias_beside_a_tensor(seed: int) -> None:
    q, k, v = qkv()
    bias, mask = causal_upper_left(5, 7), torch.rand(5, 7) < 0.6
    torch.testing.assert_close(
        flashtile.attention(q, k, v, bias=bias, mask=mask, window=(3, 3)),
        flashtile.attention(q, k, v, mask=mask & causal_mask(bias), window=(3, 3)),
    )


@pytest.mark.parametrize("kind", BIASES)
def test_causal_bias_of_packed_sequences(kind: str, seed: int) -> None:
    q, k, v = torch.randn(9, 3, 8), torch.randn(11, 3, 8), torch.randn(11, 3, 8)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 7, 11], dtype=torch.int32)
    bias = BIASES[kind][0](5, 7)
    torch.testing.assert_close(
        flashtile.attention_varlen(q, k, v, *lengths, mask=bias),
        flashtile.attention_varlen(q, k, v, *lengths, mask=causal_mask(bias)),
    )


def test_causal_bias_under_autocast(seed: int) -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = flashtile.attention(q, k, v, bias=causal_lower_right(5, 7))
        assert torch.equal(ours, flashtile.attention(q, k, v, causal=True))


def test_causal_bias_is_compiled(seed: int) -> None:
    q, k, v = qkv()
    bias = causal_lower_right(5, 7)
    compiled = torch.compile(lambda *args: flashtile.scaled_dot_product_attention(*args, bias), backend="eager")
    torch.testing.assert_close(compiled(q, k, v), flashtile.attention(q, k, v, causal=True))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda q, k, v: flashtile.attention(q, k, v, mask=causal_upper_left(5, 6)),
            r"mask: got a CausalBias of shape \(5, 6\); accepted: \(5, 7\), the numbers of queries and keys\.",
        ),
        (
            lambda q, k, v: flashtile.scaled_dot_product_attention(q, k, v, causal_lower_right(4, 7)),
            r"attn_mask: got a CausalBias of shape \(4, 7\); accepted: \(5, 7\)",
        ),
        (
            lambda q, k, v: flashtile.attention(q, k, v, causal=True, bias=causal_upper_left(5, 7)),
            "bias: got a CausalBias with causal=True; accepted: one of the two",
        ),
        (
            lambda q, k, v: flashtile.attention(q, k, v, mask=causal_upper_left(5, 7), bias=causal_upper_left(5, 7)),
            "bias: got a CausalBias beside one as mask; accepted: one of the two",
        ),
        (
            lambda q, k, v: flashtile.scaled_dot_product_attention(q, k, v, causal_upper_left(5, 7), is_causal=True),
            "attn_mask: got a CausalBias with is_causal=True; accepted: one of the two",
        ),
    ],
)
def test_causal_bias_that_does_not_fit(call: Callable, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        call(*qkv())


# Subclasses


class Named(torch.Tensor):
    """Holds its values, as torch.nn.Parameter does."""


class Hidden(torch.Tensor):
    """Holds something else, and says so to torch's functions alone."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Has no memory; torch's dispatcher calls it in place of every kernel."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(Wrapper, lambda tensor: tensor.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*plain[0], **plain[1]))


@pytest.mark.parametrize("kind", [Named, torch.nn.Parameter])
def test_a_subclass_that_holds_its_values(kind: type, seed: int) -> None:
    q, k, v = qkv()
    expected = flashtile.attention(q, k, v)
    given = [torch.nn.Parameter(t) if kind is torch.nn.Parameter else t.as_subclass(kind) for t in (q, k, v)]
    for function in (flashtile.attention, flashtile.scaled_dot_product_attention):
        assert torch.equal(function(*given).as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("wrapped", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_a_subclass_that_the_dispatcher_calls(wrapped: tuple[int, ...], seed: int) -> None:
    tensors = qkv()
    given = [Wrapper(tensor) if index in wrapped else tensor for index, tensor in enumerate(tensors)]
    mask, bias = torch.rand(5, 7) < 0.7, torch.randn(5, 7)
    for options in ({}, {"causal": True}, {"mask": mask, "bias": bias}):
        out = flashtile.attention(*given, **options)
        assert isinstance(out, Wrapper)
        assert torch.equal(out.inner, flashtile.attention(*tensors, **options))
    assert torch.equal(flashtile.scaled_dot_product_attention(*given).inner, flashtile.attention(*tensors))
    biased = flashtile.attention(*tensors, mask=Wrapper(mask), bias=Wrapper(bias))
    assert torch.equal(biased.inner, flashtile.attention(*tensors, mask=mask, bias=bias))


def hidden(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(sizes, dtype=dtype).as_subclass(Hidden)


INT = torch.int32
NAMES = ["q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "rng_state"]
SCORES = {"mask": hidden(5, 7, dtype=torch.bool), "bias": hidden(5, 7), "alibi_slopes": hidden(3), "sinks": hidden(3)}


@pytest.mark.parametrize("name", NAMES)
def test_a_subclass_that_hides_its_values_is_refused(name: str) -> None:
    given = dict(zip("qkv", qkv(), strict=True))
    other = {**SCORES, "rng_state": hidden(2, dtype=torch.int64)}
    given[name] = given[name].as_subclass(Hidden) if name in given else other[name]
    text = rf"^{name}: got a tensor of the subclass \S*Hidden, whose memory may not hold its values; accepted: "
    for function in (flashtile.attention, flashtile.explain):
        with pytest.raises(flashtile.Unsupported, match=text):
            function(**given)
    if name in ("q", "k", "v"):
        with pytest.raises(flashtile.Unsupported, match="of the subclass"):
            flashtile.scaled_dot_product_attention(*given.values())
        with pytest.raises(flashtile.Unsupported, match="of the subclass"):
            flashtile.flash_attn_func(*given.values())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"])
def test_a_hidden_index_is_refused(name: str) -> None:
    q, pages = torch.randn(5, 3, 8), torch.randn(4, 8, 3, 8)
    given = {"cu_seqlens_q": torch.tensor([0, 5], dtype=INT), "cu_seqlens_k": torch.tensor([0, 5], dtype=INT)}
    given |= {"seqused_k": torch.tensor([5], dtype=INT), "block_table": torch.tensor([[0]], dtype=INT)}
    given[name] = given[name].as_subclass(Hidden)
    with pytest.raises(flashtile.Unsupported, match=f"^{name}: got a tensor of the subclass"):
        flashtile.attention_varlen(q, pages, pages, **given)


@pytest.mark.parametrize(
    "name", ["k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_leftpad", "rotary_cos", "rotary_sin"]
)
def test_a_hidden_tensor_of_the_cache_is_refused(name: str) -> None:
    given = {"k_cache": torch.zeros(1, 8, 2, 8), "v_cache": torch.zeros(1, 8, 2, 8)}
    given |= {"k": torch.ones(1, 1, 2, 8), "v": torch.ones(1, 1, 2, 8), "cache_seqlens": torch.tensor([3], dtype=INT)}
    given |= {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.zeros(8, 4)}
    given |= {"cache_leftpad": torch.tensor([1], dtype=INT)}
    given[name] = given[name].as_subclass(Hidden)
    with pytest.raises(flashtile.Unsupported, match=f"^{name}: got a tensor of the subclass"):
        flashtile.attention_kvcache(torch.randn(1, 1, 2, 8), **given)
    assert not torch.count_nonzero(given["k_cache"].as_subclass(torch.Tensor))


# Tensors without strides

WITHOUT_STRIDES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse_coo": (lambda tensor: tensor.to_sparse(), r"a tensor of layout sparse_coo; .* Call {}\.to_dense\(\)\."),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), r"a tensor of layout mkldnn; .* Call {}\.to_dense\(\)\."),
    "jagged": (
        lambda tensor: torch.nested.nested_tensor([*tensor.transpose(1, 2)], layout=torch.jagged).transpose(1, 2),
        r"a nested tensor; .* Pass its values\(\) and its offsets\(\)\.int\(\) to attention_varlen\.",
    ),
    "nested": (lambda tensor: torch.nested.nested_tensor([*tensor]), "a nested tensor; .* attention_varlen"),
    "quantized": (
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        r"a quantized tensor \(torch.qint8\); .* Call {}\.dequantize\(\)\.",
    ),
}


@pytest.mark.parametrize("is_whole", [True, False], ids=["all", "one"])
@pytest.mark.parametrize("kind", WITHOUT_STRIDES)
@pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning", "ignore:.*quantize.*")
def test_tensors_without_strides_are_refused(kind: str, is_whole: bool) -> None:
    make, text = WITHOUT_STRIDES[kind]
    tensors = qkv()
    given = [make(tensor) if is_whole or index == 1 else tensor for index, tensor in enumerate(tensors)]
    name, sdpa_name = ("q", "query") if is_whole else ("k", "key")
    for options in ({}, {"window": (2, 2)}):
        with pytest.raises(flashtile.Unsupported, match=f"^{name}: got {text.format(name)}"):
            flashtile.attention(*given, **options)
    if kind == "jagged" and is_whole:
        return  # served: test_nested.py
    with pytest.raises(flashtile.Unsupported, match=f"^{sdpa_name}: got {text.format(sdpa_name)}"):
        flashtile.scaled_dot_product_attention(*given)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_masks_are_refused() -> None:
    q, k, v = qkv()
    mask = torch.ones(5, 7, dtype=torch.bool)
    for name, sparse in (("mask", mask.to_sparse()), ("bias", mask.float().to_sparse_csr())):
        with pytest.raises(flashtile.Unsupported, match=rf"^{name}: got a tensor of layout sparse.* Call {name}"):
            flashtile.attention(q, k, v, **{name: sparse})
        with pytest.raises(flashtile.Unsupported, match=r"^attn_mask: got a tensor of layout sparse"):
            flashtile.scaled_dot_product_attention(q, k, v, sparse)


def test_the_way_out_of_a_jagged_tensor(seed: int) -> None:
    parts = [torch.randn(rows, 3, 8) for rows in (4, 2)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    values, offsets = jagged.values(), jagged.offsets().int()
    out = flashtile.attention_varlen(values, values, values, offsets, offsets)
    for part, rows in zip(parts, (slice(0, 4), slice(4, 6)), strict=True):
        torch.testing.assert_close(out[rows], flashtile.attention(part[None], part[None], part[None], layout="bshd")[0])


# torch.fx


class Block(torch.nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.call(q, k, v)


FX_CALLS: dict[str, Callable] = {
    "attention": lambda q, k, v: flashtile.attention(q, k, v, causal=True, softcap=2.0),
    "mask": lambda q, k, v: flashtile.attention(torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), v, bias=q @ k.mT),
    "attention_varlen": lambda q, k, v: flashtile.attention_varlen(
        q[0], k[0], v[0], torch.tensor([0, 5], dtype=INT), torch.tensor([0, 7], dtype=INT), layout="bhsd"
    ),
    "attention_kvcache": lambda q, k, v: flashtile.attention_kvcache(q, k, v, cache_seqlens=4, layout="bhsd"),
    "scaled_dot_product_attention": lambda q, k, v: flashtile.scaled_dot_product_attention(q, k, v, is_causal=True),
    "flash_attn_func": lambda q, k, v: flashtile.flash_attn_func(q, k[:, :, :5], v[:, :, :5]),
    "flash_attn_with_kvcache": lambda q, k, v: flashtile.flash_attn_with_kvcache(
        q, k[:, :, :5], v[:, :, :5], cache_seqlens=2
    ),
}


@pytest.mark.parametrize("name", FX_CALLS)
def test_symbolic_trace_records_a_call(name: str, seed: int) -> None:
    q, k, v = qkv()
    traced = torch.fx.symbolic_trace(Block(FX_CALLS[name]))
    if name not in ("mask",):
        function = getattr(flashtile, name)
        assert [node.target for node in traced.graph.nodes if node.target is function] == [function]
    assert torch.equal(traced(q, k, v), FX_CALLS[name](q, k, v))


def test_the_strides_of_an_empty_tensor_say_nothing() -> None:
    """NumPy gives empty arrays strides of 0; torch calls them contiguous."""
    q = torch.zeros(0, 2, 3, 4).as_strided((0, 2, 3, 4), (0, 0, 0, 0))
    k = torch.zeros(0, 2, 5, 4)
    assert flashtile.attention(q, k, k).shape == (0, 2, 3, 4)


# Values that lie in the keys, as in latent attention


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_values_that_lie_in_the_keys(backend: str, layout: str, seed: int) -> None:
    options = {"causal": True, "backend": backend, "layout": layout, "deterministic": True}
    q, k = torch.randn(2, 6, 6, 40, requires_grad=True), torch.randn(2, 6, 6, 40, requires_grad=True)
    out = flashtile.attention(q, k, k[..., :24], **options)
    own = k.detach()[..., :24].clone().requires_grad_()
    apart = flashtile.attention(q, k, own, **options)
    assert torch.equal(out, apart)
    dout = torch.randn_like(out)
    dq, dk = torch.autograd.grad(out, (q, k), dout)
    others = torch.autograd.grad(apart, (q, k, own), dout)
    assert torch.equal(dq, others[0])
    assert torch.equal(dk, others[1] + torch.nn.functional.pad(others[2], (0, 16)))


@pytest.mark.parametrize(
    ("expected", "values"),
    [
        (True, lambda k: k),
        (True, lambda k: k[..., :24]),
        (True, lambda k: k.view(-1).as_strided((1, 3, 6, 24), (5, 240, 40, 1))),  # along an axis of length 1
        (False, lambda k: k[..., :24].clone()),
        (False, lambda k: k[..., 1:25]),
        (False, lambda k: k.view(torch.bfloat16)[..., :24]),
        (False, lambda k: k.view(-1).as_strided((1, 3, 6, 24), (720, 40, 120, 1))),
        (False, lambda k: k.view(1, 6, 3, 40)),
        (False, lambda k: torch.empty_like(k, device="meta")),
    ],
    ids=["k", "columns", "odd stride", "copy", "later columns", "dtype", "swapped", "sizes", "meta"],
)
def test_whether_values_lie_in_the_keys(expected: bool, values: Callable[[Any], Any]) -> None:
    k = torch.randn(1, 3, 6, 40)
    assert is_v_in_k(k, values(k)) == expected
    assert not is_v_in_k(k[..., :24], k)  # v is wider


def test_a_problem_says_each_dtype() -> None:
    q = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    args = AttentionArgs(q, q.to(torch.float8_e4m3fn), q.half())
    problem = Problem.summary(args, shape_of(args))
    assert (problem.dtype, problem.k_dtype, problem.v_dtype) == (torch.bfloat16, torch.float8_e4m3fn, torch.float16)
    key = families.key_of(problem, None, ARCHS[90], 132)
    assert (key.dtype, key.k_dtype, key.v_dtype, key.mixed) == ("bfloat16", "float8_e4m3fn", "float16", ("k", "v"))
    same = families.key_of(Problem.of(AttentionArgs(q, q, q)), None, ARCHS[90], 132)
    assert (same.k_dtype, same.v_dtype, same.mixed, same.is_v_in_k) == (None, None, (), True)
