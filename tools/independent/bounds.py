"""Bounds on how far a correct result may be from the reference: the roundings of a kernel, from the scores to each
result.

A kernel computes in float32 (float64 for float64 inputs), may round P and dS to the inputs' dtype before a matrix
product, and rounds what it stores. `unit` is the largest relative error of one rounding. A sum of n products in any
order is off by at most n units of the sum of their magnitudes. A score that is off by e changes its weight by a factor
of at most exp(e), and the row's sum by at most what `logaddexp` of all weights says. Both stay in the log domain: a
score of -1e38 that is off by 1e31 still has weight 0. The constants count the roundings of a step (scaling by log2(e),
the exponential, rescaling to a new maximum) and leave room for one or two more; none was fitted to a backend.

Gradients recompute P from the stored lse, so they lose what the lse lost to rounding: all, where |lse| reaches 1e8 in
float32. The bounds then allow any finite number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from reference import Array, Head, HeadGradients


@dataclass(frozen=True)
class Precision:
    """The roundings of one dtype."""

    stored: float  # unit of the dtype
    compute: float  # unit of the arithmetic; twice that of float64, since the reference rounds too
    smallest: float  # below this, numbers lose digits or become 0
    largest: float
    rounds_weights: bool  # P and dS may be rounded to the dtype
    underflow: float  # the same limit for the arithmetic


PRECISIONS = {
    "float64": Precision(2.0**-53, 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max), False, 2.0**-1000),
    "float32": Precision(2.0**-24, 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max), False, 2.0**-122),
    "bfloat16": Precision(2.0**-8, 2.0**-24, 2.0**-126, 3.3895313892515355e38, True, 2.0**-122),
    "float16": Precision(2.0**-11, 2.0**-24, 2.0**-24, 65504.0, True, 2.0**-122),
}


@dataclass
class Errors:
    """Bounds of one head's forward pass."""

    score: Array  # (sq, sk)
    out: Array  # (sq, dv), as stored
    lse: Array  # (sq,), as stored


def weight_error(log_p: Array, p: Array, e: Array, limit: float) -> Array:
    """Returns how far exp(log_p +- e) is from p, where no weight exceeds exp(limit)."""
    near = p * np.expm1(np.minimum(e, 1.0))
    far = np.maximum(np.exp(np.clip(log_p + e, -1e4, limit)) - p, p)
    return np.where(e <= 1.0, near, far)


def forward(f: Head, r: Precision) -> Errors:
    unit, n = r.compute, f.k.shape[0]
    seen = f.seen
    with np.errstate(invalid="ignore"):
        size = np.where(seen, abs(f.scale) * (abs(f.q) @ abs(f.k).T), 0.0)
        e_dot = (f.q.shape[1] + 6) * unit * size
        if f.q_error is not None:
            e_dot = e_dot + np.where(seen, abs(f.scale) * (f.q_error @ abs(f.k).T), 0.0)
    rest = 2 * size  # no part of the score, nor of its error, is larger
    e = e_dot
    if f.tanh is not None:
        capped = f.softcap * abs(f.tanh)
        e = np.minimum(e_dot, 2 * f.softcap) + 8 * unit * capped
        rest = np.minimum(rest, 2 * f.softcap)
    if f.alibi is not None:
        e = e + 6 * unit * abs(f.alibi)
        rest = rest + abs(f.alibi)
    s = np.where(seen, f.s, 0.0)
    top = np.where(f.m == -np.inf, 0.0, f.m)
    e = e + 8 * unit * abs(s) + 2 * unit * abs(top)[:, None]
    shared = np.zeros_like(f.m)
    if f.bias is not None:
        e = e + 6 * unit * abs(f.bias)
        # A bias that swallows all else leaves equal scores equal, whatever their size
        same = seen & (rest < abs(f.bias) * 2.0**-56) & (f.s == f.m[:, None])
        e = np.where(same, 0.0, e)
        shared = np.where(same.any(1), 14 * unit * abs(top), 0.0)
    e = np.where(seen, e, 0.0)

    empty = f.lse == -np.inf
    lse = np.where(empty, 0.0, f.lse)
    log_p = f.log_p
    row = np.logaddexp.reduce(log_p + e, axis=1, initial=-np.inf)
    if f.sink is not None:
        row = np.logaddexp(row, f.sink - lse + 8 * unit * abs(f.sink) if f.sink > -np.inf else -np.inf)
    row = np.maximum(np.where(empty, 0.0, row), 0.0) + (n + 32) * unit
    p = weight_error(log_p, f.p, e + row[:, None], 0.0) + np.where(seen, r.underflow, 0.0)
    stored = p
    if r.rounds_weights:
        stored = p + np.where(seen, r.stored * f.p + r.smallest, 0.0)
    v = abs(f.v)
    out = (f.drop * stored) @ v + (n + 8) * unit * ((f.drop * (f.p + stored)) @ v)
    out = out + r.stored * (abs(f.out) + out) + r.smallest + r.underflow
    out = np.where(empty[:, None], 0.0, out)
    return Errors(e, out, np.where(empty, 0.0, row + shared + 6 * unit * (abs(lse) + abs(top))))


