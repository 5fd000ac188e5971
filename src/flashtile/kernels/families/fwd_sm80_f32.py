"""The float32 forward by mma.sync, three TF32 products for each: include/flashtile/kernels/fwd_sm80_f32.cuh,
docs/float32.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.fwd_sm80 import QUERY_TILE_BYTES
from flashtile.kernels.families.mma_sync import MmaRow, refuse_slow_tf32, small_call
from flashtile.kernels.families.steps import combine, partial_results, query_grid
from flashtile.kernels.length_class import FewQueries
from flashtile.kernels.plan import Factor, SplitRule, Step
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CallLayout, Features, PlanKey, cpp_bool

_FEW = FewQueries(64, 1)


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_m: int
    block_n: int
    num_warps: int
    min_blocks: int  # that should share a multiprocessor
    num_stages: int = 2
    max_options: int = 99  # that change scores or probabilities, that it holds without a spill
    takes_bias: bool = True  # without a spill
    takes_unaligned: bool = True  # without a spill


# By padded head_dim and head_dim_v; the first that fits the GPU and takes a call is chosen
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (32, 32): (Tile(64, 32, 4, 2),),
    (64, 64): (Tile(128, 32, 4, 2, max_options=0, takes_unaligned=False), Tile(64, 32, 4, 2)),
    (128, 128): (Tile(128, 32, 8, 1, takes_bias=False), Tile(128, 16, 8, 1)),
}


@dataclass(frozen=True)
class Sm80F32Row(MmaRow):
    num_warps: int
    num_stages: int  # of K and of V
    min_blocks: int  # that should share a multiprocessor
    is_scale_positive: bool
    is_exact: bool  # the head dims are the padded ones

    @property
    def header(self) -> str:
        return "fwd_sm80_f32"

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_m}, {self.block_n}"
        counts = f"{self.num_warps}, {self.num_stages}, {self.min_blocks}"
        return f"Sm80F32Config<{sizes}, {counts}, {cpp_bool(self.is_scale_positive)}, {cpp_bool(self.is_exact)}>"

    @property
    def label(self) -> str:
        blocks = f", {self.min_blocks} blocks" if self.min_blocks > 1 else ""
        return f"{self.block_m} x {self.block_n}, {self.num_warps} warps{blocks}"

    @property
    def shared_bytes(self) -> int:
        keys = self.num_stages * self.block_n * (self.head_dim + self.head_dim_v)
        return -(-(4 * (self.block_m * self.head_dim + keys) + QUERY_TILE_BYTES) // 128) * 128

    def spills(self, arch: Arch) -> bool:
        """Four bytes on sm_90 by NVRTC 13.4, none by 13.0; four to eight on sm_80."""
        return arch.number in (80, 90) and (self.head_dim, self.block_m) == (64, 128)

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = [qualified(f"flashtile::{policy}") for policy in features.policies()]
        storage = f"flashtile::FwdSm80Storage<flashtile::{self.config}, {policies[0]}, {policies[3]}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class FwdSm80F32(Family[Sm80F32Row]):
    name = "fwd_sm80_f32"
    op = "forward"
    summary = "float32 by mma.sync, three TF32 products for each, on sm_80, sm_90 and sm_100"
    kernels = ("fwd_sm80_f32",)
    dtypes = ("float32",)
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged"}
    length_classes = (_FEW,)
    takes_out_dtypes = False

    def refuse_arch(self, arch: Arch) -> str | None:
        return refuse_slow_tf32(arch)

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is None and key.length(_FEW):
            reason = f"at most {_FEW.tile_rows} queries: most rows of its tiles would be empty"
        return reason

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key)

    def every_row(self, dtype: str) -> Iterator[Sm80F32Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[Sm80F32Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        num_options = key.features.num_score_options + (not key.is_scale_positive)
        for tile in _TILES[dims]:
            takes_bias = tile.takes_bias or key.features.bias_dtype is None
            takes_rows = tile.takes_unaligned or key.features.is_aligned16
            if num_options <= tile.max_options and takes_bias and takes_rows:
                yield _row(tile, dims, key.is_scale_positive, (key.head_dim, key.head_dim_v) == dims)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        row = self.select("fwd_sm80_f32", key)
        splits = SplitRule(row.block_m, 4 * row.block_n, "heads", row.min_blocks)
        return Launch((self._step(row, key, layout), combine(key, layout)), partial_results(key), splits)

    def launch_row(self, row: Sm80F32Row, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),))

    def _step(self, row: Sm80F32Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, (Factor("num_splits"), *query_grid(layout, row.block_m)))


def _row(tile: Tile, dims: tuple[int, int], is_scale_positive: bool = True, is_exact: bool = True) -> Sm80F32Row:
    sizes = tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, tile.min_blocks
    return Sm80F32Row("fwd_sm80_f32", "float32", "float32", *dims, *sizes, is_scale_positive, is_exact)
