"""flash_attn.modules.mha: multi-head attention with its projections. The weights have flash_attn's names and shapes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashtile.api import attention
from flashtile.errors import unsupported, value_error
from flashtile.integrations.flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from flashtile.integrations.flash_attn.rotary import RotaryEmbedding, apply_rotary_emb


def get_alibi_slopes(nheads: int) -> list[float]:
    """ALiBi's slopes: powers of 2 ** (-8 / n) for the largest power of two n, then every second one of 2 * n."""
    n = 2 ** int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (head + 1) / n) for head in range(n)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / n) for head in range(nheads - n)]


class MHA(nn.Module):
    """Self-attention (Wqkv) or cross-attention (Wq, Wkv), grouped heads, rotary embedding, ALiBi, windows, packed
    sequences, padding masks, and a cache of keys and values (inference_params)."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = True,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if dwconv:
            raise unsupported("dwconv", "True", "False")
        if rotary_emb_dim and cross_attn:
            raise unsupported("rotary_emb_dim", f"{rotary_emb_dim} with cross_attn=True", "0")
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if embed_dim % num_heads or num_heads % heads_kv:
            accepted = "an embed_dim that is a multiple of num_heads, which is a multiple of num_heads_kv"
            raise value_error("embed_dim", (embed_dim, num_heads, heads_kv), accepted)
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.dropout, self.softmax_scale, self.window_size = dropout, softmax_scale, window_size
        self.return_residual, self.checkpointing = return_residual, checkpointing
        options = {"device": device, "dtype": dtype}
        kv_dim = 2 * heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **options)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **options)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **options)
        self.rotary_emb_dim = rotary_emb_dim
        if rotary_emb_dim:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        self.alibi_slopes: Tensor | None
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Any = None) -> Tensor:
        """(batch, max_seqlen, 2, heads_kv, head_dim)"""
        weight = self.out_proj.weight
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x is (batch, rows, embed_dim), or packed rows (total, embed_dim) with cu_seqlens and max_seqlen.
        key_padding_mask is (batch, keys), True = a token. inference_params holds the caches of the layers in
        key_value_memory_dict, and seqlen_offset or lengths_per_sample."""
        if mixer_subset is not None:
            raise unsupported("mixer_subset", "a tensor", "None")
        q, k, v = self._project(x, x_kv)
        if inference_params is not None:
            out = self._with_cache(q, k, v, inference_params)
        elif self.checkpointing and self.training:
            out = checkpoint(self._attend, q, k, v, key_padding_mask, cu_seqlens, max_seqlen, use_reentrant=False)
        else:
            out = self._attend(q, k, v, key_padding_mask, cu_seqlens, max_seqlen)
        out = self.out_proj(out.flatten(-2))
        return (out, x) if self.return_residual else out

    def _project(self, x: Tensor, x_kv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with their heads split off."""
        sizes = [self.num_heads, self.num_heads_kv, self.num_heads_kv]
        if self.cross_attn:
            q, kv = self.Wq(x), self.Wkv(x if x_kv is None else x_kv)
            k, v = kv.unflatten(-1, (-1, self.head_dim)).split(sizes[1:], dim=-2)
            return q.unflatten(-1, (-1, self.head_dim)), k, v
        if x_kv is not None:
            raise value_error("x_kv", "it without cross_attn=True", "None")
        q, k, v = self.Wqkv(x).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=-2)
        return q, k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> Tensor:
        if self.rotary_emb_dim:
            length = q.shape[-3] if max_seqlen is None else max_seqlen
            cos, sin, cos_k, sin_k = self.rotary_emb.tables(length, q.device, q.dtype)
            turn: dict[str, Any] = {"interleaved": self.rotary_emb.interleaved, "cu_seqlens": cu_seqlens}
            q, k = apply_rotary_emb(q, cos, sin, **turn), apply_rotary_emb(k, cos_k, sin_k, **turn)
        dropout = self.dropout if self.training else 0.0
        shared: dict[str, Any] = {"dropout_p": dropout, "causal": self.causal, "alibi_slopes": self.alibi_slopes}
        out: Any
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise value_error("key_padding_mask", "it with cu_seqlens", "one of the two")
            out = flash_attn_varlen_func(
                *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
                softmax_scale=self.softmax_scale,
                window_size=self.window_size,
                **shared,
            )
            return out
        mask = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
        out = attention(q, k, v, mask=mask, scale=self.softmax_scale, window=self.window_size, layout="bshd", **shared)
        return out

    def _with_cache(self, q: Tensor, k: Tensor, v: Tensor, inference_params: Any) -> Tensor:
        """Writes keys and values behind those of the earlier steps and attends to all of them."""
        if self.cross_attn or self.layer_idx is None or not self.causal:
            raise unsupported("inference_params", "it", "causal self-attention with a layer_idx")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            caches[self.layer_idx] = self.allocate_inference_cache(
                inference_params.max_batch_size, inference_params.max_seqlen, k.dtype
            )
        start = getattr(inference_params, "batch_size_offset", 0)
        cache = caches[self.layer_idx][start : start + q.shape[0]]
        lengths = getattr(inference_params, "lengths_per_sample", None)
        offset = inference_params.seqlen_offset
        cos, sin = None, None
        if self.rotary_emb_dim:
            if self.rotary_emb.scale_base is not None:
                raise unsupported("inference_params", "it with rotary_emb_scale_base", "rotary embedding without xPos")
            cos, sin = self.rotary_emb.tables(inference_params.max_seqlen, q.device, q.dtype)[:2]
        out: Tensor = flash_attn_with_kvcache(
            *(q, cache[:, :, 0], cache[:, :, 1], k, v),
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=lengths if lengths is not None and offset else offset,
            softmax_scale=self.softmax_scale,
            causal=True,
            window_size=self.window_size,
            rotary_interleaved=self.rotary_emb.interleaved if self.rotary_emb_dim else False,
            alibi_slopes=self.alibi_slopes,
        )
        return out
