"""Results over ranks against the float64 oracle of one process, by the error rule: what the tests, and
`flashtile distributed check`, run on every rank of a group."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashtile.distributed import ulysses
from flashtile.distributed.attention import context_attention, ring_attention, shard, ulysses_attention, unshard
from flashtile.distributed.launch import on_ranks
from flashtile.distributed.sharding import Shards
from flashtile.distributed.transport import bytes_sent
from flashtile.problem import AttentionArgs, head_axis, row_axis
from flashtile.testing import Case, Expected, Inputs, Result, disagreements, expect


@dataclass(frozen=True)
class Way:
    """Way in which a call is made."""

    strategy: str
    sharding: str = "zigzag"
    transport: str = "auto"

    def __str__(self) -> str:
        return " ".join(word for word in (self.strategy, self.sharding, self.transport) if word != "auto")


WAYS = (
    Way("ring", "zigzag", "p2p"),
    Way("ring", "contiguous", "p2p"),
    Way("ring", "zigzag", "gather"),
    Way("ring", "contiguous", "gather"),
    Way("ulysses", "zigzag"),
    Way("ulysses", "contiguous"),
)

# 8 query heads, 4 key heads: Ulysses deals them out to 1, 2, 4 and 8 ranks, not to 3
PLAIN = Case(batch=1, heads=8, heads_kv=4, seqlen_q=70, seqlen_k=70, head_dim=16, head_dim_v=8)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal, window": {"causal": "bottom_right", "window": (9, -1)},
    "window": {"window": (5, 11)},
    "alibi": {"alibi": "h"},
    "alibi, causal, batch": {"alibi": "bh", "causal": "bottom_right", "batch": 2},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal, aligned": {"dropout_p": 0.3, "causal": "bottom_right", "seqlen_q": 128, "seqlen_k": 128},
    "dropout, window, alibi": {"dropout_p": 0.2, "window": (13, 2), "alibi": "h"},
    "softcap, sinks, scale": {"softcap": 2.0, "has_sinks": True, "scale": 0.4},
    "bias": {"bias": "bhqk", "causal": "bottom_right"},
    "bias of keys, alibi": {"bias": "k", "alibi": "h"},
    "mask, dropout": {"mask": "bhqk", "dropout_p": 0.2, "bias": "hqk"},
    "mask of keys": {"mask": "k", "has_sinks": True},
    "more keys": {"seqlen_q": 40, "seqlen_k": 90, "causal": "bottom_right"},
    "more queries": {"seqlen_q": 90, "seqlen_k": 40, "causal": "bottom_right", "dropout_p": 0.1},
    "fewer keys than ranks": {"seqlen_q": 30, "seqlen_k": 2},
    "top left": {"seqlen_q": 40, "seqlen_k": 90, "causal": "top_left", "window": (20, -1)},
    "bfloat16": {"dtype": torch.bfloat16, "causal": "bottom_right", "layout": "bshd"},
    "float16, few rows": {"dtype": torch.float16, "seqlen_q": 5, "seqlen_k": 5, "causal": "bottom_right"},
    "float64, bshd": {"dtype": torch.float64, "layout": "bshd", "causal": "bottom_right", "alibi": "h"},
    "deterministic": {"causal": "bottom_right", "deterministic": True},
}
# Lengths of packed documents, and the options of a call
DOCUMENTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "documents, causal": ((1, 30, 0, 2, 40, 7, 3), {"causal": "bottom_right"}),
    "documents, dropout": ((9, 9, 100, 9), {"causal": "bottom_right", "dropout_p": 0.3}),
}

# For a GPU: 16-bit, and over four ranks still long enough for the kernels of long sequences
LARGE = dataclasses.replace(
    PLAIN, dtype=torch.bfloat16, heads=4, heads_kv=2, seqlen_q=4400, seqlen_k=4400, head_dim=64, head_dim_v=64
)
ALIGNED = {"seqlen_q": 4096, "seqlen_k": 4096}  # shards start at multiples of 8 keys: dropout needs no padding
LARGE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "causal, window": {"causal": "bottom_right", "window": (200, -1)},
    "alibi, causal": {"causal": "bottom_right", "alibi": "h"},
    "dropout, causal": {"causal": "bottom_right", "dropout_p": 0.2, **ALIGNED},
    "softcap, sinks": {"causal": "bottom_right", "softcap": 5.0, "has_sinks": True},
    "deterministic": {"causal": "bottom_right", "deterministic": True},
    "head dim 128, bshd": {"causal": "bottom_right", "head_dim": 128, "head_dim_v": 128, "layout": "bshd"},
}
LARGE_DOCUMENTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "documents, causal": ((400, 2000, 12, 1684), {"causal": "bottom_right"}),
}


def case_names(device: str = "cpu") -> tuple[str, ...]:
    return (*CASES, *DOCUMENTS) if device == "cpu" else (*LARGE_CASES, *LARGE_DOCUMENTS)


def case_inputs(name: str, seed: int, device: str = "cpu") -> Inputs:
    """The inputs of one of `case_names`. On a GPU they are for our kernels."""
    is_large = device != "cpu"
    base, backend = (LARGE, "cuda") if is_large else (PLAIN, None)
    documents = LARGE_DOCUMENTS if is_large else DOCUMENTS
    if name in documents:
        lengths, options = documents[name]
        return packed_inputs(seed, lengths, base, device, backend=backend, **options)
    changes = (LARGE_CASES if is_large else CASES)[name]
    return dataclasses.replace(base, backend=backend, **changes).make(seed, device)


def packed_inputs(seed: int, lengths: Sequence[int], like: Case = PLAIN, device: str = "cpu", **options: Any) -> Inputs:
    """Documents of these lengths, packed."""
    generator = torch.Generator().manual_seed(seed)
    total, layout = sum(lengths), options.get("layout", "bhsd")

    def normal(heads: int, dim: int) -> Tensor:
        shape = (heads, total, dim) if layout == "bhsd" else (total, heads, dim)
        return torch.randn(shape, generator=generator).to(device, like.dtype)

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    if options.get("dropout_p"):
        options["rng_state"] = torch.tensor([seed, 5], device=device)
    args = AttentionArgs(
        *(normal(like.heads, like.head_dim), normal(like.heads_kv, like.head_dim)),
        normal(like.heads_kv, like.head_dim_v),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        **options,
    )
    return Inputs(
        args, normal(like.heads, like.head_dim_v), torch.randn(like.heads, total, generator=generator).to(device)
    )


def refusal(inputs: Inputs, way: Way, num_ranks: int) -> str | None:
    """Returns why a call cannot be made this way, or None."""
    args = inputs.args
    if way.strategy != "ulysses":
        return None
    if args.bias is not None or args.mask is not None:
        return "a mask or a bias is not exchanged"
    axis = head_axis(args.layout)
    return ulysses.refusal(args.q.shape[axis], args.k.shape[axis], num_ranks)


def attend(args: AttentionArgs, group: Any, way: Way, mesh: Any = None, **changes: Any) -> tuple[Tensor, Tensor]:
    """The call of one process, made by the ranks of a group with their shards."""
    options = {
        "causal": False if args.causal == "none" else args.causal,
        "window": (args.window_left, args.window_right),
        "rng_state": args.rng_state if args.dropout_p else None,
        "cu_seqlens": args.cu_seqlens_q,
        "return_lse": True,
        "sharding": way.sharding,
        **{name: getattr(args, name) for name in ("scale", "alibi_slopes", "softcap", "sinks", "dropout_p", "layout")},
        **{name: getattr(args, name) for name in ("deterministic", "backend")},
    }
    place = {"mesh": mesh} if mesh is not None else {"group": group}
    function: Any = context_attention if mesh is not None else ring_attention
    if way.strategy == "ulysses":
        function = ulysses_attention
    else:
        options |= {"mask": args.mask, "bias": args.bias, "transport": way.transport}
    result: tuple[Tensor, Tensor] = function(args.q, args.k, args.v, **place, **options, **changes)
    return result


def shards_of(args: AttentionArgs, place: dict[str, Any]) -> AttentionArgs:
    """This rank's rows of a call; place: a mesh or a group, and a sharding."""
    row = row_axis(args.layout)
    own: dict[str, Any] = {name: shard(getattr(args, name), row, **place) for name in ("q", "k", "v")}
    for name in ("bias", "mask"):
        tensor = getattr(args, name)
        if tensor is not None and tensor.shape[2] != 1:
            own[name] = shard(tensor, 2, **place)
    return args._replace(**own)


