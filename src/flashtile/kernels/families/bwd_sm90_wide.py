"""The Hopper backward pass for wide heads, by wgmma and TMA: include/flashtile/kernels/bwd_sm90_dkdv.cuh and
bwd_sm90_dq.cuh, docs/sm90-backward.md.

Two kernels: one owns keys and computes dK and dV, the other owns queries and computes dQ. Each gradient has one owner,
so results do not depend on timing, and only wanted gradients are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashtile.kernels.families.base import Family, Launch, Row, tile_step
from flashtile.kernels.families.bwd_sm90 import MASK_TILE, STEP_ROWS, STEP_THREADS, option_bytes, option_policies
from flashtile.kernels.families.steps import dsinks, key_grid, mask_bits, mask_workspaces, plain_step, query_grid
from flashtile.kernels.params import BwdSm90WideParams, Struct
from flashtile.kernels.plan import MapPatch, Operand, Step, Workspace
from flashtile.kernels.source import cpp_type
from flashtile.kernels.spec import CPP_TYPES, CallLayout, Features, PlanKey

_NUM_THREADS = 384
_KEYS, _QUERIES = 64, 64  # of a tile of dK and dV
_BUFFERS = 2  # of P
_TILE_BYTES = 64 + 8 * 12  # KeyTile (attn/key_tile.cuh) and the ring of StreamedQueryTile (kernels/bwd_sm90_dkdv.cuh)
_BLOCK_BYTES = 72  # QueryBlock (kernels/bwd_sm90_dq.cuh)


class Tile(NamedTuple):
    stages: int  # of Q and dO in the kernel of dK and dV
    block_keys: int  # that stream by in the kernel of dQ
    stages_k: int
    stages_v: int


# By padded head_dim and head_dim_v. Measured on an NVIDIA H200: docs/sm90-backward.md. Up to 128, bwd_sm90 is faster;
# those rows are for what it refuses: three options and more.
_TILES: dict[tuple[int, int], Tile] = {
    (64, 64): Tile(4, 64, 3, 3),
    (128, 128): Tile(4, 64, 3, 3),
    (192, 128): Tile(4, 64, 3, 3),
    (192, 192): Tile(3, 64, 3, 2),
    (256, 256): Tile(2, 64, 2, 1),
}


@dataclass(frozen=True)
class BwdSm90WideRow(Row):
    stages: tuple[int, ...]  # of Q and dO together, or of K and of V
    bias_stages: int = 0
    option_bytes: int = 0  # of shared memory

    @property
    def header(self) -> str:
        return self.kernel

    @property
    def struct(self) -> Struct:
        return BwdSm90WideParams

    @property
    def num_threads(self) -> int:
        return _NUM_THREADS

    @property
    def is_dq(self) -> bool:
        return self.kernel == "bwd_sm90_dq"

    @property
    def config(self) -> str:
        sizes = (self.block_n, *self.stages) if self.is_dq else self.stages
        if self.bias_stages > 0:
            sizes += (self.bias_stages,)
        name = "Sm90DqConfig" if self.is_dq else "Sm90DkdvConfig"
        return f"{name}<{CPP_TYPES[self.dtype]}, {', '.join(map(str, (self.head_dim, self.head_dim_v, *sizes)))}>"

    @property
    def label(self) -> str:
        owned, streamed = ("queries", "keys") if self.is_dq else ("keys", "queries")
        stages = " and ".join(map(str, self.stages))
        return f"{self.block_m} {owned} x {self.block_n} {streamed}, {stages} stages"

    @property
    def shared_bytes(self) -> int:
        slabs, slabs_v = self.head_dim // 64, self.head_dim_v // 64
        owned = 128 * (slabs + slabs_v) * self.block_m
        if self.is_dq:
            stages_k, stages_v = self.stages
            streamed = 128 * self.block_n * (stages_k * slabs + stages_v * slabs_v)
            barriers = 8 * (6 + 2 * stages_k + 2 * stages_v * slabs_v)
            total = owned + streamed + barriers + _BLOCK_BYTES
        else:
            (stages,) = self.stages
            streamed = 128 * self.block_n * stages * (slabs + slabs_v)
            probabilities, stats = _BUFFERS * 2 * _KEYS * _QUERIES, 8 * stages * _QUERIES
            barriers = 8 * (4 + (2 + slabs + slabs_v) * stages + 2 * _BUFFERS)
            total = owned + streamed + probabilities + stats + barriers + _TILE_BYTES
            total = -(-total // 128) * 128 + max(self.option_bytes, 1)
        return -(-total // 1024) * 1024

    def facts(self, features: Features) -> dict[str, tuple[str, object]]:
        policies = [self.config] if self.is_dq else [self.config, *option_policies(features)]
        storage = "BwdSm90DqStorage" if self.is_dq else "BwdSm90DkdvStorage"
        names = ", ".join(f"flashtile::{name}" for name in policies)
        return {"shared bytes": (f"sizeof(flashtile::{storage}<{names}>)", self.shared_bytes)}


class BwdSm90Wide(Family[BwdSm90WideRow]):
    name = "bwd_sm90_wide"
    op = "backward"
    summary = "wgmma, TMA and warp specialisation, on Hopper, for wide heads"
    kernels = ("bwd_sm90_dkdv", "bwd_sm90_dq")
    dtypes = ("float16", "bfloat16")
    head_dims = tuple(sorted(_TILES))
    features = Family.features - {"is_paged", "is_aligned16"}
    takes_out_dtypes = takes_overlapping_rows = False
    grad_sets = (("dq", "dk", "dv", "dsinks"),)
    needs_wgmma = True

    def refuse(self, key: PlanKey) -> str | None:
        reason = super().refuse(key)
        if reason is not None:
            return reason
        if key.grads is not None and "dbias" in key.grads:
            return "the gradient of a bias"
        return None

    def every_row(self, dtype: str) -> Iterator[BwdSm90WideRow]:
        for dims in _TILES:
            for kernel in self.kernels:
                yield _row(kernel, dtype, dims)

    def candidates(self, kernel: str, key: PlanKey) -> Iterator[BwdSm90WideRow]:
        dims = self.padded(key.head_dim, key.head_dim_v)
        assert dims is not None  # else refused
        yield _with_options(_row(kernel, key.dtype, dims), key)

    def launch(self, key: PlanKey, layout: CallLayout) -> Launch:
        assert key.grads is not None
        steps = [_preprocess(key, layout)]
        if "dsinks" in key.grads:
            steps.append(dsinks(key))
        if key.features.has_bool_mask:
            steps.append(mask_bits(MASK_TILE))
        scratch: tuple[Operand, ...] = ()
        if "dk" in key.grads or "dv" in key.grads:
            steps.append(self._step(self.select("bwd_sm90_dkdv", key), key, layout))
            # The kernel writes both
            scratch = tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if name not in key.grads)
        row = self.select("bwd_sm90_dq", key)
        if "dq" in key.grads:
            steps.append(self._step(row, key, layout))
        # Keys outside every sequence have no owner
        zeroed = tuple(name for name in ("dk", "dv") if layout.has_lengths and name in key.grads)
        workspaces, maps = _workspaces(key), _maps(row, layout)
        return Launch(tuple(steps), workspaces, None, maps, scratch, zeroed, ("bias",), BwdSm90WideParams)

    def launch_row(self, row: BwdSm90WideRow, key: PlanKey, layout: CallLayout) -> Launch:
        steps = (mask_bits(MASK_TILE),) * key.features.has_bool_mask + (self._step(row, key, layout),)
        return Launch(steps, _workspaces(key), maps=_maps(row, layout), struct=BwdSm90WideParams)

    def _step(self, row: BwdSm90WideRow, key: PlanKey, layout: CallLayout) -> Step:
        row = _with_options(row, key)
        grid = (query_grid if row.is_dq else key_grid)(layout, row.block_m)
        return tile_step(row, key.features, grid)


def _workspaces(key: PlanKey) -> tuple[Workspace, ...]:
    stats = (Workspace("score_lse", 4, ("lse_size",)), Workspace("delta", 4, ("lse_size",)))
    return stats + mask_workspaces(MASK_TILE) if key.features.has_bool_mask else stats


def _row(kernel: str, dtype: str, dims: tuple[int, int]) -> BwdSm90WideRow:
    tile = _TILES[dims]
    if kernel == "bwd_sm90_dq":
        return BwdSm90WideRow(kernel, dtype, dtype, *dims, 128, tile.block_keys, (tile.stages_k, tile.stages_v))
    return BwdSm90WideRow(kernel, dtype, dtype, *dims, _KEYS, _QUERIES, (tile.stages,))


def _with_options(row: BwdSm90WideRow, key: PlanKey) -> BwdSm90WideRow:
    """The row with shared memory for the options of a call. Two stages of a bias may take the place of a stage of Q and
    dO. The kernel of dQ needs none."""
    if row.is_dq:
        return row
    (stages,), features = row.stages, key.features
    if features.bias_dtype is None:
        return replace(row, option_bytes=option_bytes(features, 0, 1))
    choices = [(stages, 2), *[(stages - 1, 2)] * (stages > 3), (stages, 1), (stages - 1, 1)]
    rows = [
        replace(row, stages=(number,), bias_stages=biases, option_bytes=option_bytes(features, biases, 1))
        for number, biases in choices
    ]
    return next((row for row in rows if row.unfit(key.arch) is None), rows[-1])


def _preprocess(key: PlanKey, layout: CallLayout) -> Step:
    """Fills score_lse and delta; there are no sums of dQ to zero."""
    sequences = "flashtile::" + key.features.policies()[3]
    entry = f"bwd_sm90_preprocess_kernel<{cpp_type(key.dtype)}, {sequences}, 0>"
    return plain_step("bwd_sm90_steps", entry, query_grid(layout, STEP_ROWS), STEP_THREADS)


def _maps(row: BwdSm90WideRow, layout: CallLayout) -> tuple[MapPatch, ...]:
    """The maps of both kernels; row: that of dQ, or any row of a kernel on its own."""
    head_axis, row_axis = layout.axes
    streamed = row.block_n if row.is_dq else _KEYS
    boxes = {
        "q": ("q", _QUERIES),
        "dout": ("dout", _QUERIES),
        "k": ("k", _KEYS),
        "v": ("v", _KEYS),
        "k_stream": ("k", streamed),
        "v_stream": ("v", streamed),
    }
    return tuple(
        MapPatch(getattr(BwdSm90WideParams, f"{name}_map").offset, tensor, (row_axis, head_axis, -4), box)
        for name, (tensor, box) in boxes.items()
    )
