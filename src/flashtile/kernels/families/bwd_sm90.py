"""The Hopper backward pass by wgmma and TMA: include/flashtile/kernels/bwd_sm90.cuh, docs/sm90-backward.md.

Three steps: delta and the zeros of dq_accum, the kernel that owns keys, and the conversion of dq_accum to dQ. Blocks
add their parts of dQ as they come, in a deterministic call in a fixed order. The gradient of a bias has a kernel of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.steps import (
    bias_grid,
    dsinks,
    key_grid,
    mask_bits,
    mask_workspaces,
    plain_step,
    query_grid,
)
from flashtile.kernels.params import BwdSm90Params, Struct
from flashtile.kernels.plan import MapPatch, Operand, Step, Workspace
from flashtile.kernels.source import cpp_type
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

# As the constants of kernels/bwd_sm90_steps.cuh; tests/cpu/test_plan.py compares them
STEP_ROWS, STEP_THREADS = 32, 128
MASK_TILE = 128  # kMaskTile of attn/mask_bits.cuh
_TILE_BYTES = 64 + 8 * 32  # KeyTile (attn/key_tile.cuh) and the ring of QueryTileIndex (kernels/bwd_sm90.cuh)


class Tile(NamedTuple):
    block_keys: int
    block_queries: int
    num_stages: int = 3
    num_buffers: int = 2  # of dS; of K and V in the kernel of dbias
    num_dq_buffers: int = 2
    num_bias_stages: int = 2
    max_options: int = 99  # the most options that change scores or probabilities without a spill


# By padded head_dim and head_dim_v, the preferred first: a call takes the first that has room for its options. Measured
# on an NVIDIA H200: docs/sm90-backward.md.
_SMALLER_TILES = (Tile(128, 64, num_stages=2), Tile(128, 64, num_stages=2, num_bias_stages=1))
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(128, 128, num_dq_buffers=1, max_options=0), Tile(128, 64)),
    (96, 96): (Tile(128, 64), *_SMALLER_TILES),
    (128, 128): (Tile(128, 64), *_SMALLER_TILES),
}
_DBIAS_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (64, 64): (Tile(128, 64, 2, 2, 0, 2),),
    (96, 96): (Tile(128, 64, 2, 2, 0, 1), Tile(128, 64, 2, 1, 0, 2)),
    (128, 128): (Tile(128, 64, 2, 2, 0, 1), Tile(128, 64, 2, 1, 0, 2)),
}
_DBIAS_QUERIES = 8 * 64  # of a block; DbiasSm90::kTiles


@dataclass(frozen=True)
class BwdSm90Row(Row):
    """A block owns block_n keys; block_m queries stream by, as in the kernel."""

    num_stages: int  # of Q and of dO
    num_buffers: int  # of dS; of K and V in the kernel of dbias
    num_dq_buffers: int  # 64 x 64 parts of dQ
    num_bias_stages: int
    option_bytes: int  # of shared memory

    @property
    def header(self) -> str:
        return self.kernel

    @property
    def struct(self) -> Struct:
        return BwdSm90Params

    @property
    def num_threads(self) -> int:
        return 2 * self.block_n + 128

    @property
    def config(self) -> str:
        tile = f"{self.block_m}, {self.block_n}, {self.num_stages}, {self.num_buffers}, {self.num_dq_buffers}"
        tile += f", {self.num_bias_stages}"
        return f"Sm90BwdConfig<{CPP_TYPES[self.dtype]}, {self.head_dim}, {self.head_dim_v}, {tile}>"

    @property
    def label(self) -> str:
        if self.kernel == "bwd_sm90_dbias":
            return f"{self.num_buffers} buffers of keys, {self.num_bias_stages} stages of the bias"
        return f"{self.block_n} keys x {self.block_m} queries, {self.num_stages} stages"

    @property
    def shared_bytes(self) -> int:
        slabs = _slabs(self.head_dim) + _slabs(self.head_dim_v)
        tiles, stats = 128 * slabs * self.num_stages * self.block_m, 8 * self.num_stages * self.block_m
        if self.kernel == "bwd_sm90_dbias":
            tiles += self.num_buffers * 128 * slabs * self.block_n
            rest = 8 * 4 * 2 * self.block_m  # sSum
            rest += 72 * self.num_stages + 16 * (self.num_buffers + self.num_stages)  # DbiasTile, barriers
        else:
            tiles += 128 * slabs * self.block_n + self.num_buffers * 2 * self.block_n * self.block_m
            tiles += self.num_dq_buffers * 4 * 64 * 64
            rest = 8 * (2 + 2 * self.num_stages + self.num_buffers + 2 * self.num_dq_buffers) + _TILE_BYTES
        return -(-(tiles + self.option_bytes + stats + rest) // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = ", ".join(f"flashtile::{name}" for name in (self.config, *option_policies(features)))
        storage = "DbiasSm90Storage" if self.kernel == "bwd_sm90_dbias" else "BwdSm90Storage"
        return {"shared bytes": (f"sizeof(flashtile::{storage}<{policies}>)", self.shared_bytes)}


class BwdSm90(Family[BwdSm90Row]):
    name = "bwd_sm90"
    op = "backward"
    summary = "wgmma, TMA and warp specialisation, on Hopper"
    kernels = ("bwd_sm90", "bwd_sm90_dbias")
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"), ("dbias",))
    needs_wgmma = True

    def refuse(self, key: PlanKey) -> str | None:
        return super().refuse(key) or self._refuse_options(key)

    def _refuse_options(self, key: PlanKey) -> str | None:
        """What would take too many registers."""
        count = key.features.num_score_options
        if self.padded(key.head_dim, key.head_dim_v) == (128, 128) and count > 2:
            return f"{count} options that change scores at head dims over 96"
        return None

    def every_row(self, dtype: str) -> Iterator[BwdSm90Row]:
        for dims, tiles in _TILES.items():
            for tile in tiles:
                if tile.num_bias_stages == 2:  # else it differs only if there is a bias
                    yield _row("bwd_sm90", tile, dtype, dims, Features())
            for tile in _DBIAS_TILES[dims]:
                yield _row("bwd_sm90_dbias", tile, dtype, dims, Features(bias_dtype=dtype))

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm90Row]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        for tile in (_DBIAS_TILES if kernel == "bwd_sm90_dbias" else _TILES)[dims]:
            is_useful = tile.num_bias_stages == 2 or key.features.bias_dtype is not None
            if key.features.num_score_options <= tile.max_options and is_useful:
                yield _row(kernel, tile, key.dtype, dims, key.features)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        row = self.select("bwd_sm90", key)
        steps = [_plain("bwd_sm90_preprocess", row, key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        if key.features.has_bool_mask:
            steps.append(mask_bits(MASK_TILE))
        scratch: tuple[Operand, ...] = ()
        if any(name in key.grads for name in ("dq", "dk", "dv")):
            steps.append(self._step(row, key, layout))
            # The kernel writes both dK and dV
            scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if name not in key.grads)
        if "dq" in key.grads:
            steps.append(_plain("bwd_convert_dq", row, key, layout))
        if "dbias" in key.grads:
            steps.append(self._step(self.select("bwd_sm90_dbias", key), key, layout))
        # Keys outside every sequence have no owner
        zeroed = tuple(name for name in ("dk", "dv", "dbias") if layout.has_lengths and name in key.grads)
        workspaces, maps = _workspaces(row, key), _maps(row, layout)
        return Launch(tuple(steps), workspaces, None, maps, scratch, zeroed, ("bias",), BwdSm90Params)

    def launch_row(self, row: BwdSm90Row, key: PlanKey, layout: CallLayout) -> Launch:
        steps = (mask_bits(MASK_TILE),) * key.features.has_bool_mask + (self._step(row, key, layout),)
        return Launch(steps, _workspaces(row, key), maps=_maps(row, layout), struct=BwdSm90Params)

    def _step(self, row: BwdSm90Row, key: PlanKey, layout: CallLayout) -> Step:
        row = replace(row, option_bytes=_option_bytes(key.features, row.num_bias_stages))
        is_dbias = row.kernel == "bwd_sm90_dbias"
        grid = bias_grid(_DBIAS_QUERIES, row.block_n) if is_dbias else key_grid(layout, row.block_n)
        return tile_step(row, key.features, grid)


def _row(kernel: str, tile: Tile, dtype: str, dims: tuple[int, int], features: Features) -> BwdSm90Row:
    return BwdSm90Row(
        kernel,
        dtype,
        dtype,
        *dims,
        tile.block_queries,
        tile.block_keys,
        *tile[2:6],
        _option_bytes(features, tile.num_bias_stages),
    )


def _option_bytes(features: Features, num_bias_stages: int) -> int:
    """An empty OptionStorage takes the 16 bytes to the next boundary."""
    return option_bytes(features, num_bias_stages, 2) or 16


def option_policies(features: Features) -> list[str]:
    """The C++ policies that decide OptionStorage (kernels/bwd_sm90_options.cuh)."""
    return features.policies()[:2]


def option_bytes(features: Features, num_bias_stages: int, num_consumers: int) -> int:
    """The size of OptionStorage; 0 where it is empty."""
    bits = num_consumers * (512 + 3 * 8)  # words, barriers and flags
    found = bits * features.has_bool_mask
    if features.bias_dtype is not None:
        element = 4 if features.bias_dtype == "float32" else 2
        found += num_consumers * num_bias_stages * (64 * 64 * element + 2 * 8)
    return found


def _slabs(head_dim: int) -> int:
    """Of 64 columns."""
    return -(-head_dim // 64)


def _workspaces(row: BwdSm90Row, key: PlanKey) -> tuple[Workspace, ...]:
    names = ("score_lse", "delta", "dq_order") if key.is_deterministic else ("score_lse", "delta")
    stats = tuple(Workspace(name, 4, ("lse_size",)) for name in names)
    if key.features.has_bool_mask:
        stats += mask_workspaces(MASK_TILE)
    return (*stats, Workspace("dq_accum", 256 * _slabs(row.head_dim), ("lse_size",)))


def _plain(kernel: str, row: BwdSm90Row, key: PlanKey, layout: CallLayout) -> Step:
    sequences = "flashtile::" + key.features.policies()[3]
    entry = f"{kernel}_kernel<{cpp_type(key.dtype)}, {sequences}, {_slabs(row.head_dim)}>"
    return plain_step("bwd_sm90_steps", entry, query_grid(layout, STEP_ROWS), STEP_THREADS)


def _maps(row: BwdSm90Row, layout: CallLayout) -> tuple[MapPatch, ...]:
    head_axis, row_axis = layout.axes
    rows = {"q": row.block_m, "dout": row.block_m, "k": row.block_n, "v": row.block_n}
    return tuple(
        MapPatch(getattr(BwdSm90Params, f"{name}_map").offset, name, (row_axis, head_axis, -4), box)
        for name, box in rows.items()
    )
