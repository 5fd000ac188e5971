"""Problems to draw: a `Case` in a few words becomes the tensors of a call, the awkward ones included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile import ops
from flashtile.backends import dropout
from flashtile.errors import value_error
from flashtile.problem import AttentionArgs, validate

OUTPUTS = ("out", "lse")
GRADS = ("dq", "dk", "dv", "dbias", "dsinks")
KINDS = ("dense", "varlen", "used", "paged", "cache", "padded")
MEMORIES = ("contiguous", "swapped", "sliced", "expanded", "offset", "ragged", "aligned")
DOUT_MEMORIES = (*MEMORIES, "row", "number", "columns")
VALUES = {
    "normal": "the normal distribution",
    "tiny": "logits of 1e-7: all keys weigh alike",
    "huge": (
        "logits from about -300 to 300 in steps of 100, rising or falling: exponentials overflow unless "
        "the maximum is taken off"
    ),
    "rising": (
        "logits that rise or fall by 3 over all keys (of a page, if paged): every tile's maximum is a "
        "hair above the last one's"
    ),
    "dominant": "one key 8 times as long as the others",
    "ties": "every key the same",
    "constant": "every row the same number throughout",
    "denormal": "numbers below the smallest normal one",
    "overflow": "v near the largest number of the dtype, as far as sums of it can be held (forward pass only)",
    "wide": (
        "sizes far apart: elements, rows, columns or whole tensors times powers of two, sums with a constant, zeros; "
        "logits of at most 64 (float32 and float64 only)"
    ),
    "masked": "infinities and NaN in the bias wherever the mask hides it",
    "masked_keys": "infinities and NaN in the keys that the mask hides from every query (forward pass only)",
}
FORWARD_ONLY = ("overflow", "masked_keys")
# How far a row or a whole tensor of "wide" values may be from 1, in bits: q and k, v and dout. dq is a product of the
# last two and k
_QK_BITS, _V_BITS = 50, 30


def dropout_mask(rng_state: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dropout bits of a call, True = kept: (batch, heads, seqlen_q, seqlen_k). In varlen calls i and j count within
    a sequence."""
    batch_heads = torch.arange(batch * heads, device=rng_state.device).view(batch, heads)
    return dropout.keep_mask(rng_state, dropout_p, batch_heads, range(seqlen_q), range(seqlen_k))


class Inputs(NamedTuple):
    """A call and the gradients that come into its backward pass."""

    args: AttentionArgs
    dout: Tensor
    dlse: Tensor


class Result(NamedTuple):
    """Results of a call, or the reference, the yardstick or the floor for them."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A problem in a few words. Its repr is a reproducer: `Case(...).make(seed)` gives the same tensors again.

    kind    "dense"; "varlen" (packed); "used" (packed, seqused_k, NaN behind it); "paged" (packed queries, pages in
            random order, NaN in unused rows); "cache" (the same under dense queries, seqused_k and leftpad_k); "padded"
            (dense cache with seqused_k and leftpad_k, NaN around the kept rows)
    memory  "contiguous"; "swapped" (heads and rows swapped in memory); "sliced" (rows, heads and dims cut from a larger
            tensor of NaN); "expanded" (heads of stride 0); "offset" (a storage offset of one element); "ragged" (cut
            from a larger tensor of NaN at random, bias and mask too); "aligned" (the same by multiples of 16 bytes)
    dout    how the gradient of the output lies in memory: one of these, "row" (rows of stride 0), "number" (all strides
            0, as the gradient of a sum) or "columns" (the last dimension is not contiguous)
    mask    which axes of "bhqk" are there, the others being 1: "bhqk", "qk" and "b11k" alike; None = no mask
    bias    the same
    values  what stands in q, k and v (VALUES): "normal", or one of the ways to break a kernel that is right for normal
            numbers
    """

    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    kind: str = "dense"
    memory: str = "contiguous"
    dout: str = "contiguous"
    batch: int = 2
    heads: int = 2
    heads_kv: int = 2
    seqlen_q: int = 64
    seqlen_k: int = 64
    head_dim: int = 32
    head_dim_v: int = 32
    causal: str = "none"
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    mask: str | None = None
    bias: str | None = None
    is_bias_float32: bool = False
    alibi: str | None = None  # "h" or "bh"
    has_sinks: bool = False
    dropout_p: float = 0.0
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)  # first_query, first_key, first_head, total_heads
    page_size: int = 16  # of a cache; at least seqlen_k: rows of a larger cache, by batch index
    has_leftpad: bool = True  # of a cache, dense or in pages
    has_junk_pages: bool = False  # entries of the table that hold no key of their sequence are out of bounds
    values: str = "normal"
    has_max_lengths: bool = False  # max_seqlen_q and max_seqlen_k are given
    is_out_float32: bool = False
    deterministic: bool | None = None
    num_splits: int = 0
    backend: str | None = None

    def make(self, seed: int, device: str = "cpu") -> Inputs:
        """Random tensors, drawn on the CPU so that every device gets the same."""
        return _Maker(self, seed, device).make()


