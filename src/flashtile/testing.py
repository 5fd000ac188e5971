"""How results are checked, for our tests and for yours: problems to draw, the fp64 oracle, the error rule, dropout bits.

    case = Case(dtype=torch.bfloat16, seqlen_q=100, causal="bottom_right", bias="1hqk")
    inputs = case.make(seed=0)
    assert_agrees(run(inputs), inputs)

The error rule. `ref` is the math in float64, `yardstick` the same math in the input dtype. An output may be off by twice the
yardstick's error plus rounding, a gradient by three times; the same holds for each row's norm with twice the factor. The
backward pass reads the output as it was stored, rounded: where everything else cancels (one visible key and dropout, say)
that rounding is all there is, so gradients may also move by what it moves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import ops
from flashtile.backends import dropout, reference
from flashtile.backends.base import GradNeeds
from flashtile.errors import value_error
from flashtile.problem import AttentionArgs, shape_of, validate

OUTPUTS = ("out", "lse")
GRADS = ("dq", "dk", "dv", "dbias", "dsinks")
KINDS = ("dense", "varlen", "used", "paged", "cache", "padded")
MEMORIES = ("contiguous", "swapped", "sliced", "expanded", "offset")
VALUES = {
    "normal": "the normal distribution",
    "tiny": "logits of 1e-7: all keys weigh alike",
    "huge": "logits from about -300 to 300 in steps of 100, rising or falling: exponentials overflow unless the maximum is taken off",
    "rising": "logits that rise or fall by 3 over all keys (of a page, if paged): every tile's maximum is a hair above the last one's",
    "dominant": "one key 8 times as long as the others",
    "ties": "every key the same",
    "constant": "every row the same number throughout",
    "denormal": "numbers below the smallest normal one",
    "overflow": "v near the largest number of the dtype, as far as sums of it can be held (forward pass only)",
    "masked": "infinities and NaN in the bias wherever the mask hides it",
    "masked_keys": "infinities and NaN in the keys that the mask hides from every query (forward pass only)",
}
FORWARD_ONLY = ("overflow", "masked_keys")
_GRAD_OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}


def dropout_mask(rng_state: Tensor, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The dropout bits of a call, True = kept: (batch, heads, seqlen_q, seqlen_k). In varlen calls i and j count within a sequence."""
    batch_heads = torch.arange(batch * heads, device=rng_state.device).view(batch, heads)
    return dropout.keep_mask(rng_state, dropout_p, batch_heads, range(seqlen_q), range(seqlen_k))


class Inputs(NamedTuple):
    """A call and the gradients that come into its backward pass."""

    args: AttentionArgs
    dout: Tensor
    dlse: Tensor


