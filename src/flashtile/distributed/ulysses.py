"""Ulysses: rows of all heads are exchanged for all rows of some heads, and back.

Rank p of n owns query heads p * heads / n up to (p + 1) * heads / n, and the key heads that they use. Where there are
fewer key heads than ranks, several ranks get the same key head, and its gradients are added in the order of the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.distributed.sharding import Ranges, Shards, local_rows, num_rows, put, take
from flashtile.distributed.transport import Channel, define_operator, group_size_and_rank, library, schema
from flashtile.errors import value_error
from flashtile.problem import head_axis, is_checking, row_axis


def head_range(heads: int, group: int, size: int, rank: int) -> range:
    """The heads of a tensor that a rank owns; `group` query heads share one of them."""
    per_rank = heads * group // size
    return range(rank * per_rank // group, -(-(rank + 1) * per_rank // group))


def refusal(heads: int, heads_kv: int, size: int) -> str | None:
    """Returns why so many heads cannot be dealt out, or None."""
    if heads % size:
        return f"{heads} query heads are not a multiple of {size} ranks"
    group, per_rank = heads // heads_kv, heads // size
    if per_rank % group and group % per_rank:
        return f"{heads_kv} key heads are neither a multiple nor a divisor of {size} ranks"
    return None


class Exchange(NamedTuple):
    """The arguments of both operators, behind the tensor. Those of the last lines say which call it is: under
    FLASHTILE_CHECK=1 they are compared."""

    heads: int  # of the tensor with all heads
    group_heads: int  # query heads that share one of them
    layout: str
    group: str
    sharding: str
    seqlen: int
    first: int  # of the ranks of the sharding: that of rank 0 of the group
    num_shards: int
    timeout: float
    cu_seqlens: Tensor | None  # of the whole packed sequence
    scale: float | None
    causal: str
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    first_head: int
    total_heads: int
    deterministic: bool | None
    backend: str | None
    function: str


def _check_same(channel: Channel, args: Exchange | _Gathering, x: Tensor, row: int) -> None:
    """Ranks may differ in their rows and in how long they wait."""
    if not is_checking():  # nor does the host wait for values of a tensor
        return
    options = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in args._asdict().items()
        if name not in ("function", "timeout")
    }
    sizes = [size for axis, size in enumerate(x.shape) if axis != row]
    channel.check_same(options | {"dtype": str(x.dtype), "sizes without rows": sizes})


class _Plan:
    def __init__(self, args: Exchange, x: Tensor):
        self.args = args
        self.channel = Channel(args.group, x.device, args.timeout, args.function)
        self.rank, self.size = self.channel.rank, self.channel.size
        self.row, self.head = row_axis(args.layout), head_axis(args.layout)
        _check_same(self.channel, args, x, self.row)
        shards = Shards(args.seqlen, args.num_shards, args.sharding)
        self.ranges = [shards.ranges(args.first + rank) for rank in range(self.size)]
        self.all_rows: Ranges = shards.union(range(args.first, args.first + self.size))
        self.heads = [head_range(args.heads, args.group_heads, self.size, rank) for rank in range(self.size)]

    def shape(self, like: Tensor, heads: int, rows: int) -> list[int]:
        shape = list(like.shape)
        shape[self.head], shape[self.row] = heads, rows
        return shape

    def places(self, rank: int) -> list[range]:
        """Returns where the rows of a rank stand among all rows."""
        return local_rows(self.all_rows, self.ranges[rank])


def _to_heads(x: Tensor, *values: Any) -> Tensor:
    plan = _Plan(Exchange(*values), x)
    own_rows = num_rows(plan.ranges[plan.rank])
    if x.shape[plan.row] != own_rows:
        raise value_error(
            "q or k",
            f"{x.shape[plan.row]} rows on rank {plan.rank}",
            f"{own_rows} of {plan.args.seqlen} over {plan.args.num_shards} ranks ({plan.args.sharding})",
            "Give seqlen, the length of the whole sequence",
        )

    def heads_for(rank: int) -> Tensor:
        return x.narrow(plan.head, plan.heads[rank].start, len(plan.heads[rank]))

    sends = [(peer, heads_for(peer).contiguous()) for peer in plan.channel.peers()]
    num_heads = len(plan.heads[plan.rank])
    receives = [
        (peer, x.new_empty(plan.shape(x, num_heads, num_rows(plan.ranges[peer])))) for peer in plan.channel.peers()
    ]
    pending = plan.channel.post(sends, receives)
    whole = x.new_empty(plan.shape(x, num_heads, num_rows(plan.all_rows)))
    put(whole, plan.places(plan.rank), heads_for(plan.rank), plan.row)
    pending.wait()
    for peer, part in receives:
        put(whole, plan.places(peer), part, plan.row)
    return whole


def _to_rows(y: Tensor, *values: Any) -> Tensor:
    plan = _Plan(Exchange(*values), y)

    def rows_of(rank: int) -> Tensor:
        return take(y, plan.places(rank), plan.row)

    sends = [(peer, rows_of(peer).contiguous()) for peer in plan.channel.peers()]
    own_rows = num_rows(plan.ranges[plan.rank])
    received = {peer: y.new_empty(plan.shape(y, len(plan.heads[peer]), own_rows)) for peer in plan.channel.peers()}
    pending = plan.channel.post(sends, list(received.items()))
    received[plan.rank] = rows_of(plan.rank)
    is_shared = sum(map(len, plan.heads)) > plan.args.heads
    dtype = torch.float32 if is_shared and y.dtype in (torch.float16, torch.bfloat16) else y.dtype
    whole = torch.zeros(plan.shape(y, plan.args.heads, own_rows), dtype=dtype, device=y.device)
    pending.wait()
    for rank in range(plan.size):
        target = whole.narrow(plan.head, plan.heads[rank].start, len(plan.heads[rank]))
        target.add_(received[rank]) if is_shared else target.copy_(received[rank])
    return whole.to(y.dtype)


def _fake(is_to_heads: bool) -> Any:
    def fake(x: Tensor, *values: Any) -> Tensor:
        args = Exchange(*values)
        row, head = row_axis(args.layout), head_axis(args.layout)
        size, rank = group_size_and_rank(args.group)
        shards = Shards(args.seqlen, args.num_shards, args.sharding)
        shape = list(x.shape)
        if is_to_heads:
            shape[head] = len(head_range(args.heads, args.group_heads, size, rank))
            shape[row] = shards.length(*range(args.first, args.first + size))
        else:
            shape[head], shape[row] = args.heads, shards.length(args.first + rank)
        return x.new_empty(shape)

    return fake


# Rows to every rank, and back


class _Gathering(NamedTuple):
    """The arguments of both operators, behind the tensor."""

    group: str
    sharding: str
    seqlen: int
    first: int  # of the ranks of the sharding: that of rank 0 of the group
    num_shards: int
    merged: int  # ranks of the sharding whose rows each rank of the group holds
    timeout: float

    def places(self) -> list[list[range]]:
        """Returns where the rows of each rank of the group stand among those of all."""
        size, _ = group_size_and_rank(self.group)
        shards = Shards(self.seqlen, self.num_shards, self.sharding)
        starts = [self.first + rank * self.merged for rank in range(size)]
        held = [shards.union(range(start, start + self.merged)) for start in starts]
        all_rows = shards.union(range(self.first, self.first + size * self.merged))
        return [local_rows(all_rows, ranges) for ranges in held]


def _gather_rows(rows: Tensor, *values: Any) -> Tensor:
    """(rows, ...) of all ranks in the order of the sequence."""
    args = _Gathering(*values)
    places = args.places()
    channel = Channel(args.group, rows.device, args.timeout, "unshard")
    rows = rows.contiguous()
    _check_same(channel, args, rows, 0)
    _check_own(rows, places[channel.rank], channel.rank)
    received = {peer: rows.new_empty((sum(map(len, places[peer])), *rows.shape[1:])) for peer in channel.peers()}
    channel.post([(peer, rows) for peer in channel.peers()], list(received.items())).wait()
    whole = rows.new_empty((sum(len(part) for own in places for part in own), *rows.shape[1:]))
    for rank, part in (received | {channel.rank: rows}).items():
        put(whole, places[rank], part, 0)
    return whole


def _scatter_rows(grad: Tensor, *values: Any) -> Tensor:
    """The adjoint: the sum over the ranks of what each has for this rank's rows, in the order of the ranks."""
    args = _Gathering(*values)
    places = args.places()
    channel = Channel(args.group, grad.device, args.timeout, "unshard (backward)")
    _check_same(channel, args, grad, 0)
    own = take(grad, places[channel.rank], 0).contiguous()
    received = {peer: torch.empty_like(own) for peer in channel.peers()}
    sends = [(peer, take(grad, places[peer], 0).contiguous()) for peer in channel.peers()]
    channel.post(sends, list(received.items())).wait()
    received[channel.rank] = own
    total = torch.zeros_like(own)
    for rank in range(channel.size):
        total += received[rank]
    return total


