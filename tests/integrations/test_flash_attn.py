"""The names of the flash_attn package: every function against flashtile.attention on the unpacked, unpadded call."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interfaces import apart, outline, outline_of_source, recorded
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import flashtile
from flashtile.integrations import flash_attn as ours
from flashtile.integrations.flash_attn import cute, fa3
from flashtile.integrations.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flashtile.integrations.flash_attn.mha import MHA, get_alibi_slopes
from flashtile.integrations.flash_attn.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_

LENGTHS, HEADS, HEADS_KV, DIM = (5, 0, 9, 3), 4, 2, 16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def dense(rows: int = 7, keys: int = 9) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, rows, HEADS, DIM), torch.randn(2, keys, HEADS_KV, DIM), torch.randn(2, keys, HEADS_KV, DIM)


def packed() -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)  # int64
    heads = (HEADS, HEADS_KV, HEADS_KV)
    return tuple(torch.randn(sum(LENGTHS), n, DIM) for n in heads), cu_seqlens


# Functions


def test_packed_arguments_and_their_gradients() -> None:
    qkv = torch.randn(2, 7, 3, HEADS, DIM, requires_grad=True)
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (4, 0), "softcap": 2.0}
    out = ours.flash_attn_qkvpacked_func(qkv, 0.0, **options)
    expected = flashtile.flash_attn_func(*qkv.unbind(2), **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), qkv)[0] for x in (out, expected)))
    q, k, v = dense()
    kv = torch.stack([k, v], 2)
    torch.testing.assert_close(ours.flash_attn_kvpacked_func(q, kv), flashtile.flash_attn_func(q, k, v))
    out, lse, probabilities = ours.flash_attn_kvpacked_func(q, kv, return_attn_probs=True)
    assert (lse.shape, probabilities.numel()) == ((2, HEADS, 7), 0)


def test_packed_arguments_of_sequences() -> None:
    (q, k, v), cu_seqlens = packed()
    lengths = (cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS))
    expected = flashtile.attention_varlen(q, k, v, *(x.int() for x in lengths[:2]), causal=True)
    kv = torch.stack([k, v], 1)
    torch.testing.assert_close(ours.flash_attn_varlen_kvpacked_func(q, kv, *lengths, causal=True), expected)
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, DIM)
    torch.testing.assert_close(
        ours.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max(LENGTHS), 0.0, 0.2),
        flashtile.attention_varlen(*qkv.unbind(1), cu_seqlens.int(), cu_seqlens.int(), scale=0.2),
    )
    with pytest.raises(ValueError, match=r"qkv: got .* accepted: 4 dimensions, the third from the end of size 3"):
        ours.flash_attn_varlen_qkvpacked_func(kv, cu_seqlens, 9)


def test_sinks_and_lse() -> None:
    q, k, v = dense()
    sinks = torch.randn(HEADS, requires_grad=True)
    expected, expected_lse = flashtile.attention(q, k, v, sinks=sinks, causal=True, return_lse=True, layout="bshd")
    for name in ("s_aux", "learnable_sink"):
        out, lse = ours.flash_attn_func(q, k, v, causal=True, return_lse=True, **{name: sinks})
        torch.testing.assert_close((out, lse), (expected, expected_lse))
    out, lse = cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks, return_lse=True)
    torch.testing.assert_close((out, lse), (expected, expected_lse))
    assert cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)[1] is None
    assert torch.autograd.grad(out.sum(), sinks)[0].abs().max() > 0
    with pytest.raises(ValueError, match="s_aux: got it with learnable_sink; accepted: one of the two"):
        ours.flash_attn_func(q, k, v, s_aux=sinks, learnable_sink=sinks)


@pytest.mark.parametrize("function", [ours.flash_attn_func, fa3.flash_attn_func, cute.flash_attn_func])
def test_half_open_windows(function: Any) -> None:
    q, k, v = dense()
    expected = flashtile.attention(q, k, v, window=(3, -1), layout="bshd")
    for window in ((3, None), torch.tensor([3, -1])):
        out = function(q, k, v, window_size=window)
        torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, expected)


def test_pages_and_lengths_of_every_version() -> None:
    pages_k, pages_v = torch.randn(6, 8, HEADS_KV, DIM), torch.randn(6, 8, HEADS_KV, DIM)
    table, used = torch.tensor([[4, 1], [0, 3]]), torch.tensor([11, 6])
    q = torch.randn(5, HEADS, DIM)
    cu_seqlens_q, cu_seqlens_k = torch.tensor([0, 2, 5]), torch.tensor([0, 16, 32])
    given = (q, pages_k, pages_v, cu_seqlens_q, cu_seqlens_k, 3, 16)
    expected = flashtile.attention_varlen(
        *given[:3], cu_seqlens_q.int(), None, seqused_k=used.int(), block_table=table.int(), causal=True
    )
    for name in ("block_table", "page_table"):
        out = ours.flash_attn_varlen_func(*given[:4], None, 3, 16, causal=True, seqused_k=used, **{name: table})
        torch.testing.assert_close(out, expected)
    names = ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")
    lengths = dict(zip(names, (cu_seqlens_q, 3, 16), strict=True))
    out = cute.flash_attn_varlen_func(*given[:3], **lengths, seqused_k=used, page_table=table, causal=True)[0]
    torch.testing.assert_close(out, expected)
    queries = torch.randn(2, 1, HEADS, DIM)
    expected = flashtile.flash_attn_with_kvcache(
        queries, pages_k, pages_v, cache_seqlens=used.int(), block_table=table.int()
    )
    for function, name in ((ours.flash_attn_with_kvcache, "block_table"), (fa3.flash_attn_with_kvcache, "page_table")):
        out = function(queries, pages_k, pages_v, cache_seqlens=used, **{name: table}, num_splits=2, pack_gqa=True)
        torch.testing.assert_close(out, expected)


def test_version_3() -> None:
    (q, k, v), cu_seqlens = packed()
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, 9, 9, causal=True, num_splits=4, sm_margin=8, return_attn_probs=True
    )
    expected = ours.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 9, 9, causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
    q, k, v = dense(7, 7)
    mixed = torch.cat([q, k, v], 2)
    torch.testing.assert_close(
        fa3.flash_attn_qkvpacked_func(mixed, num_heads_q=HEADS), flashtile.flash_attn_func(q, k, v)
    )
    for refused in ({"qv": q}, {"k_descale": torch.ones(1)}, {"attention_chunk": 64}):
        with pytest.raises(flashtile.Unsupported, match=f"{next(iter(refused))}: got .*; accepted: None"):
            fa3.flash_attn_func(q, k, v, **refused)
    with pytest.raises(flashtile.Unsupported, match="mask_mod: got"):
        cute.flash_attn_func(q, k, v, mask_mod=lambda *_: True)


def test_first_arguments_are_those_of_the_facades() -> None:
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        positional = [
            [p.name for p in inspect.signature(f).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            for f in (getattr(ours, name), getattr(flashtile, name))
        ]
        assert positional[0] == positional[1]


def test_the_arguments_are_version_4s() -> None:
    for name, parameters in recorded("flash-attn-4-4.0.0b36").items():
        assert outline(getattr(cute, name)).partition(", *")[0] == parameters


def test_the_recorded_arguments_are_the_packages() -> None:
    source = apart("flash_attn/cute/interface.py")
    for name, parameters in recorded("flash-attn-4-4.0.0b36").items():
        assert outline_of_source(source, name) == parameters


@pytest.mark.parametrize(("fork", "module"), [("vllm-flash-attention-03ef28b", ours), ("sglang-kernel-0.4.10", fa3)])
def test_calls_of_forks(fork: str, module: Any) -> None:
    """Every argument of the fork, by its name and with its default."""
    (q, k, v), cu_seqlens = packed()
    queries, keys, values = dense()
    lengths = {"max_seqlen_q": 9, "cu_seqlens_q": cu_seqlens, "max_seqlen_k": 9}
    given = {"q": q, "k": k, "v": v, **lengths, "k_cache": keys, "v_cache": values}
    for name, parameters in recorded(fork).items():
        is_packed = name == "flash_attn_varlen_func"
        required = {x: given[x] for x in parameters["required"] if x in given}
        defaults = parameters["defaults"] | ({"cu_seqlens_k": cu_seqlens} if is_packed else {})
        required |= {} if is_packed else {"q": queries}
        expected = getattr(module, name)(**required, **({"cu_seqlens_k": cu_seqlens} if is_packed else {}))
        assert torch.equal(getattr(module, name)(**{**required, **defaults}), expected)
        out = torch.full_like(expected, torch.nan)
        again, lse = getattr(module, name)(**{**required, **defaults, "out": out, "return_softmax_lse": True})
        assert again is out
        assert torch.equal(out, expected)
        assert lse.shape[-1] == required["q"].shape[-3]
        for refused in ("q_descale", "k_descale", "v_descale", "q_v", "qv", "only_qv", "score_mod", "cp_tot_seqused_k"):
            if refused in parameters["defaults"]:
                with pytest.raises(flashtile.Unsupported, match=f"{refused}: got Tensor; accepted: None"):
                    getattr(module, name)(**{**required, **defaults, refused: torch.ones(1)})
    if module is ours:
        with pytest.raises(flashtile.Unsupported, match=r"cp_world_size: got 2 \(int\); accepted: 1"):
            ours.flash_attn_varlen_func(q, k, v, **lengths, cu_seqlens_k=cu_seqlens, cp_world_size=2)


@pytest.mark.parametrize("module", [ours, fa3, cute], ids=lambda module: module.__name__.rpartition(".")[2])
def test_results_written_into_out(module: Any) -> None:
    (q, k, v), cu_seqlens = packed()
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": 9, "max_seqlen_k": 9}
    for name, inputs, options in (
        ("flash_attn_func", dense(), {}),
        ("flash_attn_varlen_func", (q, k, v), lengths),
    ):
        function = getattr(module, name)
        expected = function(*inputs, **options, causal=True)
        whole = torch.full((*inputs[0].shape[:-1], 2 * DIM), torch.nan)
        out = whole[..., ::2]  # as a part of something larger
        found = function(*inputs, **options, causal=True, out=out)
        first = (lambda x: x[0]) if module is cute else (lambda x: x)
        assert first(found) is out
        assert torch.equal(out, first(expected))
        assert whole[..., 1::2].isnan().all()
        with pytest.raises(ValueError, match=r"out: got shape .*; accepted: shape .* \(float32 on .*\), as the result"):
            function(*inputs, **options, out=out.half())
        leaf = inputs[0].clone().requires_grad_()
        with pytest.raises(flashtile.Unsupported, match=r"out: got a tensor, with inputs that require grad; .*no_grad"):
            function(leaf, *inputs[1:], **options, out=out)
        with pytest.raises(flashtile.Unsupported, match="out: got a tensor, with inputs that require grad"):
            function(*inputs, **options, out=torch.empty_like(out).requires_grad_())
        with pytest.raises(TypeError, match="out: got"):
            function(*inputs, **options, out=3)
        with pytest.raises(ValueError, match=r"out: got .*; accepted: memory of its own for every element"):
            function(
                *inputs, **options, out=out[:1].expand(out.shape) if len(out) > 1 else out[:, :1].expand(out.shape)
            )
        with torch.no_grad():
            assert first(function(leaf, *inputs[1:], **options, out=out)) is out


def test_sinks_of_forks() -> None:
    q, k, v = dense()
    sinks = torch.randn(HEADS)
    expected = ours.flash_attn_func(q, k, v, s_aux=sinks)
    torch.testing.assert_close(fa3.flash_attn_func(q, k, v, sinks=sinks), expected)
    (q, k, v), cu_seqlens = packed()
    expected = ours.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 9, 9, s_aux=sinks)
    torch.testing.assert_close(fa3.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 9, 9, sinks=sinks), expected)


def test_packed_queries_over_a_cache() -> None:
    """As SGLang calls it: queries of several lengths, no new keys."""
    keys, values = torch.randn(3, 12, HEADS_KV, DIM), torch.randn(3, 12, HEADS_KV, DIM)
    lengths, used = [2, 1, 4], torch.tensor([7, 3, 12], dtype=torch.int32)
    q = torch.randn(sum(lengths), HEADS, DIM)
    cu_seqlens_q = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": 4, "causal": True}
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    table = torch.tensor([[5, 0, 4], [3, 1, 2], [8, 6, 7]], dtype=torch.int32)  # pages of 4 rows
    pages_k, pages_v = (x.view(9, 4, HEADS_KV, DIM) for x in (keys, values))
    for options, places in (
        ({"cache_seqlens": used}, range(3)),
        ({"cache_seqlens": used, "cache_batch_idx": rows}, rows.tolist()),
        ({}, range(3)),
        ({"cache_seqlens": 5}, range(3)),
    ):
        out, lse = fa3.flash_attn_with_kvcache(q, keys, values, **given, **options, return_softmax_lse=True)
        ends = options.get("cache_seqlens", 12)
        ends = [int(x) for x in ends] if isinstance(ends, torch.Tensor) else [ends] * 3
        parts = (x.split(lengths, dim) for x, dim in ((q, 0), (out, 0), (lse, 1)))
        for own_q, own_out, own_lse, row, end in zip(*parts, places, ends, strict=True):
            one = (own_q, keys[row, :end], values[row, :end])
            expected = ours.flash_attn_func(*(x[None] for x in one), causal=True, return_lse=True)
            torch.testing.assert_close((own_out[None], own_lse[None]), expected)
    out = fa3.flash_attn_with_kvcache(q, pages_k, pages_v, **given, cache_seqlens=used, page_table=table)
    gathered = [x[table.long()].flatten(1, 2) for x in (pages_k, pages_v)]
    torch.testing.assert_close(out, fa3.flash_attn_with_kvcache(q, *gathered, **given, cache_seqlens=used))
    with pytest.raises(flashtile.Unsupported, match="k: got Tensor; accepted: None"):
        fa3.flash_attn_with_kvcache(q, keys, values, q, q, **given, cache_seqlens=used)
    with pytest.raises(ValueError, match="cache_batch_idx: got it with page_table; accepted: one of the two"):
        fa3.flash_attn_with_kvcache(q, pages_k, pages_v, **given, page_table=table, cache_batch_idx=rows)


def test_gathered_keys_are_refused() -> None:
    """flash_attn's own functions take their options with gather_kv_indices alone, too."""
    q, k, v = dense()
    for refused in ({"gather_bwd_recompute_p": True}, {"gather_bwd_token_chunk": 64}):
        with pytest.raises(flashtile.Unsupported, match=f"{next(iter(refused))}: got .*; accepted: None"):
            cute.flash_attn_func(q, k, v, **refused)


