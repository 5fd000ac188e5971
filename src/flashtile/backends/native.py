"""The C++ executor (csrc/exec) as the ops use it: whether it is there, and what it learns.

It looks a call up by everything that the choice of a plan depends on, checks what is left, and launches without Python. A call that it
has no plan for goes through backends/executor.py, which it learns the plan from; a call that it does not serve goes there every time.
"""

from __future__ import annotations

import functools
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flashtile.backends import executor
from flashtile.backends.executor import Launch
from flashtile.errors import value_error
from flashtile.kernels import assemble
from flashtile.kernels import plan as plans
from flashtile.kernels.plan import EnginePass, Memset, Step
from flashtile.runtime import extension

_SWITCH = "FLASHTILE_EXECUTOR"
FORWARD, BACKWARD, APPEND = range(3)  # csrc/exec/attention.h: Pass


def _unserved(*args: Any) -> Any:
    """Stands in for a function of an extension that is not there."""
    return None


def _function(name: str) -> Callable[..., Any]:
    return getattr(extension.executor(), name, _unserved)


# Each takes the arguments of an op as a tuple and returns its results in a tuple, or: None where Python has to serve the call, False where
# it also has to make the plan. `attend` stands above autograd: where the call is to be differentiated, it returns
# ((arguments, results or None, whether lse is wanted),)
attend, forward, backward, append_kv = (_function(name) for name in ("attend", "forward", "backward", "append_kv"))
# `flashtile.attention`: what `attend` returns; or the arguments of the op where C++ does not serve it; or None where what it was given
# needs a closer look
attention = _function("attention")
# Puts C++ in the place of the methods of a torch.autograd.Function and its nodes; backward passes that it leaves go to a function
serve_nodes = _function("serve_nodes")


def is_heard() -> bool:
    """A dispatch mode or a tracer listens between a call and its kernel; C++ asks the same, and more (extension.py: open_executor)."""
    is_traced = extension.is_traced_before_dispatch() or torch._C._get_tracing_state() is not None
    return is_traced or torch._C._len_torch_dispatch_stack() > 0


def _unavailable() -> str | None:
    """Why Python executes every plan, or None."""
    wanted = os.environ.get(_SWITCH) or "c++"
    if wanted not in ("c++", "python"):
        raise value_error(_SWITCH, repr(wanted), "c++ or python", "Unset it")
    if wanted == "python":
        return f"{_SWITCH}=python"
    if extension.missing() is None and _unserved in (attention, attend, forward, backward, append_kv, serve_nodes):
        return "the C++ extension was built from other sources; `pip install .` builds it anew"
    return extension.missing()


@functools.cache
def missing() -> str | None:
    """Why calls are launched by Python, or None. Starts the C++ executor; FLASHTILE_EXECUTOR is read once."""
    return _unavailable() or extension.open_executor("cuda")


@functools.cache
def missing_on_host() -> str | None:
    """The same for calls of the CPU engine."""
    return _unavailable() or extension.open_executor("host")


def learn(kind: int, args: tuple[Any, ...], launch: Launch) -> None:
    """What calls like this one take from now on, unless it needs a copy. It has been executed, so its kernels are loaded."""
    if missing() is None:
        module = extension.executor()
        module.set_gpu(launch.device_index, launch.splits.num_multiprocessors, 128)
        _hand_over(kind, args, launch)


def learn_on_host(kind: int, args: tuple[Any, ...], launch: Launch) -> None:
    """The same for a pass of the CPU engine."""
    if missing_on_host() is None:
        _hand_over(kind, args, launch)


def _hand_over(kind: int, args: tuple[Any, ...], launch: Launch) -> None:
    module, plan = extension.executor(), launch.plan
    if not all(operand.like or executor.is_fitting(operand, launch.given[operand.name]) for operand in plan.operands):
        return
    names = (module.APPEND_TENSORS, module.APPEND_SCALARS) if kind == APPEND else (module.TENSORS, module.SCALARS)
    values = executor.evaluate(plan, launch.given, launch.scalars, launch.splits)
    numbers, symbols = flat(launch, values, *names)
    module.learn(kind, args, array("q", numbers).tobytes(), plan.image, "".join(f"{symbol}\n" for symbol in symbols))


def forget() -> None:
    _function("forget")()


