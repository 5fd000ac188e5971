"""How a pass is launched, as data: steps, workspaces, an image of the parameters, and a table of what is patched into it.

A plan knows no sequence length. Whoever executes it (backends/executor.py) evaluates the rules below for the tensors of a call; none of
them needs to know what attention is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels import source, table
from flashtile.kernels.arch import Arch
from flashtile.kernels.params import FwdSm90Params, Params, place
from flashtile.kernels.spec import Features, Row, Sm90Row

PREPROCESS_ROWS, PREPROCESS_THREADS = 64, 128
COMBINE_ROWS, COMBINE_THREADS = 4, 128

# What decides a plan


@dataclass(frozen=True)
class PlanKey:
    """What decides the kernels of a pass."""

    dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    features: Features
    arch: Arch
    is_small: bool = False  # the grid of the preferred tile would not fill the GPU
    grads: tuple[str, ...] | None = None  # of a backward pass: those of GRADS that are wanted
    is_scale_positive: bool = True
    has_own_rows: bool = True  # no two rows of q, k or v overlap in memory
    packed_heads: int = 1  # of q, that share a KV head and should share a tile too (table.packed_heads)
    is_ragged: bool = False  # large tiles would have many rows without a query (table.is_ragged)


class Form(NamedTuple):
    """How the tensors of a call are laid out, and which of them there are: what decides the patch table."""

    layout: str
    given: tuple[str, ...]  # optional tensors
    has_max_seqlen_q: bool = False
    has_max_seqlen_k: bool = False
    is_top_left: bool = False


GRADS = ("dq", "dk", "dv", "dbias", "dsinks")

# Rules: each gives one number of a call


class Pointer(NamedTuple):
    """The address of a tensor or workspace."""

    name: str


class Stride(NamedTuple):
    """In elements; 0 along an axis that the tensor has not."""

    tensor: str
    axis: int  # from the end


class BroadcastStride(NamedTuple):
    """In elements; 0 along an axis of length 1."""

    tensor: str
    axis: int


class Size(NamedTuple):
    tensor: str
    axis: int
    plus: int = 0


class Elements(NamedTuple):
    """The number of elements."""

    tensor: str


class Spread(NamedTuple):
    """1 where a tensor is broadcast along the axis, else the value."""

    tensor: str
    axis: int
    value: str


class Value(NamedTuple):
    """One of the plan's values."""

    name: str


class Scalar(NamedTuple):
    """A number that comes with the call."""

    name: str


Rule = Pointer | Stride | BroadcastStride | Size | Elements | Spread | Value | Scalar


class Patch(NamedTuple):
    """One field of the parameters."""

    offset: int
    code: str  # of the struct module: P pointer, q int64, i int32, I uint32, f float32
    rule: Rule


class MapPatch(NamedTuple):
    """A tensor map in the parameters: a tensor as (last, row, head, batch), in boxes of 64 elements of its last axis, box_rows rows and
    box_heads heads."""

    offset: int
    tensor: str
    axes: tuple[int, int, int]  # row, head, batch, from the end; one that the tensor has not, or of stride 0, is of length 1
    box_rows: int
    box_heads: int = 1


class Operand(NamedTuple):
    """A tensor of the call, and what kernels expect of it. One that is not so is replaced by a copy, and copied back if it is written."""

    name: str
    strides: str = "rows"  # "rows": the last dimension is contiguous; "contiguous": all are; "any"
    dtype: str | None = None  # None: its own
    is_written: bool = False
    like: str | None = None  # not a tensor of the call: room for what a kernel writes and nobody wants, in the shape of another


class Workspace(NamedTuple):
    """Memory for one call: element_bytes times the product of the values."""

    name: str
    element_bytes: int
    values: tuple[str, ...]


class SplitRule(NamedTuple):
    """The tiles whose keys may be split; the executor adds the value num_splits."""

    block_rows: int
    block_columns: int
    heads: str = "heads"  # the value that counts the heads of which each has its own tiles
    blocks: int = 2  # for each multiprocessor, that should have work


class Memset(NamedTuple):
    """Zeros for a tensor that kernels do not write everywhere."""

    tensor: str


