"""The public functions. They take arguments apart (arguments.py), call the ops, and say what would happen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from flashtile import cache_step, ops, transforms
from flashtile.arguments import (
    Causal,
    Window,
    attention_args,
    autocast,
    flag,
    kvcache_args,
    require_tensors,
    varlen_args,
)
from flashtile.backends import kvcache, registry
from flashtile.backends.kvcache import AppendArgs
from flashtile.backends.registry import Explanation
from flashtile.errors import Unsupported, quoted, renamed, type_error, unknown_option, unsupported, value_error
from flashtile.plans.arch import arch_named, gpu_named, known_names
from flashtile.problem import (
    NUM_TENSORS,
    AttentionArgs,
    Problem,
    check_values,
    has_memory,
    is_checking,
    row_axis,
    with_given_shapes,
)
from flashtile.tensors import recorders

# Signatures of reads after an append that are known to be served: steps of generation repeat them
_served: set[tuple[Any, ...]] = set()
_MOST_SIGNATURES = 1024

_COMPILE_HINT = "`flashtile compile --arch sm_80` compiles for GPUs that are not here"
_KVCACHE_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
_KVCACHE_ROW_NAMES = {"block_table": "cache_batch_idx", "page": "row"}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of q over k and v.

    Shapes for layout "bhsd": q (batch, heads, seqlen_q, head_dim), k (batch, heads_kv, seqlen_k, head_dim), v (batch,
    heads_kv, seqlen_k, head_dim_v), heads a multiple of heads_kv. Strides are free but for a contiguous last dimension.

    causal         True or "bottom_right": the last query sees all keys. "top_left": query i sees keys 0 to i.
    window         (left, right): a query sees that many keys on either side of its own; -1 or None = unbounded.
    scale          factor of the scores; None = 1 / sqrt(head_dim).
    mask           bool, True = attend, broadcastable to (batch, heads, seqlen_q, seqlen_k).
    bias           added to the scores, broadcastable likewise, differentiable; -inf masks. As mask or bias, torch's
                   CausalBias counts as causal.
    alibi_slopes   (heads,) or (batch, heads): slope * distance is subtracted.
    softcap        c > 0: scores become c * tanh(scores / c) before anything is added.
    sinks          (heads,): a logit per head that joins the denominator only; differentiable.
    dropout_p      probability to drop an element of the softmax; rng_state = int64 (seed, offset), None = drawn.
    deterministic  None follows torch.use_deterministic_algorithms.
    return_lse     also return the log-sum-exp of each row: (batch, heads, seqlen_q), float32, differentiable.
    backend        a name forces that backend; None takes the best.

    Returns out in q's layout, or (out, lse). docs/semantics.md has the formulas.
    """
    if unknown:
        raise unknown_option("attention", next(iter(unknown)), _OPTIONS["attention"])
    # Most calls: tensors, and options that the dense overloads take
    if (
        window is None
        and mask is None
        and bias is None
        and alibi_slopes is None
        and sinks is None
        and rng_state is None
        and deterministic is None
        and return_lse is False
        and (type(causal) is bool or type(causal) is str)
        and (scale is None or type(scale) is float)
        and type(softcap) is float
        and type(dropout_p) is float
        and not softcap
        and not dropout_p
        and type(layout) is str
        and (backend is None or type(backend) is str)
        and not is_compiling()
        and (mode := ops.DENSE_MODES.get((causal, layout, backend))) is not None
        and (bits := ops.dense_bits(q, k, v)) >= 0
    ):
        return dense(q, k, v, scale, mode | bits)
    if not is_compiling() and (found := recorders(q, k, v, mask, bias, alibi_slopes, sinks, rng_state)):
        return record(attention, found, locals())
    return_lse = flag("return_lse", return_lse)
    q, k, v, bias = autocast(q, k, v, bias)
    args = attention_args(
        q,
        k,
        v,
        causal,
        window,
        scale,
        mask,
        bias,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        rng_state,
        deterministic,
        layout,
        backend,
    )
    out, lse = _attend(args, return_lse, mask, bias)
    return (out, lse) if return_lse else out


