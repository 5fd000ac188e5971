"""The public functions: names, defaults and argument types; everything about sizes is checked inside the op.

No size becomes a plain value here and no tensor is read, so all of it traces with symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile import ops
from flashtile.backends import kvcache, registry
from flashtile.backends.registry import Explanation
from flashtile.errors import Unsupported, renamed, type_error, unsupported, value_error
from flashtile.problem import LAYOUTS, AttentionArgs, Problem, check_values, validate

Window = Sequence[int] | None
Causal = bool | str


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
    q, k, v, bias = _autocast(q, k, v, bias)
    args = _args(
        q, k, v, causal, window, scale, mask, bias, alibi_slopes, softcap, sinks, dropout_p, rng_state, deterministic, layout, backend
    )
    out, lse = ops.forward(*args)
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

    Shapes for layout "bshd": q (total_q, heads, head_dim), k and v (total_k, heads_kv, dim); for "bhsd" the first two swap.
    Sequence b owns query rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and key rows likewise (int32, from 0 to the total).

    max_seqlen_q, max_seqlen_k  upper bounds of the lengths; None = derived without reading a tensor.
    seqused_k                   (batch,) int32: only so many keys of each sequence count.
    block_table                 (batch, pages) int32: k and v are pages (num_pages, page_size, heads_kv, dim), and
                                cu_seqlens_k gives lengths only; it may be None when seqused_k is given.
    mask, bias                  broadcastable to (batch, heads, max_seqlen_q, max_seqlen_k), indexed within each sequence.

    All other options as in `attention`. lse is (heads, total_q).
    """
    q, k, v, bias = _autocast(q, k, v, bias)
    args = _args(
        q, k, v, causal, window, scale, mask, bias, alibi_slopes, softcap, sinks, dropout_p, rng_state, deterministic, layout, backend
    )
    args = _with_lengths(args, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table)
    out, lse = ops.forward(*args)
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

    Shapes for layout "bshd": q (batch, seqlen_q, heads, head_dim), caches (batch_cache, capacity, heads_kv, dim), or with
    block_table (batch, pages_per_sequence) int32: pages (num_pages, page_size, heads_kv, dim).

    k, v               (batch, seqlen_new, heads_kv, dim): written behind the first cache_seqlens rows, then attended to.
    cache_seqlens      (batch,) int32 or an int: rows in use before the call, left padding included; None = the whole cache.
    cache_batch_idx    (batch,) int32: which row of the cache each sequence uses.
    cache_leftpad      (batch,) int32: rows at the start of the cache to be ignored.
    rotary_cos, _sin   (positions, rotary_dim / 2): rotates k at position cache_seqlens + i, and q likewise if causal or a window
                       is set, else all of q at cache_seqlens. rotary_interleaved: pairs (0, 1), (2, 3), ...
    num_splits         over how many parts the keys are split; 0 = chosen. Changes speed and rounding, never the meaning.
    """
    _require_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    _check_inference(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sinks=sinks)
    dtype = _autocast_dtype(q)
    if dtype is not None:
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    lengths, pages = _kvcache_rows(q, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary_cos, rotary_sin, layout)
    args = _args(q, k_cache, v_cache, causal, window, scale, None, None, alibi_slopes, softcap, sinks, 0.0, None, None, layout, backend)
    args = args._replace(seqused_k=lengths, leftpad_k=cache_leftpad, block_table=pages, num_splits=num_splits)
    names = {} if cache_batch_idx is None else _KVCACHE_ROW_NAMES
    if k is not None and v is not None and lengths is not None:
        # Whatever is wrong with the call shows before anything is written
        _call_as({**_KVCACHE_NAMES, **names}, _check_ahead, args)
        append = (k_cache, v_cache, k, v, lengths, pages, rotary_cos, rotary_sin, rotary_interleaved, layout)
        _call_as(names, ops.append_kv, *append)
        args = args._replace(seqused_k=lengths + k.shape[1 if layout == "bshd" else 2])
        if rotary_cos is not None and rotary_sin is not None:
            args = args._replace(q=_rotate_queries(q, rotary_cos, rotary_sin, lengths, rotary_interleaved, causal, window, layout))
    out, lse = _call_as({**_KVCACHE_NAMES, **names}, ops.forward, *args)
    return (out, lse) if return_lse else out


# The conventions people already know


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, argument by argument: (..., heads, rows, dim), causal from the top left."""
    _require_tensors(query=query, key=key, value=value)
    if is_causal and attn_mask is not None:
        raise value_error("attn_mask", "it with is_causal=True", "one of the two", "Fold the causal mask into attn_mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise value_error(name, tensor, "at least 2 dimensions (..., rows, dim)")
    rank = max(query.dim(), key.dim(), value.dim())
    if rank >= 3 and not enable_gqa:
        heads = {tensor.shape[-3] for tensor in (query, key, value) if tensor.dim() >= 3}
        if len(heads - {1}) > 1:
            raise value_error("key", f"head counts {sorted(heads)}", "equal ones", "Pass enable_gqa=True to share key heads")
    if rank == query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
        return _call_as(_SDPA_NAMES, _sdpa_4d, query, key, value, attn_mask, dropout_p, is_causal, scale)
    # Any other rank: fold the leading dimensions into the batch, broadcasting them as SDPA does
    lead = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))
    q, k, v = (_fold(tensor, lead) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dim() > 3:
        attn_mask = _fold(attn_mask, lead)
    if q.shape[1] == 1 and k.shape[1] > 1:
        q = q.expand(-1, k.shape[1], -1, -1)
    out = _call_as(_SDPA_NAMES, _sdpa_4d, q, k, v, attn_mask, dropout_p, is_causal, scale)
    return out.reshape(*lead, *out.shape[1:])[(0,) * (3 - rank)] if rank < 3 else out.reshape(*lead, *out.shape[1:])


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn.flash_attn_func`, argument by argument: (batch, rows, heads, dim), causal from the bottom right.

    return_attn_probs gives (out, lse, probabilities) with an empty third tensor: probabilities are never stored.
    """
    out, lse = _call_as(
        _FLASH_NAMES,
        attention,
        *(q, k, v),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic or None,
        return_lse=True,
        layout="bshd",
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn.flash_attn_varlen_func`, argument by argument: (total, heads, dim) and cumulative lengths."""
    out, lse = _call_as(
        _FLASH_NAMES,
        attention_varlen,
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        block_table=block_table,
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic or None,
        return_lse=True,
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn.flash_attn_with_kvcache`, argument by argument. Like it, the result carries no gradient."""
    with torch.no_grad():
        return _call_as(
            _FLASH_NAMES,
            attention_kvcache,
            *(q, k_cache, v_cache),
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes,
            num_splits=num_splits,
            return_lse=return_softmax_lse,
        )


# Looking ahead


def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Which backend would run this call and how, and why each other one would not.

    Takes the options of `attention`, and those of `attention_varlen` when cu_seqlens_q is among them. Tensors may be on the
    meta device only if a backend runs there; nothing is computed.
    """
    problem, name = _look_ahead(q, k, v, options)
    return registry.explain(problem, name)


def prewarm(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Explanation:
    """Does now what the first such call would wait for, such as compiling its kernels, and says what will run."""
    problem, name = _look_ahead(q, k, v, options)
    registry.select(problem, name).prepare(problem)
    return registry.explain(problem, name)


def _look_ahead(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Problem, str | None]:
    given = dict(options)
    given.pop("return_lse", None)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "block_table")
    lengths = {name: given.pop(name) for name in names if name in given}
    known = ("causal", "window", "scale", "mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p", "rng_state", "deterministic")
    accepted = (*known, "layout", "backend")
    for name in given:
        if name not in accepted:
            raise type_error(name, "an unknown option", ", ".join((*accepted, "return_lse", *names)))
    defaults = {"causal": False, "softcap": 0.0, "dropout_p": 0.0, "layout": "bshd" if lengths else "bhsd"}
    q, k, v, given["bias"] = _autocast(q, k, v, given.get("bias"))
    filled: dict[str, Any] = {name: given.get(name, defaults.get(name)) for name in accepted}
    args = _args(q, k, v, **filled)
    if lengths:
        args = _with_lengths(args, **{name: lengths.get(name) for name in names})
    tensors = (args.q, args.k, args.v, args.bias, args.sinks)
    needs_grad = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    has_bias_grad = needs_grad and args.bias is not None and args.bias.requires_grad
    return Problem.of(args, needs_grad=needs_grad, has_bias_grad=has_bias_grad), args.backend


# From public arguments to the op's


def _args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    window: Window,
    scale: float | None,
    mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float,
    sinks: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
    deterministic: bool | None,
    layout: str,
    backend: str | None,
) -> AttentionArgs:
    _require_tensors(q=q, k=k, v=v)
    _require_optional_tensors(mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, rng_state=rng_state)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise unsupported("alibi_slopes", "a tensor that requires grad", "constants", "Pass the term as bias to differentiate it")
    if backend is not None:
        if not isinstance(backend, str):
            raise type_error("backend", backend, "None or a name")
        registry.find(backend)
    _require_number("softcap", softcap)
    _require_number("dropout_p", dropout_p)
    if scale is not None:
        _require_number("scale", scale)
    if rng_state is None and dropout_p > 0.0:
        rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    left, right = _window(window)
    return AttentionArgs(
        *(q, k, v, _to_4d(bias), _to_4d(mask), alibi_slopes, sinks, rng_state),
        scale=scale,
        causal=_causal(causal),
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        layout=layout,
        backend=backend,
    )


def _with_lengths(
    args: AttentionArgs,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> AttentionArgs:
    _require_tensors(cu_seqlens_q=cu_seqlens_q)
    _require_optional_tensors(cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=block_table)
    return args._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_length_bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_length_bound("max_seqlen_k", max_seqlen_k),
        seqused_k=seqused_k,
        block_table=block_table,
    )


def _length_bound(name: str, bound: Any) -> Any:
    """An int is used; a tensor is not read (that would wait for the GPU), so the bound comes from the shapes instead."""
    if bound is None or isinstance(bound, Tensor):
        return None
    if isinstance(bound, bool) or not isinstance(bound, int | torch.SymInt):
        raise type_error(name, bound, "an int, a tensor or None")
    return bound


def _kvcache_rows(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    layout: str,
) -> tuple[Tensor | None, Tensor | None]:
    """The rows in use as a tensor, and the block table: rows chosen by cache_batch_idx are pages of one row each."""
    _require_optional_tensors(k=k, v=v, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table)
    _require_optional_tensors(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if layout not in LAYOUTS:
        raise value_error("layout", repr(layout), " or ".join(repr(name) for name in LAYOUTS))
    if (k is None) != (v is None):
        raise value_error("k" if k is None else "v", "None", "k and v together, or neither")
    if q.dim() != 4:
        raise value_error("q", q, "4 dimensions")
    if k is not None and cache_seqlens is None:
        raise value_error("cache_seqlens", "None", "the rows in use, wherever k and v are appended")
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise value_error("rotary_cos", "it without k and v", "rotary embedding together with keys to append")
    if cache_batch_idx is not None:
        if block_table is not None:
            raise value_error("cache_batch_idx", "it with block_table", "one of the two")
        if cache_batch_idx.dtype != torch.int32:
            raise type_error("cache_batch_idx", cache_batch_idx.dtype, "int32", "Call cache_batch_idx.to(torch.int32)")
        if cache_batch_idx.dim() != 1 or cache_batch_idx.shape[0] != q.shape[0]:
            raise value_error("cache_batch_idx", cache_batch_idx, f"shape ({q.shape[0]},), one row of the cache for each sequence")
        block_table = cache_batch_idx[:, None]
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens, block_table
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int | torch.SymInt):
        raise type_error("cache_seqlens", cache_seqlens, "an int32 tensor, an int or None")
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device), block_table


def _check_ahead(args: AttentionArgs) -> None:
    validate(args)
    if args.q.device.type == "cpu" and not torch.compiler.is_compiling():
        check_values(args)


def _rotate_queries(
    q: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, interleaved: bool, causal: Causal, window: Window, layout: str
) -> Tensor:
    """Queries stand behind the cache, one position after the other; where order does not matter they all stand at its end."""
    rows = q.shape[1 if layout == "bshd" else 2]
    is_ordered = _causal(causal) != "none" or _window(window) != (-1, -1)
    steps = torch.arange(rows, device=q.device) if is_ordered else torch.zeros(rows, dtype=torch.int64, device=q.device)
    positions = lengths.long()[:, None] + steps
    if layout == "bshd":
        return kvcache.rotate(q, cos, sin, positions, interleaved)
    return kvcache.rotate(q.transpose(1, 2), cos, sin, positions, interleaved).transpose(1, 2)


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


def _sdpa_4d(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor | tuple[Tensor, Tensor]:
    _require_optional_tensors(mask=attn_mask)
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    return attention(
        *(q, k, v),
        causal="top_left" if is_causal else False,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool else attn_mask,
        dropout_p=dropout_p,
        scale=scale,
    )


def _fold(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """(..., heads, rows, dim) with any number of leading dimensions as four dimensions."""
    while tensor.dim() < 3:
        tensor = tensor[None]
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])


def _autocast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Under autocast q, k, v and bias are cast as scaled_dot_product_attention casts them."""
    _require_tensors(q=q, k=k, v=v)
    dtype = _autocast_dtype(q)
    if dtype is None:
        return q, k, v, bias
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), _cast(bias, dtype)