def test_compiled() -> None:
    torch._dynamo.reset()
    qkv = torch.randn(2, 7, 3, HEADS, DIM)
    function = torch.compile(ours.flash_attn_qkvpacked_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(function(qkv, causal=True), ours.flash_attn_qkvpacked_func(qkv, causal=True))


# bert_padding


def test_padding_there_and_back() -> None:
    states = torch.randn(4, 9, 6, requires_grad=True)
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    rows, indices, cu_seqlens, longest, used = unpad_input(states, mask)
    assert torch.equal(rows, states[mask])
    assert torch.equal(cu_seqlens, torch.tensor([0, 5, 5, 14, 17], dtype=torch.int32))
    assert (longest, used.tolist()) == (9, list(LENGTHS))
    back = pad_input(rows * 2, indices, 4, 9)
    assert torch.equal(back, torch.where(mask[..., None], states * 2, 0.0))
    assert torch.equal(index_first_axis(states.flatten(0, 1), indices), rows)
    (grad,) = torch.autograd.grad(back.sum(), states)
    assert torch.equal(grad, 2.0 * mask[..., None].expand(4, 9, 6))
    unused = (torch.arange(9) == 8).expand(4, 9) & ~mask
    rows, _, cu_seqlens, longest, used = unpad_input(states, mask, unused)
    assert rows.shape[0] == cu_seqlens[-1] == sum(LENGTHS) + 3
    assert used.tolist() == list(LENGTHS)


# Rotary embedding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, DIM])
def test_rotary_embedding(rotary_dim: int, interleaved: bool) -> None:
    """Pairs of columns are complex numbers, multiplied by exp(i * angle)."""
    x = torch.randn(2, 7, HEADS, DIM, requires_grad=True)
    angles = torch.randn(20, rotary_dim // 2)
    offsets = torch.tensor([3, 11])
    out = apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=offsets)
    first = x[..., :rotary_dim]
    pairs = first.unflatten(-1, (-1, 2)) if interleaved else first.unflatten(-1, (2, -1)).transpose(-1, -2)
    turn = torch.polar(torch.ones(()), angles[torch.arange(7) + offsets[:, None]])[:, :, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    expected = torch.cat([turned, x[..., rotary_dim:]], -1)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, expected)))
    copy = x.detach().clone()
    assert apply_rotary_emb(copy, angles.cos(), angles.sin(), interleaved, True, offsets) is copy
    torch.testing.assert_close(copy, expected)


