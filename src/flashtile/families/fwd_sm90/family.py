"""The Hopper forward pass by wgmma and TMA: fwd_sm90.cuh, docs/sm90.md."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.steps import combine, mask_bits, mask_workspaces, partial_results, query_grid
from flashtile.families.tiles import GROUP_ROWS, Dims, Kernel, Row
from flashtile.plans.length_class import PACKED_ROWS, ManyRows, PackedHeads, RaggedQueries, SmallGrid
from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, MapPatch, SplitRule, Step
from flashtile.plans.source import qualified
from flashtile.plans.spec import CallLayout, Features, PlanKey

_PACKED_HEADS, _MANY_ROWS = PackedHeads(PACKED_ROWS, 128), ManyRows(PACKED_ROWS)
_RAGGED, _VERY_RAGGED = RaggedQueries(192, 128, 105), RaggedQueries(192, 128, 113)
_SMALL = SmallGrid(128)
_WARP_ROWS = 16  # rows of O that a warp stores
_WORK_ITEMS, _QUERY_TILE_BYTES = 3, 72  # WorkItemRing, QueryTile (attn/work_item.cuh)
_MAX_SHARED_BYTES = 227 * 1024  # FwdBiasTiles (options.cuh) has two stages where they fit


class FwdSm90Params(ctypes.Structure):
    """Parameters of fwd_sm90_kernel: those of every kernel, and behind them tensor maps on 64-byte boundaries."""

    _fields_ = [
        ("base", Params),
        ("_padding", ctypes.c_char * (-ctypes.sizeof(Params) % 64)),
        *((f"{name}_map", ctypes.c_uint64 * 16) for name in ("q", "k", "v", "out", "bias")),
    ]


def stores_by_tma(row: Row, features: Features) -> bool:
    """True if O is stored by TMA, and the parameters hold a map of it."""
    return bool(row["stores_p"]) and not features.has_lengths and row.out_dtype == row.dtype


def _shared_bytes(row: Row) -> int:
    slabs, slabs_v, stages = -(-row.head_dim // 64), -(-row.head_dim_v // 64), row["stages"]
    tiles = 128 * (slabs * row.owned + stages * row.streamed * (slabs + slabs_v))
    consumers = row.owned // GROUP_ROWS
    tiles += 128 * row.owned * -(-row.streamed // 64) if row["stores_p"] else 16 * row.owned // 64
    barriers, scheduler = 16 * consumers + 32 * stages, 16
    window = -(-(4 * consumers + 60) // 8) * 8 if row.options.has_bool_mask else 0  # MaskWindow
    items = _WORK_ITEMS * (window + _QUERY_TILE_BYTES + -(-(12 * consumers + 8) // 8) * 8)
    end = tiles + barriers + scheduler + items
    if row.options.bias_dtype is not None:
        end = -(-end // 1024) * 1024
        bias_bytes = 4 if row.options.bias_dtype == "float32" else 2
        bias_tile = 128 * GROUP_ROWS * -(-row.streamed * bias_bytes // 128)
        num_stages = 2 if 1024 + tiles + 2 * consumers * bias_tile <= _MAX_SHARED_BYTES else 1
        end += num_stages * consumers * (bias_tile + 32)
    return -(-end // 1024) * 1024


def _asserts(row: Row, features: Features) -> dict[str, tuple[str, object]]:
    policies = ", ".join(qualified(f"flashtile::{policy}") for policy in features.policies()[:5])
    kernel = f"flashtile::FwdSm90<flashtile::{row.config}, {policies}>"
    return {"map of the output": (f"{kernel}::kStoresByTma", stores_by_tma(row, features))}


class FwdSm90(Family):
    name = "fwd_sm90"
    op = "forward"
    summary = "wgmma, TMA and warp specialisation, on Hopper"
    kernel_types = (
        Kernel(
            "fwd_sm90",
            "fwd_sm90/fwd_sm90",
            "Sm90Config<{dtype}, {out_dtype}, {d}, {d_v}, {owned}, {streamed}, {knobs}>",
            "FwdSm90Storage<{config}, {mask}, {score_mod}, {lengths}>",
            _shared_bytes,
            knobs=("stages", "turns", "lazy", "stores_p", "packs"),
            struct=FwdSm90Params,
            asserts=_asserts,
        ),
    )
    own_words = frozenset({"packed", "many_rows", "ragged"})
    features = Family.features - {"is_aligned16"}
    takes_overlapping_rows = False
    length_classes = (_PACKED_HEADS, _MANY_ROWS, _RAGGED, _VERY_RAGGED, _SMALL)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "fwd_sm90_"}

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_more(key)

    def _refuse_more(self, key: PlanKey) -> str | None:
        features = key.features
        if features.is_paged and (features.has_bool_mask or features.bias_dtype is not None):
            return "a boolean mask or a bias with paged keys"
        return None

    def packed_heads(self, key: PlanKey) -> int:
        """Returns how many heads share a tile. Heads that share memory are not packed: a TMA box has no stride of 0."""
        return key.length(_PACKED_HEADS) if key.heads_disjoint else 1

    def words(self, key: PlanKey, dims: Dims) -> frozenset[str]:
        """ragged: tiles of 192 queries would have many rows without one. In plain calls with more than one tile for
        each block, blocks share such tiles evenly (kRotates). A deterministic call must not depend on their number."""
        if self.packed_heads(key) > 1:
            own = {"packed", "many_rows"} if key.length(_MANY_ROWS) and not key.length(_SMALL) else {"packed"}
            return super().words(key, dims) | own
        is_shared = not key.features.num_options and not key.length(_SMALL) and not key.is_deterministic
        is_ragged = key.length(_VERY_RAGGED if is_shared else _RAGGED) and not key.features.has_band
        return super().words(key, dims) | ({"ragged"} if is_ragged else set())

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = self.packed_heads(key)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm90", key)
        packed_heads = self.packed_heads(key)
        # A block fills a multiprocessor, and each split should have a few tiles of keys
        splits = SplitRule(row.owned, 4 * row.streamed, blocks=1)
        if packed_heads > 1:
            splits = SplitRule(row.queries(packed_heads), 2 * row.streamed, "head_tiles", blocks=1)
        has_mask, block_n = key.features.has_bool_mask, row.streamed
        steps = ((mask_bits(block_n),) if has_mask else ()) + (self.step(row, key, layout), combine(key, layout))
        workspaces = (mask_workspaces(block_n) if has_mask else ()) + partial_results(key)
        maps = _maps(row, key.features, layout, packed_heads)
        return Launch(steps, workspaces, splits, maps, in_pairs=("bias",), struct=FwdSm90Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        packed_heads = self.packed_heads(key) if row["packs"] else 1
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row["packs"] else "heads")
        return tile_step(row, key.features, (Factor("num_splits"), *grid), max_blocks=1)


def _maps(row: Row, features: Features, layout: CallLayout, packed_heads: int) -> tuple[MapPatch, ...]:
    boxes = {"q": (GROUP_ROWS // packed_heads, packed_heads), "k": (row.streamed, 1), "v": (row.streamed, 1)}
    if stores_by_tma(row, features):
        boxes["out"] = (_WARP_ROWS, 1)
    head_axis, row_axis = layout.axes
    axes = row_axis, head_axis, -4
    maps = [
        MapPatch(
            getattr(FwdSm90Params, f"{name}_map").offset,
            name,
            axes,
            *box,
            is_paged=features.is_paged and name in ("k", "v"),
            l2_bytes=128 if features.is_paged and name in ("k", "v") else 256,
        )
        for name, box in boxes.items()
    ]
    if "bias" in layout.tensors and packed_heads == 1:
        maps.append(MapPatch(FwdSm90Params.bias_map.offset, "bias", (-2, -3, -4), GROUP_ROWS, is_optional=True))
    return tuple(maps)