@dataclass(frozen=True)
class Step:
    """One kernel: the unit to compile, its entry, and its launch."""

    unit: str
    entry: str
    grid: tuple[tuple[str, int], ...]  # (value, divisor): the number of blocks is the product of the quotients, rounded up
    block_rows: int
    block_columns: int
    num_threads: int
    shared_bytes: int
    is_for_splits: bool = False  # left out where the keys are not split
    is_persistent: bool = False  # at most one block for each multiprocessor
    has_out_map: bool = False  # the output leaves by the copy engine

    @property
    def name(self) -> str:
        """The kernel without its template arguments."""
        return self.entry.split("<")[0].removeprefix("flashtile::")


ENGINE_DTYPES = ("float32", "float16", "bfloat16")  # csrc/cpu/engine.h: Element


class EnginePass(NamedTuple):
    """A whole pass of the CPU engine."""

    is_backward: bool
    elements: tuple[int, ...]  # of q, of out, of bias, of dk and dv: places in ENGINE_DTYPES


@dataclass(frozen=True)
class LaunchPlan:
    steps: tuple[Memset | Step | EnginePass, ...]
    operands: tuple[Operand, ...]
    values: tuple[tuple[str, tuple[Rule, ...]], ...]  # a product each; a rule may ask for the values before it
    splits: SplitRule | None
    workspaces: tuple[Workspace, ...]  # of a plan with splits: not needed where there is one
    image: bytes
    patches: tuple[Patch, ...]
    maps: tuple[MapPatch, ...] = ()


# Kernels


@functools.cache
def kernels(key: PlanKey) -> tuple[Step, ...]:
    """The kernels of a pass, in the order of their launch."""
    out, lengths = source.cpp_type(key.out_dtype), "flashtile::" + key.features.policies()[3]
    if key.grads is None:
        combine = f"fwd_combine_kernel<{out}, {lengths}>"
        return _forward_step(key), _plain_step("fwd_combine", combine, _rows(COMBINE_ROWS), COMBINE_THREADS, is_for_splits=True)
    preprocess = f"bwd_preprocess_kernel<{out}, {lengths}>"
    steps = [_plain_step("bwd_preprocess", preprocess, _rows(PREPROCESS_ROWS), PREPROCESS_THREADS)]
    if "dsinks" in key.grads:
        steps.append(_plain_step("bwd_preprocess", f"bwd_dsinks_kernel<{lengths}>", (("heads", 1),), PREPROCESS_THREADS))
    if "dk" in key.grads or "dv" in key.grads:
        steps.append(_tile_step(key, "bwd_dkdv_simt"))
    if "dq" in key.grads:
        steps.append(_tile_step(key, "bwd_dq_simt"))
    if "dbias" in key.grads:
        steps.append(_tile_step(key, "bwd_dbias_simt"))
    return tuple(steps)


def grid_of(kernel: str, block_m: int, block_n: int) -> tuple[tuple[str, int], ...]:
    """The blocks of a kernel with tiles."""
    if kernel == "bwd_dkdv_simt":
        return ("seqlen_k", block_m), ("heads_kv", 1), ("batch", 1)
    if kernel == "bwd_dbias_simt":
        return ("bias_batch", 1), ("bias_heads", 1), ("bias_rows", block_m), ("bias_columns", block_n)
    return (("num_splits", 1), *_rows(block_m)) if kernel == "fwd_simt" else _rows(block_m)


def _rows(block_rows: int, heads: str = "heads") -> tuple[tuple[str, int], ...]:
    return ("seqlen_q", block_rows), (heads, 1), ("batch", 1)


def why_not_sm90(key: PlanKey) -> str | None:
    """Why the Hopper forward does not take the call, or None."""
    if not key.is_scale_positive:
        return "a scale that is not positive"
    if not key.has_own_rows:
        return "rows that overlap in memory"
    return table.why_not_sm90(key.dtype, key.head_dim, key.head_dim_v, key.features, key.arch)


def _forward_step(key: PlanKey) -> Step:
    if why_not_sm90(key) is not None:
        return _tile_step(key, "fwd_simt")
    dims = key.head_dim, key.head_dim_v
    row = table.select_sm90(key.dtype, key.out_dtype, *dims, key.features, key.packed_heads > 1, key.is_ragged)
    return step_of(row, key.features, key.packed_heads)


def _tile_step(key: PlanKey, kernel: str) -> Step:
    padded = table.padded_head_dim(max(key.head_dim, key.head_dim_v))
    assert padded is not None
    return step_of(table.select(kernel, key.dtype, key.out_dtype, padded, key.features, key.arch, key.is_small), key.features)


