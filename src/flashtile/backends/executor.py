"""Executes a launch plan for the tensors of one call: replaces what kernels cannot read, evaluates the plan's rules,
launches its steps.

It knows tensors, bytes and grids, and nothing about attention. Up to the launches it works on any device. The backends
`cuda` and `cpu` call it for what C++ does not run. csrc/exec/plan.cpp does the same: plans/plan.py says what ties the
two.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.errors import dtype_name, unsupported
from flashtile.plans import plan as plans
from flashtile.plans.plan import EnginePass, LaunchPlan, MapPatch, Memset, Operand, Step, Workspace
from flashtile.problem import is_aligned16
from flashtile.runtime import cache, driver, extension, kept
from flashtile.runtime.kept import KeptZeros

Tensors = Mapping[str, Tensor]
Scalars = Mapping[str, float | int]

_WORKSPACE_ALIGNMENT = 256
_ANY_STRIDE = 16  # bytes, along an axis of length 1
_BOX_BYTES = 128  # of a row of a tensor map's box
_MAX_BLOCKS = 2**31 - 1  # of a grid
_STRUCTS = {code: Struct(code) for code in "PqiIfd"}


class Splits(NamedTuple):
    """Source of the number of splits: what the caller asks for (0 = chosen, 1 = none), and what would fill the GPU."""

    asked: int
    num_multiprocessors: int


class Launch(NamedTuple):
    """A call: its plan and what the plan is executed for."""

    plan: LaunchPlan
    tensors: Tensors
    scalars: Scalars
    splits: Splits
    arch: str

    @property
    def device_index(self) -> int:
        return next(iter(self.tensors.values())).device.index or 0


# Tensors


COPIED = ("aligned", "pairs")  # strides of an operand: both executors copy a tensor that has others


def prepare(plan: LaunchPlan, given: Tensors) -> dict[str, Tensor]:
    """The tensors that kernels read and write: those given, or copies where kernels expect another form."""
    return {operand.name: _fitting(operand, given) for operand in plan.operands}


def _fitting(operand: Operand, given: Tensors) -> Tensor:
    if operand.like is not None:
        like = given[operand.like]
        return aligned_rows(like, is_written=True) if operand.strides == "aligned" else torch.empty_like(like)
    tensor = given[operand.name]
    if is_fitting(operand, tensor):
        return tensor
    if operand.strides in COPIED:
        return aligned_rows(tensor, operand.is_written)
    dtype = tensor.dtype if operand.dtype is None else getattr(torch, operand.dtype)
    if operand.is_written:
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return tensor.to(dtype).contiguous()


def is_fitting(operand: Operand, tensor: Tensor) -> bool:
    if operand.dtype is not None and tensor.dtype != getattr(torch, operand.dtype):
        return False
    if operand.strides == "contiguous":
        return tensor.is_contiguous()
    if operand.strides == "aligned" and not is_aligned16(tensor):
        return False
    if operand.strides == "pairs":
        return has_pairs(tensor)
    return operand.strides == "any" or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def has_pairs(tensor: Tensor) -> bool:
    """Pairs of elements of a row lie on 4-byte boundaries, or there is one row alone in memory, or rows that overlap:
    copies of those may be thousands of times as large."""
    size, last = tensor.element_size(), tensor.shape[-1]
    if size >= 4 or any(tensor.shape[axis] == 1 or tensor.stride(axis) == 0 for axis in (-1, -2)):
        return True
    distinct = [(length, stride) for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    if 1 + sum((length - 1) * stride for length, stride in distinct) < math.prod(length for length, _ in distinct):
        return True
    offsets = [tensor.stride(axis) * size for axis in range(-tensor.dim(), -1) if tensor.shape[axis] > 1]
    return last <= 1 or (tensor.stride(-1) == 1 and all(offset % 4 == 0 for offset in (tensor.data_ptr(), *offsets)))


def aligned_rows(tensor: Tensor, is_written: bool) -> Tensor:
    """Memory like the tensor's whose rows start on 16-byte boundaries, with its elements and zeros between them unless
    they are to be written. What is one row in memory stays one."""
    axes = [axis for axis in range(tensor.dim() - 1) if tensor.stride(axis) == 0 and not is_written]
    distinct = tensor
    for axis in axes:
        distinct = distinct.narrow(axis, 0, min(1, tensor.shape[axis]))
    width, columns = 16 // tensor.element_size(), tensor.shape[-1]
    sizes = (*distinct.shape[:-1], -(-columns // width) * width)
    is_padded = sizes[-1] != columns and not is_written
    memory = (torch.zeros if is_padded else torch.empty)(sizes, dtype=tensor.dtype, device=tensor.device)
    rows = memory[..., :columns]
    if not is_written:
        rows.copy_(distinct)
    return rows.expand(tensor.shape) if axes else rows


def finish(plan: LaunchPlan, given: Tensors, tensors: Tensors) -> None:
    """Copies results back that were written elsewhere."""
    for operand in plan.operands:
        if operand.is_written and tensors[operand.name] is not given[operand.name]:
            given[operand.name].copy_(tensors[operand.name])


# Rules


class _Call(NamedTuple):
    tensors: Tensors
    scalars: Scalars
    values: dict[str, int]
    pointers: Mapping[str, int]


def _stride(rule: plans.Stride, call: _Call) -> int:
    tensor = call.tensors[rule.tensor]
    return tensor.stride(rule.axis) if tensor.dim() >= -rule.axis else 0


def _broadcast_stride(rule: plans.BroadcastStride | plans.DistinctSize, call: _Call) -> int:
    tensor = call.tensors[rule.tensor]
    return 0 if tensor.shape[rule.axis] == 1 else tensor.stride(rule.axis)


_EVALUATE: dict[type, Callable[[Any, _Call], float | int]] = {
    plans.Pointer: lambda rule, call: call.pointers[rule.name],
    plans.Stride: _stride,
    plans.BroadcastStride: _broadcast_stride,
    plans.Size: lambda rule, call: call.tensors[rule.tensor].shape[rule.axis] + rule.plus,
    plans.Elements: lambda rule, call: call.tensors[rule.tensor].numel(),
    plans.BroadcastSize: lambda rule, call: (
        1 if call.tensors[rule.tensor].shape[rule.axis] == 1 else call.values[rule.value]
    ),
    plans.DistinctSize: lambda rule, call: 1 if _broadcast_stride(rule, call) == 0 else call.values[rule.value],
    plans.Bounded: lambda rule, call: (
        call.values[rule.value]
        if call.tensors[rule.tensor].shape[rule.axis] == 1
        else min(call.values[rule.value], call.tensors[rule.tensor].shape[rule.axis])
    ),
    plans.Share: lambda rule, call: -(-call.values[rule.value] // max(1, call.values[rule.among])),
    plans.Least: lambda rule, call: min(call.values[rule.value], call.values[rule.other]),
    plans.Quotient: lambda rule, call: -(-call.values[rule.value] // rule.divisor),
    plans.Value: lambda rule, call: call.values[rule.name],
    plans.Scalar: lambda rule, call: call.scalars[rule.name],
}


def evaluate(plan: LaunchPlan, tensors: Tensors, scalars: Scalars, splits: Splits) -> dict[str, int]:
    """The plan's values for a call."""
    values: dict[str, int] = {"num_splits": 1, "num_multiprocessors": splits.num_multiprocessors}
    call = _Call(tensors, scalars, values, {})
    for name, rules in plan.values:
        values[name] = math.prod(int(_EVALUATE[type(rule)](rule, call)) for rule in rules)
    if plan.splits is not None:
        rule = plan.splits
        num_tiles = -(-values["seqlen_k"] // rule.split_keys)
        # Left to us: as many as give every multiprocessor its blocks, each with a tile of keys at least
        num_blocks = -(-values["expected_q"] // rule.block_rows) * values[rule.heads] * values["batch"]
        wanted = splits.asked or rule.blocks * splits.num_multiprocessors // max(1, num_blocks)
        values["num_splits"] = max(1, min(wanted, num_tiles))
    return values


class WorkspaceLayout(NamedTuple):
    """One allocation for the workspaces of a call, and the offset of each in it."""

    num_bytes: int
    offsets: dict[str, int]
    zeroed: tuple[slice, ...] = ()

    def allocate(self, device: torch.device) -> Tensor | None:
        if not self.num_bytes:
            return None
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for part in self.zeroed:
            memory[part].zero_()
        return memory


def lay_out_workspaces(plan: LaunchPlan, values: dict[str, int]) -> WorkspaceLayout:
    offsets, zeroed, end = {}, list[slice](), 0
    for workspace in plan.workspaces:
        if workspace.is_kept or (workspace.is_for_splits and values["num_splits"] == 1):
            continue
        offsets[workspace.name] = end
        num_bytes = _num_bytes(workspace, values)
        zeroed += [slice(end, end + num_bytes)] if workspace.is_zeroed else []
        end += -(-num_bytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return WorkspaceLayout(end, offsets, tuple(zeroed))


def kept_zeros(plan: LaunchPlan, values: dict[str, int], device_index: int) -> dict[str, KeptZeros]:
    """The kept workspace of a call on the current stream, by its name."""
    workspaces = [workspace for workspace in plan.workspaces if workspace.is_kept]
    if not workspaces:
        return {}
    with on_device(device_index):  # whose default stream is another than that of the current device
        stream = current_stream(device_index)
        return {one.name: kept.zeros(device_index, stream, _num_bytes(one, values)) for one in workspaces}


def _num_bytes(workspace: Workspace, values: dict[str, int]) -> int:
    elements = math.prod(values[name] for name in workspace.values)
    elements *= math.prod(-(-values[name] // divisor) for name, divisor in workspace.quotients)
    return workspace.element_bytes * (
        elements + workspace.num_padding * math.prod(values[x] for x in workspace.padding)
    )


def fill(
    plan: LaunchPlan, tensors: Tensors, scalars: Scalars, values: dict[str, int], pointers: Mapping[str, int]
) -> bytearray:
    """The parameters of a call. A workspace that is not needed has no pointer: it stays null."""
    image, call = bytearray(plan.image), _Call(tensors, scalars, values, pointers)
    for offset, code, rule in plan.patches:
        if type(rule) is not plans.Pointer or rule.name in pointers:
            _STRUCTS[code].pack_into(image, offset, _EVALUATE[type(rule)](rule, call))
    return image


def addresses(tensors: Tensors, found: WorkspaceLayout, workspace: Tensor | None) -> dict[str, int]:
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    if workspace is not None:
        base = workspace.data_ptr()
        pointers |= {name: base + offset for name, offset in found.offsets.items()}
    return pointers


def num_blocks(step: Step, values: dict[str, int]) -> int:
    if step.is_for_splits and values["num_splits"] == 1:
        return 0
    blocks = step.cluster * math.prod(factor.of(values) for factor in step.grid)
    if step.max_blocks:
        return min(blocks, step.max_blocks * values["num_multiprocessors"])
    if blocks > _MAX_BLOCKS:  # the driver takes them modulo 2**32
        sizes = f"sizes that need {blocks} blocks of {step.name}"
        raise unsupported("q", sizes, f"at most {_MAX_BLOCKS}", "Split the batch over several calls")
    return blocks


def tensor_map(patch: MapPatch, tensor: Tensor) -> driver.TensorMap:
    """A map of the tensor that lacks its address alone. An axis of stride 0 is one of length 1: kernels ask for its
    first element."""
    axes = [axis for axis in patch.axes if tensor.dim() >= -axis and tensor.stride(axis) > 0 and tensor.shape[axis] > 1]
    lengths = [tensor.shape[axis] if axis in axes else 1 for axis in patch.axes]
    strides = [tensor.stride(axis) * tensor.element_size() if axis in axes else _ANY_STRIDE for axis in patch.axes]
    bits = patch.box_rows | tensor.shape[patch.axes[0]]
    box_rows = bits & -bits if patch.is_paged else patch.box_rows
    return driver.TensorMap(
        dtype_name(tensor.dtype),
        (tensor.shape[-1], *lengths),
        strides,
        (_BOX_BYTES // tensor.element_size(), box_rows, patch.box_heads, 1),
        patch.l2_bytes,
    )


def is_mappable(tensor: Tensor) -> bool:
    """TMA can read it: its last axis is contiguous, and rows begin on 16-byte boundaries."""
    axes = [axis for axis in range(-tensor.dim(), -1) if tensor.shape[axis] > 1]
    offsets = [tensor.data_ptr(), *(tensor.stride(axis) * tensor.element_size() for axis in axes)]
    is_contiguous = tensor.shape[-1] > 1 and tensor.stride(-1) == 1
    return is_contiguous and all(offset % 16 == 0 for offset in offsets)


def encode_maps(plan: LaunchPlan, tensors: Tensors, image: bytearray) -> None:
    """Puts the tensor maps into the parameters. An empty tensor is never read and gets none."""
    for patch in plan.maps:
        tensor = tensors[patch.tensor]
        if tensor.numel() and (is_mappable(tensor) or not patch.is_optional):
            image[patch.offset : patch.offset + driver.TENSOR_MAP_BYTES] = tensor_map(patch, tensor).encode(
                tensor.data_ptr()
            )


# Launches


loaded: set[str] = set()  # the kernels of this process, by their C++ names
_functions: dict[tuple[str, str, str], driver.Function] = {}  # by the arguments of `function`
_loading: dict[tuple[str, str, str], threading.Lock] = {}


def function(unit: str, entry: str, arch: str) -> driver.Function:
    """A kernel, compiled if it is not in the cache, loaded for every device. All threads get the same object."""
    key = unit, entry, arch
    found = _functions.get(key)
    if found is None:
        with _loading.setdefault(key, threading.Lock()):
            found = _functions.get(key)
            if found is None:
                compiled = cache.compile_cached(unit, arch, [entry])
                loaded.add(entry)
                found = _functions[key] = driver.load(compiled.cubin).function(compiled.symbols[entry])
    return found


def is_loaded(step: Step, arch: str) -> bool:
    return (step.unit, step.entry, arch) in _functions


class _Ready(NamedTuple):
    """A call whose parameters are filled."""

    tensors: dict[str, Tensor]
    values: dict[str, int]
    workspace: (
        Tensor | None
    )  # must live until the launches are queued, no longer: torch's allocator orders reuse on the same stream
    image: bytearray


def _ready(call: Launch) -> _Ready:
    plan = call.plan
    tensors = prepare(plan, call.tensors)
    values = evaluate(plan, tensors, call.scalars, call.splits)
    found = lay_out_workspaces(plan, values)
    workspace = found.allocate(next(iter(tensors.values())).device)
    pointers = addresses(tensors, found, workspace)
    pointers |= {name: region.address for name, region in kept_zeros(plan, values, call.device_index).items()}
    return _Ready(tensors, values, workspace, fill(plan, tensors, call.scalars, values, pointers))


class _Running(NamedTuple):
    """Facts of a call that its steps need."""

    call: Launch
    tensors: dict[str, Tensor]
    values: dict[str, int]
    image: bytearray
    spans: int


def _run_engine(step: EnginePass, running: _Running) -> None:
    run = extension.cpu_backward if step.is_backward else extension.cpu_forward
    run(_address(running.image), running.spans, *step.elements)


_RUN: dict[type, Callable[[Any, _Running], object]] = {
    Memset: lambda step, running: running.tensors[step.tensor].zero_(),
    Step: lambda step, running: launch(
        step, running.values, running.image, running.call.device_index, running.call.arch
    ),
    EnginePass: _run_engine,
}


def execute(call: Launch) -> None:
    """One call, from its tensors to its launches on the current stream of their device."""
    with on_device(call.device_index):
        _execute(call, 0)


def execute_on_host(call: Launch, spans: int = 0) -> None:
    """Executes a plan on the CPU. `spans`: the address of each sequence's bounds (csrc/cpu/engine.h: Span), where they
    have lengths."""
    _execute(call, spans)


def _execute(call: Launch, spans: int) -> None:
    tensors, values, _workspace, image = _ready(call)
    encode_maps(call.plan, tensors, image)
    running = _Running(call, tensors, values, image, spans)
    for step in call.plan.steps:
        _RUN[type(step)](step, running)
    finish(call.plan, call.tensors, tensors)


def launch(step: Step, values: dict[str, int], image: bytearray, index: int, arch: str) -> None:
    """Launches on the current stream of the current device; nothing where the grid is empty."""
    if (blocks := num_blocks(step, values)) > 0:
        kernel = function(step.unit, step.entry, arch)
        kernel.set_shared_bytes(index, step.shared_bytes)
        stream = current_stream(index)
        block = (step.num_threads, 1, 1)
        starts_early = step.starts_early and driver.can_start_early()
        kernel.launch((blocks, 1, 1), block, step.shared_bytes, stream, _address(image), starts_early)


def current_stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)


def on_device(index: int) -> AbstractContextManager[Any]:
    return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)


def _address(image: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(image))
