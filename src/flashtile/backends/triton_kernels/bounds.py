"""Bounds: the rows that a sequence has, and the tiles of it that a block has to visit."""

import triton
import triton.language as tl


@triton.jit
def clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def window_begin(position, window):
    """max(position - window, 0). Windows reach 2^31 - 1: the difference could overflow."""
    return tl.where(position > window, position - tl.minimum(window, tl.maximum(position, 0)), 0)


@triton.jit
def window_end(position, window, length):
    """position + window, clamped to [0, length]; the sum could overflow."""
    room = length - position
    return tl.where(window >= room, length, tl.maximum(position + tl.minimum(window, room), 0))


@triton.jit
def sequence_bounds(lengths, b, seqlen_q, seqlen_k, total_q, total_k):
    """First row and length of the queries and keys of sequence b. Bad values are clamped: no read is out of bounds."""
    q_first = b * 0
    k_first = b * 0
    if lengths.cu_seqlens_q is not None:
        q_first = clamp(tl.load(lengths.cu_seqlens_q + b), 0, total_q)
        seqlen_q = tl.minimum(clamp(tl.load(lengths.cu_seqlens_q + b + 1), q_first, total_q) - q_first, seqlen_q)
    if lengths.cu_seqlens_k is not None:
        k_first = clamp(tl.load(lengths.cu_seqlens_k + b), 0, total_k)
        seqlen_k = tl.minimum(clamp(tl.load(lengths.cu_seqlens_k + b + 1), k_first, total_k) - k_first, seqlen_k)
    if lengths.seqused_k is not None:
        seqlen_k = clamp(tl.load(lengths.seqused_k + b), 0, seqlen_k)
    if lengths.leftpad_k is not None:
        skipped = clamp(tl.load(lengths.leftpad_k + b), 0, seqlen_k)
        k_first += skipped
        seqlen_k -= skipped
    return q_first, seqlen_q, k_first, seqlen_k


@triton.jit
def key_bounds(m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT):
    """Keys that a block of queries visits: full tiles in [full_begin, full_end), partial tiles before and after.

    Returns begin, full_begin, full_end, end; all but end are multiples of BLOCK_N.
    """
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    begin = m0 * 0
    end = seqlen_k
    full_begin = begin
    full_end = seqlen_k
    if HAS_LEFT:
        begin = window_begin(m0 + offset, window_left) // BLOCK_N * BLOCK_N
        full_begin = (window_begin(m_last + offset, window_left) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = window_end(m_last + offset + 1, window_right, seqlen_k)
        full_end = window_end(m0 + offset + 1, window_right, seqlen_k)
    full_begin = clamp(full_begin, begin, tl.maximum((end + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin))
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def query_bounds(n0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT):
    """Queries that a block of keys visits, with the same four bounds as key_bounds."""
    n_last = tl.minimum(n0 + BLOCK_N, seqlen_k) - 1
    begin = n0 * 0
    end = seqlen_q
    full_begin = begin
    full_end = seqlen_q
    if HAS_RIGHT:
        begin = window_begin(n0 - offset, window_right) // BLOCK_M * BLOCK_M
        full_begin = (window_begin(n_last - offset, window_right) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        end = window_end(n_last - offset + 1, window_left, seqlen_q)
        full_end = window_end(n0 - offset + 1, window_left, seqlen_q)
    full_begin = clamp(full_begin, begin, tl.maximum((end + BLOCK_M - 1) // BLOCK_M * BLOCK_M, begin))
    full_end = tl.maximum(full_end // BLOCK_M * BLOCK_M, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def visible_queries(seqlen_q, seqlen_k, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT):
    """[low, high): the queries whose window contains at least one key."""
    low = offset * 0
    high = seqlen_q
    if HAS_RIGHT:
        low = window_begin(-offset, window_right)
    if HAS_LEFT:
        high = window_end(seqlen_k - offset, window_left, seqlen_q)
    return low, high