def whole_result(group: Any, inputs: Inputs, way: Way, mesh: Any = None) -> Result:
    """Outputs and gradients of the whole problem, computed by all ranks; every rank has them."""
    args, row = inputs.args, row_axis(inputs.args.layout)
    place = {"mesh": mesh, "sharding": way.sharding} if mesh is not None else {"group": group, "sharding": way.sharding}

    def part(tensor: Tensor, dim: int) -> Tensor:
        return shard(tensor, dim, **place)

    mine = shards_of(args, place)
    own = {
        name: tensor.detach().clone().requires_grad_()
        for name in ("q", "k", "v", "bias", "sinks")
        if (tensor := getattr(mine, name)) is not None
    }
    seqlen, seqlen_k = args.q.shape[row], args.k.shape[row]
    leaves: dict[str, Any] = dict(own)
    out, lse = attend(mine._replace(**leaves), group, way, mesh, seqlen=seqlen, seqlen_k=seqlen_k)
    dlse = torch.where(lse != -torch.inf, part(inputs.dlse, -1), 0.0)
    torch.autograd.backward((out, lse), (part(inputs.dout, row), dlse))

    def whole(tensor: Tensor, dim: int, length: int) -> Tensor:
        return unshard(tensor.detach(), dim, seqlen=length, **place)

    def grad_of(name: str) -> Tensor | None:
        """Replicated tensors have a share of the gradient on every rank."""
        grad = own[name].grad if name in own else None
        if grad is None:
            return None
        if name == "sinks" or (args.bias is not None and name == "bias" and args.bias.shape[2] == 1):
            return _summed(grad, group)
        return whole(grad, 2 if name == "bias" else row, seqlen_k if name in ("k", "v") else seqlen)

    return Result(
        whole(out, row, seqlen),
        whole(lse, lse.dim() - 1, seqlen),
        *(grad_of(name) for name in ("q", "k", "v", "bias", "sinks")),
    )


