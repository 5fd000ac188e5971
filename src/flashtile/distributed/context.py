"""Models that know nothing of ranks: inside `context_parallel` their attention is over the whole sequence.

torch's `scaled_dot_product_attention`, `Attention` of this module, and models of transformers with
`attn_implementation="flashtile"` become `context_attention`. `ContextParallel` is the same as a ParallelStyle, for
`parallelize_module`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from flashtile.api import attention
from flashtile.distributed.attention import context_attention
from flashtile.errors import value_error

# Bounds of the documents of every row of the batch, as `context_attention` takes them for one
Documents = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Context:
    """Options of `context_attention` that say where attention is computed, and over which documents."""

    mesh: Any = None
    group: Any = None
    strategy: str = "auto"
    sharding: str = "zigzag"
    seqlen: int | None = None
    timeout: float | None = None
    cu_seqlens: Documents | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Documents | None = None, **options: Any) -> Any:
        """`context_attention` of q, k and v with a batch. cu_seqlens is that of the context where None is given; an
        empty sequence stands for no documents."""
        options |= {"mesh": self.mesh, "group": self.group, "strategy": self.strategy, "sharding": self.sharding}
        options |= {"seqlen": self.seqlen, "timeout": self.timeout}
        documents = self.cu_seqlens if cu_seqlens is None else cu_seqlens
        rows: Sequence[Tensor] = (documents,) if isinstance(documents, Tensor) else documents or ()
        if not rows:
            return context_attention(q, k, v, **options)
        if q.dim() != 4 or len(rows) != q.shape[0]:
            raise value_error(
                "cu_seqlens", f"{len(rows)} of them for q of {_shape(q)}", "one for each row of the batch"
            )
        found: list[Any] = [
            context_attention(*one, cu_seqlens=bounds, **options) for *one, bounds in zip(q, k, v, rows, strict=True)
        ]
        if isinstance(found[0], Tensor):
            return torch.stack(found)
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


_active: list[Context] = []


def current() -> Context | None:
    """The innermost `context_parallel`."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def context_parallel(
    mesh: Any = None,
    *,
    group: Any = None,
    strategy: str = "auto",
    sharding: str = "zigzag",
    seqlen: int | None = None,
    timeout: float | None = None,
    cu_seqlens: Documents | None = None,
) -> Iterator[None]:
    """Attention inside is over all rows, of which every rank has its own; arguments as in `context_attention`. With a
    batch of several rows, cu_seqlens is a sequence, one for each."""
    was_installed = functional.scaled_dot_product_attention is _attention_over_ranks
    if not was_installed:
        _install()
    _active.append(Context(mesh, group, strategy, sharding, seqlen, timeout, cu_seqlens))
    try:
        yield
    finally:
        _active.pop()
        if not was_installed:
            _put(_replaced.pop())


_replaced: list[Any] = []  # torch's function, or what stood in its place


def _install() -> None:
    """Puts `_attention_over_ranks` in the place of torch's function."""
    _replaced.append(functional.scaled_dot_product_attention)
    _put(_attention_over_ranks)


def _put(function: Any) -> None:
    functional.scaled_dot_product_attention = function


def _attention_over_ranks(*args: Any, **options: Any) -> Tensor:
    context = current()
    out: Tensor = _replaced[-1](*args, **options) if context is None else _sdpa(context, *args, **options)
    return out


def _sdpa(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function: (..., heads, rows, dim)."""
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise value_error("key", f"{key.shape[-3]} heads", f"{query.shape[-3]}, as query, or enable_gqa=True")
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    scores = {"mask" if is_bool else "bias": attn_mask}
    causal = "top_left" if is_causal else False
    out: Tensor = context.attend(query, key, value, causal=causal, dropout_p=dropout_p, scale=scale, **scores)
    return out


class Attention(torch.nn.Module):
    """`flashtile.attention` as a module; `context_attention` inside `context_parallel`. Options are fixed when it is
    made; dropout is off in evaluation."""

    def __init__(self, *, dropout_p: float = 0.0, **options: Any):
        super().__init__()
        self.dropout_p, self.options = dropout_p, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dropout_p = self.dropout_p if self.training else 0.0
        context = current()
        attend: Any = attention if context is None else context.attend
        out: Tensor = attend(q, k, v, dropout_p=dropout_p, **self.options)
        return out


class ContextParallel(ParallelStyle):
    """The module runs inside `context_parallel` over the mesh that `parallelize_module` is given:

    parallelize_module(model, mesh["cp"], {"layers.*.attention": ContextParallel()})
    """

    def __init__(
        self,
        *,
        strategy: str = "auto",
        sharding: str = "zigzag",
        seqlen: int | None = None,
        timeout: float | None = None,
    ):
        super().__init__()
        self.options: dict[str, Any] = {
            "strategy": strategy,
            "sharding": sharding,
            "seqlen": seqlen,
            "timeout": timeout,
        }

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        plain, options = module.forward, self.options
        # For good: a compiled module cannot replace functions while it runs
        if functional.scaled_dot_product_attention is not _attention_over_ranks:
            _install()

        def forward(*args: Any, **kwargs: Any) -> Any:
            with context_parallel(device_mesh, **options):
                return plain(*args, **kwargs)

        module.forward = forward
        return module
