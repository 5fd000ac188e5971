"""Accuracy of a result against float64, on a sample of its rows, by the error rule of flashtile.testing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile import testing
from flashtile.bench.points import Inputs, Point
from flashtile.problem import AttentionArgs

MAX_ROWS = 256
MAX_GROUPS = 2
# All rows, and with them dk and dv, are checked if a key head has at most this many scores
FULL_SCORES = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class Verdict:
    max_error: float
    yardstick_error: float
    complaint: str  # empty if accurate
    checked: str


@dataclass(frozen=True)
class _Part:
    """A sample of the problem: some query rows of the first sequence, for all query heads of some key heads."""

    inputs: testing.Inputs
    rows: Tensor
    num_heads: int
    num_heads_kv: int
    is_full: bool


class Check:
    """Oracle and yardstick of one point, computed once for all providers."""

    def __init__(self, point: Point, inputs: Inputs):
        self.point, self._part = point, _sample(point, inputs)
        has_backward = point.direction != "fwd"
        self._expected = testing.expect(self._part.inputs, has_backward=has_backward)

    @staticmethod
    def num_bytes(point: Point) -> int:
        """About what it takes: a sample of rows of scores, and its keys, in float64."""
        rows, heads = min(MAX_ROWS, point.seqlen_q), MAX_GROUPS * point.heads // point.heads_kv
        return 8 * point.seqlen_k * (4 * rows * heads + MAX_GROUPS * (point.head_dim + point.head_dim_v))

    def verdict(self, out: Tensor, grads: tuple[Tensor, Tensor, Tensor] | None) -> Verdict:
        """Judges `out` and the gradients of a provider, (batch, heads, rows, dim)."""
        part, ref, low = self._part, self._expected.ref, self._expected.low
        ours = {"out": out[:1, : part.num_heads, part.rows]}
        if grads is not None:
            ours["dq"] = grads[0][:1, : part.num_heads, part.rows]
            if part.is_full:
                ours["dk"], ours["dv"] = (grad[:1, : part.num_heads_kv] for grad in grads[1:])
        complaints = [self._expected.disagreement(name, ours[name]) for name in ours]
        timed = [name for name in ours if name != "out"] or ["out"]
        return Verdict(
            max_error=max(_distance(ours[name], getattr(ref, name)) for name in timed),
            yardstick_error=max(_distance(getattr(low, name), getattr(ref, name)) for name in timed),
            complaint="; ".join(complaint for complaint in complaints if complaint),
            checked=self._describe(list(ours)),
        )

    def _describe(self, names: list[str]) -> str:
        part, point = self._part, self.point
        rows = "all rows" if part.is_full else f"{len(part.rows)} of {point.seqlen_q} rows"
        return f"{' '.join(names)}: {rows}, {part.num_heads} of {point.batch * point.heads} heads"


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def _sample(point: Point, inputs: Inputs) -> _Part:
    group = point.heads // point.heads_kv
    is_full = group * point.seqlen_q * point.seqlen_k <= FULL_SCORES[inputs.q.device.type]
    num_heads_kv = min(MAX_GROUPS, point.heads_kv) if not is_full else 1
    num_heads = group * num_heads_kv
    count = point.seqlen_q if is_full else min(MAX_ROWS, point.seqlen_q)
    rows = torch.linspace(0, point.seqlen_q - 1, count, device=inputs.q.device).round().long()
    mask = None
    if point.is_causal:
        mask = (torch.arange(point.seqlen_k, device=rows.device)[None, :] <= rows[:, None])[None, None]
    q, dout = (tensor.detach()[:1, :num_heads, rows] for tensor in (inputs.q, inputs.dout))
    k, v = (tensor.detach()[:1, :num_heads_kv] for tensor in (inputs.k, inputs.v))
    dlse = torch.zeros(q.shape[:-1], device=q.device)
    return _Part(testing.Inputs(AttentionArgs(q, k, v, mask=mask), dout, dlse), rows, num_heads, num_heads_kv, is_full)
