"""The C++ executor (csrc/exec) as Python sees it: whether it is there, and the plans that are registered with it.

It looks a call up by everything that the choice of a plan depends on, checks what is left, and launches without Python.
A call that it has no plan for falls back to Python, which registers a plan and leaves the call to it. A call that it
cannot handle falls back every time, to backends/executor.py or to another backend.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

from flashtile import families
from flashtile.backends import executor
from flashtile.errors import value_error
from flashtile.families import assemble
from flashtile.plans import plan as plans
from flashtile.plans.plan import EnginePass, LaunchPlan, Memset, Step
from flashtile.problem import (
    CACHE_ARGUMENTS,
    SCHEMA_TYPES,
    AttentionArgs,
    Facts,
    Problem,
    Shape,
    dense_schema,
    limits,
)
from flashtile.runtime import driver, extension, kept

Function = TypeVar("Function", bound=Any)

_SWITCH = "FLASHTILE_EXECUTOR"
FORWARD, BACKWARD, APPEND = range(3)  # csrc/exec/attention.h: Pass
# That the extension was built for
_ARGUMENTS = (
    *(f"{kind} {name}" for name, kind in SCHEMA_TYPES.items()),
    *dense_schema(),
    *(f"cache: {name}" for name in CACHE_ARGUMENTS),
    *limits(),
)


@functools.cache
def _module() -> Any:
    """The extension with the executor's functions; None where there is none, or one built from other sources."""
    module = extension.executor()
    return module if getattr(module, "ARGUMENTS", None) == _ARGUMENTS else None


def register_ops() -> bool:
    """C++ kernels for the ops; False where Python has to provide them."""
    if _module() is None:
        return False
    _module().register_ops(_keep)
    missing_on_host()  # opens it, so that the first call already registers its plan
    return True


def override_torch_flash(key: str) -> Callable[[], None] | None:
    """C++ kernels for torch's flash attention operators under this dispatch key (csrc/exec/torch_flash.cpp), until the
    returned function is called. None where there are no C++ kernels."""
    module = _module()
    if module is None:
        return None
    return functools.partial(module.restore_torch_flash, module.override_torch_flash(key))


class _Raised(threading.local):
    """Error that a kernel of this thread has raised inside of C++, and the frame that had called it."""

    error: BaseException | None = None
    frame: FrameType | None = None


_raised = _Raised()
_waiting: set[CodeType] = set()


def waits_for_errors(function: Function) -> Function:
    """A function that calls ops and gives their RuntimeErrors to `take_raised`."""
    _waiting.add(function.__code__)
    return function


def raising(kernel: Callable[..., Any], num_outputs: int) -> Callable[..., Any]:
    """A Python kernel that C++ calls through the dispatcher, which loses exceptions: C++ gets them beside it."""

    def run(*values: Any) -> Any:
        try:
            return kernel(*values)
        except BaseException as error:
            if not _module().raise_in_kernel(error):
                raise
            return (None,) * num_outputs if num_outputs else None

    return run


def _keep(error: BaseException) -> bytes:
    """Keeps what a kernel raises, if a function waits for it: it holds the call's tensors. Returns the text that C++
    throws."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    outer = frame
    while outer is not None and outer.f_code not in _waiting:
        outer = outer.f_back
    if outer is not None:
        _raised.error, _raised.frame = error, frame
    text = str(error) or type(error).__name__
    return text.encode(errors="replace").replace(b"\0", b" ")


def take_raised(error: BaseException) -> BaseException | None:
    """Returns what a kernel has raised, where that made torch raise this error in the frame that had called the kernel.
    torch keeps the text alone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame is not _raised.frame:
        return None
    raised, _raised.error, _raised.frame = _raised.error, None, None
    return raised


def named_executor() -> str:
    """The language that FLASHTILE_EXECUTOR names."""
    wanted = os.environ.get(_SWITCH) or "c++"
    if wanted not in ("c++", "python"):
        raise value_error(_SWITCH, repr(wanted), "c++ or python", "Unset it")
    return wanted


def _unavailable() -> str | None:
    """Returns why Python executes every plan, or None."""
    if named_executor() == "python":
        return f"{_SWITCH}=python"
    if extension.missing() is None and _module() is None:
        return "the C++ extension was built from other sources; `pip install .` builds it anew"
    return extension.missing()


@functools.cache
def missing() -> str | None:
    """Returns why calls are launched by Python, or None. Starts the C++ executor; FLASHTILE_EXECUTOR is read once."""
    return _unavailable() or extension.open_executor("cuda")