def _autocast_dtype(q: Tensor) -> torch.dtype | None:
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _causal(causal: Causal) -> str:
    if causal is True:
        return "bottom_right"
    if causal is False:
        return "none"
    if causal not in ("top_left", "bottom_right"):
        raise value_error("causal", repr(causal), "False, True, 'top_left' or 'bottom_right'")
    return causal


def _window(window: Window) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise type_error("window", window, "None or a pair (left, right) of integers")
    for value in window:
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            raise type_error("window", window, "None or a pair (left, right) of integers")
    return window[0], window[1]


def _to_4d(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dim() >= 4:
        return tensor
    return tensor[(None,) * (4 - tensor.dim())]


def _require_tensors(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise type_error(name, value, "a torch.Tensor")


def _require_optional_tensors(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise type_error(name, value, "a torch.Tensor or None")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int | torch.SymFloat | torch.SymInt):
        raise type_error(name, value, "a number")


# Facades report errors in their own words

_SDPA_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attn_mask", "bias": "attn_mask", "causal": "is_causal"}
_FLASH_NAMES = {"scale": "softmax_scale", "window": "window_size"}
_KVCACHE_NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
_KVCACHE_ROW_NAMES = {"block_table": "cache_batch_idx"}


def _call_as(names: dict[str, str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function and words its refusals with the caller's argument names."""
    if torch.compiler.is_compiling() or not names:
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (ValueError, TypeError, Unsupported) as error:
        raise renamed(error, names) from None
