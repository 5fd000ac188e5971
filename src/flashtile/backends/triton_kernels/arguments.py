"""Arguments of a Triton kernel: tensors with their strides, sequence lengths, and which integers it is specialized on.

An argument that is None is compiled away. Triton compiles a new variant for an integer that is 1 or a multiple of 16.
Lengths and counts are exempt from that (NOT_SPECIALIZED). Row strides are encoded so that only one property selects a
variant: whether every stride of the tensor is a multiple of 8, which 16-byte loads depend on.
"""

from typing import Any, NamedTuple

# Integer arguments that no kernel is specialized on
NOT_SPECIALIZED = [
    *("alibi_batch_stride", "heads", "rows", "seqlen_q", "seqlen_k", "total_q", "total_k"),
    *("window_left", "window_right", "drop_threshold", "first_query", "first_key", "first_head", "total_heads"),
    *("num_blocks", "num_m_blocks", "num_n_blocks", "num_splits", "split_stride", "num_pairs", "pair_heads"),
    *("dbias_heads", "dbias_rows", "dbias_columns"),
]


class RowTensor(NamedTuple):
    """A tensor of rows with a contiguous last dimension: q, k, v, out and their gradients."""

    data: Any
    batch: int  # encoded strides; that of the batch is 0 for packed sequences
    head: int
    row: int


def encode_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides times 2 if all of them are multiples of 8, so all multiples of 16; else times 2 plus 1, so all odd."""
    is_aligned = all(stride % 8 == 0 for stride in strides)
    return tuple(2 * stride if is_aligned else 2 * stride + 1 for stride in strides)


class ScoreTensor(NamedTuple):
    """A tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k): bias or mask."""

    data: Any
    batch: int  # strides, 0 where broadcast
    head: int
    row: int
    column: int


class Lengths(NamedTuple):
    """Index tensors of packed and padded calls; all None in a dense call."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    leftpad_k: Any
