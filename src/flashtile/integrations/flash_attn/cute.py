"""FlashAttention-4's functions (flash_attn.cute), argument by argument; both return (out, lse), and lse is None unless
return_lse asks for it. Code for scores and masks (score_mod, mask_mod), block-sparse tensors and gathered keys are
refused by name. Behind the arguments is `out`, of SGLang's fork, and others of it that are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.errors import value_error
from flashtile.integrations.flash_attn import flash_attn_interface as fa2
from flashtile.integrations.flash_attn.flash_attn_interface import Window, refuse


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(batch, rows, heads, dim)."""
    refuse(gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk)
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod)
    refuse(block_sparse_tensors=block_sparse_tensors)
    result, lse = fa2.flash_attn_func(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap or 0.0,
        deterministic=deterministic,
        return_lse=True,
        out=out,
    )
    return result, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    out: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rel_bias: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """(total, heads, dim) and cumulative lengths."""
    refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, rel_bias=rel_bias)
    refuse(gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk)
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, mask_mod=mask_mod)
    refuse(block_sparse_tensors=block_sparse_tensors, seqused_q=seqused_q)
    if cu_seqlens_q is None:
        raise value_error("cu_seqlens_q", "None", "cumulative lengths", "Call flash_attn_func for dense tensors")
    result, lse = fa2.flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap or 0.0,
        deterministic=deterministic,
        return_lse=True,
        out=out,
    )
    return result, lse if return_lse else None
