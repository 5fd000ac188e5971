"""Random calls of the kinds that models make: language models, prompts, vision, windows, diffusion, cross attention,
padded encoders, decoding, speech, float32, masks and biases, wide heads, packed sequences and pages.

A call follows from its seed and its number alone, so each one can be drawn again. Lengths are rarely powers of two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flashtile.lab.bench.accuracy import Check
from flashtile.lab.bench.options import LENGTHS, MASKS_AND_BIASES, PACKED, PAGE_SIZES
from flashtile.lab.bench.points import Inputs, Point

_MAX_WORK = {"cuda": 3e12, "cpu": 2e8}  # batch x heads x queries x keys x head dim
_MAX_ELEMENTS = {"cuda": 2e8, "cpu": 4e6}  # of q, k or v, of a mask or a bias


@dataclass(frozen=True)
class Call:
    """One call, the number-th of its seed."""

    seed: int
    number: int
    kind: str
    point: Point  # with direction "fwd"
    is_trained: bool  # such calls have a backward pass, too

    def in_pass(self, direction: str) -> Point:
        return replace(self.point, direction=direction)

    def words(self) -> str:
        """Returns the call in a few words."""
        point = self.point
        heads = f"{point.heads}" if point.heads == point.heads_kv else f"{point.heads}/{point.heads_kv}"
        parts = [self.kind, point.dtype, f"B{point.batch}", f"H{heads}", f"{point.seqlen_q} x {point.seqlen_k}"]
        parts += [f"d{point.head_dim}", "causal" if point.is_causal else "", point.option]
        return " ".join(filter(None, parts))


class _Draw:
    """The random choices of one call."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def one(self, *values: int) -> int:
        return self.source.choice(values)

    def between(self, low: int, high: int) -> int:
        """Returns an integer of which small values are as likely as large ones: uniform in the logarithm."""
        return int(math.exp(self.source.uniform(math.log(low), math.log(high + 1))))

    def happens(self, chance: float) -> bool:
        return self.source.random() < chance

    def grouped(self, heads: int, *groups: int) -> int:
        """Returns the number of key heads: the query heads over one of these that divides them."""
        return heads // self.source.choice([group for group in groups if heads % group == 0] or [1])

    def dtype(self) -> str:
        return self.source.choice(("bf16", "bf16", "fp16"))


def _square(batch: int, heads: int, heads_kv: int, rows: int, dim: int, dtype: str) -> Point:
    return Point(batch, heads, heads_kv, rows, rows, dim, dim, dtype)


