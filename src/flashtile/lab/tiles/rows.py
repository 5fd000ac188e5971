"""The row of tiles_<dtype>.csv: one tile on one problem."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.lab.bench.rows import Environment
from flashtile.lab.ladder.rows import Counters


@dataclass(frozen=True)
class TileFacts:
    """Facts of a tile: what it is, what it takes and how fast it is. Empty where it did not run; `reason` then says
    why."""

    kernel: str
    arch: str
    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    is_causal: bool
    tile: str
    block_m: int
    block_n: int
    num_threads: int
    is_chosen: bool  # by a large plain call
    shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    blocks: int | None  # that a multiprocessor holds at a time, by the driver
    occupancy: float | None  # in theory, by the driver: resident warps over the most there can be, 0 to 1
    computed_occupancy: float | None  # the same without a driver (plans/arch.py)
    status: str  # as in bench.rows
    reason: str
    median_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    num_rounds: int | None
    tflops: float | None
    max_error: float | None  # against float64
    peer: str
    peer_tflops: float | None  # in the same run
    no_counters: str  # why the counters are empty


@dataclass(frozen=True, kw_only=True)
class TileRow(Counters, TileFacts):
    """A line: the facts, the counters (achieved occupancy among them), the environment."""

    env: Environment
