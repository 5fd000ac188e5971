"""xformers.ops.fmha: the functions, argument by argument.

Tensors are (batch, rows, heads, dim), (batch, rows, groups, heads, dim) or (batch, rows, dim). A bias is a tensor, or
an object of attn_bias or of the xformers package. Keys and values that are expanded over the heads, or over the heads
of a group, are read once where no gradient is asked for. `op` chooses nothing here and must be None.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import ops
from flashtile.api import attention, attention_varlen, call_as
from flashtile.arguments import attention_args, varlen_args
from flashtile.errors import unsupported, value_error
from flashtile.facades import last_contiguous
from flashtile.integrations.xformers.ops.fmha import attn_bias as attn_bias
from flashtile.integrations.xformers.ops.fmha.attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
    band_of,
)
from flashtile.problem import AttentionArgs

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

_BIAS_PARTS = ("bias", "window", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
_NAMES = {"q": "query", "k": "key", "v": "value", "dropout_p": "p"} | dict.fromkeys(_BIAS_PARTS, "attn_bias")


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention in query's shape, with value's last dimension. Differentiable, in a tensor bias too."""
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the same as `memory_efficient_attention`, without a gradient."""
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) for `memory_efficient_attention_backward`: lse is (batch, heads, rows) or (batch, groups,
    heads, rows), of packed rows too."""
    _refuse_dropout(p)
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype, wants_lse=True)


