"""A pytest plugin that runs tests/gpu without a GPU, up to the numbers: CPU tensors stand for those of an NVIDIA H200,
kernels compile to nothing, and every result is right unless a kernel of its call has a planted fault.

It keeps the tests that need no numbers of their own: those by the error rule, and those of refusals. What they find is
a call that takes another kernel than the test names, or none; a name or an option that is no longer there.
"""

from __future__ import annotations

import dataclasses
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashtile import testing
from flashtile.backends import cuda, executor
from flashtile.backends.base import Grads
from flashtile.plans.mutation import is_broken
from flashtile.problem import AttentionArgs, Problem
from flashtile.runtime import cache, driver
from flashtile.testing import Inputs, Result, rule

_RIGHT, _WRONG = 0.0, 1.0  # what stands in every result
_JUDGES = {"assert_accurate", "disagreements", "precompile"}  # tests that call one of them need no numbers
_launched: list[str] = []  # the units of a pass


class OnCpu(TorchFunctionMode):
    """Tensors for the GPU are made on the CPU."""

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is Tensor.to and isinstance(args[1], str):
            args = (args[0], "cpu")
        return function(*args, **kwargs)


def pytest_configure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver._LIBRARY = str(fake_gpu.build(Path(folder)))
        driver._driver()  # stays open
    properties = types.SimpleNamespace(multi_processor_count=fake_gpu.NUM_MULTIPROCESSORS)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    executor.current_stream = lambda index: 0
    executor.on_device = lambda index: nullcontext()
    cache.compile_cached = lambda unit, arch, names, defines=(): types.SimpleNamespace(
        cubin=b"", symbols={name: name for name in names}
    )
    cuda.CudaBackend.devices = ("cuda", "cpu")
    Problem.summary = classmethod(_on_gpu(Problem.summary.__func__))
    executor.function = _noted(executor.function)
    cuda.CudaBackend.forward, cuda.CudaBackend.backward = (
        _without_numbers(cuda.CudaBackend.forward),
        _without_numbers(cuda.CudaBackend.backward),
    )
    rule.disagreements = testing.disagreements = _disagreements


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    kept, others = [], []
    for item in items:
        names = item.function.__code__.co_names  # type: ignore[attr-defined]
        needs_numbers = _JUDGES.isdisjoint(names) and "refusals" not in item.name
        (others if needs_numbers else kept).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.fixture(autouse=True)
def on_cpu() -> Any:
    with OnCpu():
        yield


def _on_gpu(summary: Callable[..., Problem]) -> Callable[..., Problem]:
    def call(cls: type[Problem], *described: Any) -> Problem:
        return dataclasses.replace(summary(cls, *described), device="cuda")

    return call


def _noted(function: Callable[..., driver.Function]) -> Callable[..., driver.Function]:
    def call(unit: str, entry: str, arch: str) -> driver.Function:
        _launched.append(unit)
        return function(unit, entry, arch)

    return call


def _without_numbers(run: Callable[..., None]) -> Callable[..., None]:
    """A pass of the backend, whose results get the number that says whether a kernel has a fault."""

    def call(self: cuda.CudaBackend, args: AttentionArgs, *tensors: Tensor | Grads | None) -> None:
        _launched.clear()
        run(self, args, *tensors)
        results = tensors[-1] if isinstance(tensors[-1], Grads) else tensors
        for tensor in results:
            if tensor is not None:
                tensor.fill_(_WRONG if any(map(is_broken, _launched)) else _RIGHT)  # type: ignore[union-attr]

    return call


def _disagreements(ours: Result, inputs: Inputs, *_: object, **__: object) -> list[str]:
    return [
        f"{name}: not all are {_RIGHT}"
        for name, tensor in ours._asdict().items()
        if tensor is not None and not (tensor == _RIGHT).all()
    ]
