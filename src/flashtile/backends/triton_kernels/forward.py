"""The forward kernel."""

import triton
import triton.language as tl

from flashtile.backends.triton_kernels.arguments import NOT_SPECIALIZED
from flashtile.backends.triton_kernels.bounds import key_bounds, sequence_bounds
from flashtile.backends.triton_kernels.dropout import dropout_keep
from flashtile.backends.triton_kernels.scores import LN2, LOG2E, in_score_unit, load_slope, score_tile
from flashtile.backends.triton_kernels.tiles import load_tile, pointer_to, row_offset, store_tile, tile_offsets


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def fwd_triton_kernel(
    q,
    k,
    v,
    out,
    lse,
    bias,
    mask,
    alibi_slopes,
    alibi_batch_stride,
    sinks,
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
    IS_FLOAT32: tl.constexpr,
    SCALE_IN_EXPONENT: tl.constexpr,  # scores are scale * q.k, scale > 0, no sinks: exp2 applies the scale
    PRECISION: tl.constexpr,
):
    """out and lse of BLOCK_M queries of one head."""
    # Last rows of a head first: with a causal mask they see the most keys, so the longest programs start first
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
    k_pointer = pointer_to(k, b, h // GROUP, k_first)
    v_pointer = pointer_to(v, b, h // GROUP, k_first)
    k_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, USE_INT64)
    v_offsets = tile_offsets(v, BLOCK_N, BLOCK_DV, USE_INT64)
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
    q_pointer = pointer_to(q, b, h, q_first + m0)
    q_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, USE_INT64)
    q_tile = load_tile(q_pointer, q_offsets, i < seqlen_q, D, BLOCK_D, True)

    # Turns differences of scores into exponents of 2
    exponent_scale = scale * LOG2E if SCALE_IN_EXPONENT else (LOG2E if bias is not None else 1.0)

    # A sink is a key without a value: it is the initial maximum and sum
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        m = tl.zeros([BLOCK_M], tl.float32) + in_score_unit(tl.load(sinks + h), bias is not None)
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

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
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, _ = score_tile(
                    s, i[:, None], j[None, :], bias, mask, position, options, flags, part != 1, True, SCALE_IN_EXPONENT
                )
                # Update the row maximum; 0 replaces the maximum of a row without keys. In float32 the old maximum stays
                # while no p exceeds 2: rescaling in every tile, as ALiBi causes, accumulates a rounding error each time
                m_new = tl.max(s, 1)
                m_new = tl.where((m_new - m) * exponent_scale > 1.0, m_new, m) if IS_FLOAT32 else tl.maximum(m, m_new)
                m_finite = m_new
                if part != 1 or mask is not None or bias is not None or alibi_slopes is not None:
                    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
                # Subtract before scaling: near 1e11 the rounding error of a scaled maximum overflows an exponent
                p = tl.exp2((s - m_finite[:, None]) * exponent_scale)
                # Rescale l and O to the new maximum, then add this tile
                alpha = tl.exp2((m - m_finite) * exponent_scale)
                l = l * alpha + tl.sum(p, 1)
                o = o * alpha[:, None]
                if HAS_DROPOUT:
                    origin = (first_query, first_key, first_head, total_heads)
                    keep = dropout_keep(rng_state, origin, b, h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N)
                    p = tl.where(keep, p, 0.0)
                v_tile = load_tile(v_pointer + row_offset(v, n0), v_offsets, j < seqlen_k, DV, BLOCK_DV, part != 1)
                o = tl.dot(p.to(v_tile.dtype), v_tile, o, input_precision=PRECISION)
                m = m_new

    # A fully masked row has l = 0: output 0, lse -inf
    o = o * (keep_factor / tl.where(l == 0, 1.0, l))[:, None]
    out_pointer = pointer_to(out, b, h, q_first + m0)
    out_offsets = tile_offsets(out, BLOCK_M, BLOCK_DV, USE_INT64)
    store_tile(out_pointer, out_offsets, o, i < seqlen_q, DV, BLOCK_DV)
    lse_scale = scale if SCALE_IN_EXPONENT else (1.0 if bias is not None else LN2)
    lse_pointer = lse + (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first + m0
    tl.store(lse_pointer + tl.arange(0, BLOCK_M), m * lse_scale + tl.log(l), mask=i < seqlen_q)
