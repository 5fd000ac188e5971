"""The public functions. They take arguments apart (arguments.py), call the ops, and say what would happen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashtile import ops
from flashtile.arguments import Causal, Window, attention_args, autocast, kvcache_args, varlen_args
from flashtile.backends import kvcache, registry
from flashtile.backends.kvcache import AppendArgs
from flashtile.backends.registry import Explanation
from flashtile.errors import Unsupported, renamed, type_error, unsupported
from flashtile.problem import AttentionArgs, Problem, check_values, is_checking, row_axis

_KVCACHE_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
_KVCACHE_ROW_NAMES = {"block_table": "cache_batch_idx"}


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of q over k and v.

    Shapes for layout "bhsd": q (batch, heads, seqlen_q, head_dim), k (batch, heads_kv, seqlen_k, head_dim), v (batch,
    heads_kv, seqlen_k, head_dim_v), heads a multiple of heads_kv. Strides are free but for a contiguous last dimension.

    causal         True or "bottom_right": the last query sees all keys. "top_left": query i sees keys 0 to i.
    window         (left, right): a query sees that many keys on either side of its own; -1 = unbounded.
    scale          factor of the scores; None = 1 / sqrt(head_dim).
    mask           bool, True = attend, broadcastable to (batch, heads, seqlen_q, seqlen_k).
    bias           added to the scores, broadcastable likewise, differentiable; -inf masks.
    alibi_slopes   (heads,) or (batch, heads): slope * distance is subtracted.
    softcap        c > 0: scores become c * tanh(scores / c) before anything is added.
    sinks          (heads,): a logit per head that joins the denominator only; differentiable.
    dropout_p      probability to drop an element of the softmax; rng_state = int64 (seed, offset), None = drawn.
    deterministic  None follows torch.use_deterministic_algorithms.
    return_lse     also return the log-sum-exp of each row: (batch, heads, seqlen_q), float32, differentiable.
    backend        a name forces that backend; None takes the best.

    Returns out in q's layout, or (out, lse). docs/semantics.md has the formulas.
    """
    # Most calls: tensors, and options that the dense overloads take
    if (
        window is None
        and mask is None
        and bias is None
        and alibi_slopes is None
        and sinks is None
        and rng_state is None
        and deterministic is None
        and not return_lse
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
        try:
            if bits & ops.NEEDS_GRAD:
                return ops.dense_function(mode | bits, scale)(q, k, v)
            return ops.dense_forward(q, k, v, scale, mode | bits)[0]
        except RuntimeError as error:
            ops.reraise(error)
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
    out, lse = ops.attend(args, return_lse)
    return (out, lse) if return_lse else out


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
    out, lse = ops.attend(args, return_lse)
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries over a cache of keys and values; appends new ones to it in place. Inference only.

    Shapes for layout "bshd": q (batch, seqlen_q, heads, head_dim), caches (batch_cache, capacity, heads_kv, dim), or
    with block_table (batch, pages_per_sequence) int32: pages (num_pages, page_size, heads_kv, dim).

    k, v               (batch, seqlen_new, heads_kv, dim): written behind the first cache_seqlens rows, then attended
    to. cache_seqlens      (batch,) int32 or an int: rows in use before the call, left padding included; None = the
    whole     cache. cache_batch_idx    (batch,) int32: which row of the cache each sequence uses.
    cache_leftpad      (batch,) int32: rows at the start of the cache to be ignored.
    rotary_cos, _sin   (positions, rotary_dim / 2): rotates k at position cache_seqlens + i, and q likewise if causal or
    a window
                       is set, else all of q at cache_seqlens. rotary_interleaved: pairs (0, 1), (2, 3), ...
    num_splits         over how many parts the keys are split; 0 = chosen. Changes speed and rounding, never the
    meaning.
    """
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
    _check_inference(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, sinks=sinks
    )
    row_names = {} if cache_batch_idx is None else _KVCACHE_ROW_NAMES
    names = {**_KVCACHE_NAMES, **row_names}
    if append is not None:
        # Whatever is wrong with the call shows before anything is written
        call_as(names, _check_ahead, args, append)
        call_as(row_names, ops.append_kv, *append)
        args = args._replace(
            q=append.rotated_queries(args), seqused_k=append.cache_seqlens + append.k.shape[row_axis(layout)]
        )
    out, lse = call_as(names, ops.attend, args, return_lse)
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Which backend would run this call and how, and why each other one would not.

    Takes the options of `attention`; those of `attention_varlen` when cu_seqlens_q is among them; those of
    `attention_kvcache`, k and v being the caches, when cache_seqlens or another option of the cache is. Nothing is
    computed, and nothing warns.
    """
    problem, name = _look_ahead(q, k, v, options)
    return registry.explain(problem, name)


def prewarm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Does now what the first such call would wait for, such as compiling its kernels, and says what will run."""
    problem, name = _look_ahead(q, k, v, options)
    passes = ("forward", "backward") if problem.needs_grad else ("forward",)
    for backend in dict.fromkeys(registry.select(problem, name, op) for op in passes):
        backend.prepare(problem)
    return registry.explain(problem, name)


def _look_ahead(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Problem, str | None]:
    """The Problem of the function that these options belong to."""
    function: Callable[..., Any] = attention
    if any(name.startswith("cache_") for name in options) or "num_splits" in options:
        function = attention_kvcache
    elif "cu_seqlens_q" in options:
        function = attention_varlen
    parameters = list(inspect.signature(function).parameters.values())[3:]
    filled: dict[str, Any] = {p.name: None if p.default is inspect.Parameter.empty else p.default for p in parameters}
    for name in options:
        if name not in filled:
            raise type_error(name, "an unknown option", f"{', '.join(filled)} (those of {function.__name__})")
    filled.update(options)
    del filled["return_lse"]
    if function is attention_kvcache:
        args, _ = kvcache_args(q, k, v, **filled)
        return Problem.of(args), args.backend
    q, k, v, filled["bias"] = autocast(q, k, v, filled["bias"])
    args = attention_args(q, k, v, **filled) if function is attention else varlen_args(q, k, v, **filled)
    needs_grad = ops.requires_grad(args)
    needs_bias_grad = needs_grad and args.bias is not None and args.bias.requires_grad
    return Problem.of(args._replace(needs_grad=needs_grad, needs_bias_grad=needs_bias_grad)), args.backend


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
    """What the read after the append would refuse."""
    if is_compiling():
        return
    registry.select(Problem.of(args), args.backend)
    if args.q.device.type == "cpu" or is_checking():
        check_values(args)
        kvcache.check_positions(append.cache_seqlens, args.q.shape[row_axis(append.layout)], append.rotary_cos)


def call_as(names: dict[str, str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function and words its refusals with the caller's argument names."""
    if is_compiling() or not names:
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError, Unsupported) as error:
        raise renamed(error, names) from None
