"""Steps that several families share: kernels without a tile, and the grids of kernels over queries."""

from __future__ import annotations

from flashtile.kernels.params import Params, Struct
from flashtile.kernels.plan import Grid, Step, Workspace
from flashtile.kernels.source import cpp_type, plain_unit
from flashtile.kernels.spec import PlanKey

# As the constants of kernels/fwd_combine.cuh and kernels/bwd_preprocess.cuh; tests/cpu/test_plan.py compares them
COMBINE_ROWS, COMBINE_THREADS = 4, 128
PREPROCESS_ROWS, PREPROCESS_THREADS = 64, 128


def query_grid(block_rows: int, heads: str = "heads") -> Grid:
    """A block for each tile of queries of each head."""
    return ("seqlen_q", block_rows), (heads, 1), ("batch", 1)


def combine(key: PlanKey) -> Step:
    """Joins the partial results of splits; not launched where there is one."""
    entry = f"fwd_combine_kernel<{cpp_type(key.out_dtype)}, {_sequences(key)}>"
    return plain_step("fwd_combine", entry, query_grid(COMBINE_ROWS), COMBINE_THREADS, is_for_splits=True)


def partial_results(key: PlanKey) -> tuple[Workspace, ...]:
    """What `combine` joins."""
    rows = ("num_splits", "lse_size")
    return (
        Workspace("partial_out", 4 * key.head_dim_v, rows, is_for_splits=True),
        Workspace("partial_stats", 8, rows, is_for_splits=True),
    )


def preprocess(key: PlanKey) -> Step:
    """Fills score_lse and delta for a backward pass."""
    entry = f"bwd_preprocess_kernel<{cpp_type(key.out_dtype)}, {_sequences(key)}>"
    return plain_step("bwd_preprocess", entry, query_grid(PREPROCESS_ROWS), PREPROCESS_THREADS)


def dsinks(key: PlanKey) -> Step:
    return plain_step("bwd_preprocess", f"bwd_dsinks_kernel<{_sequences(key)}>", (("heads", 1),), PREPROCESS_THREADS)


def _sequences(key: PlanKey) -> str:
    return "flashtile::" + key.features.policies()[3]


def plain_step(
    header: str, entry: str, grid: Grid, num_threads: int, is_for_splits: bool = False, struct: Struct = Params
) -> Step:
    """The launch of a kernel without a tile."""
    entry = f"flashtile::{entry}"
    return Step(plain_unit(header, entry, struct), entry, grid, 1, 1, num_threads, 0, is_for_splits)
