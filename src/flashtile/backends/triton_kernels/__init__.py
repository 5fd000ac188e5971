"""The kernels of the triton backend, written from the algorithm (FlashAttention-2) and from docs/semantics.md alone.

| kernel     | one program owns                 | it loops over                                                        |
|------------|----------------------------------|----------------------------------------------------------------------|
| fwd        | a block of queries               | the keys they may see; keeps row max m, row sum l and O, in base 2   |
| preprocess | a block of rows                  | (no loop) delta = rowsum(dO * O) - dlse, and lse in base 2           |
| dkdv       | a block of keys of one key head  | the queries that see them, of every query head that shares the keys  |
| dq         | a block of queries               | the keys they may see                                                |
| dbias      | a tile of the bias               | the batches, heads, rows and columns that the tile is broadcast over |

No two programs write the same element, so results are the same on every run.
A loop has up to three parts: partial tiles (cut by the window, the diagonal or the end of a sequence), full tiles, and
partial tiles again. Only partial tiles compare positions and mask their loads, so rows past an end are never read.

Modules: arguments (what a kernel receives), bounds (which tiles it visits), tiles (loads and stores), scores (from q.k
to a score) and dropout; the kernels are in forward, backward and dbias.
"""

from flashtile.backends.triton_kernels.arguments import NOT_SPECIALIZED, Lengths, RowTensor, ScoreTensor, encode_strides
from flashtile.backends.triton_kernels.backward import (
    bwd_dkdv_triton_kernel,
    bwd_dq_triton_kernel,
    bwd_preprocess_triton_kernel,
)
from flashtile.backends.triton_kernels.dbias import bwd_dbias_triton_kernel
from flashtile.backends.triton_kernels.dropout import MIN_SHARED_PHILOX_TILE
from flashtile.backends.triton_kernels.forward import fwd_triton_kernel

__all__ = [
    "MIN_SHARED_PHILOX_TILE",
    "NOT_SPECIALIZED",
    "Lengths",
    "RowTensor",
    "ScoreTensor",
    "bwd_dbias_triton_kernel",
    "bwd_dkdv_triton_kernel",
    "bwd_dq_triton_kernel",
    "bwd_preprocess_triton_kernel",
    "encode_strides",
    "fwd_triton_kernel",
]
