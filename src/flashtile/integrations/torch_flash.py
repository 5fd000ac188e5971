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

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from flashtile import ops
from flashtile.backends import native
from flashtile.errors import unsupported
from flashtile.problem import AttentionArgs

NAME = "flashtile"
_NEEDS = (True, True, True, False, False)
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1


@dataclass
class Handle:
    """What torch keeps while the implementation is active."""

    undo: list[Callable[[], None]]

    def remove(self) -> None:
        while self.undo:
            self.undo.pop()()


def register() -> None:
    """Makes `torch.nn.attention.activate_flash_attention_impl("flashtile")` possible. Activates nothing."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise unsupported("torch", torch.__version__, "a version with torch.nn.attention.register_flash_attention_impl")
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate)


def activate() -> Handle:
    """What torch calls to put the operators' kernels in place."""
    # The CPU's first: torch warns of the first replaced kernel of a process, and only here can that be ignored
    return Handle([*_put_in_place("CPU", _CPU_KERNELS), *put_cuda_kernels_in_place("CUDA")])


def put_cuda_kernels_in_place(key: str) -> list[Callable[[], None]]:
    """C++ kernels where there are some, Python functions for the other operators. Returns what undoes it."""
    undo, in_cpp = [], set[str]()
    if _cpp_knows_the_schemas() and (restore := native.override_torch_flash(key)):
        _define_fallbacks()
        undo, in_cpp = [restore], set(_CPP_TYPES)
    return [*undo, *_put_in_place(key, {name: f for name, f in _CUDA_KERNELS.items() if name not in in_cpp})]


def _put_in_place(key: str, kernels: dict[str, Callable[..., Any]]) -> list[Callable[[], None]]:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
        for name, kernel in kernels.items():
            if hasattr(torch.ops.aten, name):  # not every torch has all of them
                library.impl(name, kernel, key)
    return [library._destroy]


# What csrc/exec/torch_flash.cpp reads and returns
_CPP_TYPES = {
    "_scaled_dot_product_flash_attention": (
        "Tensor Tensor Tensor float bool bool Optional[float]",
        "Tensor Tensor Tensor Tensor int int Tensor Tensor Tensor",
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "Tensor Tensor Tensor Tensor Tensor Tensor Tensor Tensor int int float bool Tensor Tensor Optional[float]",
        "Tensor Tensor Tensor",
    ),
}


def _cpp_knows_the_schemas() -> bool:
    for name, types in _CPP_TYPES.items():
        schema = getattr(torch.ops.aten, name).default._schema
        if types != tuple(" ".join(str(x.type) for x in values) for values in (schema.arguments, schema.returns)):
            return False
    return True


@functools.cache
def _define_fallbacks() -> Library:
    """The ops to which the C++ kernels hand calls that they do not take: those with dropout."""
    library = Library("flashtile", "FRAGMENT")
    for name, arguments, kernel in (
        (
            "sdpa_forward_fallback",
            "Tensor query, Tensor key, Tensor value, float dropout_p, bool is_causal, bool return_debug_mask",
            _sdpa_forward,
        ),
        (
            "sdpa_backward_fallback",
            "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
            "Tensor cum_seq_k, int max_q, int max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
            "Tensor philox_offset",
            sdpa_backward,
        ),
    ):
        library.define(f"{name}({arguments}, float? scale) -> (Tensor, Tensor, Tensor)")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for key in ("CPU", "CUDA"):
            library.impl(name, native.raising(kernel, 3), key)
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
    window: tuple[int | None, int | None] = (None, None),
    **more: Any,
) -> AttentionArgs:
    corner = "top_left" if layout == "bhsd" else "bottom_right"
    left, right = (-1 if side is None else side for side in window)
    if rng_state is None and dropout_p > 0.0:
        rng_state = draw_state(query.device)
    return AttentionArgs(
        *(query, key, value),
        rng_state=rng_state,
        scale=scale,
        causal=corner if is_causal else "none",
        window_left=left,
        window_right=right,
        dropout_p=dropout_p,
        layout=layout,
        needs_grad=True,
        **more,
    )


def draw_state(device: torch.device) -> Tensor:
    """Draws seed and offset of a call with dropout from torch's generator of the device."""
    return torch.randint(_MIN_INT64, _MAX_INT64, (2,), dtype=torch.int64, device=device)


def _lengths(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    if cum_seq_q is None:
        return {}
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


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
        alibi_slopes=alibi_slopes,
        seqused_k=seqused_k,
        block_table=block_table,
        window=(window_size_left, window_size_right),
        **_lengths(cum_seq_q, cum_seq_k, max_q, max_k),
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
    out, lse, state = _sdpa_forward(query, key, value, dropout_p, is_causal, return_debug_mask, scale)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    args = _args(query, key, value, is_causal, dropout_p, scale, "bhsd")
    out, lse = ops.forward(*args)
    return out, lse, _state(args)


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
    out, lse = ops.forward(*_args(query, key, value, is_causal, dropout_p, scale, "bhsd", bias=_to_4d(attn_mask)))
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
    args = _args(query, key, value, is_causal, dropout_p, scale, "bhsd", bias=_to_4d(attn_mask))
    grads = ops.backward(grad_out, None, *args, out, logsumexp.contiguous(), _NEEDS)
    return tuple(_rows_first(grad) for grad in grads[:3])


def _to_4d(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


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