def test_rotary_embedding_of_packed_sequences() -> None:
    cu_seqlens = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x, angles = torch.randn(sum(LENGTHS), HEADS, DIM), torch.randn(16, DIM // 2)
    offsets = torch.tensor([0, 2, 5, 7])
    out = apply_rotary_emb(x, angles.cos(), angles.sin(), cu_seqlens=cu_seqlens, seqlen_offsets=offsets, max_seqlen=9)
    for index, rows in enumerate(x.split(LENGTHS)):
        alone = apply_rotary_emb(rows[None], angles.cos(), angles.sin(), seqlen_offsets=int(offsets[index]))[0]
        torch.testing.assert_close(out[cu_seqlens[index] : cu_seqlens[index + 1]], alone)


def test_rotary_module_against_llama() -> None:
    rotary = RotaryEmbedding(DIM, base=500.0)
    q, k, v = (torch.randn(2, 7, HEADS, DIM) for _ in range(3))
    angles = torch.outer(torch.arange(4.0, 11.0), rotary.inv_freq).repeat(1, 2)[None]
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())
    qkv = torch.stack([q, k, v], 2)
    assert rotary(qkv, seqlen_offset=4) is qkv
    for index, part in enumerate(expected):
        torch.testing.assert_close(qkv[:, :, index], part.transpose(1, 2))
    assert torch.equal(qkv[:, :, 2], v)
    kv = torch.stack([k, v], 2)
    turned_q, turned_kv = rotary(q.clone(), kv, seqlen_offset=torch.tensor([4, 4]), max_seqlen=11)
    torch.testing.assert_close(turned_q, qkv[:, :, 0])
    torch.testing.assert_close(turned_kv, qkv[:, :, 1:])
    mixed = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    apply_rotary_emb_qkv_(mixed, *rotary.tables(11, q.device, q.dtype)[:2], seqlen_offsets=4, num_heads_q=HEADS)
    torch.testing.assert_close(mixed[:, :, : HEADS + 2], torch.cat([qkv[:, :, 0], qkv[:, :, 1, :2]], 2))


