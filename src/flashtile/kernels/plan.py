"""How a pass is launched: a list of steps as data. A plan knows no sequence length; grids and sizes are filled in for each call."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashtile.kernels import source, table
from flashtile.kernels.arch import Arch
from flashtile.kernels.spec import Features

PREPROCESS_ROWS, PREPROCESS_THREADS = 64, 128
COMBINE_ROWS, COMBINE_THREADS = 4, 128


@dataclass(frozen=True)
class Step:
    """One kernel: the unit to compile, its entry, and its launch."""

    unit: str
    entry: str
    grid: str  # "queries" or "keys": a block for each block_rows of them, head and sequence; "splits": and split of the keys;
    # "combine": as "queries", left out where there is one split; "bias": a block for each tile of it; "heads"
    block_rows: int
    block_columns: int
    num_threads: int
    shared_bytes: int


@dataclass(frozen=True)
class PlanKey:
    """Everything that decides a plan."""

    dtype: str
    out_dtype: str
    head_dim: int  # the larger of head_dim and head_dim_v
    features: Features
    arch: Arch
    is_small: bool = False  # the grid of the preferred tile would not fill the GPU
    is_backward: bool = False
    needs_dbias: bool = False
    needs_dsinks: bool = False


@functools.cache
def plan(key: PlanKey) -> tuple[Step, ...]:
    out, lengths = source.cpp_type(key.out_dtype), "flashtile::" + key.features.policies()[3]
    if not key.is_backward:
        combine = _plain_step("fwd_combine", f"fwd_combine_kernel<{out}, {lengths}>", "combine", COMBINE_ROWS, COMBINE_THREADS)
        return _tile_step(key, "fwd_simt", "splits"), combine
    preprocess = f"bwd_preprocess_kernel<{out}, {lengths}>"
    steps = [_plain_step("bwd_preprocess", preprocess, "queries", PREPROCESS_ROWS, PREPROCESS_THREADS)]
    if key.needs_dsinks:
        steps.append(_plain_step("bwd_preprocess", f"bwd_dsinks_kernel<{lengths}>", "heads", 1, PREPROCESS_THREADS))
    steps += [_tile_step(key, "bwd_dkdv_simt", "keys"), _tile_step(key, "bwd_dq_simt", "queries")]
    if key.needs_dbias:
        steps.append(_tile_step(key, "bwd_dbias_simt", "bias"))
    return tuple(steps)


def _tile_step(key: PlanKey, kernel: str, grid: str) -> Step:
    padded = table.padded_head_dim(key.head_dim)
    assert padded is not None
    row = table.select(kernel, key.dtype, key.out_dtype, padded, key.features, key.arch, key.is_small)
    entry = source.entry(row, key.features)
    return Step(source.unit(row, key.features), entry, grid, row.block_m, row.block_n, row.num_threads, row.shared_bytes)


def _plain_step(header: str, entry: str, grid: str, block_rows: int, num_threads: int) -> Step:
    entry = f"flashtile::{entry}"
    return Step(source.plain_unit(header, entry), entry, grid, block_rows, 1, num_threads, 0)
