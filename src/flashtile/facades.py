"""The conventions people already know, with their exact signatures. Errors come in the words of each convention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashtile import ops
from flashtile.api import (
    attention,
    attention_kvcache,
    attention_varlen,
    call_as,
    dense,
    is_dense,
    record,
)
from flashtile.arguments import autocast_dtype, flag, require_optional_tensors, require_tensors
from flashtile.errors import Unsupported, short_repr, type_error, unsupported, value_error
from flashtile.problem import AttentionArgs, has_memory, is_checking, q_or_float32, validate
from flashtile.tensors import corner_of, has_strides, is_causal_bias, recorders

_SDPA_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal"}
_FLASH_NAMES = {"scale": "softmax_scale", "window": "window_size", "return_lse": "return_softmax_lse"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, argument by argument: (..., heads, rows, dim), causal from
    the top left, beside attn_mask too. Nested tensors of layout torch.jagged, (batch, heads, ragged, dim), give one."""
    # Most calls: four dimensions. What is refused here, such as sizes to be broadcast, is served or refused below
    if (
        type(dropout_p) is float
        and not dropout_p
        and (is_causal is False or is_causal is True)
        and is_dense(query, key, value, scale)
        and query.dim() == key.dim() == 4
        and (enable_gqa is True or query.size(1) == key.size(1))
    ):
        try:
            if attn_mask is None:
                bits = ops.dense_bits(query, key, value)
                if bits >= 0:
                    mode = ops.DENSE_MODES["top_left" if is_causal else False, "bhsd", None]
                    return dense(query, key, value, scale, mode | bits)
            elif type(attn_mask) is Tensor:
                is_bool, corner = attn_mask.dtype is torch.bool, "top_left" if is_causal else False
                mask, bias = (attn_mask, None) if is_bool else (None, attn_mask)
                out = attention(query, key, value, causal=corner, mask=mask, bias=bias, scale=scale)
                return out  # type: ignore[return-value]
        except (ValueError, TypeError, Unsupported):
            pass
    if not is_compiling() and (found := recorders(query, key, value, attn_mask)):
        recorded: Tensor = record(scaled_dot_product_attention, found, locals())
        return recorded
    if _is_jagged(query) and _is_jagged(key) and _is_jagged(value):
        return _sdpa_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    require_tensors(query=query, key=key, value=value)
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise value_error(name, tensor, "at least 2 dimensions (..., rows, dim)")
    causal: bool | str = "top_left" if is_causal else False
    if is_causal_bias(attn_mask):
        if is_causal:
            raise value_error("attn_mask", "a CausalBias with is_causal=True", "one of the two")
        causal, attn_mask = corner_of("attn_mask", attn_mask, False, query.shape[-2], key.shape[-2]), None
    require_optional_tensors(attn_mask=attn_mask)
    q, k, v = (_at_least_3d(last_contiguous(tensor)) for tensor in (query, key, value))
    k, v, heads = _share_heads(q, k, v, enable_gqa)
    lead = _broadcast_lead(q, k, v)
    if attn_mask is not None:
        attn_mask = _fold_mask(attn_mask, lead, (heads, q.shape[-2], k.shape[-2]))
    q, k, v = _fold(q, lead, heads), _fold(k, lead, k.shape[-3]), _fold(v, lead, v.shape[-3])
    if heads == 0:
        out = _without_heads(q, k, v)
    else:
        out = call_as(_SDPA_NAMES, _sdpa_4d, q, k, v, attn_mask, dropout_p, causal, scale)
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return out
    out = out.reshape(*lead, *out.shape[1:])
    return out if rank > 2 else out[0]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_func`, argument by argument: (batch, rows, heads, dim), causal from the bottom right.

    return_attn_probs gives (out, lse, probabilities) with an empty third tensor: probabilities are never stored.
    """
    if not is_compiling() and (found := recorders(q, k, v, alibi_slopes)):
        return record(flash_attn_func, found, locals())
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    out, lse = call_as(
        _FLASH_NAMES,
        attention,
        *(last_contiguous(tensor) for tensor in (q, k, v)),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=_asked(deterministic),
        return_lse=True,
        layout="bshd",
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn.flash_attn_varlen_func`, argument by argument: (total, heads, dim) and cumulative lengths."""
    if not is_compiling() and (found := recorders(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table)):
        return record(flash_attn_varlen_func, found, locals())
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    out, lse = call_as(
        _FLASH_NAMES,
        attention_varlen,
        *(last_contiguous(tensor) for tensor in (q, k, v)),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        block_table=block_table,
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=_asked(deterministic),
        return_lse=True,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn.flash_attn_with_kvcache`, argument by argument. Like it, the result carries no gradient."""
    tensors = (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad)
    if not is_compiling() and (found := recorders(*tensors, block_table, alibi_slopes)):
        return record(flash_attn_with_kvcache, found, locals())
    with torch.no_grad():
        return call_as(
            _FLASH_NAMES,
            attention_kvcache,
            *(last_contiguous(q), k_cache, v_cache),
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes,
            num_splits=num_splits,
            return_lse=return_softmax_lse,
        )


