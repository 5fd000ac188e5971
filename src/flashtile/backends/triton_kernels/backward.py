"""The backward kernels: preprocess, dK and dV, dQ."""

import triton
import triton.language as tl

from flashtile.backends.triton_kernels.arguments import NOT_SPECIALIZED
from flashtile.backends.triton_kernels.bounds import key_bounds, query_bounds, sequence_bounds, visible_queries
from flashtile.backends.triton_kernels.dropout import dropout_keep
from flashtile.backends.triton_kernels.scores import in_score_unit, load_slope, probability, score_tile
from flashtile.backends.triton_kernels.tiles import load_tile, pointer_to, row_offset, store_tile, tile_offsets


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_preprocess_triton_kernel(
    out,
    dout,
    dlse,
    lse,
    score_lse,
    delta,
    heads,
    rows,  # rows of lse per head; in a packed call those of all sequences
    num_blocks,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    USE_INT64: tl.constexpr,
    IS_NATURAL: tl.constexpr,  # scores are natural: there is a bias
):
    """delta = rowsum(dO * O) - dlse and lse in the unit of the scores, for BLOCK_M rows of one head."""
    block = tl.program_id(0)
    m0 = block % num_blocks * BLOCK_M
    h = block // num_blocks % heads
    b = block // num_blocks // heads
    is_inside = m0 + tl.arange(0, BLOCK_M) < rows
    o_offsets = tile_offsets(out, BLOCK_M, BLOCK_DV, USE_INT64)
    do_offsets = tile_offsets(dout, BLOCK_M, BLOCK_DV, USE_INT64)
    o_tile = load_tile(pointer_to(out, b, h, m0), o_offsets, is_inside, DV, BLOCK_DV, True)
    do_tile = load_tile(pointer_to(dout, b, h, m0), do_offsets, is_inside, DV, BLOCK_DV, True)
    row_sum = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    element = (b.to(tl.int64) * heads + h) * rows + m0 + tl.arange(0, BLOCK_M)
    row_lse = tl.load(lse + element, mask=is_inside)
    if dlse is not None:
        row_sum -= tl.load(dlse + element, mask=is_inside)
    # A fully masked row has no gradient, whatever dO and dlse hold: exp2(s - inf) is 0
    is_empty = row_lse == float("-inf")
    tl.store(score_lse + element, tl.where(is_empty, float("inf"), in_score_unit(row_lse, IS_NATURAL)), mask=is_inside)
    tl.store(delta + element, tl.where(is_empty, 0.0, row_sum), mask=is_inside)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_dkdv_triton_kernel(
    q,
    k,
    v,
    dout,
    score_lse,
    delta,
    dk,
    dv,
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
    num_n_blocks,
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
):
    """dK and dV of BLOCK_N keys of one key head.

    Tiles are transposed (keys x queries), so that P^T and dS^T enter their products from registers.
    """
    # First keys of a head first: with a causal mask the most queries see them
    block = tl.program_id(0)
    heads_kv = heads // GROUP
    n0 = block % num_n_blocks * BLOCK_N
    h_kv = block // num_n_blocks % heads_kv
    b = block // num_n_blocks // heads_kv
    lse_rows = seqlen_q
    lse_batch = b
    if lengths.cu_seqlens_q is not None:
        lse_rows = total_q
        lse_batch = b * 0
    q_first, seqlen_q, k_first, seqlen_k = sequence_bounds(lengths, b, seqlen_q, seqlen_k, total_q, total_k)
    if n0 >= seqlen_k:
        return
    offset = seqlen_k - seqlen_q
    if IS_TOP_LEFT:
        offset = offset * 0
    j = n0 + tl.arange(0, BLOCK_N)
    is_key = j < seqlen_k
    k_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, USE_INT64)
    v_offsets = tile_offsets(v, BLOCK_N, BLOCK_DV, USE_INT64)
    k_tile = load_tile(pointer_to(k, b, h_kv, k_first + n0), k_offsets, is_key, D, BLOCK_D, True)
    v_tile = load_tile(pointer_to(v, b, h_kv, k_first + n0), v_offsets, is_key, DV, BLOCK_DV, True)
    q_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, USE_INT64)
    do_offsets = tile_offsets(dout, BLOCK_M, BLOCK_DV, USE_INT64)
    flags = (HAS_LEFT, HAS_RIGHT, SOFTCAP, alibi_slopes is not None)
    # Keys past the end only affect their own rows of dK and dV, which are not stored. Clamp them for loads of scores
    j = tl.minimum(j, seqlen_k - 1)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Queries that see no key have no gradient, whatever dO holds
    low, high = visible_queries(seqlen_q, seqlen_k, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    begin, full_begin, full_end, end = query_bounds(
        n0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    for part in tl.static_range(3):  # partial, full, partial tiles
        if part > 0 or HAS_RIGHT:
            part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
            part_end = full_begin if part == 0 else (full_end if part == 1 else end)
            # One loop over the query tiles of all heads that share the keys
            num_tiles = tl.maximum(part_end - part_begin + BLOCK_M - 1, 0) // BLOCK_M
            divisor = tl.maximum(num_tiles, 1)  # not 0: the division is hoisted out of the loop, even of an empty one
            for step in tl.range(
                0 if GROUP > 1 else part_begin,
                GROUP * num_tiles if GROUP > 1 else part_end,
                1 if GROUP > 1 else BLOCK_M,
            ):
                h = h_kv * GROUP + step // divisor if GROUP > 1 else h_kv
                m0 = tl.multiple_of(part_begin + step % divisor * BLOCK_M if GROUP > 1 else step, BLOCK_M)
                position = (b, h, offset, seqlen_q, seqlen_k)
                slope = load_slope(alibi_slopes, alibi_batch_stride, b, h)
                options = (scale, softcap, softcap_factor, slope, window_left, window_right)
                q_pointer, do_pointer = pointer_to(q, b, h, q_first), pointer_to(dout, b, h, q_first)
                stats_offset = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
                i = m0 + tl.arange(0, BLOCK_M)
                is_query = (i >= low) & (i < high)
                q_tile = load_tile(q_pointer + row_offset(q, m0), q_offsets, is_query, D, BLOCK_D, part != 1)
                if part != 1:
                    row_lse = tl.load(score_lse + stats_offset + i, mask=is_query, other=float("inf"))
                    row_delta = tl.load(delta + stats_offset + i, mask=is_query, other=0.0)
                else:
                    row_lse = tl.load(score_lse + stats_offset + i)
                    row_delta = tl.load(delta + stats_offset + i)
                # Recompute P^T from the stored lse
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                s, capped = score_tile(
                    s, i[None, :], j[:, None], bias, mask, position, options, flags, part != 1, False, False
                )
                p = probability(s, row_lse[None, :], bias is not None)
                do_tile = load_tile(do_pointer + row_offset(dout, m0), do_offsets, is_query, DV, BLOCK_DV, part != 1)
                if mask is not None or bias is not None:
                    do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
                # dV; the keep factor is applied when it is stored: P times it may be too large for float16
                if HAS_DROPOUT:
                    origin = (first_query, first_key, first_head, total_heads)
                    keep = tl.trans(dropout_keep(rng_state, origin, b, h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N))
                    dropped = tl.where(keep, p, 0.0)
                    dv_tile = tl.dot(dropped.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
                else:
                    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
                # dS^T through the softmax, then through the softcap; the scale is applied when dK is stored
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                ds = p * (dp - row_delta[None, :])
                if SOFTCAP:
                    ds = ds * (1 - capped * capped)
                # dK
                dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)

    dk_offsets = tile_offsets(dk, BLOCK_N, BLOCK_D, USE_INT64)
    dv_offsets = tile_offsets(dv, BLOCK_N, BLOCK_DV, USE_INT64)
    dk_pointer, dv_pointer = pointer_to(dk, b, h_kv, k_first + n0), pointer_to(dv, b, h_kv, k_first + n0)
    store_tile(dk_pointer, dk_offsets, dk_tile * scale, is_key, D, BLOCK_D)
    store_tile(dv_pointer, dv_offsets, dv_tile * keep_factor, is_key, DV, BLOCK_DV)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_dq_triton_kernel(
    q,
    k,
    v,
    dout,
    score_lse,
    delta,
    dq,
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
    num_m_blocks,
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
):
    """dQ of BLOCK_M queries of one head."""
    block = tl.program_id(0)
    m0 = (num_m_blocks - 1 - block % num_m_blocks) * BLOCK_M
    h = block // num_m_blocks % heads
    b = block // num_m_blocks // heads
    lse_rows = seqlen_q
    lse_batch = b
    if lengths.cu_seqlens_q is not None:
        lse_rows = total_q
        lse_batch = b * 0
    q_first, seqlen_q, k_first, seqlen_k = sequence_bounds(lengths, b, seqlen_q, seqlen_k, total_q, total_k)
    if m0 >= seqlen_q:
        return
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
    flags = (HAS_LEFT, HAS_RIGHT, SOFTCAP, alibi_slopes is not None)
    i = m0 + tl.arange(0, BLOCK_M)
    stats_offset = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
    row_lse = tl.load(score_lse + stats_offset + i, mask=i < seqlen_q, other=float("inf"))
    row_delta = tl.load(delta + stats_offset + i, mask=i < seqlen_q, other=0.0)
    q_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, USE_INT64)
    do_offsets = tile_offsets(dout, BLOCK_M, BLOCK_DV, USE_INT64)
    q_tile = load_tile(pointer_to(q, b, h, q_first + m0), q_offsets, i < seqlen_q, D, BLOCK_D, True)
    do_tile = load_tile(pointer_to(dout, b, h, q_first + m0), do_offsets, i < seqlen_q, DV, BLOCK_DV, True)
    do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
    k_pointer, v_pointer = pointer_to(k, b, h // GROUP, k_first), pointer_to(v, b, h // GROUP, k_first)
    k_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, USE_INT64)
    v_offsets = tile_offsets(v, BLOCK_N, BLOCK_DV, USE_INT64)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    begin, full_begin, full_end, end = key_bounds(
        m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    for part in tl.static_range(3):  # partial, full, partial tiles
        if part > 0 or HAS_LEFT:
            part_begin = begin if part == 0 else (full_begin if part == 1 else full_end)
            part_end = full_begin if part == 0 else (full_end if part == 1 else end)
            for n0 in tl.range(part_begin, part_end, BLOCK_N):
                n0 = tl.multiple_of(n0, BLOCK_N)
                j = n0 + tl.arange(0, BLOCK_N)
                k_tile = load_tile(k_pointer + row_offset(k, n0), k_offsets, j < seqlen_k, D, BLOCK_D, part != 1)
                v_tile = load_tile(v_pointer + row_offset(v, n0), v_offsets, j < seqlen_k, DV, BLOCK_DV, part != 1)
                # Recompute P from the stored lse
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, capped = score_tile(
                    s, i[:, None], j[None, :], bias, mask, position, options, flags, part != 1, True, False
                )
                p = probability(s, row_lse[:, None], bias is not None)
                # dS through the softmax, then through the softcap; the scale is applied when dQ is stored
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    origin = (first_query, first_key, first_head, total_heads)
                    keep = dropout_keep(rng_state, origin, b, h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                ds = p * (dp - row_delta[:, None])
                if SOFTCAP:
                    ds = ds * (1 - capped * capped)
                dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)

    dq_offsets = tile_offsets(dq, BLOCK_M, BLOCK_D, USE_INT64)
    store_tile(pointer_to(dq, b, h, q_first + m0), dq_offsets, dq_tile * scale, i < seqlen_q, D, BLOCK_D)
