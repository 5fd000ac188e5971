"""Sharding rules for `torch.distributed.tensor.DTensor`: attention over shards of the batch or of the heads, without
communication.

    from flashtile.integrations import dtensor
    dtensor.register()
    q = distribute_tensor(q, mesh, [Shard(1)])          # heads
    flashtile.attention(q, k, v, causal=True)           # a DTensor, sharded as q

Where the heads are sharded, the number of key heads must be a multiple of the mesh's size: groups of heads stay whole.
Dropout draws by the position in the whole tensor, so calls with dropout, like those with index tensors, are replicated.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from flashtile.ops import backward_op, forward_op
from flashtile.problem import NUM_TENSORS, AttentionArgs


def register() -> None:
    """Tells DTensor how `flashtile::forward` and `flashtile::backward` may be sharded."""
    register_sharding(forward_op)(_forward_rules)
    register_sharding(backward_op)(_backward_rules)


def _forward_rules(*values: Any) -> list[tuple[list[Any], list[Any]]]:
    args = AttentionArgs(*values)
    rules = []
    for axis in (None, *_axes(args)):
        rules.append(([_of_rows(args, axis), _of_lse(axis)], _inputs(args, axis)))
    return rules


def _backward_rules(*values: Any) -> list[tuple[list[Any], list[Any]]]:
    _, dlse, *rest = values
    num_args = len(AttentionArgs._fields)
    args, (_, _, needs) = AttentionArgs(*rest[:num_args]), rest[num_args:]
    rules = []
    for axis in (None, *_axes(args)):
        rows, lse = _of_rows(args, axis), _of_lse(axis)
        inputs = [rows, None if dlse is None else lse, *_inputs(args, axis), rows, lse, None]
        grads = [rows, rows, rows, _of_shared_grad(args.bias, axis, needs[3]), _of_sinks_grad(axis, needs[4])]
        grads[:3] = [grad if is_needed else Replicate() for grad, is_needed in zip(grads, needs[:3], strict=False)]
        rules.append((grads, inputs))
    return rules


def _axes(args: AttentionArgs) -> list[str]:
    """Along which a call falls into independent calls."""
    has_indices = any(value is not None for value in args[AttentionArgs._fields.index("cu_seqlens_q") : NUM_TENSORS])
    if args.dropout_p > 0.0 or has_indices:
        return []
    heads_kv = args.k.shape[1 if args.layout == "bhsd" else 2]
    mesh: Any = getattr(args.q, "mesh", None)
    are_groups_whole = mesh is None or all(heads_kv % size == 0 for size in mesh.shape)
    return ["batch", "heads"] if are_groups_whole else ["batch"]


def _of_rows(args: AttentionArgs, axis: str | None) -> Any:
    """q, k, v, out and their gradients."""
    if axis is None:
        return Replicate()
    return Shard(0 if axis == "batch" else 1 if args.layout == "bhsd" else 2)


def _of_lse(axis: str | None) -> Any:
    return Replicate() if axis is None else Shard(0 if axis == "batch" else 1)


def _of_shared(tensor: Any, axis: str | None) -> Any:
    """bias and mask, (batch or 1, heads or 1, ...): what is broadcast is replicated."""
    dim = 0 if axis == "batch" else 1
    return Replicate() if axis is None or tensor.shape[dim] == 1 else Shard(dim)


def _of_shared_grad(tensor: Any, axis: str | None, is_needed: bool) -> Any:
    if tensor is None or not is_needed or axis is None:
        return Replicate()
    dim = 0 if axis == "batch" else 1
    return Partial() if tensor.shape[dim] == 1 else Shard(dim)


def _of_sinks_grad(axis: str | None, is_needed: bool) -> Any:
    if axis is None or not is_needed:
        return Replicate()
    return Partial() if axis == "batch" else Shard(0)


def _inputs(args: AttentionArgs, axis: str | None) -> list[Any]:
    """A placement for every tensor, None for everything else, in the order of the schema."""
    placements: dict[str, Any] = {}
    for name in AttentionArgs._fields[:NUM_TENSORS]:
        value: Any = getattr(args, name)
        if value is None:
            continue
        if name in ("q", "k", "v"):
            placements[name] = _of_rows(args, axis)
        elif name in ("bias", "mask"):
            placements[name] = _of_shared(value, axis)
        elif name in ("alibi_slopes", "sinks"):
            is_per_batch = len(value.shape) == 2
            dim = len(value.shape) - 1 if axis == "heads" else 0
            is_split = axis == "heads" or (axis == "batch" and is_per_batch)
            placements[name] = Shard(dim) if is_split else Replicate()
        else:
            placements[name] = Replicate()
    return [placements.get(name) for name in AttentionArgs._fields]
