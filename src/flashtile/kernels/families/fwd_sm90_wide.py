"""The Hopper forward pass for head dims over 256, by wgmma and TMA: include/flashtile/kernels/fwd_sm90_wide.cuh,
docs/sm80.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.params import FwdSm90Params, Struct
from flashtile.kernels.plan import Factor, MapPatch, SplitRule
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

_ROWS, _KEYS, _CLUSTER = 64, 64, 2  # queries of a block, keys of a tile, blocks that share K and V
_QUERY_TILE_BYTES = 72  # QueryTile (attn/work_item.cuh)

# Stages of K and of V by padded head_dim and head_dim_v: what fits
_STAGES: dict[tuple[int, int], tuple[int, int]] = {
    (320, 320): (2, 2),
    (384, 384): (2, 1),
    (448, 448): (1, 1),
    (512, 512): (1, 1),
}


@dataclass(frozen=True)
class Sm90FwdWideRow(Row):
    stages: tuple[int, int]  # of K and of V

    @property
    def header(self) -> str:
        return "fwd_sm90_wide"

    @property
    def struct(self) -> Struct:
        return FwdSm90Params

    @property
    def num_threads(self) -> int:
        return 384

    @property
    def config(self) -> str:
        types = f"{CPP_TYPES[self.dtype]}, {CPP_TYPES[self.out_dtype]}"
        sizes = self.head_dim, self.head_dim_v, *self.stages, _CLUSTER
        return f"Sm90FwdWideConfig<{types}, {', '.join(map(str, sizes))}>"

    @property
    def label(self) -> str:
        return f"{_ROWS} x {_KEYS}, 12 warps, clusters of {_CLUSTER}, {self.stages[0]} and {self.stages[1]} stages"

    @property
    def shared_bytes(self) -> int:
        slabs, slabs_v = self.head_dim // 64, self.head_dim_v // 64
        stages_k, stages_v = self.stages
        tiles = 128 * 64 * (slabs * (1 + stages_k) + slabs_v * stages_v + 2)
        barriers = 8 * (1 + 2 * slabs * stages_k + 4 * stages_v + 4)
        return -(-(tiles + 3 * 4 * 64 + 2 * 4 * 4 + -(-barriers // 16) * 16 + _QUERY_TILE_BYTES) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        storage = f"flashtile::FwdSm90WideStorage<flashtile::{self.config}, {policies[0]}, {policies[3]}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm90Wide(Family[Sm90FwdWideRow]):
    name = "fwd_sm90_wide"
    op = "forward"
    summary = "wgmma, TMA and warp specialisation, on Hopper, for head dims over 256"
    kernels = ("fwd_sm90_wide",)
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_STAGES))
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_overlapping_rows = False
    needs_wgmma = True
    takes_any_scale = False

    def every_row(self, dtype: str) -> Iterator[Sm90FwdWideRow]:
        for dims in _STAGES:
            yield _row(dtype, dtype, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm90FwdWideRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        yield _row(key.dtype, key.out_dtype, dims)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        plain = self.launch_row(self.select("fwd_sm90_wide", key), key, layout)
        # Each split should have a few tiles of keys
        splits = SplitRule(_CLUSTER * _ROWS, 8 * _KEYS, blocks=1)
        return Launch(
            (*plain.steps, combine(key, layout)), partial_results(key), splits, plain.maps, struct=FwdSm90Params
        )

    def launch_row(self, row: Sm90FwdWideRow, key: PlanKey, layout: CallLayout) -> Launch:
        step = tile_step(
            row, key.features, (Factor("num_splits"), *query_grid(layout, _CLUSTER * _ROWS)), cluster=_CLUSTER
        )
        return Launch((step,), maps=_maps(layout), struct=FwdSm90Params)


def _row(dtype: str, out_dtype: str, dims: tuple[int, int]) -> Sm90FwdWideRow:
    return Sm90FwdWideRow("fwd_sm90_wide", dtype, out_dtype, *dims, _ROWS, _KEYS, _STAGES[dims])


def _maps(layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    boxes = {"q": _ROWS, "k": _KEYS, "v": _KEYS}
    return tuple(
        MapPatch(getattr(FwdSm90Params, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in boxes.items()
    )
