"""The part of a launch plan that no family decides: operands, values, the image of the parameters and its patches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from flashtile.plans.length_class import PACKED_ROWS
from flashtile.plans.params import DROPOUT_ORIGIN, Params, Struct, field_at
from flashtile.plans.plan import (
    AnyStep,
    Bounded,
    BroadcastSize,
    BroadcastStride,
    DistinctSize,
    Elements,
    LaunchPlan,
    Least,
    MapPatch,
    Operand,
    Patch,
    Pointer,
    Quotient,
    Rule,
    Scalar,
    Share,
    Size,
    SplitRule,
    Stride,
    Value,
    Workspace,
)
from flashtile.plans.spec import CallLayout

# What kernels expect of the optional tensors
_OPTIONAL = (
    *(Operand(name, strides="any") for name in ("bias", "mask")),
    *(Operand(name, strides="contiguous", dtype="float32") for name in ("alibi_slopes", "sinks")),
    *(
        Operand(name, strides="contiguous")
        for name in ("rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")
    ),
    Operand("block_table"),
)
_SCALARS = (
    *("window_left", "window_right", "scale", "scale_log2", "softcap", "softcap_factor"),
    *("dropout_threshold", "keep_factor"),
    *DROPOUT_ORIGIN,
)
Values = tuple[tuple[str, tuple[Rule, ...]], ...]


def forward_operands(layout: CallLayout, is_written: bool) -> list[Operand]:
    """q, k, v, out, lse and the optional tensors of a call."""
    operands = [Operand("q"), Operand("k"), Operand("v"), Operand("out", is_written=is_written)]
    operands.append(Operand("lse", strides="contiguous", is_written=is_written))
    return operands + [operand for operand in _OPTIONAL if operand.name in layout.tensors]


def assembled(
    steps: tuple[AnyStep, ...],
    operands: Sequence[Operand],
    tensors: Sequence[str],  # the operands with strides in the parameters
    values: Values,
    splits: SplitRule | None,
    workspaces: Sequence[Workspace],
    head_dims: tuple[int, int],
    layout: CallLayout,
    maps: tuple[MapPatch, ...] = (),
    struct: Struct = Params,
) -> LaunchPlan:
    """The plan with the image and the patches of its parameters."""
    patches = [patch for name in tensors for patch in _tensor_patches(name, layout)]
    patches += [_patch(operand.name, Pointer(operand.name)) for operand in operands if operand.name not in tensors]
    fields = {name for name, *_ in Params._fields_}
    for workspace in workspaces:
        place = field_at(Params if workspace.name in fields else struct, workspace.name)
        patches.append(Patch(*place, Pointer(workspace.name)))
    patches += [_patch(f"lse_{name}_stride", Stride("lse", axis)) for name, axis in (("batch", -3), ("head", -2))]
    names = [name for name, _ in values] + (["num_splits"] if splits else [])
    patches += [_patch(name, Value(name)) for name in names if name in fields]
    patches += [_patch(name, Scalar(name)) for name in _SCALARS]
    patches += _optional_patches(layout)
    image = Params(num_splits=1, head_dim=head_dims[0], head_dim_v=head_dims[1], is_top_left=layout.is_top_left)
    return LaunchPlan(
        steps,
        tuple(operands),
        values,
        splits,
        tuple(workspaces),
        bytes(image).ljust(ctypes.sizeof(struct), b"\0"),
        tuple(patches),
        maps,
    )


def call_values(layout: CallLayout) -> Values:
    """The sizes of a call, each a product of rules."""
    head, row = layout.axes
    is_packed, is_paged = "cu_seqlens_q" in layout.tensors, "block_table" in layout.tensors
    capacity: tuple[Rule, ...] = (Size("k", row), Size("block_table", -1)) if is_paged else (Size("k", row),)
    values: list[tuple[str, tuple[Rule, ...]]] = [
        ("batch", (Size("cu_seqlens_q", -1, plus=-1) if is_packed else Size("q", -4),)),
        ("heads", (Size("q", head),)),
        ("heads_kv", (Size("k", head),)),
        # Tiles of heads, where those that share a KV head lie in as few tiles as hold them (attn/head_packing.cuh)
        ("group_heads", (Share("heads", "heads_kv"),)),
        ("head_tiles", (Value("heads_kv"), Quotient("group_heads", PACKED_ROWS))),
        ("total_q", (Size("q", row),)),
        ("total_k", (Size("k", row),)),
        *_length("q", (Size("q", row),), layout.has_max_seqlen_q, layout),
        *_length("k", capacity, layout.has_max_seqlen_k, layout),
        ("lse_size", (Elements("lse"),)),
    ]
    if is_paged:
        values += [("num_pages", (Size("k", -4),)), ("page_size", (Size("k", row),))]
    if "bias" in layout.tensors:
        values += [("bias_batch", (Size("bias", -4),)), ("bias_heads", (Size("bias", -3),))]
        values.append(("bias_rows", (BroadcastSize("bias", -2, "seqlen_q"),)))
        values.append(("bias_columns", (BroadcastSize("bias", -1, "seqlen_k"),)))
    if "mask" in layout.tensors:
        axes = (("mask_batch", -4, "batch"), ("mask_heads", -3, "heads"), ("mask_rows", -2, "seqlen_q"))
        values += [(name, (DistinctSize("mask", axis, value),)) for name, axis, value in axes]
    return tuple(values)


def _length(side: str, most: tuple[Rule, ...], has_max: bool, layout: CallLayout) -> Values:
    """The values seqlen_q and expected_q, or those of keys, as problem.py: shape_of. No sequence is longer than
    `most`."""
    seqlen, expected = f"seqlen_{side}", f"expected_{side}"
    if not layout.has_packed_queries:
        return (seqlen, most), (expected, (Value(seqlen),))
    values: list[tuple[str, tuple[Rule, ...]]] = [(f"most_{side}", most)]
    if has_max:
        values.append((f"max_{side}", (Scalar(f"max_{seqlen}"),)))
        values.append((f"bound_{side}", (Least(f"most_{side}", f"max_{side}"),)))
    for name in ("mask", "bias"):
        if name in layout.tensors:
            values.append((f"{name}_bound_{side}", (Bounded(name, -2 if side == "q" else -1, values[-1][0]),)))
    values.append((seqlen, (Value(values[-1][0]),)))
    if side == "k" and (has_max or not layout.has_packed_keys):
        return (*values, (expected, (Value(seqlen),)))
    mean = f"mean_{side}"
    return (*values, (mean, (Share(f"total_{side}", "batch"),)), (expected, (Least(mean, seqlen),)))


def _patch(name: str, rule: Rule, index: int = 0) -> Patch:
    return Patch(*field_at(Params, name, index), rule)


def _tensor_patches(name: str, layout: CallLayout) -> list[Patch]:
    strides = [
        _patch(f"{name}_strides", Stride(name, axis), index)
        for index, axis in enumerate((-4, *layout.axes))  # batch or page, head, row
    ]
    return [_patch(name, Pointer(name)), *strides]


def _optional_patches(layout: CallLayout) -> list[Patch]:
    patches = []
    for name in ("bias", "mask"):
        if name in layout.tensors:
            patches += [_patch(f"{name}_strides", BroadcastStride(name, axis), axis + 4) for axis in (-4, -3, -2, -1)]
    if "bias" in layout.tensors:
        patches += [_patch("bias_sizes", Size("bias", axis), axis + 4) for axis in (-4, -3, -2, -1)]
    if "alibi_slopes" in layout.tensors:
        patches.append(_patch("alibi_batch_stride", Stride("alibi_slopes", -2)))
    if "block_table" in layout.tensors:
        patches.append(_patch("table_stride", Stride("block_table", -2)))
    return patches
