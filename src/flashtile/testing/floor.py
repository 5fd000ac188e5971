"""The a-priori floor of the error rule: what rounding alone may do to the result of a correct kernel.

Every rounding is taken at its largest, half a unit in the last place, and as independent of all others. Their variances
are carried to first order, in float64, from the scores to lse, out and the gradients. What is rounded:

- P and dS, to the input dtype: tensor cores read them so. Stored results, to the input dtype; the backward pass reads
  out as stored.
- Everything else, to float32. A matrix product adds its n terms one by one: n roundings of partial sums, whose size is
  that of the total or of a random walk over the terms. Row sums and sums over a broadcast bias go tile by tile.
- Equal terms are rounded alike: a sum of them over the head dim is off by half of a rounding for each term at most.
- Tensor cores add 16 terms at a time and truncate. Where all scores of a row have one sign, so do their errors, and lse
  has the mean of them.

An error that a whole row shares (its lse, its delta) is carried as one, not as independent errors of its keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends import reference
from flashtile.backends.segments import Segment, segments
from flashtile.problem import AttentionArgs, lse_dtype, softmax_scale
from flashtile.testing.cases import Inputs, Result

# Multiplies the root-mean-square error. A uniform rounding has a standard deviation of 0.58 of its largest, so 4 of the
# largest are 7 standard deviations.
FACTOR = 4.0
_TILE = 64
# A tensor core: terms added at a time, and the units in the last place that this takes from the sum at most
_TERMS, _TRUNCATED = 16, 2
_ALIKE = 0.99  # of the largest square that a sum of terms with the same squares may have: they are nearly equal


class _Units(NamedTuple):
    """Variance of one rounding of 1."""

    stored: float  # to the input dtype
    computed: float  # to float32; to float64 if that is the input dtype


def rounding_floor(inputs: Inputs, ref: Result) -> Result:
    """The floor of every tensor of `ref`, element by element."""
    args = inputs.args
    units = _Units(*((torch.finfo(dtype).eps / 2) ** 2 for dtype in (args.q.dtype, lse_dtype(args))))
    variances = Result(*(None if tensor is None else torch.zeros_like(tensor) for tensor in ref))  # type: ignore[arg-type]
    parts = segments(args)
    num_scores = ref.lse.numel() * max((part.seqlen_k for part in parts), default=0)
    for segment in parts:
        forward = _Forward(args, segment, units, ref)
        forward.add_to(variances)
        if ref.dq is not None:
            _Backward(forward, inputs, num_scores).add_to(variances)
    floors: list[Tensor | None] = []
    for name, tensor, variance in zip(Result._fields, ref, variances, strict=True):
        if tensor is None or variance is None:
            floors.append(None)
            continue
        # The result as it is stored, and P or dS where all that is summed up is rounded alike
        rounded = 0.0 if name == "lse" else 2 * units.stored * tensor.square()
        floors.append(FACTOR * (variance + rounded).sqrt())
    return Result(*floors)  # type: ignore[arg-type]


def _depth(num_terms: float) -> float:
    """Roundings one after the other in a sum that goes tile by tile."""
    return min(num_terms, _TILE + num_terms / _TILE) / 2


def _sum_var(num_terms: int, total: Tensor, squares: Tensor) -> Tensor:
    """The variance of a sum over the head dim, in roundings of 1. `squares` is the sum of the terms' squares."""
    is_alike = total.square() >= _ALIKE * num_terms * squares
    drift = torch.where(is_alike, num_terms / 2 * total / FACTOR, 0.0)
    return num_terms / 2 * (total.square() + squares) + drift.square()


