"""A step of a cache on the CPU whose sequences all have the same length: the commonest way to generate.

The rows in use are then a slice of the cache, so that attention needs no lengths and the C++ executor takes the call.
`append` writes only what is known to be served: it answers None for anything unusual, and the general path of
`attention_kvcache` handles or refuses that.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import registry
from flashtile.backends.kvcache import is_writable, shares_memory
from flashtile.kernels import speeds
from flashtile.problem import MAX_HEAD_DIM, AttentionArgs, Problem

_AXES = {"bshd": (2, 1), "bhsd": (1, 2)}  # of heads and of rows
_LARGE = 1 << speeds.SIZE.log2  # scores; a step of so many is not bound by the host
_LARGEST_SOFTCAP = torch.finfo(torch.float32).max


def has_valid_options(causal: Any, window: Any, scale: Any, softcap: Any, num_splits: Any, interleaved: Any) -> bool:
    """No option of these would be refused."""
    return (
        (causal is True or causal is False or causal == "top_left" or causal == "bottom_right")
        and (scale is None or (type(scale) is float and math.isfinite(scale)))
        and (type(softcap) is float and 0.0 <= softcap <= _LARGEST_SOFTCAP)
        and (type(num_splits) is int and num_splits >= 0)
        and (interleaved is True or interleaved is False)
        and (
            window is None
            or (
                type(window) is tuple
                and len(window) == 2
                and type(window[0]) is type(window[1]) is int
                and window[0] >= -1 <= window[1]
            )
        )
    )


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Any,
    softcap: float,
    layout: str,
) -> tuple[Tensor, Tensor] | None:
    """Writes the new rows, if any, and returns the rows of k_cache and v_cache in use after them. None, and nothing is
    written, where this is not the place to decide."""
    head, row = _AXES.get(layout, (0, 0))
    q_sizes, k_sizes, v_sizes = q.shape, k_cache.shape, v_cache.shape
    if head == 0 or len(q_sizes) != 4 or len(k_sizes) != 4 or k_sizes[:3] != v_sizes[:3]:
        return None
    batch, heads, heads_kv, head_dim = q_sizes[0], q_sizes[head], k_sizes[head], q_sizes[3]
    dtype = q.dtype
    length = _common_length(cache_seqlens, batch)
    if (
        length is None
        or length < 0
        or k_sizes[0] != batch
        or k_sizes[3] != head_dim
        or heads_kv == 0
        or heads % heads_kv
        or k_cache.dtype is not dtype
        or v_cache.dtype is not dtype
        or not (q.is_cpu and k_cache.is_cpu and v_cache.is_cpu)
        or q.stride(3) != 1
        or k_cache.stride(3) != 1
        or v_cache.stride(3) != 1
        or not _is_served(dtype, head_dim, v_sizes[3], softcap > 0.0)
        or (torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad))
    ):
        return None
    new = 0
    if k is not None or v is not None:
        if type(k) is not Tensor or type(v) is not Tensor or k.dtype is not dtype or v.dtype is not dtype:
            return None
        new_sizes, new_v_sizes = k.shape, v.shape
        if len(new_sizes) != 4 or len(new_v_sizes) != 4 or new_sizes[:3] != new_v_sizes[:3]:
            return None
        new = new_sizes[row]
        if (
            new_sizes[0] != batch
            or new_sizes[head] != heads_kv
            or new_sizes[3] != head_dim
            or new_v_sizes[3] != v_sizes[3]
            or not (k.is_cpu and v.is_cpu)
            or (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad))
            or not is_writable(k_cache)
            or not is_writable(v_cache)
            or k_cache.data_ptr() == v_cache.data_ptr()
            or shares_memory((k_cache, v_cache), (q, k, v))
        ):
            return None
    end = length + new
    if end > k_sizes[row] or heads * q_sizes[row] * batch * end >= _LARGE:
        return None
    if k is not None and v is not None:
        k_cache.narrow(row, length, new).copy_(k)
        v_cache.narrow(row, length, new).copy_(v)
    return k_cache.narrow(row, 0, end), v_cache.narrow(row, 0, end)


def _common_length(cache_seqlens: Any, batch: int) -> int | None:
    """The length that all sequences have."""
    if type(cache_seqlens) is int:
        return cache_seqlens
    if type(cache_seqlens) is not Tensor or not cache_seqlens.is_cpu or cache_seqlens.dtype != torch.int32:
        return None
    if cache_seqlens.dim() != 1:
        return None
    lengths: list[int] = cache_seqlens.tolist()
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) == batch else None


@functools.cache
def _is_served(dtype: torch.dtype, head_dim: int, head_dim_v: int, has_softcap: bool) -> bool:
    """The default backend takes such calls, and has nothing to say about them: no warning, no error in strict mode."""
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= head_dim_v <= MAX_HEAD_DIM) or not dtype.is_floating_point:
        return False
    q, v = torch.empty(1, 1, 1, head_dim, dtype=dtype), torch.empty(1, 1, 1, head_dim_v, dtype=dtype)
    problem = Problem.of(AttentionArgs(q, q, v, softcap=float(has_softcap)))
    backend, reasons = registry.choose(problem, None)
    return backend.name == "cpu" and not reasons
