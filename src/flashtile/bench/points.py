"""What is measured. A Point is one problem and one pass; a Plan is the list of points of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtile.errors import value_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
DIRECTIONS = ("fwd", "bwd", "fwd+bwd")
FAST_SEQLENS = (512, 1024, 1536, 2048)
FULL_SEQLENS = (*FAST_SEQLENS, 4096, 8192, 16384)
GRIDS = ("paper", "decode")

_SPELLINGS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "half": "fp16"}


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
    has_growing_keys: bool = False  # seqlen_k differs in every call, so nothing may be compiled per length

    def flops(self) -> float:
        """Two matrix products, half of that under a causal mask; a backward pass counts as 2.5 forward passes."""
        forward = 2.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * (self.head_dim + self.head_dim_v)
        forward /= 2 if self.is_causal else 1
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[self.direction]

    def least_bytes(self) -> int:
        """The bytes moved if every input is read once and every output is written once."""
        q, k, v, out = self.sizes()
        forward, backward = q + k + v + out, 2 * (q + k + v) + 2 * out
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[self.direction]

    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of q, k, v and out."""
        item = DTYPES[self.dtype].itemsize
        rows_q, rows_k = (
            self.batch * self.heads * self.seqlen_q * item,
            self.batch * self.heads_kv * self.seqlen_k * item,
        )
        return rows_q * self.head_dim, rows_k * self.head_dim, rows_k * self.head_dim_v, rows_q * self.head_dim_v

    def make(self, device: str, seed: int) -> Inputs:
        """Random normal inputs, drawn on the device."""
        generator = torch.Generator(device).manual_seed(seed)
        heads, rows = (
            (self.heads, self.heads_kv, self.heads_kv, self.heads),
            (self.seqlen_q, self.seqlen_k, self.seqlen_k, self.seqlen_q),
        )
        dims = (self.head_dim, self.head_dim, self.head_dim_v, self.head_dim_v)
        q, k, v, dout = (
            torch.randn(self.batch, h, s, d, device=device, dtype=DTYPES[self.dtype], generator=generator)
            for h, s, d in zip(heads, rows, dims, strict=True)
        )
        return Inputs(q, k, v, dout)


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, (batch, heads, rows, dim), and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def leaves(self, layout: str, needs_grad: bool) -> Inputs:
        """The same values as new autograd leaves, in the provider's layout."""
        q, k, v, dout = (tensor.detach() for tensor in (self.q, self.k, self.v, self.dout))
        if layout == "bshd":
            q, k, v, dout = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, dout))
        return Inputs(q.requires_grad_(needs_grad), k.requires_grad_(needs_grad), v.requires_grad_(needs_grad), dout)


def dtype_key(name: str) -> str:
    key = _SPELLINGS.get(name, name)
    if key not in DTYPES:
        raise value_error("--dtype", repr(name), ", ".join((*DTYPES, *_SPELLINGS)))
    return key


@dataclass(frozen=True)
class Plan:
    """The points of a run and the names of its files."""

    sweep: str  # "Lsweep", "paper" or "decode"
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
    return Plan("decode", f"sdpa_decode_{dtype}{suffix}", points)
