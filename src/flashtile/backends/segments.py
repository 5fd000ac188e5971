"""Splits a call into dense segments, for the backends written in PyTorch.

Dense, packed, padded and paged inputs differ only in where the rows of a sequence are stored. A Segment hides that: it
returns its part of any tensor as (batch, heads, rows, dim). A dense call is one segment with the whole batch; otherwise
each sequence is a segment of batch 1. Queries, outputs and statistics are always views; keys are views unless they are
paged. The host reads the lengths, so packed, padded and paged calls synchronise with the GPU here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.problem import AttentionArgs, SequenceSpan, check_values, page_size, query_offset, shape_of


@dataclass(frozen=True)
class Segment:
    """A part of the batch whose sequences share their lengths."""

    args: AttentionArgs
    first: int  # index of its first sequence in the batch
    batch: int
    span: SequenceSpan

    @property
    def seqlen_q(self) -> int:
        return self.span.seqlen_q

    @property
    def seqlen_k(self) -> int:
        return self.span.seqlen_k

    @property
    def offset(self) -> int:
        return query_offset(self.args, self.seqlen_q, self.seqlen_k)

    def queries(self, tensor: Tensor) -> Tensor:
        """Returns the segment's part of q, out or one of their gradients: (batch, heads, seqlen_q, dim)."""
        if self.args.layout == "bshd":
            tensor = tensor.transpose(-2, -3)
        if self.args.cu_seqlens_q is not None:
            return tensor[None, :, self.span.q_start : self.span.q_start + self.seqlen_q]
        return tensor[self.first : self.first + self.batch]

    def stats(self, tensor: Tensor) -> Tensor:
        """Returns the segment's part of lse or its gradient: (batch, heads, seqlen_q)."""
        if self.args.cu_seqlens_q is not None:
            return tensor[None, :, self.span.q_start : self.span.q_start + self.seqlen_q]
        return tensor[self.first : self.first + self.batch]

    def keys(self, tensor: Tensor) -> Tensor:
        """Returns the segment's part of k or v: (batch, heads_kv, seqlen_k, dim)."""
        if self.args.block_table is not None:
            pages = tensor if self.args.layout == "bshd" else tensor.transpose(1, 2)
            return pages[self._page_index()].transpose(0, 1)[None]
        return self._key_view(tensor)

    def add_to_keys(self, tensor: Tensor, grad: Tensor) -> None:
        """Adds to its part of dk or dv. Sequences may share pages, so their shares add up."""
        if self.args.block_table is not None:
            pages = tensor if self.args.layout == "bshd" else tensor.transpose(1, 2)
            pages.index_put_(self._page_index(), grad[0].transpose(0, 1), accumulate=True)
        else:
            self._key_view(tensor).add_(grad)

    def scores(self, tensor: Tensor) -> Tensor:
        """Returns the segment's part of bias or mask: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)."""
        if tensor.shape[0] != 1:
            tensor = tensor[self.first : self.first + self.batch]
        if tensor.shape[2] != 1:
            tensor = tensor[:, :, : self.seqlen_q]
        if tensor.shape[3] != 1:
            tensor = tensor[:, :, :, : self.seqlen_k]
        return tensor

    def slopes(self) -> Tensor | None:
        """ALiBi slopes: (batch or 1, heads)."""
        slopes = self.args.alibi_slopes
        if slopes is None:
            return None
        return slopes[self.first : self.first + self.batch] if slopes.dim() == 2 else slopes[None]

    def batch_heads(self) -> Tensor:
        """b * heads + h for the dropout counter: (batch, heads)."""
        heads = shape_of(self.args).heads
        first, last = self.first * heads, (self.first + self.batch) * heads
        return torch.arange(first, last, device=self.args.q.device).view(self.batch, heads)

    def _key_view(self, tensor: Tensor) -> Tensor:
        if self.args.layout == "bshd":
            tensor = tensor.transpose(-2, -3)
        tensor = tensor[None] if self.args.cu_seqlens_q is not None else tensor[self.first : self.first + self.batch]
        return tensor[:, :, self.span.k_start : self.span.k_start + self.seqlen_k]

    def _page_index(self) -> tuple[Tensor, Tensor]:
        assert self.args.block_table is not None
        rows = torch.arange(self.span.k_start, self.span.k_start + self.seqlen_k, device=self.args.q.device)
        size = max(page_size(self.args), 1)
        return self.args.block_table[self.first, rows // size].long(), rows % size


def segments(args: AttentionArgs) -> list[Segment]:
    index_tensors = (args.cu_seqlens_q, args.seqused_k, args.leftpad_k, args.block_table)
    if all(tensor is None for tensor in index_tensors):
        shape = shape_of(args)
        return [Segment(args, 0, shape.batch, SequenceSpan(0, shape.seqlen_q, 0, shape.seqlen_k))]
    return [Segment(args, b, 1, span) for b, span in enumerate(check_values(args))]
