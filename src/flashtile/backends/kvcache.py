"""Appends new keys and values to a cache and rotates queries and keys (rotary embedding): the checks, and the
operations in PyTorch.

ops.py runs the operations on the CPU, and on a GPU where the kernel cannot run: for its dtypes, or as nothing can be
compiled (cuda.takes_append). They and the kernel, families/steps/append_kv.cuh, give the same bits: `rotate` rounds
after each operation, to the same types. A change of one is a change of both; tests/gpu/test_kvcache.py compares them.
ops.py calls `validate` before every append, but `check_values`, which reads lengths on the host, for CPU tensors and
under FLASHTILE_CHECK=1 alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.errors import dtype_name, type_error, value_error
from flashtile.problem import AttentionArgs, check_layout, head_axis, q_or_float32, row_axis

_OWN_MEMORY = "memory of its own for every row"


class AppendArgs(NamedTuple):
    """The arguments of `flashtile::append_kv`. The shapes are those of layout "bshd".

    The order of the fields is that of the op's schema (ops.py: _APPEND) and of csrc/exec/ops.cpp: append_kv.
    """

    k_cache: Tensor  # (batch, capacity, heads_kv, head_dim), or pages (num_pages, page_size, heads_kv, head_dim)
    v_cache: Tensor  # as k_cache, with head_dim_v
    k: Tensor  # (batch, new rows, heads_kv, head_dim)
    v: Tensor  # as k, with head_dim_v
    cache_seqlens: Tensor  # (batch,) int32: rows that each sequence has
    block_table: Tensor | None  # (batch, pages_per_sequence) int32
    rotary_cos: Tensor | None  # (positions, rotary_dim / 2)
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    layout: str


def queries_have_own_positions(args: AttentionArgs) -> bool:
    """True if rotary embedding turns each query by its own position: under a causal mask or a window. Else all queries
    have the position of the first; so says `is_ordered` where it is an argument."""
    return args.causal != "none" or (args.window_left, args.window_right) != (-1, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2 * cos.shape[-1] elements of x (batch, rows, heads, dim) by the angles at positions (batch,
    rows).

    Pairs are (0, 1), (2, 3), ... when interleaved, else (0, half), (1, half + 1), ...
    """
    half = cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = positions.long().clamp(0, cos.shape[0] - 1)  # a GPU's are not checked: no read out of bounds
    cos_at, sin_at = cos[positions].to(wide)[:, :, None], sin[positions].to(wide)[:, :, None]
    pairs, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        first, second = pairs[..., 0::2], pairs[..., 1::2]
    else:
        first, second = pairs[..., :half], pairs[..., half:]
    turned = (first * cos_at - second * sin_at, first * sin_at + second * cos_at)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def rotate_queries(
    q: Tensor, cos: Tensor, sin: Tensor, cache_seqlens: Tensor, is_ordered: bool, interleaved: bool, layout: str
) -> Tensor:
    """Rotates the queries: query i by position cache_seqlens + i if they are ordered, else each by cache_seqlens."""
    rows = q.shape[row_axis(layout)]
    steps = torch.arange(rows, device=q.device) if is_ordered else torch.zeros(rows, dtype=torch.int64, device=q.device)
    positions = cache_seqlens.long()[:, None] + steps
    if layout == "bshd":
        return rotate(q, cos, sin, positions, interleaved)
    return rotate(q.transpose(1, 2), cos, sin, positions, interleaved).transpose(1, 2)


