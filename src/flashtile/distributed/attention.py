"""The public functions: attention over a sequence whose rows are spread over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flashtile import ops
from flashtile.arguments import Causal, Window, attention_args, autocast, flag, integer
from flashtile.distributed import ring, ulysses
from flashtile.distributed.cost import ContextExplanation, Link, choose, compare
from flashtile.distributed.sharding import SHARDINGS, Shards
from flashtile.distributed.transport import group_of, require_same_lengths, timeout_of
from flashtile.errors import type_error, unknown_option, unsupported, value_error
from flashtile.problem import AttentionArgs, check_layout, head_axis, row_axis, validate

STRATEGIES = ("auto", "ring", "ulysses", "both")
_FUNCTIONS = {"ring": "ring_attention", "ulysses": "ulysses_attention"}


@dataclass(frozen=True)
class Call:
    """The options of `context_attention` as a caller gave them, beside the ranks, the strategy and the timeout."""

    causal: Causal = False
    window: Window = None
    scale: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    rng_state: Tensor | None = None
    deterministic: bool | None = None
    layout: str = "bhsd"
    backend: str | None = None
    cu_seqlens: Tensor | None = None
    sharding: str = "zigzag"
    seqlen: int | None = None
    seqlen_k: int | None = None
    first_head: int = 0
    total_heads: int | None = None
    return_lse: bool = False
    transport: str = "auto"


@dataclass(frozen=True)
class Options:
    """The options of a call, checked, with the sizes and heads of all ranks."""

    args: AttentionArgs
    cu_seqlens: Tensor | None
    sharding: str
    seqlen_q: int
    seqlen_k: int
    transport: str


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    strategy: str = "auto",
    sharding: str = "zigzag",
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    cu_seqlens: Tensor | None = None,
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
    first_head: int = 0,
    total_heads: int | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    transport: str = "auto",
    timeout: float | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence whose rows are spread over the ranks of a group.

    q, k and v hold this rank's rows, as `shard` cuts them; so does the result. Every rank makes the same call.

    mesh, group    a DeviceMesh, or a process group; all ranks where neither is given.
    strategy       "ring", "ulysses", "auto" for whichever the cost model finds faster (`explain_context`), or "both" on
                   a 2-D mesh (ring, heads): heads are exchanged along its second dimension, keys travel along the
                   first. A 2-D mesh is always used as "both".
    sharding       "zigzag", which balances causal masks, or "contiguous".
    seqlen         rows of the whole sequence; None = this rank's times the ranks. seqlen_k: of the keys, if different.
    cu_seqlens     (documents + 1,) int32: bounds of the documents of the whole packed sequence, best on the CPU, since
                   the host reads it. q, k and v are packed then, as in `attention_varlen`.
    mask, bias     (batch or 1, heads or 1, this rank's rows or 1, all keys or 1).
    sinks, bias    their gradients are this rank's share, as those of every replicated parameter.
    rng_state      dropout indices are global: with one rng_state the result does not depend on the number of ranks.
    first_head     of a tensor-parallel shard of the heads, for dropout; total_heads: of all shards.
    transport      of a ring: "p2p" computes while messages are under way, "gather" waits for all; "auto" decides by
                   size.
    timeout        seconds until a missing peer is an error (PeerError); None = the group's.

    All other options as in `attention`.
    """
    if unknown:
        raise unknown_option("context_attention", next(iter(unknown)), _OPTIONS)
    _check_strategy(strategy)
    if not is_compiling() and ops.is_forward_mode():
        raise unsupported("q", "a call inside forward-mode differentiation", "reverse mode: backward")
    shape = mesh_shape(mesh, group)
    call = Call(
        causal=causal,
        window=window,
        scale=scale,
        mask=mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        rng_state=rng_state,
        deterministic=deterministic,
        layout=layout,
        backend=backend,
        cu_seqlens=cu_seqlens,
        sharding=sharding,
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        first_head=first_head,
        total_heads=total_heads,
        return_lse=return_lse,
        transport=transport,
    )
    given = _options(q, k, v, shape[0] * shape[1], call)
    if seqlen is None and not is_compiling():
        for dim in range(max(1, len(_mesh_dims(mesh)))):
            lengths, what = (given.seqlen_q, given.seqlen_k), _FUNCTIONS.get(strategy, "context_attention")
            require_same_lengths(group_of(mesh, group, dim), lengths, q.device, timeout, what)
    if len(_mesh_dims(mesh)) == 2:
        if strategy not in ("auto", "both"):
            raise value_error(
                "strategy", repr(strategy), "'auto' or 'both' on a 2-D mesh", "Pass one of its dimensions"
            )
        out, lse = _both(given, mesh, shape, timeout, return_lse)
    else:
        own = group_of(mesh, group)
        if strategy == "both":
            raise value_error("strategy", "'both'", "a 2-D mesh (ring, heads)")
        if strategy == "auto":
            strategy = choose(given, shape[0])
        if strategy == "ring":
            out, lse = _ring(given, own, 1, timeout)
        else:
            out, lse = _ulysses(given, own, 0, shape[0], timeout, return_lse)
    return (out, lse) if return_lse else out


