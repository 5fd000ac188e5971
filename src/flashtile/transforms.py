"""Attention inside torch.func transforms and forward-mode differentiation.

    grad, vjp, jacrev     the backward operator
    vmap                  folds the mapped dimension into the batch: one call, forward and backward
    jvp, jacfwd           the formulas of this file, which store the N x N scores
    second derivatives    the backward formula of this file, differentiated

The forward and the backward operator are an autograd.Function each, whose rules torch.func calls. Calls that cannot be
folded (packed sequences, dropout, mapped sinks) run once for each element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flashtile import ops
from flashtile.backends import dropout, registry
from flashtile.errors import unsupported
from flashtile.problem import NUM_TENSORS, AttentionArgs, key_window, lse_dtype, softmax_scale

_ORDER = AttentionArgs._fields
_DIFFERENTIABLE = [_ORDER.index(name) for name in ("q", "k", "v", "bias", "sinks")]


def is_served() -> bool:
    """A transform that calls the rules of an autograd.Function. functionalize does not: it sees the operator."""
    if not ops.is_transformed():
        return False
    if not torch._C._are_functorch_transforms_active():
        return True
    interpreter: Any = torch._C._functorch.peek_interpreter_stack()
    return interpreter.key() != torch._C._functorch.TransformType.Functionalize


def attend(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """(out, lse)"""
    result: tuple[Tensor, Tensor] = _Forward.apply(*args._replace(needs_grad=True))
    return result


class _Forward(Function):
    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, Tensor]:
        return ops._forward_below_autograd(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors = (*inputs[:NUM_TENSORS], *output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.options = inputs[NUM_TENSORS:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[index] for index in _DIFFERENTIABLE)
        dout = torch.zeros_like(out) if dout is None else dout
        grads = _Backward.apply(dout, dlse, *tensors, *ctx.options, out, lse, needs)
        results: list[Tensor | None] = [None] * len(_ORDER)
        for index, grad, is_needed in zip(_DIFFERENTIABLE, grads, needs, strict=True):
            results[index] = grad if is_needed else None
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        *tensors, out, lse = ctx.saved_tensors
        args = AttentionArgs(*tensors, *ctx.options)
        _announce("forward-mode derivatives")
        return _tangents(args, out, lse, [tangents[index] for index in _DIFFERENTIABLE])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _map_forward(_Forward.apply, info.batch_size, in_dims, values)


class _Backward(Function):
    @staticmethod
    def forward(*values: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            result: tuple[Tensor, ...] = ops.backward(*values)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.others = [value for value in inputs if not isinstance(value, Tensor)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = _rebuilt(ctx)
        wanted = [index for index, is_needed in enumerate(ctx.needs_input_grad) if is_needed]
        _announce("second derivatives")

        def formula(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _gradients(*_replaced(values, wanted, inputs))

        pull: Any = torch.func.vjp(formula, *(values[index] for index in wanted))[1]
        results: list[Tensor | None] = [None] * len(values)
        for index, grad in zip(wanted, pull(tuple(grads)), strict=True):
            results[index] = grad
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        values = _rebuilt(ctx)
        given = [index for index, tangent in enumerate(tangents) if isinstance(tangent, Tensor)]
        _announce("second derivatives")

        def formula(*inputs: Tensor) -> tuple[Tensor, ...]:
            return _gradients(*_replaced(values, given, inputs))

        # torch refuses dual numbers of tensors that overlap themselves, as the gradient of a sum does
        primals = tuple(values[index].contiguous() for index in given)
        result: tuple[Tensor, ...] = torch.func.jvp(formula, primals, tuple(tangents[index] for index in given))[1]
        return result

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _map_backward(_Backward.apply, info.batch_size, in_dims, values)


def _split(values: Any) -> tuple[Tensor, Tensor | None, AttentionArgs, Tensor, Tensor, tuple[bool, ...]]:
    """The arguments of the backward operator by their meaning."""
    dout, dlse, *middle, out, lse, needs = values
    return dout, dlse, AttentionArgs(*middle), out, lse, needs


# vmap


def _map_forward(
    call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """One call for all elements, and where the results are mapped."""
    args = AttentionArgs(*values)
    if not _can_fold(args, in_dims):
        return _one_by_one(call, size, in_dims, values), (0, 0)
    out, lse = call(*_folded(args, in_dims, size, needs_bias_grad=False))
    sizes = size, _unmapped_sizes(args.q, in_dims[0])[0]
    return (out.unflatten(0, sizes), lse.unflatten(0, sizes)), (0, 0)


def _map_backward(
    call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    dout, dlse, args, out, lse, needs = _split(values)
    own_dims = in_dims[2 : 2 + len(_ORDER)]
    if not _can_fold(args, own_dims) or needs[4]:
        return _one_by_one(call, size, in_dims, values), (0,) * 5
    folded = _folded(args, own_dims, size, needs_bias_grad=needs[3])
    dims = (in_dims[0], in_dims[1], *in_dims[-3:-1])
    wide = [None if t is None else _fold(t, dim, size) for t, dim in zip((dout, dlse, out, lse), dims, strict=True)]
    grads = list(call(wide[0], wide[1], *folded, wide[2], wide[3], needs))
    sizes = size, _unmapped_sizes(args.q, own_dims[0])[0]
    for index, is_needed in enumerate(needs):
        grad = grads[index]
        grads[index] = grad.unflatten(0, sizes) if is_needed else grad.expand(size, *grad.shape)
    if needs[3] and args.bias is not None and _unmapped_sizes(args.bias, own_dims[3])[0] == 1:
        grads[3] = grads[3].sum(1, keepdim=True)
    return tuple(grads), (0,) * 5


def _can_fold(args: AttentionArgs, in_dims: tuple[Any, ...]) -> bool:
    first_index = _ORDER.index("rng_state")
    has_indices = any(value is not None for value in args[first_index:NUM_TENSORS])
    return not has_indices and in_dims[_ORDER.index("sinks")] is None


def _unmapped_sizes(tensor: Tensor, dim: int | None) -> list[int]:
    """The sizes of one element."""
    sizes = list(tensor.shape)
    if dim is not None:
        del sizes[dim]
    return sizes


def _fold(tensor: Tensor, dim: int | None, size: int, batch: int | None = None) -> Tensor:
    """(size * batch, ...), where the tensor has a batch or, with `batch` given, may have one of 1."""
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if batch is not None and mapped.shape[1] == 1:
        mapped = mapped.expand(size, batch, *mapped.shape[2:])
    return mapped.flatten(0, 1)


def _folded(args: AttentionArgs, in_dims: tuple[Any, ...], size: int, needs_bias_grad: bool) -> AttentionArgs:
    q, k, v = (_fold(tensor, dim, size) for tensor, dim in zip(args[:3], in_dims, strict=False))
    batch = _unmapped_sizes(args.q, in_dims[0])[0]
    shared: dict[str, Any] = {}
    for name in ("bias", "mask", "alibi_slopes"):
        tensor, dim = getattr(args, name), in_dims[_ORDER.index(name)]
        if tensor is None:
            continue
        own_sizes = _unmapped_sizes(tensor, dim)
        is_broadcast = own_sizes[0] == 1 if name != "alibi_slopes" else tensor.dim() == 1
        if dim is None and is_broadcast and not (name == "bias" and needs_bias_grad):
            continue
        if name == "alibi_slopes" and len(own_sizes) == 1:
            tensor, dim = (tensor[None], None) if dim is None else (tensor.movedim(dim, 0)[:, None], 0)
        shared[name] = _fold(tensor, dim, size, batch)
    return args._replace(q=q, k=k, v=v, **shared)


def _one_by_one(call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
    if size == 0:
        raise unsupported("vmap", "no element", "one or more in a call that cannot be folded into the batch")
    registry.announce_slow_path("a call inside vmap that cannot be folded into the batch runs once for each element")
    results = []
    for index in range(size):
        one = [v.select(dim, index) if isinstance(dim, int) else v for v, dim in zip(values, in_dims, strict=True)]
        results.append(call(*one))
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


# Formulas


def _announce(what: str) -> None:
    registry.announce_slow_path(f"{what} inside torch.func are computed by PyTorch and store the N x N scores")


def _rebuilt(ctx: Any) -> list[Any]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return [next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor]


def _replaced(values: list[Any], indices: list[int], inputs: tuple[Tensor, ...]) -> list[Any]:
    changed = list(values)
    for index, value in zip(indices, inputs, strict=True):
        changed[index] = value
    return changed


def _heads_first(args: AttentionArgs, tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2) if args.layout == "bshd" else tensor


def _shared_heads(args: AttentionArgs, tensor: Tensor, heads: int) -> Tensor:
    """k or v with heads first, repeated for every query head."""
    tensor = _heads_first(args, tensor)
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


class _Scores:
    """The scores of a dense call in float32 or float64: s, their derivative by the raw scores, P, and the dropout
    factor."""

    def __init__(self, args: AttentionArgs, lse: Tensor) -> None:
        if any(value is not None for value in args[_ORDER.index("cu_seqlens_q") : NUM_TENSORS]):
            raise unsupported(
                "cu_seqlens_q", "packed sequences inside forward-mode or second derivatives", "dense calls there"
            )
        self.dtype = dtype = lse_dtype(args)
        self.scale = softmax_scale(args)
        self.q = _heads_first(args, args.q).to(dtype)
        heads = self.q.shape[1]
        self.k, self.v = (_shared_heads(args, tensor, heads).to(dtype) for tensor in (args.k, args.v))
        s = self.q @ self.k.transpose(-1, -2) * self.scale
        self.slope: Tensor | float = 1.0
        if args.softcap:
            tanh = torch.tanh(s / args.softcap)
            s, self.slope = args.softcap * tanh, 1.0 - tanh * tanh
        seqlen_q, seqlen_k = s.shape[-2:]
        offset = 0 if args.causal == "top_left" else seqlen_k - seqlen_q
        rows = torch.arange(seqlen_q, device=s.device)[:, None] + offset
        distance = rows - torch.arange(seqlen_k, device=s.device)
        if args.alibi_slopes is not None:
            s = s - args.alibi_slopes.to(dtype)[..., None, None] * distance.abs().to(dtype)
        left, right = key_window(args)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            keep = keep & (distance <= left)
        if right >= 0:
            keep = keep & (distance >= -right)
        if args.mask is not None:
            keep = keep & args.mask
        if args.bias is not None:
            s = s + args.bias.to(dtype)
            keep = keep & (s != -torch.inf)
        self.is_alive = lse != -torch.inf
        self.shift = torch.where(self.is_alive, lse, 0.0)
        self.p = torch.where(keep, torch.exp(torch.where(keep, s - self.shift[..., None], 0.0)), 0.0)
        self.kept: Tensor | float = 1.0
        if args.dropout_p > 0.0 and args.rng_state is not None:
            batch_heads = torch.arange(s.shape[0] * heads, device=s.device).view(s.shape[0], heads)
            indices = dropout.indices(args, batch_heads, range(seqlen_q), range(seqlen_k))
            kept = dropout.keep_mask(args.rng_state, args.dropout_p, *indices)
            self.kept = kept.to(dtype) * dropout.keep_factor(args.dropout_p)
        self.p_sink: Tensor | None = None
        if args.sinks is not None:
            self.p_sink = torch.exp(args.sinks.to(dtype)[:, None] - self.shift)


def _tangents(args: AttentionArgs, out: Tensor, lse: Tensor, tangents: list[Any]) -> tuple[Tensor, Tensor]:
    """Returns the tangents of out and lse for those of q, k, v, bias and sinks."""
    scores = _Scores(args, lse)
    heads, dtype = scores.q.shape[1], scores.dtype
    tq, tk, tv, tbias, tsinks = tangents
    ts = torch.zeros_like(scores.p)
    if tq is not None:
        ts = ts + _heads_first(args, tq).to(dtype) @ scores.k.transpose(-1, -2)
    if tk is not None:
        ts = ts + scores.q @ _shared_heads(args, tk, heads).to(dtype).transpose(-1, -2)
    ts = ts * (scores.slope * scores.scale)
    if tbias is not None:
        ts = ts + torch.where(args.bias == -torch.inf, 0.0, tbias.to(dtype))  # type: ignore[arg-type]
    tlse = (scores.p * ts).sum(-1)
    if tsinks is not None and scores.p_sink is not None:
        tlse = tlse + scores.p_sink * tsinks.to(dtype)[:, None]
    tlse = torch.where(scores.is_alive, tlse, 0.0)
    tout = (scores.p * scores.kept * (ts - tlse[..., None])) @ scores.v
    if tv is not None:
        tout = tout + (scores.p * scores.kept) @ _shared_heads(args, tv, heads).to(dtype)
    return _heads_first(args, tout).to(out.dtype), tlse.to(lse.dtype)


def _gradients(*values: Any) -> tuple[Tensor, ...]:
    """The backward operator as PyTorch operations, of out and lse too."""
    dout, dlse, args, out, lse, needs = _split(values)
    scores = _Scores(args, lse)
    dtype = scores.dtype
    do, o = _heads_first(args, dout).to(dtype), _heads_first(args, out).to(dtype)
    do = torch.where(scores.is_alive[..., None], do, 0.0)
    delta = (do * o).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(scores.is_alive, dlse.to(dtype), 0.0)
    ds = scores.p * (do @ scores.v.transpose(-1, -2) * scores.kept - delta[..., None])
    raw = ds * (scores.slope * scores.scale)
    heads_kv = _heads_first(args, args.k).shape[1]

    def of_keys(grad: Tensor, like: Tensor) -> Tensor:
        return _heads_first(args, grad.unflatten(1, (heads_kv, -1)).sum(2)).to(like.dtype)

    empty = args.q.new_empty(0)
    dbias = ds.sum_to_size(args.bias.shape).to(args.bias.dtype) if needs[3] and args.bias is not None else empty
    dsinks = empty
    if needs[4] and args.sinks is not None and scores.p_sink is not None:
        dsinks = -(scores.p_sink * delta).sum((0, 2)).to(args.sinks.dtype)
    return (
        _heads_first(args, raw @ scores.k).to(args.q.dtype) if needs[0] else empty,
        of_keys(raw.transpose(-1, -2) @ scores.q, args.k) if needs[1] else empty,
        of_keys((scores.p * scores.kept).transpose(-1, -2) @ do, args.v) if needs[2] else empty,
        dbias,
        dsinks,
    )


# Graphs of torch.compile call the operators themselves inside vmap
torch.library.register_vmap(
    "flashtile::forward", lambda info, dims, *values: _map_forward(ops.forward, info.batch_size, dims, values)
)
torch.library.register_vmap(
    "flashtile::backward", lambda info, dims, *values: _map_backward(ops.backward, info.batch_size, dims, values)
)
