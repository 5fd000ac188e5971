"""Shared parts of the two simt families: kernels in float32 arithmetic (FFMA), which every GPU has."""

from __future__ import annotations

from collections.abc import Callable

from flashtile.families.base import Family
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.spec import PlanKey

_FLOAT = 4  # bytes


def simt_kernel(name: str, header: str, storage: str, own_tiles: int, owns: str = "queries") -> Kernel:
    """own_tiles: how many tiles of the head dimension a block keeps of its own rows. Two of the streaming rows and the
    scores come on top."""
    config = "SimtConfig<{dtype}, {out_dtype}, {d}, {owned}, {streamed}, {warps}>"
    return Kernel(name, header, config, storage + "<{config}>", _shared_bytes(own_tiles), owns=owns)


def _shared_bytes(own_tiles: int) -> Callable[[Row], int]:
    def count(row: Row) -> int:
        rows = own_tiles * row.owned + 2 * row.streamed
        return _FLOAT * (rows * (row.head_dim + 4) + row.owned * (row.streamed + 8))

    return count


class SimtFamily(Family):
    has_all_shared_code = True

    def num_options(self, key: PlanKey) -> int:
        return key.features.num_options
