"""How a pass is launched: a list of steps as data. A plan knows no sequence length; grids and sizes are filled in for each call."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashtile.kernels import source, table
from flashtile.kernels.arch import Arch
from flashtile.kernels.spec import Features

PREPROCESS_ROWS, PREPROCESS_THREADS = 64, 128


@dataclass(frozen=True)
class Step:
    """One kernel: the unit to compile, its entry, and its launch."""

    unit: str
    entry: str
    grid: str  # "queries" or "keys": a block for each block_rows of them, head and sequence; "bias": for each tile; "heads"
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
    is_backward: bool = False
    needs_dbias: bool = False
    needs_dsinks: bool = False


@functools.cache
def plan(key: PlanKey) -> tuple[Step, ...]:
    if not key.is_backward:
        return (_tile_step(key, "fwd_simt", "queries"),)
    lengths = key.features.policies()[3]
    steps = [_preprocess_step(key, f"bwd_preprocess_kernel<{source.cpp_type(key.out_dtype)}, flashtile::{lengths}>", "queries")]
    if key.needs_dsinks:
        steps.append(_preprocess_step(key, f"bwd_dsinks_kernel<flashtile::{lengths}>", "heads"))
    steps += [_tile_step(key, "bwd_dkdv_simt", "keys"), _tile_step(key, "bwd_dq_simt", "queries")]
    if key.needs_dbias:
        steps.append(_tile_step(key, "bwd_dbias_simt", "bias"))
    return tuple(steps)


def _tile_step(key: PlanKey, kernel: str, grid: str) -> Step:
    padded = table.padded_head_dim(key.head_dim)
    assert padded is not None
    row = table.select(kernel, key.dtype, key.out_dtype, padded, key.arch)
    entry = source.entry(row, key.features)
    return Step(source.unit(row, key.features), entry, grid, row.block_m, row.block_n, row.num_threads, row.shared_bytes)


def _preprocess_step(key: PlanKey, entry: str, grid: str) -> Step:
    entry = f"flashtile::{entry}"
    return Step(source.plain_unit("bwd_preprocess", entry), entry, grid, PREPROCESS_ROWS, 1, PREPROCESS_THREADS, 0)
