"""The plan of `append_kv`: one kernel that writes new rows of k and v into a cache, and what a read after it needs."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from flashtile.plans import source
from flashtile.plans.params import field_at
from flashtile.plans.plan import Factor, LaunchPlan, Operand, Patch, Pointer, Rule, Scalar, Size, Step, Stride, Value

APPEND_THREADS = 128

_POINTERS = (
    *("k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table", "rotary_cos", "rotary_sin"),
    *("q", "rotated_q", "seqused_k"),
)
_STRIDES = ("k_cache", "v_cache", "k", "v", "q", "rotated_q")
_SIZES = (
    *("batch", "new_rows", "heads_kv", "head_dim", "head_dim_v", "num_pages", "page_size", "pages_per_sequence"),
    *("num_positions", "rotary_half", "is_interleaved", "seqlen_q", "heads", "is_ordered", "length"),
)


class AppendParams(ctypes.Structure):
    """Parameters of append_kv_kernel, by value."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_strides", ctypes.c_int64 * 4) for name in _STRIDES),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in _SIZES),
    ]


class AppendKey(NamedTuple):
    """Key of the plan: all that decides it."""

    dtype: str
    angle_dtype: str  # of rotary_cos and rotary_sin; dtype where there are none
    layout: str
    is_paged: bool
    has_rotary: bool
    is_step: bool  # the queries are rotated too, and the new lengths written
    is_aligned16: bool  # every row starts on a 16-byte boundary, and so does each half of its rotated part


def kernel(dtype: str, angle_dtype: str, is_aligned16: bool) -> Step:
    width = (4 if dtype == "float32" else 8) if is_aligned16 else 1  # elements that a thread moves at once
    entry = f"flashtile::append_kv_kernel<{source.cpp_type(dtype)}, {source.cpp_type(angle_dtype)}, {width}>"
    unit = source.plain_unit("steps/append_kv", entry, AppendParams)
    unit += f'static_assert(flashtile::kAppendThreads == {APPEND_THREADS}, "threads");\n'
    return Step(unit, entry, (Factor("batch"), Factor("new_rows")), 1, 1, APPEND_THREADS, 0)


@functools.cache
def plan(key: AppendKey) -> LaunchPlan:
    head, row = (-2, -3) if key.layout == "bshd" else (-3, -2)
    tensors = ["k_cache", "v_cache", "k", "v"]
    values: list[tuple[str, tuple[Rule, ...]]] = [
        ("batch", (Size("k", -4),)),
        ("new_rows", (Size("k", row),)),
        ("heads_kv", (Size("k", head),)),
        ("head_dim", (Size("k", -1),)),
        ("head_dim_v", (Size("v", -1),)),
        ("num_pages", (Size("k_cache", -4),)),
        ("page_size", (Size("k_cache", row),)),
    ]
    if key.is_step and key.has_rotary:
        tensors += ["q", "rotated_q"]
        values += [("seqlen_q", (Size("q", row),)), ("heads", (Size("q", head),))]
    written = ("k_cache", "v_cache", "rotated_q")
    operands = [Operand(name, strides="any", is_written=name in written) for name in tensors]
    operands.append(Operand("cache_seqlens", strides="contiguous"))
    if key.is_step:
        operands.append(Operand("seqused_k", strides="contiguous", is_written=True))
    if key.is_paged:
        operands.append(Operand("block_table"))
        values.append(("pages_per_sequence", (Size("block_table", -1),)))
    if key.has_rotary:
        operands += [
            Operand(name, strides="contiguous", dtype=key.angle_dtype) for name in ("rotary_cos", "rotary_sin")
        ]
        values += [("num_positions", (Size("rotary_cos", -2),)), ("rotary_half", (Size("rotary_cos", -1),))]
    patches = [_patch(operand.name, Pointer(operand.name)) for operand in operands]
    for name in tensors:
        patches += [
            _patch(f"{name}_strides", Stride(name, axis), index) for index, axis in enumerate((-4, row, head, -1))
        ]
    patches += [_patch(name, Value(name)) for name, _ in values]
    patches += [_patch(name, Scalar(name)) for name in ("is_interleaved", "is_ordered", "length")]
    if key.is_paged:
        patches.append(_patch("table_stride", Stride("block_table", -2)))
    step = kernel(key.dtype, key.angle_dtype, key.is_aligned16)
    image = AppendParams(pages_per_sequence=1)
    return LaunchPlan((step,), tuple(operands), tuple(values), None, (), bytes(image), tuple(patches))


def _patch(name: str, rule: Rule, index: int = 0) -> Patch:
    return Patch(*field_at(AppendParams, name, index), rule)