class Result(NamedTuple):
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

    kind    "dense"; "varlen" (packed); "used" (packed, seqused_k, NaN behind it); "paged" (packed queries, pages in random order, NaN
            in unused rows); "cache" (the same under dense queries, seqused_k and leftpad_k); "padded" (dense cache with seqused_k and
            leftpad_k, NaN around the kept rows)
    memory  "contiguous"; "swapped" (heads and rows swapped in memory); "sliced" (rows, heads and dims cut from a larger tensor of
            NaN); "expanded" (heads of stride 0); "offset" (a storage offset of one element)
    mask    which axes of "bhqk" are there, the others being 1: "bhqk", "qk" and "b11k" alike; None = no mask. Same for bias.
    values  what stands in q, k and v (VALUES): "normal", or one of the ways to break a kernel that is right for normal numbers
    """

    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    kind: str = "dense"
    memory: str = "contiguous"
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
    page_size: int = 16
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
        slopes = None if case.alibi is None else self._to(self.normal(*self._sizes(case.alibi)).abs() * steepest, torch.float32)
        sinks = self._to(self.normal(case.heads), case.dtype) if case.has_sinks else None
        args = AttentionArgs(
            *(q, k, v, self._bias(mask), None if mask is None else mask.to(self.device), slopes, sinks, self._rng_state()),
            max_seqlen_q=case.seqlen_q if case.has_max_lengths and "cu_seqlens_q" in lengths else None,
            max_seqlen_k=case.seqlen_k if case.has_max_lengths and "cu_seqlens_q" in lengths else None,
            scale=case.scale,
            causal=case.causal,
            window_left=case.window[0],
            window_right=case.window[1],
            softcap=case.softcap,
            dropout_p=case.dropout_p,
            deterministic=case.deterministic,
            num_splits=case.num_splits,
            out_dtype=torch.float32 if case.is_out_float32 else None,
            layout=case.layout,
            backend=case.backend,
        )
        args = _with(args, {name: tensor.to(self.device) for name, tensor in lengths.items()})
        validate(args)
        out, lse = ops.empty_outputs(args)
        return Inputs(args, self._to(self.normal(*out.shape), out.dtype), self._to(self.normal(*lse.shape), lse.dtype))

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
        return self._to(bias, torch.float32 if case.is_bias_float32 else case.dtype)

    def _is_hidden(self, mask: Tensor, axes: str) -> Tensor:
        """What the mask hides, as a tensor of these axes: hidden along all the others."""
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
            return q[..., :1].sign().expand(q.shape), rising.expand(k.shape) * step, v
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
            # Kernels sum in float32 before they divide by the row sum: up to 2 for each key (docs/simt.md), 2.5 under dropout
            largest = finite.max / 4 if case.dtype == torch.float16 else torch.finfo(torch.float32).max / (8 * max(case.seqlen_k, 1))
            v = v.sign() * (0.5 + 0.5 * torch.rand(v.shape, generator=self.generator)) * largest
        elif case.values == "masked_keys" and case.kind == "dense" and mask is not None:
            k = torch.where(self._is_hidden(mask, "bk")[:, 0, 0, :, None, None], self._junk(*k.shape), k)
        elif case.values not in VALUES:
            raise value_error("values", repr(case.values), ", ".join(VALUES))
        return q, k, v

    def _lengths(self) -> tuple[list[int], list[int], list[int], dict[str, Tensor]]:
        """Sizes of q, k and v as (batch, rows, heads, dim) or (rows, heads, dim), and the index tensors of the kind."""
        case = self.case
        q = [case.batch, case.seqlen_q, case.heads, case.head_dim]
        k = [case.batch, case.seqlen_k, case.heads_kv, case.head_dim]
        lengths: dict[str, Tensor] = {}
        if case.kind in ("padded", "cache"):
            used = self.integers(0, case.seqlen_k, case.batch)
            lengths = {"seqused_k": used, "leftpad_k": (used * torch.rand(case.batch, generator=self.generator)).to(torch.int32)}
        elif case.kind in ("varlen", "used", "paged"):
            q_lengths, k_lengths = self.integers(0, case.seqlen_q, case.batch), self.integers(0, case.seqlen_k, case.batch)
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
            lengths["block_table"] = order.to(torch.int32).view(case.batch, per_sequence)
            k = [num_pages, case.page_size, case.heads_kv, case.head_dim]
        return q, k, [*k[:-1], case.head_dim_v], lengths

    def _poison(self, keys: Tensor, lengths: dict[str, Tensor]) -> Tensor:
        """NaN in every row of k or v that no sequence may read. Rows stand in the first dimensions here."""
        if self.case.kind in ("dense", "varlen"):
            return keys
        is_kept = torch.zeros(keys.shape[: 1 if self.case.kind == "used" else 2], dtype=torch.bool)
        for b in range(self.case.batch):
            if "leftpad_k" in lengths:
                first, last = int(lengths["leftpad_k"][b]), int(lengths["seqused_k"][b])
            else:
                first, last = 0, int(lengths["cu_seqlens_k"][b + 1] - lengths["cu_seqlens_k"][b])
            if self.case.kind == "padded":
                is_kept[b, first:last] = True
            elif self.case.kind == "used":
                start = int(lengths["cu_seqlens_k"][b])
                is_kept[start : start + int(lengths["seqused_k"][b])] = True
            else:
                rows = torch.arange(first, last)
                is_kept[lengths["block_table"][b, rows // self.case.page_size].long(), rows % self.case.page_size] = True
        keys[~is_kept] = torch.nan
        return keys

    def _place(self, tensor: Tensor) -> Tensor:
        """Casts (..., rows, heads, dim) and lays it out in memory as the case says; what goes to the device is a plain copy."""
        case = self.case
        tensor = (tensor if case.layout == "bshd" else tensor.transpose(-2, -3)).to(case.dtype)
        if case.memory == "contiguous":
            return _compact(tensor).to(self.device)
        if case.memory == "swapped":
            return _compact(tensor.transpose(-2, -3)).to(self.device).transpose(-2, -3)
        if case.memory == "offset":
            flat = torch.cat([tensor.new_full((1,), torch.nan), tensor.flatten()])
            return flat.to(self.device)[1:].view(tensor.shape)
        if case.memory == "expanded":
            head = -2 if case.layout == "bshd" else -3
            return _compact(tensor.narrow(head, 0, 1)).to(self.device).expand(tensor.shape)
        if case.memory == "sliced":
            larger = tensor.new_full([size + 3 for size in tensor.shape], torch.nan)
            place = tuple(slice(1, 1 + size) for size in tensor.shape)
            larger[place] = tensor
            return larger.to(self.device)[place]
        raise value_error("memory", repr(case.memory), ", ".join(MEMORIES))


def _compact(tensor: Tensor) -> Tensor:
    """Without strides of 0, which an empty tensor may keep as contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def run(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """The call itself, through the ops and autograd."""
    args, dout, dlse = inputs
    if not has_backward:
        return Result(*ops.forward(*args))
    leaves = _leaves(args)
    out, lse = ops.forward(*_with(args, leaves))
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout, dlse), allow_unused=True)
    return Result(out.detach(), lse.detach(), *_by_name(leaves, grads))