def step_of(row: Row | Sm90Row, features: Features, packed_heads: int = 1) -> Step:
    """The launch of a kernel with tiles, whether or not its row is in the table."""
    unit, entry = source.unit(row, features), source.entry(row, features)
    sizes = row.block_m, row.block_n, row.num_threads, row.shared_bytes
    if not isinstance(row, Sm90Row):
        return Step(unit, entry, grid_of(row.kernel, row.block_m, row.block_n), *sizes)
    rows = _rows(row.queries(packed_heads), "heads_kv") if row.packs_heads else _rows(row.block_m)
    return Step(unit, entry, (("num_splits", 1), *rows), *sizes, is_persistent=True, has_out_map=row.stores_by_tma(features))


def _plain_step(header: str, entry: str, grid: tuple[tuple[str, int], ...], num_threads: int, is_for_splits: bool = False) -> Step:
    entry = f"flashtile::{entry}"
    return Step(source.plain_unit(header, entry, Params), entry, grid, 1, 1, num_threads, 0, is_for_splits)


# Plans

# What kernels expect of the optional tensors
_OPTIONAL = (
    *(Operand(name, strides="any") for name in ("bias", "mask")),
    *(Operand(name, strides="contiguous", dtype="float32") for name in ("alibi_slopes", "sinks")),
    *(Operand(name, strides="contiguous") for name in ("rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")),
    Operand("block_table"),
)
_SCALARS = ("window_left", "window_right", "scale", "scale_log2", "softcap", "dropout_threshold", "keep_factor")


@functools.lru_cache(maxsize=4096)
def plan(key: PlanKey, form: Form) -> LaunchPlan:
    return plan_of(key, form, kernels(key))


def plan_of(key: PlanKey, form: Form, steps: tuple[Step, ...]) -> LaunchPlan:
    """The plan of a pass with these kernels."""
    tensors = ["q", "k", "v", "out"]
    operands = [Operand("q"), Operand("k"), Operand("v"), Operand("out", is_written=key.grads is None)]
    operands.append(Operand("lse", strides="contiguous", is_written=key.grads is None))
    operands += [operand for operand in _OPTIONAL if operand.name in form.given]
    splits, memsets = None, []
    if key.grads is None:
        splits = _splits(steps[0], key.packed_heads)
        split_rows = ("num_splits", "lse_size")
        workspaces = [Workspace("partial_out", 4 * key.head_dim_v, split_rows), Workspace("partial_stats", 8, split_rows)]
    else:
        workspaces = [Workspace("lse_log2", 4, ("lse_size",)), Workspace("delta", 4, ("lse_size",))]
        grads = _grad_operands(key.grads)
        tensors += ["dout", *(operand.name for operand in grads if operand.name in ("dq", "dk", "dv"))]
        operands += [Operand("dout", dtype=key.out_dtype), *grads]
        if "dlse" in form.given:
            operands.append(Operand("dlse", strides="contiguous", dtype="float32"))
        memsets = _memsets(key.grads, form)
    dims = key.head_dim, key.head_dim_v
    plain = _assembled((*memsets, *steps), operands, tensors, _values(form), splits, workspaces, dims, form)
    maps = _maps(steps[0], form, key.packed_heads)
    return dataclasses.replace(plain, image=plain.image.ljust(ctypes.sizeof(FwdSm90Params), b"\0"), maps=maps) if maps else plain


class HostKey(NamedTuple):
    """What decides a pass on the CPU."""

    dtype: str
    out_dtype: str
    bias_dtype: str | None
    head_dim: int
    head_dim_v: int
    grads: tuple[str, ...] | None = None  # of a backward pass: those of GRADS that are wanted


HOST_PAD = 16  # head dims in workspaces are padded to a multiple of this (csrc/cpu/tiles.h)


