"""The kernels there are. A new head dim or tile is one entry; selection, precompilation and tests loop over this table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashtile.kernels.arch import Arch
from flashtile.kernels.spec import Features, Row, Sm90Row

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
PASSES = {"forward": ("fwd_simt",), "backward": ("bwd_dq_simt", "bwd_dkdv_simt", "bwd_dbias_simt")}
SMALL_BLOCK_M = 64  # of a tile that is taken when the grid would not fill the GPU


class Tile(NamedTuple):
    """One tile, and how many of the options that cost registers it holds without a spill."""

    block_m: int
    block_n: int
    num_warps: int
    max_options: int = 99


# The fastest first; a call takes the first that holds its options and whose shared memory its GPU has. 64 x 64 is the reference tile.
# Measured on an NVIDIA H200 at B=4 H=16 S=4096, float32: docs/simt.md.
_SMALL = (Tile(32, 32, 4), Tile(16, 16, 4), Tile(16, 8, 4), Tile(8, 8, 2))
_TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "fwd_simt": {
        32: (Tile(128, 64, 4, max_options=0), Tile(64, 64, 4), *_SMALL),
        64: (Tile(128, 64, 4, max_options=0), Tile(64, 64, 4), *_SMALL),
        96: (Tile(64, 64, 4, max_options=2), Tile(64, 32, 4), *_SMALL),
        128: (Tile(128, 64, 8), Tile(64, 32, 4), *_SMALL),
        192: (Tile(64, 32, 4), *_SMALL),
        256: (Tile(128, 32, 8, max_options=1), Tile(64, 32, 4, max_options=1), *_SMALL),
    },
    "bwd_dq_simt": {
        32: (Tile(64, 64, 4), *_SMALL),
        64: (Tile(128, 32, 4, max_options=0), Tile(64, 64, 4), *_SMALL),
        96: (Tile(64, 32, 4), *_SMALL),
        128: (Tile(64, 32, 4), *_SMALL),
        192: _SMALL,
        256: _SMALL,
    },
    "bwd_dkdv_simt": {
        32: (Tile(64, 64, 4), *_SMALL),
        64: (Tile(64, 64, 4, max_options=1), Tile(64, 32, 4), *_SMALL),
        96: (Tile(64, 32, 4), *_SMALL),
        128: (Tile(64, 32, 4, max_options=1), *_SMALL),
        192: _SMALL,
        256: _SMALL,
    },
    "bwd_dbias_simt": {
        32: (Tile(64, 32, 4), *_SMALL),
        64: (Tile(64, 32, 4), *_SMALL),
        96: (Tile(64, 32, 4), *_SMALL),
        128: (Tile(64, 32, 4), *_SMALL),
        192: _SMALL,
        256: _SMALL,
    },
}


def tile_sizes() -> frozenset[int]:
    """Every length of a tile of any kernel, in queries or keys."""
    simt = [tile[:2] for kernel in _TILES.values() for tiles in kernel.values() for tile in tiles]
    sm90 = [tile[:2] for tiles in (*_SM90_TILES.values(), _SM90_PACKED.values()) for tile in tiles]
    return frozenset(size for tile in simt + sm90 for size in tile)


def padded_head_dim(head_dim: int) -> int | None:
    """The smallest head dim of the table that holds it."""
    return next((known for known in HEAD_DIMS if head_dim <= known), None)


def candidates(kernel: str, dtype: str, out_dtype: str, head_dim: int, features: Features) -> Iterator[Row]:
    """Every row for a padded head dim that takes the features, the preferred first."""
    for tile in _TILES[kernel][head_dim]:
        if features.num_options <= tile.max_options:
            yield Row(kernel, dtype, out_dtype, head_dim, tile.block_m, tile.block_n, tile.num_warps)


def fits(row: Row, arch: Arch) -> bool:
    return row.shared_bytes <= arch.shared_bytes and row.thread_scores <= arch.max_thread_scores


def select(kernel: str, dtype: str, out_dtype: str, head_dim: int, features: Features, arch: Arch, is_small: bool = False) -> Row:
    """The first row that fits the architecture; with is_small, of those with a small tile."""
    rows = [row for row in candidates(kernel, dtype, out_dtype, head_dim, features) if fits(row, arch)]
    return next((row for row in rows if row.block_m <= SMALL_BLOCK_M), rows[-1]) if is_small else rows[0]


# The Hopper forward


class Sm90Tile(NamedTuple):
    """One tile, and which calls take it."""

    block_m: int
    block_n: int
    num_stages: int = 2
    takes_turns: bool = True
    scales_lazily: bool = False
    stores_p: bool = False
    takes_ragged: bool = True  # without a band; under one it is mostly the tile with the fewest keys that has fewer queries
    max_options: int = 99  # of those that change scores or probabilities, that it holds without a spill


# Short queries of heads that share a KV head, packed: what counts is how fast keys arrive.
_SM90_PACKED = {
    (64, 64): Sm90Tile(64, 128, num_stages=4, takes_turns=False),
    (96, 96): Sm90Tile(64, 128, takes_turns=False),
    (128, 128): Sm90Tile(64, 128, takes_turns=False),
    (192, 128): Sm90Tile(64, 128, takes_turns=False),
    (192, 192): Sm90Tile(64, 96, takes_turns=False),
    (256, 256): Sm90Tile(64, 64, takes_turns=False),
}
# By padded head_dim and head_dim_v; the first that takes a call is chosen. Measured on an NVIDIA H200: docs/sm90.md.
_SM90_TILES: dict[tuple[int, int], tuple[Sm90Tile, ...]] = {
    (64, 64): (Sm90Tile(192, 128, num_stages=4, max_options=0), Sm90Tile(128, 128)),
    (96, 96): (Sm90Tile(192, 128, scales_lazily=True, stores_p=True, takes_ragged=False, max_options=0), Sm90Tile(128, 128)),
    (128, 128): (
        Sm90Tile(192, 128, scales_lazily=True, stores_p=True, takes_ragged=False, max_options=0),
        Sm90Tile(128, 128),
    ),
    (192, 128): (Sm90Tile(128, 128),),
    (192, 192): (Sm90Tile(128, 96, scales_lazily=True),),
    (256, 256): (Sm90Tile(128, 80, scales_lazily=True, max_options=0), Sm90Tile(128, 64, max_options=1), Sm90Tile(128, 32)),
}
SM90_DTYPES = ("float16", "bfloat16")


def why_not_sm90(dtype: str, head_dim: int, head_dim_v: int, features: Features, arch: Arch) -> str | None:
    """Why the Hopper forward does not take a call, or None."""
    if not arch.has_wgmma:
        return f"{arch.name} has no warpgroup products"
    if dtype not in SM90_DTYPES:
        return f"{dtype} is not among its dtypes ({', '.join(SM90_DTYPES)})"
    if not any(head_dim <= known and head_dim_v <= known_v for known, known_v in _SM90_TILES):
        return f"head_dim {max(head_dim, head_dim_v)} is over its 256"
    if features.is_paged:
        return "keys in pages"
    if not features.is_wide:
        return "rows that are not multiples of 16 bytes on 16-byte boundaries"
    return None


def packed_heads(seqlen_q: int, heads: int, heads_kv: int) -> int:
    """How many heads should share a tile: all that share a KV head, if that makes fewer tiles, else 1."""
    num_heads = heads // heads_kv
    if not 1 < num_heads <= 64:
        return 1
    num_packed, num_single = -(-seqlen_q // (64 // num_heads)), num_heads * -(-seqlen_q // 128)
    return num_heads if num_packed < num_single else 1


def is_ragged(seqlen_q: int) -> bool:
    """Tiles of 192 queries would have over 5 % more rows than tiles of 128."""
    return -(-seqlen_q // 192) * 192 > 1.05 * (-(-seqlen_q // 128) * 128)


def sm90_rows(
    dtype: str, out_dtype: str, head_dim: int, head_dim_v: int, features: Features, is_packed: bool, is_ragged: bool
) -> list[Sm90Row]:
    """Every row that takes the call, the preferred first."""
    dims = min(pair for pair in _SM90_TILES if head_dim <= pair[0] and head_dim_v <= pair[1])
    num_options = features.num_options - features.has_lengths
    tiles = (_SM90_PACKED[dims],) if is_packed else _SM90_TILES[dims]
    return [
        Sm90Row(
            dtype,
            out_dtype,
            *dims,
            tile.block_m,
            tile.block_n,
            tile.num_stages,
            tile.takes_turns,
            tile.scales_lazily,
            tile.stores_p,
            packs_heads=is_packed,
        )
        for tile in tiles
        if (tile.takes_ragged or features.has_band or not is_ragged) and num_options <= tile.max_options
    ]


def all_sm90_tiles() -> list[tuple[tuple[int, int], Sm90Tile, bool]]:
    """Every tile of the Hopper forward: its head dims, and whether it is one of packed heads."""
    single = [(dims, tile, False) for dims, tiles in _SM90_TILES.items() for tile in tiles]
    return [*single, *((dims, tile, True) for dims, tile in _SM90_PACKED.items())]


def select_sm90(
    dtype: str, out_dtype: str, head_dim: int, head_dim_v: int, features: Features, is_packed: bool = False, is_ragged: bool = False
) -> Sm90Row:
    return sm90_rows(dtype, out_dtype, head_dim, head_dim_v, features, is_packed, is_ragged)[0]
