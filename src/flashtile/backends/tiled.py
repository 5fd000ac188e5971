"""FlashAttention-2's algorithm as one page of PyTorch: tiles, online softmax, memory linear in the sequence length.

Forward: each block of queries loops over the blocks of keys that it may see. It keeps the row maximum `m`, the row sum
`l` of exp(S - m) and the unnormalised output `o`. When a block raises the maximum, `l` and `o` are rescaled by
exp(m_old - m_new) before the block is added.

Backward: each block of keys loops over the blocks of queries that see it and recomputes P = exp(S - lse) from the
stored lse. With delta = rowsum(dO * O) - dlse the gradient of the scores is dS = P * (dP - delta). dK and dV of the
block are accumulated over the loop; every block of keys adds its share to dQ.

Axes in einsum: b batch, h key heads, g query heads per key head, i queries, j keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.backends import dropout
from flashtile.backends.base import Backend, Grads
from flashtile.backends.segments import Segment, segments
from flashtile.errors import dtype_name
from flashtile.plans.params import kernel_softcap
from flashtile.problem import AttentionArgs, Problem, key_window, softmax_scale

BLOCK_M = 128  # queries per tile
BLOCK_N = 256  # keys per tile


class TiledBackend(Backend):
    name = "tiled"
    summary = "FlashAttention-2's algorithm in plain PyTorch, memory linear in the sequence length"
    devices = ("cpu", "cuda")

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        return None

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        for segment in segments(args):
            forward_segment(Tiles(args, segment), segment, out, lse)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        sums = grads.wide(compute_dtype(args.q.dtype))
        for segment in segments(args):
            backward_segment(Tiles(args, segment), segment, dout, dlse, out, lse, sums)
        grads.fill(sums)

    def tile_sizes(self) -> frozenset[int]:
        return frozenset((BLOCK_M, BLOCK_N))

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        return {"tile": f"{BLOCK_M} queries x {BLOCK_N} keys", "arithmetic": dtype_name(compute_dtype(problem.dtype))}


class Tiles:
    """The score tiles of one segment: the blocks they cover, and their scores."""

    def __init__(self, args: AttentionArgs, segment: Segment):
        self.args = args
        self.dtype = compute_dtype(args.q.dtype)
        self.k, self.v = segment.keys(args.k), segment.keys(args.v)
        self.heads_kv = self.k.shape[1]
        self.q = self.grouped(segment.queries(args.q))
        self.scale = softmax_scale(args)
        self.softcap, self.softcap_factor = kernel_softcap(args.softcap, self.scale, self.dtype == torch.float64)
        self.window = key_window(args)
        self.seqlen_q, self.seqlen_k, self.offset = segment.seqlen_q, segment.seqlen_k, segment.offset
        slopes = segment.slopes()
        self.slopes = None if slopes is None else self.grouped(slopes)[..., None, None]
        self.sinks = None if args.sinks is None else self.grouped(args.sinks[None].to(self.dtype))[..., None]
        self.bias = None if args.bias is None else self.grouped(segment.scores(args.bias))
        self.mask = None if args.mask is None else self.grouped(segment.scores(args.mask))
        self.keep_factor = dropout.keep_factor(args.dropout_p)
        self.batch_heads = self.grouped(segment.batch_heads()) if args.dropout_p else None

    def grouped(self, tensor: Tensor) -> Tensor:
        """Splits the head axis into (heads_kv, group); a head axis of size 1 becomes (1, 1)."""
        return tensor.unflatten(1, (1, 1) if tensor.shape[1] == 1 else (self.heads_kv, -1))

    def query_blocks(self) -> Iterator[range]:
        for start in range(0, self.seqlen_q, BLOCK_M):
            yield range(start, min(start + BLOCK_M, self.seqlen_q))

    def key_blocks(self) -> Iterator[range]:
        for start in range(0, self.seqlen_k, BLOCK_N):
            yield range(start, min(start + BLOCK_N, self.seqlen_k))

    def is_empty(self, i: range, j: range) -> bool:
        """True if no query of the tile sees any of its keys, so that the tile can be skipped."""
        left, right = self.window
        return (right >= 0 and j.start > i.stop - 1 + self.offset + right) or (
            left >= 0 and j.stop - 1 < i.start + self.offset - left
        )

    def load(self, tensor: Tensor, block: range) -> Tensor:
        """A block of rows in the compute dtype."""
        return tensor[..., block.start : block.stop, :].to(self.dtype)

    def scores(self, i: range, j: range, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """S of one tile, -inf where masked, and the softcap's tanh if there is a softcap."""
        s = torch.einsum("bhgid,bhjd->bhgij", q, k)
        capped = None
        if self.softcap:
            capped = torch.tanh(s * self.softcap_factor)
            s = capped * self.softcap
        else:
            s = s * self.scale
        distance = (
            torch.arange(i.start, i.stop, device=s.device)[:, None]
            + self.offset
            - torch.arange(j.start, j.stop, device=s.device)
        )
        if self.slopes is not None:
            s = s - self.slopes.to(self.dtype) * distance.abs()
        if self.bias is not None:
            s = s + crop(self.bias, i, j)
        left, right = self.window
        if left >= 0:
            s = s.masked_fill(distance > left, -torch.inf)
        if right >= 0:
            s = s.masked_fill(distance < -right, -torch.inf)
        if self.mask is not None:
            s = s.masked_fill(~crop(self.mask, i, j), -torch.inf)
        return s, capped

    def drop(self, p: Tensor, i: range, j: range) -> Tensor:
        """Applies dropout to one tile of P or dP, but for the factor of what is kept."""
        if self.batch_heads is None or self.args.rng_state is None:
            return p
        indices = dropout.indices(self.args, self.batch_heads, i, j)
        keep = dropout.keep_mask(self.args.rng_state, self.args.dropout_p, *indices)
        return torch.where(keep, p, 0.0)


