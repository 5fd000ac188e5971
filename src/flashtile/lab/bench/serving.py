"""Calls of serving, for the decode grid: few queries or a chunk of a prompt over a cache, dense or in pages.

Keys and values of a provider are rearranged ahead of the timed calls: rows of a cache, packed rows, or pages in random
order. Every call returns (batch, heads, seqlen_q, dim), a view of what the provider returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile import api
from flashtile.backends.registry import Explanation
from flashtile.errors import Unsupported
from flashtile.lab.bench.points import Inputs, Point
from flashtile.lab.dtypes import DTYPES

_SEED = 7  # of the order of pages


def lengths(point: Point) -> list[int]:
    """Keys of each sequence."""
    if point.lengths:
        return list(point.lengths)
    if point.extra.short_keys is None:
        return [point.seqlen_k] * point.batch
    return [point.seqlen_k] + [point.extra.short_keys] * (point.batch - 1)


class Layout:
    """Places where a provider finds the rows of each sequence, and the index tensors that say so."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.point, self.device = point, device
        self.page = point.extra.page_size
        self.lengths = lengths(point)
        self.used = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.starts_q = torch.arange(point.batch + 1, dtype=torch.int32, device=device) * point.seqlen_q
        self.starts_k = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32).to(device)
        self.table: Tensor | None = None
        if self.page is not None:
            counts = [-(-length // self.page) for length in self.lengths]
            order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(_SEED)).to(torch.int32)
            # Entries behind the pages of a sequence are of no page
            table = torch.full((point.batch, max(counts)), -1, dtype=torch.int32)
            for row, pages in zip(table, order.split(counts), strict=True):
                row[: len(pages)] = pages
            self.order, self.table = order.to(device=device, dtype=torch.int64), table.to(device)

    def arrange(self, inputs: Inputs) -> Inputs:
        """Turns (batch, heads, rows, dim) into rows of heads: queries packed or not, keys in pages, packed or not."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
        is_packed = self.point.extra.is_packed
        q = q.contiguous().flatten(0, 1) if is_packed else q.contiguous()
        if self.page is None:
            k, v = ((self._joined(tensor) if is_packed else tensor.contiguous()) for tensor in (k, v))
        else:
            k, v = (self._paged(tensor, self.page) for tensor in (k, v))
        return replace(inputs, q=q, k=k, v=v)

    def _joined(self, rows: Tensor) -> Tensor:
        return torch.cat([one[:length] for one, length in zip(rows, self.lengths, strict=True)])

    def _paged(self, rows: Tensor, page: int) -> Tensor:
        """(pages, page, heads, dim). What stands behind the last key of a sequence is NaN."""
        pages = rows.new_full((len(self.order), page, *rows.shape[2:]), torch.nan)
        first = 0
        for one, length in zip(rows, self.lengths, strict=True):
            count = -(-length // page)
            room = rows.new_full((count * page, *rows.shape[2:]), torch.nan)
            room[:length] = one[:length]
            pages[self.order[first : first + count]] = room.view(count, page, *rows.shape[2:])
            first += count
        return pages

    def restored(self, out: Tensor) -> Tensor:
        return out.view(self.point.batch, self.point.seqlen_q, *out.shape[-2:]).transpose(1, 2)


def options(layout: Layout, backend: str | None) -> dict[str, Any]:
    """Returns the options of `attention_kvcache`, or of `attention_varlen` where queries are packed."""
    point = layout.point
    found: dict[str, Any] = {"causal": point.is_causal, "backend": backend, "block_table": layout.table}
    if not point.extra.is_packed:
        return found | {"cache_seqlens": layout.used}
    found |= {"cu_seqlens_q": layout.starts_q, "max_seqlen_q": point.seqlen_q, "max_seqlen_k": point.seqlen_k}
    if layout.table is None:
        return found | {"cu_seqlens_k": layout.starts_k}
    return found | {"cu_seqlens_k": None, "seqused_k": layout.used}


def ours(layout: Layout, backend: str | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    chosen, is_packed = options(layout, backend), layout.point.extra.is_packed

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = api.attention_varlen(q, k, v, **chosen) if is_packed else api.attention_kvcache(q, k, v, **chosen)
        assert isinstance(out, Tensor)
        return layout.restored(out)

    return call


def explained(layout: Layout, backend: str | None) -> Explanation:
    """Explains what would run our call, by shapes alone."""
    point, size = layout.point, sum(layout.lengths) if layout.page is None else len(layout.order)
    rows_q, rows_k = [point.batch, point.seqlen_q], [point.batch, point.seqlen_k]
    if point.extra.is_packed:
        rows_q, rows_k = [point.batch * point.seqlen_q], [size]
    if layout.page is not None:
        rows_k = [size, layout.page]
    q, k, v = (
        torch.empty(*rows, heads, dim, dtype=DTYPES[point.dtype], device="meta")
        for rows, heads, dim in (
            (rows_q, point.heads, point.head_dim),
            (rows_k, point.heads_kv, point.head_dim),
            (rows_k, point.heads_kv, point.head_dim_v),
        )
    )
    chosen: dict[str, Any] = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in options(layout, backend).items()
    }
    return api.explain(q, k, v, layout="bshd", **chosen)


def packed_arguments(point: Point, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Returns the starts of queries and keys and the bounds of their lengths, of sequences with queries as keys."""
    starts = torch.tensor([0, *point.lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return starts, starts, max(point.lengths), max(point.lengths)


def packed_ours(point: Point, device: torch.device, backend: str | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Our call over packed sequences with queries as keys."""
    arguments = packed_arguments(point, device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = api.attention_varlen(q, k, v, *arguments, causal=point.is_causal, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return call


def packed_explained(point: Point, inputs: Inputs, backend: str | None) -> Explanation:
    """Explains what would run our packed call."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options: dict[str, Any] = dict(zip(names, packed_arguments(point, inputs.q.device), strict=True))
    return api.explain(inputs.q, inputs.k, inputs.v, **options, causal=point.is_causal, backend=backend)


def _varlen_attn(point: Point) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """Returns torch's attention over packed sequences, the names of its parameters, and the options of the call."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unsupported(f"this torch has no torch.nn.attention.varlen ({error})") from None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if not point.is_causal:
        options = {}
    if "enable_gqa" in known:
        options["enable_gqa"] = point.heads != point.heads_kv
    return varlen_attn, known, options


def packed_torch(point: Point, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's call over packed sequences with queries as keys."""
    varlen_attn, _, options = _varlen_attn(point)
    arguments = packed_arguments(point, device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, *arguments, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def torch_varlen(layout: Layout) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's attention over packed sequences: flash's kernel. Its newer versions read pages."""
    point = layout.point
    varlen_attn, known, options = _varlen_attn(point)
    if layout.table is not None:
        if "block_table" not in known:
            raise Unsupported("varlen_attn of this torch has no block table")
        options |= {"block_table": layout.table, "seqused_k": layout.used}
    starts_k = None if layout.table is not None else layout.starts_k

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, layout.starts_q, starts_k, point.seqlen_q, point.seqlen_k, **options)
        return layout.restored(out[0] if isinstance(out, tuple) else out)

    return call
