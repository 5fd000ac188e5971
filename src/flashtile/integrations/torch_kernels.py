"""torch's attention operators, computed by flashtile: one function for each operator, with its arguments and results.

`flashtile.integrations.torch_ops` puts them in place. torch's autograd formulas stay: they save what a forward operator
returns and hand it to the backward operator. Results have the shapes, strides and dtypes of torch's fake kernels, since
compiled graphs rely on them. What a function does not serve it refuses by Unsupported, ValueError or TypeError.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtile import facades, ops
from flashtile.backends import native, registry
from flashtile.errors import Unsupported, unsupported, value_error
from flashtile.integrations import torch_flash
from flashtile.problem import AttentionArgs, Problem

Grads = tuple[Tensor, Tensor, Tensor]
_MODES = {
    is_causal: ops.dense_mode(causal="top_left" if is_causal else "none", needs_grad=True)
    for is_causal in (False, True)
}
_LSE_ALIGNMENT = 32  # of the memory-efficient operator's logsumexp, in rows
_BIAS_ALIGNMENT = 16  # of its bias gradient, in keys


def _args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    rng_state: Tensor | None,
    **more: Any,
) -> AttentionArgs:
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    causal = "top_left" if is_causal else "none"
    return AttentionArgs(
        q, k, v, bias, rng_state=rng_state, scale=scale, causal=causal, dropout_p=dropout_p, layout="bhsd", **more
    )


@native.waits_for_errors
def _dense_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The call without other options, which the C++ executor takes at the least cost."""
    mode = _MODES[is_causal] | (ops.DETERMINISTIC if ops.is_deterministic() else 0)
    try:
        out, lse = ops.dense_forward(q, k, v, scale, mode)
        return out, lse
    except RuntimeError as error:
        ops.reraise(error)


@native.waits_for_errors
def _dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, out: Tensor, lse: Tensor
) -> Grads:
    mode = _MODES[is_causal] | (ops.DETERMINISTIC if ops.is_deterministic() else 0)
    try:
        dq, dk, dv = ops.dense_backward(dout, q, k, v, scale, mode, out, lse)
        return dq, dk, dv
    except RuntimeError as error:
        ops.reraise(error)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    needs_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out in q's memory order, lse (batch, heads, seqlen_q), and with dropout the state of the random numbers."""
    if bias is None and dropout_p == 0.0:
        return *_dense_forward(q, k, v, is_causal, scale), None
    needs = {"needs_grad": needs_grad, "needs_bias_grad": needs_grad and bias is not None and bias.requires_grad}
    if dropout_p == 0.0:
        return *ops.forward(*_args(q, k, v, bias, is_causal, scale, 0.0, None, **needs)), None
    state = torch_flash.draw_state(q.device)
    args = _args(q, k, v, bias, is_causal, scale, dropout_p, state, **needs)
    registry.select(Problem.of(args), None)
    out, lse = _of_one_library(ops.forward, *args)
    return out, lse, state


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    state: Tensor | None,
    needs_dbias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs = (True, True, True, needs_dbias, False)
    args = _args(q, k, v, bias, is_causal, scale, dropout_p, state, needs_grad=True, needs_bias_grad=needs_dbias)
    if dropout_p == 0.0:
        dq, dk, dv, dbias, _ = ops.backward(dout, None, *args, out, lse, needs)
    else:
        registry.select(Problem.of(args), None)
        dq, dk, dv, dbias, _ = _of_one_library(ops.backward, dout, None, *args, out, lse, needs)
    return dq, dk, dv, dbias


def _of_one_library(op: Any, *values: Any) -> Any:
    """Calls one of two passes. With dropout both must be of one library, whose random numbers they share: torch gets
    such a call only where flashtile's selection refuses it, which is alike in both passes."""
    try:
        return op(*values)
    except (Unsupported, ValueError, TypeError) as error:
        raise RuntimeError(f"flashtile has chosen to serve this call with dropout, and cannot: {error}") from error


def _like(tensor: Tensor, example: Tensor) -> Tensor:
    """The tensor with the strides that `torch.empty_like(example)` has."""
    if tensor.stride() == example.stride():
        return tensor
    if tensor.shape != example.shape:
        if 0 in example.stride():
            raise unsupported("query", "expanded dimensions with another head_dim than value", "a contiguous query")
        return tensor
    strides = torch.empty_like(example, device="meta").stride()
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(size == 1 or mine == other for size, mine, other in sizes):
        return tensor
    return torch.empty_like(example, dtype=tensor.dtype).copy_(tensor)


def _rows_first(tensor: Tensor) -> Tensor:
    """(batch, heads, rows, ...) in the memory order (batch, rows, heads, ...)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _scalars(state: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset as torch's operators carry them. Without dropout nobody reads them."""
    if state is None:
        return tuple(torch.empty((), dtype=torch.int64, device=device) for _ in range(2))  # type: ignore[return-value]
    return state[0].clone(), state[1].clone()


def _state(seed: Tensor, offset: Tensor, dropout_p: float, device: torch.device) -> Tensor | None:
    return torch.stack((seed.to(device), offset.to(device))) if dropout_p > 0.0 else None


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise unsupported("return_debug_mask", "True", "False: probabilities are never stored")


