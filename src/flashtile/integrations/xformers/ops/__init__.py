"""xformers.ops: its attention."""

from flashtile.integrations.xformers.ops import fmha
from flashtile.integrations.xformers.ops.fmha import (
    AttentionBias,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)

AttentionMask = AttentionBias

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "LowerTriangularMask",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]