def oracle(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """The definition in float64, differentiated by autograd: shares no backward formula with any backend."""
    args, dout, dlse = inputs
    leaves = _leaves(args, torch.float64)
    out, lse = (torch.zeros_like(like, dtype=torch.float64) for like in ops.empty_outputs(args))
    reference.attend(_with(args, leaves), out, lse, torch.float64)
    if not has_backward:
        return Result(out.detach(), lse.detach())
    if not out.requires_grad:  # nothing was attended to at all
        return Result(out, lse, *_by_name(leaves, tuple(torch.zeros_like(leaf) for leaf in leaves.values())))
    finite_dlse = torch.where(lse == -torch.inf, 0.0, dlse.double())
    grads = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout.double(), finite_dlse), allow_unused=True)
    filled = tuple(torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves.values(), strict=True))
    return Result(out.detach(), lse.detach(), *_by_name(leaves, filled))


def yardstick(inputs: Inputs, *, has_backward: bool = True) -> Result:
    """The same math in the input dtype, the stored output rounded to it before the backward pass uses it."""
    args, dout, dlse = inputs
    out, lse = ops.empty_outputs(args)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        reference.attend(args, out, lse, args.q.dtype)
        if not has_backward:
            return Result(out, lse)
        grads = ops.empty_grads(args, GradNeeds(True, True, True, args.bias is not None, args.sinks is not None))
        reference.attend_backward(args, dout, dlse, out, lse, grads, args.q.dtype)
        return Result(out, lse, *grads)
    finally:
        torch.set_float32_matmul_precision(precision)


def shifted(inputs: Inputs, ref: Result) -> Result:
    """The float64 gradients when every row's sum dO * O is off by what the rounding of a stored O does to it."""
    args = _with(inputs.args, {name: leaf.detach() for name, leaf in _leaves(inputs.args, torch.float64).items()})
    dout, dlse = inputs.dout.double(), inputs.dlse.double()
    rounding = torch.finfo(inputs.args.q.dtype).eps / 2 * (dout * ref.out).norm(dim=-1)
    dlse = dlse - (rounding if args.layout == "bhsd" else rounding.transpose(-1, -2))
    grads = ops.empty_grads(args, GradNeeds(True, True, True, args.bias is not None, args.sinks is not None))
    reference.attend_backward(args, dout, dlse, ref.out, ref.lse, grads, torch.float64)
    # That moved all rows to one side. Where a gradient is a sum over rows their roundings add up as noise: 2 / sqrt(rows) of it
    for name, grad, exact in (("bias", grads.dbias, ref.dbias), ("sinks", grads.dsinks, ref.dsinks)):
        if grad is not None and exact is not None and grad.numel() > 0:
            cells = grad.shape[:3].numel() if name == "bias" else grad.numel()
            grad.sub_(exact).mul_(min(1.0, 2 / max(1.0, ref.lse.numel() / cells) ** 0.5)).add_(exact)
    return Result(ref.out, ref.lse, *grads)


