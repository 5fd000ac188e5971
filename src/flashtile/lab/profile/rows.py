"""The rows of a profile: one for each kernel of each call."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.lab.bench.rows import Environment


@dataclass(frozen=True)
class KernelRow:
    """One kernel of a call. A call that did not run has one row, with its reason.

    Counters are None where Nsight Compute did not run; `no_counters` says why. Occupancies are shares, 0 to 1.
    """

    provider: str
    is_baseline: bool
    direction: str  # fwd, bwd, fwd+bwd
    dtype: str
    is_causal: bool
    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    status: str  # of the call, as in a benchmark
    reason: str
    call_ms: float | None  # median of the whole call, without the profiler
    call_tflops: float | None
    flops: float  # of the call
    least_bytes: int  # every input of the call read once, every output written once
    kernel: str  # short name, empty where none is known
    full_name: str
    kernel_index: int
    num_kernels: int  # of the call
    no_counters: str
    kernel_ms: float | None  # under the profiler, caches flushed
    grid_blocks: int | None
    block_threads: int | None
    registers: int | None  # for each thread
    spill_bytes: int | None  # stores and loads in the code of our kernels, by the compiler
    local_bytes: float | None  # bytes of local memory moved: spills at run time
    shared_bytes: int | None  # for each block
    occupancy: float | None  # that registers, shared memory and threads allow
    achieved_occupancy: float | None
    dram_bytes: float | None  # read and written
    dram_percent: float | None  # of peak throughput
    l2_bytes: float | None
    l2_percent: float | None
    shared_wavefronts: float | None  # cycles of the pipe of loads and stores; wgmma reads shared memory past it
    shared_percent: float | None
    bank_conflicts: float | None  # additional wavefronts
    tensor_percent: float | None  # share of cycles in which the pipe was busy
    fma_percent: float | None
    issue_percent: float | None  # of the issue slots in use
    stalls: str  # the five most frequent reasons with their shares, as "wait=0.31 gmma=0.2"
    fma_ceiling_tflops: float | None
    tensor_ceiling_tflops: float | None
    dram_ceiling_gb_per_s: float | None
    l2_ceiling_gb_per_s: float | None
    shared_ceiling_gb_per_s: float | None
    env: Environment

    @property
    def ceiling_tflops(self) -> float | None:
        """The ceiling of the products: tensor cores for 16-bit inputs, FMA for float32."""
        return self.tensor_ceiling_tflops or None if self.dtype in ("bf16", "fp16") else self.fma_ceiling_tflops

    @property
    def call(self) -> tuple[object, ...]:
        """What the rows of one call have in common."""
        return self.provider, *self.problem

    @property
    def problem(self) -> tuple[object, ...]:
        return (
            self.direction, self.dtype, self.is_causal, self.batch, self.heads, self.heads_kv, self.seqlen_q,
            self.seqlen_k, self.head_dim, self.head_dim_v,
        )  # fmt: skip

    def stall_shares(self) -> dict[str, float]:
        return {name: float(share) for name, _, share in (part.partition("=") for part in self.stalls.split())}
