"""Turns what a caller may write into the op's arguments: types, defaults and words, nothing about sizes.

No size becomes a plain value here and no tensor is read, so all of it traces with symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import registry
from flashtile.backends.kvcache import AppendArgs
from flashtile.errors import quoted, short_repr, type_error, unsupported, value_error
from flashtile.problem import LAYOUTS, AttentionArgs, check_layout
from flashtile.tensors import is_causal_bias, is_plain, require_readable, without_causal_bias

Window = Sequence[int | None] | None
Causal = bool | str


def attention_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: Window,
    scale: float | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
    deterministic: bool | None,
    layout: str,
    backend: str | None,
    is_packed: bool = False,
) -> AttentionArgs:
    if (mask is not None and is_causal_bias(mask)) or (bias is not None and is_causal_bias(bias)):
        has_positions = window is not None or alibi_slopes is not None
        causal, mask, bias = without_causal_bias(q, k, causal, mask, bias, layout, has_positions, is_packed)
    require_optional_tensors(mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, rng_state=rng_state)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise unsupported(
            "alibi_slopes", "a tensor that requires grad", "constants", "Pass the term as bias to differentiate it"
        )
    if backend is not None:
        if not isinstance(backend, str):
            raise type_error("backend", backend, "None or one of " + ", ".join(map(repr, registry.names())))
        registry.find(backend)
    if not isinstance(layout, str):
        raise type_error("layout", layout, " or ".join(map(repr, LAYOUTS)))
    softcap, dropout_p = number("softcap", softcap), number("dropout_p", dropout_p)
    scale = None if scale is None else number("scale", scale)
    deterministic = None if deterministic is None else flag("deterministic", deterministic, "True, False or None")
    if rng_state is None and 0.0 < dropout_p < 1.0:
        rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    left, right = _window(window)
    return AttentionArgs(
        *(q, k, v, _to_4d(bias), _to_4d(mask), alibi_slopes, sinks, rng_state),
        scale=scale,
        causal=_causal(causal),
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        layout=layout,
        backend=backend,
    )


def varlen_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    causal: Causal,
    window: Window,
    scale: float | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
    deterministic: bool | None,
    layout: str,
    backend: str | None,
) -> AttentionArgs:
    require_tensors(cu_seqlens_q=cu_seqlens_q)
    require_optional_tensors(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=block_table)
    args = attention_args(
        q,
        k,
        v,
        causal,
        window,
        scale,
        mask,
        bias,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        rng_state,
        deterministic,
        layout,
        backend,
        is_packed=True,
    )
    return args._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_length_bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_length_bound("max_seqlen_k", max_seqlen_k),
        seqused_k=seqused_k,
        block_table=block_table,
    )


def kvcache_args(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    num_splits: int,
    causal: Causal,
    window: Window,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    layout: str,
    backend: str | None,
) -> tuple[AttentionArgs, AppendArgs | None]:
    """The arguments of the read before the append, and those of the append if there is one."""
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    require_optional_tensors(
        k=k, v=v, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table
    )
    require_optional_tensors(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if isinstance(cache_seqlens, Tensor):
        require_tensors(cache_seqlens=cache_seqlens)
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    args = attention_args(
        q,
        k_cache,
        v_cache,
        causal,
        window,
        scale,
        None,
        None,
        alibi_slopes,
        softcap,
        sinks,
        0.0,
        None,
        None,
        layout,
        backend,
    )
    check_layout(layout)
    if (k is None) != (v is None):
        raise value_error("k" if k is None else "v", "None", "k and v together, or neither")
    if q.dim() != 4:
        raise value_error("q", q, "4 dimensions")
    if k is not None and cache_seqlens is None:
        raise value_error("cache_seqlens", "None", "the rows in use, wherever k and v are appended")
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise value_error("rotary_cos", "it without k and v", "rotary embedding together with keys to append")
    if k is not None and (k.dim() != 4 or k.shape[0] != q.shape[0]):
        raise value_error("k", k, f"4 dimensions and batch {q.shape[0]}, as q")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise value_error("cache_batch_idx", "it with block_table", "one of the two")
        if cache_batch_idx.dtype != torch.int32:
            raise type_error("cache_batch_idx", cache_batch_idx.dtype, "int32", "Call cache_batch_idx.to(torch.int32)")
        if cache_batch_idx.dim() != 1 or cache_batch_idx.shape[0] != q.shape[0]:
            raise value_error(
                "cache_batch_idx", cache_batch_idx, f"shape ({q.shape[0]},), one row of the cache for each sequence"
            )
        # Rows of a larger cache are pages of one row each
        block_table = cache_batch_idx[:, None]
    if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
        if isinstance(cache_seqlens, list) or hasattr(cache_seqlens, "__array__"):
            hint = "Call torch.as_tensor(cache_seqlens, dtype=torch.int32, device=q.device)"
            raise type_error("cache_seqlens", cache_seqlens, "an int32 tensor, an int or None", hint)
        length = integer("cache_seqlens", cache_seqlens, "an int32 tensor, an int or None")
        if not -(2**31) <= length < 2**31:
            raise value_error("cache_seqlens", length, "0 to the number of rows that the cache holds")
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    splits = integer("num_splits", num_splits, "an integer >= 0 (0 = chosen)")
    args = args._replace(seqused_k=cache_seqlens, leftpad_k=cache_leftpad, block_table=block_table, num_splits=splits)
    is_interleaved = flag("rotary_interleaved", rotary_interleaved)
    if k is None or v is None or cache_seqlens is None:
        return args, None
    return args, AppendArgs(
        k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, is_interleaved, layout
    )


def _length_bound(name: str, bound: Any) -> Any:
    """An int is used; a tensor is not read (that would wait for the GPU), so the bound comes from the shapes
    instead."""
    if bound is None or isinstance(bound, Tensor):
        return None
    return integer(name, bound, "an int, a tensor or None")


def autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Under autocast q, k, v and bias are cast as scaled_dot_product_attention casts them."""
    if not (is_plain(q) and is_plain(k) and is_plain(v)):
        require_tensors(q=q, k=k, v=v)
    if bias is not None and not is_causal_bias(bias):
        require_optional_tensors(bias=bias)
    dtype = autocast_dtype(q)
    if dtype is None:
        return q, k, v, bias
    bias = bias if is_causal_bias(bias) else _cast(bias, dtype)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), bias


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """Returns what the tensors of a call are cast to, or None. Autocast leaves float64 alone: where q is float64, no
    tensor of the call is cast."""
    device = q.device.type
    if q.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _causal(causal: Causal) -> str:
    if isinstance(causal, str):
        if causal not in ("top_left", "bottom_right"):
            raise value_error("causal", repr(causal), "False, True, 'top_left' or 'bottom_right'")
        return causal
    return "bottom_right" if flag("causal", causal, "False, True, 'top_left' or 'bottom_right'") else "none"


