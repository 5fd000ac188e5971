"""The three operators: `flashtile::forward`, `flashtile::backward`, `flashtile::append_kv`.

Below the dispatcher sizes are plain integers: here a call becomes a Problem, a backend is selected and the outputs are
allocated. Above it, autograd is one `autograd.Function` under the Autograd key; a call in which nothing requires grad
goes below it at once. No schema argument has a default, so every kernel gets all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashtile.backends import cuda, kvcache, native, reference, registry
from flashtile.backends.base import GradNeeds, Grads
from flashtile.backends.kvcache import AppendArgs
from flashtile.errors import unsupported, value_error
from flashtile.problem import NUM_TENSORS, AttentionArgs, Problem, is_checking, lse_dtype, validate

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? rng_state, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? scale, str causal, SymInt window_left, SymInt window_right, "
    "float softcap, float dropout_p, bool? deterministic, SymInt num_splits, ScalarType? out_dtype, str layout, str? backend, "
    "bool needs_grad, bool needs_bias_grad"
)

_library = torch.library.Library("flashtile", "DEF")
_library.define(f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"backward(Tensor dout, Tensor? dlse, {_ARGUMENTS}, Tensor out, Tensor lse, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, Tensor? block_table, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, str layout) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)

forward = torch.ops.flashtile.forward.default
backward = torch.ops.flashtile.backward.default
append_kv = torch.ops.flashtile.append_kv.default


def output_sizes(args: AttentionArgs) -> tuple[list[int], list[int]]:
    """Of out, as q with v's head_dim, and of lse: (batch, heads, seqlen_q) or (heads, total_q)."""
    q = args.q
    lse = list(q.shape[:-1]) if args.layout == "bhsd" else [*q.shape[:-3], q.shape[-2], q.shape[-3]]
    return [*q.shape[:-1], args.v.shape[-1]], lse


