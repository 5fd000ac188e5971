"""Points to measure. A Point is one problem and one pass; a Plan is the list of points of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashtile.errors import value_error
from flashtile.lab.bench.options import OPTIONS, PAGE_SIZES, PLAIN, TINY_ROW, Extras, Option, make_extras, shapes
from flashtile.lab.dtypes import DTYPES

DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}  # and their names in figures
FAST_SEQLENS = (512, 1024, 1536, 2048)
FULL_SEQLENS = (*FAST_SEQLENS, 4096, 8192, 16384)
GRIDS = ("paper", "decode", "options", "float32", "cpu", "wild")


@dataclass(frozen=True)
class Point:
    """One attention problem and the pass that is timed."""

    batch: int = 1
    heads: int = 1
    heads_kv: int = 1
    seqlen_q: int = 512
    seqlen_k: int = 512
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "fp32"  # one of DTYPES
    is_causal: bool = False
    direction: str = "fwd"  # one of DIRECTIONS
    option: str = ""  # the name of the call in a grid of options
    has_growing_keys: bool = False  # seqlen_k differs in every call, so nothing may be compiled per length
    lengths: tuple[int, ...] = ()  # keys of each sequence where they differ; of packed calls queries, too

    @property
    def extra(self) -> Option:
        """Returns what the option of that name adds to the call."""
        return OPTIONS.get(self.option, PLAIN)

    def flops(self) -> float:
        """Two matrix products, without the corner that a causal mask hides, half of a square; a backward pass counts as
        2.5 forward passes.

        Under a causal window the products count that are in it. Other masks hide nothing from the count.
        """
        hidden, window = (
            self.seqlen_q * min(self.seqlen_q, self.seqlen_k) / 2 if self.is_causal else 0.0,
            self.extra.window,
        )
        scores = self.seqlen_q * self.num_keys() - self.batch * hidden
        if window is not None and window < self.seqlen_k:
            scores = self.batch * (window + 1) * (self.seqlen_q - window / 2)
        forward = 2.0 * self.heads * scores * (self.head_dim + self.head_dim_v)
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[self.direction]

    def least_bytes(self) -> int:
        """The bytes moved if every input is read once and every output is written once."""
        (q, k, v, out), extra = self.sizes(), self.extra_bytes()
        used = self.num_keys() / (self.batch * self.seqlen_k)
        k, v = round(k * used), round(v * used)
        forward, backward = q + k + v + out + extra, 2 * (q + k + v) + 2 * out + extra
        backward += extra if self.extra.has_bias_grad else 0
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[self.direction]

    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of q, k, v and out."""
        item = DTYPES[self.dtype].itemsize
        rows_q, rows_k = (
            self.batch * self.heads * self.seqlen_q * item,
            self.batch * self.heads_kv * self.seqlen_k * item,
        )
        return rows_q * self.head_dim, rows_k * self.head_dim, rows_k * self.head_dim_v, rows_q * self.head_dim_v

    def num_keys(self) -> int:
        """Returns the number of keys of all sequences."""
        if self.lengths:
            return sum(self.lengths)
        short = self.extra.short_keys
        return self.batch * self.seqlen_k if short is None else self.seqlen_k + (self.batch - 1) * short

    def extra_bytes(self) -> int:
        """Bytes of the option's tensors."""
        items = {"bias": DTYPES[self.dtype].itemsize, "mask": 1, "alibi_slopes": 4}
        return sum(items[name] * math.prod(shape) for name, shape in self._extra_shapes().items())

    def make_extras(self, device: str) -> Extras:
        generator = torch.Generator(device).manual_seed(2**20)
        return make_extras(self.extra, self._extra_shapes(), DTYPES[self.dtype], generator)

    def _extra_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes(self.extra, self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    def make(self, device: str, seed: int) -> Inputs:
        """Random normal inputs, drawn on the device, without the option's tensors."""
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v, dout = (
            torch.randn(shape, device=device, dtype=DTYPES[self.dtype], generator=generator) for shape in self._shapes()
        )
        if self.extra.has_tiny_row:
            v[:, :, 0] *= 2.0**-40
        return Inputs(q, k, v, dout)

    def make_empty(self, device: str) -> Inputs:
        """Returns inputs without values, as meta tensors or within a FakeTensorMode."""
        q, k, v, dout = (torch.empty(shape, device=device, dtype=DTYPES[self.dtype]) for shape in self._shapes())
        return Inputs(q, k, v, dout)

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of q, k, v and the output's gradient: (batch, heads, rows, dim), or (rows, heads, dim) of
        packed calls."""
        heads = (self.heads, self.heads_kv, self.heads_kv, self.heads)
        rows = (self.seqlen_q, self.seqlen_k, self.seqlen_k, self.seqlen_q)
        dims = (self.head_dim, self.head_dim, self.head_dim_v, self.head_dim_v)
        if self.extra.entry == "packed":
            return tuple((sum(self.lengths), h, d) for h, d in zip(heads, dims, strict=True))
        return tuple((self.batch, h, s, d) for h, s, d in zip(heads, rows, dims, strict=True))


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, (batch, heads, rows, dim), and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    extras: Extras = field(default_factory=Extras)

    def leaves(self, layout: str, needs_grad: bool, is_own: bool = False) -> Inputs:
        """Returns the same values as new leaves of autograd, in the provider's layout. `is_own`: in own memory."""
        q, k, v, dout = (tensor.detach() for tensor in (self.q, self.k, self.v, self.dout))
        if is_own:
            q, k, v, dout = (tensor.clone() for tensor in (q, k, v, dout))
        if layout == "bshd":
            q, k, v, dout = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, dout))
        return Inputs(q.requires_grad_(needs_grad), k.requires_grad_(needs_grad), v.requires_grad_(needs_grad), dout)