def _window(window: Window) -> tuple[int, int]:
    if window is None:
        return -1, -1
    accepted = "None or a pair (left, right) of integers, -1 or None = unbounded"
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error("window", short_repr(window), accepted)
    left, right = (-1 if side is None else integer("window", side, accepted) for side in window)
    return left, right


def _to_4d(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dim() >= 4:
        return tensor
    return tensor[(None,) * (4 - tensor.dim())]


def flag(name: str, value: Any, accepted: str = "True or False") -> bool:
    """Booleans, numpy's among them, and the integers 0 and 1."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral) and value in (0, 1):
        return bool(value)
    if type(value).__name__ in ("bool_", "bool"):  # numpy's, without importing numpy
        return bool(value)
    raise type_error(name, quoted(value), accepted)


def integer(name: str, value: Any, accepted: str) -> Any:
    """A plain or symbolic integer that fits 64 bits; numpy's are converted."""
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise type_error(name, quoted(value), accepted)
    value = int(value)
    if not -(2**63) <= value < 2**63:
        raise value_error(name, value, "an integer of 64 bits")
    return value


def number(name: str, value: Any) -> Any:
    """A plain or symbolic number; numpy's are converted."""
    if type(value) is float:
        return value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = f"Pass float({name}); that synchronises with a GPU" if isinstance(value, Tensor) else ""
        raise type_error(name, quoted(value), "a number", hint)
    try:
        return float(value)
    except OverflowError:
        raise value_error(name, "an integer beyond all floats", "a finite number") from None


def require_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not is_plain(value):
            require_readable(name, value, "a torch.Tensor")


def require_optional_tensors(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and not is_plain(value):
            require_readable(name, value, "a torch.Tensor or None")
