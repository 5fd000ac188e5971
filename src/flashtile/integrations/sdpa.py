"""flashtile in the place of `torch.nn.functional.scaled_dot_product_attention`, for models that are not ours to edit.

    from flashtile.integrations import sdpa
    report = sdpa.install()             # the whole process, until sdpa.uninstall()
    report = sdpa.install(model)        # calls made inside one module, until sdpa.uninstall(model)
    with sdpa.replaced() as report:     # a block of code
        model(x)
    print(report)                       # what was served, what was left to torch, and why

The replacement is an attribute of `torch.nn.functional`. Code that imported the function by name before keeps torch's.
torch's fast path of nn.MultiheadAttention, which calls no attention function, is off meanwhile. In a compiled model
nn.MultiheadAttention is one node of the graph: it needs `install()` without a module.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from flashtile import facades
from flashtile.backends import registry
from flashtile.errors import Unsupported
from flashtile.integrations import fastpath
from flashtile.problem import DTYPES, MAX_HEAD_DIM


@dataclass
class Report:
    """How many calls were served, and how many were left to torch for which reason. Calls inside a compiled graph are
    counted when the graph is traced."""

    served: int = 0
    left_to_torch: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"served by flashtile: {self.served}", f"left to torch: {self.left_to_torch.total()}"]
        return "\n".join([*lines, *(f"  {count} x {reason}" for reason, count in self.left_to_torch.most_common())])


_torch_function = F.scaled_dot_product_attention
_report = Report()
# How many owners there are: the process, blocks of code, and running modules
_owners = [0]
_hooks: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()
_is_installed = [False]


def install(module: torch.nn.Module | None = None) -> Report:
    """Serves every call of the process, or those made while the module or one of its submodules runs. A second call
    changes nothing."""
    if module is None:
        if not _is_installed[0]:
            _is_installed[0] = True
            _own()
    elif module not in _hooks:
        _place()
        # Submodules too: activation checkpointing runs them again outside of the module
        _hooks[module] = [hook for part in module.modules() for hook in _hooked(part)]
    return _report


def uninstall(module: torch.nn.Module | None = None) -> None:
    """Undoes `install` with the same argument."""
    if module is None:
        if _is_installed[0]:
            _is_installed[0] = False
            _leave()
    else:
        for hook in _hooks.pop(module, []):
            hook.remove()
    _restore()


@contextmanager
def replaced() -> Iterator[Report]:
    """Serves the calls of a block of code, with a report of its own."""
    global _report
    outer, _report = _report, Report()
    _own()
    try:
        yield _report
    finally:
        _report = outer
        _leave()
        _restore()


def reset_report() -> None:
    """Starts the counts of `install` anew."""
    _report.served = 0
    _report.left_to_torch.clear()


def _hooked(part: torch.nn.Module) -> tuple[Any, Any]:
    return (
        part.register_forward_pre_hook(_entering),
        part.register_forward_hook(_leaving, always_call=True),
    )


# Functions of the module, so that a model with these hooks can be pickled


def _entering(module: torch.nn.Module, args: Any) -> None:
    _enter()


def _leaving(module: torch.nn.Module, args: Any, output: Any) -> None:
    _leave()


def _enter() -> None:
    _owners[0] += 1


def _leave() -> None:
    _owners[0] -= 1


def _own() -> None:
    _place()
    _enter()


def _place() -> None:
    if F.scaled_dot_product_attention is not _attend:
        fastpath.hold_off()
        F.scaled_dot_product_attention = _attend


def _restore() -> None:
    """Puts torch's function back once nobody is left."""
    if _owners[0] == 0 and not _hooks and F.scaled_dot_product_attention is _attend:
        F.scaled_dot_product_attention = _torch_function
        fastpath.release()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, served by flashtile where it can be."""
    if _owners[0] == 0:
        return _torch_function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    reason = _refusal(query, value, attn_mask, dropout_p) if is_compiling() else ""
    if not reason:
        try:
            out = facades.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
            _count_served()
            return out
        except (Unsupported, ValueError, TypeError) as error:
            reason = str(error)
    _count_left(reason)
    return _torch_function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _count_served() -> None:
    _report.served += 1


def _count_left(reason: str) -> None:
    _report.left_to_torch[reason] += 1
    registry.announce_slow_path(f"a call of scaled_dot_product_attention was left to torch: {reason}")


# As torch.compiler.assume_constant_result, without importing torch._dynamo: they run when a graph is traced, and no
# guard of the graph depends on the counts
_count_served._dynamo_marked_constant = True  # type: ignore[attr-defined]
_count_left._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _refusal(query: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str:
    """Why a traced call is left to torch, or "". An error inside a traced operator cannot be caught."""
    for name, tensor in (("query", query), ("value", value)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            return f"{name}: a head_dim outside of 1 to {MAX_HEAD_DIM}"
    if query.dtype not in DTYPES:
        return f"query: {query.dtype}"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return f"attn_mask: {attn_mask.dtype}"
    return "dropout_p: 1" if dropout_p >= 1.0 else ""