def _summed(tensor: Tensor, group: Any) -> Tensor:
    """Returns the sum of what each rank has, in float64, made by the host: gloo takes no tensors of a GPU."""
    is_gloo = dist.get_backend(group) == "gloo"
    total = tensor.to("cpu" if is_gloo else tensor.device, torch.float64)
    dist.all_reduce(total, group=group)
    return total.to(tensor.device, tensor.dtype)


def judge(group: Any, inputs: Inputs, way: Way, mesh: Any = None) -> list[str]:
    """Returns what is wrong with the whole result; rank 0 has it."""
    ours = whole_result(group, inputs, way, mesh)
    return disagreements(ours, inputs) if dist.get_rank(group) == 0 else []


def least_keys(args: AttentionArgs, num_ranks: int, sharding: str) -> int:
    """Returns how many keys all ranks together must send in a forward pass: each goes once to each other rank that has
    a query which causal mask, window and documents let see it. Counted from the whole score matrix."""
    row = row_axis(args.layout)
    num_queries, num_keys = args.q.shape[row], args.k.shape[row]
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    distance = j - i - (0 if args.causal == "top_left" else num_keys - num_queries)
    is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if args.causal != "none" or args.window_right >= 0:
        is_seen &= distance <= (0 if args.causal != "none" else args.window_right)
    if args.window_left >= 0:
        is_seen &= distance >= -args.window_left
    if args.cu_seqlens_q is not None:
        ends = args.cu_seqlens_q[1:].cpu()
        is_seen &= torch.bucketize(i, ends, right=True) == torch.bucketize(j, ends, right=True)
    total = 0
    for rank in range(num_ranks):
        rows, own = (_rows(length, num_ranks, sharding, rank) for length in (num_queries, num_keys))
        visible = is_seen[rows].any(0)
        total += int(visible.sum() - visible[own].sum())
    return total


def _rows(seqlen: int, num_ranks: int, sharding: str, rank: int) -> list[int]:
    return [row for part in Shards(seqlen, num_ranks, sharding).ranges(rank) for row in part]


def sent_keys(group: Any, inputs: Inputs, way: Way) -> int:
    """Returns how many keys, with their values, all ranks together send in a forward pass."""
    args, row = inputs.args, row_axis(inputs.args.layout)
    k, v = args.k, args.v
    per_key = (k.numel() + v.numel()) // max(1, k.shape[row]) * k.element_size()
    before = bytes_sent.get(group.group_name, 0)
    with torch.no_grad():
        own = shards_of(args, {"group": group, "sharding": way.sharding})
        attend(own, group, way, seqlen=args.q.shape[row], seqlen_k=k.shape[row])
    sent = torch.tensor([bytes_sent.get(group.group_name, 0) - before], dtype=torch.float64, device=k.device)
    return int(_summed(sent, group).item()) // max(1, per_key)


@dataclass(frozen=True)
class Exactness:
    """The largest errors of one problem over some ranks, beside those of the yardstick."""

    case: str
    way: str
    num_ranks: int
    out_error: float
    out_yardstick: float
    grad_error: float  # of q, k and v
    grad_yardstick: float
    sent_keys: int  # by all ranks in the forward pass; 0 where no keys travel
    least_keys: int
    complaints: tuple[str, ...]  # by the error rule, or of a rule of this module


