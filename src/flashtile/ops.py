"""The three operators: `flashtile::forward`, `flashtile::backward`, `flashtile::append_kv`.

Their kernels for CPU and CUDA tensors are C++ (csrc/exec/ops.cpp), which falls back to the Python kernels of this file
through ops whose names end in `_fallback`. Without the C++ extension the Python kernels are the ops' own. In Python a
call becomes a Problem, a backend is selected and the outputs are allocated. No schema argument has a default, so every
kernel gets all of them.

The overloads named `dense` are the same ops for calls with few options, packed into one integer: each argument that
torch converts costs time. They stand below autograd: the public functions call them where nothing requires grad, and
inside `dense_function`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flashtile.backends import cuda, kvcache, native, reference, registry
from flashtile.backends.base import GradNeeds, Grads
from flashtile.backends.call import plain_args
from flashtile.backends.kvcache import AppendArgs
from flashtile.errors import dtype_name, type_error, unsupported, value_error
from flashtile.problem import (
    CACHE_ARGUMENTS,
    DENSE_FIELDS,
    DENSE_SHIFTS,
    NUM_TENSORS,
    AttentionArgs,
    Problem,
    check_values,
    is_checking,
    lse_dtype,
    schema,
    shape_of,
    validate,
)

_DENSE = f"{schema(('q', 'k', 'v', 'scale'))}, int mode"
# A step of a cache. Internal: C++ alone handles it, and returns no tensors where it does not
_CACHE = schema(CACHE_ARGUMENTS).replace("Tensor k,", "Tensor(a!) k,").replace("Tensor v,", "Tensor(b!) v,")
_CACHE = (
    f"({_CACHE}, int mode, Tensor? new_k, Tensor? new_v, Tensor? rotary_cos, Tensor? rotary_sin, "
    "int length, int flags) -> (Tensor out, Tensor lse)"
)
# Bits of `flags`; num_splits takes the bits from SPLITS_SHIFT up
WANTS_LSE, INTERLEAVED, SPLITS_SHIFT = 1, 2, 2
_APPEND = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, Tensor? block_table, "
    "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, str layout"
)
# By name and overload. A dense forward pass returns no lse unless its mode has needs_grad.
_SCHEMAS = {
    "forward": f"({schema()}) -> (Tensor out, Tensor lse)",
    "forward.dense": f"({_DENSE}) -> (Tensor out, Tensor lse)",
    "backward": f"(Tensor dout, Tensor? dlse, {schema()}, Tensor out, Tensor lse, bool[] needs) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    "backward.dense": f"(Tensor dout, {_DENSE}, Tensor out, Tensor lse) -> (Tensor dq, Tensor dk, Tensor dv)",
    "append_kv": f"({_APPEND}) -> ()",
    # With what the read after it needs: the queries, rotated as the new keys are, and the lengths with the new rows
    "append_kv.step": f"({_APPEND}, Tensor q, bool is_ordered) -> (Tensor rotated_q, Tensor seqused_k)",
}
_library = torch.library.Library("flashtile", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

_library.define("forward.cache" + _CACHE)

forward_op = torch.ops.flashtile.forward.default
backward_op = torch.ops.flashtile.backward.default
append_op = torch.ops.flashtile.append_kv.default
append_step_op = torch.ops.flashtile.append_kv.step
# Without the wrapper of an OpOverload, which costs 0.4 us
dense_forward = torch.ops.flashtile.forward.dense._op
dense_backward = torch.ops.flashtile.backward.dense._op
cache_forward = torch.ops.flashtile.forward.cache._op

# C functions, since every call asks them
is_deterministic = torch._C._get_deterministic_algorithms
is_grad_enabled = torch._C.is_grad_enabled
increment_version = torch._C._increment_version  # of what a kernel has changed: torch asks for it in backward passes
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_is_tracing, _num_function_modes = torch._C._is_tracing, torch._C._len_torch_function_stack
num_dispatch_modes = torch._C._len_torch_dispatch_stack
# Without the device's name, which costs as much as all the other checks; a torch that lacks it takes the longer way
is_autocasting: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_key_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch


waits_for_errors = native.waits_for_errors


def reraise(error: RuntimeError) -> NoReturn:
    """Raises what a kernel has raised, of which torch hands over the text alone."""
    raised = native.take_raised(error) or error
    context = raised.__context__
    try:
        raise raised
    finally:
        raised.__context__ = context
        del error, raised, context  # the traceback has this frame: a cycle would keep the call's tensors alive


on_dispatch_mode: list[Callable[[], None]] = []  # of those who must act before an op runs inside a dispatch mode


def meet_dispatch_modes() -> None:
    for act in on_dispatch_mode:
        act()


def _typed(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with typed errors."""

    @native.waits_for_errors
    def call(*args: Any) -> Any:
        if is_compiling():
            return op(*args)
        if num_dispatch_modes():
            meet_dispatch_modes()
        try:
            return op(*args)
        except RuntimeError as error:
            reraise(error)

    return call


