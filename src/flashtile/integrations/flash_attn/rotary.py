"""flash_attn.layers.rotary: rotary position embedding, in PyTorch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.errors import value_error


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first 2 * cos.shape[1] columns of x (batch, rows, heads, dim), or of packed rows (total, heads, dim)
    with cu_seqlens. cos and sin are (positions, columns / 2); seqlen_offsets is an int or one for every sequence."""
    rows = _positions(x, seqlen_offsets, cu_seqlens)
    rows = rows.clamp(max=cos.shape[0] - 1) if cu_seqlens is not None else rows
    rotated_dim = 2 * cos.shape[1]
    if rotated_dim > x.shape[-1]:
        raise value_error("cos", cos, f"at most {x.shape[-1] // 2} columns")
    c, s = (table[rows].unsqueeze(-2).to(torch.float32) for table in (cos, sin))
    first = x[..., :rotated_dim].to(torch.float32)
    if interleaved:
        a, b = first.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    else:
        a, b = first.chunk(2, -1)
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    turned = turned.to(x.dtype)
    if inplace:
        x[..., :rotated_dim].copy_(turned)
        return x
    return turned if rotated_dim == x.shape[-1] else torch.cat([turned, x[..., rotated_dim:]], -1)


apply_rotary_emb_func = apply_rotary_emb


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """(rows,) or (batch, rows); (total,) of packed rows."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        return rows + offsets[:, None] if isinstance(offsets, Tensor) else rows + offsets
    index = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True).clamp(max=cu_seqlens.shape[0] - 1) - 1
    rows = index - cu_seqlens[sequence]
    return rows + (offsets[sequence] if isinstance(offsets, Tensor) else offsets)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates in place the queries and keys of (batch, rows, 3, heads, dim), or of (batch, rows, num_heads_q + 2 *
    heads_kv, dim)."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is not None:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_kv]
    else:
        raise value_error("num_heads_q", "None", "the number of query heads, where qkv has 4 dimensions")
    options: dict[str, Any] = {"interleaved": interleaved, "inplace": True, "seqlen_offsets": seqlen_offsets}
    apply_rotary_emb(q, cos, sin, **options)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, **options)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates in place the keys of (batch, rows, 2, heads_kv, dim)."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Tables of cosines and sines for `dim` columns, and their application. With scale_base, xPos."""

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.inv_freq: Tensor
        self.scale: Tensor | None
        self.register_buffer("inv_freq", 1.0 / self.base ** (even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables: tuple[Tensor, ...] | None = None

    def tables(self, length: int, device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(cos, sin, cos_k, sin_k) of at least this many positions, kept for the next call."""
        kept = self._tables
        if kept is None or kept[0].shape[0] < length or kept[0].device != device or kept[0].dtype != dtype:
            positions = torch.arange(length, device=device, dtype=torch.float32)
            angles = torch.outer(positions, self.inv_freq.to(device=device, dtype=torch.float32))
            factor = torch.ones_like(angles)
            if self.scale is not None and self.scale_base is not None:
                power = (positions - length // 2) / self.scale_base
                factor = self.scale.to(device=device, dtype=torch.float32) ** power[:, None]
            wave = (angles.cos(), angles.sin())
            kept = tuple((w * f).to(dtype) for f in (factor, 1.0 / factor) for w in wave)
            self._tables = kept
        return kept

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place. qkv alone: (batch, rows, 3, heads, dim) or (batch, rows, num_heads_q + 2 * heads_kv, dim).
        With kv (batch, rows, 2, heads_kv, dim), qkv holds queries (batch, rows, heads, dim), and (q, kv) is returned.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise value_error("max_seqlen", "None", "an int, where seqlen_offset is a tensor")
            max_seqlen = qkv.shape[1] + seqlen_offset
        cos, sin, cos_k, sin_k = self.tables(max_seqlen, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