def _gathering_fake(is_gather: bool) -> Any:
    def fake(rows: Tensor, *values: Any) -> Tensor:
        args = _Gathering(*values)
        size, rank = group_size_and_rank(args.group)
        start, count = (0, size) if is_gather else (rank, 1)
        ranks = range(args.first + start * args.merged, args.first + (start + count) * args.merged)
        shards = Shards(args.seqlen, args.num_shards, args.sharding)
        return rows.new_empty((shards.length(*ranks), *rows.shape[1:]))

    return fake


def _check_own(rows: Tensor, places: list[range], rank: int) -> None:
    expected = sum(map(len, places))
    if rows.shape[0] != expected:
        raise value_error("tensor", f"{rows.shape[0]} rows on rank {rank}", f"{expected}", "Give seqlen")


# The operators: two pairs, each the gradient of the other


def _define(name: str, arguments: type, kernel: Any, fake: Any) -> Any:
    return define_operator(name, f"(Tensor x, {schema(arguments)}) -> Tensor", kernel, fake)


rows_to_heads = _define("rows_to_heads", Exchange, _to_heads, _fake(True))
heads_to_rows = _define("heads_to_rows", Exchange, _to_rows, _fake(False))
gather_rows = _define("gather_rows", _Gathering, _gather_rows, _gathering_fake(True))
scatter_rows = _define("scatter_rows", _Gathering, _scatter_rows, _gathering_fake(False))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[1:]


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    args = Exchange(*inputs[1:])
    # The forward pass has compared the documents
    ctx.options = tuple(args._replace(cu_seqlens=None, function=f"{args.function} (backward)"))


def _register(op: Any, reverse: Any, setup: Any) -> None:
    def gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reverse(grad.contiguous(), *ctx.options), *([None] * len(ctx.options))

    torch.library.register_autograd(op, gradient, setup_context=setup, lib=library)


for _one, _other, _saves in ((rows_to_heads, heads_to_rows, _setup_exchange), (gather_rows, scatter_rows, _setup)):
    _register(_one, _other, _saves)
    _register(_other, _one, _saves)
