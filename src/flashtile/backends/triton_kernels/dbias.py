"""The gradient of the bias."""

import triton
import triton.language as tl

from flashtile.backends.triton_kernels.arguments import NOT_SPECIALIZED
from flashtile.backends.triton_kernels.bounds import key_bounds, sequence_bounds
from flashtile.backends.triton_kernels.dropout import dropout_keep
from flashtile.backends.triton_kernels.scores import load_slope, probability, score_tile
from flashtile.backends.triton_kernels.tiles import load_tile, pointer_to, tile_offsets


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_dbias_triton_kernel(
    q,
    k,
    v,
    dout,
    score_lse,
    delta,
    dbias,
    split_stride,
    num_splits,
    num_pairs,  # (batch, head) pairs that share a tile
    pair_heads,
    dbias_heads,
    dbias_rows,
    dbias_columns,
    num_m_blocks,
    num_n_blocks,
    bias,
    mask,
    alibi_slopes,
    alibi_batch_stride,
    rng_state,
    first_query,
    first_key,
    first_head,
    total_heads,
    lengths,
    heads,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    scale,
    softcap,
    softcap_factor,
    window_left,
    window_right,
    drop_threshold,
    keep_factor,
    GROUP: tl.constexpr,  # query heads per key head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_INT64: tl.constexpr,
    IS_TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BROADCAST_BATCH: tl.constexpr,
    BROADCAST_HEADS: tl.constexpr,
    BROADCAST_ROWS: tl.constexpr,
    BROADCAST_COLUMNS: tl.constexpr,
):
    """One tile of dbias, summed over every axis that the bias is broadcast along."""
    # Find the tile of the bias, and this split's share of the (batch, head) pairs that it is broadcast over
    block = tl.program_id(0)
    split = block % num_splits
    n_block = block // num_splits % num_n_blocks
    m_block = block // num_splits // num_n_blocks % num_m_blocks
    bias_h = block // num_splits // num_n_blocks // num_m_blocks % dbias_heads
    bias_b = block // num_splits // num_n_blocks // num_m_blocks // dbias_heads
    max_seqlen_q = seqlen_q
    max_seqlen_k = seqlen_k
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    flags = (HAS_LEFT, HAS_RIGHT, SOFTCAP, alibi_slopes is not None)

    for pair in tl.range(split, num_pairs, num_splits):
        b = pair // pair_heads if BROADCAST_BATCH else bias_b
        h = pair % pair_heads if BROADCAST_HEADS else bias_h
        lse_rows = max_seqlen_q
        lse_batch = b
        if lengths.cu_seqlens_q is not None:
            lse_rows = total_q
            lse_batch = b * 0
        q_first, seqlen_q, k_first, seqlen_k = sequence_bounds(lengths, b, max_seqlen_q, max_seqlen_k, total_q, total_k)
        offset = seqlen_k - seqlen_q
        if IS_TOP_LEFT:
            offset = offset * 0
        position = (b, h, offset, seqlen_q, seqlen_k)
        options = (
            scale,
            softcap,
            softcap_factor,
            load_slope(alibi_slopes, alibi_batch_stride, b, h),
            window_left,
            window_right,
        )
        stats_offset = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
        for m0 in tl.range(
            0 if BROADCAST_ROWS else m_block * BLOCK_M,
            seqlen_q if BROADCAST_ROWS else tl.minimum((m_block + 1) * BLOCK_M, seqlen_q),
            BLOCK_M,
        ):
            i = m0 + tl.arange(0, BLOCK_M)
            row_lse = tl.load(score_lse + stats_offset + i, mask=i < seqlen_q, other=float("inf"))
            row_delta = tl.load(delta + stats_offset + i, mask=i < seqlen_q, other=0.0)
            q_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, USE_INT64)
            do_offsets = tile_offsets(dout, BLOCK_M, BLOCK_DV, USE_INT64)
            q_tile = load_tile(pointer_to(q, b, h, q_first + m0), q_offsets, i < seqlen_q, D, BLOCK_D, True)
            do_tile = load_tile(pointer_to(dout, b, h, q_first + m0), do_offsets, i < seqlen_q, DV, BLOCK_DV, True)
            do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
            begin, _full_begin, _full_end, end = key_bounds(
                m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
            if not BROADCAST_COLUMNS:
                begin = tl.maximum(begin, n_block * BLOCK_N)
                end = tl.minimum(end, (n_block + 1) * BLOCK_N)
            for n0 in tl.range(begin, end, BLOCK_N):
                j = n0 + tl.arange(0, BLOCK_N)
                k_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, USE_INT64)
                v_offsets = tile_offsets(v, BLOCK_N, BLOCK_DV, USE_INT64)
                k_pointer = pointer_to(k, b, h // GROUP, k_first + n0)
                v_pointer = pointer_to(v, b, h // GROUP, k_first + n0)
                k_tile = load_tile(k_pointer, k_offsets, j < seqlen_k, D, BLOCK_D, True)
                v_tile = load_tile(v_pointer, v_offsets, j < seqlen_k, DV, BLOCK_DV, True)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, _ = score_tile(s, i[:, None], j[None, :], bias, mask, position, options, flags, True, True, False)
                p = probability(s, row_lse[:, None], bias is not None)
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    origin = (first_query, first_key, first_head, total_heads)
                    keep = dropout_keep(rng_state, origin, b, h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                sums += p * (dp - row_delta[:, None])

    # Sum over rows and columns that the bias is broadcast along
    rows = (m_block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (n_block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if BROADCAST_ROWS:
        sums = tl.sum(sums, 0)[None, :]
        rows = tl.zeros([1, 1], tl.int32)
    if BROADCAST_COLUMNS:
        sums = tl.sum(sums, 1)[:, None]
        columns = tl.zeros([1, 1], tl.int32)
    pointer = dbias.data + split.to(tl.int64) * split_stride
    pointer += bias_b.to(tl.int64) * dbias.batch + bias_h.to(tl.int64) * dbias.head
    is_inside = (rows < dbias_rows) & (columns < dbias_columns)
    pointers = pointer + rows.to(tl.int64) * dbias.row + columns * dbias.column
    tl.store(pointers, sums.to(dbias.data.dtype.element_ty), mask=is_inside)
