"""Steps from the product q.k to a score: scale, softcap, ALiBi, bias, mask.

Scores are in base 2, so that exponents need no product. With a bias they are natural: a finite bias may reach the
largest float32, and its product with log2(e) would overflow.
"""

import triton
import triton.language as tl

from flashtile.backends.triton_kernels.tiles import load_scores

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def in_score_unit(x, IS_NATURAL):
    """A natural number in the unit of the scores. What is finite stays finite."""
    if not IS_NATURAL:
        x = tl.where(x == float("-inf"), x, tl.minimum(tl.maximum(x * LOG2E, -LARGEST), LARGEST))
    return x


@triton.jit
def probability(s, lse, IS_NATURAL):
    """P from scores and lse, at most 1: a rounded lse of a huge score may be far too small. NaN stays NaN."""
    exponent = (s - lse) * LOG2E if IS_NATURAL else s - lse
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def tanh(x, IS_EXACT):
    """Relative error of a few float32 roundings if IS_EXACT, else an absolute error of one rounding of 1."""
    t = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
    if IS_EXACT:
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
    """Scores of the products s = q.k, -inf where masked, and the softcap's tanh (s itself without a softcap).

    Query and key positions i and j broadcast against each other, in either order. HAS_END: the tile may contain
    positions past the last key. SCALE_IN_EXPONENT: the caller applies the scale. SOFTCAP: 0 for none, 1 for a tanh with
    an absolute error, 2 with a relative one.
    """
    b, h, offset, seqlen_q, seqlen_k = position
    scale, softcap, softcap_factor, slope, window_left, window_right = options
    HAS_LEFT, HAS_RIGHT, SOFTCAP, HAS_ALIBI = flags
    capped = s
    if SOFTCAP:
        capped = tanh(s * softcap_factor, SOFTCAP == 2)
        s = capped * (softcap if bias is not None else softcap * LOG2E)
    elif not SCALE_IN_EXPONENT:
        s = s * (scale if bias is not None else scale * LOG2E)
    if HAS_ALIBI:
        s -= in_score_unit(slope, bias is not None) * tl.abs(i + offset - j).to(tl.float32)
    # Clamp positions past the end, so that bias and mask are read in bounds
    i_inside = tl.minimum(i, seqlen_q - 1)
    j_inside = tl.minimum(j, seqlen_k - 1) if IS_PARTIAL else j
    if bias is not None:
        s += load_scores(bias, b, h, i_inside, j_inside).to(tl.float32)
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