def forward_segment(tiles: Tiles, segment: Segment, out: Tensor, lse: Tensor) -> None:
    out, lse = tiles.grouped(segment.queries(out)), tiles.grouped(segment.stats(lse))
    for i in tiles.query_blocks():
        q = tiles.load(tiles.q, i)
        m = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
        l = torch.zeros_like(m)
        o = q.new_zeros(*q.shape[:-1], tiles.v.shape[-1])
        for j in tiles.key_blocks():
            if tiles.is_empty(i, j):
                continue
            s, _ = tiles.scores(i, j, q, tiles.load(tiles.k, j))
            # Update the row maximum
            m_new = torch.maximum(m, s.amax(-1))
            alpha = torch.exp(m - finite(m_new))
            p = torch.exp(s - finite(m_new)[..., None])
            # Rescale l and O to the new maximum and add this block
            l = l * alpha + p.sum(-1)
            o = o * alpha[..., None] + torch.einsum("bhgij,bhjd->bhgid", tiles.drop(p, i, j), tiles.load(tiles.v, j))
            m = m_new
        if tiles.sinks is not None:
            # The sink is a key without a value: it joins the denominator only
            m_new = torch.maximum(m, tiles.sinks)
            alpha = torch.exp(m - finite(m_new))
            l = l * alpha + torch.exp(tiles.sinks - finite(m_new))
            o, m = o * alpha[..., None], m_new
        # A fully masked row has l = 0: output 0, lse -inf
        out[..., i.start : i.stop, :] = o * (tiles.keep_factor / torch.where(l == 0, 1.0, l))[..., None]
        lse[..., i.start : i.stop] = m + torch.log(l)


def backward_segment(
    tiles: Tiles, segment: Segment, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
) -> None:
    dout, out, lse = (
        tiles.grouped(segment.queries(dout)),
        tiles.grouped(segment.queries(out)),
        tiles.grouped(segment.stats(lse)),
    )
    lse = lse.to(tiles.dtype)
    delta = torch.zeros_like(lse) if dlse is None else -tiles.grouped(segment.stats(dlse)).to(tiles.dtype)
    for i in tiles.query_blocks():
        delta[..., i.start : i.stop] += (tiles.load(dout, i) * tiles.load(out, i)).sum(-1)
    # A fully masked row has no gradient, whatever dO and dlse hold
    is_empty = lse == -torch.inf
    delta = torch.where(is_empty, 0.0, delta)
    needs_ds = any(grad is not None for grad in (grads.dq, grads.dk, grads.dbias))
    dq = None if grads.dq is None else tiles.grouped(segment.queries(grads.dq))
    dbias = None if grads.dbias is None else tiles.grouped(segment.scores(grads.dbias))
    dk = None if grads.dk is None else torch.zeros_like(tiles.k, dtype=tiles.dtype)
    dv = None if grads.dv is None else torch.zeros_like(tiles.v, dtype=tiles.dtype)

    for j in tiles.key_blocks():
        k, v = tiles.load(tiles.k, j), tiles.load(tiles.v, j)
        for i in tiles.query_blocks():
            if tiles.is_empty(i, j):
                continue
            q = tiles.load(tiles.q, i)
            do = torch.where(is_empty[..., i.start : i.stop, None], 0.0, tiles.load(dout, i))
            # Recompute P from the stored lse, at most 1: a rounded lse of a huge score may be far too small
            s, capped = tiles.scores(i, j, q, k)
            p = torch.exp((s - finite(lse[..., i.start : i.stop])[..., None]).clamp(max=0.0))
            if dv is not None:
                dropped = tiles.drop(p, i, j) * tiles.keep_factor
                dv[:, :, j.start : j.stop] += torch.einsum("bhgij,bhgid->bhjd", dropped, do)
            if not needs_ds:
                continue
            # dS through the softmax, then through the softcap and the scale
            dp = tiles.drop(torch.einsum("bhgid,bhjd->bhgij", do, v), i, j) * tiles.keep_factor
            ds = p * (dp - delta[..., i.start : i.stop, None])
            if dbias is not None:
                part = crop(dbias, i, j)
                part += ds.sum_to_size(part.shape)
            if capped is not None:
                ds = ds * (1 - capped * capped)
            ds = ds * tiles.scale
            if dk is not None:
                dk[:, :, j.start : j.stop] += torch.einsum("bhgij,bhgid->bhjd", ds, q)
            if dq is not None:
                dq[..., i.start : i.stop, :] += torch.einsum("bhgij,bhjd->bhgid", ds, k)

    if grads.dk is not None and dk is not None:
        segment.add_to_keys(grads.dk, dk)
    if grads.dv is not None and dv is not None:
        segment.add_to_keys(grads.dv, dv)
    if grads.dsinks is not None and tiles.sinks is not None:
        p_sink = torch.exp((tiles.sinks - finite(lse)).clamp(max=0.0))
        grads.dsinks.sub_((p_sink * delta).sum((0, 3)).flatten())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(maximum: Tensor) -> Tensor:
    """Replaces -inf, the maximum of a row without keys, by 0: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def crop(tensor: Tensor, i: range, j: range) -> Tensor:
    """The tile of a tensor that broadcasts to the scores."""
    if tensor.shape[-2] != 1:
        tensor = tensor[..., i.start : i.stop, :]
    if tensor.shape[-1] != 1:
        tensor = tensor[..., j.start : j.stop]
    return tensor
