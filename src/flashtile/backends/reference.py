"""The oracle: attention by its definition, in float64, with the whole score matrix in memory.

    S = softcap(scale * Q K^T) - slope * |i + offset - j| + bias,   -inf where masked
    P = exp(S - lse),   lse = log(sum_j exp(S) + exp(sink)),   O = dropout(P) V

Everything is differentiable PyTorch, including the backward formulas: second derivatives use them. The compute dtype is
a parameter: in the input dtype the same code gives the baseline error that the error rule compares with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.backends import dropout
from flashtile.backends.base import Backend, Grads
from flashtile.backends.segments import Segment, segments
from flashtile.problem import AttentionArgs, Problem, key_window, shape_of, softmax_scale


class ReferenceBackend(Backend):
    name = "reference"
    summary = "the definition in float64; it stores the N x N scores"
    devices = ("cpu", "cuda")
    is_automatic = False

    def refuse(self, problem: Problem, op: str = "forward") -> str | None:
        return None

    def forward(self, args: AttentionArgs, out: Tensor, lse: Tensor) -> None:
        attend(args, out, lse, torch.float64)

    def backward(
        self, args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads
    ) -> None:
        attend_backward(args, dout, dlse, out, lse, grads, torch.float64)

    def details(self, problem: Problem, op: str = "forward") -> dict[str, str]:
        shape = problem.shape
        scores = 8 * shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        return {"arithmetic": "float64", "memory": f"{scores / 2**20:.1f} MiB for each score matrix"}


def attend(args: AttentionArgs, out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
    """Fills out and lse, computing in `dtype` (the log-sum-exp in the dtype of `lse`)."""
    for segment in segments(args):
        q, k, v = _inputs(args, segment, dtype)
        s, keep = _scores(args, segment, q, k)
        # The sink is an extra column; -inf without sinks
        sinks = s.new_full((s.shape[1],), -torch.inf) if args.sinks is None else args.sinks.to(dtype)
        s = torch.cat([s.masked_fill(~keep, -torch.inf), sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
        # A fully masked row without a sink: output 0, lse -inf, no gradient
        is_alive = (s != -torch.inf).any(-1)
        s = torch.where(is_alive[..., None], s, 0.0)
        p = torch.where(keep, torch.softmax(s, dim=-1)[..., :-1], 0.0)
        segment.queries(out).copy_(p * _dropout_factor(args, segment, dtype) @ v)
        segment.stats(lse).copy_(torch.where(is_alive, torch.logsumexp(s.to(lse.dtype), dim=-1), -torch.inf))


def attend_backward(
    args: AttentionArgs, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, grads: Grads, dtype: torch.dtype
) -> None:
    """Fills the gradients from the formulas of the backward pass, computing in `dtype`."""
    sums = grads.wide(dtype)
    for segment in segments(args):
        q, k, v = _inputs(args, segment, dtype)
        do, o, row_lse = segment.queries(dout).to(dtype), segment.queries(out).to(dtype), segment.stats(lse)
        # A fully masked row has no gradient, whatever dO and dlse hold
        do = torch.where((row_lse == -torch.inf)[..., None], 0.0, do)
        delta = (do * o).sum(-1)
        if dlse is not None:
            delta = delta - torch.where(row_lse == -torch.inf, 0.0, segment.stats(dlse).to(dtype))

        s, keep = _scores(args, segment, q, k)
        shift = torch.where(row_lse == -torch.inf, 0.0, row_lse)
        # At most 1: a float32 lse of a huge score may be far too small
        p = torch.where(keep, torch.exp(torch.where(keep, s - shift[..., None], 0.0).clamp(max=0.0)), 0.0).to(dtype)
        kept = _dropout_factor(args, segment, dtype)
        dp = do @ v.transpose(-1, -2) * kept
        ds = p * (dp - delta[..., None])

        if sums.dv is not None:
            segment.add_to_keys(sums.dv, _sum_groups(args, (p * kept).transpose(-1, -2) @ do))
        if sums.dbias is not None:
            part = segment.scores(sums.dbias)
            part.add_(ds.sum_to_size(part.shape))
        if sums.dsinks is not None and args.sinks is not None:
            p_sink = torch.exp((args.sinks.to(dtype)[:, None] - shift).clamp(max=0.0)).to(dtype)
            sums.dsinks.sub_((p_sink * delta).sum((0, 2)))
        if args.softcap:
            ds = ds * (1 - torch.tanh(_raw_scores(args, q, k) / args.softcap) ** 2)
        ds = ds * softmax_scale(args)
        if sums.dq is not None:
            segment.queries(sums.dq).copy_(ds @ k)
        if sums.dk is not None:
            segment.add_to_keys(sums.dk, _sum_groups(args, ds.transpose(-1, -2) @ q))
    grads.fill(sums)


def _inputs(args: AttentionArgs, segment: Segment, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the segment in the compute dtype, with k and v repeated for every query head."""
    q, k, v = segment.queries(args.q), segment.keys(args.k), segment.keys(args.v)
    group = q.shape[1] // k.shape[1]
    return q.to(dtype), k.to(dtype).repeat_interleave(group, dim=1), v.to(dtype).repeat_interleave(group, dim=1)


def _sum_groups(args: AttentionArgs, grad: Tensor) -> Tensor:
    """Sums over the query heads that share a key head."""
    return grad.unflatten(1, (shape_of(args).heads_kv, -1)).sum(2)


def _raw_scores(args: AttentionArgs, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * softmax_scale(args)


def _scores(args: AttentionArgs, segment: Segment, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """S before masking, and which elements are kept."""
    s = _raw_scores(args, q, k)
    if args.softcap:
        s = args.softcap * torch.tanh(s / args.softcap)
    rows = torch.arange(segment.seqlen_q, device=q.device)[:, None] + segment.offset
    distance = rows - torch.arange(segment.seqlen_k, device=q.device)
    slopes = segment.slopes()
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * distance.abs().to(s.dtype)
    keep = torch.ones(s.shape, dtype=torch.bool, device=q.device)
    if args.bias is not None:
        s = s + segment.scores(args.bias).to(s.dtype)
        keep = keep & (s != -torch.inf)  # added, not replaced: NaN stays
    if args.mask is not None:
        keep = keep & segment.scores(args.mask)
    left, right = key_window(args)
    if left >= 0:
        keep = keep & (distance <= left)
    if right >= 0:
        keep = keep & (distance >= -right)
    return s, keep


def _dropout_factor(args: AttentionArgs, segment: Segment, dtype: torch.dtype) -> Tensor | float:
    """The factor of P: 0 where dropped, the keep factor elsewhere."""
    if args.dropout_p == 0.0 or args.rng_state is None:
        return 1.0
    indices = dropout.indices(args, segment.batch_heads(), range(segment.seqlen_q), range(segment.seqlen_k))
    kept = dropout.keep_mask(args.rng_state, args.dropout_p, *indices)
    return kept.to(dtype) * dropout.keep_factor(args.dropout_p)