@functools.lru_cache(maxsize=4096)
def host_plan(key: HostKey, form: Form) -> LaunchPlan:
    """The plan of a pass on the CPU: one of its engine. Backward, the numbers num_splits and num_shares come with the call."""
    tensors = ["q", "k", "v", "out"]
    operands = [Operand("q"), Operand("k"), Operand("v"), Operand("out", is_written=key.grads is None)]
    operands.append(Operand("lse", strides="contiguous", is_written=key.grads is None))
    operands += [operand for operand in _OPTIONAL if operand.name in form.given]
    values, workspaces, memsets = _values(form), [], []
    # Sequences may share pages: what they add to them is rounded once, at the end
    is_paged = "block_table" in form.given
    if key.grads is not None:
        key_grads = [name for name in ("dk", "dv") if name in key.grads]
        tensors += ["dout", *(name for name in ("dq", "dk", "dv") if name in key.grads)]
        operands += [Operand("dout", dtype=key.out_dtype), *(Operand("dq", is_written=True) for name in key.grads if name == "dq")]
        operands += [Operand(name, dtype="float32" if is_paged else None, is_written=True) for name in key_grads]
        operands += [Operand("dbias", strides="contiguous", is_written=True) for name in key.grads if name == "dbias"]
        operands += [Operand("dsinks", strides="contiguous", dtype="float32", is_written=True) for name in key.grads if name == "dsinks"]
        operands += [Operand("dlse", strides="contiguous", dtype="float32") for name in form.given if name == "dlse"]
        padded = -(-key.head_dim // HOST_PAD) * HOST_PAD
        values += (("num_splits", (Scalar("num_splits"),)), ("num_shares", (Scalar("num_shares"),)))
        workspaces = [Workspace("lse_log2", 4, ("lse_size",)), Workspace("delta", 4, ("lse_size",))]
        workspaces.append(Workspace("partial_out", 4 * padded, ("num_shares", "lse_size")))
        memsets = [memset for memset in _memsets(key.grads, form) if memset.tensor != "dbias"]
        memsets += [Memset(name) for name in key_grads if is_paged and Memset(name) not in memsets]
    dtypes = (key.dtype, key.out_dtype, key.bias_dtype or "float32", "float32" if is_paged else key.dtype)
    engine = EnginePass(key.grads is not None, tuple(map(ENGINE_DTYPES.index, dtypes)))
    return _assembled((*memsets, engine), operands, tensors, values, None, workspaces, (key.head_dim, key.head_dim_v), form)


def _assembled(
    steps: tuple[Memset | Step | EnginePass, ...],
    operands: list[Operand],
    tensors: list[str],  # the operands with strides in the parameters
    values: tuple[tuple[str, tuple[Rule, ...]], ...],
    splits: SplitRule | None,
    workspaces: list[Workspace],
    head_dims: tuple[int, int],
    form: Form,
) -> LaunchPlan:
    """The plan with the image and the patches of its parameters."""
    patches = [patch for name in tensors for patch in _tensor_patches(name, form)]
    patches += [_patch(operand.name, Pointer(operand.name)) for operand in operands if operand.name not in tensors]
    patches += [_patch(workspace.name, Pointer(workspace.name)) for workspace in workspaces]
    patches += [_patch(f"lse_{name}_stride", Stride("lse", axis)) for name, axis in (("batch", -3), ("head", -2))]
    fields = {name for name, *_ in Params._fields_}
    patches += [
        _patch(name, Value(name)) for name in (*(name for name, _ in values), *(["num_splits"] if splits else [])) if name in fields
    ]
    patches += [_patch(name, Scalar(name)) for name in _SCALARS]
    patches += _optional_patches(form)
    image = Params(num_splits=1, head_dim=head_dims[0], head_dim_v=head_dims[1], is_top_left=form.is_top_left)
    return LaunchPlan(steps, tuple(operands), values, splits, tuple(workspaces), bytes(image), tuple(patches))


def _splits(step: Step, packed_heads: int) -> SplitRule:
    """Where a block fills a multiprocessor one for each is enough, and each split should have a few tiles of keys."""
    if not step.is_persistent:
        return SplitRule(step.block_rows, step.block_columns)
    if packed_heads > 1:
        return SplitRule(step.block_rows // 64 * (64 // packed_heads), 2 * step.block_columns, "heads_kv", blocks=1)
    return SplitRule(step.block_rows, 4 * step.block_columns, blocks=1)


def _maps(step: Step, form: Form, packed_heads: int) -> tuple[MapPatch, ...]:
    if not step.is_persistent:
        return ()
    boxes = {"q": (64 // packed_heads, packed_heads), "k": (step.block_columns, 1), "v": (step.block_columns, 1)}
    if step.has_out_map:
        boxes["out"] = (16, 1)  # of one warp
    head_axis, row_axis = _axes(form)
    axes = row_axis, head_axis, -4
    return tuple(MapPatch(getattr(FwdSm90Params, f"{name}_map").offset, name, axes, *box) for name, box in boxes.items())


def _grad_operands(grads: tuple[str, ...]) -> list[Operand]:
    found = [Operand(name, is_written=True) for name in ("dq", "dk", "dv") if name in grads]
    # dK and dV come from one kernel
    for name, other in (("dk", "dv"), ("dv", "dk")):
        if name in grads and other not in grads:
            found.append(Operand(other, like=other[1]))
    if "dbias" in grads:
        found.append(Operand("dbias", strides="contiguous", is_written=True))
    if "dsinks" in grads:
        found.append(Operand("dsinks", strides="contiguous", dtype="float32", is_written=True))
    return found


def _memsets(grads: tuple[str, ...], form: Form) -> list[Memset]:
    """Keys outside every sequence have no owner, and neither have the scores there."""
    has_lengths = any(name in form.given for name in ("cu_seqlens_q", "seqused_k", "leftpad_k"))
    names = [name for name in ("dk", "dv") if has_lengths and name in grads]
    return [Memset(name) for name in (*names, *(["dbias"] if "dbias" in grads else []))]


def _axes(form: Form) -> tuple[int, int]:
    """(head, row), from the end."""
    return (-2, -3) if form.layout == "bshd" else (-3, -2)


def _values(form: Form) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    head, row = _axes(form)
    is_packed, is_paged = "cu_seqlens_q" in form.given, "block_table" in form.given
    seqlen_q: tuple[Rule, ...] = (Size("q", row),)
    seqlen_k: tuple[Rule, ...] = (Size("k", row), Size("block_table", -1)) if is_paged else (Size("k", row),)
    if is_packed and form.has_max_seqlen_q:
        seqlen_q = (Scalar("max_seqlen_q"),)
    if is_packed and form.has_max_seqlen_k:
        seqlen_k = (Scalar("max_seqlen_k"),)
    values: list[tuple[str, tuple[Rule, ...]]] = [
        ("batch", (Size("cu_seqlens_q", -1, plus=-1) if is_packed else Size("q", -4),)),
        ("heads", (Size("q", head),)),
        ("heads_kv", (Size("k", head),)),
        ("seqlen_q", seqlen_q),
        ("seqlen_k", seqlen_k),
        ("total_q", (Size("q", row),)),
        ("total_k", (Size("k", row),)),
        ("lse_size", (Elements("lse"),)),
    ]
    if is_paged:
        values += [("num_pages", (Size("k", -4),)), ("page_size", (Size("k", row),))]
    if "bias" in form.given:
        values += [("bias_batch", (Size("bias", -4),)), ("bias_heads", (Size("bias", -3),))]
        values += [("bias_rows", (Spread("bias", -2, "seqlen_q"),)), ("bias_columns", (Spread("bias", -1, "seqlen_k"),))]
    return tuple(values)


def _patch(name: str, rule: Rule, index: int = 0) -> Patch:
    return Patch(*place(Params, name, index), rule)


def _tensor_patches(name: str, form: Form) -> list[Patch]:
    axes = (-4, *_axes(form))  # batch or page, head, row
    return [_patch(name, Pointer(name)), *(_patch(f"{name}_strides", Stride(name, axis), index) for index, axis in enumerate(axes))]


def _optional_patches(form: Form) -> list[Patch]:
    patches = []
    for name in ("bias", "mask"):
        if name in form.given:
            patches += [_patch(f"{name}_strides", BroadcastStride(name, axis), axis + 4) for axis in (-4, -3, -2, -1)]
    if "bias" in form.given:
        patches += [_patch("bias_sizes", Size("bias", axis), axis + 4) for axis in (-4, -3, -2, -1)]
    if "alibi_slopes" in form.given:
        patches.append(_patch("alibi_batch_stride", Stride("alibi_slopes", -2)))
    if "block_table" in form.given:
        patches.append(_patch("table_stride", Stride("block_table", -2)))
    return patches


on_forget: list[Callable[[], None]] = []  # of those who keep what they made from plans


def forget() -> None:
    """Drops every plan, and what others made from it: units written from now on may differ (kernels/mutation.py)."""
    kernels.cache_clear()
    plan.cache_clear()
    for drop in on_forget:
        drop()
