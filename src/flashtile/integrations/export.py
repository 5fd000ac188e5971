"""Graphs that leave flashtile behind: `flashtile::forward` as operations of PyTorch, for ONNX and other runtimes.

    program = torch.export.export(model, (x,))
    program = program.run_decompositions({**torch.export.default_decompositions(), **export.decompositions()})
    torch.onnx.export(program, dynamo=True).save("model.onnx")

The scores are stored, as in every runtime without a fused kernel. torch.export and AOTInductor need none of this: there
the operator stays in the graph, and whoever loads it imports flashtile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.errors import unsupported
from flashtile.ops import forward_op
from flashtile.problem import AttentionArgs, lse_dtype


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions for ExportedProgram.run_decompositions."""
    return {forward_op: forward}


def forward(*values: Any) -> tuple[Tensor, Tensor]:
    """`flashtile::forward` without dropout and index tensors: (out, lse)."""
    args = AttentionArgs(*values)
    if args.dropout_p > 0.0:
        raise unsupported(
            "dropout_p", f"{args.dropout_p}", "0 in an exported graph", "Call model.eval() before exporting"
        )
    if any(value is not None for value in (args.cu_seqlens_q, args.seqused_k, args.leftpad_k, args.block_table)):
        raise unsupported("cu_seqlens_q", "index tensors", "dense calls in an exported graph")
    is_rows_first = args.layout == "bshd"
    dtype = lse_dtype(args)
    q, k, v = ((x.transpose(1, 2) if is_rows_first else x).to(dtype) for x in (args.q, args.k, args.v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = _scores(args, q, k, dtype)
    top = scores.amax(-1, keepdim=True) if k.shape[2] > 0 else scores.new_full((*scores.shape[:3], 1), -math.inf)
    if args.sinks is not None:
        sinks = args.sinks.to(dtype)[None, :, None, None]
        top = torch.maximum(top, sinks)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if args.sinks is not None:
        total = total + torch.exp(sinks - top)
    out = (weights / torch.where(total == 0.0, 1.0, total)) @ v
    lse = (torch.log(total) + top)[..., 0]
    out = out.to(args.out_dtype or args.q.dtype)
    return out.transpose(1, 2).contiguous() if is_rows_first else out, lse


def _scores(args: AttentionArgs, q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k), -inf where a key is hidden."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if args.scale is None else args.scale
    scores = (q @ k.transpose(-1, -2)) * scale
    if args.softcap > 0.0:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    offset = 0 if args.causal == "top_left" else k.shape[2] - q.shape[2]
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    distance = rows - torch.arange(k.shape[2], device=q.device)[None]
    if args.alibi_slopes is not None:
        slopes = args.alibi_slopes.to(dtype)
        scores = scores - slopes.reshape(-1, q.shape[1], 1, 1) * distance.abs().to(dtype)
    if args.bias is not None:
        scores = scores + args.bias.to(dtype)
    kept = args.mask
    for is_used, seen in (
        (args.causal != "none", distance >= 0),
        (args.window_left >= 0, distance <= args.window_left),
        (args.window_right >= 0, distance >= -args.window_right),
    ):
        if is_used:
            kept = seen if kept is None else kept & seen
    return scores if kept is None else torch.where(kept, scores, -math.inf)
