"""Bad input: each case raises a typed error that names the argument, what came and what is accepted, and loses
nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import ops
from flashtile.problem import AttentionArgs, validate


def t(*sizes: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, **options)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(q=None, k=None, v=None, **options) -> Callable:
    q, k, v = t(2, 4, 5, 8) if q is None else q, t(2, 2, 7, 8) if k is None else k, t(2, 2, 7, 8) if v is None else v
    return lambda: flashtile.attention(q, k, v, **options)


def varlen(q=None, k=None, cu_q=None, cu_k=None, **options) -> Callable:
    q, k = t(9, 4, 8) if q is None else q, t(9, 2, 8) if k is None else k
    cu_q, cu_k = ints(0, 4, 9) if cu_q is None else cu_q, ints(0, 4, 9) if cu_k is None else cu_k
    return lambda: flashtile.attention_varlen(q, k, k, cu_q, cu_k, **options)


def paged(table, **options) -> Callable:
    return lambda: flashtile.attention_varlen(
        t(9, 4, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), ints(0, 4, 9), ints(0, 4, 9), block_table=table, **options
    )


def cache(q=None, k_cache=None, v_cache=None, **options) -> Callable:
    q = t(2, 1, 4, 8) if q is None else q
    k_cache, v_cache = t(2, 10, 2, 8) if k_cache is None else k_cache, t(2, 10, 2, 8) if v_cache is None else v_cache
    return lambda: flashtile.attention_kvcache(q, k_cache, v_cache, **options)


def sdpa(*sizes: tuple[int, ...], **options) -> Callable:
    return lambda: flashtile.scaled_dot_product_attention(*(t(*size) for size in sizes), **options)


NEW = t(2, 1, 2, 8)
CASES: dict[str, tuple[Callable, type[Exception], str]] = {
    # Tensors
    "no tensor": (dense(q=[1.0]), TypeError, "q: got [1.0] (list); accepted: a torch.Tensor."),
    "v is None": (
        lambda: flashtile.attention(t(1, 1, 2, 4), t(1, 1, 2, 4), None),
        TypeError,
        "v: got None (NoneType); accepted: a torch.Tensor.",
    ),
    "mask no tensor": (dense(mask="causal"), TypeError, "mask: got 'causal' (str); accepted: a torch.Tensor or None."),
    "rank 3": (
        dense(q=t(4, 5, 8)),
        ValueError,
        "q: got 3 dimensions (4, 5, 8); accepted: 4 dimensions (batch, heads, seqlen_q, head_dim) for layout 'bhsd'.",
    ),
    "rank 5, bshd": (
        dense(k=t(1, 2, 2, 7, 8), layout="bshd"),
        ValueError,
        (
            "k: got 5 dimensions (1, 2, 2, 7, 8); accepted: 4 dimensions (batch, seqlen_k, heads_kv, "
            "head_dim) for layout 'bshd'."
        ),
    ),
    "integers": (
        dense(q=t(2, 4, 5, 8, dtype=torch.int64)),
        TypeError,
        "q: got int64; accepted: float64, float32, bfloat16, float16.",
    ),
    "complex": (dense(q=t(2, 4, 5, 8, dtype=torch.complex64)), TypeError, "q: got complex64; accepted: float64,"),
    "dtype mismatch": (
        dense(k=t(2, 2, 7, 8, dtype=torch.float16)),
        TypeError,
        "k: got float16; accepted: float32, as q. Convert q, k and v to one dtype.",
    ),
    "device mismatch": (
        dense(v=t(2, 2, 7, 8, device="meta")),
        ValueError,
        "v: got device meta; accepted: cpu, where q is. Move v there.",
    ),
    "mask elsewhere": (
        dense(mask=t(5, 7, dtype=torch.bool, device="meta")),
        ValueError,
        "mask: got device meta; accepted: cpu",
    ),
    "sliced last dimension": (
        dense(q=t(2, 4, 5, 16)[..., ::2]),
        ValueError,
        "q: got stride 2 in the last dimension; accepted: stride 1 there, any other strides. Call q.contiguous().",
    ),
    # Sizes
    "heads": (
        dense(k=t(2, 3, 7, 8), v=t(2, 3, 7, 8)),
        ValueError,
        "k: got 3 heads; accepted: a divisor of q's 4 heads.",
    ),
    "more key heads": (
        dense(k=t(2, 8, 7, 8), v=t(2, 8, 7, 8)),
        ValueError,
        "k: got 8 heads; accepted: a divisor of q's 4 heads.",
    ),
    "no key heads": (
        dense(k=t(2, 0, 7, 8), v=t(2, 0, 7, 8)),
        ValueError,
        "k: got 0 heads; accepted: a divisor of q's 4 heads.",
    ),
    "v heads": (dense(v=t(2, 4, 7, 8)), ValueError, "v: got 4 heads; accepted: 2, as k."),
    "v keys": (dense(v=t(2, 2, 6, 8)), ValueError, "v: got 6 keys; accepted: 7, as k."),
    "batch": (dense(k=t(3, 2, 7, 8)), ValueError, "k: got batch 3; accepted: 2, as q."),
    "head_dim": (dense(k=t(2, 2, 7, 9)), ValueError, "k: got head_dim 9; accepted: 8, as q."),
    "head_dim too large": (
        dense(q=t(2, 4, 5, 513), k=t(2, 2, 7, 513)),
        flashtile.Unsupported,
        "q: got head_dim 513; accepted: 1 to 512.",
    ),
    "head_dim 0": (
        dense(q=t(2, 4, 5, 0), k=t(2, 2, 7, 0)),
        flashtile.Unsupported,
        "q: got head_dim 0; accepted: 1 to 512.",
    ),
    "head_dim_v too large": (
        dense(v=t(2, 2, 7, 600)),
        flashtile.Unsupported,
        "v: got head_dim_v 600; accepted: 1 to 512.",
    ),
    # Scalars
    "NaN scale": (
        dense(scale=math.nan),
        ValueError,
        "scale: got nan (float); accepted: a finite number, or None for 1 / sqrt(head_dim).",
    ),
    "infinite scale": (dense(scale=math.inf), ValueError, "scale: got inf (float); accepted: a finite number"),
    "scale beyond float32": (
        dense(scale=1e39),
        ValueError,
        "scale: got 1e+39 (float); accepted: a number of size 2^127 at most for float32. Scale q instead",
    ),
    "negative scale beyond float32": (dense(scale=-1e39, backend="tiled"), ValueError, "scale: got -1e+39 (float)"),
    "scale beyond float32 over a cache": (cache(scale=1e39), ValueError, "scale: got 1e+39 (float)"),
    "scale is a tensor": (
        dense(scale=torch.tensor(0.1)),
        TypeError,
        "scale: got shape () (float32 on cpu); accepted: a number. Pass float(scale); that synchronises with a GPU.",
    ),
    "scale of another type": (dense(scale="0.1"), TypeError, "scale: got '0.1' (str); accepted: a number."),
    "negative window": (
        dense(window=(-2, 0)),
        ValueError,
        "window: got left = -2; accepted: integers >= 0, or -1 for unbounded.",
    ),
    "negative right window": (dense(window=(3, -5)), ValueError, "window: got right = -5; accepted: integers >= 0"),
    "window of one number": (
        dense(window=5),
        TypeError,
        "window: got 5; accepted: None or a pair (left, right) of integers, -1 or None = unbounded.",
    ),
    "window of three": (dense(window=(1, 2, 3)), TypeError, "window: got (1, 2, 3); accepted: None or a pair"),
    "window of floats": (dense(window=(1.5, 2)), TypeError, "window: got 1.5 (float); accepted: None or a pair"),
    "negative softcap": (
        dense(softcap=-1.0),
        ValueError,
        "softcap: got -1.0 (float); accepted: a float32 number >= 0 (0 = none).",
    ),
    "NaN softcap": (dense(softcap=math.nan), ValueError, "softcap: got nan (float); accepted: a float32 number >= 0"),
    "dropout of 1": (
        dense(dropout_p=1.0),
        ValueError,
        "dropout_p: got 1.0 (float); accepted: a probability in [0, 1).",
    ),
    "negative dropout": (
        dense(dropout_p=-0.1),
        ValueError,
        "dropout_p: got -0.1 (float); accepted: a probability in [0, 1).",
    ),
    "dropout of another type": (
        dense(dropout_p=None),
        TypeError,
        "dropout_p: got None (NoneType); accepted: a number.",
    ),
    "softcap beyond float32": (
        dense(softcap=1e39),
        ValueError,
        "softcap: got 1e+39 (float); accepted: a float32 number >= 0 (0 = none).",
    ),
    "scale beyond floats": (
        dense(scale=10**400),
        ValueError,
        "scale: got an integer beyond all floats; accepted: a finite number.",
    ),
    "window beyond 64 bits": (
        dense(window=(2**64, 0)),
        ValueError,
        "window: got 18446744073709551616 (int); accepted: an integer of 64 bits.",
    ),
    "layout of another type": (dense(layout=3), TypeError, "layout: got 3 (int); accepted: 'bhsd' or 'bshd'."),
    "deterministic of another type": (
        dense(deterministic="yes"),
        TypeError,
        "deterministic: got 'yes' (str); accepted: True, False or None.",
    ),
    "causal of another type": (
        dense(causal=2.5),
        TypeError,
        "causal: got 2.5 (float); accepted: False, True, 'top_left' or 'bottom_right'.",
    ),
    "causal": (
        dense(causal="lower"),
        ValueError,
        "causal: got 'lower'; accepted: False, True, 'top_left' or 'bottom_right'.",
    ),
    "causal none": (
        dense(causal="none"),
        ValueError,
        "causal: got 'none'; accepted: False, True, 'top_left' or 'bottom_right'.",
    ),
    "layout": (dense(layout="sbhd"), ValueError, "layout: got 'sbhd'; accepted: 'bhsd' or 'bshd'."),
    "backend": (
        dense(backend="cutlass"),
        ValueError,
        "backend: got 'cutlass'; accepted: None or one of 'cuda', 'triton', 'cpu', 'tiled', 'numba', 'reference'.",
    ),
    "backend of another type": (
        dense(backend=3),
        TypeError,
        "backend: got 3 (int); accepted: None or one of 'cuda', 'triton', 'cpu', 'tiled', 'numba', 'reference'.",
    ),
    # Mask, bias, slopes, sinks, rng_state
    "mask shape": (
        dense(mask=t(5, 6, dtype=torch.bool)),
        ValueError,
        (
            "mask: got shape (5, 6); accepted: at most 4 dimensions, broadcastable to (batch, "
            "heads, seqlen_q, seqlen_k) = (2, 4, 5, 7)."
        ),
    ),
    "mask rank": (
        dense(mask=t(1, 2, 4, 5, 7, dtype=torch.bool)),
        ValueError,
        "mask: got shape (1, 2, 4, 5, 7); accepted: at most 4 dimensions",
    ),
    "mask dtype": (
        dense(mask=t(5, 7)),
        TypeError,
        "mask: got float32; accepted: bool, True = attend. Pass values to be added as bias.",
    ),
    "integer mask": (
        dense(mask=t(5, 7, dtype=torch.uint8)),
        TypeError,
        "mask: got uint8; accepted: bool, True = attend. Call mask.bool() where nonzero means attend.",
    ),
    "bias shape": (
        dense(bias=t(2, 5, 7)),
        ValueError,
        (
            "bias: got shape (2, 5, 7); accepted: at most 4 dimensions, broadcastable to (batch, heads, seqlen_q, "
            "seqlen_k) = (2, 4, 5, 7). Pass bias[:, None] where it is (batch, seqlen_q, seqlen_k)."
        ),
    ),
    "padding mask": (
        dense(mask=t(2, 7, dtype=torch.bool)),
        ValueError,
        (
            "mask: got shape (2, 7); accepted: at most 4 dimensions, broadcastable to (batch, heads, seqlen_q, "
            "seqlen_k) = (2, 4, 5, 7). Pass mask[:, None, None] where it is (batch, seqlen_k)."
        ),
    ),
    "padding mask of one query": (
        dense(mask=t(2, 1, 7, dtype=torch.bool)),
        ValueError,
        (
            "mask: got shape (2, 1, 7); accepted: at most 4 dimensions, broadcastable to (batch, heads, seqlen_q, "
            "seqlen_k) = (2, 4, 5, 7). Pass mask[:, None] where it is"
        ),
    ),
    "explain padding mask": (
        lambda: flashtile.explain(t(2, 4, 5, 8), t(2, 2, 7, 8), t(2, 2, 7, 8), mask=t(2, 7, dtype=torch.bool)),
        ValueError,
        "mask: got shape (2, 7); accepted",
    ),
    "sdpa padding mask": (
        sdpa((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), attn_mask=t(2, 7)),
        ValueError,
        (
            "attn_mask: got shape (2, 7); accepted: at most 4 dimensions, broadcastable to (batch, heads, seqlen_q, "
            "seqlen_k) = (2, 4, 5, 7). Pass attn_mask[:, None, None] where it is (batch, seqlen_k)."
        ),
    ),
    "sdpa mask of five dimensions": (
        sdpa((1, 2, 4, 5, 8), (1, 2, 4, 7, 8), (1, 2, 4, 7, 8), attn_mask=t(3, 2, 4, 5, 7)),
        ValueError,
        (
            "attn_mask: got shape (3, 2, 4, 5, 7) (float32 on cpu); accepted: broadcastable to (..., heads, rows, "
            "keys) = (1, 2, 4, 5, 7)."
        ),
    ),
    "sdpa mask of four dimensions beside five": (
        sdpa((1, 2, 4, 5, 8), (1, 2, 4, 7, 8), (1, 2, 4, 7, 8), attn_mask=t(3, 4, 5, 7)),
        ValueError,
        "attn_mask: got shape (3, 4, 5, 7) (float32 on cpu); accepted: broadcastable to (..., heads, rows, keys) =",
    ),
    "sdpa mask of too many dimensions": (
        sdpa((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), attn_mask=t(1, 2, 4, 5, 7)),
        ValueError,
        "attn_mask: got shape (1, 2, 4, 5, 7) (float32 on cpu); accepted: broadcastable to",
    ),
    "bias dtype": (
        dense(bias=t(5, 7, dtype=torch.float16)),
        TypeError,
        "bias: got float16; accepted: float32. Call bias.to(q.dtype).",
    ),
    "sdpa mask dtype": (
        sdpa((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), attn_mask=t(5, 7, dtype=torch.float16)),
        TypeError,
        "attn_mask: got float16; accepted: bool, or float32. Call attn_mask.to(query.dtype).",
    ),
    "explain of a bad return_lse": (
        lambda: flashtile.explain(t(1, 1, 3, 8), t(1, 1, 3, 8), t(1, 1, 3, 8), return_lse="yes"),
        TypeError,
        "return_lse: got 'yes' (str); accepted: True or False.",
    ),
    "prewarm for another GPU": (
        lambda: flashtile.prewarm(t(1, 1, 3, 8), t(1, 1, 3, 8), t(1, 1, 3, 8), arch="sm_80"),
        TypeError,
        "arch: got 'sm_80' (str); accepted: kernels for the GPU of this machine. `flashtile compile --arch sm_80`",
    ),
    "bool bias": (
        dense(bias=t(5, 7, dtype=torch.bool)),
        TypeError,
        "bias: got bool; accepted: float32. Pass booleans as mask.",
    ),
    "slopes shape": (
        dense(alibi_slopes=t(2)),
        ValueError,
        "alibi_slopes: got shape (2,) (float32 on cpu); accepted: shape (4,) or (2, 4).",
    ),
    "slopes dtype": (
        dense(alibi_slopes=t(4, dtype=torch.float64)),
        TypeError,
        "alibi_slopes: got float64; accepted: float32.",
    ),
    "slopes with grad": (
        dense(alibi_slopes=t(4, requires_grad=True)),
        flashtile.Unsupported,
        (
            "alibi_slopes: got a tensor that requires grad; accepted: constants. Pass the term as bias "
            "to differentiate it."
        ),
    ),
    "sinks shape": (
        dense(sinks=t(2, 4)),
        ValueError,
        "sinks: got shape (2, 4) (float32 on cpu); accepted: shape (4,).",
    ),
    "sinks dtype": (dense(sinks=t(4, dtype=torch.int32)), TypeError, "sinks: got int32; accepted: float32."),
    "rng dtype": (
        dense(dropout_p=0.1, rng_state=t(2, dtype=torch.int32)),
        TypeError,
        "rng_state: got int32; accepted: int64 (seed, offset).",
    ),
    "rng shape": (
        dense(dropout_p=0.1, rng_state=t(3, dtype=torch.int64)),
        ValueError,
        "rng_state: got shape (3,) (int64 on cpu); accepted: shape (2,): seed, offset.",
    ),
    # Varlen
    "not monotonic": (
        varlen(cu_q=ints(0, 9, 4)),
        ValueError,
        "cu_seqlens_q: got 9 followed by 4 at position 2; accepted: values that never decrease.",
    ),
    "not to the end": (
        varlen(cu_k=ints(0, 4, 8)),
        ValueError,
        "cu_seqlens_k: got 8 at the end; accepted: 9, the number of packed rows.",
    ),
    "not from 0": (varlen(cu_q=ints(1, 4, 9)), ValueError, "cu_seqlens_q: got 1 at the start; accepted: 0 there."),
    "int64 lengths": (
        varlen(cu_q=torch.tensor([0, 4, 9])),
        TypeError,
        "cu_seqlens_q: got int64; accepted: int32. Call cu_seqlens_q.to(torch.int32).",
    ),
    "lengths of rank 2": (
        varlen(cu_k=ints(0, 4, 9)[None]),
        ValueError,
        "cu_seqlens_k: got shape (1, 3) (int32 on cpu); accepted: (batch + 1,).",
    ),
    "empty lengths": (
        varlen(cu_q=ints()),
        ValueError,
        "cu_seqlens_q: got shape (0,) (int32 on cpu); accepted: (batch + 1,), starting with 0.",
    ),
    "two batches": (varlen(cu_k=ints(0, 4, 5, 9)), ValueError, "cu_seqlens_k: got 4 rows; accepted: 3, for batch 2."),
    "no lengths": (
        lambda: flashtile.attention_varlen(t(9, 4, 8), t(9, 2, 8), t(9, 2, 8), ints(0, 9), None),
        ValueError,
        "cu_seqlens_k: got None; accepted: (batch + 1,), or None where block_table and seqused_k are both given.",
    ),
    "lengths no tensor": (
        varlen(cu_q=[0, 4, 9]),
        TypeError,
        "cu_seqlens_q: got [0, 4, 9] (list); accepted: a torch.Tensor.",
    ),
    "varlen rank": (
        varlen(q=t(2, 9, 4, 8)),
        ValueError,
        "q: got 4 dimensions (2, 9, 4, 8); accepted: 3 dimensions (total_q, heads, head_dim) for layout 'bshd'.",
    ),
    "too many used": (varlen(seqused_k=ints(4, 6)), ValueError, "seqused_k: got 6 for sequence 1; accepted: 0 to 5."),
    "negative used": (varlen(seqused_k=ints(-1, 5)), ValueError, "seqused_k: got -1 for sequence 0; accepted: 0 to 4."),
    "max too small": (
        varlen(max_seqlen_q=4),
        ValueError,
        "max_seqlen_q: got 4 (int); accepted: at least 5, the longest sequence.",
    ),
    "max of another type": (
        varlen(max_seqlen_k=5.0),
        TypeError,
        "max_seqlen_k: got 5.0 (float); accepted: an int, a tensor or None.",
    ),
    "negative max": (
        varlen(max_seqlen_k=-1),
        ValueError,
        "max_seqlen_k: got -1 (int); accepted: an integer of 0 to 2147482624, or None.",
    ),
    "max beyond 32 bits": (
        varlen(max_seqlen_k=2**31),
        ValueError,
        "max_seqlen_k: got 2147483648 (int); accepted: an integer of 0 to",
    ),
    "short bias": (
        varlen(bias=t(4, 5)),
        ValueError,
        "bias: got 4 rows; accepted: 1, or at least 5, the longest sequence.",
    ),
    "narrow mask": (
        varlen(mask=t(5, 3, dtype=torch.bool)),
        ValueError,
        "mask: got 3 columns; accepted: 1, or at least 5, the longest sequence.",
    ),
    "bias beside max": (varlen(bias=t(6, 6), max_seqlen_q=5), ValueError, "bias: got shape (6, 6); accepted:"),
    "page out of range": (
        paged(ints(0, 1, 2, 3).view(2, 2)),
        ValueError,
        "block_table: got page 3 at [1, 1]; accepted: 0 to 2.",
    ),
    "negative page": (
        paged(ints(0, 1, -1, 0).view(2, 2)),
        ValueError,
        "block_table: got page -1 at [1, 0]; accepted: 0 to 2.",
    ),
    "too few pages": (
        paged(ints(0, 1).view(2, 1)),
        ValueError,
        "cu_seqlens_k: got 5 keys in sequence 1; accepted: at most 4, what its pages hold.",
    ),
    "table rank": (
        paged(ints(0, 1)),
        ValueError,
        "block_table: got shape (2,) (int32 on cpu); accepted: (batch, pages_per_sequence).",
    ),
    "table rows": (paged(ints(0, 1, 2).view(3, 1)), ValueError, "block_table: got 3 rows; accepted: 2, for batch 2."),
    "table dtype": (
        paged(torch.tensor([[0, 1], [2, 0]])),
        TypeError,
        "block_table: got int64; accepted: int32. Call block_table.to(torch.int32).",
    ),
    # Cache, in the words of its arguments
    "k without v": (cache(k=NEW, cache_seqlens=3), ValueError, "v: got None; accepted: k and v together, or neither."),
    "append without lengths": (
        cache(k=NEW, v=NEW),
        ValueError,
        "cache_seqlens: got None; accepted: the rows in use, wherever k and v are appended.",
    ),
    "cache full": (
        cache(k=NEW, v=NEW, cache_seqlens=10),
        ValueError,
        "cache_seqlens: got 10 for sequence 0; accepted: 0 to 9: the cache holds 10 rows and 1 are added.",
    ),
    "lengths beyond the cache": (
        cache(cache_seqlens=ints(3, 11)),
        ValueError,
        "cache_seqlens: got 11 for sequence 1; accepted: 0 to 10.",
    ),
    "lengths of another type": (
        cache(cache_seqlens=3.0),
        TypeError,
        "cache_seqlens: got 3.0 (float); accepted: an int32 tensor, an int or None.",
    ),
    "lengths dtype": (
        cache(cache_seqlens=torch.tensor([3, 3])),
        TypeError,
        "cache_seqlens: got int64; accepted: int32.",
    ),
    "left padding": (
        cache(cache_seqlens=3, cache_leftpad=ints(0, 4)),
        ValueError,
        "cache_leftpad: got 4 for sequence 1; accepted: 0 to 3, its number of keys.",
    ),
    "cache dtype": (
        cache(k_cache=t(2, 10, 2, 8, dtype=torch.float16)),
        TypeError,
        "k_cache: got float16; accepted: float32, as q.",
    ),
    "cache batch": (cache(k_cache=t(3, 10, 2, 8)), ValueError, "k_cache: got batch 3; accepted: 2, as q."),
    "new batch": (
        cache(k=t(3, 1, 2, 8), v=NEW, cache_seqlens=0),
        ValueError,
        "k: got shape (3, 1, 2, 8) (float32 on cpu); accepted: 4 dimensions and batch 2, as q.",
    ),
    "new rows beyond everything": (
        cache(k=t(2, 11, 2, 8), v=t(2, 11, 2, 8), cache_seqlens=0),
        ValueError,
        "cache_seqlens: got 0 for sequence 0; accepted: nothing: the cache holds 10 rows and 11 are added.",
    ),
    "new rows are a list": (
        cache(k=[1], v=[2], cache_seqlens=0),
        TypeError,
        "k: got [1] (list); accepted: a torch.Tensor or None.",
    ),
    "sinks are a list": (cache(sinks=[1]), TypeError, "sinks: got [1] (list); accepted: a torch.Tensor or None."),
    "splits of another type": (
        cache(num_splits=1.5),
        TypeError,
        "num_splits: got 1.5 (float); accepted: an integer >= 0 (0 = chosen).",
    ),
    "lengths are a list": (
        cache(cache_seqlens=[1, 2]),
        TypeError,
        (
            "cache_seqlens: got [1, 2] (list); accepted: an int32 tensor, an int or None. "
            "Call torch.as_tensor(cache_seqlens, dtype=torch.int32, device=q.device)."
        ),
    ),
    "huge length": (
        cache(cache_seqlens=2**40),
        ValueError,
        "cache_seqlens: got 1099511627776 (int); accepted: 0 to the number of rows that the cache holds.",
    ),
    "expanded cache": (
        cache(k_cache=t(1, 10, 2, 8).expand(2, -1, -1, -1), k=NEW, v=NEW, cache_seqlens=0),
        ValueError,
        (
            "k_cache: got strides (0, 16, 8, 1); accepted: memory of its own for every row. Call clone() "
            "on an expanded cache."
        ),
    ),
    "queries beyond the angles": (
        cache(q=t(2, 4, 4, 8), k=NEW, v=NEW, cache_seqlens=5, rotary_cos=t(6, 4), rotary_sin=t(6, 4), causal=True),
        ValueError,
        "rotary_cos: got 6 positions; accepted: at least 9, where the longest sequence ends.",
    ),
    "angles with grad": (
        cache(k=NEW, v=NEW, cache_seqlens=0, rotary_cos=t(6, 4, requires_grad=True), rotary_sin=t(6, 4)),
        flashtile.Unsupported,
        "rotary_cos: got a tensor that requires grad; accepted: inference only.",
    ),
    "new heads": (
        cache(k=t(2, 1, 4, 8), v=t(2, 1, 4, 8), cache_seqlens=0),
        ValueError,
        "k: got shape (2, 1, 4, 8); accepted: the heads and head_dim of k_cache",
    ),
    "new dtype": (
        cache(k=NEW.half(), v=NEW, cache_seqlens=0),
        TypeError,
        "k: got float16; accepted: float32, as k_cache.",
    ),
    "batch index out of range": (
        cache(cache_batch_idx=ints(0, 2)),
        ValueError,
        "cache_batch_idx: got row 2 at [1, 0]; accepted: 0 to 1.",
    ),
    "batch index dtype": (
        cache(cache_batch_idx=torch.tensor([0, 1])),
        TypeError,
        "cache_batch_idx: got int64; accepted: int32.",
    ),
    "batch index shape": (
        cache(cache_batch_idx=ints(0)),
        ValueError,
        "cache_batch_idx: got shape (1,) (int32 on cpu); accepted: shape (2,), one row of the cache for each sequence.",
    ),
    "batch index and table": (
        cache(cache_batch_idx=ints(0, 1), block_table=ints(0, 1).view(2, 1)),
        ValueError,
        "cache_batch_idx: got it with block_table; accepted: one of the two.",
    ),
    "page of an append": (
        cache(k=NEW, v=NEW, cache_seqlens=3, block_table=ints(0, 7).view(2, 1)),
        ValueError,
        "block_table: got page 7 at [1, 0]; accepted: 0 to 1.",
    ),
    "rotary alone": (
        cache(rotary_cos=t(10, 4), rotary_sin=t(10, 4)),
        ValueError,
        "rotary_cos: got it without k and v; accepted: rotary embedding together with keys to append.",
    ),
    "rotary half": (
        cache(k=NEW, v=NEW, cache_seqlens=0, rotary_cos=t(10, 4)),
        ValueError,
        "rotary_sin: got None; accepted: rotary_cos and rotary_sin together, or neither.",
    ),
    "rotary too wide": (
        cache(k=NEW, v=NEW, cache_seqlens=0, rotary_cos=t(10, 5), rotary_sin=t(10, 5)),
        ValueError,
        (
            "rotary_cos: got shape (10, 5) (float32 on cpu); accepted: shape (positions, rotary_dim / 2) "
            "with rotary_dim at most 8."
        ),
    ),
    "rotary too short": (
        cache(k=NEW, v=NEW, cache_seqlens=5, rotary_cos=t(5, 4), rotary_sin=t(5, 4)),
        ValueError,
        "rotary_cos: got 5 positions; accepted: at least 6, where the longest sequence ends.",
    ),
    "cache with grad": (
        cache(q=t(2, 1, 4, 8, requires_grad=True)),
        flashtile.Unsupported,
        (
            "q: got a tensor that requires grad; accepted: inference only. Call it under "
            "torch.no_grad(), or train with attention"
        ),
    ),
    "negative splits": (
        cache(num_splits=-1),
        ValueError,
        "num_splits: got -1 (int); accepted: an integer >= 0 (0 = chosen).",
    ),
    "cache layout": (cache(layout="thd"), ValueError, "layout: got 'thd'; accepted: 'bhsd' or 'bshd'."),
    # Facades, in the words of their arguments
    "sdpa heads": (
        sdpa((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8)),
        ValueError,
        "key: got 2 heads; accepted: 4, as query. Pass enable_gqa=True to share key heads.",
    ),
    "sdpa value heads": (
        sdpa((1, 4, 3, 8), (1, 4, 3, 8), (1, 2, 3, 8)),
        ValueError,
        "value: got 2 heads; accepted: 4, as key.",
    ),
    "sdpa batch": (
        sdpa((3, 1, 3, 8), (2, 1, 3, 8), (2, 1, 3, 8)),
        ValueError,
        "query: got leading dimensions (3,), (2,), (2,) of query, key, value; accepted: broadcastable ones.",
    ),
    "sdpa mask of another type": (
        sdpa((1, 3, 8), (1, 3, 8), (1, 3, 8), attn_mask=[1]),
        TypeError,
        "attn_mask: got [1] (list); accepted: a torch.Tensor or None.",
    ),
    "sdpa integer mask": (
        sdpa((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8), attn_mask=t(3, 3, dtype=torch.int32)),
        TypeError,
        "attn_mask: got int32; accepted: bool, or float32. Call attn_mask.bool() where nonzero means attend.",
    ),
    "sdpa causal of another type": (
        sdpa((3, 8), (3, 8), (3, 8), is_causal="x"),
        TypeError,
        "is_causal: got 'x' (str); accepted: True or False.",
    ),
    "sdpa head_dim": (
        sdpa((1, 1, 3, 8), (1, 1, 3, 9), (1, 1, 3, 9)),
        ValueError,
        "key: got head_dim 9; accepted: 8, as query.",
    ),
    "sdpa mask": (
        sdpa((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8), attn_mask=t(3, 4)),
        ValueError,
        "attn_mask: got shape (3, 4); accepted: at most 4 dimensions, broadcastable to",
    ),
    "sdpa rank": (
        sdpa((8,), (3, 8), (3, 8)),
        ValueError,
        "query: got shape (8,) (float32 on cpu); accepted: at least 2 dimensions",
    ),
    "sdpa bias under autocast": (
        torch.autocast("cpu", torch.bfloat16)(
            sdpa((1, 1, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8), attn_mask=t(3, 3, dtype=torch.float64))
        ),
        TypeError,
        "attn_mask: got float64; accepted: bfloat16 (query's) or float32. Call attn_mask.to(query.dtype).",
    ),
    "sdpa one query head under GQA": (
        sdpa((1, 1, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8), enable_gqa=True),
        ValueError,
        "key: got 4 heads; accepted: a divisor of query's 1 heads.",
    ),
    "flash return flag": (
        lambda: flashtile.flash_attn_func(t(1, 3, 1, 8), t(1, 3, 1, 8), t(1, 3, 1, 8), return_attn_probs="no"),
        TypeError,
        "return_attn_probs: got 'no' (str); accepted: True or False.",
    ),
    "flash deterministic": (
        lambda: flashtile.flash_attn_func(t(1, 3, 1, 8), t(1, 3, 1, 8), t(1, 3, 1, 8), deterministic=()),
        TypeError,
        "deterministic: got () (tuple); accepted: True, False or None.",
    ),
    "flash cache return flag": (
        lambda: flashtile.flash_attn_with_kvcache(t(1, 3, 1, 8), t(1, 3, 1, 8), t(1, 3, 1, 8), return_softmax_lse=None),
        TypeError,
        "return_softmax_lse: got None (NoneType); accepted: True or False.",
    ),
    "return_lse": (dense(return_lse="no"), TypeError, "return_lse: got 'no' (str); accepted: True or False."),
    "return_lse of 2": (varlen(return_lse=2), TypeError, "return_lse: got 2 (int); accepted: True or False."),
    "no return_lse": (cache(return_lse=None), TypeError, "return_lse: got None (NoneType); accepted: True or False."),
    "splits beyond 64 bits": (
        cache(num_splits=2**70),
        ValueError,
        "num_splits: got 1180591620717411303424 (int); accepted: an integer of 64 bits.",
    ),
    "cache window beyond 64 bits": (
        cache(window=(2**70, 0)),
        ValueError,
        "window: got 1180591620717411303424 (int); accepted: an integer of 64 bits.",
    ),
    "cache length beyond 64 bits": (
        cache(cache_seqlens=2**70),
        ValueError,
        "cache_seqlens: got 1180591620717411303424 (int); accepted: an integer of 64 bits.",
    ),
    "cache length below 32 bits": (
        cache(cache_seqlens=-(2**63)),
        ValueError,
        "cache_seqlens: got -9223372036854775808 (int); accepted: 0 to the number of rows that the cache holds.",
    ),
    "refused by the backend asked for": (
        dense(backend="cuda"),
        flashtile.Unsupported,
        (
            "backend: got 'cuda', which refuses: it runs on cuda, and q is on cpu; accepted: None, or another of "
            "'triton', 'cpu', 'tiled', 'numba', 'reference'."
        ),
    ),
    "flash scale": (
        lambda: flashtile.flash_attn_func(t(1, 3, 1, 8), t(1, 3, 1, 8), t(1, 3, 1, 8), softmax_scale=math.nan),
        ValueError,
        "softmax_scale: got nan (float); accepted: a finite number",
    ),
    "flash window": (
        lambda: flashtile.flash_attn_func(t(1, 3, 1, 8), t(1, 3, 1, 8), t(1, 3, 1, 8), window_size=(-3, 0)),
        ValueError,
        "window_size: got left = -3; accepted: integers >= 0, or -1 for unbounded.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_says_what_is_wrong(name: str) -> None:
    call, kind, text = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(text)


def test_a_refused_append_changes_nothing() -> None:
    k_cache, v_cache = torch.randn(2, 10, 2, 8), torch.randn(2, 10, 2, 8)
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(ValueError, match="cache_seqlens: got 10 for sequence 1"):
        flashtile.attention_kvcache(
            t(2, 1, 4, 8),
            k_cache,
            v_cache,
            k=torch.ones(2, 1, 2, 8),
            v=torch.ones(2, 1, 2, 8),
            cache_seqlens=ints(0, 10),
        )
    with pytest.raises(ValueError, match="cache_leftpad: got 4 for sequence 0"):
        flashtile.attention_kvcache(
            *(t(2, 1, 4, 8), k_cache, v_cache),
            k=torch.ones(2, 1, 2, 8),
            v=torch.ones(2, 1, 2, 8),
            cache_seqlens=3,
            cache_leftpad=ints(4, 0),
        )
    with pytest.raises(ValueError, match="alibi_slopes: got"):
        flashtile.attention_kvcache(
            t(2, 1, 4, 8),
            k_cache,
            v_cache,
            k=torch.ones(2, 1, 2, 8),
            v=torch.ones(2, 1, 2, 8),
            cache_seqlens=3,
            alibi_slopes=t(3),
        )
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"is_causal": True}, "is_causal: got an option that attention does not have; accepted: causal='top_left'"),
        ({"attn_mask": None}, "attn_mask: got an option that attention does not have; accepted: mask for booleans"),
        ({"softmax_scale": 1.0}, "softmax_scale: got an option that attention does not have; accepted: scale."),
        ({"soft_cap": 1.0}, "soft_cap: got an option that attention does not have; accepted: causal, window, scale"),
    ],
    ids=str,
)
def test_unknown_options_are_type_errors(options: dict, text: str) -> None:
    q = t(1, 1, 2, 4)
    for function in (flashtile.attention, flashtile.explain):
        with pytest.raises(TypeError) as caught:
            function(q, q, q, **options)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("dropout_p", [1.0, 1.5, -0.5, math.nan])
def test_a_refused_probability_draws_no_random_number(dropout_p: float) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="dropout_p: got"):
        dense(dropout_p=dropout_p)()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_integers_are_taken() -> None:
    whole = cache(window=(-1, -1))()
    for options in ({"num_splits": 2**63 - 1}, {"window": (2**63 - 1, 2**63 - 1)}):
        assert torch.equal(cache(**options)(), whole)


@pytest.mark.parametrize("backend", [None, "cpu", "tiled"])
def test_the_largest_scale(backend: str | None) -> None:
    """Served plans take no larger one either; float64 has room for more."""
    q, k, v = (torch.full((1, 1, 3, 8), 1e-20) * torch.tensor([1.0, 2.0, 3.0])[:, None] for _ in range(3))
    for scale in (2.0**127, -(2.0**127)):
        assert flashtile.attention(q, k, v, scale=scale, backend=backend).isfinite().all()
        with pytest.raises(ValueError, match="scale: got"):
            flashtile.attention(q, k, v, scale=scale * 1.5, backend=backend)
    wide = [tensor.double() for tensor in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, scale=1e40)
    torch.testing.assert_close(flashtile.attention(*wide, scale=1e40, backend=backend), want)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"caussal": True}, "caussal: got an option that attention does not have"),
        ({"is_causal": True}, "is_causal: got an option that attention does not have; accepted: causal='top_left'"),
        ({"causal": "x"}, "causal: got 'x'; accepted: False, True, 'top_left' or 'bottom_right'."),
        ({"scale": "0.1"}, "scale: got '0.1' (str); accepted: a number."),
        ({"window": (1, 2.5)}, "window: got 2.5 (float); accepted: None or a pair (left, right)"),
    ],
)
def test_errors_keep_their_words_under_compile(options: dict, text: str) -> None:
    x = t(1, 1, 3, 8)
    with pytest.raises(Exception) as caught:  # noqa: PT011, Dynamo wraps it in an error of its own
        torch.compile(lambda x: flashtile.attention(x, x, x, **options), fullgraph=True, backend="eager")(x)
    assert text in str(caught.value).replace("\\'", "'")


def test_an_unknown_option_names_the_nearest() -> None:
    q, lengths = t(2, 1, 4), ints(0, 2)
    with pytest.raises(TypeError, match=r"soft_cap: .* Perhaps softcap is meant\."):
        flashtile.attention_varlen(q, q, q, lengths, lengths, soft_cap=1.0)
    with pytest.raises(TypeError, match=r"cache_seqlen: .* Perhaps cache_seqlens is meant\."):
        flashtile.attention_kvcache(t(1, 1, 1, 4), t(1, 2, 1, 4), t(1, 2, 1, 4), cache_seqlen=1)


@pytest.mark.parametrize("name", ["q", "mask", "window", "scale", "cache_seqlens"])
def test_errors_cut_long_values(name: str) -> None:
    numpy = pytest.importorskip("numpy")
    for value in ([[0.25] * 4000] * 3, numpy.zeros((2, 4, 5, 8)), tuple(range(10**5)), "x" * 10**5, {1: [2] * 9999}):
        with pytest.raises(TypeError) as caught:
            (cache if name == "cache_seqlens" else dense)(**{name: value})()
        assert str(caught.value).startswith(f"{name}: got ")
        assert len(str(caught.value)) < 2500
    with pytest.raises(
        TypeError, match=r"q: got shape \(2, 4, 5, 8\) \(float64, numpy.ndarray\); accepted: a torch.Tensor"
    ):
        dense(q=numpy.zeros((2, 4, 5, 8)))()


def test_none_leaves_a_side_of_the_window_open(seed: int) -> None:
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    for given, same in (((None, 0), (-1, 0)), ((2, None), (2, -1)), ([None, None], None)):
        assert torch.equal(flashtile.attention(q, k, v, window=given), flashtile.attention(q, k, v, window=same))


def test_the_ops_check_too() -> None:
    """Whoever calls the op itself gets the same errors."""
    args = AttentionArgs(t(1, 1, 2, 4), t(1, 1, 2, 4), t(1, 1, 2, 4))
    for causal in ("maybe", False):
        with pytest.raises(
            ValueError, match=f"^causal: got {causal!r}; accepted: 'none', 'top_left' or 'bottom_right'\\.$"
        ):
            validate(args._replace(causal=causal))
    with pytest.raises(ValueError, match="causal: got 'maybe'; accepted: 'none', 'top_left'"):
        ops.forward(*args._replace(causal="maybe"))
    with pytest.raises(ValueError, match="rng_state: got None; accepted: an int64"):
        ops.forward(*args._replace(dropout_p=0.5))
    with pytest.raises(TypeError, match="out_dtype: got float16; accepted: None, float32"):
        ops.forward(*args._replace(out_dtype=torch.float16))
    out, lse = ops.forward(*args)
    with pytest.raises(ValueError, match="needs: got 3 flags; accepted: 5"):
        ops.backward(out, None, *args, out, lse, [True] * 3)
    with pytest.raises(ValueError, match=r"dout: got shape \(1, 1, 1, 4\)"):
        ops.backward(out[:, :, :1], None, *args, out, lse, [True] * 5)
    with pytest.raises(ValueError, match=r"out: got shape \(1, 1, 1, 4\)"):
        ops.backward(out[:, :, :1], None, *args, out[:, :, :1], lse, [True] * 5)
    with pytest.raises(ValueError, match=r"lse: got shape \(1, 1, 1\)"):
        ops.backward(out, None, *args, out, lse[..., :1], [True] * 5)


WRONG = {
    "lse dtype": ("lse", lambda lse: lse.bfloat16(), TypeError, "got bfloat16; accepted: float32"),
    "lse float64": ("lse", lambda lse: lse.double(), TypeError, "got float64; accepted: float32"),
    "lse int": ("lse", lambda lse: lse.int(), TypeError, "got int32; accepted: float32"),
    "lse device": ("lse", lambda lse: lse.to("meta"), ValueError, "got device meta; accepted: cpu, where q is"),
    "lse shape": ("lse", lambda lse: lse[..., :1], ValueError, r"got shape \(1, 2, 1\)"),
    "lse rank": ("lse", lambda lse: lse[None], ValueError, r"got shape \(1, 1, 2, 3\)"),
    "out dtype": ("out", lambda out: out.half(), TypeError, "got float16; accepted: float32, that of the output"),
    "out device": ("out", lambda out: out.to("meta"), ValueError, "got device meta; accepted: cpu, where q is"),
    "out shape": ("out", lambda out: out[..., :1], ValueError, r"got shape \(1, 2, 3, 1\)"),
    "dout dtype": ("dout", lambda dout: dout.double(), TypeError, "got float64; accepted: float32, that of the output"),
    "dout device": ("dout", lambda dout: dout.to("meta"), ValueError, "got device meta; accepted: cpu, where q is"),
    "dlse dtype": ("dlse", lambda dlse: dlse.bfloat16(), TypeError, "got bfloat16; accepted: float32"),
    "dlse device": ("dlse", lambda dlse: dlse.to("meta"), ValueError, "got device meta; accepted: cpu, where q is"),
    "dlse shape": ("dlse", lambda dlse: dlse[:, :1], ValueError, r"got shape \(1, 1, 3\)"),
}


@pytest.mark.parametrize("is_known", [False, True], ids=["the first call", "with a plan"])
@pytest.mark.parametrize("name", WRONG)
def test_the_backward_op_checks_what_the_forward_pass_made(name: str, is_known: bool) -> None:
    """A kernel reads as many bytes as the tensors of a right call have."""
    from flashtile import ops
    from flashtile.backends import native
    from flashtile.problem import AttentionArgs

    argument, change, kind, words = WRONG[name]
    q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    args = AttentionArgs(q, k, v, needs_grad=True)
    out, lse = ops.forward(*args)
    tensors = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse), "out": out, "lse": lse}
    mode = ops.dense_mode(needs_grad=True)

    def whole(dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> None:
        ops.backward(dout, dlse, *args, out, lse, [True, True, True, False, False])

    @ops.waits_for_errors
    def dense(dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor) -> None:
        try:
            ops.dense_backward(dout, q, k, v, None, mode, out, lse)
        except RuntimeError as error:
            ops.reraise(error)

    for call in (whole, dense) if argument != "dlse" else (whole,):
        native.clear_plans()
        if is_known:
            call(**tensors)
        with pytest.raises(kind, match=f"^{argument}: {words}"):
            call(**tensors | {argument: change(tensors[argument])})


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["dense", "all arguments"])
def test_saved_tensors_are_checked_when_they_come_back(options: dict) -> None:
    leaves = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(flashtile.attention(*leaves, **options).sum(), leaves)
    rounded = lambda tensor: tensor.bfloat16() if tensor.dim() == 3 else tensor  # noqa: E731, lse alone
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, rounded):
        out = flashtile.attention(*leaves, **options)
    with pytest.raises(TypeError, match=r"^lse: got bfloat16; accepted: float32"):
        out.sum().backward()


def test_a_failure_that_is_not_the_callers_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.backends.cpu import CpuBackend

    def broken(*_):
        raise ValueError("k and v are not what is wrong")

    monkeypatch.setattr(CpuBackend, "plan_forward", broken)
    with pytest.raises(ValueError, match=r"^k and v are not what is wrong$"):
        cache()()


@pytest.mark.parametrize("transform", ["jvp", "make_dual", "grad", "vjp"])
def test_the_operator_itself_refuses_transforms(transform: str) -> None:
    """The public functions serve them: test_transforms.py."""
    q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)

    def attend(q):
        return ops.forward(*AttentionArgs(q, k, v))[0]

    def dual(q):
        with torch.autograd.forward_ad.dual_level():
            return attend(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))

    call = {
        "jvp": lambda: torch.func.jvp(attend, (q,), (torch.ones_like(q),)),
        "make_dual": lambda: dual(q),
        "grad": lambda: torch.func.grad(lambda q: attend(q).sum())(q),
        "vjp": lambda: torch.func.vjp(attend, q),
    }[transform]
    with pytest.raises(flashtile.Unsupported, match="accepted: reverse mode"):
        call()


def test_lengths_on_a_gpu_are_checked_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes before anything that needs the GPU."""
    from flashtile import ops
    from flashtile.backends import registry
    from flashtile.problem import AttentionArgs

    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    monkeypatch.setattr(registry, "select", None)
    args = AttentionArgs(t(4, 9, 8), t(2, 9, 8), t(2, 9, 8), cu_seqlens_q=ints(0, 9, 4), cu_seqlens_k=ints(0, 4, 9))
    with pytest.raises(ValueError, match="cu_seqlens_q: got 9 followed by 4"):
        ops.forward_by_python(args)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    ours = flashtile.attention(
        *(q, k, v),
        scale=numpy.float32(0.25),
        window=(numpy.int64(2), numpy.int32(1)),
        causal=numpy.bool_(True),
        softcap=numpy.float64(2),
    )
    assert torch.equal(ours, flashtile.attention(q, k, v, scale=0.25, window=(2, 1), causal=True, softcap=2.0))
    assert torch.equal(flashtile.attention(q, k, v, causal=1), flashtile.attention(q, k, v, causal=True))


def test_a_refusing_backend_leaves_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtile.backends.tiled import TiledBackend

    monkeypatch.setattr(TiledBackend, "refuse", lambda self, problem, op: "not today")
    k_cache, v_cache = torch.zeros(2, 10, 2, 8), torch.zeros(2, 10, 2, 8)
    with pytest.raises(flashtile.Unsupported, match="not today"):
        flashtile.attention_kvcache(
            t(2, 1, 4, 8), k_cache, v_cache, k=NEW + 1, v=NEW + 1, cache_seqlens=0, backend="tiled"
        )
    assert (k_cache == 0).all()
