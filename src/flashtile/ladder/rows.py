"""The rows of the ladder's own CSVs; times and accuracy are rows of flashtile.bench."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.bench.rows import Environment


@dataclass(frozen=True)
class KernelFacts:
    """One kernel on one problem: what it takes, how fast it is, and the roofs."""

    rung: str
    title: str
    dtype: str
    is_causal: bool
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    arch: str
    block_m: int
    block_n: int
    num_threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    occupancy: float  # by registers and shared memory, 0 to 1
    median_ms: float | None
    tflops: float | None
    flops: float  # of the problem
    least_bytes: int  # every input read once, the output written once
    fma_ceiling_tflops: float
    dram_ceiling_gb_per_s: float
    shared_ceiling_gb_per_s: float


@dataclass(frozen=True)
class Counters:
    """What Nsight Compute counted in the kernel; all empty where it was not asked."""

    profiled_ms: float | None = None  # under the profiler, caches cold
    dram_bytes: float | None = None  # read and written
    l2_bytes: float | None = None
    l2_percent: float | None = None  # of the peak throughput
    shared_loads: float | None = None  # warp instructions that read shared memory
    shared_wavefronts: float | None = None  # cycles of the shared-memory pipe, over all multiprocessors
    shared_percent: float | None = None  # of the peak throughput
    bank_conflicts: float | None = None  # wavefronts that conflicts added
    achieved_occupancy: float | None = None  # resident warps over the most there can be, 0 to 1
    fma_percent: float | None = None  # cycles in which the FMA pipe was busy
    sectors_per_load: float | None = None  # 32-byte sectors of a global load instruction
    divergent_branches: float | None = None
    top_stall: str = ""
    top_stall_share: float | None = None  # of the cycles that warps waited
    global_stall_share: float | None = None  # waits for global memory (long scoreboard), likewise


@dataclass(frozen=True, kw_only=True)
class RungRow(Counters, KernelFacts):
    """A line of ladder_kernels_<dtype>.csv: the facts, the counters, the environment."""

    env: Environment


@dataclass(frozen=True)
class HbmRow:
    """Bytes that one call moves through device memory: a line of ladder_hbm_<dtype>.csv."""

    provider: str
    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    num_kernels: int
    dram_bytes: float
    least_bytes: int
    score_bytes: int  # of one N x N matrix
    env: Environment
