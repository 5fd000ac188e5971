"""From the product q.k to a score: scale, softcap, ALiBi, bias, mask. Scores are in base 2."""

import triton
import triton.language as tl

from flashtile.backends.triton_kernels.tiles import load_scores

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x, IS_FLOAT32):
    """Relative error of a few float32 roundings if IS_FLOAT32, else an absolute error of one rounding of 1."""
    t = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    if IS_FLOAT32:
        # The formula above cancels near 0. Use an odd polynomial there, fitted to tanh(x) / x for |x| < 0.62
        # with an error of 4e-9
        z = x * x
        series = -5.75555e-3 * z + 2.06832e-2
        series = series * z - 5.375289e-2
        series = series * z + 1.3331596e-1
        series = series * z - 3.3333287e-1
        t = tl.where(tl.abs(x) < 0.6, x + x * z * series, t)
    return t


@triton.jit
def score_tile(s, i, j, bias, mask, position, options, flags, IS_PARTIAL, HAS_END, SCALE_IN_EXPONENT):
    """Scores in base 2 of the products s = q.k, -inf where masked, and the softcap's tanh (s itself without a softcap).

    Query and key positions i and j broadcast against each other, in either order. HAS_END: the tile may contain
    positions past the last key. SCALE_IN_EXPONENT: the caller applies the scale.
    """
    b, h, offset, seqlen_q, seqlen_k = position
    scale, softcap, slope, window_left, window_right = options
    HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, IS_FLOAT32 = flags
    capped = s
    if HAS_SOFTCAP:
        capped = tanh(s * (scale / softcap), IS_FLOAT32)
        s = capped * (softcap * LOG2E)
    elif not SCALE_IN_EXPONENT:
        s = s * (scale * LOG2E)
    if HAS_ALIBI:
        s -= (slope * LOG2E) * tl.abs(i + offset - j).to(tl.float32)
    # Clamp positions past the end, so that bias and mask are read in bounds
    i_inside = tl.minimum(i, seqlen_q - 1)
    j_inside = tl.minimum(j, seqlen_k - 1) if IS_PARTIAL else j
    if bias is not None:
        s += load_scores(bias, b, h, i_inside, j_inside).to(tl.float32) * LOG2E
    if mask is not None:
        s = tl.where(load_scores(mask, b, h, i_inside, j_inside) != 0, s, float("-inf"))
    if IS_PARTIAL:
        # Queries past the end need no mask: their results are not stored
        if HAS_END:
            s = tl.where(j < seqlen_k, s, float("-inf"))
        if HAS_LEFT:
            s = tl.where(i + offset - j <= window_left, s, float("-inf"))
        if HAS_RIGHT:
            s = tl.where(j - i - offset <= window_right, s, float("-inf"))
    return s, capped


@triton.jit
def load_slope(alibi_slopes, alibi_batch_stride, b, h):
    slope = h * 0.0
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + b * alibi_batch_stride + h)
    return slope
