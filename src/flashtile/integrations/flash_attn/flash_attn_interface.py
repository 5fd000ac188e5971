"""FlashAttention-2's functions, argument by argument, and behind them the keywords of later versions and of vLLM's fork
that mean something here: s_aux and learnable_sink, seqused_k, page_table, out, return_lse and return_softmax_lse.
num_splits, pack_gqa, scheduler_metadata and fa_version do not change a result; flashtile chooses by itself. Keywords
that change a result and are not offered are refused by name. Index tensors may be int64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention, attention_kvcache, attention_varlen, call_as
from flashtile.arguments import require_tensors
from flashtile.errors import dtype_name, unsupported, value_error
from flashtile.facades import last_contiguous

Window = Sequence[int | None] | Tensor
NAMES = {"scale": "softmax_scale", "window": "window_size", "sinks": "learnable_sink"}


def int32(index: Any) -> Any:
    return index.to(torch.int32) if isinstance(index, Tensor) and index.dtype == torch.int64 else index


def _window(window: Window | None) -> Any:
    """flash_attn takes whatever has two elements, vLLM's fork None."""
    return tuple(window.tolist()) if isinstance(window, Tensor) else window


def one_of(name: str, first: Any, other: str, second: Any) -> Any:
    """Returns the argument that was given under either of its two names."""
    if first is not None and second is not None:
        raise value_error(name, f"it with {other}", "one of the two")
    return second if first is None else first


_NEUTRAL = (None, 0)


def refuse(**values: Any) -> None:
    """Raises for the first argument that is given."""
    for name, value in values.items():
        if isinstance(value, Tensor) or value not in _NEUTRAL:
            raise unsupported(name, type(value).__name__ if isinstance(value, Tensor) else repr(value), "None")


def refuse_shared_context(cp_world_size: int, cp_tot_seqused_k: Tensor | None) -> None:
    """Raises for keys that other ranks hold, which vLLM's fork counts."""
    if cp_world_size != 1:
        raise unsupported("cp_world_size", cp_world_size, "1")
    refuse(cp_tot_seqused_k=cp_tot_seqused_k)


def written(result: Any, out: Tensor | None, *inputs: Tensor) -> Any:
    """The result, with its output copied into `out` if that is given."""
    if out is None:
        return result
    first, *rest = result if isinstance(result, tuple) else (result,)
    require_tensors(out=out)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, out)):
        hint = "Call it under torch.no_grad()"
        raise unsupported("out", "a tensor, with inputs that require grad", "None where gradients are recorded", hint)
    if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
        accepted = f"shape {tuple(first.shape)} ({dtype_name(first.dtype)} on {first.device}), as the result"
        raise value_error("out", out, accepted)
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise value_error("out", out, "memory of its own for every element", "Call out.contiguous()")
    out.copy_(first)
    return (out, *rest) if isinstance(result, tuple) else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    fa_version: int | None = None,
) -> Any:
    """(batch, rows, heads, dim). return_attn_probs gives (out, lse, an empty tensor), return_lse (out, lse)."""
    result, lse = call_as(
        NAMES,
        attention,
        *(last_contiguous(tensor) for tensor in (q, k, v)),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        deterministic=deterministic or None,
        return_lse=True,
        layout="bshd",
    )
    return written(_results(result, lse, return_attn_probs, return_lse or return_softmax_lse), out, q, k, v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
    q_v: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """(total, heads, dim) and cumulative lengths; with a block table k and v are pages (num_pages, page_size, heads,
    dim)."""
    refuse(q_v=q_v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_shared_context(cp_world_size, cp_tot_seqused_k)
    result, lse = call_as(
        NAMES,
        attention_varlen,
        *(last_contiguous(tensor) for tensor in (q, k, v)),
        *(int32(cu_seqlens_q), int32(cu_seqlens_k), max_seqlen_q, max_seqlen_k),
        seqused_k=int32(seqused_k),
        block_table=int32(one_of("block_table", block_table, "page_table", page_table)),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        deterministic=deterministic or None,
        return_lse=True,
    )
    return written(_results(result, lse, return_attn_probs, return_lse or return_softmax_lse), out, q, k, v)


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
    window_size: Window | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    pack_gqa: bool | None = None,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Any:
    """New queries over a cache; k and v are written into it. The result carries no gradient."""
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    with torch.no_grad():
        result = call_as(
            NAMES,
            attention_kvcache,
            *(last_contiguous(q), k_cache, v_cache),
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=int32(cache_seqlens),
            cache_batch_idx=int32(cache_batch_idx),
            cache_leftpad=int32(cache_leftpad),
            block_table=int32(one_of("block_table", block_table, "page_table", page_table)),
            scale=softmax_scale,
            causal=causal,
            window=_window(window_size),
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes,
            sinks=one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
            num_splits=num_splits,
            return_lse=return_softmax_lse,
        )
        return written(result, out)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """(batch, rows, 3, heads, dim), and the arguments of `flash_attn_func` behind q, k and v."""
    q, k, v = parts("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """kv is (batch, rows, 2, heads_kv, dim); the arguments of `flash_attn_func` behind q, k and v follow."""
    k, v = parts("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, *args: Any, **options: Any
) -> Any:
    """(total, 3, heads, dim), and the arguments of `flash_attn_varlen_func` behind the lengths."""
    q, k, v = parts("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *args: Any,
    **options: Any,
) -> Any:
    """kv is (total, 2, heads_kv, dim); the arguments of `flash_attn_varlen_func` behind the lengths follow."""
    k, v = parts("kv", kv, 2, 4)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


def parts(name: str, packed: Tensor, num_parts: int, rank: int) -> tuple[Any, ...]:
    if packed.dim() != rank or packed.shape[-3] != num_parts:
        raise value_error(name, packed, f"{rank} dimensions, the third from the end of size {num_parts}")
    return packed.unbind(-3)


def _results(out: Tensor, lse: Tensor, return_attn_probs: bool, return_lse: bool) -> Any:
    if return_attn_probs:
        return out, lse, out.new_empty(0)
    return (out, lse) if return_lse else out
