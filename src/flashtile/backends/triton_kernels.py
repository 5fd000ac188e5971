"""The kernels of the triton backend, written from the algorithm (FlashAttention-2) and from docs/semantics.md alone.

fwd         one program a block of queries: walks over the keys it may see with running maximum m, sum l and output, in base 2
preprocess  one program a block of rows: delta = rowsum(dO * O) - dlse, and lse in base 2
dkdv        one program a block of keys of one key head: walks over the queries that see it, of every query head that shares it;
            tiles are transposed (keys x queries), so that P^T and dS^T enter their products from registers
dq          one program a block of queries: walks over the keys again
dbias       one program a tile of the bias: walks over the batches, heads, rows and columns that share it

No program adds to what another one writes, so every result is the same on every run. A walk has up to three parts: tiles cut by
an edge (the window, the diagonal, the end of a sequence), tiles that are seen whole, and cut tiles again; only cut tiles compare
positions. Rows behind an end are never read. Tensors come with their strides in `Rows` and `Scores`; what is None is compiled away.

Triton compiles anew for an integer that is 1 or a multiple of 16. Lengths are kept from that. Strides of rows come `coded`: what loads of
16 bytes depend on, that all strides of a tensor are multiples of 8, is all that a kernel is compiled for.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SHARES_WORDS = tl.constexpr(1024)  # elements of a tile, from which on its threads have a Philox call each or more
# Integers that no kernel is compiled for
RUNTIME = [
    *("alibi_batch", "heads", "rows", "seqlen_q", "seqlen_k", "total_q", "total_k", "window_left", "window_right", "drop_threshold"),
    *("num_blocks", "num_m_blocks", "num_n_blocks", "num_splits", "split_stride", "num_pairs", "pair_heads"),
    *("dbias_heads", "dbias_rows", "dbias_columns"),
]


class Rows(NamedTuple):
    """A tensor of rows with a contiguous last dimension: q, k, v, out and their gradients."""

    data: Any
    batch: int  # strides, coded; the batch's is 0 where sequences are packed
    head: int
    row: int


def coded(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Twice the strides: multiples of 16 where all are multiples of 8, else odd numbers."""
    is_aligned = all(stride % 8 == 0 for stride in strides)
    return tuple(2 * stride if is_aligned else 2 * stride + 1 for stride in strides)


class Scores(NamedTuple):
    """A tensor that is broadcast to (batch, heads, seqlen_q, seqlen_k): bias and mask."""

    data: Any
    batch: int  # strides, 0 where broadcast
    head: int
    row: int
    column: int


