"""The Hopper backward pass by wgmma and TMA: include/flashtile/kernels/bwd_sm90.cuh, docs/sm90-backward.md.

Three steps: delta and the zeros of dq_accum, the kernel that owns keys, and the conversion of dq_accum to dQ. Blocks
add their parts of dQ as they come, in a deterministic call in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.arch import Arch
from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import dsinks, plain_step, query_grid
from flashtile.kernels.params import BwdSm90Params, Struct
from flashtile.kernels.plan import MapPatch, Operand, Step, Workspace
from flashtile.kernels.source import cpp_type
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

# As the constants of kernels/bwd_sm90_steps.cuh; tests/cpu/test_plan.py compares them
STEP_ROWS, STEP_THREADS = 32, 128
_TILE_BYTES = 64 + 8 * 32  # KeyTile and the ring of QueryTileIndex (kernels/bwd_sm90.cuh)


class Tile(NamedTuple):
    block_keys: int
    block_queries: int
    num_stages: int = 3
    num_buffers: int = 2
    num_dq_buffers: int = 2
    max_options: int = 99  # the most options that change scores or probabilities without a spill


# By padded head_dim and head_dim_v. Measured on an NVIDIA H200: docs/sm90-backward.md.
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(128, 128, num_dq_buffers=1, max_options=0), Tile(128, 64)),
    (96, 96): (Tile(128, 64),),
    (128, 128): (Tile(128, 64, max_options=1),),
}


@dataclass(frozen=True)
class BwdSm90Row(Row):
    """A block owns block_n keys; block_m queries stream by, as in the kernel."""

    num_stages: int  # of Q and of dO
    num_buffers: int  # of dS
    num_dq_buffers: int  # 64 x 64 parts of dQ

    @property
    def header(self) -> str:
        return "bwd_sm90"

    @property
    def struct(self) -> Struct:
        return BwdSm90Params

    @property
    def num_threads(self) -> int:
        return 2 * self.block_n + 128

    @property
    def config(self) -> str:
        tile = f"{self.block_m}, {self.block_n}, {self.num_stages}, {self.num_buffers}, {self.num_dq_buffers}"
        return f"Sm90BwdConfig<{CPP_TYPES[self.dtype]}, {self.head_dim}, {self.head_dim_v}, {tile}>"

    @property
    def label(self) -> str:
        return f"{self.block_n} keys x {self.block_m} queries, {self.num_stages} stages"

    @property
    def shared_bytes(self) -> int:
        slabs = _slabs(self.head_dim) + _slabs(self.head_dim_v)
        tiles = 128 * slabs * (self.block_n + self.num_stages * self.block_m)
        tiles += self.num_buffers * 2 * self.block_n * self.block_m + self.num_dq_buffers * 4 * 64 * 64
        stats = 8 * self.num_stages * self.block_m
        barriers = 8 * (2 + 2 * self.num_stages + self.num_buffers + 2 * self.num_dq_buffers)
        return -(-(tiles + stats + barriers + _TILE_BYTES) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        return {"shared bytes": (f"sizeof(flashtile::BwdSm90Storage<flashtile::{self.config}>)", self.shared_bytes)}


class BwdSm90(Family[BwdSm90Row]):
    name = "bwd_sm90"
    op = "backward"
    summary = "wgmma, TMA and warp specialisation, on Hopper"
    kernels = ("bwd_sm90",)
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged", "is_aligned16"}
    grad_sets = (("dq", "dk", "dv", "dsinks"),)

    def refuse_arch(self, arch: Arch) -> str | None:
        return None if arch.has_wgmma else f"{arch.name} has no wgmma"

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is not None:
            return reason
        if key.out_dtype != key.dtype:
            return f"an output in {key.out_dtype}"
        if not key.rows_disjoint:
            return "rows that overlap in memory"
        if key.grads is not None and "dbias" in key.grads:
            return "the gradient of a bias"
        if not any(self.candidates("bwd_sm90", key)):
            dims = self.padded(key.head_dim, key.head_dim_v)
            return f"{key.features.num_score_options} options that change scores at padded head dims {dims}"
        return None

    def every_row(self, dtype: str) -> Iterator[BwdSm90Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dtype, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm90Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        for tile in _TILES[dims]:
            if key.features.num_score_options <= tile.max_options:
                yield _row(tile, key.dtype, dims)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        row = self.select("bwd_sm90", key)
        steps = [_plain("bwd_sm90_preprocess", row, key)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        scratch: tuple[Operand, ...] = ()
        if any(name in key.grads for name in ("dq", "dk", "dv")):
            steps.append(self._step(row, key))
            # The kernel writes both dK and dV
            scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if name not in key.grads)
        if "dq" in key.grads:
            steps.append(_plain("bwd_convert_dq", row, key))
        # Keys outside every sequence have no owner
        zeroed = tuple(name for name in ("dk", "dv") if layout.has_lengths and name in key.grads)
        return Launch(tuple(steps), _workspaces(row, key), None, _maps(row, layout), scratch, zeroed, BwdSm90Params)

    def launch_row(self, row: BwdSm90Row, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key),), _workspaces(row, key), maps=_maps(row, layout), struct=BwdSm90Params)

    def _step(self, row: BwdSm90Row, key: PlanKey) -> Step:
        return tile_step(row, key.features, (("seqlen_k", row.block_n), ("heads_kv", 1), ("batch", 1)))


def _row(tile: Tile, dtype: str, dims: tuple[int, int]) -> BwdSm90Row:
    return BwdSm90Row("bwd_sm90", dtype, dtype, *dims, tile.block_queries, tile.block_keys, *tile[2:5])


def _slabs(head_dim: int) -> int:
    """Of 64 columns."""
    return -(-head_dim // 64)


def _workspaces(row: BwdSm90Row, key: PlanKey) -> tuple[Workspace, ...]:
    names = ("score_lse", "delta", "dq_order") if key.is_deterministic else ("score_lse", "delta")
    stats = tuple(Workspace(name, 4, ("lse_size",)) for name in names)
    return (*stats, Workspace("dq_accum", 256 * _slabs(row.head_dim), ("lse_size",)))


def _plain(kernel: str, row: BwdSm90Row, key: PlanKey) -> Step:
    sequences = "flashtile::" + key.features.policies()[3]
    entry = f"{kernel}_kernel<{cpp_type(key.dtype)}, {sequences}, {_slabs(row.head_dim)}>"
    return plain_step("bwd_sm90_steps", entry, query_grid(STEP_ROWS), STEP_THREADS)


def _maps(row: BwdSm90Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    rows = {"q": row.block_m, "dout": row.block_m, "k": row.block_n, "v": row.block_n}
    return tuple(
        MapPatch(getattr(BwdSm90Params, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in rows.items()
    )