@dataclass
class GradientErrors:
    """Bounds of one head's gradients. Those of sums over heads leave out the last rounding, which `stored` adds."""

    dbias: Array
    dq: Array
    dk: Array
    dv: Array
    dsink: float


def stored(value: Array, error: Array, terms: int, sizes: Array, dtype: str, r: Precision) -> Array:
    """The bound of a sum of `terms` values, whose magnitudes sum to `sizes`, rounded to dtype."""
    last = PRECISIONS[dtype]
    error = error + (terms + 4) * r.compute * (sizes + error)
    return error + last.stored * (abs(value) + error) + last.smallest + r.underflow


def backward(f: Head, e: Errors, b: HeadGradients, dout: Array, dlse: Array, r: Precision) -> GradientErrors:
    unit = r.compute
    empty = f.lse == -np.inf
    p = weight_error(f.log_p, f.p, e.score + e.lse[:, None] + 32 * unit, 250.0) + np.where(f.seen, r.underflow, 0.0)
    e_dP = (f.v.shape[1] + 4) * unit * (abs(dout) @ abs(f.v).T)
    e_delta = (
        (abs(dout) * e.out).sum(1) + (f.v.shape[1] + 6) * unit * (abs(dout) * abs(f.out)).sum(1) + 4 * unit * abs(dlse)
    )
    e_delta = np.where(empty, 0.0, e_delta)
    e_g = f.drop * e_dP + e_delta[:, None] + 4 * unit * (f.drop * abs(b.dP) + abs(b.delta)[:, None])
    e_dS = p * (abs(b.g) + e_g) + f.p * e_g + 4 * unit * abs(b.dbias)
    e_dS = np.where(f.seen, e_dS + r.underflow, 0.0)
    if r.rounds_weights:
        e_dS = e_dS + np.where(f.seen, r.stored * (abs(b.dbias) + e_dS) + r.smallest, 0.0)
    e_dbias = e_dS
    if f.tanh is not None:
        # 1 - tanh^2 changes by at most 0.77 of what its argument changes by
        e_dot = (f.q.shape[1] + 8) * unit * np.where(f.seen, abs(f.scale) * (abs(f.q) @ abs(f.k).T), 0.0)
        e_factor = np.minimum(1.0, 0.77 * e_dot / f.softcap) + 10 * unit
        e_dS = e_dS * (1 - f.tanh**2 + e_factor) + abs(b.dbias) * e_factor + r.underflow
        e_dS = np.where(f.seen, e_dS, 0.0)
        if r.rounds_weights:
            e_dS = e_dS + np.where(f.seen, r.stored * abs(b.dS) + r.smallest, 0.0)
    scale = abs(f.scale)
    sq, sk = f.seen.shape
    size = abs(b.dS) + e_dS
    dq = scale * (e_dS @ abs(f.k) + (sk + 6) * unit * (size @ abs(f.k)))
    dk = scale * (e_dS.T @ abs(f.q) + (sq + 6) * unit * (size.T @ abs(f.q)))
    e_p = p + np.where(f.seen, r.stored * f.p + r.smallest, 0.0) if r.rounds_weights else p
    dv = (f.drop * e_p).T @ abs(dout) + (sq + 6) * unit * ((f.drop * (f.p + e_p)).T @ abs(dout))
    dsink = 0.0
    if f.sink is not None and f.sink > -np.inf:
        log_sink = f.sink - np.where(empty, np.inf, f.lse)
        weight = np.exp(log_sink)
        e_weight = weight_error(log_sink, weight, 8 * unit * abs(f.sink) + e.lse + 32 * unit, 250.0) + r.underflow
        sizes = e_weight * (abs(b.delta) + e_delta) + weight * (e_delta + (sq + 8) * unit * abs(b.delta))
        dsink = float(sizes.sum())
    return GradientErrors(e_dbias, dq, dk, dv, dsink)
