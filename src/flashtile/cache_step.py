"""A step of a cache in one call of the C++ executor (csrc/exec/ops.cpp: forward_cache), which writes the new rows and
attends to all.

It handles calls whose kind has been served before. For anything else `step` answers None and has written nothing: the
general path of `attention_kvcache` serves or refuses the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import ops
from flashtile.problem import LARGEST_SCALE

_LARGEST_SOFTCAP = torch.finfo(torch.float32).max
_LARGEST_INT = 2**31 - 1  # the general path takes larger ones
# C functions, since every call asks them
_is_inference_mode = torch._C.is_inference_mode_enabled


def has_valid_options(window: Any, scale: Any, softcap: Any, num_splits: Any, interleaved: Any) -> bool:
    """No option of these would be refused."""
    return (
        (scale is None or (type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE))
        and (type(softcap) is float and 0.0 <= softcap <= _LARGEST_SOFTCAP)
        and (type(num_splits) is int and 0 <= num_splits <= _LARGEST_INT)
        and (interleaved is True or interleaved is False)
        and (
            window is None
            or (
                type(window) is tuple
                and len(window) == 2
                and type(window[0]) is type(window[1]) is int
                and -1 <= window[0] <= _LARGEST_INT
                and -1 <= window[1] <= _LARGEST_INT
            )
        )
    )


@ops.waits_for_errors
def step(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    alibi_slopes: Any,
    sinks: Any,
    k: Any,
    v: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    leftpad: Any,
    table: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    window: Any,
    scale: float | None,
    softcap: float,
    num_splits: int,
    is_interleaved: bool,
    wants_lse: bool,
    mode: int,
) -> tuple[Tensor, Tensor | None] | None:
    """(out, lse) of plain tensors q, k_cache and v_cache on the CPU or on a GPU; lse where it is wanted."""
    is_on_gpu = q.is_cuda
    if not is_on_gpu and not q.is_cpu:
        return None
    length = -1
    if type(cache_seqlens) is int and 0 <= cache_seqlens <= _LARGEST_INT:
        length, cache_seqlens = cache_seqlens, None
    if cache_batch_idx is not None:
        if table is not None or type(cache_batch_idx) is not Tensor or cache_batch_idx.dim() != 1:
            return None
        table = cache_batch_idx[:, None]  # rows of a larger cache are pages of one row each
    if rotary_cos is None and rotary_sin is None and alibi_slopes is None and sinks is None:
        others: tuple[Any, ...] = (k_cache, v_cache, k, v, cache_seqlens, leftpad, table)
    else:
        rare = (alibi_slopes, sinks, rotary_cos, rotary_sin)
        others = (k_cache, v_cache, k, v, cache_seqlens, leftpad, table, *rare)
    for tensor in others:
        if tensor is not None and (type(tensor) is not Tensor or not (tensor.is_cuda if is_on_gpu else tensor.is_cpu)):
            return None
    if ops.is_grad_enabled():
        for tensor in (q, *others):
            if tensor is not None and tensor.requires_grad:
                return None
    if (
        ops.num_dispatch_modes()
        or ops.is_traced_above_autograd()
        or ((k_cache.is_inference() or v_cache.is_inference()) and not _is_inference_mode())
    ):
        return None
    left, right = (-1, -1) if window is None else window
    mode |= ops.DETERMINISTIC if ops.is_deterministic() else 0
    flags = (ops.WANTS_LSE if wants_lse else 0) | (ops.INTERLEAVED if is_interleaved else 0)
    try:
        out, lse = ops.cache_forward(
            q, k_cache, v_cache, alibi_slopes, sinks, cache_seqlens, leftpad, table, scale, left, right, softcap, mode,
            k, v, rotary_cos, rotary_sin, length, flags | num_splits << ops.SPLITS_SHIFT,
        )  # fmt: skip
    except RuntimeError as error:
        ops.reraise(error)
    if out is None:
        return None
    if k is not None:
        ops.increment_version((k_cache, v_cache))
    return out, lse