assemble.on_clear.append(forget)


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, every call goes through the Python executor, and C++ learns nothing: where launches are watched, or not to be made."""
    module = sys.modules[__name__]
    served = dict.fromkeys(("attention", "attend", "forward", "backward", "append_kv"), _unserved)
    changed = served | dict.fromkeys(("missing", "missing_on_host"), lambda: "set aside")
    kept = {name: getattr(module, name) for name in changed}
    forget()  # the nodes of autograd's graph, which C++ serves by itself, find no plan
    vars(module).update(changed)
    try:
        yield
    finally:
        vars(module).update(kept)


@contextmanager
def noted() -> Iterator[dict[tuple[str, str], None]]:
    """Inside, kernels are not launched but noted: (unit, entry) of each that would be."""
    found: dict[tuple[str, str], None] = {}
    launch = executor.launch

    def note(step: Step, values: dict[str, int], image: bytearray, index: int, arch: str) -> None:
        if executor.num_blocks(step, values) > 0:
            found[step.unit, step.entry] = None

    executor.launch = note
    try:
        with set_aside():
            yield found
    finally:
        executor.launch = launch


# A plan as numbers, in the order that csrc/exec/plan.cpp reads them

_LAYOUTS = ("rows", "contiguous", "any")
_MEMSET, _KERNEL, _ENGINE = range(3)  # csrc/exec/plan.h: StepKind
_RULES = ("tensor", "workspace", "stride", "broadcast_stride", "size", "elements", "spread", "value", "scalar")


def flat(launch: Launch, values: dict[str, int], tensors: Sequence[str], scalars: Sequence[str]) -> tuple[list[int], list[str]]:
    """The plan with tensors and scalars by their places in those lists, and the names of its kernels. A kernel that the call with these
    values does not launch may not be compiled: it is left out until one does."""
    plan, splits = launch.plan, launch.splits
    value_names = ("num_splits", "num_multiprocessors", *(name for name, _ in plan.values))
    values_at = {name: place for place, name in enumerate(value_names)}  # a plan's own number of splits comes last
    workspaces = [workspace.name for workspace in plan.workspaces]

    def rule(rule: plans.Rule) -> list[int]:
        match rule:
            case plans.Pointer(name) if name in workspaces:
                return [_RULES.index("workspace"), workspaces.index(name), 0, 0]
            case plans.Pointer(name):
                return [_RULES.index("tensor"), tensors.index(name), 0, 0]
            case plans.Stride(name, axis):
                return [_RULES.index("stride"), tensors.index(name), -1 - axis, 0]
            case plans.BroadcastStride(name, axis):
                return [_RULES.index("broadcast_stride"), tensors.index(name), -1 - axis, 0]
            case plans.Size(name, axis, plus):
                return [_RULES.index("size"), tensors.index(name), -1 - axis, plus]
            case plans.Elements(name):
                return [_RULES.index("elements"), tensors.index(name), 0, 0]
            case plans.BroadcastSize(name, axis, value):
                return [_RULES.index("spread"), tensors.index(name), -1 - axis, values_at[value]]
            case plans.Value(name):
                return [_RULES.index("value"), values_at[name], 0, 0]
            case plans.Scalar(name):
                return [_RULES.index("scalar"), scalars.index(name), 0, 0]

    split = plan.splits
    numbers = [splits.num_multiprocessors, *((split.block_rows, split.split_keys, split.blocks) if split else (0, 0, 0))]
    numbers += [values_at[name] for name in ("seqlen_q", "seqlen_k", split.heads, "batch")] if split else [0] * 4
    numbers.append(len(plan.operands))
    for operand in plan.operands:
        dtype = 0 if operand.dtype is None else 1 + extension.DTYPES.index(operand.dtype)
        like = 0 if operand.like is None else 1 + tensors.index(operand.like)
        numbers += [tensors.index(operand.name), _LAYOUTS.index(operand.strides), dtype, like]
    numbers.append(len(plan.values))
    for _, factors in plan.values:
        numbers += [len(factors), *(number for factor in factors for number in rule(factor))]
    numbers.append(len(workspaces))
    for workspace in plan.workspaces:
        numbers += [workspace.element_bytes, len(workspace.values), *(values_at[name] for name in workspace.values)]
    numbers.append(len(plan.patches))
    for patch in plan.patches:
        numbers += [patch.offset, ord(patch.code), *rule(patch.rule)]
    numbers.append(len(plan.maps))
    for tensor_map in plan.maps:
        axes = (-1 - axis for axis in tensor_map.axes)
        numbers += [tensor_map.offset, tensors.index(tensor_map.tensor), *axes, tensor_map.box_rows, tensor_map.box_heads]
    numbers.append(len(plan.steps))
    symbols = []
    for step in plan.steps:
        if isinstance(step, Memset):
            numbers += [_MEMSET, tensors.index(step.tensor)]
            continue
        if isinstance(step, EnginePass):
            numbers += [_ENGINE, step.is_backward, *step.elements]
            continue
        kernel = None
        if executor.num_blocks(step, values) > 0:
            kernel = executor.function(step.unit, step.entry, launch.arch)
        numbers += [_KERNEL, 0 if kernel is None else kernel.address(launch.device_index), len(step.grid)]
        numbers += [number for name, divisor in step.grid for number in (values_at[name], divisor)]
        numbers += [step.num_threads, step.shared_bytes, step.is_for_splits, step.max_blocks]
        symbols.append(step.name if kernel is None else kernel.symbol)
    return numbers, symbols
