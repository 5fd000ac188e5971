"""The FLOPs of the ops, for torch.utils.flop_counter.FlopCounterMode.

Counted as those of scaled_dot_product_attention: every score of the rectangle of queries and keys, whatever causal,
window or mask hide; 2 products forward, 5 backward. Sequences with lengths have a rectangle each, read from the
tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from flashtile.ops import dense_args, split_backward
from flashtile.problem import AttentionArgs, check_values, shape_of

_COUNTER = "torch.utils.flop_counter"


def _per_column(args: AttentionArgs) -> int:
    """Of one column of a product with all scores."""
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
    counter.register_flop_formula(torch.ops.flashtile.forward, get_raw=True)(forward_flops)
    counter.register_flop_formula(torch.ops.flashtile.backward, get_raw=True)(backward_flops)


class _RegisterOnImport(MetaPathFinder):
    """torch's counter imports Triton, which takes 0.6 s: whoever wants it imports it, and gets these formulas with
    it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self.inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        register(module)


if _COUNTER in sys.modules:
    register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _RegisterOnImport())
