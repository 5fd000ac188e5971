"""A call as an executor is told of it: its tensors by name, its form, its numbers. The same for every backend that runs
a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flashtile.backends import dropout
from flashtile.backends.base import GradNeeds, Grads
from flashtile.plans.params import kernel_scale_log2, kernel_softcap, kernel_window
from flashtile.plans.spec import GRADS, CallLayout
from flashtile.problem import (
    NUM_TENSORS,
    AttentionArgs,
    head_axis,
    is_aligned16,
    key_window,
    rows_disjoint,
    softmax_scale,
)


def tensors_of(args: AttentionArgs) -> dict[str, Tensor]:
    """The tensors of a call that are there."""
    values: tuple[Any, ...] = args[:NUM_TENSORS]
    return {name: tensor for name, tensor in zip(args._fields, values, strict=False) if tensor is not None}


_PER_HEAD = ("alibi_slopes", "sinks")
_INDICES = ("rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table")


def plain_args(args: AttentionArgs) -> AttentionArgs:
    """The arguments with contiguous copies of small tensors, those of a head in the dtype of statistics, as backends
    read them; the same object where all are so."""
    real = torch.float64 if args.q.dtype == torch.float64 else torch.float32
    given = {name: getattr(args, name) for name in (*_PER_HEAD, *_INDICES)}
    plain = {
        name: (tensor.to(real) if name in _PER_HEAD else tensor).contiguous()
        for name, tensor in given.items()
        if tensor is not None
    }
    is_plain = all(plain[name] is given[name] for name in plain)
    return args if is_plain else args._replace(**plain)


def backward_tensors(
    args: AttentionArgs,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grads: Grads,
    is_for_gpu: bool,
) -> dict[str, Tensor]:
    """Returns the tensors of a backward pass, with the gradients that are wanted. A gradient that autograd hands over
    in odd memory is copied. is_for_gpu: TMA has no stride of 0 along rows, which the gradient of a sum has, and reads
    aligned rows alone: a copy costs far less than kernels for others."""
    is_read_in_place = dout.shape[-1] <= 1 or dout.stride(-1) == 1
    if is_for_gpu:
        can_align = dout.shape[-1] * dout.element_size() % 16 == 0
        is_read_in_place &= rows_disjoint(dout, args.layout) and (not can_align or is_aligned16(dout))
    if not is_read_in_place:
        dout = dout.clone(memory_format=torch.contiguous_format)
    others = {"out": out, "lse": lse, "dout": dout, "dlse": dlse, **grads._asdict()}
    return tensors_of(args) | {name: tensor for name, tensor in others.items() if tensor is not None}


def wanted_grads(args: AttentionArgs, needs: GradNeeds) -> tuple[str, ...]:
    """The gradients that a backward pass writes: a tensor that is not there has none."""
    given = {"dbias": args.bias is not None, "dsinks": args.sinks is not None}
    return tuple(name for name, need in zip(GRADS, needs, strict=True) if need and given.get(name, True))


def layout_of(args: AttentionArgs, tensors: Iterable[str]) -> CallLayout:
    """tensors: the names of those that are there."""
    optional = tuple(name for name in tensors if name not in ("q", "k", "v", "out", "lse", "dout", *GRADS))
    return CallLayout(
        args.layout, optional, args.max_seqlen_q is not None, args.max_seqlen_k is not None, args.causal == "top_left"
    )


def scalars_of(args: AttentionArgs) -> dict[str, float | int]:
    scale, (left, right) = softmax_scale(args), map(kernel_window, key_window(args))
    softcap, softcap_factor = kernel_softcap(args.softcap, scale, args.q.dtype == torch.float64)
    return {
        "window_left": left,
        "window_right": right,
        "scale": scale,
        "scale_log2": kernel_scale_log2(scale),
        "softcap": softcap,
        "softcap_factor": softcap_factor,
        "dropout_threshold": dropout.threshold(args.dropout_p),
        "keep_factor": dropout.keep_factor(args.dropout_p),
        "first_query": args.first_query,
        "first_key_group": args.first_key // 8,
        "first_head": args.first_head,
        "total_heads": args.total_heads or args.q.shape[head_axis(args.layout)],
        "max_seqlen_q": args.max_seqlen_q or 0,
        "max_seqlen_k": args.max_seqlen_k or 0,
    }