forward, backward, append_kv = _typed(forward_op), _typed(backward_op), _typed(append_op)
append_step = _typed(append_step_op)


def output_sizes(args: AttentionArgs) -> tuple[list[int], list[int]]:
    """Returns the sizes of out, as q with v's head_dim, and of lse: (batch, heads, seqlen_q) or (heads, total_q)."""
    q = args.q
    lse = list(q.shape[:-1]) if args.layout == "bhsd" else [*q.shape[:-3], q.shape[-2], q.shape[-3]]
    return [*q.shape[:-1], args.v.shape[-1]], lse


def _out_dtype(args: AttentionArgs) -> torch.dtype:
    return args.out_dtype or args.q.dtype


def empty_outputs(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    """out in q's memory order, and lse."""
    q = args.q
    sizes, lse_sizes = output_sizes(args)
    # Joining the heads afterwards then copies nothing wherever q's heads lie side by side
    order = memory_order(q)
    out = q.new_empty([sizes[axis] for axis in order], dtype=_out_dtype(args))
    if order != sorted(order):
        out = out.permute([order.index(axis) for axis in range(len(order))])
    return out, q.new_empty(lse_sizes, dtype=lse_dtype(args))


def memory_order(q: Tensor) -> list[int]:
    """The axes from the largest stride to the smallest, the last one last. Axes of stride 0 keep their places."""
    strides = q.stride()
    placed = [axis for axis in range(q.dim() - 1) if strides[axis] != 0]
    by_stride = iter(sorted(placed, key=lambda axis: -strides[axis]))
    return [next(by_stride) if axis in placed else axis for axis in range(q.dim())]


def empty_grads(args: AttentionArgs, needs: GradNeeds) -> Grads:
    """Buffers in the inputs' shapes, dtypes and memory orders."""
    inputs = (args.q, args.k, args.v, args.bias, args.sinks)
    return Grads(
        *(
            torch.empty_like(tensor) if need and tensor is not None else None
            for tensor, need in zip(inputs, needs, strict=True)
        )
    )


def as_outputs(args: AttentionArgs, grads: Grads) -> tuple[Tensor, ...]:
    """An op returns tensors: an empty one stands for a gradient that is not needed."""
    return tuple(args.q.new_empty(0) if grad is None else grad for grad in grads)


def split_backward(values: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, AttentionArgs, Tensor, Tensor, GradNeeds]:
    """The arguments of the backward op by their meaning, checked: kernels read as many bytes of out, lse and their
    gradients as the forward pass wrote."""
    dout, dlse, *middle, out, lse, needs = values
    args = AttentionArgs(*middle)
    if len(needs) != len(GradNeeds._fields):
        raise value_error("needs", f"{len(needs)} flags", f"{len(GradNeeds._fields)}: {', '.join(GradNeeds._fields)}")
    validate(args)
    like_out, like_lse = output_sizes(args)
    for name, tensor, sizes in (
        ("out", out, like_out),
        ("dout", dout, like_out),
        ("lse", lse, like_lse),
        ("dlse", dlse, like_lse),
    ):
        if tensor is not None:
            dtype, owner = (lse_dtype(args), "lse") if name.endswith("lse") else (_out_dtype(args), "output")
            _check_saved(args, name, tensor, sizes, dtype, owner)
    return dout, dlse, args, out, lse, GradNeeds(*needs)


def _check_saved(
    args: AttentionArgs, name: str, tensor: Tensor, sizes: list[int], dtype: torch.dtype, owner: str
) -> None:
    if tensor.dtype != dtype:
        raise type_error(name, tensor.dtype, f"{dtype_name(dtype)}, that of the {owner}")
    if tensor.device != args.q.device:
        raise value_error(name, f"device {tensor.device}", f"{args.q.device}, where q is")
    if list(tensor.shape) != sizes:
        raise value_error(name, tensor, f"shape {tuple(sizes)}")


# The Python kernels for CPU and CUDA

NO_GRADS = Grads(None, None, None, None, None)


def _forward(*values: Any) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return forward_by_python(AttentionArgs(*values))


DETERMINISTIC, NEEDS_GRAD = 1 << DENSE_SHIFTS["deterministic"], 1 << DENSE_SHIFTS["needs_grad"]


def dense_mode(**options: Any) -> int:
    """Packs values of DENSE_FIELDS; the first one counts where none is given."""
    return sum(DENSE_FIELDS[name].index(value) << DENSE_SHIFTS[name] for name, value in options.items())


# By what a caller may write as (causal, layout, backend)
_CAUSAL_WORDS = {False: "none", True: "bottom_right", "top_left": "top_left", "bottom_right": "bottom_right"}
DENSE_MODES = {
    (written, layout, backend): dense_mode(causal=causal, layout=layout, backend=backend)
    for written, causal in _CAUSAL_WORDS.items()
    for layout in DENSE_FIELDS["layout"]
    for backend in DENSE_FIELDS["backend"]
}


def dense_args(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mode: int) -> AttentionArgs:
    options, rest = dict[str, Any](), mode
    for name, shift in reversed(DENSE_SHIFTS.items()):
        index, rest = rest >> shift, rest & (1 << shift) - 1
        if not 0 <= index < len(DENSE_FIELDS[name]):
            raise value_error("mode", mode, f"fields {DENSE_SHIFTS} that index {DENSE_FIELDS}")
        options[name] = DENSE_FIELDS[name][index]
    return AttentionArgs(q, k, v, scale=scale, **options)


def _forward_dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mode: int
) -> tuple[Tensor | None, Tensor | None]:
    args = dense_args(q, k, v, scale, mode)
    out, lse = forward_by_python(args)
    return out, lse if args.needs_grad else None