def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv)."""
    _refuse_dropout(p)
    _refuse_op(op)
    with torch.no_grad():
        call = _prepare(query, key, value, attn_bias, p, scale, shares_heads=False)
        out_dtype = None if output.dtype == query.dtype else output.dtype
        args = call_as(_NAMES, call.arguments)._replace(out_dtype=out_dtype, needs_grad=True)
        rows, columns = call.rows, call.columns
        given = (last_contiguous(rows(grad)), None, *args, last_contiguous(rows(output)), columns(lse).contiguous())
        names = _NAMES | {"dout": "grad", "out": "output"}
        dq, dk, dv, _, _ = call_as(names, ops.backward, *given, [True, True, True, False, False])
    return dq.reshape(query.shape), dk.reshape(key.shape), dv.reshape(value.shape)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) over some of the keys, for `merge_attentions`; out is float32 unless output_dtype says
    otherwise. It has no gradient."""
    _refuse_dropout(p)
    if output_dtype is None and query.dtype != torch.float64:
        output_dtype = torch.float32
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype, wants_lse=True)


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over the keys of all parts, from the (out, lse) of each; differentiable. Parts are a list or stacked
    along a first dimension: out (batch, rows, heads, dim) or with groups before the heads, lse (batch, heads, rows) or
    with groups."""
    outs, lses = list(attn_split), list(lse_split)
    if len(outs) != len(lses) or not outs:
        raise value_error("lse_split", f"{len(lses)} parts", f"one for each of the {len(outs)} parts of attn_split")
    for out, lse in zip(outs, lses, strict=True):
        sizes = (out.shape[0], *out.shape[2:-1], out.shape[1]) if out.dim() in (4, 5) else None
        if sizes is None or out.shape != outs[0].shape:
            raise value_error("attn_split", out, "parts of one shape, of 4 or 5 dimensions")
        if lse.shape != sizes:
            raise value_error("lse_split", lse, f"{sizes}, as attn_split")
    logits = torch.stack(lses)
    whole = logits.logsumexp(0)
    # Rows without any key have -inf everywhere
    weights = (logits - torch.where(whole.isneginf(), 0.0, whole)).exp()
    merged = torch.stack([out * weight.movedim(-1, 1)[..., None] for out, weight in zip(outs, weights, strict=True)])
    return merged.sum(0).to(output_dtype or outs[0].dtype), whole if write_lse else None


class _Call(NamedTuple):
    """A call in flashtile's terms. Packed calls have one batch, which their tensors lack."""

    tensors: tuple[Tensor, ...]  # q, k, v
    options: dict[str, Any]  # of attention or attention_varlen
    is_packed: bool
    shape: torch.Size  # the query's

    def arguments(self) -> AttentionArgs:
        """The arguments of the operators."""
        q, k, v = self.tensors
        builder: Any = varlen_args if self.is_packed else attention_args
        given: dict[str, Any] = dict.fromkeys(inspect.signature(builder).parameters) | self.options
        given |= {"q": q, "k": k, "v": v, "softcap": 0.0, "layout": "bshd"}
        if not self.is_packed:
            del given["is_packed"]
        args: AttentionArgs = builder(**given)
        return args

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor in the shape of an output, as the operators have it."""
        tensor = tensor.unsqueeze(2) if tensor.dim() == 3 else tensor.flatten(2, -2)
        return tensor[0] if self.is_packed else tensor

    def columns(self, lse: Tensor) -> Tensor:
        lse = lse.flatten(1, -2)
        return lse[0] if self.is_packed else lse

    def results(self, out: Tensor, lse: Tensor | None) -> tuple[Any, Any]:
        """The results as xformers has them."""
        batch, rows, *heads = self.shape[:-1]
        # In three dimensions xformers keeps the head in lse
        return out.reshape(*self.shape[:-1], out.shape[-1]), None if lse is None else lse.reshape(
            batch, *(heads or (1,)), rows
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
    wants_lse: bool = False,
) -> tuple[Any, Any]:
    _refuse_op(op)
    has_grad = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    call = _prepare(query, key, value, attn_bias, p, scale, shares_heads=not has_grad)
    if output_dtype is None or output_dtype == query.dtype:
        function: Any = attention_varlen if call.is_packed else attention
        found = call_as(_NAMES, function, *call.tensors, **call.options, layout="bshd", return_lse=wants_lse)
        return call.results(*found) if wants_lse else call.results(found, None)
    args = call_as(_NAMES, call.arguments)._replace(out_dtype=torch.float32)
    out, lse = call_as(_NAMES, ops.attend, args, True)
    return call.results(out.to(output_dtype), lse if wants_lse else None)


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, p: float, scale: float | None, shares_heads: bool
) -> _Call:
    rank = query.dim()
    if rank not in (3, 4, 5):
        raise value_error("query", query, "(batch, rows, heads, dim), with groups before the heads, or without heads")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != rank or (rank == 5 and tensor.shape[2:4] != query.shape[2:4]):
            heads = f" of {query.shape[2]} groups of {query.shape[3]} heads" if rank == 5 else ""
            raise value_error(name, tensor, f"{rank} dimensions{heads}, as query")
    is_shared = shares_heads and rank > 3 and key.stride(-2) == value.stride(-2) == 0
    q, k, v = _heads(query, False), _heads(key, is_shared), _heads(value, is_shared)
    options: dict[str, Any] = {"scale": scale, "dropout_p": p, "causal": False, "window": None}
    is_packed = False
    if isinstance(attn_bias, Tensor):
        options["bias"] = _folded(attn_bias, rank)
    elif attn_bias is not None:
        options["causal"], options["window"] = band_of(attn_bias)
        if isinstance(added := getattr(attn_bias, "_bias", None), Tensor):
            options["bias"] = _folded(added, rank)
        is_packed = hasattr(attn_bias, "q_seqinfo")
    if is_packed:
        name = type(attn_bias).__name__
        for argument, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor.shape[0] != 1:
                raise value_error(argument, f"batch {tensor.shape[0]}", f"1, with {name}")
        q, k, v = q[0], k[0], v[0]
        queries, keys = attn_bias.q_seqinfo, attn_bias.k_seqinfo
        options |= {"cu_seqlens_q": queries.seqstart, "max_seqlen_q": max(queries.max_seqlen, 0)}
        options |= {"cu_seqlens_k": keys.seqstart, "max_seqlen_k": max(keys.max_seqlen, 0)}
        if hasattr(keys, "seqlen"):
            options["seqused_k"] = keys.seqlen
        if hasattr(attn_bias, "block_tables"):
            table, size = attn_bias.block_tables, attn_bias.page_size
            if k.shape[0] % size:
                raise value_error("key", f"{k.shape[0]} rows", f"a multiple of page_size = {size}, with {name}")
            options |= {"block_table": table.to(torch.int32), "cu_seqlens_k": None}
            k, v = (tensor.unflatten(0, (-1, size)) for tensor in (k, v))
    return _Call((last_contiguous(q), last_contiguous(k), last_contiguous(v)), options, is_packed, query.shape)


def _heads(tensor: Tensor, is_shared: bool) -> Tensor:
    """(batch, rows, heads, dim); is_shared: the last dimension before dim repeats one head."""
    if tensor.dim() == 3:
        return tensor.unsqueeze(2)
    if is_shared:
        return tensor[:, :, :1] if tensor.dim() == 4 else tensor[:, :, :, 0]
    return tensor if tensor.dim() == 4 else tensor.flatten(2, 3)


def _folded(bias: Tensor, rank: int) -> Tensor:
    """A tensor bias in four dimensions."""
    if bias.dim() != rank:
        raise value_error("attn_bias", bias, f"{rank} dimensions, as query")
    return {3: lambda: bias.unsqueeze(1), 4: lambda: bias, 5: lambda: bias.flatten(1, 2)}[rank]()


def _refuse_dropout(p: float) -> None:
    if p != 0.0:
        raise unsupported("p", p, "0.0", "Call memory_efficient_attention for dropout")


def _refuse_op(op: Any) -> None:
    if op is not None and op != (None, None):
        raise unsupported("op", op, "None", "flashtile chooses its kernels by itself")