def append(args: AppendArgs) -> None:
    """Writes the new rows of k, rotated if asked, and v after the first cache_seqlens rows of each sequence."""
    k_cache, v_cache, k, v = args.k_cache, args.v_cache, args.k, args.v
    if args.layout == "bhsd":
        k_cache, v_cache, k, v = (tensor.transpose(1, 2) for tensor in (k_cache, v_cache, k, v))
    batch, num_new, page = k.shape[0], k.shape[1], k_cache.shape[1]
    if k.numel() == 0:
        return
    positions = args.cache_seqlens.long()[:, None] + torch.arange(num_new, device=k.device)
    if args.rotary_cos is not None and args.rotary_sin is not None:
        k = rotate(k, args.rotary_cos, args.rotary_sin, positions, args.rotary_interleaved)
    if args.block_table is None:
        rows = torch.arange(batch, device=k.device)[:, None].expand_as(positions), positions
    else:
        rows = args.block_table.long().gather(1, positions // page), positions % page
    if shares_memory((k_cache, v_cache), (k, v)):
        k, v = k.clone(), v.clone()
    k_cache.index_put_(rows, k)
    v_cache.index_put_(rows, v)


def append_step(args: AppendArgs, q: Tensor, is_ordered: bool) -> tuple[Tensor | None, Tensor]:
    """Appends the new rows. Returns the rotated queries (None without rotary embedding) and the lengths with the new
    rows."""
    append(args)
    return rotated_queries(args, q, is_ordered), args.cache_seqlens + args.k.shape[row_axis(args.layout)]


def rotated_queries(args: AppendArgs, q: Tensor, is_ordered: bool) -> Tensor | None:
    """Returns the queries rotated as the new keys are, or None without rotary embedding."""
    if args.rotary_cos is None or args.rotary_sin is None:
        return None
    rotary = args.rotary_cos, args.rotary_sin, args.cache_seqlens
    return rotate_queries(q, *rotary, is_ordered, args.rotary_interleaved, args.layout)


def empty_rotated(q: Tensor, layout: str) -> Tensor:
    """Returns an empty tensor with the strides of a result of rotate_queries: the heads of a row are neighbours."""
    if layout == "bshd":
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def is_writable(cache: Tensor) -> bool:
    """True if torch allows a change of the cache in place here, and no two of its elements share memory."""
    if cache.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if cache.is_contiguous():
        return True
    extent = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent += (size - 1) * stride
    return True


def shares_memory(caches: tuple[Tensor, Tensor], others: tuple[Tensor, ...]) -> bool:
    """True if a cache and another tensor are, or may be, parts of the same memory."""
    (k_start, k_end), (v_start, v_end) = _span(caches[0]), _span(caches[1])
    for tensor in others:
        start, end = _span(tensor)
        if (start < k_end and k_start < end) or (start < v_end and v_start < end):
            return True
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def check_writable(args: AppendArgs) -> None:
    """Refuses caches whose writing would fail halfway, or change more than the new rows."""
    for name, cache in (("k_cache", args.k_cache), ("v_cache", args.v_cache)):
        if cache.is_inference() and not torch.is_inference_mode_enabled():
            raise value_error(
                name, "an inference tensor", "one that may be changed", "Call it inside torch.inference_mode()"
            )
        if not is_writable(cache):
            raise value_error(
                name, f"strides {tuple(cache.stride())}", _OWN_MEMORY, "Call clone() on an expanded cache"
            )
    if args.k_cache.numel() and args.k_cache.data_ptr() == args.v_cache.data_ptr():
        raise value_error("v_cache", "the memory of k_cache", "memory of its own", "Call clone()")


def without_aliases(args: AttentionArgs, append_args: AppendArgs) -> tuple[AttentionArgs, AppendArgs]:
    """Returns the arguments with copies of q, k and v if they may share memory with a cache: the append must not change
    what has yet to be read."""
    caches = append_args.k_cache, append_args.v_cache
    if shares_memory(caches, (args.q,)):
        args = args._replace(q=args.q.clone())
    if shares_memory(caches, (append_args.k, append_args.v)):
        append_args = append_args._replace(k=append_args.k.clone(), v=append_args.v.clone())
    return args, append_args


def check_values(args: AppendArgs) -> None:
    """Reads lengths and pages on the host and refuses what the cache has no room for."""
    check_writable(args)
    row = row_axis(args.layout)
    _check_room(args.cache_seqlens, args.k.shape[row], args.block_table, args.k_cache.shape[row], args.k_cache.shape[0])
    check_positions(args.cache_seqlens, args.k.shape[row], args.rotary_cos)


def check_positions(cache_seqlens: Tensor, num_new: int, rotary_cos: Tensor | None) -> None:
    """Raises if a row that is rotated stands at a position without angles. Reads the lengths on the host."""
    if rotary_cos is None or num_new == 0 or cache_seqlens.numel() == 0:
        return
    end = int(cache_seqlens.max()) + num_new
    if end > rotary_cos.shape[0]:
        raise value_error(
            "rotary_cos", f"{rotary_cos.shape[0]} positions", f"at least {end}, where the longest sequence ends"
        )


def _check_room(cache_seqlens: Tensor, num_new: int, block_table: Tensor | None, page: int, num_pages: int) -> None:
    room = page if block_table is None else page * block_table.shape[1]
    for b, length in enumerate(cache_seqlens.tolist()):
        if not 0 <= length <= room - num_new:
            accepted = f"0 to {room - num_new}" if num_new <= room else "nothing"
            raise value_error(
                "cache_seqlens",
                f"{length} for sequence {b}",
                f"{accepted}: the cache holds {room} rows and {num_new} are added",
            )
    if block_table is not None and num_new > 0:
        _check_pages(cache_seqlens.tolist(), num_new, block_table.tolist(), page, num_pages)


def _check_pages(lengths: list[int], num_new: int, table: list[list[int]], page: int, num_pages: int) -> None:
    """Raises if a page that rows are added to does not exist, or is another sequence's too."""
    places: dict[int, tuple[int, int]] = {}
    for b, (length, pages) in enumerate(zip(lengths, table, strict=True)):
        for slot in range(length // page, (length + num_new - 1) // page + 1):
            number = pages[slot]
            if not 0 <= number < num_pages:
                raise value_error("block_table", f"page {number} at [{b}, {slot}]", f"0 to {num_pages - 1}")
            other = places.setdefault(number, (b, slot))
            if other != (b, slot):
                got = f"page {number} at {list(other)} and at [{b}, {slot}]"
                raise value_error("block_table", got, "each page appended to by one sequence only")


def validate(args: AppendArgs) -> None:
    """Checks sizes, dtypes and devices of an append; runs on symbolic sizes too."""
    k_cache, v_cache, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, _, layout = args
    check_layout(layout)
    head, row = head_axis(layout), row_axis(layout)
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor.dtype != cache.dtype:
            raise type_error(name, tensor.dtype, f"{dtype_name(cache.dtype)}, as {name}_cache")
        if tensor.dim() != 4 or cache.dim() != 4:
            raise value_error(
                name, f"shape {tuple(tensor.shape)} for a cache of shape {tuple(cache.shape)}", "4 dimensions each"
            )
        if tensor.device != cache.device:
            raise value_error(name, f"device {tensor.device}", f"{cache.device}, where {name}_cache is")
        if any(stride == 0 and size > 1 for stride, size in zip(cache.stride(), cache.shape, strict=True)):
            raise value_error(
                f"{name}_cache",
                f"strides {tuple(cache.stride())}",
                _OWN_MEMORY,
                "Call clone() on an expanded cache",
            )
        if tensor.shape[head] != cache.shape[head] or tensor.shape[3] != cache.shape[3]:
            raise value_error(
                name, f"shape {tuple(tensor.shape)}", f"the heads and head_dim of {name}_cache {tuple(cache.shape)}"
            )
    if v_cache.dtype != k_cache.dtype:
        raise type_error("v_cache", v_cache.dtype, f"{dtype_name(k_cache.dtype)}, as k_cache")
    if v_cache.device != k_cache.device:
        raise value_error("v_cache", f"device {v_cache.device}", f"{k_cache.device}, where k_cache is")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise value_error(
            "v_cache", f"shape {tuple(v_cache.shape)}", f"{tuple(k_cache.shape)} but for head_dim, as k_cache"
        )
    if v.shape[0] != k.shape[0] or v.shape[row] != k.shape[row]:
        raise value_error("v", f"{v.shape[0]} x {v.shape[row]} new rows", f"{k.shape[0]} x {k.shape[row]}, as k")
    if block_table is None and k_cache.shape[0] != k.shape[0]:
        raise value_error("k", f"batch {k.shape[0]}", f"{k_cache.shape[0]}, as k_cache")
    for name, index, rank in (("cache_seqlens", cache_seqlens, 1), ("block_table", block_table, 2)):
        if index is None:
            continue
        if index.dtype != torch.int32:
            raise type_error(name, index.dtype, "int32", f"Call {name}.to(torch.int32)")
        if index.dim() != rank or index.shape[0] != k.shape[0]:
            raise value_error(name, index, f"{rank} dimensions and {k.shape[0]} rows, one for each sequence")
        if index.device != k_cache.device:
            raise value_error(name, f"device {index.device}", f"{k_cache.device}, where k_cache is")
    check_rotary(rotary_cos, rotary_sin, k)


def validate_queries(args: AppendArgs, q: Tensor) -> None:
    """Checks the queries of a step; runs on symbolic sizes too."""
    k = args.k
    if q.dtype != k.dtype:
        raise type_error("q", q.dtype, f"{dtype_name(k.dtype)}, as k")
    if q.device != k.device:
        raise value_error("q", f"device {q.device}", f"{k.device}, where k is")
    if q.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise value_error("q", q, f"4 dimensions, the batch and the head_dim of k {tuple(k.shape)}")


def check_rotary(cos: Tensor | None, sin: Tensor | None, k: Tensor) -> None:
    """Raises unless cos and sin are both None or both (positions, rotary_dim / 2), with rotary_dim at most head_dim."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise value_error(missing, "None", "rotary_cos and rotary_sin together, or neither")
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        if tensor.dtype not in (k.dtype, torch.float32):
            raise type_error(name, tensor.dtype, q_or_float32(k.dtype))
        if tensor.dim() != 2 or 2 * tensor.shape[1] > k.shape[3]:
            raise value_error(name, tensor, f"shape (positions, rotary_dim / 2) with rotary_dim at most {k.shape[3]}")
        if tensor.device != k.device:
            raise value_error(name, f"device {tensor.device}", f"{k.device}, where k is")
    if cos.shape != sin.shape:
        raise value_error("rotary_sin", sin, f"shape {tuple(cos.shape)}, as rotary_cos")