def empty_outputs(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out in q's memory order, and lse."""
    q = args.q
    sizes, lse_sizes = output_sizes(args)
    # A "bhsd" view of "bshd" memory gives such a view again, so that joining the heads afterwards copies nothing
    is_swapped = 0 < q.stride(-3) < q.stride(-2)
    if is_swapped:
        sizes[-3], sizes[-2] = sizes[-2], sizes[-3]
    out = q.new_empty(sizes, dtype=args.out_dtype or q.dtype)
    return (out.transpose(-2, -3) if is_swapped else out), q.new_empty(lse_sizes, dtype=lse_dtype(args))


def empty_grads(args: AttentionArgs, needs: GradNeeds) -> Grads:
    """Buffers in the inputs' shapes, dtypes and memory orders."""
    inputs = (args.q, args.k, args.v, args.bias, args.sinks)
    return Grads(*(torch.empty_like(tensor) if need and tensor is not None else None for tensor, need in zip(inputs, needs, strict=True)))


def as_outputs(args: AttentionArgs, grads: Grads) -> tuple[Tensor, ...]:
    """An op returns tensors: an empty one stands for a gradient that is not needed."""
    return tuple(args.q.new_empty(0) if grad is None else grad for grad in grads)


def _split(values: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, AttentionArgs, Tensor, Tensor, GradNeeds]:
    """The arguments of the backward op by their meaning."""
    dout, dlse, *middle, out, lse, needs = values
    args = AttentionArgs(*middle)
    if len(needs) != len(GradNeeds._fields):
        raise value_error("needs", f"{len(needs)} flags", f"{len(GradNeeds._fields)}: {', '.join(GradNeeds._fields)}")
    like_out, like_lse = output_sizes(args)
    for name, tensor, sizes in (("out", out, like_out), ("dout", dout, like_out), ("lse", lse, like_lse), ("dlse", dlse, like_lse)):
        if tensor is not None and list(tensor.shape) != sizes:
            raise value_error(name, tensor, f"shape {tuple(sizes)}")
    return dout, dlse, args, out, lse, GradNeeds(*needs)


# CPU and CUDA


def _forward(*values: Any) -> tuple[Tensor, Tensor]:
    served = native.forward(values)
    return served if served else _forward_by_python(AttentionArgs(*values))


def _forward_by_python(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Any forward pass."""
    backend = registry.select(Problem.of(args), args.backend)
    out, lse = empty_outputs(args)
    backend.forward(args, out, lse)
    return out, lse


def _backward(*values: Any) -> tuple[Tensor, ...]:
    dout, dlse, args, out, lse, needs = _split(values)
    grads = _differentiate(dout, dlse, args, out, lse, needs)
    return as_outputs(args, grads)


def _differentiate(dout: Tensor, dlse: Tensor | None, args: AttentionArgs, out: Tensor, lse: Tensor, needs: GradNeeds) -> Grads:
    wanted = tuple(need and args[place] is not None for place, need in zip(_DIFFERENTIABLE, needs, strict=True))
    served = native.backward((dout, dlse, args, out, lse, wanted))
    if served:
        return Grads(*served)
    backend = registry.select(_backward_problem(args, needs), args.backend, "backward")
    grads = empty_grads(args, needs)
    backend.backward(args, dout, dlse, out, lse, grads)
    return grads


def _backward_problem(args: AttentionArgs, needs: GradNeeds) -> Problem:
    return Problem.of(args._replace(needs_grad=True, needs_bias_grad=args.needs_bias_grad or needs.dbias))


def _append_kv(*values: Any) -> None:
    if isinstance(native.append_kv(values), tuple):  # an empty one
        return
    args = AppendArgs(*values)
    kvcache.validate(args)
    if is_checking():
        kvcache.check_values(args)
    if cuda.takes_append(args.k):
        cuda.append(args)
    else:
        kvcache.append(args)


def _append_kv_cpu(*values: Any) -> None:
    args = AppendArgs(*values)
    kvcache.validate(args)
    kvcache.check_values(args)
    kvcache.append(args)


_library.impl("forward", _forward, "CPU")
_library.impl("forward", _forward, "CUDA")
_library.impl("backward", _backward, "CPU")
_library.impl("backward", _backward, "CUDA")
_library.impl("append_kv", _append_kv_cpu, "CPU")
_library.impl("append_kv", _append_kv, "CUDA")


# Fake: the same checks, sizes and strides without data


def _forward_fake(*values: Any) -> tuple[Tensor, Tensor]:
    args = AttentionArgs(*values)
    validate(args)
    return empty_outputs(args)


def _backward_fake(*values: Any) -> tuple[Tensor, ...]:
    _, _, args, _, _, needs = _split(values)
    validate(args)
    return as_outputs(args, empty_grads(args, needs))


def _append_kv_fake(*values: Any) -> None:
    kvcache.validate(AppendArgs(*values))


torch.library.register_fake("flashtile::forward", _forward_fake, lib=_library)
torch.library.register_fake("flashtile::backward", _backward_fake, lib=_library)
torch.library.register_fake("flashtile::append_kv", _append_kv_fake, lib=_library)


# Autograd

_DIFFERENTIABLE = [AttentionArgs._fields.index(name) for name in ("q", "k", "v", "bias", "sinks")]


_NO_OPTIONS = (None,) * (NUM_TENSORS - 3)


class _Attention(torch.autograd.Function):
    """Of the inputs that have a gradient, and of the call: all arguments once more, (out, lse), and whether lse is wanted. Each input,
    output and saved tensor costs time; lse is an output only where it is wanted. Where the C++ extension is there, it takes the place of
    both methods, whoever launches (csrc/exec/python.cpp: forward_of_node, backward_of_node)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: tuple[Any, Any, bool]) -> Any:
        args, results, wants_lse = call
        count = 3 if args[3:NUM_TENSORS] == _NO_OPTIONS else NUM_TENSORS
        ctx.save_for_backward(*args[:count], *results)
        ctx.others = args[count:]
        ctx.set_materialize_grads(False)
        return results if wants_lse else results[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return _backward_of_node(ctx.saved_tensors, ctx.others, ctx.needs_input_grad, dout, dlse)


def _backward_of_node(
    saved: tuple[Any, ...], others: tuple[Any, ...], needs: tuple[bool, ...], dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of a node's inputs, by what its context holds."""
    *tensors, out, lse = saved
    args, wanted = (*tensors, *others), needs[:-1]
    if dout is None:
        dout = torch.zeros_like(out)
    if torch.is_grad_enabled() and not lse.requires_grad:
        out, lse = forward(*args)  # to be differentiated a second time, through lse too
    grads = backward(dout, dlse, *args, out, lse, wanted)
    return *(grad if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True)), None


native.serve_nodes(_Attention, _Attention._backward_cls, _backward_of_node)


def _results(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Of a forward pass whose place in the graph is made afterwards."""
    with torch.no_grad():
        return _forward_below_autograd(args)


def _forward_below_autograd(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor] = forward(*args)
    return result


def requires_grad(values: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def is_transformed() -> bool:
    """Inside forward-mode differentiation or a torch.func transform, which must see the Autograd key."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


# `apply` without what it does for torch.func transforms
_apply = super(torch.autograd.Function, _Attention).apply


def differentiable(call: tuple[Any, Any, bool]) -> tuple[Tensor, Any]:
    """A call's place in the graph, where nobody but autograd listens: `native.attend` has found that, and left the rest."""
    args, results, wants_lse = call
    if results is None:
        call = (args, _results(args), wants_lse)
    result: Any = _apply(args[0], args[1], args[2], args[3], args[6], call)
    return result if wants_lse else (result, None)


def attend(args: tuple[Any, ...], wants_lse: bool = True) -> tuple[Tensor, Any]:
    """The forward op as the public functions call it: below autograd at once where nothing requires grad. Without wants_lse there may be
    none."""
    if is_compiling():
        return forward(*args)
    served = native.attend(args, wants_lse)
    if served and len(served) == 1:
        return differentiable(served[0])
    return served or attend_by_python(args)


def attend_by_python(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The same where the C++ executor has been asked already."""
    if requires_grad(args[:7]) or is_transformed():
        return forward(*args)
    q = args[0]
    is_plain = all(tensor is None or _is_plain(tensor) for tensor in args[:NUM_TENSORS]) and (q.is_cuda or q.is_cpu)
    if is_plain and not native.is_heard():
        # Nobody listens between here and the kernel: spare the host the dispatcher
        return _forward_by_python(AttentionArgs(*args))
    return _forward_below_autograd(args)


def _is_plain(tensor: Tensor) -> bool:
    """Its memory holds its values; else the dispatcher knows what to do."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_neg() and not tensor._is_zerotensor()


def _check_transforms() -> None:
    if is_transformed():
        raise unsupported(
            "attention",
            "a call inside forward-mode differentiation or a torch.func transform",
            "reverse mode: backward and torch.autograd.grad",
        )


def _forward_autograd(keyset: Any, *values: Any) -> Any:
    _check_transforms()
    if requires_grad(values):
        bias = values[3]
        args = (*values[:-2], True, bias is not None and bias.requires_grad)
        return _Attention.apply(*(values[place] for place in _DIFFERENTIABLE), (args, _results(args), True))
    with torch._C._AutoDispatchBelowAutograd():
        return forward.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _backward_autograd(keyset: Any, *values: Any) -> Any:
    _check_transforms()
    if requires_grad(values):
        return _differentiable_backward(*values)
    with torch._C._AutoDispatchBelowAutograd():
        return backward.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _differentiable_backward(*values: Any) -> tuple[Tensor, ...]:
    """Second derivatives: the backward formulas in PyTorch, which differentiates them, through out and lse too."""
    dout, dlse, args, out, lse, needs = _split(values)
    backend = registry.select(_backward_problem(args, needs), args.backend, "backward")
    if backend.name != "reference":
        registry.announce_slow_path(f"{backend.name!r} has no second derivatives; 'reference' computes them and stores the N x N scores")
    grads = empty_grads(args, needs)
    reference.attend_backward(args, dout, dlse, out, lse, grads, torch.float64)
    return as_outputs(args, grads)


_library.impl("forward", _forward_autograd, "Autograd", with_keyset=True)
_library.impl("backward", _backward_autograd, "Autograd", with_keyset=True)
_library.impl("append_kv", torch.library.fallthrough_kernel, "Autograd")