class Lengths(NamedTuple):
    """Index tensors of packed and padded calls; all None in a dense one."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    leftpad_k: Any


# Where things stand


@triton.jit
def clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def sequence(lengths, b, seqlen_q, seqlen_k, total_q, total_k):
    """First row and length of sequence b's queries and keys. Bad values are clamped, so that nothing outside is ever read."""
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
def key_parts(m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT):
    """Keys for a block of queries: [first, whole) cut tiles, [whole, cut) tiles seen whole, [cut, last) cut tiles."""
    m_last = tl.minimum(m0 + BLOCK_M, seqlen_q) - 1
    first = m0 * 0
    last = seqlen_k
    whole = first
    cut = seqlen_k
    if HAS_LEFT:
        first = tl.maximum(m0 + offset - window_left, 0) // BLOCK_N * BLOCK_N
        whole = (tl.maximum(m_last + offset - window_left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        last = clamp(m_last + offset + window_right + 1, 0, seqlen_k)
        cut = clamp(m0 + offset + window_right + 1, 0, seqlen_k)
    whole = clamp(whole, first, tl.maximum((last + BLOCK_N - 1) // BLOCK_N * BLOCK_N, first))
    cut = tl.maximum(cut // BLOCK_N * BLOCK_N, whole)
    return first, whole, cut, last


@triton.jit
def query_parts(n0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT):
    """Queries for a block of keys, in the same three parts."""
    n_last = tl.minimum(n0 + BLOCK_N, seqlen_k) - 1
    first = n0 * 0
    last = seqlen_q
    whole = first
    cut = seqlen_q
    if HAS_RIGHT:
        first = tl.maximum(n0 - offset - window_right, 0) // BLOCK_M * BLOCK_M
        whole = (tl.maximum(n_last - offset - window_right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:
        last = clamp(n_last - offset + window_left + 1, 0, seqlen_q)
        cut = clamp(n0 - offset + window_left + 1, 0, seqlen_q)
    whole = clamp(whole, first, tl.maximum((last + BLOCK_M - 1) // BLOCK_M * BLOCK_M, first))
    cut = tl.maximum(cut // BLOCK_M * BLOCK_M, whole)
    return first, whole, cut, last


@triton.jit
def seeing_queries(seqlen_q, seqlen_k, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT):
    """[low, high): the queries that the window shows a key at all."""
    low = offset * 0
    high = seqlen_q
    if HAS_RIGHT:
        low = tl.maximum(-offset - window_right, 0)
    if HAS_LEFT:
        high = tl.minimum(seqlen_k - offset + window_left, seqlen_q)
    return low, high


@triton.jit
def stride_of(code):
    return code >> 1


@triton.jit
def row_offset(rows, row):
    """Elements from the first row to another, in 64 bits."""
    return row.to(tl.int64) * stride_of(rows.row)


@triton.jit
def pointer_to(rows, b, h, row):
    """The first element of a row, by 64-bit offsets."""
    head = b.to(tl.int64) * stride_of(rows.batch) + h.to(tl.int64) * stride_of(rows.head)
    return rows.data + head + row_offset(rows, row)


@triton.jit
def tile_offsets(rows, BLOCK, BLOCK_D, FAR):
    """Elements of a tile of rows, counted from its first. FAR: its rows are so far apart that they need 64 bits."""
    row = tl.arange(0, BLOCK)
    if FAR:
        row = row.to(tl.int64)
    return row[:, None] * stride_of(rows.row) + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_tile(pointer, offsets, is_there, D, BLOCK_D, IS_CUT):
    """Rows of a tile, 0 behind head dim D and, if the tile is cut, in rows that are not there."""
    if IS_CUT:
        mask = is_there[:, None]
        if D < BLOCK_D:
            mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
        tile = tl.load(pointer + offsets, mask=mask, other=0.0)
    elif D < BLOCK_D:
        tile = tl.load(pointer + offsets, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointer + offsets)
    return tile


@triton.jit
def store_tile(pointer, offsets, tile, is_there, D, BLOCK_D):
    mask = is_there[:, None]
    if D < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointer + offsets, tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_scores(scores, b, h, i, j):
    """A tile of bias or mask; i and j stand crosswise and inside the sequence."""
    pointer = scores.data + b.to(tl.int64) * scores.batch + h.to(tl.int64) * scores.head
    return tl.load(pointer + i.to(tl.int64) * scores.row + j * scores.column)


# What stands in a tile of scores


@triton.jit
def tanh(x, IS_FLOAT32):
    """Within a few roundings of float32 if IS_FLOAT32, else within a rounding of 1."""
    t = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    if IS_FLOAT32:
        # That cancels near 0. There an odd polynomial, fitted to tanh(x) / x for |x| < 0.62 within 4e-9
        z = x * x
        series = -5.75555e-3 * z + 2.06832e-2
        series = series * z - 5.375289e-2
        series = series * z + 1.3331596e-1
        series = series * z - 3.3333287e-1
        t = tl.where(tl.abs(x) < 0.6, x + x * z * series, t)
    return t


@triton.jit
def score_tile(s, i, j, bias, mask, place, options, flags, IS_CUT, HAS_END, IS_RAW):
    """From the product q.k to scores in base 2, -inf where unseen, and tanh of the softcap where there is one.

    i and j stand crosswise, in either order. HAS_END: some keys may be none. IS_RAW leaves the scale to the caller.
    """
    b, h, offset, seqlen_q, seqlen_k = place
    scale, softcap, slope, window_left, window_right = options
    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, IS_FLOAT32 = flags
    capped = s
    if HAS_SOFTCAP:
        capped = tanh(s * (scale / softcap), IS_FLOAT32)
        s = capped * (softcap * LOG2E)
    elif not IS_RAW:
        s = s * (scale * LOG2E)
    if HAS_ALIBI:
        s -= (slope * LOG2E) * tl.abs(i + offset - j).to(tl.float32)
    # What a tile has too much is read from its last row and column
    i_inside = tl.minimum(i, seqlen_q - 1)
    j_inside = tl.minimum(j, seqlen_k - 1) if IS_CUT else j
    if bias is not None:
        s += load_scores(bias, b, h, i_inside, j_inside).to(tl.float32) * LOG2E
    if mask is not None:
        s = tl.where(load_scores(mask, b, h, i_inside, j_inside) != 0, s, float("-inf"))
    if IS_CUT:
        # Queries behind the end need no mask: nobody stores what they give
        if HAS_END:
            s = tl.where(j < seqlen_k, s, float("-inf"))
        if HAS_LEFT:
            s = tl.where(i + offset - j <= window_left, s, float("-inf"))
        if HAS_RIGHT:
            s = tl.where(j - i - offset <= window_right, s, float("-inf"))
    return s, capped


@triton.jit
def draw(rng_state, batch_head, row, eight):
    """The four Philox words of each row and eight neighbouring keys."""
    zero = row * 0 + eight * 0
    return tl.philox(
        tl.load(rng_state), eight + zero, row + zero, batch_head.to(tl.uint32) + zero, tl.load(rng_state + 1).to(tl.uint32) + zero
    )


@triton.jit
def kept(rng_state, batch_head, m0, n0, threshold, BLOCK_M, BLOCK_N):
    """Dropout bits of a tile (queries x keys), True = kept: of the words of eight keys, the low and high half of each in turn."""
    row = (m0 + tl.arange(0, BLOCK_M)).to(tl.uint32)[:, None]
    if BLOCK_M * BLOCK_N >= SHARES_WORDS:
        eight = (n0 // 8 + tl.arange(0, BLOCK_N // 8)).to(tl.uint32)[None, :]
        word0, word1, word2, word3 = draw(rng_state, batch_head, row, eight)
        # Words 0 to 3 side by side, then the halves of each
        words = tl.join(tl.join(word0, word2), tl.join(word1, word3)).reshape(BLOCK_M, BLOCK_N // 2)
        lanes = tl.join(words & 0xFFFF, words >> 16).reshape(BLOCK_M, BLOCK_N)
    else:
        # Each key draws for itself: with fewer words than threads Triton 3.6 was seen to hand out wrong ones
        key = (n0 + tl.arange(0, BLOCK_N)).to(tl.uint32)[None, :]
        word0, word1, word2, word3 = draw(rng_state, batch_head, row, key // 8)
        place = key % 8
        word = tl.where(place < 4, tl.where(place < 2, word0, word1), tl.where(place < 6, word2, word3))
        lanes = tl.where(place % 2 == 0, word & 0xFFFF, word >> 16)
    return lanes.to(tl.int32) >= threshold


@triton.jit
def load_slope(alibi_slopes, alibi_batch, b, h):
    slope = h * 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * alibi_batch + h)
    return slope


# Forward


@triton.jit(do_not_specialize=RUNTIME)
def fwd_triton_kernel(
    q,
    k,
    v,
    out,
    lse,
    bias,
    mask,
    alibi_slopes,
    alibi_batch,
    sinks,
    rng_state,
    lengths,
    heads,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_m_blocks,
    scale,
    softcap,
    window_left,
    window_right,
    drop_threshold,
    keep_factor,
    GROUP: tl.constexpr,  # query heads for each key head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAR: tl.constexpr,
    IS_TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    IS_RAW: tl.constexpr,  # scores are scale * q.k with scale > 0: the scale moves into the exponent
    PRECISION: tl.constexpr,
):
    # The last rows of a head first: under a causal mask they see most, and the grid ends on short programs
    block = tl.program_id(0)
    m0 = (num_m_blocks - 1 - block % num_m_blocks) * BLOCK_M
    h = block // num_m_blocks % heads
    b = block // num_m_blocks // heads
    lse_rows = seqlen_q
    lse_batch = b
    if lengths.cu_seqlens_q is not None:
        lse_rows = total_q
        lse_batch = b * 0
    q_first, seqlen_q, k_first, seqlen_k = sequence(lengths, b, seqlen_q, seqlen_k, total_q, total_k)
    if m0 >= seqlen_q:
        return
    offset = seqlen_k - seqlen_q
    if IS_TOP_LEFT:
        offset = offset * 0
    k_pointer = pointer_to(k, b, h // GROUP, k_first)
    v_pointer = pointer_to(v, b, h // GROUP, k_first)
    k_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, FAR)
    v_offsets = tile_offsets(v, BLOCK_N, BLOCK_DV, FAR)
    place = (b, h, offset, seqlen_q, seqlen_k)
    options = (scale, softcap, load_slope(alibi_slopes, alibi_batch, b, h), window_left, window_right)
    flags = (HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, alibi_slopes is not None, IS_FLOAT32)
    i = m0 + tl.arange(0, BLOCK_M)
    q_tile = load_tile(pointer_to(q, b, h, q_first + m0), tile_offsets(q, BLOCK_M, BLOCK_D, FAR), i < seqlen_q, D, BLOCK_D, True)

    unit = scale * LOG2E if IS_RAW else 1.0

    # A sink is a key without a value: the walk starts from it instead of from nothing
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + h) * LOG2E
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    first, whole, cut, last = key_parts(m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    for part in tl.static_range(3):
        if part > 0 or HAS_LEFT:
            for n0 in tl.range(
                first if part == 0 else (whole if part == 1 else cut), whole if part == 0 else (cut if part == 1 else last), BLOCK_N
            ):
                n0 = tl.multiple_of(n0, BLOCK_N)
                j = n0 + tl.arange(0, BLOCK_N)
                k_tile = load_tile(k_pointer + row_offset(k, n0), k_offsets, j < seqlen_k, D, BLOCK_D, part != 1)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, _ = score_tile(s, i[:, None], j[None, :], bias, mask, place, options, flags, part != 1, True, IS_RAW)
                # Raise the maximum, 0 standing in for the maximum of nothing. In float32 only if p would be above 2: what is scaled down
                # with every tile, as under ALiBi, gathers the error of every factor
                m_new = tl.max(s, 1) * unit
                m_new = tl.where(m_new > m + 1.0, m_new, m) if IS_FLOAT32 else tl.maximum(m, m_new)
                m_finite = m_new
                if part != 1 or mask is not None or bias is not None:
                    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(s * unit - m_finite[:, None])
                # Scale down what was gathered under the old one, and gather this tile
                alpha = tl.exp2(m - m_finite)
                l = l * alpha + tl.sum(p, 1)
                o = o * alpha[:, None]
                if HAS_DROPOUT:
                    p = tl.where(kept(rng_state, b * heads + h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N), p, 0.0)
                v_tile = load_tile(v_pointer + row_offset(v, n0), v_offsets, j < seqlen_k, DV, BLOCK_DV, part != 1)
                o = tl.dot(p.to(v_tile.dtype), v_tile, o, input_precision=PRECISION)
                m = m_new

    # A row that saw nothing has l = 0: output 0, lse -inf
    o = o * (keep_factor / tl.where(l == 0, 1.0, l))[:, None]
    store_tile(
        pointer_to(out, b, h, q_first + m0),
        tile_offsets(out, BLOCK_M, BLOCK_DV, FAR),
        o,
        i < seqlen_q,
        DV,
        BLOCK_DV,
    )
    lse_pointer = lse + (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first + m0
    tl.store(lse_pointer + tl.arange(0, BLOCK_M), m * LN2 + tl.log(l), mask=i < seqlen_q)


# Backward


@triton.jit(do_not_specialize=RUNTIME)
def bwd_preprocess_triton_kernel(
    out,
    dout,
    dlse,
    lse,
    lse_log2,
    delta,
    heads,
    rows,  # of lse in each head: packed sequences need no telling apart here
    num_blocks,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FAR: tl.constexpr,
):
    block = tl.program_id(0)
    m0 = block % num_blocks * BLOCK_M
    h = block // num_blocks % heads
    b = block // num_blocks // heads
    is_there = m0 + tl.arange(0, BLOCK_M) < rows
    o_offsets, do_offsets = tile_offsets(out, BLOCK_M, BLOCK_DV, FAR), tile_offsets(dout, BLOCK_M, BLOCK_DV, FAR)
    o_tile = load_tile(pointer_to(out, b, h, m0), o_offsets, is_there, DV, BLOCK_DV, True)
    do_tile = load_tile(pointer_to(dout, b, h, m0), do_offsets, is_there, DV, BLOCK_DV, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    place = (b.to(tl.int64) * heads + h) * rows + m0 + tl.arange(0, BLOCK_M)
    row_lse = tl.load(lse + place, mask=is_there)
    if dlse is not None:
        total -= tl.load(dlse + place, mask=is_there)
    # A row that saw nothing has no gradient, whatever comes into it: exp2(s - inf) is 0
    is_empty = row_lse == float("-inf")
    tl.store(lse_log2 + place, tl.where(is_empty, float("inf"), row_lse * LOG2E), mask=is_there)
    tl.store(delta + place, tl.where(is_empty, 0.0, total), mask=is_there)


@triton.jit(do_not_specialize=RUNTIME)
def bwd_dkdv_triton_kernel(
    q,
    k,
    v,
    dout,
    lse_log2,
    delta,
    dk,
    dv,
    bias,
    mask,
    alibi_slopes,
    alibi_batch,
    rng_state,
    lengths,
    heads,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_n_blocks,
    scale,
    softcap,
    window_left,
    window_right,
    drop_threshold,
    keep_factor,
    GROUP: tl.constexpr,  # query heads for each key head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAR: tl.constexpr,
    IS_TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The first keys of a head first: under a causal mask most queries see them
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
    q_first, seqlen_q, k_first, seqlen_k = sequence(lengths, b, seqlen_q, seqlen_k, total_q, total_k)
    if n0 >= seqlen_k:
        return
    offset = seqlen_k - seqlen_q
    if IS_TOP_LEFT:
        offset = offset * 0
    j = n0 + tl.arange(0, BLOCK_N)
    is_key = j < seqlen_k
    k_offsets, v_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, FAR), tile_offsets(v, BLOCK_N, BLOCK_DV, FAR)
    k_tile = load_tile(pointer_to(k, b, h_kv, k_first + n0), k_offsets, is_key, D, BLOCK_D, True)
    v_tile = load_tile(pointer_to(v, b, h_kv, k_first + n0), v_offsets, is_key, DV, BLOCK_DV, True)
    q_offsets, do_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, FAR), tile_offsets(dout, BLOCK_M, BLOCK_DV, FAR)
    flags = (HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, alibi_slopes is not None, IS_FLOAT32)
    # Keys behind the end have rows of their own in every product, which are not stored: they only need a place to read scores from
    j = tl.minimum(j, seqlen_k - 1)
    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Queries outside the window of every key have no gradient, whatever comes into them
    low, high = seeing_queries(seqlen_q, seqlen_k, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
    first, whole, cut, last = query_parts(n0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    for part in tl.static_range(3):
        if part > 0 or HAS_RIGHT:
            begin = first if part == 0 else (whole if part == 1 else cut)
            end = whole if part == 0 else (cut if part == 1 else last)
            # Heads that share the keys follow each other in one loop
            num_tiles = tl.maximum(end - begin + BLOCK_M - 1, 0) // BLOCK_M
            divisor = tl.maximum(num_tiles, 1)  # what stands before a loop is computed for an empty one too
            for step in tl.range(0 if GROUP > 1 else begin, GROUP * num_tiles if GROUP > 1 else end, 1 if GROUP > 1 else BLOCK_M):
                h = h_kv * GROUP + step // divisor if GROUP > 1 else h_kv
                m0 = tl.multiple_of(begin + step % divisor * BLOCK_M if GROUP > 1 else step, BLOCK_M)
                place = (b, h, offset, seqlen_q, seqlen_k)
                options = (scale, softcap, load_slope(alibi_slopes, alibi_batch, b, h), window_left, window_right)
                q_pointer, do_pointer = pointer_to(q, b, h, q_first), pointer_to(dout, b, h, q_first)
                stats = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
                i = m0 + tl.arange(0, BLOCK_M)
                is_query = (i >= low) & (i < high)
                q_tile = load_tile(q_pointer + row_offset(q, m0), q_offsets, is_query, D, BLOCK_D, part != 1)
                if part != 1:
                    row_lse = tl.load(lse_log2 + stats + i, mask=is_query, other=float("inf"))
                    row_delta = tl.load(delta + stats + i, mask=is_query, other=0.0)
                else:
                    row_lse = tl.load(lse_log2 + stats + i)
                    row_delta = tl.load(delta + stats + i)
                # Rebuild P^T from the stored lse
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                s, capped = score_tile(s, i[None, :], j[:, None], bias, mask, place, options, flags, part != 1, False, False)
                p = tl.exp2(s - row_lse[None, :])
                do_tile = load_tile(do_pointer + row_offset(dout, m0), do_offsets, is_query, DV, BLOCK_DV, part != 1)
                if mask is not None or bias is not None:
                    do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
                # dV
                if HAS_DROPOUT:
                    keep = tl.trans(kept(rng_state, b * heads + h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N))
                    dropped = tl.where(keep, p * keep_factor, 0.0)
                    dv_tile = tl.dot(dropped.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
                else:
                    dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision=PRECISION)
                # dS^T of the softmax, then of the softcap; the scale comes at the end
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                ds = p * (dp - row_delta[None, :])
                if HAS_SOFTCAP:
                    ds = ds * (1 - capped * capped)
                # dK
                dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)

    dk_offsets, dv_offsets = tile_offsets(dk, BLOCK_N, BLOCK_D, FAR), tile_offsets(dv, BLOCK_N, BLOCK_DV, FAR)
    dk_pointer, dv_pointer = pointer_to(dk, b, h_kv, k_first + n0), pointer_to(dv, b, h_kv, k_first + n0)
    store_tile(dk_pointer, dk_offsets, dk_tile * scale, is_key, D, BLOCK_D)
    store_tile(dv_pointer, dv_offsets, dv_tile, is_key, DV, BLOCK_DV)


@triton.jit(do_not_specialize=RUNTIME)
def bwd_dq_triton_kernel(
    q,
    k,
    v,
    dout,
    lse_log2,
    delta,
    dq,
    bias,
    mask,
    alibi_slopes,
    alibi_batch,
    rng_state,
    lengths,
    heads,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    num_m_blocks,
    scale,
    softcap,
    window_left,
    window_right,
    drop_threshold,
    keep_factor,
    GROUP: tl.constexpr,  # query heads for each key head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAR: tl.constexpr,
    IS_TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    m0 = (num_m_blocks - 1 - block % num_m_blocks) * BLOCK_M
    h = block // num_m_blocks % heads
    b = block // num_m_blocks // heads
    lse_rows = seqlen_q
    lse_batch = b
    if lengths.cu_seqlens_q is not None:
        lse_rows = total_q
        lse_batch = b * 0
    q_first, seqlen_q, k_first, seqlen_k = sequence(lengths, b, seqlen_q, seqlen_k, total_q, total_k)
    if m0 >= seqlen_q:
        return
    offset = seqlen_k - seqlen_q
    if IS_TOP_LEFT:
        offset = offset * 0
    place = (b, h, offset, seqlen_q, seqlen_k)
    options = (scale, softcap, load_slope(alibi_slopes, alibi_batch, b, h), window_left, window_right)
    flags = (HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, alibi_slopes is not None, IS_FLOAT32)
    i = m0 + tl.arange(0, BLOCK_M)
    stats = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
    row_lse = tl.load(lse_log2 + stats + i, mask=i < seqlen_q, other=float("inf"))
    row_delta = tl.load(delta + stats + i, mask=i < seqlen_q, other=0.0)
    q_offsets, do_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, FAR), tile_offsets(dout, BLOCK_M, BLOCK_DV, FAR)
    q_tile = load_tile(pointer_to(q, b, h, q_first + m0), q_offsets, i < seqlen_q, D, BLOCK_D, True)
    do_tile = load_tile(pointer_to(dout, b, h, q_first + m0), do_offsets, i < seqlen_q, DV, BLOCK_DV, True)
    do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
    k_pointer, v_pointer = pointer_to(k, b, h // GROUP, k_first), pointer_to(v, b, h // GROUP, k_first)
    k_offsets, v_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, FAR), tile_offsets(v, BLOCK_N, BLOCK_DV, FAR)
    dq_tile = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first, whole, cut, last = key_parts(m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    for part in tl.static_range(3):
        if part > 0 or HAS_LEFT:
            begin = first if part == 0 else (whole if part == 1 else cut)
            end = whole if part == 0 else (cut if part == 1 else last)
            for n0 in tl.range(begin, end, BLOCK_N):
                n0 = tl.multiple_of(n0, BLOCK_N)
                j = n0 + tl.arange(0, BLOCK_N)
                k_tile = load_tile(k_pointer + row_offset(k, n0), k_offsets, j < seqlen_k, D, BLOCK_D, part != 1)
                v_tile = load_tile(v_pointer + row_offset(v, n0), v_offsets, j < seqlen_k, DV, BLOCK_DV, part != 1)
                # Rebuild P from the stored lse
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, capped = score_tile(s, i[:, None], j[None, :], bias, mask, place, options, flags, part != 1, True, False)
                p = tl.exp2(s - row_lse[:, None])
                # dS of the softmax, then of the softcap; the scale comes at the end
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    keep = kept(rng_state, b * heads + h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                ds = p * (dp - row_delta[:, None])
                if HAS_SOFTCAP:
                    ds = ds * (1 - capped * capped)
                dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)

    dq_offsets = tile_offsets(dq, BLOCK_M, BLOCK_D, FAR)
    store_tile(pointer_to(dq, b, h, q_first + m0), dq_offsets, dq_tile * scale, i < seqlen_q, D, BLOCK_D)


@triton.jit(do_not_specialize=RUNTIME)
def bwd_dbias_triton_kernel(
    q,
    k,
    v,
    dout,
    lse_log2,
    delta,
    dbias,
    split_stride,
    num_splits,
    num_pairs,  # batches x heads that share a tile
    pair_heads,
    dbias_heads,
    dbias_rows,
    dbias_columns,
    num_m_blocks,
    num_n_blocks,
    bias,
    mask,
    alibi_slopes,
    alibi_batch,
    rng_state,
    lengths,
    heads,
    seqlen_q,
    seqlen_k,
    total_q,
    total_k,
    scale,
    softcap,
    window_left,
    window_right,
    drop_threshold,
    keep_factor,
    GROUP: tl.constexpr,  # query heads for each key head
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAR: tl.constexpr,
    IS_TOP_LEFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARES_BATCH: tl.constexpr,
    SHARES_HEADS: tl.constexpr,
    SHARES_ROWS: tl.constexpr,
    SHARES_COLUMNS: tl.constexpr,
):
    # Which tile of the bias, and which share of the batches and heads that it is broadcast over
    block = tl.program_id(0)
    split = block % num_splits
    n_block = block // num_splits % num_n_blocks
    m_block = block // num_splits // num_n_blocks % num_m_blocks
    bias_h = block // num_splits // num_n_blocks // num_m_blocks % dbias_heads
    bias_b = block // num_splits // num_n_blocks // num_m_blocks // dbias_heads
    max_seqlen_q = seqlen_q
    max_seqlen_k = seqlen_k
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    flags = (HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, alibi_slopes is not None, IS_FLOAT32)

    for pair in tl.range(split, num_pairs, num_splits):
        b = pair // pair_heads if SHARES_BATCH else bias_b
        h = pair % pair_heads if SHARES_HEADS else bias_h
        lse_rows = max_seqlen_q
        lse_batch = b
        if lengths.cu_seqlens_q is not None:
            lse_rows = total_q
            lse_batch = b * 0
        q_first, seqlen_q, k_first, seqlen_k = sequence(lengths, b, max_seqlen_q, max_seqlen_k, total_q, total_k)
        offset = seqlen_k - seqlen_q
        if IS_TOP_LEFT:
            offset = offset * 0
        place = (b, h, offset, seqlen_q, seqlen_k)
        options = (scale, softcap, load_slope(alibi_slopes, alibi_batch, b, h), window_left, window_right)
        stats = (lse_batch.to(tl.int64) * heads + h) * lse_rows + q_first
        for m0 in tl.range(
            0 if SHARES_ROWS else m_block * BLOCK_M, seqlen_q if SHARES_ROWS else tl.minimum((m_block + 1) * BLOCK_M, seqlen_q), BLOCK_M
        ):
            i = m0 + tl.arange(0, BLOCK_M)
            row_lse = tl.load(lse_log2 + stats + i, mask=i < seqlen_q, other=float("inf"))
            row_delta = tl.load(delta + stats + i, mask=i < seqlen_q, other=0.0)
            q_offsets, do_offsets = tile_offsets(q, BLOCK_M, BLOCK_D, FAR), tile_offsets(dout, BLOCK_M, BLOCK_DV, FAR)
            q_tile = load_tile(pointer_to(q, b, h, q_first + m0), q_offsets, i < seqlen_q, D, BLOCK_D, True)
            do_tile = load_tile(pointer_to(dout, b, h, q_first + m0), do_offsets, i < seqlen_q, DV, BLOCK_DV, True)
            do_tile = tl.where((row_lse == float("inf"))[:, None], 0.0, do_tile)
            first, _whole, _cut, last = key_parts(
                m0, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
            )
            if not SHARES_COLUMNS:
                first = tl.maximum(first, n_block * BLOCK_N)
                last = tl.minimum(last, (n_block + 1) * BLOCK_N)
            for n0 in tl.range(first, last, BLOCK_N):
                j = n0 + tl.arange(0, BLOCK_N)
                k_offsets, v_offsets = tile_offsets(k, BLOCK_N, BLOCK_D, FAR), tile_offsets(v, BLOCK_N, BLOCK_DV, FAR)
                k_tile = load_tile(pointer_to(k, b, h // GROUP, k_first + n0), k_offsets, j < seqlen_k, D, BLOCK_D, True)
                v_tile = load_tile(pointer_to(v, b, h // GROUP, k_first + n0), v_offsets, j < seqlen_k, DV, BLOCK_DV, True)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                s, _ = score_tile(s, i[:, None], j[None, :], bias, mask, place, options, flags, True, True, False)
                p = tl.exp2(s - row_lse[:, None])
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if HAS_DROPOUT:
                    keep = kept(rng_state, b * heads + h, m0, n0, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * keep_factor, 0.0)
                sums += p * (dp - row_delta[:, None])

    # Positions of the tile that share an element of the bias
    rows = (m_block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (n_block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    if SHARES_ROWS:
        sums = tl.sum(sums, 0)[None, :]
        rows = tl.zeros([1, 1], tl.int32)
    if SHARES_COLUMNS:
        sums = tl.sum(sums, 1)[:, None]
        columns = tl.zeros([1, 1], tl.int32)
    pointer = dbias.data + split.to(tl.int64) * split_stride + bias_b.to(tl.int64) * dbias.batch + bias_h.to(tl.int64) * dbias.head
    is_there = (rows < dbias_rows) & (columns < dbias_columns)
    places = pointer + rows.to(tl.int64) * dbias.row + columns * dbias.column
    tl.store(places, sums.to(dbias.data.dtype.element_ty), mask=is_there)