def _check_strategy(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise value_error("strategy", repr(strategy), ", ".join(map(repr, STRATEGIES)))


_OPTIONS = tuple(inspect.signature(context_attention).parameters)[3:-1]
_RING_OPTIONS = tuple(name for name in _OPTIONS if name != "strategy")
_ULYSSES_OPTIONS = tuple(name for name in _RING_OPTIONS if name not in ("mask", "bias", "transport"))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`context_attention` with strategy="ring": queries stay, keys and values travel. The other options as there; a
    mesh has one dimension."""
    _check_names("ring_attention", options, _RING_OPTIONS)
    return context_attention(q, k, v, strategy="ring", **options)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`context_attention` with strategy="ulysses": rows are exchanged for heads, so that each rank has all rows of some
    heads. The query heads must be a multiple of the ranks, and the key heads a multiple or a divisor of them. The other
    options as there, without mask, bias and transport; a mesh has one dimension."""
    _check_names("ulysses_attention", options, _ULYSSES_OPTIONS)
    return context_attention(q, k, v, strategy="ulysses", **options)


def _check_names(function: str, options: dict[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise unknown_option(function, name, known)


def _show_options(function: Any, names: Sequence[str]) -> None:
    """`help` shows the options with their defaults, as if they were written out."""
    whole = inspect.signature(context_attention)
    parameters = [one for name, one in whole.parameters.items() if name in ("q", "k", "v", *names)]
    function.__signature__ = whole.replace(parameters=parameters)


_show_options(ring_attention, _RING_OPTIONS)
_show_options(ulysses_attention, _ULYSSES_OPTIONS)


def explain_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Any = None,
    group: Any = None,
    num_ranks: int | tuple[int, int] | None = None,
    link: str | Link | None = None,
    **options: Any,
) -> ContextExplanation:
    """Explains what `context_attention` would choose and what each strategy would cost; print it. Nothing is computed
    or sent.

    q, k and v hold one rank's rows and may be meta tensors. num_ranks, or (ring, heads), asks without a process group;
    link names another speed: "nvlink", "infiniband", "ethernet", "loopback", or a `Link`.
    """
    if num_ranks is None:
        shape, is_mesh = mesh_shape(mesh, group), len(_mesh_dims(mesh)) == 2
    else:
        shape, is_mesh = _pair(num_ranks), isinstance(num_ranks, tuple)
    _check_names("explain_context", options, _OPTIONS)
    strategy = options.get("strategy", "auto")
    _check_strategy(strategy)
    call = Call(**{name: value for name, value in options.items() if name not in ("strategy", "timeout")})
    given = _options(q, k, v, shape[0] * shape[1], call)
    return compare(given, shape, link, "both" if is_mesh else strategy)


def _pair(num_ranks: Any) -> tuple[int, int]:
    pair = num_ranks if isinstance(num_ranks, tuple) else (num_ranks, 1)
    if len(pair) != 2 or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in pair):
        raise value_error("num_ranks", repr(num_ranks), "a number of ranks, or a pair (ring, heads) of them")
    return pair


# From arguments to operators


def _mesh_dims(mesh: Any) -> tuple[int, ...]:
    if mesh is None:
        return ()
    if not isinstance(mesh, DeviceMesh):
        raise type_error("mesh", mesh, "a DeviceMesh", "Pass a process group as group")
    return mesh.shape


def mesh_shape(mesh: Any, group: Any) -> tuple[int, int]:
    """(ring, heads) sizes; (size, 1) for a group or a 1-D mesh."""
    dims = _mesh_dims(mesh)
    if len(dims) > 2:
        raise value_error("mesh", f"{len(dims)} dimensions", "1 or 2: mesh['cp'], or mesh['ring', 'heads']")
    own = group_of(mesh, group)
    return (dims[0], dims[1]) if len(dims) == 2 else (dist.get_world_size(own), 1)


def _options(q: Tensor, k: Tensor, v: Tensor, num_ranks: int, call: Call) -> Options:
    """Returns what the caller wrote, checked as far as one rank can."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, DTensor):
            raise unsupported(name, "a DTensor", "this rank's rows as a tensor", f"Pass {name}.to_local()")
    q, k, v, bias = autocast(q, k, v, call.bias)
    args = attention_args(
        *(q, k, v, call.causal, call.window, call.scale, call.mask, bias, call.alibi_slopes, call.softcap, call.sinks),
        *(call.dropout_p, call.rng_state, call.deterministic, call.layout, call.backend),
        is_packed=call.cu_seqlens is not None,
    )
    args = args._replace(
        first_head=integer("first_head", call.first_head, "an integer >= 0"),
        total_heads=0 if call.total_heads is None else integer("total_heads", call.total_heads, "an integer or None"),
    )
    check_layout(call.layout)
    if call.sharding not in SHARDINGS:
        raise value_error("sharding", repr(call.sharding), " or ".join(map(repr, SHARDINGS)))
    if call.transport not in ring.TRANSPORTS:
        raise value_error("transport", repr(call.transport), ", ".join(map(repr, ring.TRANSPORTS)))
    flag("return_lse", call.return_lse)
    rank = 4 if call.cu_seqlens is None else 3
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != rank:
            raise value_error(name, tensor, f"{rank} dimensions" + ("" if rank == 4 else ", since cu_seqlens is given"))
    row = row_axis(call.layout)
    total_q = _length("seqlen", call.seqlen, q.shape[row] * num_ranks)
    is_same = call.seqlen_k is None and call.seqlen is not None and k.shape[row] == q.shape[row]
    options = Options(
        args=args,
        cu_seqlens=call.cu_seqlens,
        sharding=call.sharding,
        seqlen_q=total_q,
        seqlen_k=_length("seqlen_k", call.seqlen_k, total_q if is_same else k.shape[row] * num_ranks),
        transport=call.transport,
    )
    _check(options)
    return options


def _length(name: str, given: int | None, derived: int) -> int:
    if given is None:
        return derived
    accepted = "the number of rows of the whole sequence, or None"
    length: int = integer(name, given, accepted)
    if length < 0:
        raise value_error(name, length, accepted)
    return length


def _check(given: Options) -> None:
    """Everything that one rank can see, before anything is sent: a rank that fails later leaves messages behind."""
    args = given.args
    if given.cu_seqlens is not None:
        if not isinstance(given.cu_seqlens, Tensor) or given.cu_seqlens.dtype != torch.int32:
            raise type_error("cu_seqlens", given.cu_seqlens, "an int32 tensor")
        if given.cu_seqlens.dim() != 1:
            raise value_error("cu_seqlens", given.cu_seqlens, "shape (documents + 1,)")
        if given.seqlen_q != given.seqlen_k:
            raise value_error("cu_seqlens", "different numbers of queries and keys", "documents of self-attention")
        if not is_compiling():
            ring.bounds_of(given.cu_seqlens, given.seqlen_q)
        if args.bias is not None or args.mask is not None:
            raise unsupported("bias" if args.bias is not None else "mask", "it with cu_seqlens", "one of the two")
        if args.alibi_slopes is not None and args.alibi_slopes.dim() == 2:
            raise unsupported("alibi_slopes", "slopes for each document", "shape (heads,)")
    if args.alibi_slopes is not None and given.seqlen_q != given.seqlen_k:
        raise unsupported(
            "alibi_slopes", f"{given.seqlen_q} queries and {given.seqlen_k} keys", "as many queries as keys"
        )
    rows, heads, batch = args.q.shape[row_axis(args.layout)], args.q.shape[head_axis(args.layout)], args.q.shape[0]
    for name, tensor in (("bias", args.bias), ("mask", args.mask)):
        if tensor is None:
            continue
        full = (batch, heads, rows, given.seqlen_k)
        if any(size not in (1, whole) for size, whole in zip(tensor.shape, full, strict=True)):
            raise value_error(name, tensor, f"(batch, heads, this rank's rows, all keys) = {full}, each of them or 1")
    validate(_as_local_call(given))
    if args.total_heads and args.first_head + heads > args.total_heads:
        got = f"{args.total_heads} with first_head {args.first_head} and {heads} heads"
        raise value_error("total_heads", got, "at least first_head + heads")


def _as_local_call(given: Options) -> AttentionArgs:
    """A call of one rank with the tensors of this rank: documents as one sequence, bias and mask of one key."""
    args = given.args
    tensors = {name: getattr(args, name) for name in ("q", "k", "v")}
    if given.cu_seqlens is not None:
        tensors = {name: tensor[None] for name, tensor in tensors.items()}
    scores = {name: tensor[..., :1] for name in ("bias", "mask") if (tensor := getattr(args, name)) is not None}
    return args._replace(**tensors, **scores)


# Arguments of an operator that are those of the call
_OF_RING = tuple(name for name in ring.RingArgs._fields if name in AttentionArgs._fields)
_OF_EXCHANGE = tuple(name for name in ulysses.Exchange._fields if name in AttentionArgs._fields and name != "layout")


def _ring(given: Options, group: Any, merged: int, timeout: float | None) -> tuple[Tensor, Tensor]:
    values = ring.RingArgs(
        **{name: getattr(given.args, name) for name in _OF_RING},
        cu_seqlens=given.cu_seqlens,
        group=group.group_name,
        sharding=given.sharding,
        seqlen_q=given.seqlen_q,
        seqlen_k=given.seqlen_k,
        merged=merged,
        transport=given.transport,
        timeout=timeout_of(timeout),
    )
    result: tuple[Tensor, Tensor] = ring.forward_op(*values)
    return result


def _exchanged(
    given: Options, group: Any, first: int, num_shards: int, limit: float, wants_lse: bool
) -> tuple[Options, Any]:
    """The call on all rows of this rank's heads, and what brings a result back; lse only where it is wanted."""
    args = given.args
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    axis = head_axis(args.layout)
    heads, heads_kv = args.q.shape[axis], args.k.shape[axis]
    reason = ulysses.refusal(heads, heads_kv, size)
    if reason is not None:
        raise unsupported("q", reason, "heads that can be dealt out", "Use ring_attention, or a 2-D mesh")
    if args.bias is not None or args.mask is not None:
        name = "bias" if args.bias is not None else "mask"
        raise unsupported(name, "a tensor", "None where heads are exchanged", "Use ring_attention")

    def exchange(tensor: Tensor, num_heads: int, group_heads: int, seqlen: int, layout: str, op: Any) -> Tensor:
        values = ulysses.Exchange(
            heads=num_heads,
            group_heads=group_heads,
            layout=layout,
            group=group.group_name,
            sharding=given.sharding,
            seqlen=seqlen,
            first=first,
            num_shards=num_shards,
            timeout=limit,
            cu_seqlens=given.cu_seqlens,
            **{name: getattr(args, name) for name in _OF_EXCHANGE},
            function="ulysses_attention",
        )
        result: Tensor = op(tensor, *values)
        return result

    to_heads, to_rows = ulysses.rows_to_heads, ulysses.heads_to_rows
    q = exchange(args.q, heads, 1, given.seqlen_q, args.layout, to_heads)
    k, v = (
        exchange(tensor, heads_kv, heads // heads_kv, given.seqlen_k, args.layout, to_heads)
        for tensor in (args.k, args.v)
    )
    own = ulysses.head_range(heads, 1, size, rank)
    slopes = None if args.alibi_slopes is None else args.alibi_slopes[..., own.start : own.stop]
    sinks = None if args.sinks is None else args.sinks[own.start : own.stop]
    exchanged = args._replace(
        q=q,
        k=k,
        v=v,
        alibi_slopes=slopes,
        sinks=sinks,
        first_head=args.first_head + own.start,
        total_heads=args.total_heads or heads,
    )

    def back(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out = exchange(out, heads, 1, given.seqlen_q, args.layout, to_rows)
        if wants_lse:
            lse = exchange(lse[..., None], heads, 1, given.seqlen_q, "bhsd", to_rows)[..., 0]
        return out, lse

    return replace(given, args=exchanged), back


def _ulysses(
    given: Options, group: Any, first: int, num_shards: int, timeout: float | None, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    exchanged, back = _exchanged(given, group, first, num_shards, timeout_of(timeout), wants_lse)
    args = exchanged.args
    if exchanged.cu_seqlens is not None:
        cu_seqlens = exchanged.cu_seqlens.to(args.q.device)
        args = args._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    result: tuple[Tensor, Tensor] = back(*ops.attend(args))
    return result


def _both(
    given: Options, mesh: Any, shape: tuple[int, int], timeout: float | None, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    ring_group, head_group = mesh.get_group(0), mesh.get_group(1)
    first = dist.get_rank(ring_group) * shape[1]
    limit = timeout_of(timeout)
    exchanged, back = _exchanged(given, head_group, first, shape[0] * shape[1], limit, wants_lse)
    result: tuple[Tensor, Tensor] = back(*_ring(exchanged, ring_group, shape[1], timeout))
    return result


# Helpers for the rows of a rank


def _place(mesh: Any, group: Any) -> tuple[int, int]:
    """(this rank, number of ranks), counted as the sharding counts them."""
    if len(_mesh_dims(mesh)) == 2:
        outer, inner = mesh.get_local_rank(0), mesh.get_local_rank(1)
        return outer * mesh.shape[1] + inner, mesh.shape[0] * mesh.shape[1]
    own = group_of(mesh, group)
    return dist.get_rank(own), dist.get_world_size(own)


def shard(tensor: Tensor, dim: int, *, mesh: Any = None, group: Any = None, sharding: str = "zigzag") -> Tensor:
    """This rank's rows of a tensor that every rank has; dim is that of the sequence."""
    rank, size = _place(mesh, group)
    ranges = Shards(tensor.shape[dim], size, sharding).ranges(rank)
    parts = [tensor.narrow(dim, rows.start, len(rows)) for rows in ranges]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def unshard(
    tensor: Tensor,
    dim: int,
    *,
    seqlen: int | None = None,
    mesh: Any = None,
    group: Any = None,
    sharding: str = "zigzag",
    timeout: float | None = None,
) -> Tensor:
    """The whole sequence on every rank, from each rank's rows. Differentiable: a rank's gradient is the sum over the
    ranks of the gradients of its rows."""
    dims = _mesh_dims(mesh)
    rank, size = _place(mesh, group)
    total = _length("seqlen", seqlen, tensor.shape[dim] * size)
    steps = [(mesh.get_group(1), rank // dims[1] * dims[1]), (mesh.get_group(0), 0)] if len(dims) == 2 else None
    steps = steps or [(group_of(mesh, group), 0)]
    if seqlen is None and not is_compiling():
        for own, _ in steps:
            require_same_lengths(own, (total, total), tensor.device, timeout, "unshard")
    rows = tensor.movedim(dim, 0)
    for index, (own, first) in enumerate(steps):
        merged = dims[1] if len(dims) == 2 and index == 1 else 1
        rows = ulysses.gather_rows(rows, own.group_name, sharding, total, first, size, merged, timeout_of(timeout))
    return rows.movedim(0, dim)


def position_ids(
    seqlen: int,
    *,
    mesh: Any = None,
    group: Any = None,
    sharding: str = "zigzag",
    device: torch.device | str | None = None,
) -> Tensor:
    """The positions of this rank's rows in the whole sequence, int64: for rotary embeddings."""
    rank, size = _place(mesh, group)
    seqlen = _length("seqlen", seqlen, 0)
    parts = [torch.arange(rows.start, rows.stop, device=device) for rows in Shards(seqlen, size, sharding).ranges(rank)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
