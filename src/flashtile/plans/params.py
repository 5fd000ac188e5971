"""The Python mirrors of what kernels (attn/params.cuh) and a float64 pass of the CPU engine take. A family whose
kernels take more has a mirror of its own, with Params as its base. Generated units assert that every offset agrees."""

from __future__ import annotations

import ctypes
import math
from typing import Any

_POINTERS = (
    *("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks", "score_lse", "delta"),
    *("dq_accum", "dq_order", "partial_out", "partial_stats"),
    *(
        "bias",
        "mask",
        "mask_bits",
        "mask_tiles",
        "alibi_slopes",
        "sinks",
        "rng_state",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "leftpad_k",
        "block_table",
    ),
)
_STRIDES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_SIZES = (
    *(
        "batch",
        "heads",
        "heads_kv",
        "seqlen_q",
        "seqlen_k",
        "total_q",
        "total_k",
        "head_dim",
        "head_dim_v",
        "num_pages",
        "page_size",
    ),
    *("num_splits", "window_left", "window_right", "is_top_left"),
)

DROPOUT_ORIGIN = ("first_query", "first_key_group", "first_head", "total_heads")
# In double precision for float64 calls
WIDE_NUMBERS = ("scale", "scale_log2", "softcap", "softcap_factor", "keep_factor")

_CODES = {ctypes.c_void_p: "P", ctypes.c_int64: "q", ctypes.c_int32: "i", ctypes.c_uint32: "I"}
_CODES |= {ctypes.c_float: "f", ctypes.c_double: "d"}


class Params(ctypes.Structure):
    """Everything a kernel of the two passes is told, by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in _STRIDES),
        *((name, ctypes.c_int64) for name in ("lse_batch_stride", "lse_head_stride", "lse_size")),
        *((name, ctypes.c_int64 * 4) for name in ("bias_strides", "mask_strides", "bias_sizes")),
        *((name, ctypes.c_int64) for name in ("alibi_batch_stride", "table_stride")),
        *((name, ctypes.c_int32) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2", "softcap", "softcap_factor")),
        ("dropout_threshold", ctypes.c_uint32),
        ("keep_factor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in DROPOUT_ORIGIN),
    ]


class WideParams(ctypes.Structure):
    """Parameters of a float64 pass of the CPU engine (csrc/cpu/engine.h): numbers that replace those of the base."""

    _fields_ = [("base", Params), *((name, ctypes.c_double) for name in WIDE_NUMBERS)]


Struct = type[ctypes.Structure]  # what a kernel is passed by value

# A wider window hides no key of the longest sequence (problem.py: MAX_LENGTH)
_WIDEST_WINDOW = 2**31 - 1
# Between these bounds float32 holds softcap * log2(e). A softcap outside gives the same float32 results as the nearer
# bound, except for scores over 2^88 or under 2^-100
_SMALLEST_SOFTCAP, _LARGEST_SOFTCAP = 2.0**-100, 2.0**100
# The factor of the softcap's tanh: float32 holds it, and 2 log2(e) times it. A softcap whose factor would be smaller
# gives the same results as one with this factor, except for dot products over 2^114
_SMALLEST_FACTOR, _LARGEST_FACTOR, _LARGEST_FACTOR_F64 = 2.0**-126, 2.0**126, 2.0**1022
_SMALLEST_FLOAT = 2.0**-149


def kernel_window(reach: int) -> int:
    """One side of a window as kernels read it; -1 = unbounded."""
    return reach if reach <= _WIDEST_WINDOW else -1


def kernel_scale_log2(scale: float) -> float:
    """scale * log2(e) as kernels read it. A positive one stays positive in float32: kernels multiply masked scores,
    -inf, by it."""
    scale_log2 = scale * math.log2(math.e)
    return max(scale_log2, _SMALLEST_FLOAT) if scale > 0.0 else scale_log2


def kernel_softcap(softcap: float, scale: float, is_float64: bool = False) -> tuple[float, float]:
    """The softcap as kernels read it, 0 = none, and scale / softcap, the factor of its tanh. It is finite: a dot
    product of 0 must not give NaN."""
    if softcap == 0.0:
        return 0.0, 0.0
    largest_factor = _LARGEST_FACTOR_F64 if is_float64 else _LARGEST_FACTOR
    if not is_float64:
        largest = min(_LARGEST_SOFTCAP, abs(scale) / _SMALLEST_FACTOR)
        softcap = max(min(softcap, largest), _SMALLEST_SOFTCAP)
    return softcap, max(-largest_factor, min(scale / softcap, largest_factor))


def field_at(struct: Struct, name: str, index: int = 0) -> tuple[int, str]:
    """The offset of a field, or of one element of it, and its code in the struct module."""
    kind: Any = next(kind for field, kind, *_ in struct._fields_ if field == name)
    element = getattr(kind, "_type_", kind) if issubclass(kind, ctypes.Array) else kind
    return getattr(struct, name).offset + index * ctypes.sizeof(element), _CODES[element]


def layout_asserts(struct: Struct) -> str:
    """static_asserts that tie the C++ struct of the same name to this one."""
    cpp = f"flashtile::{struct.__name__}"
    lines = [f'static_assert(sizeof({cpp}) == {ctypes.sizeof(struct)}, "{struct.__name__}: size");']
    for name, kind, *_ in struct._fields_:
        if name.startswith("_"):
            continue
        if kind is Params:
            lines.append(layout_asserts(Params))
        offset = getattr(struct, name).offset
        # NVRTC has no offsetof; __INTADDR__ of a member of a null struct is a constant expression in both of its front
        # ends
        lines.append(f'static_assert(__INTADDR__(&(({cpp}*)0)->{name}) == {offset}, "{struct.__name__}: {name}");')
    return "\n".join(lines)
