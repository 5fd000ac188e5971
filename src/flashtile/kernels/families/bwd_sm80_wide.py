"""The backward pass by mma.sync for wide heads: include/flashtile/kernels/bwd_sm80_wide.cuh and bwd_sm80_dbias.cuh,
docs/sm80.md.

Four kernels, one for each of dQ, dK, dV and dbias. Each gradient has one owner, so results do not depend on timing, and
only wanted gradients are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.fwd_sm80_wide import WideTile
from flashtile.kernels.families.mma_sync import MmaFamily
from flashtile.kernels.families.steps import bias_grid, dsinks, key_grid, preprocess, query_grid
from flashtile.kernels.plan import Step, Workspace
from flashtile.kernels.source import qualified
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

_BLOCK_BYTES = 64  # OwnedRows (attn/owned_rows.cuh)
_TERM_BYTES = 64  # DbiasTerm (kernels/bwd_sm80_dbias.cuh)
_KERNELS = {"bwd_sm80_dq": "dq", "bwd_sm80_dk": "dk", "bwd_sm80_dv": "dv", "bwd_sm80_dbias": "dbias"}
_DBIAS_TILES = WideTile(64, 128, 2, 4, 64, 16, 3), WideTile(64, 64, 2, 4, 64, 16, 3)

# By padded head_dim and head_dim_v; the first that fits the shared memory of the GPU is chosen: docs/sm80.md. Up to 128
# bwd_sm80 is faster; those rows are for what it refuses: a bias, a fixed order of sums, rows aligned to nothing.
_SMALL = WideTile(32, 64, 1, 4, 64, 16, 2)
_NARROW = WideTile(128, 64, 4, 2, 64, 32, 4), WideTile(64, 64, 2, 4, 64, 16, 3), WideTile(64, 64, 2, 4, 64, 16, 2)
_MIDDLE = WideTile(64, 128, 2, 4, 64, 32, 4), WideTile(64, 64, 2, 4, 64, 16, 3), _SMALL
_WIDE = WideTile(64, 128, 2, 4, 64, 16, 5), WideTile(64, 64, 2, 4, 64, 16, 4), _SMALL
_TILES: dict[tuple[int, int], tuple[WideTile, ...]] = {
    (64, 64): _NARROW,
    (128, 128): _NARROW,
    (192, 192): _MIDDLE,
    (256, 256): _MIDDLE,
    (320, 320): _WIDE,
    (384, 384): _WIDE,
    (448, 448): (*_WIDE[:2], WideTile(64, 64, 2, 4, 64, 16, 2), _SMALL),
    (512, 512): (*_WIDE[:2], WideTile(64, 64, 2, 4, 64, 16, 3, 2), WideTile(32, 64, 1, 4, 64, 16, 3, 2)),
}


@dataclass(frozen=True)
class BwdSm80WideRow(Row):
    tile: WideTile

    @property
    def header(self) -> str:
        return "bwd_sm80_dbias" if self.gradient == "dbias" else "bwd_sm80_wide"

    @property
    def num_threads(self) -> int:
        return self.tile.num_threads

    @property
    def gradient(self) -> str:
        return _KERNELS[self.kernel]

    @property
    def config(self) -> str:
        # dbias has the roles of dQ
        name = "Dq" if self.gradient == "dbias" else self.gradient.capitalize()
        gradient = f"flashtile::WideGradient::k{name}"
        tile = qualified(f"flashtile::{self.tile.cpp(self.dtype)}")
        return f"Sm80WideBwdConfig<{CPP_TYPES[self.dtype]}, {gradient}, {self.head_dim}, {self.head_dim_v}, {tile}>"

    @property
    def label(self) -> str:
        owned, streamed = ("queries", "keys") if self.gradient in ("dq", "dbias") else ("keys", "queries")
        warps = f"{self.tile.row_warps} x {self.tile.column_warps} warps"
        return f"{self.block_m} {owned} x {self.block_n} {streamed}, {warps}, {self.tile.num_stages} slabs"

    @property
    def shared_bytes(self) -> int:
        if self.gradient == "dbias":
            slabs = self.tile.num_stages * 128 * (self.block_m + self.block_n)
            return -(-(slabs + 16 * self.block_m + 4 * _TERM_BYTES) // 128) * 128
        has_dp = self.gradient != "dv"
        owned = self.block_m * (self.head_dim + self.block_n) + (self.block_m * self.head_dim_v if has_dp else 64)
        slabs = self.tile.num_stages * self.tile.slab_bytes(self.head_dim if has_dp else self.head_dim_v)
        return -(-(2 * owned + slabs + 16 * max(self.block_m, self.block_n) + _BLOCK_BYTES) // 128) * 128

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        name = "DbiasSm80Storage" if self.gradient == "dbias" else "BwdSm80WideStorage"
        storage = f"flashtile::{name}<flashtile::{self.config}>"
        return {"shared bytes": (f"sizeof({storage})", self.shared_bytes)}


class BwdSm80Wide(MmaFamily[BwdSm80WideRow]):
    name = "bwd_sm80_wide"
    op = "backward"
    summary = "mma.sync, one kernel for each gradient: head dims over 128, and what bwd_sm80 refuses"
    kernels = tuple(_KERNELS)
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))

    def every_row(self, dtype: str) -> Iterator[BwdSm80WideRow]:
        for dims in _TILES:
            for kernel in self.kernels:
                for tile in _tiles(kernel, dims):
                    yield _row(kernel, tile, dtype, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm80WideRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        # Registers: options leave none for tiles of 128, and dQ of the widest heads has none left for a band
        has_options = key.features.num_score_options > 0
        is_full = kernel == "bwd_sm80_dq" and dims[0] > 448 and key.features.has_band
        for tile in _tiles(kernel, dims):
            if tile.block_n < 128 or kernel == "bwd_sm80_dbias" or not (has_options or is_full):
                yield _row(kernel, tile, key.dtype, dims)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [preprocess(key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        for kernel, gradient in _KERNELS.items():
            if gradient in key.grads:
                steps.append(self._step(self.select(kernel, key), key, layout))
        # Keys outside every sequence have no owner
        zeroed = tuple(name for name in ("dk", "dv", "dbias") if layout.has_lengths and name in key.grads)
        return Launch(tuple(steps), _WORKSPACES, zeroed=zeroed)

    def launch_row(self, row: BwdSm80WideRow, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),), _WORKSPACES)

    def _step(self, row: BwdSm80WideRow, key: PlanKey, layout: CallLayout) -> Step:
        if row.gradient == "dbias":
            return tile_step(row, key.features, bias_grid(row.block_m, row.block_n))
        grid = (query_grid if row.gradient == "dq" else key_grid)(layout, row.block_m)
        return tile_step(row, key.features, grid)


_WORKSPACES = (Workspace("score_lse", 4, ("lse_size",)), Workspace("delta", 4, ("lse_size",)))


def _tiles(kernel: str, dims: tuple[int, int]) -> tuple[WideTile, ...]:
    """The tiles of a kernel, the preferred first: dV, which owns less, has room for larger slabs."""
    if kernel == "bwd_sm80_dbias":
        return _DBIAS_TILES
    has_room = kernel == "bwd_sm80_dv" and dims in ((384, 384), (512, 512))
    return (WideTile(64, 128, 2, 4, 128, 32, 4), *_TILES[dims]) if has_room else _TILES[dims]


def _row(kernel: str, tile: WideTile, dtype: str, dims: tuple[int, int]) -> BwdSm80WideRow:
    return BwdSm80WideRow(kernel, dtype, dtype, *dims, tile.block_m, tile.block_n, tile)
