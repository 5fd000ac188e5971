"""The FLOPs of the ops, for torch.utils.flop_counter.FlopCounterMode.

Counted as those of scaled_dot_product_attention: every score of the rectangle of queries and keys, whatever causal,
window or mask hide; 2 products forward, 5 backward. Sequences with lengths have a rectangle each, read from the
tensors.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashtile.ops import dense_args, on_dispatch_mode, split_backward
from flashtile.problem import AttentionArgs, check_values, shape_of

_COUNTER = "torch.utils.flop_counter"
forward_packet, backward_packet = torch.ops.flashtile.forward, torch.ops.flashtile.backward


def _per_column(args: AttentionArgs) -> int:
    """Returns the FLOPs of one column of a product with all scores."""
    shape = shape_of(args)
    if args.cu_seqlens_q is None and args.seqused_k is None and args.leftpad_k is None:
        return 2 * shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
    return 2 * shape.heads * sum(span.seqlen_q * span.seqlen_k for span in check_values(args))


def _is_dense(values: tuple[Any, ...]) -> bool:
    return len(values) < len(AttentionArgs._fields)


def forward_flops(*values: Any, out_val: Any = None) -> int:
    args = dense_args(*values) if _is_dense(values) else AttentionArgs(*values)
    return _per_column(args) * (args.q.shape[-1] + args.v.shape[-1])


def backward_flops(*values: Any, out_val: Any = None) -> int:
    args = dense_args(*values[1:-2]) if _is_dense(values) else split_backward(values)[2]
    # The scores, dq and dk have head_dim columns; dp and dv have head_dim_v
    return _per_column(args) * (3 * args.q.shape[-1] + 2 * args.v.shape[-1])


def register(counter: ModuleType) -> None:
    counter.register_flop_formula(forward_packet, get_raw=True)(forward_flops)
    counter.register_flop_formula(backward_packet, get_raw=True)(backward_flops)


def serve_counters() -> None:
    """Registers the formulas with torch's counter if it has been imported, and with the counters that are running:
    each copies the formulas when it is made. The counter is not imported here, since it imports Triton, which takes
    0.6 s."""
    counter = sys.modules.get(_COUNTER)
    if counter is None or not hasattr(counter, "FlopCounterMode"):  # being imported right now
        return
    if forward_packet not in counter.flop_registry:
        register(counter)
    for mode in _get_current_dispatch_mode_stack():
        formulas = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if isinstance(formulas, dict):
            for packet in (forward_packet, backward_packet):
                formulas.setdefault(packet, counter.flop_registry[packet])


serve_counters()
on_dispatch_mode.append(serve_counters)