class _Forward:
    """Scores, P and out of a segment with their variances."""

    def __init__(self, args: AttentionArgs, segment: Segment, units: _Units, ref: Result) -> None:
        self.args, self.segment, self.units = args, segment, units
        self.q, self.k, self.v = reference._inputs(args, segment, torch.float64)
        scores, keep = reference._scores(args, segment, self.q, self.k)
        scores = torch.where(keep, scores, 0.0)
        self.raw = torch.where(keep, reference._raw_scores(args, self.q, self.k), 0.0)
        lse = segment.stats(ref.lse)
        self.is_alive = lse != -torch.inf
        lse = torch.where(self.is_alive, lse, 0.0)[..., None]
        self.lse, self.out = lse, segment.queries(ref.out)
        self.p = torch.where(keep, torch.exp(scores - lse), 0.0)
        self.kept = reference._dropout_factor(args, segment, torch.float64)
        # Bounds the row's maximum, the logarithm of its sum, and its mean score
        self.top_squares = lse.square() + math.log1p(segment.seqlen_k) ** 2 + 1
        squares = softmax_scale(args) ** 2 * (self.q.square() @ self.k.square().mT)
        scores_var = self.q.shape[-1] / 2 * (self.raw.square() + squares) + scores.square() + self.top_squares
        self.scores_var = units.computed * torch.where(keep, scores_var, 0.0)
        self.sum_var = units.computed * _depth(segment.seqlen_k)  # of the row sum, relative to it
        self.p_var = self.p.square() * self.scores_var  # before it is rounded
        # A partial sum has half of the score on average, and a unit is two roundings
        num_units = _TRUNCATED * math.ceil(self.q.shape[-1] / _TERMS)
        truncated = num_units * (self.p * self.raw.abs()).sum(-1, keepdim=True)
        row_var = units.computed * (self.top_squares + (truncated / FACTOR).square())
        self.lse_var = self.p_var.sum(-1, keepdim=True) + self.sum_var + row_var
        # Sums of P V
        squares = (self.p * self.kept).square() @ self.v.square()
        self.product_var = units.computed * segment.seqlen_k / 2 * (squares + self.out.square())

    def add_to(self, variances: Result) -> None:
        # A score moves out by P * (V - out): by nothing where one key has all the weight
        out, v, p_var = self.out, self.v, self.p_var
        moved = (p_var * self.kept * self.kept) @ v.square() - 2 * out * ((p_var * self.kept) @ v)
        moved = (moved + out.square() * p_var.sum(-1, keepdim=True)).clamp(min=0)
        rounded = self.units.stored * ((self.p * self.kept).square() @ v.square()) + self.sum_var * out.square()
        self.segment.queries(variances.out).copy_(moved + rounded + self.product_var)
        self.segment.stats(variances.lse).copy_(torch.where(self.is_alive, self.lse_var[..., 0], 0.0))