def is_dense(q: Any, k: Any, v: Any, scale: Any) -> bool:
    """Plain tensors that nothing intercepts."""
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and (scale is None or type(scale) is float)
        and not is_compiling()
        and not ops.is_autocasting()
        and not ops.is_transformed()
    )


@ops.waits_for_errors
def dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None, mode: int) -> Tensor:
    """A call of few options by the dense overloads. The mode is one of ops.DENSE_MODES with ops.dense_bits."""
    if ops.num_dispatch_modes():
        ops.meet_dispatch_modes()
    try:
        if mode & ops.NEEDS_GRAD:
            return ops.dense_function(mode, scale)(q, k, v)
        out: Tensor = ops.dense_forward(q, k, v, scale, mode)[0]
        return out
    except RuntimeError as error:
        require_tensors(q=q, k=k, v=v)  # of sparse and nested ones torch says less
        ops.reraise(error)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: Causal = False,
    window: Window = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths, packed one behind the other.

    Shapes for layout "bshd": q (total_q, heads, head_dim), k and v (total_k, heads_kv, dim); for "bhsd" the first two
    swap. Sequence b owns query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and key rows likewise (int32, from 0 to the
    total).

    max_seqlen_q, max_seqlen_k  upper bounds of the lengths; None = derived without reading a tensor.
    seqused_k                   (batch,) int32: only so many keys of each sequence count.
    block_table                 (batch, pages) int32: k and v are pages (num_pages, page_size, heads_kv, dim), and
                                cu_seqlens_k gives lengths only; it may be None when seqused_k is given.
    mask, bias                  broadcastable to (batch, heads, max_seqlen_q, max_seqlen_k), indexed within each
                                sequence.

    All other options as in `attention`. lse is (heads, total_q).
    """
    if unknown:
        raise unknown_option("attention_varlen", next(iter(unknown)), _OPTIONS["attention_varlen"])
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, mask, bias, alibi_slopes, sinks, rng_state)
    if not is_compiling() and (found := recorders(*tensors)):
        return record(attention_varlen, found, locals())
    return_lse = flag("return_lse", return_lse)
    q, k, v, bias = autocast(q, k, v, bias)
    args = varlen_args(
        *(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_k,
            block_table,
            causal,
            window,
            scale,
        ),
        *(mask, bias, alibi_slopes, softcap, sinks, dropout_p, rng_state, deterministic, layout, backend),
    )
    out, lse = _attend(args, return_lse, mask, bias)
    return (out, lse) if return_lse else out


def attention_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    causal: Causal = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    layout: str = "bshd",
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values; appends new ones to it in place. Inference only.

    Shapes for layout "bshd": q (batch, seqlen_q, heads, head_dim), caches (batch_cache, capacity, heads_kv, dim), or
    with block_table (batch, pages_per_sequence) int32: pages (num_pages, page_size, heads_kv, dim).

    k, v               (batch, seqlen_new, heads_kv, dim): written behind the first cache_seqlens rows, then read too.
    cache_seqlens      (batch,) int32 or an int: rows in use before the call, left padding included; None = the whole
                       cache.
    cache_batch_idx    (batch,) int32: which row of the cache each sequence uses.
    cache_leftpad      (batch,) int32: rows at the start of the cache to be ignored.
    rotary_cos, _sin   (positions, rotary_dim / 2): rotates k at position cache_seqlens + i, and q likewise if causal or
                       a window is set, else all of q at cache_seqlens. rotary_interleaved: pairs (0, 1), (2, 3), ...
    num_splits         over how many parts the keys are split; 0 = chosen. Changes speed and rounding, never the
                       meaning.

    A refused call writes nothing. All other options as in `attention`.
    """
    if unknown:
        raise unknown_option("attention_kvcache", next(iter(unknown)), _OPTIONS["attention_kvcache"])
    if (
        (type(causal) is bool or type(causal) is str)
        and type(layout) is str
        and type(return_lse) is bool
        and (backend is None or type(backend) is str)
        and is_dense(q, k_cache, v_cache, scale)
        and (mode := ops.DENSE_MODES.get((causal, layout, backend))) is not None
        and cache_step.has_valid_options(window, scale, softcap, num_splits, rotary_interleaved)
    ):
        done = cache_step.step(
            q, k_cache, v_cache, alibi_slopes, sinks, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
            rotary_cos, rotary_sin, window, scale, softcap, num_splits, rotary_interleaved, return_lse, mode,
        )  # fmt: skip
        if done is not None:
            return (done[0], cast(Tensor, done[1])) if return_lse else done[0]
    tensors = (q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    if not is_compiling() and (found := recorders(*tensors, rotary_cos, rotary_sin, alibi_slopes, sinks)):
        return record(attention_kvcache, found, locals())
    return_lse = flag("return_lse", return_lse)
    args, append = kvcache_args(
        *(
            q,
            k_cache,
            v_cache,
            k,
            v,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            block_table,
            rotary_cos,
            rotary_sin,
        ),
        *(rotary_interleaved, num_splits, causal, window, scale, softcap, alibi_slopes, sinks, layout, backend),
    )
    if not is_compiling() and ops.is_transformed():
        raise unsupported(
            "attention_kvcache",
            "a call inside a torch.func transform or forward-mode differentiation",
            "calls outside of them",
            "Use attention there",
        )
    _check_inference(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, sinks=sinks
    )
    row_names = {} if cache_batch_idx is None else _KVCACHE_ROW_NAMES
    names = {**_KVCACHE_NAMES, **row_names}
    if append is not None:
        given, is_ordered = (*args, *append), kvcache.queries_have_own_positions(args)
        if not is_compiling() and all(has_memory(value) for value in given if isinstance(value, Tensor)):
            # Whatever is wrong with the call shows before anything is written
            call_as(names, _check_ahead, args, append)
            args, append = kvcache.without_aliases(args, append)
            rotated, seqused = call_as(row_names, ops.append_step, *append, args.q, is_ordered)
        else:
            call_as(row_names, ops.append_kv, *append)
            rotated = kvcache.rotated_queries(append, args.q, is_ordered)
            seqused = append.cache_seqlens + append.k.shape[row_axis(layout)]
        if not is_compiling():
            ops.increment_version((append.k_cache, append.v_cache))
        args = args._replace(q=args.q if rotated is None else rotated, seqused_k=seqused)
    out, lse = call_as(names, ops.attend, args, return_lse)
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, *, arch: str | None = None, **options: Any) -> Explanation:
    """Says which backend would run this call and how, and why each other one would not.

    Takes the options of `attention`; those of `attention_varlen` when cu_seqlens_q is among them; those of
    `attention_kvcache`, k and v being the caches, when cache_seqlens or another option of the cache is. Nothing is
    computed or drawn, and nothing warns.

    arch, as "sm_80" or "A100", asks about a GPU that need not be here, with a compiler and Triton at hand, whatever
    device the tensors are on; "cpu" asks about this CPU. Meta tensors are taken for tensors on this GPU, or where there
    is none on this CPU.
    """
    problem, name = _look_ahead(q, k, v, options)
    return registry.explain(_on_arch(problem, arch), name)