def _language_model(draw: _Draw) -> Point:
    heads = draw.one(8, 12, 16, 20, 24, 32, 40, 64)
    rows = draw.between(256, 16384) if draw.happens(0.6) else 2 ** draw.one(9, 10, 11, 12, 13)
    batch = max(1, draw.between(4096, 32768) // rows)
    point = _square(
        batch, heads, draw.grouped(heads, 1, 1, 2, 4, 5, 8), rows, draw.one(64, 64, 80, 96, 128, 128, 256), draw.dtype()
    )
    return replace(point, is_causal=True)


def _prompt(draw: _Draw) -> Point:
    heads, rows = draw.one(16, 24, 28, 32, 40, 64), draw.between(20, 6000)
    point = _square(
        draw.one(1, 1, 2, 4), heads, draw.grouped(heads, 2, 4, 7, 8), rows, draw.one(64, 128, 128, 256), draw.dtype()
    )
    cached = draw.between(16, 8000) if draw.happens(0.35) else 0
    return replace(point, seqlen_k=rows + cached, is_causal=True)


def _vision(draw: _Draw) -> Point:
    heads = draw.one(3, 6, 12, 16)
    rows = draw.one(50, 197, 257, 577, 730, 1025, 1370) if draw.happens(0.7) else draw.between(40, 1500)
    return _square(draw.between(1, 256), heads, heads, rows, draw.one(48, 64, 64, 72, 80, 88, 96), draw.dtype())


def _windows(draw: _Draw) -> Point:
    heads = draw.one(3, 4, 6, 8, 12, 24)
    point = _square(draw.between(64, 4096), heads, heads, draw.one(49, 64, 144, 256), 32, draw.dtype())
    return replace(point, option="bias (1,H,S,S)")


def _diffusion(draw: _Draw) -> Point:
    heads = draw.one(8, 10, 16, 20, 24)
    rows = draw.one(256, 1024, 4096, 4250, 4608, 9216) if draw.happens(0.75) else draw.between(500, 9000)
    return _square(draw.one(1, 2, 2, 4, 8), heads, heads, rows, draw.one(40, 64, 64, 72, 80, 128, 160), draw.dtype())


def _cross(draw: _Draw) -> Point:
    heads = draw.one(8, 10, 20)
    rows = draw.one(256, 1024, 4096) if draw.happens(0.5) else draw.between(200, 5000)
    point = _square(draw.one(1, 2, 4, 16), heads, heads, rows, draw.one(40, 64, 80, 128), draw.dtype())
    return replace(point, seqlen_k=draw.one(77, 120, 154, 256, 333, 512))


def _encoder(draw: _Draw) -> Point:
    heads = draw.one(8, 12, 16)
    rows = draw.one(64, 128, 384, 512) if draw.happens(0.5) else draw.between(30, 600)
    return replace(
        _square(draw.between(1, 128), heads, heads, rows, draw.one(32, 64, 64), draw.dtype()), option=LENGTHS
    )


def _decode(draw: _Draw) -> Point:
    heads, dim = draw.one(16, 32, 32, 64), draw.one(64, 128, 128, 256)
    batch, heads_kv = draw.between(1, 64), draw.grouped(heads, 1, 4, 8)
    queries, keys = draw.one(1, 1, 1, 2, 4, 8), draw.between(100, 40000)
    return Point(batch, heads, heads_kv, queries, keys, dim, dim, draw.dtype(), is_causal=queries > 1)


def _speech(draw: _Draw) -> Point:
    heads = draw.one(6, 8, 12, 20)
    queries = draw.one(1500, 448) if draw.happens(0.6) else draw.between(10, 448)
    return replace(_square(draw.between(1, 32), heads, heads, 1500, 64, draw.dtype()), seqlen_q=queries)


def _float32(draw: _Draw) -> Point:
    heads = draw.one(1, 4, 8, 12, 16)
    batch, rows, dim = draw.between(1, 16), draw.between(64, 4096), draw.one(16, 32, 64, 64, 96, 128)
    point = _square(batch, heads, heads, rows, dim, "fp32")
    if draw.happens(0.4):
        return replace(point, is_causal=True)
    return replace(point, option=draw.source.choice(("", "", LENGTHS, "bias (1,H,S,S)")))


def _masked(draw: _Draw) -> Point:
    heads = draw.one(8, 12, 16, 32)
    point = _square(draw.between(1, 8), heads, heads, draw.between(128, 4096), draw.one(64, 128), draw.dtype())
    return replace(point, option=draw.source.choice(MASKS_AND_BIASES))


def _wide(draw: _Draw) -> Point:
    heads = draw.one(1, 4, 8, 16)
    dim = draw.one(136, 160, 192, 256, 320, 512)
    point = _square(draw.between(1, 8), heads, heads, draw.between(128, 6000), dim, draw.dtype())
    return replace(point, is_causal=draw.happens(0.5))


def _lengths(draw: _Draw, count: int, low: int, high: int) -> tuple[int, ...]:
    """Lengths of sequences, the longest first: the accuracy of a result is judged by the first sequence."""
    return tuple(sorted((draw.between(low, high) for _ in range(count)), reverse=True))


def _packed(draw: _Draw) -> Point:
    heads = draw.one(8, 16, 32, 32)
    lengths = _lengths(draw, draw.between(4, 64), *((1, 600) if draw.happens(0.5) else (64, 4096)))
    dim = draw.one(64, 128, 128)
    point = _square(len(lengths), heads, draw.grouped(heads, 1, 4, 8), lengths[0], dim, draw.dtype())
    return replace(point, option=PACKED, lengths=lengths, is_causal=draw.happens(0.8))


def _paged(draw: _Draw) -> Point:
    heads, dim = draw.one(16, 32, 32, 64), draw.one(64, 128, 128)
    queries = draw.one(1, 1, 1, 2, 4) if draw.happens(0.75) else draw.between(16, 512)
    lengths = _lengths(draw, draw.between(1, 64), queries + 16, 16384)
    heads_kv, page = draw.grouped(heads, 1, 4, 8), draw.one(*PAGE_SIZES[1:])
    point = Point(len(lengths), heads, heads_kv, queries, lengths[0], dim, dim, draw.dtype(), is_causal=True)
    return replace(point, option=f"chunk, page {page}", lengths=lengths)


# Kind -> how often it comes, whether it is trained, and what draws it
KINDS: dict[str, tuple[int, bool, Callable[[_Draw], Point]]] = {
    "language model": (5, True, _language_model),
    "prompt": (4, False, _prompt),
    "vision": (3, True, _vision),
    "windows": (2, True, _windows),
    "diffusion": (3, True, _diffusion),
    "cross attention": (2, True, _cross),
    "padded encoder": (3, True, _encoder),
    "decode": (4, False, _decode),
    "speech": (2, True, _speech),
    "float32": (4, True, _float32),
    "masks and biases": (3, True, _masked),
    "wide heads": (2, True, _wide),
    "packed": (3, True, _packed),
    "paged": (3, False, _paged),
}


def draw_call(seed: int, number: int, device: str) -> Call:
    """Returns one call of a seed. On a CPU it is smaller, in bfloat16 or more often in float32."""
    draw = _Draw(random.Random(f"flashtile {seed} {number}"))
    kind = draw.source.choices(list(KINDS), [share for share, _, _ in KINDS.values()])[0]
    _, is_trained, make = KINDS[kind]
    point = make(draw)
    if device == "cpu":
        point = _shrunk(point, draw.source.choice(("fp32", "fp32", "bf16")) if kind != "float32" else "fp32")
    return Call(seed, number, kind, _bounded(point, device), is_trained)


def _shrunk(point: Point, dtype: str) -> Point:
    """The call for a CPU: few sequences, a quarter of the heads, an eighth of long lengths."""

    def shorter(rows: int) -> int:
        return min(rows, 64 + rows // 8)

    heads_kv = max(1, point.heads_kv // 4)
    return _cut(
        replace(
            point,
            heads=heads_kv * (point.heads // point.heads_kv),
            heads_kv=heads_kv,
            seqlen_q=shorter(point.seqlen_q),
            seqlen_k=shorter(point.seqlen_k),
            lengths=tuple(shorter(rows) for rows in point.lengths),
            dtype=dtype,
        ),
        8,
    )


def _bounded(point: Point, device: str) -> Point:
    """The call with as many sequences as the device has time and memory for, and with fewer rows if one is too much."""
    while _work(point) > _MAX_WORK[device] or _elements(point) > _MAX_ELEMENTS[device]:
        if point.batch > 1:
            point = _cut(point, point.batch // 2)
        else:
            rows_q, rows_k = max(1, point.seqlen_q * 3 // 4), max(1, point.seqlen_k * 3 // 4)
            point = replace(point, seqlen_q=rows_q, seqlen_k=rows_k, lengths=(rows_k,) * len(point.lengths))
    return point


def _cut(point: Point, batch: int) -> Point:
    """The call with that many of its sequences at most."""
    return replace(point, batch=min(batch, point.batch), lengths=point.lengths[:batch])


def _work(point: Point) -> float:
    return float(point.batch) * point.heads * point.seqlen_q * point.seqlen_k * point.head_dim


def _elements(point: Point) -> float:
    """Elements of the largest tensor of the call."""
    rows = max(point.heads * point.seqlen_q, point.heads_kv * point.seqlen_k)
    return max(float(point.batch) * rows * point.head_dim, float(point.extra_bytes()))


def make_inputs(point: Point, device: str, count: int) -> list[Inputs]:
    """Returns copies of the inputs. Dense ones lie in memory as models make them: the heads of a row side by side."""
    extras = point.make_extras(device)
    found = []
    for seed in range(count):
        inputs = point.make(device, seed)
        if not point.extra.is_packed:
            q, k, v, dout = (
                tensor.transpose(1, 2).contiguous().transpose(1, 2)
                for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout)
            )
            inputs = Inputs(q, k, v, dout)
        found.append(replace(inputs, extras=extras))
    return found


class FirstSequence:
    """The accuracy of a result, by `Check`. Of packed sequences the first one is judged."""

    def __init__(self, point: Point, inputs: Inputs) -> None:
        self.rows = point.lengths[0] if point.extra.entry == "packed" else None
        if self.rows is not None:
            point = replace(point, batch=1, seqlen_q=self.rows, seqlen_k=self.rows, option="", lengths=())
            q, k, v, dout = (self._dense(tensor) for tensor in (inputs.q, inputs.k, inputs.v, inputs.dout))
            inputs = Inputs(q, k, v, dout)
        self._check = Check(point, inputs)

    def _dense(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[: self.rows].transpose(0, 1)[None]

    def complaint(self, out: Tensor, grads: Sequence[Tensor] | None, max_relative_error: float | None) -> str:
        """Returns what is wrong with a result, (batch, heads, rows, dim) or packed rows, or an empty text."""
        same = None if grads is None else tuple(self._dense(grad) for grad in grads)
        return self._check.verdict(self._dense(out), same, max_relative_error).complaint
