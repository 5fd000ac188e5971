"""FlashAttention-3's functions (its module is called flash_attn_interface), argument by argument.

num_splits, pack_gqa, sm_margin and scheduler_metadata do not change a result; flashtile chooses by itself. Arguments
that change a result and are not offered are refused by name: qv, the descales of float8, attention_chunk, seqused_q,
and new keys together with queries of different lengths. Behind the arguments are those of SGLang's fork: sinks,
page_table, out, return_softmax_lse and ver; only_qv, score_mod and aux_tensors are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.errors import value_error
from flashtile.integrations.flash_attn import flash_attn_interface as fa2
from flashtile.integrations.flash_attn.flash_attn_interface import Window, one_of, refuse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """(batch, rows, heads, dim). return_attn_probs gives (out, lse)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return fa2.flash_attn_func(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        learnable_sink=one_of("sinks", sinks, "s_aux", s_aux),
        return_lse=return_attn_probs,
        out=out,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """(batch, rows, 3, heads, dim); with num_heads_q (batch, rows, num_heads_q + 2 * heads_kv, dim)."""
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    if qkv.dim() == 4 and num_heads_q is not None:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    else:
        q, k, v = fa2.parts("qkv", qkv, 3, 5)
    return fa2.flash_attn_func(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    page_table: Tensor | None = None,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Any = None,
    only_qv: bool = False,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int | None = None,
) -> Any:
    """(total, heads, dim) and cumulative lengths."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    refuse(seqused_q=seqused_q, only_qv=only_qv, score_mod=score_mod, aux_tensors=aux_tensors)
    return fa2.flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        page_table=page_table,
        learnable_sink=one_of("sinks", sinks, "s_aux", s_aux),
        return_lse=return_attn_probs or return_softmax_lse,
        out=out,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool = False,
    score_mod: Any = None,
    aux_tensors: Any = None,
    ver: int | None = None,
) -> Any:
    """New queries over a cache; k and v are written into it. With cu_seqlens_q the queries are packed rows (total,
    heads, dim), and nothing is written."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    refuse(cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
    refuse(only_qv=only_qv, score_mod=score_mod, aux_tensors=aux_tensors)
    if cu_seqlens_q is not None:
        refuse(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
        pages, lengths = _rows_of_cache(k_cache, cache_seqlens, cache_batch_idx, page_table, cu_seqlens_q)
        with torch.no_grad():
            return fa2.flash_attn_varlen_func(
                *(q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q),
                seqused_k=lengths,
                page_table=pages,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                learnable_sink=one_of("sinks", sinks, "s_aux", s_aux),
                return_lse=return_softmax_lse,
                out=out,
            )
    return fa2.flash_attn_with_kvcache(
        *(q, k_cache, v_cache),
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        learnable_sink=one_of("sinks", sinks, "s_aux", s_aux),
        out=out,
    )


def _rows_of_cache(
    k_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns a page table and lengths. A row of a cache without pages is one page."""
    num_sequences = cu_seqlens_q.shape[0] - 1
    if page_table is None:
        rows = torch.arange(num_sequences, device=k_cache.device) if cache_batch_idx is None else cache_batch_idx
        page_table = rows[:, None]
    elif cache_batch_idx is not None:
        raise value_error("cache_batch_idx", "it with page_table", "one of the two")
    if cache_seqlens is None:
        cache_seqlens = page_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((num_sequences,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    return page_table.to(torch.int32), cache_seqlens