def test_xpos_keeps_products_of_equal_distance() -> None:
    rotary = RotaryEmbedding(DIM, scale_base=32.0)
    q, k = torch.randn(DIM).expand(1, 9, 1, DIM), torch.randn(DIM).expand(1, 9, 1, DIM)
    turned = rotary(torch.stack([q, k, k], 2))
    scores = turned[0, :, 0, 0] @ turned[0, :, 1, 0].T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


# MHA


@pytest.mark.parametrize("options", [{}, {"num_heads_kv": 2}, {"use_alibi": True}, {"window_size": (3, 0)}], ids=str)
@pytest.mark.parametrize("rotary", [0, 8])
def test_mha_in_all_its_ways(rotary: int, options: dict[str, Any]) -> None:
    module = MHA(32, 4, causal=True, layer_idx=0, rotary_emb_dim=rotary, **options)
    x = torch.randn(2, 9, 32)
    whole = module(x)
    # One sequence after the other in packed rows
    cu_seqlens = torch.tensor([0, 9, 18], dtype=torch.int32)
    torch.testing.assert_close(module(x.flatten(0, 1), cu_seqlens=cu_seqlens, max_seqlen=9), whole.flatten(0, 1))
    # In parts, with a cache
    state = SimpleNamespace(key_value_memory_dict={}, max_batch_size=2, max_seqlen=16, seqlen_offset=0)
    parts = []
    for part in x.split([5, 1, 3], 1):
        parts.append(module(part, inference_params=state))
        state.seqlen_offset += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    # Checkpointed
    module.checkpointing = True
    torch.testing.assert_close(module(x), whole)