def _leaves(args: AttentionArgs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    tensors = {name: getattr(args, name) for name in _GRAD_OF.values()}
    return {name: tensor.detach().to(dtype or tensor.dtype).requires_grad_() for name, tensor in tensors.items() if tensor is not None}


def _with(args: AttentionArgs, tensors: dict[str, Tensor]) -> AttentionArgs:
    changes: dict[str, Any] = dict(tensors)
    return args._replace(**changes)


def _by_name(leaves: dict[str, Tensor], grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    found = dict(zip(leaves, grads, strict=True))
    return tuple(found.get(_GRAD_OF[name]) for name in GRADS)


def disagreement(name: str, ours: Tensor, ref: Tensor, low: Tensor, dtype: torch.dtype, moved: Tensor | None = None) -> str | None:
    """The error rule for one tensor of a problem whose inputs have `dtype`: what is wrong, or None.

    `low` is the yardstick's tensor, `moved` the reference's under the rounding of a stored output; None leaves that term out.
    """
    if ours.shape != ref.shape:
        return f"{name}: shape {tuple(ours.shape)} instead of {tuple(ref.shape)}"
    if ours.numel() == 0:
        return None
    eps = torch.finfo(ours.dtype if name == "lse" else dtype).eps
    ours, ref, low, moved = ours.double(), ref.double(), low.double(), ref.double() if moved is None else moved.double()
    is_infinite = torch.isinf(ref)
    if not torch.equal(ours[is_infinite], ref[is_infinite]):
        return f"{name}: not {ref[is_infinite][0]} where it should be"
    for what, tensor in (("the reference", ref), ("the yardstick", low), (f"{name}", ours)):
        count = int((~torch.isfinite(tensor[~is_infinite])).sum())
        if count:
            return f"{name}: {count} values of {what} are NaN or infinite, so that nothing can be judged"
    ref = ref.masked_fill(is_infinite, 0.0)
    error, low_error, move = (tensor.masked_fill(is_infinite, 0.0) - ref for tensor in (ours, low, moved))
    largest = ref.abs().max().item()
    is_grad = name in GRADS
    factor = 3.0 if is_grad else 2.0
    slack = move.abs().max().item() + 2 * eps * largest + (1e-5 * max(1.0, largest) if is_grad else 1e-6)
    allowed = factor * low_error.abs().max().item() + slack
    if not error.abs().max().item() <= allowed:
        place = tuple(int(i) for i in torch.unravel_index(error.abs().argmax(), error.shape))
        return f"{name}: off by {error.abs().max().item():.3e} at {place}, allowed {allowed:.3e}"
    row_error, row_low = error.norm(dim=-1), low_error.norm(dim=-1)
    # A row's own yardstick may be right by luck, above all a short row's: the typical row's counts if it is larger
    row_low = row_low.clamp(min=row_low.square().mean().sqrt().item())
    excess = row_error - 2 * factor * row_low - slack * ref.shape[-1] ** 0.5
    if not excess.max().item() <= 0:
        worst = int(excess.argmax())
        return f"{name}: row {worst} has error norm {row_error.flatten()[worst]:.3e}, its yardstick {row_low.flatten()[worst]:.3e}"
    return None


class Expected(NamedTuple):
    """What results of one problem are judged by."""

    ref: Result
    low: Result  # the yardstick
    moved: Result  # the reference under the rounding of a stored output


def expect(inputs: Inputs, *, has_backward: bool = True) -> Expected:
    ref = oracle(inputs, has_backward=has_backward)
    return Expected(ref, yardstick(inputs, has_backward=has_backward), shifted(inputs, ref) if has_backward else ref)


def disagreements(ours: Result, inputs: Inputs, expected: Expected | None = None) -> list[str]:
    """Every tensor of the result that breaks the error rule, in words. `expected` spares the oracle where it ran already."""
    has_backward = any(getattr(ours, name) is not None for name in GRADS)
    ref, low, moved = expected or expect(inputs, has_backward=has_backward)
    found: list[str | None] = []
    for name in OUTPUTS + GRADS:
        mine, right = getattr(ours, name), getattr(ref, name)
        if mine is None and right is not None:
            found.append(f"{name}: missing")
        elif mine is not None:
            found.append(disagreement(name, mine, right, getattr(low, name), inputs.args.q.dtype, getattr(moved, name)))
    return [text for text in found if text is not None]


def assert_agrees(ours: Result, inputs: Inputs) -> None:
    """Raises AssertionError naming every tensor that breaks the error rule."""
    found = disagreements(ours, inputs)
    if found:
        shape = shape_of(inputs.args)
        raise AssertionError("; ".join(found) + f" ({shape}, {inputs.args.q.dtype}, backend {inputs.args.backend})")