def _asked(deterministic: Any) -> bool | None:
    """flash_attn's False asks for nothing, so torch's switch decides."""
    return None if deterministic is None else flag("deterministic", deterministic, "True, False or None") or None


def _sdpa_4d(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, causal: bool | str, scale: float | None
) -> Tensor | tuple[Tensor, Tensor]:
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    if (
        attn_mask is not None
        and not is_bool
        and attn_mask.dtype not in (q.dtype, torch.float32)
        and autocast_dtype(q) is None
    ):
        is_added = attn_mask.is_floating_point()
        hint = "Call mask.to(q.dtype)" if is_added else "Call mask.bool() where nonzero means attend"
        raise type_error("mask", attn_mask.dtype, f"bool, or {q_or_float32(q.dtype)}", hint)
    return attention(
        *(q, k, v),
        causal=causal,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool else attn_mask,
        dropout_p=dropout_p,
        scale=scale,
    )


def _is_jagged(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged


def _sdpa_jagged(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """(batch, heads, ragged, dim): packed sequences, each of which attends within itself."""
    if attn_mask is not None:
        raise unsupported("attn_mask", "it with nested tensors", "None", "Pass is_causal, or call attention_varlen")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor._ragged_idx != 2:
            raise value_error(name, tensor, "a nested tensor (batch, heads, ragged, dim)")
        if tensor.lengths() is not None:
            hint = "Call contiguous() before heads are split off"
            raise unsupported(name, "a nested tensor with gaps between its sequences", "one without", hint)
        if tensor.shape[0] != query.shape[0]:
            raise value_error(name, f"batch {tensor.shape[0]}", f"{query.shape[0]}, as query")
    _check_lengths(key.offsets(), value.offsets())
    if key.shape[1] != query.shape[1] and not flag("enable_gqa", enable_gqa):
        accepted = f"{query.shape[1]}, as query"
        raise value_error("key", f"{key.shape[1]} heads", accepted, "Pass enable_gqa=True to share key heads")
    longest = [getattr(tensor, "_maybe_max_seqlen", None) for tensor in (query, key)]
    out: Any = call_as(
        _SDPA_NAMES,
        attention_varlen,
        *(last_contiguous(tensor.values()) for tensor in (query, key, value)),
        *(tensor.offsets().to(torch.int32) for tensor in (query, key)),
        *longest,
        causal="top_left" if flag("is_causal", is_causal) else False,
        dropout_p=dropout_p,
        scale=scale,
        layout="bhsd",
    )
    return torch.nested.nested_tensor_from_jagged(out, query.offsets(), jagged_dim=2, max_seqlen=longest[0])


def _check_lengths(k_offsets: Tensor, v_offsets: Tensor) -> None:
    """Sequences of key and value must be as long. As other index tensors, offsets on a GPU are read on demand."""
    if k_offsets is v_offsets or k_offsets.device != v_offsets.device:
        return
    if is_compiling() or not has_memory(k_offsets) or not (k_offsets.is_cpu or is_checking()):
        return
    if not torch.equal(k_offsets, v_offsets):
        k_lengths, v_lengths = (short_repr(offsets.diff().tolist()) for offsets in (k_offsets, v_offsets))
        raise value_error("value", f"sequences of lengths {v_lengths}", f"{k_lengths}, as key")


def _without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch serves a query without heads. The result is empty, and part of the graph."""
    one = [torch.empty((t.shape[0], 1, *t.shape[2:]), dtype=t.dtype, device="meta") for t in (q, k, v)]
    call_as(_SDPA_NAMES, validate, AttentionArgs(one[0], one[1], one[2]))
    return q @ k[:, :0].transpose(-1, -2) @ v[:, :0]


def _at_least_3d(tensor: Tensor) -> Tensor:
    return tensor[None] if tensor.dim() == 2 else tensor


def last_contiguous(tensor: Tensor) -> Tensor:
    """The facades copy what the functions they stand for would copy: a tensor whose last dimension is not
    contiguous."""
    if not has_strides(tensor) or tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def _share_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, int]:
    """k and v with one head count between them, and the head count of the output: heads of 1 are broadcast as torch
    does."""
    heads_k, heads_v = k.shape[-3], v.shape[-3]
    if heads_k != heads_v:
        is_shared = enable_gqa and heads_k > 0 and heads_v > 0
        if is_shared and heads_k % heads_v == 0:
            v = v.repeat_interleave(heads_k // heads_v, dim=-3)
        elif is_shared and heads_v % heads_k == 0:
            k = k.repeat_interleave(heads_v // heads_k, dim=-3)
        elif heads_k == 1:
            k = k.expand(*k.shape[:-3], heads_v, *k.shape[-2:])
        elif heads_v == 1:
            v = v.expand(*v.shape[:-3], heads_k, *v.shape[-2:])
        else:
            raise value_error("value", f"{heads_v} heads", f"{heads_k}, as key")
    heads, heads_kv = q.shape[-3], k.shape[-3]
    if heads == 1 and not enable_gqa:
        return k, v, heads_kv
    if not enable_gqa and heads_kv != 1 and heads_kv != heads:
        raise value_error("key", f"{heads_kv} heads", f"{heads}, as query", "Pass enable_gqa=True to share key heads")
    return k, v, heads


def _broadcast_lead(*tensors: Tensor) -> tuple[int, ...]:
    """The leading dimensions of (..., heads, rows, dim), broadcast."""
    leads = [tensor.shape[:-3] for tensor in tensors]
    if leads[0] == leads[1] == leads[2]:
        return leads[0]
    try:
        return torch.broadcast_shapes(*leads)
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape[:-3])) for tensor in tensors)
        raise value_error("query", f"leading dimensions {shapes} of query, key, value", "broadcastable ones") from None


def _fold(tensor: Tensor, lead: Sequence[int], heads: int) -> Tensor:
    """(..., heads, rows, dim) with any number of leading dimensions as four dimensions."""
    if tensor.dim() == 4 and len(lead) == 1 and tensor.shape[0] == lead[0] and tensor.shape[1] == heads:
        return tensor
    rows = tensor.shape[-2:]
    return tensor.expand(*lead, heads, *rows).reshape(math.prod(lead), heads, *rows)


def _fold_mask(mask: Tensor, lead: Sequence[int], sizes: tuple[int, int, int]) -> Tensor:
    """A mask for (*lead, *sizes) in four dimensions where it has leading dimensions to be folded, else as it is."""
    if mask.dim() <= 3 or (mask.dim() == 4 and len(lead) == 1):
        return mask
    full = (*lead, *sizes)
    ranks = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > len(full) or any(size not in (1, whole) for size, whole in ranks):
        raise value_error("attn_mask", mask, f"broadcastable to (..., heads, rows, keys) = {full}")
    return _fold(mask, lead, mask.shape[-3])