def forward_by_python(args: AttentionArgs) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Any forward pass. Without results where the backend has registered a plan, by which C++ makes the call."""
    described = _described(native.FORWARD, args)
    problem = described or Problem.of(args)
    if is_checking():
        check_values(args)
        if native.has_plan(native.FORWARD):
            return None, None
    backend = registry.select(problem, args.backend)
    if described is not None and backend.plan_forward(args, problem):
        return None, None
    out, lse = empty_outputs(args)
    backend.forward(plain_args(args), out, lse)
    return out, lse


def _described(kind: int, args: AttentionArgs) -> Problem | None:
    """The problem of a call that waits for a plan, as C++ describes it, which has checked it. None where Python has to
    check."""
    if args.q.device.type in cuda.CudaBackend.devices:
        cuda.introduce(args.q.device.index or 0)
    return native.described(kind, args)


def _backward(*values: Any) -> tuple[Tensor | None, ...]:
    dout, dlse, *middle, out, lse, needs = values
    args = AttentionArgs(*middle)
    grads = backward_by_python(dout, dlse, args, out, lse, needs)
    return grads if grads is NO_GRADS else as_outputs(args, grads)


def _backward_dense(dout: Tensor, *values: Any) -> tuple[Tensor | None, ...]:
    *inputs, out, lse = values
    return backward_by_python(dout, None, dense_args(*inputs), out, lse, (True, True, True, False, False))[:3]


def backward_by_python(
    dout: Tensor, dlse: Tensor | None, args: AttentionArgs, out: Tensor, lse: Tensor, flags: Sequence[bool]
) -> Grads:
    """Any backward pass. NO_GRADS where the backend has registered a plan, by which C++ makes the call."""
    asked = _with_grads(args, flags)
    described = _described(native.BACKWARD, asked)
    if described is None:
        split_backward((dout, dlse, *args, out, lse, flags))
    needs, problem = GradNeeds(*flags), described or Problem.summary(asked, shape_of(asked))
    if is_checking():
        check_values(args)
        if native.has_plan(native.BACKWARD):
            return NO_GRADS
    backend = registry.select(problem, args.backend, "backward")
    if described is not None and backend.plan_backward(args, problem, needs, dlse is not None):
        return NO_GRADS
    plain = plain_args(args)
    grads = empty_grads(plain, needs)
    backend.backward(plain, dout, dlse, out, lse, grads)
    if args.sinks is not None and grads.dsinks is not None:
        grads = grads._replace(dsinks=grads.dsinks.to(args.sinks.dtype))
    return grads


def _with_grads(args: AttentionArgs, needs: Sequence[bool]) -> AttentionArgs:
    """The arguments of a backward pass, as selection is told of them. Nobody has checked how many flags there are."""
    at = GradNeeds._fields.index("dbias")
    return args._replace(needs_grad=True, needs_bias_grad=args.needs_bias_grad or any(needs[at : at + 1]))


def _append_kv(*values: Any) -> None:
    args = AppendArgs(*values)
    kvcache.validate(args)
    is_on_gpu = args.k.device.type in cuda.CudaBackend.devices
    if not is_on_gpu or is_checking():
        kvcache.check_values(args)
    if is_on_gpu and cuda.takes_append(args.k):
        cuda.append(args)
    else:
        kvcache.append(args)


def _append_step(*values: Any) -> tuple[Tensor | None, Tensor | None]:
    *given, q, is_ordered = values
    args = AppendArgs(*given)
    kvcache.validate(args)
    kvcache.validate_queries(args, q)
    is_on_gpu = args.k.device.type in cuda.CudaBackend.devices
    if not is_on_gpu or is_checking():
        kvcache.check_values(args)
    step = cuda.append_step if is_on_gpu and cuda.takes_append(args.k) else kvcache.append_step
    return step(args, q, is_ordered)


def _no_cache_step(*values: Any) -> tuple[None, None]:
    """Refuses every step: without the C++ extension it takes the general path of `attention_kvcache`."""
    return None, None


_KERNELS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward.dense": _forward_dense,
    "backward": _backward,
    "backward.dense": _backward_dense,
    "append_kv": _append_kv,
    "append_kv.step": _append_step,
}


def _register_kernels() -> None:
    """The C++ kernels and the Python ones as their fallbacks, or the Python kernels alone."""
    has_cpp = native.register_ops()
    for name, kernel in _KERNELS.items():
        base, _, overload = name.partition(".")
        target = f"{base}_fallback.{overload}".removesuffix(".") if has_cpp else name
        if has_cpp:
            _library.define(target + _SCHEMAS[name])
            _library.impl(target, torch.library.fallthrough_kernel, "Autograd")
            kernel = native.raising(kernel, _SCHEMAS[name].partition("->")[2].count("Tensor"))
        for device in ("CPU", "CUDA"):
            _library.impl(target, kernel, device)
    for device in ("CPU", "CUDA") if not has_cpp else ():
        _library.impl("forward.cache", _no_cache_step, device)


_register_kernels()


# Fake: the same checks, sizes and strides without data


def _forward_fake(*values: Any) -> tuple[Tensor, Tensor]:
    args = AttentionArgs(*values)
    validate(args)
    return empty_outputs(args)


def _forward_dense_fake(*values: Any) -> tuple[Tensor, Tensor | None]:
    args = dense_args(*values)
    out, lse = _forward_fake(*args)
    return out, lse if args.needs_grad else None


def _backward_fake(*values: Any) -> tuple[Tensor, ...]:
    _, _, args, _, _, needs = split_backward(values)
    return as_outputs(args, empty_grads(args, needs))


def _backward_dense_fake(dout: Tensor, *values: Any) -> tuple[Tensor, ...]:
    *inputs, out, lse = values
    return _backward_fake(dout, None, *dense_args(*inputs), out, lse, (True, True, True, False, False))[:3]


def _append_kv_fake(*values: Any) -> None:
    kvcache.validate(AppendArgs(*values))


def _append_step_fake(*values: Any) -> tuple[Tensor | None, Tensor]:
    *given, q, _ = values
    args = AppendArgs(*given)
    kvcache.validate(args)
    kvcache.validate_queries(args, q)
    rotated = None if args.rotary_cos is None else kvcache.empty_rotated(q, args.layout)
    return rotated, torch.empty_like(args.cache_seqlens)


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _forward_fake,
    "forward.dense": _forward_dense_fake,
    "backward": _backward_fake,
    "backward.dense": _backward_dense_fake,
    "append_kv": _append_kv_fake,
    "append_kv.step": _append_step_fake,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"flashtile::{_name}", _fake, lib=_library)


# Autograd

_DIFFERENTIABLE = [AttentionArgs._fields.index(name) for name in ("q", "k", "v", "bias", "sinks")]


def _plain_apply(function: Any) -> Any:
    """A function's `apply` without what it does for torch.func transforms. Its nodes call `backward` directly: torch
    looks it up in every call, which costs 1 us."""
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


class _Attention(torch.autograd.Function):
    """Autograd of q, k, v, bias and sinks, which come one by one and in `args` once more. lse is an output only where
    it is wanted."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, args: Any, wants_lse: bool
    ) -> Any:
        results = _forward_below_autograd(args)
        ctx.save_for_backward(*args[:NUM_TENSORS], *results)
        ctx.options = args[NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return results if wants_lse else results[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        return *_gradients((*tensors, *ctx.options), dout, dlse, out, lse, ctx.needs_input_grad[:5]), None, None


@functools.lru_cache(maxsize=256)
def dense_function(mode: int, scale: float | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`apply` of the same for the dense overloads, where q, k and v all require grad. Every mode and scale has a class
    of its own, so that tensors are its only arguments: another one, and an attribute of its context, cost 0.3 us
    each."""
    any_mode = mode & ~DETERMINISTIC

    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = dense_forward(q, k, v, scale, mode)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @native.waits_for_errors
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if num_dispatch_modes():
            meet_dispatch_modes()
        if is_grad_enabled():
            args = dense_args(q, k, v, scale, mode)._replace(deterministic=None)
            return _gradients(args, dout, None, out, lse, (True, True, True, False, False))[:3]
        try:
            # torch's switch may have changed since the forward pass
            own_mode = any_mode | DETERMINISTIC if is_deterministic() else any_mode
            grads: tuple[Tensor, ...] = dense_backward(dout, q, k, v, scale, own_mode, out, lse)
            return grads
        except RuntimeError as error:
            reraise(error)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = _plain_apply(
        type("_DenseAttention", (torch.autograd.Function,), methods)
    )
    return apply


def _gradients(
    args: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of a node's inputs; None where they are not needed."""
    if dout is None:
        dout = torch.zeros_like(out)
    if is_grad_enabled():
        if not lse.requires_grad:
            out, lse = forward(*args)  # to be differentiated a second time, through lse too
        grads = backward(dout, dlse, *args, out, lse, needs)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            grads = backward(dout, dlse, *args, out, lse, needs)
    return tuple(grad if is_needed else None for grad, is_needed in zip(grads, needs, strict=True))


def _forward_below_autograd(args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor] = forward(*args)
    return result


def requires_grad(values: tuple[Any, ...]) -> bool:
    if is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def is_transformed() -> bool:
    """Inside forward-mode differentiation or a torch.func transform, which must see the Autograd key."""
    return is_forward_mode() or _are_functorch_transforms_active()


def is_forward_mode() -> bool:
    """Inside forward-mode differentiation, of torch.func too."""
    return bool(forward_ad._current_level >= 0)


def is_traced_above_autograd() -> bool:
    """Inside torch.jit.trace or make_fx(pre_dispatch=True), which must see an op before autograd does. The latter runs
    under a torch function mode, and whether there is one is quicker to ask."""
    return _is_tracing() or (_num_function_modes() > 0 and _is_key_included(_PRE_DISPATCH))


def dense_bits(q: Any, k: Any, v: Any) -> int:
    """Returns what a dense call adds to its mode: DETERMINISTIC where torch's switch is on, NEEDS_GRAD where q, k and v
    all require grad. Negative where the call is none: inside autocast, forward-mode differentiation or a torch.func
    transform, inside a tracer that must see it above autograd, with some gradients alone, or with anything but three
    plain tensors."""
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor):
        return -1
    if is_autocasting() or forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return -1
    bits = DETERMINISTIC if is_deterministic() else 0
    num_grads = q.requires_grad + k.requires_grad + v.requires_grad if is_grad_enabled() else 0
    if num_grads == 0:
        # torch.jit.trace and dispatch modes get another op without being asked for (`_recorded_forward`)
        return -1 if _num_function_modes() and _is_key_included(_PRE_DISPATCH) else bits
    return bits | NEEDS_GRAD if num_grads == 3 and not is_traced_above_autograd() else -1


_apply = _plain_apply(_Attention)


def attend(args: tuple[Any, ...], wants_lse: bool = True) -> tuple[Tensor, Any]:
    """The forward op as the public functions call it: below autograd at once where nothing requires grad. Without
    wants_lse there may be none."""
    if is_compiling() or is_transformed():
        return forward(*args)
    if not requires_grad(args[:7]):
        return _forward_below_autograd(args)
    if is_traced_above_autograd():
        return forward(*args)
    result = _differentiable(args, wants_lse, _apply)
    return result if wants_lse else (result, None)


def _differentiable(args: tuple[Any, ...], wants_lse: bool, apply: Callable[..., Any]) -> Any:
    bias = args[3]
    args = (*args[:-2], True, bias is not None and bias.requires_grad)
    return apply(*(args[index] for index in _DIFFERENTIABLE), args, wants_lse)


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
        return _differentiable(values, True, _Attention.apply)
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _backward_autograd(keyset: Any, *values: Any) -> Any:
    _check_transforms()
    if requires_grad(values):
        return _differentiable_backward(*values)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op.redispatch(keyset & torch._C._after_autograd_keyset, *values)


def _differentiable_backward(*values: Any) -> tuple[Tensor, ...]:
    """Second derivatives: the backward formulas in PyTorch, which differentiates them, through out and lse too."""
    dout, dlse, args, out, lse, needs = split_backward(values)
    asked = _with_grads(args, needs)
    backend = registry.select(Problem.summary(asked, shape_of(asked)), args.backend, "backward")
    if backend.name != "reference":
        registry.announce_slow_path(
            f"{backend.name!r} has no second derivatives; 'reference' computes them and stores the N x N scores"
        )
    grads = empty_grads(args, needs)
    reference.attend_backward(args, dout, dlse, out, lse, grads, torch.float64)
    return as_outputs(args, grads)


_library.impl("forward", _forward_autograd, "Autograd", with_keyset=True)
_library.impl("backward", _backward_autograd, "Autograd", with_keyset=True)
for _name in ("forward.dense", "forward.cache", "backward.dense", "append_kv", "append_kv.step"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


# The dense overloads have no gradient, so a graph must not hold them: whoever records gets the ops that have one. These
# keys are active inside a tracer or a dispatch mode alone; other calls pay nothing


def _expanded(values: tuple[Any, ...]) -> AttentionArgs:
    """torch's switch decides when the graph runs, not when it is recorded."""
    return dense_args(*values)._replace(deterministic=None)


def _recorded_forward(*values: Any) -> Any:
    return forward_op(*_expanded(values))


def _recorded_backward(dout: Tensor, *values: Any) -> Any:
    *inputs, out, lse = values
    return tuple(backward_op(dout, None, *_expanded(tuple(inputs)), out, lse, [True, True, True, False, False])[:3])


for _key in ("Tracer", "Python"):
    _library.impl("forward.dense", _recorded_forward, _key)
    _library.impl("backward.dense", _recorded_backward, _key)