def prewarm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Does now what the first such call would wait for, such as compiling its kernels, and says what will run. Takes
    what `explain` takes, meta tensors too, but not `arch`."""
    if "arch" in options:
        raise type_error("arch", quoted(options["arch"]), "kernels for the GPU of this machine", _COMPILE_HINT)
    problem, name = _look_ahead(q, k, v, options)
    problem = _on_arch(problem, None)
    passes = ("forward", "backward") if problem.needs_grad else ("forward",)
    for backend in dict.fromkeys(registry.select(problem, name, op) for op in passes):
        backend.prepare(problem)
    return registry.explain(problem, name)


def _on_arch(problem: Problem, arch: str | None) -> Problem:
    """The problem on the device that `explain` is asked about."""
    if arch is None and problem.device == "meta":
        return replace(problem, device="cuda" if torch.cuda.is_available() else "cpu")
    if arch is None or arch == "cpu":
        return problem if arch is None else replace(problem, device="cpu")
    if not isinstance(arch, str) or (found := arch_named(arch)) is None:
        raise value_error("arch", repr(arch), f"cpu, {known_names()}")
    gpu = gpu_named(arch)
    name = "" if gpu is None else gpu.name
    return replace(problem, device="cuda", device_index=0, arch=f"sm_{found.number}", gpu=name)


def _look_ahead(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Problem, str | None]:
    """The Problem of the function that these options belong to."""
    function: Callable[..., Any] = attention
    if "cu_seqlens_q" in options:
        function = attention_varlen
    elif options.keys() & (_options_of(attention_kvcache).keys() - _options_of(attention).keys()):
        function = attention_kvcache
    filled = _options_of(function)
    for name in options:
        if name not in filled:
            raise unknown_option(function.__name__, name, filled)
    filled.update(options)
    flag("return_lse", filled.pop("return_lse"))
    if function is attention_kvcache:
        args, _ = kvcache_args(q, k, v, **filled)
        return Problem.of(args), args.backend
    q, k, v, filled["bias"] = autocast(q, k, v, filled["bias"])
    if filled["rng_state"] is None:
        filled["rng_state"] = q.new_empty(2, dtype=torch.int64)  # or dropout would draw one
    args = attention_args(q, k, v, **filled) if function is attention else varlen_args(q, k, v, **filled)
    needs_grad = ops.requires_grad(args)
    needs_bias_grad = needs_grad and args.bias is not None and args.bias.requires_grad
    args = args._replace(needs_grad=needs_grad, needs_bias_grad=needs_bias_grad)
    try:
        return Problem.of(args), args.backend
    except ValueError as error:
        raise with_given_shapes(error, mask=options.get("mask"), bias=options.get("bias")) from None


def _options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments after q, k and v with their defaults; None where there is none."""
    parameters = list(inspect.signature(function).parameters.values())[3:-1]
    return {p.name: None if p.default is inspect.Parameter.empty else p.default for p in parameters}