def measure(group: Any, name: str, inputs: Inputs, way: Way, expected: Expected | None = None) -> Exactness | None:
    """Returns the measurement on rank 0, and None on the others."""
    ours = whole_result(group, inputs, way)
    again = whole_result(group, inputs, way) if inputs.args.deterministic else ours
    is_ring = way.strategy == "ring"
    sent = sent_keys(group, inputs, way) if is_ring else 0
    if dist.get_rank(group):
        return None
    expected = expected or expect(inputs)
    complaints = [
        text + _at_fault(text.partition(":")[0], ours, expected, inputs.args, dist.get_world_size(group), way)
        for text in disagreements(ours, inputs, expected)
    ]
    least = (
        least_keys(inputs.args, dist.get_world_size(group), way.sharding) if is_ring and inputs.args.k.numel() else 0
    )
    complaints += [f"{sent} keys were sent, {least} are enough"] if sent != least else []
    complaints += [
        f"{field}: differs between two runs"
        for field, one, two in zip(Result._fields, ours, again, strict=True)
        if one is not None and two is not None and not torch.equal(one, two)
    ]

    def error(result: Result, *names: str) -> float:
        return max(_largest(getattr(result, one), getattr(expected.ref, one)) for one in names)

    return Exactness(
        case=name,
        way=str(way),
        num_ranks=dist.get_world_size(group),
        out_error=error(ours, "out"),
        out_yardstick=error(expected.low, "out"),
        grad_error=error(ours, "dq", "dk", "dv"),
        grad_yardstick=error(expected.low, "dq", "dk", "dv"),
        sent_keys=sent,
        least_keys=least,
        complaints=tuple(complaints),
    )


def _at_fault(name: str, ours: Result, expected: Expected, args: AttentionArgs, num_ranks: int, way: Way) -> str:
    """The rank whose rows of a tensor are the farthest off, in words; nothing for tensors without rows."""
    mine, exact = getattr(ours, name), getattr(expected.ref, name)
    dims = {"lse": -1, "dbias": 2, **dict.fromkeys(("out", "dq", "dk", "dv"), row_axis(args.layout))}
    if mine is None or name not in dims or mine.shape[dims[name]] == 1:
        return ""
    errors = torch.where(mine == exact, 0.0, (mine.double() - exact.double()).abs().nan_to_num(torch.inf))
    errors = errors.movedim(dims[name], 0).flatten(1).amax(1)
    by_rank = [errors[_rows(len(errors), num_ranks, way.sharding, rank)] for rank in range(num_ranks)]
    worst = max(range(num_ranks), key=lambda rank: by_rank[rank].max().item() if by_rank[rank].numel() else 0.0)
    return f" (rank {worst} is the farthest off)"


def _largest(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0


def check(
    num_ranks: int,
    device: str = "cpu",
    backend: str = "gloo",
    seed: int = 0,
    names: Sequence[str] = (),
    ways: Sequence[Way] = WAYS[:3] + WAYS[4:5],
    seconds: float | None = None,
    limit_s: float = math.inf,
) -> list[Exactness]:
    """Every case in every way that takes it, over processes of this machine. Stops behind the case that exceeds
    `seconds`. limit_s: as in `on_ranks`."""
    names = names or case_names(device)
    given = (device, seed, names, ways, seconds)
    return on_ranks(check_group, num_ranks, *given, device=device, backend=backend, limit_s=limit_s)


def check_group(
    group: Any, device: str, seed: int, names: Sequence[str], ways: Sequence[Way], seconds: float | None = None
) -> list[Exactness]:
    """Runs the same checks on every rank of a group; rank 0 has the results."""
    found: list[Exactness] = []
    start = time.monotonic()
    for name in names:
        inputs = case_inputs(name, seed, device)
        expected = expect(inputs) if dist.get_rank(group) == 0 else None
        for way in ways:
            if refusal(inputs, way, dist.get_world_size(group)) is not None:
                continue
            one = measure(group, name, inputs, way, expected)
            if one is not None:
                found.append(one)
                verdict = "ok" if not one.complaints else "; ".join(one.complaints)
                print(f"{one.num_ranks} ranks, {name}, {way}: {verdict}", file=sys.stderr, flush=True)
        is_late = torch.tensor([float(seconds is not None and time.monotonic() - start > seconds)], device=device)
        if _summed(is_late, group).item() > 0:
            break
    return found
