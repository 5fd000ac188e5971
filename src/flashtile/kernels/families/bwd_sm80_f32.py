"""The float32 backward by mma.sync, three TF32 products for each: include/flashtile/kernels/bwd_sm80_f32.cuh,
docs/sm80.md.

A preprocess step, then one kernel for dK and dV and one for dQ, each launched where its result is wanted. Every result
has one owner, so all of it is deterministic. The gradient of a bias is that of bwd_simt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.bwd_simt import dbias
from flashtile.kernels.families.mma_sync import MmaRow, refuse_slow_tf32, small_call
from flashtile.kernels.families.steps import ROW_STATS, dsinks, key_grid, preprocess, query_grid
from flashtile.kernels.plan import Operand, Step
from flashtile.kernels.spec import CallLayout, Features, PlanKey, cpp_bool

_BLOCK_BYTES = 64  # OwnedRows (attn/owned_rows.cuh)


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_rows: int  # that a block owns
    stream_rows: int
    num_warps: int
    min_blocks: int  # that should share a multiprocessor
    num_stages: int = 2
    max_options: int = 99  # that change scores or probabilities, that it holds without a spill


# By padded head_dim and head_dim_v; the first that fits the GPU and takes a call is chosen: docs/sm80.md
_TILES: dict[str, dict[tuple[int, int], tuple[Tile, ...]]] = {
    "bwd_sm80_f32_dkdv": {
        (32, 32): (Tile(128, 32, 4, 2, max_options=0), Tile(64, 32, 4, 2)),
        (64, 64): (Tile(128, 16, 4, 2, max_options=0), Tile(64, 32, 4, 2)),
        (128, 128): (Tile(128, 32, 8, 1, max_options=1), Tile(128, 16, 8, 1)),
    },
    "bwd_sm80_f32_dq": {
        (32, 32): (Tile(128, 32, 4, 2, max_options=0), Tile(64, 32, 4, 2)),
        (64, 64): (Tile(128, 32, 4, 2, max_options=0), Tile(64, 32, 4, 2)),
        (128, 128): (Tile(128, 32, 8, 1), Tile(128, 16, 8, 1)),
    },
}


@dataclass(frozen=True)
class BwdSm80F32Row(MmaRow):
    num_warps: int
    num_stages: int  # of streamed tiles
    min_blocks: int
    is_exact: bool  # the head dims are the padded ones

    @property
    def header(self) -> str:
        return "bwd_sm80_f32"

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def is_dq(self) -> bool:
        return self.kernel == "bwd_sm80_f32_dq"

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_m}, {self.block_n}"
        counts = f"{self.num_warps}, {self.num_stages}, {self.min_blocks}"
        return f"Sm80F32BwdConfig<{sizes}, {counts}, {cpp_bool(self.is_dq)}, {cpp_bool(self.is_exact)}>"

    @property
    def label(self) -> str:
        owned, streamed = ("queries", "keys") if self.is_dq else ("keys", "queries")
        blocks = f", {self.min_blocks} blocks" if self.min_blocks > 1 else ""
        return f"{self.block_m} {owned} x {self.block_n} {streamed}, {self.num_warps} warps{blocks}"

    @property
    def shared_bytes(self) -> int:
        rows = self.block_m + self.num_stages * self.block_n
        stats = 8 * (self.block_m if self.is_dq else self.num_stages * self.block_n)
        return -(-(4 * rows * (self.head_dim + self.head_dim_v) + stats + _BLOCK_BYTES) // 128) * 128

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        return {"shared bytes": (f"sizeof(flashtile::BwdSm80F32Storage<flashtile::{self.config}>)", self.shared_bytes)}


class BwdSm80F32(Family[BwdSm80F32Row]):
    name = "bwd_sm80_f32"
    op = "backward"
    summary = "float32 by mma.sync, three TF32 products for each, on sm_80, sm_90 and sm_100"
    kernels = tuple(_TILES)
    dtypes = ("float32",)
    head_dims = tuple(sorted(_TILES["bwd_sm80_f32_dq"]))
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)

    def refuse_arch(self, arch: Arch) -> str | None:
        return refuse_slow_tf32(arch)

    def drawback(self, key: PlanKey) -> str | None:
        return small_call(key)

    def every_row(self, dtype: str) -> Iterator[BwdSm80F32Row]:
        for kernel, by_dims in _TILES.items():
            for dims, tiles in by_dims.items():
                for tile in tiles:
                    yield _row(kernel, tile, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm80F32Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_exact = (key.head_dim, key.head_dim_v) == dims
        for tile in _TILES[kernel][dims]:
            if key.features.num_score_options <= tile.max_options:
                yield _row(kernel, tile, dims, is_exact)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        has_keys = "dk" in key.grads or "dv" in key.grads
        if has_keys:
            steps.append(self._step(self.select("bwd_sm80_f32_dkdv", key), key, layout))
        if "dq" in key.grads:
            steps.append(self._step(self.select("bwd_sm80_f32_dq", key), key, layout))
        if "dbias" in key.grads:
            steps.append(dbias(key, layout))
        # One kernel writes both dK and dV
        scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if has_keys and name not in key.grads)
        # Keys outside every sequence have no owner, and neither have the scores there
        unowned = ("dk", "dv", "dbias") if layout.has_lengths else ("dbias",)
        zeroed = tuple(name for name in unowned if name in key.grads)
        return Launch(tuple(steps), ROW_STATS, scratch=scratch, zeroed=zeroed)

    def launch_row(self, row: BwdSm80F32Row, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),), ROW_STATS)

    def _step(self, row: BwdSm80F32Row, key: PlanKey, layout: CallLayout) -> Step:
        grid = (query_grid if row.is_dq else key_grid)(layout, row.block_m)
        return tile_step(row, key.features, grid)


def _row(kernel: str, tile: Tile, dims: tuple[int, int], is_exact: bool = True) -> BwdSm80F32Row:
    sizes = tile.block_rows, tile.stream_rows, tile.num_warps, tile.num_stages, tile.min_blocks
    return BwdSm80F32Row(kernel, "float32", "float32", *dims, *sizes, is_exact)
