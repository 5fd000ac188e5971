"""The rows of the ladder's own CSVs. Times and accuracy use the rows of flashtile.lab.bench."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.lab.bench.rows import Environment


@dataclass(frozen=True)
class KernelFacts:
    """One kernel on one problem: resources, speed, and the measured ceilings."""

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
    occupancy: float  # from registers and shared memory, 0 to 1
    median_ms: float | None
    tflops: float | None
    flops: float  # of the problem
    least_bytes: int  # every input read once, the output written once
    fma_ceiling_tflops: float
    tensor_ceiling_tflops: float
    dram_ceiling_gb_per_s: float
    shared_ceiling_gb_per_s: float

    @property
    def problem(self) -> tuple[str, int, int, int, int]:
        """What every table and figure of the ladder compares rungs on, full and causal apart."""
        return self.dtype, self.batch, self.heads, self.seqlen, self.head_dim


@dataclass(frozen=True)
class Counters:
    """Counters from Nsight Compute; all None without a profile."""

    profiled_ms: float | None = None  # under the profiler, caches cold
    dram_bytes: float | None = None  # read and written
    l2_bytes: float | None = None
    l2_percent: float | None = None  # of peak throughput
    shared_loads: float | None = None  # warp instructions that read shared memory
    shared_wavefronts: float | None = None  # cycles of the shared-memory pipe, over all multiprocessors
    shared_percent: float | None = None  # of peak throughput
    bank_conflicts: float | None = None  # additional wavefronts because of conflicts
    achieved_occupancy: float | None = None  # resident warps over the maximum, 0 to 1
    fma_percent: float | None = None  # share of cycles in which the FMA pipe was busy
    tensor_percent: float | None = None  # the same of the tensor cores
    sectors_per_load: float | None = None  # 32-byte sectors per global load instruction
    divergent_branches: float | None = None
    top_stall: str = ""
    top_stall_share: float | None = None  # of all stall cycles
    global_stall_share: float | None = None  # stalls on global memory (long scoreboard), likewise


@dataclass(frozen=True, kw_only=True)
class RungRow(Counters, KernelFacts):
    """A row of ladder_kernels_<dtype>.csv: measurements, counters, environment."""

    env: Environment

    @property
    def unit(self) -> str:
        """What multiplies."""
        return "FMA" if self.dtype == "fp32" else "tensor"

    @property
    def ceiling_tflops(self) -> float:
        return self.fma_ceiling_tflops if self.unit == "FMA" else self.tensor_ceiling_tflops

    @property
    def unit_percent(self) -> float | None:
        return self.fma_percent if self.unit == "FMA" else self.tensor_percent


@dataclass(frozen=True)
class HbmRow:
    """A row of ladder_hbm_<dtype>.csv: bytes that one call moves through device memory."""

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
