"""Attention as docs/semantics.md defines it: NumPy in float64, one sequence and one head at a time.

Written from that page alone. It shares no code with the library, its oracle or its tests, so that it shares no
misunderstanding with them. Every rule of the page that a kernel could get wrong is a method of `Reference`;
`faults.py` replaces them one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass
class Options:
    """Options that all sequences of a call share."""

    heads: int
    heads_kv: int
    scale: float
    causal: bool | str = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0


@dataclass
class Sequence:
    """One sequence of a call, all heads, cut to its own lengths."""

    index: int  # which sequence of the call, for the dropout bits
    q: Array  # (heads, sq, d)
    k: Array  # (heads_kv, sk, d)
    v: Array  # (heads_kv, sk, dv)
    mask: Flags | None = None  # (heads, sq, sk)
    bias: Array | None = None  # (heads, sq, sk)
    slopes: Array | None = None  # (heads,)
    sinks: Array | None = None  # (heads,)
    q_error: Array | None = None  # (heads, sq, d): rounding of q itself, where the call rotates it


@dataclass
class Head:
    """The forward pass of one head, with all that its error bounds and its gradients need."""

    q: Array
    k: Array
    v: Array
    q_error: Array | None
    scale: float
    softcap: float
    sink: float | None
    seen: Flags  # (sq, sk)
    dot: Array  # (sq, sk): scale * q.k, 0 where not seen
    tanh: Array | None  # (sq, sk)
    alibi: Array | None  # (sq, sk): what is subtracted
    bias: Array | None  # (sq, sk): 0 where not seen
    s: Array  # (sq, sk): -inf where not seen
    m: Array  # (sq,): the largest score, or the sink
    lse: Array  # (sq,)
    log_p: Array  # (sq, sk): s - lse; lse alone may have lost the digits
    p: Array  # (sq, sk)
    drop: Array  # (sq, sk): 0, or the factor of a kept element
    out: Array  # (sq, dv)


@dataclass
class HeadGradients:
    dP: Array  # noqa: N815
    delta: Array  # (sq,)
    g: Array  # drop * dP - delta
    dbias: Array  # (sq, sk)
    dS: Array  # noqa: N815 (sq, sk), behind the softcap's derivative
    dq: Array
    dk: Array
    dv: Array
    dsink: float


def philox(counter: list[NDArray[np.uint64]], key: tuple[int, int]) -> list[NDArray[np.uint64]]:
    """Philox4x32-10: four words of 32 bits for each counter."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ np.uint64(k0), b & low, (a >> shift) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


