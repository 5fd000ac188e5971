"""The C++ executor against the Python one, without a GPU: a driver that writes down what is launched, and CPU tensors in its calls."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import ops
from flashtile.backends import cuda, executor, native
from flashtile.backends.executor import Launch
from flashtile.backends.kvcache import AppendArgs
from flashtile.check.draw import Drawer
from flashtile.kernels import plan as plans
from flashtile.kernels import table
from flashtile.kernels.arch import ARCHS
from flashtile.problem import AttentionArgs
from flashtile.runtime import cache, driver, extension
from flashtile.testing import GRADS, Case

NUM_MULTIPROCESSORS = 132
NUMBERS = 10  # of a launch, before its parameters


class Recorder:
    """The fake driver's own functions."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_log.restype = ctypes.c_void_p
        self.library.fake_log_end.restype = ctypes.c_uint64
        self.library.fake_reset.argtypes = [ctypes.c_uint64]

    def reset(self, image_bytes: int) -> None:
        self.image_bytes = image_bytes
        self.library.fake_reset(image_bytes)

    def launches(self) -> list[tuple[tuple[int, ...], bytearray]]:
        """(numbers, parameters) of each launch."""
        log = ctypes.string_at(self.library.fake_log(), self.library.fake_log_end())
        size = 8 * NUMBERS + self.image_bytes
        parts = [log[start : start + size] for start in range(0, len(log), size)]
        return [(tuple(memoryview(part[: 8 * NUMBERS]).cast("Q")), bytearray(part[8 * NUMBERS :])) for part in parts]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake") / "libfake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def recorder(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A GPU to both executors: CPU tensors are on it, kernels cost nothing to compile, and nothing is computed."""
    monkeypatch.setattr(driver, "_LIBRARY", str(library))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_arch", lambda index: ARCHS[90])
    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda index: NUM_MULTIPROCESSORS)
    monkeypatch.setattr(cuda, "_missing", lambda: None)
    monkeypatch.setattr(cuda.CudaBackend, "devices", ("cuda", "cpu"))
    monkeypatch.setattr(executor, "current_stream", lambda index: 0)
    monkeypatch.setattr(executor, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(
        cache, "compile_cached", lambda unit, arch, names: types.SimpleNamespace(cubin=b"", symbols={name: name for name in names})
    )
    monkeypatch.setattr(native, "missing", lambda: None)
    clear()
    assert extension.open_executor("cpu") is None
    found = Recorder(library)
    found.reset(0)
    yield found
    extension.executor().close_executor()
    clear()


def clear() -> None:
    executor.function.cache_clear()
    driver._driver.cache_clear()
    plans.forget()


# Byte by byte


class Done(NamedTuple):
    """What a call has launched and returned."""

    launches: list[tuple[tuple[int, ...], bytearray]]
    results: tuple[Tensor | None, ...]


def by_python(recorder: Recorder, launch: Launch, results: tuple[Tensor | None, ...]) -> Done:
    recorder.reset(len(launch.plan.image))
    executor.execute(launch)
    return Done(recorder.launches(), results)


def by_cpp(recorder: Recorder, kind: int, args: tuple[Any, ...], launch: Launch) -> Done | None:
    """None where C++ leaves the call to Python."""
    call = (native.forward, native.backward, native.append_kv)[kind]
    recorder.reset(len(launch.plan.image))
    with torch.no_grad():
        served = call(args)
        if served is False:
            assert recorder.launches() == []
            native.learn(kind, args, launch)
            served = call(args)
    assert served is not False
    return None if served is None else Done(recorder.launches(), served)


def differences(launch: Launch, one: Done, other: Done, names: tuple[str, ...]) -> list[str]:
    """What differs beside the addresses of what each has allocated."""
    found = []
    for name, a, b in zip(names, one.results, other.results, strict=True):
        if (a is None) != (b is None):
            found.append(f"{name}: {a is None} and {b is None}")
        elif a is not None and b is not None:
            if (a.shape, a.stride(), a.dtype, a.device) != (b.shape, b.stride(), b.dtype, b.device):
                found.append(f"{name}: {a.shape} {a.stride()} {a.dtype} and {b.shape} {b.stride()} {b.dtype}")
            if plans.Memset(name) in launch.plan.steps and not (torch.equal(a, torch.zeros_like(a)) and torch.equal(a, b)):
                found.append(f"{name}: not zeros")
    if [numbers for numbers, _ in one.launches] != [numbers for numbers, _ in other.launches]:
        return [*found, f"launches {[x for x, _ in one.launches]} and {[x for x, _ in other.launches]}"]
    pointers = {patch.rule.name: patch.offset for patch in launch.plan.patches if isinstance(patch.rule, plans.Pointer)}
    workspaces = {workspace.name for workspace in launch.plan.workspaces}
    scratch = {operand.name for operand in launch.plan.operands if operand.like is not None}
    for (_, a), (_, b) in zip(one.launches, other.launches, strict=True):
        bases = None
        for name, offset in pointers.items():
            x, y = (int.from_bytes(image[offset : offset + 8], "little") for image in (a, b))
            if name in workspaces:
                is_same = (x == 0) == (y == 0) and (bases is None or x == 0 or x - bases[0] == y - bases[1])
                bases = bases or ((x, y) if x else None)
            elif name in scratch:
                is_same = x != 0 and y != 0
            elif name in names:
                result, another = (done.results[names.index(name)] for done in (one, other))
                is_same = result is not None and another is not None and (x, y) == (result.data_ptr(), another.data_ptr())
            else:
                continue  # compared with all the rest
            if not is_same:
                found.append(f"{name}: at {x:#x} and {y:#x}")
            a[offset : offset + 8] = b[offset : offset + 8] = bytes(8)
        if a != b:
            found.append(f"bytes {[place for place in range(len(a)) if a[place] != b[place]]}")
    return found


def problems(seed: int) -> Iterator[tuple[Case, int, bool]]:
    for trial in Drawer(seed, "cpu", edges=sorted(table.tile_sizes()), reuse=3):
        if trial.case.dtype != torch.float64 and max(trial.case.head_dim, trial.case.head_dim_v) <= table.HEAD_DIMS[-1]:
            yield trial.case, trial.seed, trial.has_backward and trial.case.kind not in ("paged", "cache")


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_calls_are_launched_alike(part: int, recorder: Recorder) -> None:
    """Forward and backward; what one executor has learned of one call serves many others."""
    served, left, kernels, num_backward = 0, 0, set(), 0
    source = problems(part)
    while served < 250:
        case, seed, has_backward = next(source)
        inputs = case.make(seed)
        args = inputs.args
        out, lse = ops.empty_outputs(args)
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, native.FORWARD, tuple(args), launch)
        if other is None:
            left += 1
            continue
        assert differences(launch, one, other, ("out", "lse")) == [], (case, seed)
        kernels |= {step.name for step in launch.plan.steps if isinstance(step, plans.Step)}
        served += 1
        if not has_backward:
            continue
        wanted = (True, seed % 3 != 0, seed % 5 != 0, args.bias is not None, args.sinks is not None)
        grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
        dlse = inputs.dlse if seed % 2 else None
        launch = cuda.backward_launch(args, inputs.dout, dlse, out, lse, grads)
        one = by_python(recorder, launch, tuple(grads))
        other = by_cpp(recorder, native.BACKWARD, (inputs.dout, dlse, tuple(args), out, lse, wanted), launch)
        if other is not None:
            assert differences(launch, one, other, GRADS) == [], (case, seed)
            num_backward += 1
    assert left < 250
    assert num_backward > 50
    assert {"fwd_sm90_kernel", "fwd_simt_kernel", "fwd_combine_kernel"} <= kernels
    # Far fewer plans than calls
    assert extension.executor().num_plans() < 250 + num_backward