def flash_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu"""
    if dropout_p > 0.0:
        raise unsupported("dropout_p", f"{dropout_p}", "0: this operator returns no state of random numbers")
    out, lse, _ = _forward(query, key, value, attn_mask, is_causal, scale, 0.0)
    return _like(out, query), _rows_first(lse)


def flash_for_cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Grads:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward"""
    if dropout_p > 0.0:
        raise unsupported("dropout_p", f"{dropout_p}", "0: this operator has no state of random numbers")
    lse = logsumexp.contiguous()
    if attn_mask is None:
        dq, dk, dv = _dense_backward(grad_out, query, key, value, is_causal, scale, out, lse)
    else:
        dq, dk, dv, _ = _backward(
            grad_out, query, key, value, attn_mask, out, lse, is_causal, scale, dropout_p=0.0, state=None
        )
    return _rows_first(dq), _rows_first(dk), _rows_first(dv)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention"""
    _refuse_debug_mask(return_debug_mask)
    out, lse, state = _forward(query, key, value, None, is_causal, scale, dropout_p)
    device = query.device
    # torch carries seed and offset as one tensor of two uint64
    rng_state = torch.empty(2, dtype=torch.uint64, device=device) if state is None else state.view(torch.uint64)
    unused = torch.empty((), dtype=torch.uint64, device=device)
    return _like(out, query), lse, None, None, query.shape[2], key.shape[2], rng_state, unused, query.new_empty(0)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Grads:
    """aten::_scaled_dot_product_flash_attention_backward"""
    if dropout_p == 0.0:
        return _dense_backward(grad_out, query, key, value, is_causal, scale, out, logsumexp)
    state = philox_seed.view(torch.int64)
    dq, dk, dv, _ = _backward(
        grad_out, query, key, value, None, out, logsumexp, is_causal, scale, dropout_p=dropout_p, state=state
    )
    return dq, dk, dv


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_efficient_attention"""
    out, lse, state = _forward(query, key, value, attn_bias, is_causal, scale, dropout_p, compute_log_sumexp)
    if compute_log_sumexp:
        lse = pad(lse, (0, -lse.shape[2] % _LSE_ALIGNMENT), value=float("inf"))
    else:
        lse = lse.new_empty((*lse.shape[:2], 0))
    return _rows_first(out), lse, *_scalars(state, query.device)


def efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """aten::_scaled_dot_product_efficient_attention_backward"""
    lse = logsumexp[:, :, : query.shape[2]].contiguous()
    if attn_bias is None and dropout_p == 0.0:
        dq, dk, dv = _dense_backward(grad_out_, query, key, value, is_causal, scale, out, lse)
        return _rows_first(dq), _rows_first(dk), _rows_first(dv), None
    needs_dbias = attn_bias is not None and bool(grad_input_mask[3])
    state = _state(philox_seed, philox_offset, dropout_p, query.device)
    dq, dk, dv, dbias = _backward(
        grad_out_, query, key, value, attn_bias, out, lse, is_causal, scale, dropout_p, state, needs_dbias
    )
    grads = _rows_first(dq), _rows_first(dk), _rows_first(dv)
    return *grads, _in_aligned_rows(dbias, attn_bias) if needs_dbias and attn_bias is not None else None


def _in_aligned_rows(dbias: Tensor, bias: Tensor) -> Tensor:
    """The gradient in the bias's shape, whose rows start on multiples of 16 elements."""
    *lead, keys = bias.shape
    rows = dbias.new_empty((*lead, keys + -keys % _BIAS_ALIGNMENT))[..., :keys]
    return rows.copy_(dbias.view(bias.shape))


def cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention"""
    _refuse_debug_mask(return_debug_mask)
    out, lse, state = _forward(query, key, value, attn_bias, is_causal, scale, dropout_p, compute_log_sumexp)
    lengths = query.shape[2], key.shape[2]
    return _like(out, query), lse[..., None], None, None, *lengths, *_scalars(state, query.device), None


def cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Grads:
    """aten::_scaled_dot_product_cudnn_attention_backward. It has no gradient of the bias: torch sends no bias that
    requires one to cuDNN."""
    lse = logsumexp[..., 0].contiguous() if logsumexp.dim() == 4 else logsumexp
    if attn_bias is None and dropout_p == 0.0:
        return _dense_backward(grad_out, query, key, value, is_causal, scale, out, lse)
    state = _state(philox_seed, philox_offset, dropout_p, query.device)
    dq, dk, dv, _ = _backward(
        grad_out, query, key, value, attn_bias, out, lse, is_causal, scale, dropout_p=dropout_p, state=state
    )
    return dq, dk, dv


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch_attn::_varlen_attn, whichever of its backends torch has chosen"""
    left, right = window_size or (-1, -1)
    out, lse, *_ = torch_flash.flash_attention_forward(
        *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k),
        dropout_p=0.0,
        is_causal=is_causal,
        return_debug_mask=False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
    )
    return _like(out, query), lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    backend: int | None = None,
) -> Grads:
    """torch_attn::_varlen_attn_backward"""
    left, right = window_size or (-1, -1)
    return torch_flash.flash_attention_backward(
        *(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k),
        dropout_p=0.0,
        is_causal=is_causal,
        rng_state=rng_state,
        unused=rng_state,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


def math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_attention_math, by flashtile's own autograd. scaled_dot_product_attention drops its
    second result, the probabilities: they are one NaN, expanded."""
    if attn_mask is not None and is_causal:
        raise value_error("attn_mask", "a mask with is_causal=True", "one of the two")
    if dropout_mask is not None:
        raise unsupported("dropout_mask", "a tensor", "None")
    # Autocast casts scaled_dot_product_attention, not this operator
    with torch.autocast(query.device.type, enabled=False) if ops.is_autocasting() else nullcontext():
        out = facades.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    probabilities = query.new_full((), float("nan")).expand(*out.shape[:-1], key.shape[-2])
    # torch's is contiguous, whatever the memory order of the query: callers may view it
    return out.contiguous(), probabilities.detach()
