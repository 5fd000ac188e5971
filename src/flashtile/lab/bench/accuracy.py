"""Accuracy of a result against float64, on a sample of its rows, by the error rule of flashtile.testing."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile import testing
from flashtile.lab.bench.points import Inputs, Point
from flashtile.problem import AttentionArgs

MAX_ROWS = 256
MAX_GROUPS = 2
# All rows, and with them dk and dv, are checked if a key head has at most this many scores
FULL_SCORES = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class Verdict:
    max_error: float
    yardstick_error: float
    relative_error: float
    complaint: str  # empty if accurate
    checked: str
    is_checked: bool = True  # False: the errors are NaN


@dataclass(frozen=True)
class _Part:
    """A sample of the problem: some query rows of the first sequence, for all query heads of some key heads.

    The gradient of a bias is a sum over the sequences: with it the sample has them all.
    """

    inputs: testing.Inputs
    rows: Tensor
    num_sequences: int
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
        heads *= _num_sequences(point)
        return 8 * point.seqlen_k * (4 * rows * heads + MAX_GROUPS * (point.head_dim + point.head_dim_v))

    def verdict(
        self, out: Tensor, grads: tuple[Tensor, ...] | None, max_relative_error: float | None = None
    ) -> Verdict:
        """Judges `out` and the gradients of a provider, (batch, heads, rows, dim); a fourth one is the bias's. By the
        error rule, or by a bound on the norm of the error."""
        if self.point.extra.dropout_p:
            nothing = "nothing: every provider drops other weights"
            return Verdict(math.nan, math.nan, math.nan, "", nothing, is_checked=False)
        part, ref, low = self._part, self._expected.ref, self._expected.low
        ours = {"out": out[: part.num_sequences, : part.num_heads, part.rows]}
        if grads is not None:
            ours["dq"] = grads[0][: part.num_sequences, : part.num_heads, part.rows]
            if part.is_full:
                ours["dk"], ours["dv"] = (grad[: part.num_sequences, : part.num_heads_kv] for grad in grads[1:3])
            if self.point.extra.has_bias_grad:
                ours["dbias"] = grads[3][:, : part.num_heads, part.rows]
        timed = [name for name in ours if name != "out"] or ["out"]
        relative = {name: _relative(ours[name], getattr(ref, name)) for name in ours}
        if max_relative_error is None:
            complaints = [self._expected.disagreement(name, ours[name]) for name in ours]
        else:
            complaints = [
                f"{name}: relative error {error:.3e}, allowed {max_relative_error:.3e}"
                for name, error in relative.items()
                if not error <= max_relative_error
            ]
        return Verdict(
            max_error=max(_distance(ours[name], getattr(ref, name)) for name in timed),
            yardstick_error=max(_distance(getattr(low, name), getattr(ref, name)) for name in timed),
            relative_error=max(relative[name] for name in timed),
            complaint="; ".join(complaint for complaint in complaints if complaint),
            checked=self._describe(list(ours)),
        )

    def _describe(self, names: list[str]) -> str:
        part, point = self._part, self.point
        rows = "all rows" if part.is_full else f"{len(part.rows)} of {point.seqlen_q} rows"
        num_heads = part.num_sequences * part.num_heads
        return f"{' '.join(names)}: {rows}, {num_heads} of {point.batch * point.heads} heads"


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def _relative(one: Tensor, ref: Tensor) -> float:
    """Norm of the difference over the norm of `ref`."""
    return ((one.double() - ref).norm() / ref.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()


def _sample(point: Point, inputs: Inputs) -> _Part:
    group = point.heads // point.heads_kv
    is_full = group * point.seqlen_q * point.seqlen_k <= FULL_SCORES[inputs.q.device.type]
    num_heads_kv = min(MAX_GROUPS, point.heads_kv) if not is_full else 1
    num_heads = group * num_heads_kv
    count = point.seqlen_q if is_full else min(MAX_ROWS, point.seqlen_q)
    rows = torch.linspace(0, point.seqlen_q - 1, count, device=inputs.q.device).round().long()
    num_sequences = _num_sequences(point)
    q, dout = (tensor.detach()[:num_sequences, :num_heads, rows] for tensor in (inputs.q, inputs.dout))
    k, v = (tensor.detach()[:num_sequences, :num_heads_kv] for tensor in (inputs.k, inputs.v))
    args = AttentionArgs(
        q,
        k,
        v,
        bias=_bias(point, inputs, rows, num_sequences, num_heads),
        mask=_mask(point, inputs, rows, num_sequences, num_heads),
        softcap=point.extra.softcap,
    )
    dlse = torch.zeros(q.shape[:-1], device=q.device)
    return _Part(testing.Inputs(args, dout, dlse), rows, num_sequences, num_heads, num_heads_kv, is_full)


def _num_sequences(point: Point) -> int:
    return point.batch if point.extra.has_bias_grad and point.direction != "fwd" else 1


def _key_distances(point: Point, rows: Tensor) -> Tensor:
    """Returns by how many keys each key is before the query of a row: the last query stands at the last key."""
    return rows[:, None] + point.seqlen_k - point.seqlen_q - torch.arange(point.seqlen_k, device=rows.device)


def _mask(point: Point, inputs: Inputs, rows: Tensor, num_sequences: int, num_heads: int) -> Tensor | None:
    """Returns causal mask, window and the call's own mask for the rows of the sample, or None."""
    distance, masks = _key_distances(point, rows), []
    if point.is_causal:
        masks.append((distance >= 0)[None, None])
    if point.extra.window is not None:
        masks.append((distance <= point.extra.window)[None, None])
    if inputs.extras.mask is not None:
        own = inputs.extras.mask[:num_sequences]
        masks.append(own[:, :num_heads, rows] if point.extra.mask in ("dense", "heads") else own)
    return functools.reduce(torch.logical_and, masks) if masks else None


def _bias(point: Point, inputs: Inputs, rows: Tensor, num_sequences: int, num_heads: int) -> Tensor | None:
    """Returns the call's bias, or its ALiBi slopes as a bias, for the rows of the sample."""
    if inputs.extras.alibi_slopes is not None:
        return -inputs.extras.alibi_slopes[None, :num_heads, None, None] * _key_distances(point, rows).abs()
    return None if inputs.extras.bias is None else inputs.extras.bias[:num_sequences, :num_heads, rows]