@functools.cache
def missing_on_host() -> str | None:
    """Returns why calls of the CPU engine are made by Python, or None."""
    return _unavailable() or extension.open_executor("host")


_gpus: dict[int, tuple[Any, ...]] = {}  # what C++ knows of each


def introduce(device_index: int, num_multiprocessors: int) -> None:
    """Tells C++ what the choice of a plan looks at beside the call: without it C++ describes no call on the GPU."""
    classes = families.length_classes("forward"), families.length_classes("backward")
    known = num_multiprocessors, *classes
    if missing() is None and _gpus.get(device_index) != known:
        numbers = (tuple(one.serialized() for one in of_pass) for of_pass in classes)
        _module().set_gpu(device_index, num_multiprocessors, *numbers)
        _gpus[device_index] = known


def described(kind: int, args: AttentionArgs) -> Problem | None:
    """The problem of the call of this thread that C++ has handed to Python and that waits for a plan. C++ has checked
    it and knows its sizes. None where there is none, or C++ cannot run it."""
    module = _module()
    found = None if module is None else module.waiting_call(kind)
    if found is None:
        return None
    shape, (*facts, classes) = found
    op = "forward" if kind == FORWARD else "backward"
    return Problem.summary(args, Shape(*shape), Facts._make((*facts, classes and (op, classes))))


def has_plan(kind: int) -> bool:
    """True if C++ has a plan for the call of this thread that waits for one. It makes the call when the Python kernel
    returns."""
    module = _module()
    return module is not None and module.has_plan(kind)


def register_plan(
    kind: int, plan: LaunchPlan, num_multiprocessors: int = 1, arch: str = "", device_index: int = 0
) -> bool:
    """Registers the plan for the call that waits, and for all others of its key. False where C++ cannot run the call.
    Else it does when the Python kernel returns."""
    module = _module()
    if module is None:
        return False
    names = (module.APPEND_TENSORS, module.APPEND_SCALARS) if kind == APPEND else (module.TENSORS, module.SCALARS)
    numbers, symbols = serialize(plan, num_multiprocessors, *names)
    drafted = module.draft_plan(kind, array("q", numbers).tobytes(), plan.image, "\n".join(symbols))
    if drafted is None:
        return False
    places, kept_bytes = drafted
    kernels = [step for step in plan.steps if isinstance(step, Step)]
    found = tuple[tuple[int, int, str], ...]()
    if places:
        # A kernel that the call does not launch may not be compiled: it is left out until one does
        with executor.on_device(device_index):
            # With those that other calls have compiled: the plan may replace one that has them
            places = {*places, *(place for place, step in enumerate(kernels) if executor.is_loaded(step, arch))}
            found = tuple(_loaded(place, kernels[place], arch, device_index) for place in sorted(places))
            if kept_bytes:
                # The default stream is that of the current device
                region = kept.zeros(device_index, executor.current_stream(device_index), kept_bytes)
                module.add_kept_zeros(*region.owner, region.address, region.num_bytes)
    module.register_plan(kind, found)
    return True


def _loaded(place: int, step: Step, arch: str, device_index: int) -> tuple[int, int, str]:
    """(place, address, name) of a kernel on the current device."""
    kernel = executor.function(step.unit, step.entry, arch)
    return place, kernel.set_shared_bytes(device_index, step.shared_bytes), kernel.symbol


def clear_plans() -> None:
    if _module() is not None:
        _module().clear_plans()


assemble.on_clear.append(clear_plans)


@contextmanager
def python_only() -> Iterator[None]:
    """Inside, every call goes through the Python executor, and no plan is registered: where launches are watched, or
    not to be made."""
    module = _module()
    if module is None:
        yield
        return
    before = module.is_python_only()
    module.set_python_only(True)
    try:
        yield
    finally:
        module.set_python_only(before)


@contextmanager
def record_launches() -> Iterator[dict[tuple[str, str], None]]:
    """Inside, kernels are not launched but recorded: (unit, entry) of each that would be."""
    found: dict[tuple[str, str], None] = {}
    launch = executor.launch

    def record(step: Step, values: dict[str, int], image: bytearray, index: int, arch: str) -> None:
        if executor.num_blocks(step, values) > 0:
            found[step.unit, step.entry] = None

    executor.launch = record
    try:
        with python_only():
            yield found
    finally:
        executor.launch = launch


# A plan as numbers, in the order that csrc/exec/plan.cpp reads them