# By name, since torch.compile cannot trace inspect
_OPTIONS = {function.__name__: _options_of(function) for function in (attention, attention_varlen, attention_kvcache)}


def record(function: Callable[..., Any], found: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The call as torch's function protocol hands it to those arguments: torch.fx makes it a node of its graph."""
    args, options = [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            args.append(given[parameter.name])
        elif parameter.kind is not parameter.VAR_KEYWORD and given[parameter.name] is not parameter.default:
            options[parameter.name] = given[parameter.name]
    return handle_torch_function(function, found, *args, **options)


def _attend(args: AttentionArgs, return_lse: bool, mask: Tensor | None, bias: Tensor | None) -> Any:
    if is_compiling():
        return ops.attend(args, return_lse)
    try:
        return transforms.attend(args) if transforms.is_served() else ops.attend(args, return_lse)
    except ValueError as error:
        raise with_given_shapes(error, mask=mask, bias=bias) from None


def _check_inference(**tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise unsupported(
                name,
                "a tensor that requires grad",
                "inference only",
                "Call it under torch.no_grad(), or train with attention or attention_varlen",
            )


def _check_ahead(args: AttentionArgs, append: AppendArgs) -> None:
    """Raises what the append and the read after it would refuse."""
    kvcache.check_writable(append)
    signature = _signature(args)
    if signature not in _served:
        registry.select(Problem.of(args), args.backend)
        if len(_served) >= _MOST_SIGNATURES:
            _served.clear()
        _served.add(signature)
    if args.q.device.type == "cpu" or is_checking():
        check_values(args)
        rows = args.q.shape[row_axis(append.layout)]
        # Without positions of their own all queries have the first one
        num_positions = rows if kvcache.queries_have_own_positions(args) else min(rows, 1)
        kvcache.check_positions(append.cache_seqlens, num_positions, append.rotary_cos)


def _signature(args: AttentionArgs) -> tuple[Any, ...]:
    """Everything that decides whether a backend takes the call."""
    values: tuple[Any, ...] = args
    tensors = (
        None if t is None else (t.dtype, t.shape, t.stride(), t.device, t.data_ptr() % 16) for t in values[:NUM_TENSORS]
    )
    return (*tensors, *values[NUM_TENSORS:], ops.is_deterministic(), registry.is_strict())


def call_as(names: dict[str, str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function and words its refusals with the caller's argument names."""
    if is_compiling() or not names:
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError, Unsupported) as error:
        raise renamed(error, names) from None
