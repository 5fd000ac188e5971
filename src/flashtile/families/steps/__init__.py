"""Steps that several families share: kernels without a tile, and the grids of kernels over tiles of queries or keys."""

from __future__ import annotations

from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, Grid, Operand, Step, Workspace
from flashtile.plans.source import cpp_type, plain_unit
from flashtile.plans.spec import CallLayout, PlanKey

# As the constants of fwd_combine.cuh, bwd_preprocess.cuh and bwd_sm90_steps.cuh; tests/cpu/test_plan.py compares them
COMBINE_ROWS, COMBINE_THREADS = 4, 128
PREPROCESS_ROWS, PREPROCESS_THREADS = 64, 128
SM90_STEP_ROWS, SM90_STEP_THREADS = 32, 128
# As those of attn/mask_bits.cuh and of mask_bits.cuh here
MASK_GROUP, MASK_WORD, MASK_BITS_THREADS = 64, 32, 512


def query_grid(layout: CallLayout, block_rows: int, heads: str = "heads") -> Grid:
    """A block for each tile of queries of each head."""
    return (*query_tiles(layout, block_rows), Factor(heads))


def key_grid(layout: CallLayout, block_rows: int) -> Grid:
    """A block for each tile of keys of each KV head."""
    return (*key_tiles(layout, block_rows), Factor("heads_kv"))


def bias_grid(block_rows: int, block_columns: int) -> Grid:
    """A block for each tile of the gradient of a bias."""
    return (
        Factor("bias_batch"),
        Factor("bias_heads"),
        Factor("bias_rows", block_rows),
        Factor("bias_columns", block_columns),
    )


def query_tiles(layout: CallLayout, block_rows: int) -> Grid:
    """Tiles of queries of one head."""
    return _tiles("q", block_rows, layout.has_packed_queries)


def key_tiles(layout: CallLayout, block_rows: int) -> Grid:
    """Tiles of keys of one KV head."""
    return _tiles("k", block_rows, layout.has_packed_keys)


def _tiles(side: str, block_rows: int, is_packed: bool) -> Grid:
    # The tiles of packed sequences lie on one line: attn/tile_place.cuh
    if is_packed:
        return (Factor(f"total_{side}", block_rows, plus="batch"),)
    return Factor(f"seqlen_{side}", block_rows), Factor("batch")


def combine(key: PlanKey, layout: CallLayout) -> Step:
    """Joins the partial results of splits; not launched where there is one."""
    entry = f"fwd_combine_kernel<{cpp_type(key.out_dtype)}, {_sequences(key)}>"
    return plain_step("fwd_combine", entry, query_grid(layout, COMBINE_ROWS), COMBINE_THREADS, is_for_splits=True)


def partial_results(key: PlanKey) -> tuple[Workspace, ...]:
    """Returns the workspaces that `combine` joins."""
    rows = ("num_splits", "lse_size")
    return (
        Workspace("partial_out", 4 * key.head_dim_v, rows, is_for_splits=True),
        Workspace("partial_stats", 8, rows, is_for_splits=True),
    )


def mask_bits(block_n: int) -> Step:
    """Packs a bool mask into bits, for tiles of block_n keys, and makes the map of its tiles."""
    groups = Factor("mask_rows", MASK_GROUP), Factor("mask_heads"), Factor("mask_batch")
    sizes: Grid = (*groups, Factor("seqlen_k", MASK_WORD * block_n))
    return plain_step("mask_bits", f"mask_bits_kernel<{block_n}>", sizes, MASK_BITS_THREADS)


def mask_workspaces(block_n: int) -> tuple[Workspace, ...]:
    """Returns the workspaces that `mask_bits` fills."""
    tiles = ("mask_rows", MASK_GROUP), ("seqlen_k", MASK_WORD * block_n)
    sizes = ("mask_rows", "mask_heads", "mask_batch")
    return (
        Workspace("mask_bits", 16, sizes, quotients=(("seqlen_k", block_n),)),
        Workspace("mask_tiles", 8, sizes[1:], quotients=tiles),
    )


def preprocess(key: PlanKey, layout: CallLayout) -> Step:
    """Fills score_lse and delta for a backward pass."""
    entry = f"bwd_preprocess_kernel<{cpp_type(key.out_dtype)}, {_sequences(key)}>"
    return plain_step("bwd_preprocess", entry, query_grid(layout, PREPROCESS_ROWS), PREPROCESS_THREADS)


# What `preprocess` fills
ROW_STATS = (Workspace("score_lse", 4, ("lse_size",)), Workspace("delta", 4, ("lse_size",)))


def sm90_step(kernel: str, key: PlanKey, layout: CallLayout, num_slabs: int) -> Step:
    """A kernel of bwd_sm90_steps.cuh. num_slabs: of 64 columns of dq_accum, 0 where there is none."""
    entry = f"{kernel}_kernel<{cpp_type(key.dtype)}, {_sequences(key)}, {num_slabs}>"
    return plain_step("bwd_sm90_steps", entry, query_grid(layout, SM90_STEP_ROWS), SM90_STEP_THREADS)


def dq_slabs(head_dim: int) -> int:
    """Returns the number of slabs of 64 columns."""
    return -(-head_dim // 64)


def dq_accum(head_dim: int) -> Workspace:
    """Returns the workspace of the sums of dQ, which bwd_convert_dq converts."""
    return Workspace("dq_accum", 256 * dq_slabs(head_dim), ("lse_size",))


def dsinks(key: PlanKey) -> tuple[Step, ...]:
    """Returns the step after `preprocess` of a call that wants the gradient of the sinks."""
    if "dsinks" not in (key.grads or ()):
        return ()
    entry = f"bwd_dsinks_kernel<{_sequences(key)}>"
    return (plain_step("bwd_preprocess", entry, (Factor("heads"),), PREPROCESS_THREADS),)


def unwanted_keys(key: PlanKey) -> tuple[Operand, ...]:
    """Returns dK or dV where the call does not want it: outputs of a kernel that writes both."""
    return tuple(Operand(name, like=name[1]) for name in ("dk", "dv") if name not in (key.grads or ()))


def unowned(key: PlanKey, layout: CallLayout, always: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the gradients that kernels do not write everywhere: `always`, and with lengths those of keys, as keys
    outside every sequence have no owner."""
    names = ("dk", "dv", "dbias") if layout.has_lengths else always
    return tuple(name for name in names if name in (key.grads or ()))


def _sequences(key: PlanKey) -> str:
    return "flashtile::" + key.features.policies()[3]


def plain_step(header: str, entry: str, grid: Grid, num_threads: int, is_for_splits: bool = False) -> Step:
    """The launch of a kernel without a tile. header: one of this folder, without its ending."""
    entry = f"flashtile::{entry}"
    return Step(plain_unit(f"steps/{header}", entry, Params), entry, grid, 1, 1, num_threads, 0, is_for_splits)
