"""Addresses, loads and stores of tiles. Offsets between rows, heads and batches are 64-bit."""

import triton
import triton.language as tl


@triton.jit
def decode_stride(code):
    return code >> 1


@triton.jit
def row_offset(rows, row):
    """Elements from the first row to the given one."""
    return row.to(tl.int64) * decode_stride(rows.row)


@triton.jit
def pointer_to(rows, b, h, row):
    """Pointer to the first element of a row."""
    head = b.to(tl.int64) * decode_stride(rows.batch) + h.to(tl.int64) * decode_stride(rows.head)
    return rows.data + head + row_offset(rows, row)


@triton.jit
def tile_offsets(rows, BLOCK, BLOCK_D, USE_INT64):
    """Element offsets of a tile of rows from its first element, 64-bit only with USE_INT64."""
    row = tl.arange(0, BLOCK)
    if USE_INT64:
        row = row.to(tl.int64)
    return row[:, None] * decode_stride(rows.row) + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(pointer, offsets, is_inside, D, BLOCK_D, IS_PARTIAL):
    """A tile of rows. Columns past head dim D are 0; in a partial tile so are rows that are not inside."""
    if IS_PARTIAL:
        mask = is_inside[:, None]
        if D < BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
        tile = tl.load(pointer + offsets, mask=mask, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(pointer + offsets, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointer + offsets)
    return tile


@triton.jit
def store_tile(pointer, offsets, tile, is_inside, D, BLOCK_D):
    mask = is_inside[:, None]
    if D < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointer + offsets, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_scores(scores, b, h, i, j):
    """A tile of bias or mask. i and j broadcast against each other and lie inside the sequence."""
    pointer = scores.data + b.to(tl.int64) * scores.batch + h.to(tl.int64) * scores.head
    return tl.load(pointer + i.to(tl.int64) * scores.row + j * scores.column)