class _Backward:
    """delta, dP and dS of a segment with their variances."""

    def __init__(self, forward: _Forward, inputs: Inputs, num_scores: int) -> None:
        self.forward, self.args, self.num_scores = forward, inputs.args, num_scores
        segment, units, v = forward.segment, forward.units, forward.v
        alive = forward.is_alive[..., None]
        self.do = torch.where(alive, segment.queries(inputs.dout).double(), 0.0)
        dlse = torch.where(alive, segment.stats(inputs.dlse).double()[..., None], 0.0)
        dp = self.do @ v.mT * forward.kept
        products = self.do * forward.out
        total = products.sum(-1, keepdim=True)
        self.delta = total - dlse
        # delta sees the errors of out: those of P, of the row sum, of storing, and of sums
        p_part = forward.p_var * (dp - total).square() + units.stored * (forward.p * dp).square()
        out_part = (self.do.square() * (units.stored * forward.out.square() + forward.product_var)).sum(
            -1, keepdim=True
        )
        row_part = total.square() * (forward.sum_var + units.stored)
        squares = products.square().sum(-1, keepdim=True)
        sums = _sum_var(v.shape[-1], total, squares) + dlse.square() + self.delta.square()
        self.delta_var = p_part.sum(-1, keepdim=True) + out_part + row_part + units.computed * sums
        dp_squares = (self.do.square() @ v.square().mT) * (forward.kept * forward.kept)
        dp_var = units.computed * (_sum_var(v.shape[-1], dp, dp_squares) + dp.square() + self.delta.square())
        self.ds = forward.p * (dp - self.delta)
        self.ds_var = self.ds.square() * (forward.scores_var + units.stored) + forward.p.square() * dp_var

    def add_to(self, variances: Result) -> None:
        if variances.dbias is not None:
            self._add_dbias(self.forward.segment.scores(variances.dbias), variances.dbias.numel())
        if variances.dsinks is not None:
            self._add_dsinks(variances.dsinks)
        self._add_products(variances)

    def _add_dbias(self, dbias_var: Tensor, num_cells: int) -> None:
        ds, ds_var, p = self.ds, self.ds_var, self.forward.p
        squares = ds.square().sum_to_size(dbias_var.shape)
        if dbias_var.shape[-2:] == (1, 1):
            # Kernels may add up each key's column first. Columns grow where rows are alike, and cancel at the end alone
            squares = squares + ds.sum(-2, keepdim=True).square().sum_to_size(dbias_var.shape)
        if dbias_var.shape[-1] == 1:
            ds, ds_var, p = (tensor.sum(-1, keepdim=True) for tensor in (ds, ds_var, p))
        variance = ds_var + self.forward.lse_var * ds.square() + self.delta_var * p.square()
        total = ds.sum_to_size(dbias_var.shape)
        rounding = self.forward.units.computed * _depth(self.num_scores / max(num_cells, 1))
        dbias_var.add_(variance.sum_to_size(dbias_var.shape) + rounding * (squares + total.square()))

    def _add_dsinks(self, dsinks_var: Tensor) -> None:
        assert self.args.sinks is not None
        p = torch.where(
            self.forward.is_alive, torch.exp(self.args.sinks.double()[:, None] - self.forward.lse[..., 0]), 0.0
        )[..., None]
        terms = p * self.delta
        variance = p.square() * self.delta_var + 2 * terms.square() * self.forward.lse_var
        num_rows = self.num_scores / max(self.forward.segment.seqlen_k, 1) / dsinks_var.numel()
        rounding = self.forward.units.computed * _depth(num_rows)
        dsinks_var.add_(
            variance.sum((0, 2, 3)) + rounding * (terms.square().sum((0, 2, 3)) + terms.sum((0, 2, 3)).square())
        )

    def _add_products(self, variances: Result) -> None:
        forward, segment, units = self.forward, self.forward.segment, self.forward.units
        q, k, p, ds, ds_var = forward.q, forward.k, forward.p, self.ds, self.ds_var
        kept = p * forward.kept
        kept_var = kept.square() * (forward.scores_var + units.stored + forward.lse_var)
        if self.args.softcap:
            slope = 1 - torch.tanh(forward.raw / self.args.softcap).square()
            moved = 4 * forward.scores_var / self.args.softcap**2
            ds_var = slope.square() * (ds_var + moved * ds.square()) + 4 * units.computed * ds.square()
            ds, p = ds * slope, p * slope
        scale = softmax_scale(self.args) ** 2
        group = q.shape[1] // segment.keys(self.args.k).shape[1]
        assert variances.dq is not None
        dq = ds @ k
        rounding = units.computed * segment.seqlen_k / 2 * (dq.square() + ds.square() @ k.square())
        shared = forward.lse_var * dq.square() + self.delta_var * (p @ k).square()
        segment.queries(variances.dq).copy_(scale * (ds_var @ k.square() + shared + rounding))
        rows_var = ds_var + forward.lse_var * ds.square() + self.delta_var * p.square()
        for total, factors, factors_var, rows, factor in (
            (variances.dk, ds, rows_var, q, scale),
            (variances.dv, kept, kept_var, self.do, 1.0),
        ):
            assert total is not None
            sums = reference._sum_groups(self.args, factors.mT @ rows).square()
            squares = reference._sum_groups(self.args, factors.square().mT @ rows.square())
            rounding = units.computed * segment.seqlen_q * group / 2 * (sums + squares)
            # Heads of stride 0 make the same errors in every head of a group
            own = group * reference._sum_groups(self.args, factors_var.mT @ rows.square())
            segment.add_to_keys(total, factor * (own + rounding))