@dataclass(frozen=True)
class Plan:
    """The points of a run and the names of its files."""

    sweep: str  # "Lsweep" or one of GRIDS
    stem: str  # of the CSV
    points: tuple[Point, ...]


def length_sweep(point: Point, seqlens: tuple[int, ...], suffix: str = "") -> Plan:
    """One problem over the sequence length."""
    stem = f"sdpa_Lsweep_B{point.batch}_H{point.heads}"
    stem += f"_Hkv{point.heads_kv}" if point.heads_kv != point.heads else ""
    stem += f"_d{point.head_dim}_{point.dtype}" + ("_causal" if point.is_causal else "")
    stem += f"_{point.direction.replace('+', '')}" if point.direction != "fwd" else ""
    return Plan("Lsweep", stem + suffix, tuple(replace(point, seqlen_q=seqlen, seqlen_k=seqlen) for seqlen in seqlens))


def paper_grid(dtype: str, suffix: str = "", only: str | None = None) -> Plan:
    """The grid of the FlashAttention papers: 16384 tokens, 2048 features, d 64 to 256, full and causal, both passes or
    only one."""
    tokens, features = 16384, 2048
    points = tuple(
        Point(tokens // seqlen, heads, heads, seqlen, seqlen, head_dim, head_dim, dtype, is_causal, direction)
        for direction in (("fwd", "bwd") if only is None else (only,))
        for head_dim, heads in ((d, features // d) for d in (64, 128, 256))
        for is_causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    )
    return Plan("paper", f"sdpa_paper_{dtype}" + (f"_{only.replace('+', '')}" if only else "") + suffix, points)


def decode_grid(dtype: str, suffix: str = "") -> Plan:
    """One query per sequence over a long cache: 32 query heads, 8 key heads, d 128."""
    points = tuple(
        Point(batch, 32, 8, 1, seqlen, 128, 128, dtype)
        for batch in (1, 8, 32, 128)
        for seqlen in (1024, 4096, 16384, 65536)
        if batch * seqlen <= 2**20
    )
    return Plan("decode", f"sdpa_decode_{dtype}{suffix}", points + _serving_points(dtype))


def _serving_points(dtype: str) -> tuple[Point, ...]:
    """Returns calls of the same heads over a cache with lengths, dense and in pages: one query; one long sequence among
    short ones; few queries, causal; chunks of a prompt behind 8192 rows, causal."""
    plain = Point(1, 32, 8, 1, 4096, 128, 128, dtype)
    sizes: tuple[int | None, ...] = (None, *PAGE_SIZES)
    decode = [
        replace(plain, batch=batch, seqlen_k=keys, option=_named("decode", size))
        for batch, keys in ((1, 4096), (1, 65536), (8, 4096), (64, 4096))
        for size in sizes
    ]
    decode += [replace(plain, batch=64, heads_kv=32, option=_named("decode", size)) for size in (None, 16, 64, 256)]
    mixed = [replace(plain, batch=32, seqlen_k=65536, option=_named("mixed", size)) for size in (None, 16, 64)]
    speculative = [
        replace(plain, batch=batch, seqlen_q=queries, is_causal=True, option=_named("speculative", size))
        for batch in (1, 32)
        for queries in (2, 4, 8)
        for size in (None, 16)
    ]
    chunks = [
        replace(plain, batch=4, seqlen_q=new, seqlen_k=8192 + new, is_causal=True, option=_named("chunk", size))
        for new in (512, 2048)
        for size in (None, 16, 64)
    ]
    return (*decode, *mixed, *speculative, *chunks)


def _named(kind: str, page_size: int | None) -> str:
    return kind if page_size is None else f"{kind}, page {page_size}"


_B4 = Point(4, 16, 16, 4096, 4096, 128, 128)
_D64 = replace(_B4, head_dim=64, head_dim_v=64)
_VIT = replace(_D64, batch=256, heads=12, heads_kv=12, seqlen_q=197, seqlen_k=197)
_SWIN = Point(4096, 6, 6, 49, 49, 32, 32)
_OPTION_CALLS = {  # name -> problem; a dtype other than the grid's is named
    "plain": _B4,
    "causal": replace(_B4, is_causal=True),
    "GQA 32/8 causal": replace(_B4, heads=32, heads_kv=8, is_causal=True),
    "bias (1,H,S,S)": _B4,
    "bias with gradient": _B4,
    "padding mask (B,1,1,S)": _B4,
    "padding to lengths S/2 to S": _B4,
    "bool mask (B,1,S,S)": _B4,
    "dropout 0.1": _B4,
    "softcap 30 causal": replace(_B4, is_causal=True),
    "ALiBi causal": replace(_B4, is_causal=True),
    "window 1024 causal": replace(_B4, batch=1, seqlen_q=16384, seqlen_k=16384, is_causal=True),
    "d96 causal": replace(_B4, heads=21, heads_kv=21, head_dim=96, head_dim_v=96, is_causal=True),
    "d80": replace(_B4, heads=25, heads_kv=25, head_dim=80, head_dim_v=80),
    "d72": replace(_B4, heads=28, heads_kv=28, head_dim=72, head_dim_v=72),
    "d192/128 causal": replace(_B4, head_dim=192, is_causal=True),
    "d320": replace(_B4, batch=2, heads=8, heads_kv=8, head_dim=320, head_dim_v=320),
    "d512": replace(_B4, batch=1, heads=8, heads_kv=8, head_dim=512, head_dim_v=512),
    "ViT B256 S197": _VIT,
    "BEiT B256 S197 bias": _VIT,
    "Swin B4096 S49": _SWIN,
    "Swin B4096 S49 bias": _SWIN,
    "Swin B4096 S64": replace(_SWIN, seqlen_q=64, seqlen_k=64),
    "Swin B4096 S64 bias": replace(_SWIN, seqlen_q=64, seqlen_k=64),
    "BERT B64 S512": replace(_D64, batch=64, heads=12, heads_kv=12, seqlen_q=512, seqlen_k=512),
    "SD cross Sk77": replace(_D64, batch=8, heads=10, heads_kv=10, seqlen_k=77),
    "d40": replace(_D64, batch=8, heads=8, heads_kv=8, head_dim=40, head_dim_v=40),
}
_FP32_CALLS = {
    "fp32 d64": _D64,
    "fp32 d128": _B4,
    "fp32 d128 causal": replace(_B4, is_causal=True),
    "fp32 d256": replace(_B4, batch=2, head_dim=256, head_dim_v=256),
}


def options_grid(
    dtype: str, suffix: str = "", only: str | None = None, is_small: bool = False, names: str | None = None
) -> Plan:
    """Calls with options and of unusual shapes, both passes or only one. `names` selects calls by parts of their names,
    separated by commas. `is_small` is for a CPU."""
    calls = {name: replace(point, dtype=dtype) for name, point in _OPTION_CALLS.items()}
    if dtype != "fp32":
        calls.update(_FP32_CALLS)
    if names is not None:
        calls = _named_calls(calls, names)
    points = tuple(
        replace(_shrunk(point) if is_small else point, direction=direction, option=name)
        for direction in (("fwd", "bwd") if only is None else (only,))
        for name, point in calls.items()
        if direction != "fwd" or not OPTIONS.get(name, PLAIN).has_bias_grad
    )
    return Plan("options", f"sdpa_options_{dtype}" + (f"_{only.replace('+', '')}" if only else "") + suffix, points)


def _named_calls(calls: dict[str, Point], names: str) -> dict[str, Point]:
    """The calls whose names contain one of these parts, whatever the case."""
    parts = [part.strip().lower() for part in names.split(",") if part.strip()]
    unknown = [part for part in parts if not any(part in name.lower() for name in calls)]
    if unknown or not parts:
        raise value_error(
            "--calls", repr(unknown[0] if unknown else names), f"parts of these names: {'; '.join(calls)}"
        )
    return {name: point for name, point in calls.items() if any(part in name.lower() for part in parts)}


def _shrunk(point: Point) -> Point:
    """The call for a CPU: at most 2 sequences, a quarter of the heads, an eighth of the lengths above 512."""
    heads_kv = max(1, point.heads_kv // 4)
    return replace(
        point,
        batch=min(2, point.batch),
        heads=heads_kv * (point.heads // point.heads_kv),
        heads_kv=heads_kv,
        seqlen_q=point.seqlen_q // (8 if point.seqlen_q > 512 else 1),
        seqlen_k=point.seqlen_k // (8 if point.seqlen_k > 512 else 1),
    )


def float32_grid(suffix: str = "", only: str | None = None, is_small: bool = False) -> Plan:
    """Float32 at B=4 H=16 S=4096: d 64 to 256, full and causal; with values that float16 parts cannot hold; with a mask
    and with a bias. Both passes, or only one. `is_small` is for a CPU."""
    dims = [replace(_B4, head_dim=dim, head_dim_v=dim) for dim in (64, 128, 256)]
    calls = [replace(point, is_causal=is_causal) for point in dims for is_causal in (False, True)]
    calls += [replace(point, option=TINY_ROW) for point in dims]
    calls += [replace(_B4, option=name) for name in ("bool mask (B,1,S,S)", "bias (1,H,S,S)")]
    points = tuple(
        replace(_shrunk(point) if is_small else point, direction=direction)
        for direction in (("fwd", "bwd") if only is None else (only,))
        for point in calls
    )
    return Plan("float32", "sdpa_float32" + (f"_{only.replace('+', '')}" if only else "") + suffix, points)


def cpu_grid() -> Plan:
    """Forward calls that cost a CPU engine its lead: decoding, dense masks, float64, steps with little work."""
    decode = Point(1, 12, 12, 1, 2048, 64, 64)
    calls = {
        "decode Sk2048": decode,
        "decode Sk8192": replace(decode, seqlen_k=8192),
        "bool mask (B,1,S,S)": Point(2, 8, 8, 512, 512, 64, 64),
        "float64": Point(1, 8, 8, 512, 512, 64, 64, dtype="fp64"),
        "SDPA facade": replace(decode, seqlen_k=129),
        "kvcache step": replace(decode, seqlen_k=512),
        "kvcache step Sk128": replace(decode, seqlen_k=128),
        "kvcache step B4": replace(decode, batch=4, seqlen_k=512),
    }
    return Plan("cpu", "sdpa_cpu", tuple(replace(point, option=name) for name, point in calls.items()))
