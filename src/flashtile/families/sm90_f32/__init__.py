"""Shared parts of the two Hopper families for float32: kernels on split operands, and the pre-pass that splits them
(f32_split.cuh).

A call launches each kernel twice, for float16 and for bfloat16 parts. The numbers in its tensors decide on the GPU
which of the two does the work: float16 where they are in range.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from fractions import Fraction

from flashtile.families.steps import key_tiles, query_tiles
from flashtile.families.tiles import Knobs, Row, Tile
from flashtile.plans.length_class import LongShares
from flashtile.plans.params import Params
from flashtile.plans.plan import Factor, Grid, Step, Workspace
from flashtile.plans.source import plain_unit, qualified
from flashtile.plans.spec import CallLayout, PlanKey

WARPGROUP_ROWS = 64
_SPLIT_THREADS, _RANGE_THREADS = 256, 512  # kSplitThreads, kRangeThreads (f32_split.cuh)
_RANGE_BYTES = 32  # SplitRange (split_tiles.cuh)


class Sm90F32Params(ctypes.Structure):
    """Parameters of the Hopper kernels for float32 and their pre-passes."""

    _fields_ = [
        ("base", Params),
        *((name, ctypes.c_void_p) for name in ("q_parts", "k_parts", "v_parts", "dout_parts", "range")),
    ]


KNOBS = ("stages", "columns", "overlaps")  # columns: that one product computes; overlaps: scores with the P V before


def parts(kernel: str) -> str:
    """The C++ type of the parts that a kernel splits operands into."""
    return "flashtile::HalfParts<{parts}>" if kernel.endswith("_half") else "flashtile::Bf16Parts"


def row_bytes(row: Row) -> tuple[int, int]:
    """The size of a row of Q or K, and of V or dO, in parts."""
    return row["parts"] * 128 * -(-row.head_dim // 64), row["parts"] * 128 * -(-row.head_dim_v // 64)


def part_rows(row: Row) -> int:
    """Rows of a tile of K and V in parts. A backward kernel may stream less."""
    return row.knobs.get("part_rows", row.streamed)


def parts_knob(tile: Tile, key: PlanKey | None) -> Knobs:
    """Returns how many parts the kernel of a call splits operands into; some tiles are for one part alone."""
    if not tile.kernel.endswith("_half"):
        return (("parts", 3),)
    is_highest = not tile.is_refused(frozenset({"highest"})) if key is None else key.matmul_precision == "highest"
    return (("parts", 2 if is_highest else 1),)


# Parts have rows of whole slabs of 64 columns, and tiles of 64 queries, or as many keys as a kernel's, that hold one
# sequence each. So those of short rows and sequences are far larger than what is split
SHARES = LongShares(64, 128, 384)
MOST_PADDING = 4  # bytes of parts over those of what is split: 6 over 4 without padding


def padding(rows: Sequence[Row], key: PlanKey) -> str | None:
    """Returns why the parts of a call might take too much memory, or None."""
    pairs = [pair for row in rows for pair in zip(row_bytes(row), (key.head_dim, key.head_dim_v), strict=True)]
    tile = max(WARPGROUP_ROWS, *(part_rows(row) for row in rows))
    least = (1, SHARES.first, SHARES.second, SHARES.third)[key.length(SHARES)]  # rows of a sequence
    if max(Fraction(row_bytes, 4 * dim) for row_bytes, dim in pairs) * (least + tile) <= MOST_PADDING * least:
        return None
    return f"rows or sequences so short that their parts might take over {MOST_PADDING} times the bytes of the inputs"


RANGE = Workspace("range", _RANGE_BYTES, (), is_zeroed=True)  # what the pre-pass finds out about the numbers


def part_workspaces(rows: Sequence[Row], layout: CallLayout, is_backward: bool = False) -> tuple[Workspace, ...]:
    """Returns the workspaces of the parts of Q, K, V and dO, which float16 and bfloat16 kernels share: at most one of
    them works."""
    qk_bytes, v_bytes = (max(row_bytes(row)[index] for row in rows) for index in (0, 1))
    block_n = max(part_rows(row) for row in rows)
    q_rows = ("heads", "total_q") if layout.has_packed_queries else ("heads", "batch", "seqlen_q")
    k_rows = ("heads_kv", "total_k") if layout.has_packed_keys else ("heads_kv", "batch", "seqlen_k")
    found = (
        RANGE,
        Workspace("q_parts", qk_bytes, q_rows, num_padding=WARPGROUP_ROWS, padding=("heads", "batch")),
        Workspace("k_parts", qk_bytes, k_rows, num_padding=block_n, padding=("heads_kv", "batch")),
        Workspace("v_parts", v_bytes, k_rows, num_padding=block_n, padding=("heads_kv", "batch")),
    )
    dout = Workspace("dout_parts", v_bytes, q_rows, num_padding=WARPGROUP_ROWS, padding=("heads", "batch"))
    return (*found, dout) if is_backward else found


def pre_pass(rows: Sequence[Row], key: PlanKey, layout: CallLayout) -> Iterator[Step]:
    """The steps that find the range of the numbers and split the tensors, for the parts of each row."""
    lengths, source, load = key.features.policies()[3:6]
    heads = Factor("heads"), Factor("batch")
    yield _step("f32_range", (lengths, source), heads, _RANGE_THREADS)
    for row in rows:
        yield _step(
            "f32_split", (row.config, lengths, source, load), _tiles(part_rows(row), layout), _SPLIT_THREADS, 16
        )


def check_pass(config: str, block_n: int, key: PlanKey, layout: CallLayout) -> Iterator[Step]:
    """The steps that find the range of the numbers and whether float16 parts hold them."""
    lengths, source, load = key.features.policies()[3:6]
    heads = Factor("heads"), Factor("batch")
    yield _step("f32_range", (lengths, source), heads, _RANGE_THREADS)
    yield _step("f32_check", (config, lengths, source, load), _tiles(block_n, layout), _SPLIT_THREADS, 16)


def _tiles(block_n: int, layout: CallLayout) -> Grid:
    """More than there are of queries and of keys: the grid is one of as many blocks as run at once."""
    return (*query_tiles(layout, WARPGROUP_ROWS), *key_tiles(layout, block_n), Factor("heads"))


def _step(kernel: str, arguments: tuple[str, ...], grid: Grid, num_threads: int, max_blocks: int = 0) -> Step:
    names = ", ".join(f"flashtile::{name}" for name in arguments)
    entry = qualified(f"flashtile::{kernel}_kernel<{names}>")
    unit = plain_unit("sm90_f32/f32_split", entry, Sm90F32Params)
    return Step(unit, entry, grid, 1, 1, num_threads, 0, max_blocks=max_blocks)
