"""Attention over sequences that are spread over ranks: context parallelism on torch.distributed.

    from flashtile.distributed import ring_attention, shard

docs/distributed.md has the whole story. Importing this module registers its operators.
"""

from flashtile.distributed.attention import (
    context_attention,
    position_ids,
    ring_attention,
    shard,
    ulysses_attention,
    unshard,
)
from flashtile.distributed.transport import PeerError

__all__ = [
    "PeerError",
    "context_attention",
    "position_ids",
    "ring_attention",
    "shard",
    "ulysses_attention",
    "unshard",
]
