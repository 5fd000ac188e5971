"""Few queries on Hopper: decode_sm90.cuh, docs/decode.md."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from flashtile.families.base import Family, Launch, tile_step
from flashtile.families.steps import query_grid
from flashtile.families.tiles import Kernel, Row
from flashtile.plans.length_class import PACKED_ROWS, FewQueries, ManyKeyTiles, ShortLengths
from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, MapPatch, SplitRule, Step, Workspace
from flashtile.plans.spec import CallLayout, Features, PlanKey

_FEW = FewQueries(PACKED_ROWS, 1)
_ONE = ShortLengths(1, 2**31 - 1)  # one query
_FASTEST, _SHORT = FewQueries(16, 1, is_one_head_tile=True), ShortLengths(16, 4095)  # at most 16 rows; and few keys
_MANY = ManyKeyTiles(PACKED_ROWS, 64, 7 << 28)  # more units than schedule.cuh numbers (kMaxUnits)
_ITEM_RING_BYTES = 288  # WorkItemRing<DecodeItem> (schedule.cuh)
_ANY_SPLITS = 1 << 20  # blocks that each multiprocessor could have: the kernel deals out the keys itself


class DecodeSm90Params(ctypes.Structure):
    """Parameters of decode_sm90_kernel."""

    _fields_ = [
        ("base", Params),
        ("_padding", ctypes.c_char * (-ctypes.sizeof(Params) % 64)),
        *((f"{name}_map", ctypes.c_uint64 * 16) for name in ("q", "k", "v")),
        ("part_flags", ctypes.c_void_p),
        ("_end", ctypes.c_char * 56),
    ]


def _shared_bytes(row: Row) -> int:
    slabs, slabs_v, stages = -(-row.head_dim // 64), -(-row.head_dim_v // 64), row["stages"]
    tiles = 128 * (slabs * row.owned + stages * row.streamed * (slabs + slabs_v))
    barriers, stats = 16 + 32 * stages, 8 * row.owned
    return -(-(tiles + barriers + _ITEM_RING_BYTES + stats) // 1024) * 1024


class DecodeSm90(Family):
    name = "decode_sm90"
    op = "forward"
    summary = "few queries on Hopper: keys dealt out evenly over the multiprocessors, joined in one launch"
    kernel_types = (
        Kernel(
            "decode_sm90",
            "decode_sm90/decode_sm90",
            "Sm90DecodeConfig<{dtype}, {out_dtype}, {d}, {d_v}, {streamed}, {knobs}>",
            "DecodeSm90Storage<{config}>",
            _shared_bytes,
            knobs=("stages", "blocks", "few_units"),  # with fewer key tiles a multiprocessor gets one block
            struct=DecodeSm90Params,
        ),
    )
    features = Family.features - {"is_aligned16", "has_bool_mask", "bias_dtype", "has_dropout"}
    takes_overlapping_rows = False
    length_classes = (_FEW, _ONE, _FASTEST, _SHORT, _MANY)
    needs_wgmma = True
    takes_any_scale = False

    misread_by: ClassVar = {"racecheck": "decode_sm90_", "synccheck": "decode_sm90_"}
    flags_workspace = "partial_stats"  # Parts (decode_sm90.cuh)
    few_queries = 5
    # Few queries over caches that several blocks share
    fault_needs: ClassVar = {
        "tail": {"kind": "padded", "batch": 3, "seqlen_q": 1},
        "weight": {"batch": 2, "seqlen_q": 1, "seqlen_k": 3000},
        "unit": {"batch": 2, "seqlen_q": 1, "seqlen_k": 3000},
    }

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and not key.length(_FEW):
            return f"more queries than fit a tile of {PACKED_ROWS} rows with the heads that share a KV head"
        if reason is None and key.length(_FEW) > 1 and not key.heads_disjoint:
            return "heads of q that share memory: a TMA box has no stride of 0"
        if reason is None and key.length(_MANY) and not key.features.has_lengths:
            return "more key tiles than it numbers in 32 bits"
        return reason

    def timed_as(self, key: PlanKey) -> str:
        """Returns the forward family for calls at which this one was faster wherever measured: one query, and up to 16
        rows over 4096 keys (docs/decode.md)."""
        is_fastest = key.length(_ONE) or (key.length(_FASTEST) and not key.length(_SHORT))
        return "fwd_sm90" if is_fastest else self.name

    def tile_note(self, key: PlanKey) -> str:
        num_heads = key.length(_FEW)
        return f", the queries of {num_heads} heads of a KV head in one tile" if num_heads > 1 else ""

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("decode_sm90", key)
        num_heads = max(key.length(_FEW), 1)
        # Keys may be split unless the caller forbids it; the kernel finds out where
        splits = SplitRule(PACKED_ROWS // num_heads, row.streamed, "head_tiles", blocks=_ANY_SPLITS)
        blocks = ("num_multiprocessors",)
        workspaces = (
            Workspace("partial_out", 4 * key.head_dim_v * PACKED_ROWS * row["blocks"], blocks),
            Workspace("partial_stats", 8 * PACKED_ROWS * row["blocks"], blocks),
            Workspace("part_flags", 4 * row["blocks"], blocks, is_kept=True),
        )
        maps = _maps(row, key.features, layout, num_heads)
        return Launch((self.step(row, key, layout),), workspaces, splits, maps, struct=DecodeSm90Params)

    def step(self, row: Row, key: PlanKey, layout: CallLayout) -> Step:
        num_heads = max(key.length(_FEW), 1)
        grid = (Factor("num_splits"), *query_grid(layout, PACKED_ROWS // num_heads, "head_tiles"))
        return tile_step(row, key.features, grid, max_blocks=row["blocks"], starts_early=True)


def _maps(row: Row, features: Features, layout: CallLayout, num_heads: int) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    axes, params = (row_axis, head_axis, -4), DecodeSm90Params
    return (
        MapPatch(params.q_map.offset, "q", axes, PACKED_ROWS // num_heads, num_heads),
        # With 256 bytes, two slabs, both slabs of a row miss: 5 % slower than with 128 (B 64, S 4096, NVIDIA H200)
        MapPatch(params.k_map.offset, "k", axes, row.streamed, is_paged=features.is_paged, l2_bytes=128),
        MapPatch(params.v_map.offset, "v", axes, row.streamed, is_paged=features.is_paged, l2_bytes=128),
    )