def test_mha_against_torch() -> None:
    module, theirs = MHA(32, 4), torch.nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        for mine, other in zip(module.parameters(), theirs.parameters(), strict=True):
            other.copy_(mine)
    x, mask = torch.randn(2, 9, 32), torch.arange(9) < torch.tensor([9, 5])[:, None]
    expected = theirs(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
    torch.testing.assert_close(module(x, key_padding_mask=mask), expected)
    assert module.state_dict().keys() == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}


def test_mha_across() -> None:
    module = MHA(32, 4, num_heads_kv=2, cross_attn=True, return_residual=True)
    x, x_kv = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    out, residual = module(x, x_kv)
    q = module.Wq(x).unflatten(-1, (4, 8)).transpose(1, 2)
    k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in module.Wkv(x_kv).chunk(2, -1))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(out, module.out_proj(expected))
    assert residual is x


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert get_alibi_slopes(12) == [*get_alibi_slopes(8), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


# The package's name


@pytest.fixture
def installed() -> Iterator[None]:
    ours.install()
    yield
    ours.uninstall()


def test_nothing_is_installed_unasked() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")


@pytest.mark.usefixtures("installed")
def test_install() -> None:
    source = """
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flash_attn_qkvpacked_func
from flash_attn.flash_attn_interface import flash_attn_kvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.modules.mha import MHA
from flash_attn.cute import flash_attn_func as version_4
import flash_attn.layers.rotary
import flash_attn_interface
"""
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["flash_attn_func"] is ours.flash_attn_func
    assert names["version_4"] is cute.flash_attn_func
    assert names["flash_attn_interface"].flash_attn_func is fa3.flash_attn_func
    assert names["flash_attn"].__version__.startswith("2.")
    assert importlib.util.find_spec("flash_attn") is not None
    ours.install()  # a second time changes nothing
    ours.uninstall()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


@pytest.mark.usefixtures("installed")
def test_what_verl_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl goes on without the loss where its import fails with ImportError, and takes einops' function from here."""
    with pytest.raises(ImportError, match=r"flash_attn\.ops: flashtile has the attention of flash_attn, not its fused"):
        importlib.import_module("flash_attn.ops.triton.cross_entropy")
    einops = SimpleNamespace(rearrange=lambda x, pattern: (x, pattern))
    monkeypatch.setitem(sys.modules, "einops", einops)
    names: dict[str, Any] = {}
    exec("from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input", names)
    assert names["rearrange"] is einops.rearrange


def test_an_installed_package_is_not_hidden(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("flash_attn_func = 'theirs'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"flash_attn is installed; .*install\(replace=True\)"):
        ours.install()
    assert importlib.import_module("flash_attn").flash_attn_func == "theirs"
    ours.install(replace=True)
    assert importlib.import_module("flash_attn").flash_attn_func is ours.flash_attn_func
    ours.uninstall()
    assert importlib.import_module("flash_attn").flash_attn_func == "theirs"
    del sys.modules["flash_attn"]
