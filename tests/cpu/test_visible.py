"""Calls are visible: torch's profiler shows the ops with their shapes, FlopCounterMode counts them, warnings point at
the caller."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile import ops
from flashtile.backends import native
from flashtile.backends.cpu import CpuBackend

QKV, KEYS = (2, 4, 16, 32), (2, 4, 24, 32)


def tensors(requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=requires_grad) for shape in (QKV, KEYS, KEYS)]


def profiled(call: Callable[[], Any]) -> dict[str, list[Any]]:
    """The shapes of the first inputs of each op of ours."""
    call()  # makes the plans
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        call()
    events = found.key_averages(group_by_input_shape=True)
    return {event.key: event.input_shapes for event in events if event.key.startswith("flashtile::")}


OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"softcap": 1.0}, {"window": (3, 3)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_profiler_shows_both_passes(options: dict[str, Any]) -> None:
    q, k, v = tensors()
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            shapes = profiled(lambda: flashtile.attention(q, k, v, **options))
        assert list(shapes) == ["flashtile::forward"]
        assert shapes["flashtile::forward"][:3] == [list(QKV), list(KEYS), list(KEYS)]
    leaves = tensors(requires_grad=True)
    shapes = profiled(lambda: torch.autograd.grad(flashtile.attention(*leaves, **options).sum(), leaves))
    assert sorted(shapes) == ["flashtile::backward", "flashtile::forward"]
    assert shapes["flashtile::backward"][0] == list(QKV)
    assert list(KEYS) in shapes["flashtile::backward"]


def test_the_profiler_shows_compiled_calls_and_fallbacks() -> None:
    leaves = tensors(requires_grad=True)
    compiled = torch.compile(
        lambda q, k, v: flashtile.attention(q, k, v, causal=True), backend="aot_eager", fullgraph=True
    )
    shapes = profiled(lambda: torch.autograd.grad(compiled(*leaves).sum(), leaves))
    assert {"flashtile::backward", "flashtile::forward"} <= set(shapes)
    assert shapes["flashtile::forward"][:3] == [list(QKV), list(KEYS), list(KEYS)]
    if native.missing_on_host() is None:
        q, k, v = tensors()
        assert "flashtile::forward_fallback" in profiled(lambda: flashtile.attention(q, k, v, backend="tiled"))


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flops_are_those_of_sdpa(options: dict[str, Any]) -> None:
    q, k, v = tensors()
    leaves = tensors(requires_grad=True)
    forward = 2 * 2 * 4 * 16 * 24 * (32 + 32)
    for _ in range(2):
        with torch.no_grad():
            assert flops(lambda: flashtile.attention(q, k, v, **options)) == forward
        assert flops(lambda: flashtile.attention(*leaves, **options)) == forward
        both = flops(lambda: torch.autograd.grad(flashtile.attention(*leaves, **options).sum(), leaves))
        assert both == forward * 7 // 2
    assert both == flop_counter.sdpa_flop_count(QKV, KEYS, KEYS) + flop_counter.sdpa_backward_flop_count(
        QKV, QKV, KEYS, KEYS
    )


def test_flops_of_heads_of_two_sizes_and_of_packed_sequences() -> None:
    q, k, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 48)
    assert flops(lambda: flashtile.attention(q, k, v)) == 2 * 2 * 8 * 8 * (16 + 48)
    packed, bounds = torch.randn(10, 2, 16), torch.tensor([0, 3, 10], dtype=torch.int32)
    assert (
        flops(lambda: flashtile.attention_varlen(packed, packed, packed, bounds, bounds))
        == 2 * 2 * (3 * 3 + 7 * 7) * 32
    )


COUNTING = """
import torch
before = list(sys.meta_path)
{imports}
assert sys.meta_path == before
leaves = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
counter = c.FlopCounterMode(display=False)  # copies the formulas that there are
if {counts_forward}:
    with counter:
        flashtile.attention(*leaves, {options}).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 2 * 8 * 8 * 16, counter.get_total_flops()
else:
    out = flashtile.attention(*leaves, {options})
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * 2 * 8 * 8 * 16, counter.get_total_flops()
"""


@pytest.mark.parametrize(
    ("imports", "counts_forward", "options"),
    [
        ("import torch.utils.flop_counter as c, flashtile", True, ""),
        ("import flashtile, torch.utils.flop_counter as c", True, ""),
        ("import flashtile, torch.utils.flop_counter as c", False, ""),
        ("import flashtile, torch.utils.flop_counter as c", False, "softcap=1.0"),
    ],
)
def test_flops_are_counted_whatever_is_imported_first(imports: str, counts_forward: bool, options: str) -> None:
    """In the first call of a process, and by a counter that was made before it."""
    code = "import sys" + COUNTING.format(imports=imports, counts_forward=counts_forward, options=options)
    subprocess.run([sys.executable, "-c", code], check=True)


# Warnings


def line_of_warning(call: Callable[[], Any]) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [one for one in caught if one.category is flashtile.SlowPathWarning]
    assert len(found) == 1
    return found[0].filename, found[0].lineno


def test_warnings_point_at_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "refuse", lambda self, problem, op="forward": "not here")  # so `tiled` serves
    q = torch.randn(1, 2, 5, 16, dtype=torch.float64)
    leaf, bounds = q.clone().requires_grad_(), torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = torch.randn(5, 2, 16, dtype=torch.float64)
    calls = (
        lambda: flashtile.attention(q, q, q),
        lambda: flashtile.attention(q, q, q, softcap=1.0),
        lambda: flashtile.attention(leaf, q, q),
        lambda: flashtile.attention(leaf, q, q, return_lse=True),
        lambda: flashtile.attention_varlen(packed, packed, packed, bounds, bounds),
        lambda: flashtile.scaled_dot_product_attention(q, q, q),
        lambda: ops.forward(*flashtile.problem.AttentionArgs(q, q, q)),
        lambda: torch.ops.flashtile.forward(*flashtile.problem.AttentionArgs(q, q, q)),
    )
    for call in calls:
        flashtile.backends.registry._warned.clear()
        assert line_of_warning(call) == (__file__, inspect.getsourcelines(call)[1])
