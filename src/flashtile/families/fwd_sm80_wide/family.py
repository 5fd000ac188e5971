"""The forward pass by mma.sync for wide heads, from Ampere on: fwd_sm80_wide.cuh,
docs/sm80.md.

No warp holds a row of O: warps that share rows split its columns, and P passes through shared memory.
"""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Launch, tile_step
from flashtile.families.fwd_sm80.family import PACKED_HEADS, QUERY_TILE_BYTES
from flashtile.families.mma_sync import NARROW_LOADS, MmaFamily
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Dims, Kernel, Knobs, Row, Tile
from flashtile.plans.plan import Factor, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

# A tile (config.cuh): warps, and slabs of what streams by
WIDE_TILE = "flashtile::Sm80WideTile<{dtype}, {owned}, {streamed}, {knobs}>"
WIDE_KNOBS = ("row_warps", "column_warps", "slab_columns", "slab_rows", "stages", "row_parts")


def slab_bytes(row: Row, row_dim: int) -> int:
    """The size of a slab that holds columns of one tensor and rows of so many elements of another."""
    return 2 * max(row.streamed * row["slab_columns"], row["slab_rows"] * row_dim // row["row_parts"])


def _shared_bytes(row: Row) -> int:
    tiles = 2 * row.owned * (row.head_dim + row.streamed)
    slabs = row["stages"] * slab_bytes(row, row.head_dim_v)
    rows = 4 * row["column_warps"] * row.owned
    return -(-(tiles + slabs + rows + QUERY_TILE_BYTES) // 128) * 128


class FwdSm80Wide(MmaFamily):
    name = "fwd_sm80_wide"
    op = "forward"
    summary = "mma.sync, for head dims over 256"
    kernel_types = (
        Kernel(
            "fwd_sm80_wide",
            "fwd_sm80_wide/fwd_sm80_wide",
            "Sm80WideConfig<{dtype}, {out_dtype}, {d}, {d_v}, " + WIDE_TILE + ", {call}>",
            "FwdSm80WideStorage<{config}, {mask}, {lengths}>",
            _shared_bytes,
            knobs=WIDE_KNOBS,
        ),
    )
    own_words = frozenset({"packed"})
    length_classes = (PACKED_HEADS,)

    def num_options(self, key: PlanKey) -> int:
        return super().num_options(key) + (not key.is_scale_positive)

    def words(self, key: PlanKey, dims: Dims) -> frozenset[str]:
        return super().words(key, dims) | ({"packed"} if key.length(PACKED_HEADS) > 1 else set())

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        packs_heads = key is not None and key.length(PACKED_HEADS) > 1
        return ("packs_heads", packs_heads), ("is_scale_positive", key is None or key.is_scale_positive)

    misread_by: ClassVar = {"memcheck": NARROW_LOADS}

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = key.length(PACKED_HEADS)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80_wide", key)
        packed_heads = key.length(PACKED_HEADS)
        heads = "head_tiles" if packed_heads > 1 else "heads"
        # Each split should have a few tiles of keys
        splits = SplitRule(row.queries(packed_heads), 4 * row.streamed, heads, 1)
        return Launch((self.step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        packed_heads = key.length(PACKED_HEADS) if row["packs_heads"] else 1
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row["packs_heads"] else "heads")
        return tile_step(row, key.features, (Factor("num_splits"), *grid))
