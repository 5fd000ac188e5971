"""flash_attn.bert_padding: from padded batches to packed rows and back. All of it is differentiable."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of the first axis."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros with first_axis_dim rows, of which these have values."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(batch, rows, ...) and a mask (batch, rows), 1 = a token, to (packed rows (total, ...), their indices, cumulative
    lengths int32, the longest length, tokens in use int32). Rows of unused_mask are packed too but not in use."""
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    seqused = attention_mask.sum(-1, dtype=torch.int32)
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed rows (total, ...) to (batch, seqlen, ...), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def __getattr__(name: str) -> Any:
    """flash_attn's module has einops' rearrange, and verl imports it from there."""
    if name == "rearrange":
        return importlib.import_module("einops").rearrange
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
