"""The kernels there are. A new head dim or tile is one entry; selection, precompilation and tests loop over this table."""

from __future__ import annotations

from collections.abc import Iterator

from flashtile.kernels.arch import Arch
from flashtile.kernels.spec import Row

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
PASSES = {"forward": ("fwd_simt",), "backward": ("bwd_dq_simt", "bwd_dkdv_simt", "bwd_dbias_simt")}

# (block_m, block_n, num_warps), the fastest first; a GPU takes the first whose shared memory it has. 64 x 64 is the reference tile.
_SMALL = ((32, 32, 4), (16, 16, 4), (16, 8, 4), (8, 8, 2))
_FWD_TILES = {
    32: ((128, 64, 4), (64, 64, 4), *_SMALL),
    64: ((128, 64, 4), (64, 64, 4), *_SMALL),
    96: ((64, 64, 4), *_SMALL),
    128: ((64, 64, 4), (64, 32, 4), *_SMALL),
    192: ((64, 32, 4), *_SMALL),
    256: ((64, 32, 4), *_SMALL),
}
_BWD_TILES = {
    32: ((64, 64, 4), *_SMALL),
    64: ((64, 64, 4), *_SMALL),
    96: ((64, 32, 4), *_SMALL),
    128: ((64, 32, 4), *_SMALL),
    192: ((32, 32, 4), *_SMALL),
    256: ((32, 32, 4), *_SMALL),
}


def padded_head_dim(head_dim: int) -> int | None:
    """The smallest head dim of the table that holds it."""
    return next((known for known in HEAD_DIMS if head_dim <= known), None)


def candidates(kernel: str, dtype: str, out_dtype: str, head_dim: int) -> Iterator[Row]:
    """Every row for a padded head dim, the preferred first."""
    tiles = _FWD_TILES if kernel == "fwd_simt" else _BWD_TILES
    for block_m, block_n, num_warps in tiles[head_dim]:
        yield Row(kernel, dtype, out_dtype, head_dim, block_m, block_n, num_warps)


def select(kernel: str, dtype: str, out_dtype: str, head_dim: int, arch: Arch) -> Row:
    """The first row that fits the architecture."""
    return next(row for row in candidates(kernel, dtype, out_dtype, head_dim) if row.shared_bytes <= arch.shared_bytes)
