"""References that are wrong in one rule each. A comparison with one of them must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import Array, Flags, Head, HeadGradients, Options, Reference, Sequence


class WindowTooWide(Reference):
    def sees(self, o: Options, sq: int, sk: int) -> Flags:
        wide = None if o.window is None else (o.window[0] + 1 if o.window[0] >= 0 else -1, o.window[1])
        return super().sees(replace(o, window=wide), sq, sk)


class WindowBesideCausal(Reference):
    """The right side of a window stays open under causal."""

    def sees(self, o: Options, sq: int, sk: int) -> Flags:
        return super().sees(replace(o, causal=False) if o.causal != "top_left" and o.window is not None else o, sq, sk)


class OffsetFromTop(Reference):
    def offset(self, o: Options, sq: int, sk: int) -> int:
        return 0 if o.causal else super().offset(o, sq, sk)


class NoSink(Reference):
    def forward(self, o: Options, x: Sequence, h: int) -> Head:
        return super().forward(o, replace(x, sinks=None), h)


class LseWithoutSink(Reference):
    def lse(self, s: Array, m: Array, sink: float | None) -> Array:
        return m + self.log_sum(s, m, None)


class HeadsModulo(Reference):
    def key_head(self, o: Options, h: int) -> int:
        return h % o.heads_kv


class BiasGradientMissesRow(Reference):
    def bias_gradient(self, dbias: Array, shape: tuple[int, ...]) -> Array:
        if len(shape) > 1 and shape[-2] == 1 and dbias.shape[2] > 1:
            dbias = dbias[:, :, :-1]
        return super().bias_gradient(dbias, shape)


class DropoutLanesSwapped(Reference):
    def lane(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().lane(j) ^ 1


class DropoutThreshold(Reference):
    """One in 65536 elements too many."""

    def threshold(self, p: float) -> int:
        return min(super().threshold(p) + 1, 65535)


class AlibiFromTop(Reference):
    def distance(self, o: Options, sq: int, sk: int) -> Array:
        return super().distance(replace(o, causal="top_left"), sq, sk)


class CapNotInBackward(Reference):
    def cap_derivative(self, tanh: Array) -> Array:
        return np.ones_like(tanh)


class LseGradientIgnored(Reference):
    def delta(self, dout: Array, out: Array, dlse: Array) -> Array:
        return super().delta(dout, out, np.zeros_like(dlse))


class SinkGradientSign(Reference):
    def sink_gradient(self, sink: float, lse: Array, delta: Array) -> float:
        return -super().sink_gradient(sink, lse, delta)


class LseBase2(Reference):
    def forward(self, o: Options, x: Sequence, h: int) -> Head:
        f = super().forward(o, x, h)
        return replace(f, lse=f.lse / np.log(2))


class DropoutNotInBackward(Reference):
    def backward(self, f: Head, dout: Array, dlse: Array) -> HeadGradients:
        return super().backward(replace(f, drop=np.ones_like(f.drop)), dout, dlse)


class RotaryHalvesPaired(Reference):
    def rotary_pairs(self, half: int, is_interleaved: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return super().rotary_pairs(half, False)


class RotaryQueriesStay(Reference):
    def query_positions(self, o: Options, used: int, num: int) -> NDArray[np.int64]:
        return super().query_positions(replace(o, causal=False), used, num)


FAULTS: dict[str, Any] = {c.__name__: c() for c in Reference.__subclasses__() if c.__module__ == __name__}
