"""The forward pass by mma.sync, from Ampere on: fwd_sm80.cuh, docs/sm80.md."""

from __future__ import annotations

from typing import ClassVar

from flashtile.families.base import Launch, tile_step
from flashtile.families.mma_sync import MASKED, NARROW_LOADS, MmaFamily
from flashtile.families.steps import combine, partial_results, query_grid
from flashtile.families.tiles import Dims, Kernel, Knobs, Row, Tile
from flashtile.plans.length_class import PACKED_ROWS, PackedHeads, RaggedQueries
from flashtile.plans.plan import Factor, SplitRule, Step
from flashtile.plans.spec import CallLayout, PlanKey

PACKED_HEADS, _SHORT = PackedHeads(PACKED_ROWS, 128), RaggedQueries(128, 64, 140)
QUERY_TILE_BYTES = 72  # QueryTile (attn/work_item.cuh)
_NUM_WARPS = 8  # that the registers of a multiprocessor hold


def _shared_bytes(row: Row) -> int:
    keys = row["stages"] * row.streamed * (row.head_dim + row.head_dim_v)
    tiles = 2 * (row.owned * row.head_dim + keys)
    return -(-(tiles + QUERY_TILE_BYTES) // 128) * 128


class FwdSm80(MmaFamily):
    name = "fwd_sm80"
    op = "forward"
    summary = "mma.sync and ldmatrix: float16 from Turing on, bfloat16 from Ampere on"
    kernel_types = (
        Kernel(
            "fwd_sm80",
            "fwd_sm80/fwd_sm80",
            "Sm80Config<{dtype}, {out_dtype}, {d}, {d_v}, {owned}, {streamed}, {warps}, {knobs}, {call}>",
            "FwdSm80Storage<{config}, {mask}, {lengths}>",
            _shared_bytes,
            knobs=("stages", "blocks", "kept_steps"),
        ),
    )
    own_words = frozenset({"few_rows"})
    length_classes = (PACKED_HEADS, _SHORT)

    misread_by: ClassVar = {"memcheck": NARROW_LOADS, "synccheck": MASKED}

    def packed_heads(self, key: PlanKey) -> int:
        """Returns how many heads share a tile."""
        return key.length(PACKED_HEADS)

    def num_options(self, key: PlanKey) -> int:
        return super().num_options(key) + (not key.is_scale_positive)

    def words(self, key: PlanKey, dims: Dims) -> frozenset[str]:
        """Few rows of a tile have a query: heads are packed, or there are few queries."""
        has_few_rows = self.packed_heads(key) > 1 or key.length(_SHORT)
        return super().words(key, dims) | ({"few_rows"} if has_few_rows else set())

    def call_knobs(self, tile: Tile, key: PlanKey | None) -> Knobs:
        if key is None:
            return ("packs_heads", False), ("is_scale_positive", True), ("is_exact", True)
        is_exact = (key.head_dim, key.head_dim_v) == tile.dims
        packs_heads = self.packed_heads(key) > 1
        return ("packs_heads", packs_heads), ("is_scale_positive", key.is_scale_positive), ("is_exact", is_exact)

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = self.packed_heads(key)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80", key)
        packed_heads = self.packed_heads(key)
        heads = "head_tiles" if packed_heads > 1 else "heads"
        # A multiprocessor has 8 warps, and each split should have a few tiles of keys
        splits = SplitRule(row.queries(packed_heads), 4 * row.streamed, heads, _NUM_WARPS // (row.num_threads // 32))
        return Launch((self.step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        packed_heads = self.packed_heads(key) if row["packs_heads"] else 1
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row["packs_heads"] else "heads")
        return tile_step(row, key.features, (Factor("num_splits"), *grid))
