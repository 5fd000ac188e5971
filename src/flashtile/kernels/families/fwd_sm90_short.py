"""The Hopper forward pass for short sequences: include/flashtile/kernels/fwd_sm90_short.cuh, docs/sm90.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import query_grid
from flashtile.kernels.length_class import PACKED_ROWS, KeySteps, PackedHeads, SmallGrid
from flashtile.kernels.params import FwdSm90ShortParams, Struct
from flashtile.kernels.plan import Factor, MapPatch, Step, Workspace
from flashtile.kernels.source import plain_unit
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey, cpp_bool

_ROWS = 64  # queries of an item
_SINGLE_KEYS = 208  # of one tile at most
_KEYS = KeySteps(_SINGLE_KEYS, 512, 1024)
_SOME, _MANY = 254, 255  # its values for several key tiles
_PACKED_HEADS = PackedHeads(PACKED_ROWS, 128)
_SMALL = SmallGrid(128)  # fewer than two items for a block


class Tile(NamedTuple):
    block_n: int
    num_consumers: int
    num_stages: int  # of K and V together
    num_query_stages: int


# For sequences of several key tiles, by padded head_dim and head_dim_v
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (32, 32): (Tile(128, 3, 6, 3),),
    (64, 64): (Tile(128, 3, 6, 3),),
    (128, 128): (Tile(64, 3, 5, 3),),
}
_SINGLE_DIM = 64  # the largest whose scores fit one tile


def _single_tile(num_steps: int) -> Tile:
    """The tile that holds all keys of a sequence: 16 * num_steps of them."""
    block_n = max(16 * num_steps, 64)
    num_consumers = 4 if block_n <= 64 else 3
    num_stages = min(8, 172 * 1024 // (256 * block_n))
    return Tile(block_n, num_consumers, num_stages, 2 * num_consumers)


@dataclass(frozen=True)
class Sm90ShortRow(Row):
    num_consumers: int
    num_stages: int  # of K and V together
    num_query_stages: int
    is_single: bool  # one tile holds all keys of a sequence

    @property
    def header(self) -> str:
        return "fwd_sm90_short"

    @property
    def struct(self) -> Struct:
        return FwdSm90ShortParams

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)

    @property
    def config(self) -> str:
        types = f"{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}"
        sizes = self.head_dim, self.head_dim_v, self.block_n, self.num_consumers, self.num_stages, self.num_query_stages
        return f"Sm90ShortConfig<{types}, {', '.join(map(str, sizes))}, {cpp_bool(self.is_single)}>"

    @property
    def label(self) -> str:
        stages = f"{self.num_stages} stages of keys, {self.num_query_stages} of queries"
        return f"{_ROWS} x {self.block_n}, {self.num_threads // 32} warps, {stages}"

    @property
    def shared_bytes(self) -> int:
        slabs, slabs_v = -(-self.head_dim // 64), -(-self.head_dim_v // 64)
        tiles = 128 * (slabs * _ROWS * self.num_query_stages + (slabs + slabs_v) * self.block_n * self.num_stages)
        return -(-(tiles + 16 * (self.num_stages + self.num_query_stages)) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        storage = f"flashtile::FwdSm90ShortStorage<flashtile::{self.config}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm90Short(Family[Sm90ShortRow]):
    name = "fwd_sm90_short"
    op = "forward"
    summary = "the Hopper forward for short sequences: at most 1024 keys, which stay in shared memory for all queries"
    kernels = ("fwd_sm90_short",)
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(_TILES)
    features = frozenset({"has_band", "bias_dtype"})
    takes_out_dtypes = False
    takes_overlapping_rows = False
    length_classes = (_KEYS, _PACKED_HEADS, _SMALL)
    needs_wgmma = True
    takes_any_scale = False

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_more(key)

    def _refuse_more(self, key: PlanKey) -> str | None:
        if key.length(_KEYS) == 0:
            return f"over {_KEYS.most} keys"
        if key.features.bias_dtype == "float32":
            return "a bias in float32"
        if key.features.bias_dtype is not None and not _is_single(key):
            return f"a bias with a causal mask, a window or over {_SINGLE_KEYS} keys"
        return None

    def timed_as(self, key: PlanKey) -> str:
        """The forward family, where it was measured to be faster (docs/sm90.md). Few queries of heads that share a KV
        head belong into one tile, and few items leave consumers idle. A deterministic call takes another family: the
        number of items depends on the batch, and its bits must not."""
        is_small = bool(key.length(_SMALL)) or key.length(_PACKED_HEADS) > 1
        return "fwd_sm90" if _is_faster(key) and not is_small and not key.is_deterministic else self.name

    def every_row(self, dtype: str) -> Iterator[Sm90ShortRow]:
        for dims in self.head_dims:
            for num_steps in range(_ROWS // 16, _SINGLE_KEYS // 16 + 1) if max(dims) <= _SINGLE_DIM else ():
                yield _row(_single_tile(num_steps), dtype, dims, is_single=True)
            for tile in _TILES[dims]:
                yield _row(tile, dtype, dims, is_single=False)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm90ShortRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        if _is_single(key):
            yield _row(_single_tile(key.length(_KEYS)), key.dtype, dims, is_single=True)
            return
        for tile in _TILES[dims]:
            yield _row(tile, key.dtype, dims, is_single=False)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        return self.launch_row(self.select("fwd_sm90_short", key), key, layout)

    def launch_row(self, row: Sm90ShortRow, key: PlanKey, layout: CallLayout) -> Launch:
        step = tile_step(row, key.features, query_grid(layout, _ROWS), max_blocks=1)
        maps = _maps(row, layout)
        if key.features.bias_dtype is None:
            return Launch((step,), maps=maps, struct=FwdSm90ShortParams)
        num_steps = row.block_n // 16
        planes = "bias_heads", "bias_batch"
        workspace = Workspace("bias_fragments", 2048 * num_steps, planes, quotients=(("seqlen_q", _ROWS),))
        before = _bias_step(key.features.bias_dtype, num_steps)
        return Launch((before, step), (workspace,), maps=maps, struct=FwdSm90ShortParams)


def _is_faster(key: PlanKey) -> bool:
    """Measured to be faster than fwd_sm90: one tile; d 64 at S 512, and at S 1024 causal; d 128 at S 512, causal."""
    head_dim = max(key.head_dim, key.head_dim_v)
    if _is_single(key) or key.length(_KEYS) not in (_SOME, _MANY):
        return _is_single(key)
    is_banded, has_some = key.features.has_band, key.length(_KEYS) == _SOME
    is_wide = key.head_dim == key.head_dim_v == 128
    return (32 < head_dim <= 64 and (is_banded or has_some)) or (is_wide and is_banded and has_some)


def _bias_step(bias_dtype: str, num_steps: int) -> Step:
    """Reorders the bias."""
    entry = f"flashtile::bias_fragments_kernel<flashtile::{CPP_TYPES[bias_dtype]}, {num_steps}>"
    grid = Factor("seqlen_q", _ROWS), Factor("bias_heads"), Factor("bias_batch")
    return Step(plain_unit("bias_fragments", entry, FwdSm90ShortParams), entry, grid, 1, 1, 128, 0)


def _is_single(key: PlanKey) -> bool:
    """One tile holds all keys of a sequence. Under a band several tiles are faster: most are half empty."""
    is_narrow = max(key.head_dim, key.head_dim_v) <= _SINGLE_DIM
    return is_narrow and key.length(_KEYS) not in (0, _SOME, _MANY) and not key.features.has_band


def _row(tile: Tile, dtype: str, dims: tuple[int, int], is_single: bool) -> Sm90ShortRow:
    sizes = tile.num_consumers, tile.num_stages, tile.num_query_stages
    return Sm90ShortRow("fwd_sm90_short", dtype, dtype, *dims, _ROWS, tile.block_n, *sizes, is_single)


def _maps(row: Sm90ShortRow, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    boxes = {"q": _ROWS, "k": row.block_n, "v": row.block_n}
    return tuple(
        MapPatch(getattr(FwdSm90ShortParams, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in boxes.items()
    )