class Reference:
    """The rules, one method each."""

    def key_head(self, o: Options, h: int) -> int:
        return h // (o.heads // o.heads_kv)

    def offset(self, o: Options, sq: int, sk: int) -> int:
        return 0 if o.causal == "top_left" else sk - sq

    def sees(self, o: Options, sq: int, sk: int) -> Flags:
        """Causal and window, (sq, sk)."""
        position = np.arange(sq)[:, None] + self.offset(o, sq, sk)
        j = np.arange(sk)[None, :]
        seen = np.ones((sq, sk), bool)
        left, right = o.window if o.window is not None else (-1, -1)
        if o.causal:
            right = 0
        if left >= 0:
            seen &= j >= position - left
        if right >= 0:
            seen &= j <= position + right
        return seen

    def distance(self, o: Options, sq: int, sk: int) -> Array:
        return np.abs(np.arange(sq)[:, None] + self.offset(o, sq, sk) - np.arange(sk)[None, :]).astype(np.float64)

    def threshold(self, p: float) -> int:
        return min(round(65536 * p), 65535)

    def lane(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        return j % 8

    def drop(self, o: Options, b: int, h: int, sq: int, sk: int) -> Array:
        if o.dropout_p == 0 or sq == 0 or sk == 0:
            return np.ones((sq, sk))
        key = (o.seed % 2**32, o.seed // 2**32 % 2**32)
        i, group = np.broadcast_arrays(
            np.arange(sq, dtype=np.uint64)[:, None], np.arange((sk + 7) // 8, dtype=np.uint64)[None]
        )
        words = philox([group, i, np.full_like(i, b * o.heads + h), np.full_like(i, o.offset % 2**32)], key)
        halves = [half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
        lanes = np.stack(halves, axis=-1)  # (sq, groups, 8)
        j = np.arange(sk)
        t = self.threshold(o.dropout_p)
        return np.where(lanes[:, j // 8, self.lane(j)] < t, 0.0, 65536 / (65536 - t))

    def log_sum(self, s: Array, m: Array, sink: float | None) -> Array:
        """log of the sum of exp(s - m), sink included."""
        with np.errstate(divide="ignore"):
            return np.log(np.exp(s - m[:, None]).sum(1) + (0 if sink is None else np.exp(sink - m)))

    def lse(self, s: Array, m: Array, sink: float | None) -> Array:
        return m + self.log_sum(s, m, sink)

    def rotary_pairs(self, half: int, is_interleaved: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first = np.arange(half) * 2 if is_interleaved else np.arange(half)
        return first, first + (1 if is_interleaved else half)

    def rotate(self, x: Array, cos: Array, sin: Array, is_interleaved: bool) -> tuple[Array, Array]:
        """Rows of x (..., rows, d) rotated by cos and sin, (rows, rotary_dim / 2); and the magnitudes added."""
        first, second = self.rotary_pairs(cos.shape[-1], is_interleaved)
        a, b = x[..., first], x[..., second]
        out, size = x.copy(), np.zeros_like(x)
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        size[..., first], size[..., second] = abs(a * cos) + abs(b * sin), abs(a * sin) + abs(b * cos)
        return out, size

    def query_positions(self, o: Options, used: int, num: int) -> NDArray[np.int64]:
        """Returns where the queries of a cache call are rotated; `used` are the rows in use before it."""
        is_moving = bool(o.causal) or (o.window is not None and max(o.window) >= 0)
        return used + np.arange(num) * is_moving

    def bias_gradient(self, dbias: Array, shape: tuple[int, ...]) -> Array:
        """(batch, heads, sq, sk) summed to the shape that the bias has."""
        full = (1,) * (4 - len(shape)) + tuple(shape)
        dims = tuple(n for n in range(4) if full[n] == 1 and dbias.shape[n] != 1)
        return dbias.sum(dims, keepdims=True).reshape(shape)

    def sink_gradient(self, sink: float, lse: Array, delta: Array) -> float:
        if sink == -np.inf:
            return 0.0
        return float(-(np.exp(sink - lse) * delta).sum())

    def delta(self, dout: Array, out: Array, dlse: Array) -> Array:
        return (dout * out).sum(1) - dlse

    def cap_derivative(self, tanh: Array) -> Array:
        return 1 - tanh**2

    def forward(self, o: Options, x: Sequence, h: int) -> Head:
        kv = self.key_head(o, h)
        q, k, v = x.q[h], x.k[kv], x.v[kv]
        sq, sk = len(q), len(k)
        seen = self.sees(o, sq, sk)
        if x.mask is not None:
            seen &= x.mask[h]
        if x.bias is not None:
            seen &= x.bias[h] != -np.inf

        # What is not seen may be NaN up to here, and is replaced
        dot = s = np.where(seen, o.scale * (q @ k.T), 0.0)
        tanh = alibi = bias = None
        if o.softcap > 0:
            tanh = np.tanh(dot / o.softcap)
            s = o.softcap * tanh
        if x.slopes is not None:
            alibi = x.slopes[h] * self.distance(o, sq, sk)
            s = s - alibi
        if x.bias is not None:
            bias = np.where(seen, x.bias[h], 0.0)
            s = s + bias
        s = np.where(seen, s, -np.inf)

        sink = None if x.sinks is None else float(x.sinks[h])
        m = np.max(s, axis=1, initial=-np.inf if sink is None else sink)
        empty = m == -np.inf
        finite = np.where(empty, 0.0, m)
        lse = np.where(empty, -np.inf, self.lse(s, finite, sink))
        log_p = (s - finite[:, None]) - np.where(empty, 0.0, self.log_sum(s, finite, sink))[:, None]
        p = np.exp(log_p)
        drop = self.drop(o, x.index, h, sq, sk)
        out = (drop * p) @ v
        error = None if x.q_error is None else x.q_error[h]
        return Head(
            q, k, v, error, o.scale, o.softcap, sink, seen, dot, tanh, alibi, bias, s, m, lse, log_p, p, drop, out
        )

    def backward(self, f: Head, dout: Array, dlse: Array) -> HeadGradients:
        dP = dout @ f.v.T
        empty = f.lse == -np.inf
        delta = np.where(empty, 0.0, self.delta(dout, f.out, dlse))
        g = f.drop * dP - delta[:, None]
        dbias = f.p * g
        dS = dbias if f.tanh is None else dbias * self.cap_derivative(f.tanh)
        dsink = 0.0 if f.sink is None else self.sink_gradient(f.sink, np.where(empty, np.inf, f.lse), delta)
        return HeadGradients(
            dP, delta, g, dbias, dS, f.scale * (dS @ f.k), f.scale * (dS.T @ f.q), (f.drop * f.p).T @ dout, dsink
        )