class _Maker:
    def __init__(self, case: Case, seed: int, device: str):
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator)

    def integers(self, low: int, high: int, count: int) -> Tensor:
        """Int32 values from low to high, both included."""
        return torch.randint(low, high + 1, (count,), generator=self.generator, dtype=torch.int32)

    def make(self) -> Inputs:
        case = self.case
        q_sizes, k_sizes, v_sizes, lengths = self._lengths()
        mask = self._mask()
        q, k, v = self._values(self.normal(*q_sizes), self.normal(*k_sizes), self.normal(*v_sizes), mask)
        q, k, v = self._place(q), self._place(self._poison(k, lengths)), self._place(self._poison(v, lengths))
        # As far as scores of the farthest keys stay in the tens: rounded larger ones say nothing about a backend
        steepest = min(0.3, 20 / max(case.seqlen_q, case.seqlen_k, 1))
        slopes = (
            None
            if case.alibi is None
            else self._to(self.normal(*self._sizes(case.alibi)).abs() * steepest, torch.float32)
        )
        sinks = self._to(self.normal(case.heads), case.dtype) if case.has_sinks else None
        args = AttentionArgs(
            *(
                q,
                k,
                v,
                self._bias(mask),
                None if mask is None else self._lay_out_scores(mask),
                slopes,
                sinks,
                self._rng_state(),
            ),
            max_seqlen_q=case.seqlen_q if case.has_max_lengths and "cu_seqlens_q" in lengths else None,
            max_seqlen_k=case.seqlen_k if case.has_max_lengths and "cu_seqlens_q" in lengths else None,
            scale=case.scale,
            causal=case.causal,
            window_left=case.window[0],
            window_right=case.window[1],
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            first_query=case.origin[0],
            first_key=case.origin[1],
            first_head=case.origin[2],
            total_heads=case.origin[3],
            deterministic=case.deterministic,
            num_splits=case.num_splits,
            out_dtype=torch.float32 if case.is_out_float32 else None,
            layout=case.layout,
            backend=case.backend,
        )
        args = args._replace(**{name: tensor.to(self.device) for name, tensor in lengths.items()})  # type: ignore[arg-type]
        validate(args)
        out, lse = ops.empty_outputs(args)
        dout, dlse = self.normal(*out.shape), self.normal(*lse.shape)
        if case.values == "wide":
            dout = self._spread(dout, -3 if case.layout == "bshd" else -2, _V_BITS)
            dlse *= _power(_mean_size(dout) * _mean_size(v))  # as large as what it is added to
        return Inputs(args, self._lay_out(dout.to(out.dtype), case.dout), self._to(dlse, lse.dtype))

    def _to(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype).to(self.device)

    def _rng_state(self) -> Tensor | None:
        if self.case.dropout_p == 0.0:
            return None
        return torch.randint(-(2**63), 2**63 - 1, (2,), generator=self.generator, dtype=torch.int64).to(self.device)

    def _sizes(self, axes: str) -> list[int]:
        sizes = {"b": self.case.batch, "h": self.case.heads, "q": self.case.seqlen_q, "k": self.case.seqlen_k, "1": 1}
        return [sizes[axis] for axis in axes]

    def _score_sizes(self, axes: str) -> list[int]:
        return [size if axis in axes else 1 for axis, size in zip("bhqk", self._sizes("bhqk"), strict=True)]

    def _mask(self) -> Tensor | None:
        if self.case.mask is None:
            return None
        return torch.rand(self._score_sizes(self.case.mask), generator=self.generator) < 0.7

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        """Random values, some of them -inf."""
        case = self.case
        if case.bias is None:
            return None
        sizes = self._score_sizes(case.bias)
        bias = self.normal(*sizes).masked_fill(torch.rand(sizes, generator=self.generator) < 0.1, -torch.inf)
        if case.values == "masked" and mask is not None:
            bias = torch.where(self._is_hidden(mask, case.bias), self._junk(*sizes), bias)
        return self._lay_out_scores(bias.to(torch.float32 if case.is_bias_float32 else case.dtype))

    def _is_hidden(self, mask: Tensor, axes: str) -> Tensor:
        """Returns what the mask hides, as a tensor of these axes: hidden along all the others."""
        is_hidden = ~mask.expand(self._score_sizes("bhqk"))
        for axis, name in enumerate("bhqk"):
            is_hidden = is_hidden if name in axes else is_hidden.all(axis, keepdim=True)
        return is_hidden

    def _junk(self, *sizes: int) -> Tensor:
        """Infinities of both signs and NaN."""
        return torch.tensor([torch.inf, -torch.inf, torch.nan])[torch.randint(3, sizes, generator=self.generator)]

    def _values(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Turns normal numbers into what the case says. Sizes are (..., rows, heads, dim)."""
        case, finite = self.case, torch.finfo(self.case.dtype)
        if case.values == "tiny":
            return q * 2.0**-12, k * 2.0**-12, v
        if case.values in ("huge", "dominant", "constant", "overflow"):
            # Few bits to a number: products and their sums are exact, and no order of summation is luckier than another
            q, k = (q * 4).round() / 4, (k * 4).round() / 4
        if case.values in ("huge", "rising"):
            # They rise with the keys, or fall where q is negative: every tile has a new maximum
            is_huge, scale = case.values == "huge", abs(case.scale or case.head_dim**-0.5)
            rising = torch.linspace(-3, 3, k.shape[-3])[:, None, None]
            rising = (rising + k[..., :1] / 2).round().clamp(-3, 3) if is_huge else (rising * 1024).round() / 1024
            step = 2.0 ** round(math.log2((100 if is_huge else 0.5) / (case.head_dim * scale)))
            return torch.where(q[..., :1] < 0, -1.0, 1.0).expand(q.shape), rising.expand(k.shape) * step, v
        if case.values == "dominant" and k.shape[-3] > 0:
            k[..., int(self.integers(0, k.shape[-3] - 1, 1)), :, :] *= 8
        elif case.values == "ties":
            k = k[..., :1, :1, :].expand(k.shape).clone()
        elif case.values == "constant":
            k = k * 2.0 ** -round(math.log2(case.head_dim) / 2)  # or else logits grow with the head dim
            return tuple(tensor[..., :1].expand(tensor.shape).clone() for tensor in (q, k, v))  # type: ignore[return-value]
        elif case.values == "denormal":
            return tuple(tensor.double() * finite.smallest_normal / 8 for tensor in (q, k, v))  # type: ignore[return-value]
        elif case.values == "overflow":
            # Kernels sum in float32 before they divide by the row sum: up to 2 for each key in float32, 2^8 in 16 bits
            # (docs/semantics.md)
            most = 2 if case.dtype in (torch.float32, torch.float64) else 2**8
            largest = (
                finite.max / 4
                if case.dtype == torch.float16
                else torch.finfo(torch.float32).max / (4 * most * max(case.seqlen_k, 1))
            )
            v = v.sign() * (0.5 + 0.5 * torch.rand(v.shape, generator=self.generator)) * largest
        elif case.values == "wide":
            if case.dtype not in (torch.float32, torch.float64):
                raise value_error("values", f"'wide' in {case.dtype}", "float32 or float64")
            q, k, v = (self._spread(x, -3, bits) for x, bits in ((q, _QK_BITS), (k, _QK_BITS), (v, _V_BITS)))
            # No logit is larger than the product of two norms
            norms = [tensor.double().norm(dim=-1).amax().item() for tensor in (q, k) if tensor.numel()]
            largest = abs(case.scale or case.head_dim**-0.5) * math.prod(norms)
            q = q * _power(2 ** self._uniform(-3, 6) / largest) if largest > 0 else q
        elif case.values == "masked_keys" and case.kind == "dense" and mask is not None:
            k = torch.where(self._is_hidden(mask, "bk")[:, 0, 0, :, None, None], self._junk(*k.shape), k)
        elif case.values not in VALUES:
            raise value_error("values", repr(case.values), ", ".join(VALUES))
        return q, k, v

    def _uniform(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=self.generator).item()

    def _spread(self, tensor: Tensor, row_axis: int, bits: int) -> Tensor:
        """Normal numbers made very different in size, in one of several ways."""
        way = int(self.integers(0, 7, 1))
        if way == 0 or tensor.numel() == 0:
            return tensor
        if way == 1:
            return tensor + self._uniform(-10, 10)
        if way == 2:
            return tensor * (torch.rand(tensor.shape, generator=self.generator) < self._uniform(0.01, 0.5))
        if way == 3:
            return tensor * 2.0 ** round(self._uniform(-bits, bits))
        if way == 4:
            row = int(self.integers(0, tensor.shape[row_axis] - 1, 1))
            tensor.select(row_axis, row).mul_(2.0 ** round(self._uniform(-bits, bits)))
            return tensor
        sizes, reach = ((list(tensor.shape), 12), ([*tensor.shape[:-1], 1], 20), ([tensor.shape[-1]], 20))[way - 5]
        powers = (2 * torch.rand(sizes, generator=self.generator) - 1) * self._uniform(0, reach)
        return tensor * 2.0 ** powers.round()

    def _lengths(self) -> tuple[list[int], list[int], list[int], dict[str, Tensor]]:
        """Sizes of q, k and v as (batch, rows, heads, dim) or (rows, heads, dim), and the index tensors of the kind."""
        case = self.case
        q = [case.batch, case.seqlen_q, case.heads, case.head_dim]
        k = [case.batch, case.seqlen_k, case.heads_kv, case.head_dim]
        lengths: dict[str, Tensor] = {}
        if case.kind in ("padded", "cache"):
            used = self.integers(0, case.seqlen_k, case.batch)
            lengths = {"seqused_k": used}
            if case.has_leftpad:
                lengths["leftpad_k"] = (used * torch.rand(case.batch, generator=self.generator)).to(torch.int32)
        elif case.kind in ("varlen", "used", "paged"):
            q_lengths, k_lengths = (
                self.integers(0, case.seqlen_q, case.batch),
                self.integers(0, case.seqlen_k, case.batch),
            )
            lengths = {"cu_seqlens_q": _cumulative(q_lengths), "cu_seqlens_k": _cumulative(k_lengths)}
            q[:2], k[:2] = [int(q_lengths.sum())], [int(k_lengths.sum())]
            if case.kind == "used":
                lengths["seqused_k"] = (k_lengths * torch.rand(case.batch, generator=self.generator)).to(torch.int32)
        elif case.kind != "dense":
            raise value_error("kind", repr(case.kind), ", ".join(KINDS))
        if case.kind in ("paged", "cache"):
            per_sequence = -(-case.seqlen_k // case.page_size)
            num_pages = per_sequence * case.batch + 2
            order = torch.randperm(num_pages, generator=self.generator)[: per_sequence * case.batch]
            table = order.to(torch.int32).view(case.batch, per_sequence)
            lengths["block_table"] = self._with_junk(table, num_pages, lengths) if case.has_junk_pages else table
            k = [num_pages, case.page_size, case.heads_kv, case.head_dim]
        return q, k, [*k[:-1], case.head_dim_v], lengths

    def _with_junk(self, table: Tensor, num_pages: int, lengths: dict[str, Tensor]) -> Tensor:
        """The table with numbers of no page wherever it holds no key of its sequence."""
        junk = torch.tensor([-1, num_pages, 2**31 - 1, -(2**31)], dtype=torch.int32)
        junk = junk[torch.randint(4, table.shape, generator=self.generator)]
        for b, (first, last) in enumerate(self._key_rows(lengths)):
            slots = slice(first // self.case.page_size, -(-last // self.case.page_size))
            if first < last:
                junk[b, slots] = table[b, slots]
        return junk

    def _key_rows(self, lengths: dict[str, Tensor]) -> list[tuple[int, int]]:
        """The rows of each sequence that hold its keys, from the first to behind the last."""
        if "seqused_k" in lengths:
            ends = lengths["seqused_k"].tolist()
            starts = lengths["leftpad_k"].tolist() if "leftpad_k" in lengths else [0] * len(ends)
            return list(zip(starts, ends, strict=True))
        return [(0, count) for count in lengths["cu_seqlens_k"].diff().tolist()]

    def _poison(self, keys: Tensor, lengths: dict[str, Tensor]) -> Tensor:
        """NaN in every row of k or v that no sequence may read. Rows stand in the first dimensions here."""
        if self.case.kind in ("dense", "varlen"):
            return keys
        is_kept = torch.zeros(keys.shape[: 1 if self.case.kind == "used" else 2], dtype=torch.bool)
        for b, (first, last) in enumerate(self._key_rows(lengths)):
            if self.case.kind == "padded":
                is_kept[b, first:last] = True
            elif self.case.kind == "used":
                start = int(lengths["cu_seqlens_k"][b])
                is_kept[start : start + int(lengths["seqused_k"][b])] = True
            else:
                rows = torch.arange(first, last)
                is_kept[lengths["block_table"][b, rows // self.case.page_size].long(), rows % self.case.page_size] = (
                    True
                )
        keys[~is_kept] = torch.nan
        return keys

    def _place(self, tensor: Tensor) -> Tensor:
        """Casts (..., rows, heads, dim) and lays it out in memory as the case says."""
        tensor = tensor if self.case.layout == "bshd" else tensor.transpose(-2, -3)
        return self._lay_out(tensor.to(self.case.dtype), self.case.memory)

    def _lay_out_scores(self, tensor: Tensor) -> Tensor:
        """Returns a bias or mask in the memory that the case asks for."""
        return self._lay_out(tensor, self.case.memory if self.case.memory in ("ragged", "aligned") else "contiguous")

    def _lay_out(self, tensor: Tensor, memory: str) -> Tensor:
        """A tensor whose axes are in order, in memory of that kind; what goes to the device is a plain copy."""
        head, row = (-2, -3) if self.case.layout == "bshd" else (-3, -2)
        if memory == "contiguous" or tensor.numel() == 0:
            return _compact(tensor).to(self.device)
        if memory in ("swapped", "columns"):
            axes = (-2, -3) if memory == "swapped" else (-1, -2)
            return _compact(tensor.transpose(*axes)).to(self.device).transpose(*axes)
        if memory == "offset":
            flat = torch.cat([tensor.new_full((1,), torch.nan), tensor.flatten()])
            return flat.to(self.device)[1:].view(tensor.shape)
        if memory in ("expanded", "row"):
            return (
                _compact(tensor.narrow(head if memory == "expanded" else row, 0, 1))
                .to(self.device)
                .expand(tensor.shape)
            )
        if memory == "number":
            return _compact(tensor.flatten()[:1]).to(self.device)[0].expand(tensor.shape)
        before, after = [1] * tensor.dim(), [2] * tensor.dim()
        if memory in ("ragged", "aligned"):
            step = 16 // tensor.element_size() if memory == "aligned" else 1
            before, after = ((self.integers(0, 3, tensor.dim()) * step).tolist() for _ in range(2))
            if memory == "aligned":
                after[-1] += -tensor.shape[-1] % step
        elif memory != "sliced":
            raise value_error("memory", repr(memory), ", ".join(DOUT_MEMORIES))
        sizes = [first + size + last for first, size, last in zip(before, tensor.shape, after, strict=True)]
        larger = torch.full(sizes, torch.nan).to(tensor.dtype)
        place = tuple(slice(first, first + size) for first, size in zip(before, tensor.shape, strict=True))
        larger[place] = tensor
        return larger.to(self.device)[place]


def _power(number: float) -> float:
    """The power of two next to a positive number."""
    return 2.0 ** round(math.log2(number)) if number > 0 else 1.0


def _mean_size(tensor: Tensor) -> float:
    """Returns the mean size of the numbers; NaN stands in rows that are not read."""
    return tensor.abs().nanmean().item() if tensor.numel() else 1.0


def _compact(tensor: Tensor) -> Tensor:
    """Returns the tensor without strides of 0, which an empty tensor may keep as contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
