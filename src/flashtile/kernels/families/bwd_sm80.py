"""The backward pass by mma.sync, from Ampere on: include/flashtile/kernels/bwd_sm80.cuh, docs/sm80.md.

Three steps, the first and the last shared with the Hopper family: delta and the zeros of dq_accum, the kernel that owns
keys, and the conversion of dq_accum to dQ. The sums of dQ are added in no fixed order, so a deterministic call is
refused. So is a bias: its loads would spill registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, tile_step
from flashtile.kernels.families.bwd_sm90 import STEP_ROWS, STEP_THREADS
from flashtile.kernels.families.mma_sync import MmaFamily, MmaRow
from flashtile.kernels.families.steps import dsinks, key_grid, plain_step, query_grid
from flashtile.kernels.plan import Operand, Step, Workspace
from flashtile.kernels.source import cpp_type
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey, cpp_bool

_TILE_BYTES = 72 + 4 * 8  # OwnedKeys and the ring of QueryTilePlace (kernels/bwd_sm80.cuh)


class Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_keys: int
    block_queries: int
    num_warps: int
    min_blocks: int  # that should share a multiprocessor
    num_stages: int = 2
    column_warps: int = 1  # that share keys
    max_options: int = 99  # that change scores or probabilities, that it holds without a spill
    takes_dropout: bool = True  # without a spill
    takes_padded: bool = True  # head dims that are not the padded ones
    no_lengths_on: int | None = None  # the arch on which it spills with sequence lengths
    only_arch: int | None = None  # on which it does not spill; None: on all


# By padded head_dim and head_dim_v; the first that fits the GPU and takes a call is chosen: docs/sm80.md.
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(128, 32, 4, 2, max_options=0), Tile(128, 64, 8, 1, no_lengths_on=100), Tile(64, 32, 4, 1)),
    (96, 96): (Tile(128, 64, 8, 1, takes_dropout=False, no_lengths_on=100), Tile(64, 32, 4, 1)),
    (128, 128): (
        Tile(128, 64, 8, 1, column_warps=2, max_options=0, no_lengths_on=90, only_arch=90),
        Tile(128, 64, 8, 1, max_options=0, takes_padded=False),
        Tile(128, 32, 8, 1),
        Tile(64, 32, 4, 1),
    ),
    (256, 256): (
        Tile(64, 64, 8, 1, column_warps=2, max_options=0, takes_padded=False, only_arch=90),
        Tile(64, 32, 8, 1, column_warps=2),
    ),
}


@dataclass(frozen=True)
class BwdSm80Row(MmaRow):
    num_warps: int
    num_stages: int  # of Q and of dO
    column_warps: int  # that share keys
    min_blocks: int
    is_exact: bool  # the head dims are the padded ones

    @property
    def header(self) -> str:
        return "bwd_sm80"

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def config(self) -> str:
        sizes = f"{self.head_dim}, {self.head_dim_v}, {self.block_n}, {self.block_m}"
        counts = (
            f"{self.num_warps}, {self.num_stages}, {self.column_warps}, {self.min_blocks}, {cpp_bool(self.is_exact)}"
        )
        return f"Sm80BwdConfig<{CPP_TYPES[self.dtype]}, {sizes}, {counts}>"

    @property
    def label(self) -> str:
        sharing = f", {self.column_warps} of which share keys" if self.column_warps > 1 else ""
        return f"{self.block_m} keys x {self.block_n} queries, {self.num_warps} warps{sharing}"

    @property
    def shared_bytes(self) -> int:
        dims = self.head_dim + self.head_dim_v
        num_scores = (2 if self.column_warps == 1 else 3) * self.block_m * self.block_n
        tiles = 2 * (dims * (self.block_m + self.num_stages * self.block_n) + num_scores)
        return -(-(tiles + 8 * self.num_stages * self.block_n + _TILE_BYTES) // 128) * 128

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        return {"shared bytes": (f"sizeof(flashtile::BwdSm80Storage<flashtile::{self.config}>)", self.shared_bytes)}


class BwdSm80(MmaFamily[BwdSm80Row]):
    name = "bwd_sm80"
    op = "backward"
    summary = "mma.sync and ldmatrix: float16 from Turing on, bfloat16 from Ampere on"
    kernels = ("bwd_sm80",)
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged", "is_aligned16", "bias_dtype"}
    takes_out_dtypes = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        return "deterministic sums" if reason is None and key.is_deterministic else reason

    def every_row(self, dtype: str) -> Iterator[BwdSm80Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                yield _row(tile, dtype, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm80Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        is_exact = (key.head_dim, key.head_dim_v) == dims
        for tile in _TILES[dims]:
            takes = key.features.num_score_options <= tile.max_options and (is_exact or tile.takes_padded)
            takes = takes and (tile.takes_dropout or not key.features.has_dropout)
            takes = takes and not (key.features.has_lengths and tile.no_lengths_on == key.arch.number)
            if takes and tile.only_arch in (None, key.arch.number):
                yield _row(tile, key.dtype, dims, is_exact)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        row = self.select("bwd_sm80", key)
        steps = [_plain("bwd_sm90_preprocess", row, key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        scratch: tuple[Operand, ...] = ()
        if any(name in key.grads for name in ("dq", "dk", "dv")):
            steps.append(self._step(row, key, layout))
            # The kernel writes both dK and dV
            scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if name not in key.grads)
        if "dq" in key.grads:
            steps.append(_plain("bwd_convert_dq", row, key, layout))
        # Keys outside every sequence have no owner
        zeroed = tuple(name for name in ("dk", "dv") if layout.has_lengths and name in key.grads)
        return Launch(tuple(steps), _workspaces(row), scratch=scratch, zeroed=zeroed)

    def launch_row(self, row: BwdSm80Row, key: PlanKey, layout: CallLayout) -> Launch:
        return Launch((self._step(row, key, layout),), _workspaces(row))

    def _step(self, row: BwdSm80Row, key: PlanKey, layout: CallLayout) -> Step:
        return tile_step(row, key.features, key_grid(layout, row.block_m))


def _row(tile: Tile, dtype: str, dims: tuple[int, int], is_exact: bool = True) -> BwdSm80Row:
    sizes = tile.block_keys, tile.block_queries, tile.num_warps, tile.num_stages, tile.column_warps, tile.min_blocks
    return BwdSm80Row("bwd_sm80", dtype, dtype, *dims, *sizes, is_exact)


def _slabs(head_dim: int) -> int:
    """Of 64 columns."""
    return -(-head_dim // 64)


def _workspaces(row: BwdSm80Row) -> tuple[Workspace, ...]:
    stats = tuple(Workspace(name, 4, ("lse_size",)) for name in ("score_lse", "delta"))
    return (*stats, Workspace("dq_accum", 256 * _slabs(row.head_dim), ("lse_size",)))


def _plain(kernel: str, row: BwdSm80Row, key: PlanKey, layout: CallLayout) -> Step:
    sequences = "flashtile::" + key.features.policies()[3]
    entry = f"{kernel}_kernel<{cpp_type(key.dtype)}, {sequences}, {_slabs(row.head_dim)}>"
    return plain_step("bwd_sm90_steps", entry, query_grid(layout, STEP_ROWS), STEP_THREADS)
