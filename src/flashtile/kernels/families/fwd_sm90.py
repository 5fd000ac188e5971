"""The Hopper forward pass by wgmma and TMA: include/flashtile/kernels/fwd_sm90.cuh, docs/sm90.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import combine, mask_bits, mask_workspaces, partial_results, query_grid
from flashtile.kernels.length_class import PACKED_ROWS, ManyRows, PackedHeads, RaggedQueries, SmallGrid
from flashtile.kernels.params import FwdSm90Params, Struct
from flashtile.kernels.plan import Factor, MapPatch, SplitRule, Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey, cpp_bool

_PACKED_HEADS, _MANY_ROWS = PackedHeads(PACKED_ROWS, 128), ManyRows(PACKED_ROWS)
_RAGGED, _VERY_RAGGED = RaggedQueries(192, 128, 105), RaggedQueries(192, 128, 113)
_SMALL = SmallGrid(128)
_WARP_ROWS = 16  # rows of O that a warp stores
_WARPGROUP_ROWS = 64
_WORK_ITEMS, _QUERY_TILE_BYTES = 3, 72  # WorkItemRing, QueryTile (attn/work_item.cuh)
_MAX_SHARED_BYTES = 227 * 1024  # FwdBiasTiles (kernels/fwd_sm90_options.cuh) has two stages where they fit

_LIGHT = frozenset({"has_bool_mask", "has_alibi", "has_softcap", "is_paged"})  # options that take few registers


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_m: int
    block_n: int
    num_stages: int = 2
    takes_turns: bool = True
    scales_lazily: bool = False
    stores_p: bool = False
    takes_ragged: bool = True  # without a band; under one, larger tiles are mostly faster all the same
    max_options: int = 99  # that change scores or probabilities, that it holds without a spill
    takes_float_bias: bool = True
    takes_options_with_lengths: bool = True  # options together with sequence lengths, without a spill
    alone: frozenset[str] = frozenset()  # options that it holds if there is no other

    def takes(self, features: Features, dtype: str) -> bool:
        """It holds the options of a call without a spill. The softcap of float16 takes more registers."""
        if features.bias_dtype == "float32" and not self.takes_float_bias:
            return False
        if features.has_lengths and features.num_score_options and not self.takes_options_with_lengths:
            return False
        is_light = any(getattr(features, name) for name in self.alone)
        is_light = is_light and (features.is_paged or not features.has_lengths)
        is_light = is_light and not (features.has_softcap and dtype == "float16")
        return features.num_score_options <= self.max_options or (is_light and features.num_score_options == 1)


# By padded head_dim and head_dim_v; the first that takes a call is chosen. Measured on an NVIDIA H200: docs/sm90.md.
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (
        Tile(192, 128, num_stages=4, scales_lazily=True, max_options=0),
        Tile(192, 128, num_stages=4, max_options=0, alone=_LIGHT),
        Tile(128, 128, max_options=3),
        Tile(128, 64),
    ),
    (96, 96): (
        Tile(192, 128, scales_lazily=True, stores_p=True, takes_ragged=False, max_options=0, alone=_LIGHT),
        Tile(128, 128, max_options=3),
        Tile(128, 64),
    ),
    (128, 128): (
        Tile(192, 128, scales_lazily=True, stores_p=True, takes_ragged=False, max_options=0, alone=_LIGHT),
        Tile(128, 128, max_options=3),
        Tile(128, 64),
    ),
    (192, 128): (Tile(128, 128, max_options=2, takes_options_with_lengths=False), Tile(128, 64)),
    (192, 192): (Tile(128, 96, scales_lazily=True, max_options=3), Tile(128, 64)),
    (256, 256): (
        Tile(128, 80, scales_lazily=True, max_options=0),
        Tile(128, 64, max_options=1, takes_float_bias=False, takes_options_with_lengths=False),
        Tile(128, 32),
    ),
}
# Few queries of heads that share a KV head, packed into one tile: what counts is how fast keys arrive.
_PACKED_TILES = {
    (64, 64): Tile(64, 128, num_stages=4, takes_turns=False),
    (96, 96): Tile(64, 128, takes_turns=False),
    (128, 128): Tile(64, 128, takes_turns=False),
    (192, 128): Tile(64, 128, takes_turns=False),
    (192, 192): Tile(64, 96, takes_turns=False),
    (256, 256): Tile(64, 64, takes_turns=False),
}
# More of them than 64 rows, in plain calls
_LARGE_PACKED_TILES = {
    (64, 64): Tile(128, 128, max_options=0),
    (96, 96): Tile(128, 128, max_options=0),
    (128, 128): Tile(128, 128, max_options=0),
    (192, 128): Tile(128, 128, max_options=0),
    (192, 192): Tile(128, 96, scales_lazily=True, max_options=0),
    (256, 256): Tile(128, 80, scales_lazily=True, max_options=0),
}


@dataclass(frozen=True)
class Sm90Row(Row):
    num_stages: int  # of K and of V
    takes_turns: bool  # warpgroups alternate between products and softmax
    scales_lazily: bool
    stores_p: bool = False  # in shared memory, not in registers
    packs_heads: bool = False
    has_bool_mask: bool = False
    bias_bytes: int = 0  # of an element

    @property
    def header(self) -> str:
        return "fwd_sm90"

    @property
    def struct(self) -> Struct:
        return FwdSm90Params

    @property
    def num_threads(self) -> int:
        return 2 * self.block_m + 128

    def queries(self, packed_heads: int) -> int:
        """Queries of a tile that holds so many heads."""
        return self.block_m // _WARPGROUP_ROWS * (_WARPGROUP_ROWS // packed_heads)

    def stores_by_tma(self, features: Features) -> bool:
        """O is stored by TMA, and the parameters hold a map of it."""
        return self.stores_p and not features.has_lengths and self.out_dtype == self.dtype

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_m}, {self.block_n}, {self.num_stages}"
        flags = ", ".join(map(cpp_bool, (self.takes_turns, self.scales_lazily, self.stores_p, self.packs_heads)))
        return f"Sm90Config<{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}, {sizes}, {flags}>"

    @property
    def label(self) -> str:
        words = [f"{self.block_m} x {self.block_n}, {self.num_threads // 32} warps"]
        words += [] if self.num_stages == 2 else [f"{self.num_stages} stages"]
        words += [] if self.takes_turns else ["no turns"]
        words += ["lazy"] if self.scales_lazily else []
        words += ["P in shared memory"] if self.stores_p else []
        words += ["heads packed"] if self.packs_heads else []
        return ", ".join(words)

    @property
    def shared_bytes(self) -> int:
        slabs, slabs_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        tiles = 128 * (slabs * self.block_m + self.num_stages * self.block_n * (slabs + slabs_v))
        consumers = self.block_m // _WARPGROUP_ROWS
        tiles += 128 * self.block_m * -(-self.block_n // 64) if self.stores_p else 16 * self.block_m // 64
        barriers, scheduler = 16 * consumers + 32 * self.num_stages, 16
        window = -(-(4 * consumers + 60) // 8) * 8 if self.has_bool_mask else 0  # MaskWindow
        items = _WORK_ITEMS * (window + _QUERY_TILE_BYTES + -(-(12 * consumers + 8) // 8) * 8)
        end = tiles + barriers + scheduler + items
        if self.bias_bytes:
            end = -(-end // 1024) * 1024
            bias_tile = 128 * _WARPGROUP_ROWS * -(-self.block_n * self.bias_bytes // 128)
            num_stages = 2 if 1024 + tiles + 2 * consumers * bias_tile <= _MAX_SHARED_BYTES else 1
            end += num_stages * consumers * (bias_tile + 32)
        return -(-end // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        config = "flashtile::" + self.config
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        mask, score_mod, lengths = policies[0], policies[1], policies[3]
        kernel = f"flashtile::FwdSm90<{config}, {', '.join(policies[:5])}>"
        return {
            "shared bytes": (
                f"sizeof(flashtile::FwdSm90Storage<{config}, {mask}, {score_mod}, {lengths}>)",
                self.shared_bytes,
            ),
            "map of the output": (f"{kernel}::kStoresByTma", self.stores_by_tma(features)),
        }


class FwdSm90(Family[Sm90Row]):
    name = "fwd_sm90"
    op = "forward"
    summary = "wgmma, TMA and warp specialisation, on Hopper"
    kernels = ("fwd_sm90",)
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_aligned16"}
    takes_overlapping_rows = False
    length_classes = (_PACKED_HEADS, _MANY_ROWS, _RAGGED, _VERY_RAGGED, _SMALL)
    needs_wgmma = True
    takes_any_scale = False

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_more(key)

    def _refuse_more(self, key: PlanKey) -> str | None:
        features = key.features
        if features.is_paged and (features.has_bool_mask or features.bias_dtype is not None):
            return "a boolean mask or a bias with paged keys"
        return None

    def packed_heads(self, key: PlanKey) -> int:
        """How many heads share a tile. Heads that share memory cannot be packed: a TMA box has no stride of 0."""
        return key.length(_PACKED_HEADS) if key.heads_disjoint else 1

    def every_row(self, dtype: str) -> Iterator[Sm90Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dtype, dtype, dims)
            for tile in (_LARGE_PACKED_TILES[dims], _PACKED_TILES[dims]):
                yield _row(tile, dtype, dtype, dims, packs_heads=True)

    def tile_note(self, key: PlanKey) -> str:
        packed_heads = self.packed_heads(key)
        return f", the queries of {packed_heads} heads of a KV head in one tile" if packed_heads > 1 else ""

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm90Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_packed = self.packed_heads(key) > 1
        for tile in _packed_tiles(dims, key) if is_packed else _tiles(dims, key):
            if tile.takes(key.features, key.dtype):
                yield _with_options(_row(tile, key.dtype, key.out_dtype, dims, is_packed), key.features)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm90", key)
        plain, packed_heads = self.launch_row(row, key, layout), self.packed_heads(key)
        # A block fills a multiprocessor, and each split should have a few tiles of keys
        splits = SplitRule(row.block_m, 4 * row.block_n, blocks=1)
        if packed_heads > 1:
            splits = SplitRule(row.queries(packed_heads), 2 * row.block_n, "head_tiles", blocks=1)
        workspaces = (*plain.workspaces, *partial_results(key))
        steps = *plain.steps, combine(key, layout)
        return Launch(steps, workspaces, splits, plain.maps, in_pairs=("bias",), struct=FwdSm90Params)

    def launch_row(self, row: Sm90Row, key: PlanKey, layout: CallLayout) -> Launch:
        packed_heads = self.packed_heads(key) if row.packs_heads else 1
        maps = _maps(row, key.features, layout, packed_heads)
        step = self._step(_with_options(row, key.features), key, layout, packed_heads)
        if not key.features.has_bool_mask:
            return Launch((step,), maps=maps, struct=FwdSm90Params)
        return Launch((mask_bits(row.block_n), step), mask_workspaces(row.block_n), maps=maps, struct=FwdSm90Params)

    def _step(self, row: Sm90Row, key: PlanKey, layout: CallLayout, packed_heads: int) -> Step:
        grid = query_grid(layout, row.queries(packed_heads), "head_tiles" if row.packs_heads else "heads")
        return tile_step(row, key.features, (Factor("num_splits"), *grid), max_blocks=1)


def _tiles(dims: tuple[int, int], key: PlanKey) -> list[Tile]:
    """The tiles in order of preference: where a tile would have many rows without a query, it comes last. In plain
    calls with more than one tile for each block, blocks share such tiles evenly (kRotates). A deterministic call must
    not depend on their number."""
    is_shared = not key.features.num_options and not key.length(_SMALL) and not key.is_deterministic
    is_ragged = key.length(_VERY_RAGGED if is_shared else _RAGGED) and not key.features.has_band
    return sorted(_TILES[dims], key=lambda tile: bool(is_ragged and not tile.takes_ragged))


def _packed_tiles(dims: tuple[int, int], key: PlanKey) -> list[Tile]:
    large = [_LARGE_PACKED_TILES[dims]] if key.length(_MANY_ROWS) and not key.length(_SMALL) else []
    return [*large, _PACKED_TILES[dims]]


def _row(tile: Tile, dtype: str, out_dtype: str, dims: tuple[int, int], packs_heads: bool = False) -> Sm90Row:
    flags = tile.takes_turns, tile.scales_lazily, tile.stores_p, packs_heads
    sizes = tile.block_m, tile.block_n, tile.num_stages
    return Sm90Row("fwd_sm90", dtype, out_dtype, *dims, *sizes, *flags)


def _with_options(row: Sm90Row, features: Features) -> Sm90Row:
    """The row with the shared memory that the options take."""
    bias_bytes = {None: 0, "float32": 4}.get(features.bias_dtype, 2)
    return replace(row, has_bool_mask=features.has_bool_mask, bias_bytes=bias_bytes)


def _maps(row: Sm90Row, features: Features, layout: CallLayout, packed_heads: int) -> tuple[MapPatch, ...]:
    boxes = {"q": (_WARPGROUP_ROWS // packed_heads, packed_heads), "k": (row.block_n, 1), "v": (row.block_n, 1)}
    if row.stores_by_tma(features):
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
        maps.append(MapPatch(FwdSm90Params.bias_map.offset, "bias", (-2, -3, -4), _WARPGROUP_ROWS, is_optional=True))
    return tuple(maps)
