"""flashtile as an implementation of torch's own flash attention operators.

    import torch
    from flashtile.integrations import torch_flash
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flashtile")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.nn.attention.restore_flash_attention_impl()

torch decides which calls reach these operators. On CUDA devices it sends float16 and bfloat16 without a mask, with
equal head dims up to 256, and on Hopper it prefers cuDNN unless FLASH_ATTENTION is pinned. `torch.nn.attention.varlen`
calls them too. On the CPU the flash operators of scaled_dot_product_attention are served as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flashtile import ops
from flashtile.arguments import attention_args
from flashtile.errors import unsupported
from flashtile.problem import AttentionArgs

NAME = "flashtile"
_NEEDS = (True, True, True, False, False)


@dataclass
class Handle:
    """What torch keeps while the implementation is active."""

    libraries: list[Library]

    def remove(self) -> None:
        for library in self.libraries:
            library._destroy()
        self.libraries = []


def register() -> None:
    """Makes `torch.nn.attention.activate_flash_attention_impl("flashtile")` possible. Activates nothing."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise unsupported("torch", torch.__version__, "a version with torch.nn.attention.register_flash_attention_impl")
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def activate() -> Handle:
    """What torch calls to put the operators' kernels in place."""
    return Handle([_library("CUDA", _CUDA_KERNELS), _library("CPU", _CPU_KERNELS)])


def _library(key: str, kernels: dict[str, Callable[..., Any]]) -> Library:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        for name, kernel in kernels.items():
            if hasattr(torch.ops.aten, name):  # not every torch has all of them
                library.impl(name, kernel, key)
    return library


def _args(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    layout: str,
    rng_state: Tensor | None = None,
    bias: Tensor | None = None,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: Tensor | None = None,
    **lengths: Any,
) -> AttentionArgs:
    corner = "top_left" if layout == "bhsd" else True
    args = attention_args(
        *(query, key, value, corner if is_causal else False, window, scale, None, bias, alibi_slopes, 0.0, None),
        *(dropout_p, rng_state, None, layout, None),
    )
    return args._replace(needs_grad=True, **lengths)


def _lengths(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, **more: Any) -> dict[str, Any]:
    if cum_seq_q is None:
        return {name: value for name, value in more.items() if value is not None}
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k, **more}


def _state(args: AttentionArgs) -> Tensor:
    """torch carries the state of the random numbers as two uint64. Without dropout nobody reads it."""
    if args.rng_state is None:
        return torch.empty(2, dtype=torch.uint64, device=args.q.device)
    return args.rng_state.view(torch.uint64)


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """aten::_flash_attention_forward: (batch, rows, heads, dim), or (total, heads, dim) with cumulative lengths."""
    args = _args(
        *(query, key, value, is_causal, dropout_p, scale, "bshd"),
        window=(window_size_left, window_size_right),
        alibi_slopes=alibi_slopes,
        **_lengths(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k=seqused_k, block_table=block_table),
    )
    out, lse = ops.forward(*args)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, _state(args), unused, query.new_empty(0)


def flash_attention_forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: the same into a given tensor."""
    result, lse, *_ = flash_attention_forward(*args, **options)
    out.copy_(result)
    return lse


def flash_attention_backward(
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
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward"""
    args = _args(
        *(query, key, value, is_causal, dropout_p, scale, "bshd"),
        rng_state=rng_state.view(torch.int64) if dropout_p > 0.0 else None,
        window=(window_size_left, window_size_right),
        **_lengths(cum_seq_q, cum_seq_k, max_q, max_k),
    )
    dq, dk, dv, *_ = ops.backward(grad_out, None, *args, out, logsumexp, _NEEDS)
    return dq, dk, dv


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention: (batch, heads, rows, dim)."""
    args = _args(query, key, value, is_causal, dropout_p, scale, "bhsd")
    out, lse = ops.forward(*args)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], _state(args), unused, query.new_empty(0)


def sdpa_backward(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_backward"""
    state = philox_seed.view(torch.int64) if dropout_p > 0.0 else None
    args = _args(query, key, value, is_causal, dropout_p, scale, "bhsd", state)
    dq, dk, dv, *_ = ops.backward(grad_out, None, *args, out, logsumexp, _NEEDS)
    return dq, dk, dv


def sdpa_cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu. It returns no state of random numbers; torch computes dropout
    elsewhere."""
    if dropout_p > 0.0:
        raise unsupported("dropout_p", f"{dropout_p}", "0 on the CPU", "Pin SDPBackend.MATH")
    out, lse = ops.forward(*_args(query, key, value, is_causal, dropout_p, scale, "bhsd", bias=attn_mask))
    return out, _rows_first(lse)


def sdpa_cpu_backward(
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
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward"""
    args = _args(query, key, value, is_causal, dropout_p, scale, "bhsd", bias=attn_mask)
    grads = ops.backward(grad_out, None, *args, out, logsumexp.contiguous(), _NEEDS)
    return tuple(_rows_first(grad) for grad in grads[:3])


def _rows_first(tensor: Tensor) -> Tensor:
    """The memory order that torch's CPU operators promise: (batch, rows, heads, ...)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


_CUDA_KERNELS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
_CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu": sdpa_cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_cpu_backward,
}