_LAYOUTS = ("rows", "contiguous", "any", "aligned", "pairs")
_MEMSET, _KERNEL, _ENGINE = range(3)  # csrc/exec/plan.h: StepKind
_RULES = (
    *("tensor", "workspace", "stride", "broadcast_stride", "size", "elements", "broadcast_size"),
    *("distinct_size", "bounded", "share", "least", "quotient", "value", "scalar"),
)


def serialize(
    plan: LaunchPlan, num_multiprocessors: int, tensors: Sequence[str], scalars: Sequence[str]
) -> tuple[list[int], list[str]]:
    """The plan with tensors and scalars by index into those lists, and the names of its kernels."""
    value_names = ("num_splits", "num_multiprocessors", *(name for name, _ in plan.values))
    values_at = {name: index for index, name in enumerate(value_names)}  # a plan's own number of splits comes last
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
                return [_RULES.index("broadcast_size"), tensors.index(name), -1 - axis, values_at[value]]
            case plans.DistinctSize(name, axis, value):
                return [_RULES.index("distinct_size"), tensors.index(name), -1 - axis, values_at[value]]
            case plans.Bounded(name, axis, value):
                return [_RULES.index("bounded"), tensors.index(name), -1 - axis, values_at[value]]
            case plans.Share(name, among):
                return [_RULES.index("share"), values_at[name], 0, values_at[among]]
            case plans.Least(name, other):
                return [_RULES.index("least"), values_at[name], 0, values_at[other]]
            case plans.Quotient(name, divisor):
                return [_RULES.index("quotient"), values_at[name], 0, divisor]
            case plans.Value(name):
                return [_RULES.index("value"), values_at[name], 0, 0]
            case plans.Scalar(name):
                return [_RULES.index("scalar"), scalars.index(name), 0, 0]

    split = plan.splits
    numbers = [
        num_multiprocessors,
        *((split.block_rows, split.split_keys, split.blocks) if split else (0, 0, 0)),
    ]
    numbers += [values_at[name] for name in ("expected_q", "seqlen_k", split.heads, "batch")] if split else [0] * 4
    numbers.append(len(plan.operands))
    for operand in plan.operands:
        dtype = 0 if operand.dtype is None else 1 + extension.DTYPES.index(operand.dtype)
        like = 0 if operand.like is None else 1 + tensors.index(operand.like)
        numbers += [tensors.index(operand.name), _LAYOUTS.index(operand.strides), dtype, like, operand.is_written]
    numbers.append(len(plan.values))
    for _, factors in plan.values:
        numbers += [len(factors), *(number for factor in factors for number in rule(factor))]
    numbers.append(len(workspaces))
    for workspace in plan.workspaces:
        numbers += [workspace.element_bytes, workspace.is_zeroed, workspace.is_for_splits, workspace.is_kept]
        numbers.append(workspace.num_padding)
        for names in (workspace.values, workspace.padding):
            numbers += [len(names), *(values_at[name] for name in names)]
        numbers.append(len(workspace.quotients))
        numbers += [number for name, divisor in workspace.quotients for number in (values_at[name], divisor)]
    numbers.append(len(plan.patches))
    for patch in plan.patches:
        numbers += [patch.offset, ord(patch.code), *rule(patch.rule)]
    numbers.append(len(plan.maps))
    for tensor_map in plan.maps:
        axes = (-1 - axis for axis in tensor_map.axes)
        numbers += [
            tensor_map.offset,
            tensors.index(tensor_map.tensor),
            *axes,
            tensor_map.box_rows,
            tensor_map.box_heads,
            tensor_map.is_optional,
            tensor_map.is_paged,
            tensor_map.l2_bytes,
        ]
    numbers.append(len(plan.steps))
    symbols = []
    for step in plan.steps:
        if isinstance(step, Memset):
            numbers += [_MEMSET, tensors.index(step.tensor)]
            continue
        if isinstance(step, EnginePass):
            numbers += [_ENGINE, step.is_backward, *step.elements]
            continue
        numbers += [_KERNEL, len(step.grid)]
        for factor in step.grid:
            numbers += [values_at[factor.value], factor.divisor]
            numbers.append(0 if factor.plus is None else 1 + values_at[factor.plus])
        starts_early = step.starts_early and driver.can_start_early()
        numbers += [step.num_threads, step.shared_bytes, step.is_for_splits]
        numbers += [step.max_blocks, step.cluster, starts_early]
        symbols.append(step.name)
    return numbers, symbols
