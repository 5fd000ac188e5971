"""Attention over sequences that are spread over ranks: context parallelism on torch.distributed.

    from flashtile.distributed import ring_attention, shard

docs/distributed.md has the whole story. Importing this module registers its operators.
"""

from flashtile.distributed.attention import (
    context_attention,
    explain_context,
    position_ids,
    ring_attention,
    shard,
    ulysses_attention,
    unshard,
)
from flashtile.distributed.context import Attention, ContextParallel, context_parallel, current
from flashtile.distributed.cost import ContextExplanation, Link
from flashtile.distributed.transport import PeerError

__all__ = [
    "Attention",
    "ContextExplanation",
    "ContextParallel",
    "Link",
    "PeerError",
    "context_attention",
    "context_parallel",
    "current",
    "explain_context",
    "position_ids",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
