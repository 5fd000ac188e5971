"""What a call holds, and for how long: a refused or failed call frees its tensors with its exception, whatever torch
made of that, and the C++ executor outlives Python, threads and forks."""

from __future__ import annotations

import array
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import ops
from flashtile.api import dense
from flashtile.backends import native
from flashtile.errors import Unsupported
from flashtile.problem import AttentionArgs
from flashtile.runtime import extension

needs_cpp = pytest.mark.skipif(extension.missing() is not None, reason="without the C++ extension")


class Memory:
    """Makes tensors, and knows which of them are alive: in Python, or as memory that C++ holds."""

    def __init__(self) -> None:
        self.buffers: list[weakref.ref[Any]] = []

    def make(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(sizes).numel()
        buffer = array.array("f", bytes(4 * count))
        self.buffers.append(weakref.ref(buffer))
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(sizes)

    def num_alive(self) -> int:
        return sum(buffer() is not None for buffer in self.buffers)


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Without the garbage collector: a reference cycle would hold the tensors of a call."""
    gc.collect()
    gc.disable()
    yield Memory()
    gc.enable()


def leaf(memory: Memory, *sizes: int) -> Tensor:
    return memory.make(*sizes).requires_grad_()


def backward_of(call: Callable[..., Tensor], memory: Memory, **options: Any) -> None:
    """A backward pass whose saved tensors come back in another dtype."""
    leaves = [leaf(memory, 1, 2, 3, 4) for _ in range(3)]
    change = lambda tensor: tensor.bfloat16() if tensor.dim() == 3 else tensor  # noqa: E731, lse alone
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, change):
        out = call(*leaves, **options)
        torch.autograd.grad(out.sum(), leaves)


def step(memory: Memory, **changes: Any) -> None:
    cache = [memory.make(1, 16, 2, 8) for _ in range(2)]
    flashtile.attention_kvcache(memory.make(1, 1, 2, 8), *cache, cache_seqlens=3, **changes)


def varlen(memory: Memory, **changes: Any) -> None:
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    rows = [memory.make(5, 2, 8) for _ in range(3)]
    flashtile.attention_varlen(*rows, lengths, lengths.long(), **changes)


# What makes the call, and what it raises
REFUSED: dict[str, tuple[Callable[[Memory], Any], type[Exception]]] = {
    "dense": (lambda m: flashtile.attention(*(m.make(1, 2, 3, 600) for _ in range(3))), Unsupported),
    "dense with gradients": (lambda m: flashtile.attention(*(leaf(m, 1, 2, 3, 600) for _ in range(3))), Unsupported),
    "heads": (lambda m: flashtile.attention(m.make(1, 3, 5, 8), m.make(1, 2, 5, 8), m.make(1, 2, 5, 8)), ValueError),
    "some gradients": (
        lambda m: flashtile.attention(leaf(m, 1, 2, 3, 600), m.make(1, 2, 3, 600), m.make(1, 2, 3, 600)),
        Unsupported,
    ),
    "options": (lambda m: flashtile.attention(*(m.make(1, 2, 3, 600) for _ in range(3)), softcap=2.0), Unsupported),
    "backend": (
        lambda m: flashtile.attention(*(m.make(1, 2, 3, 8) for _ in range(3)), backend="cuda"),
        Unsupported,
    ),
    "mask": (
        lambda m: flashtile.attention(*(m.make(1, 2, 3, 8) for _ in range(3)), mask=m.make(2, 2, 3, 4).bool()),
        ValueError,
    ),
    "backward": (lambda m: backward_of(flashtile.attention, m), TypeError),
    "backward with options": (lambda m: backward_of(flashtile.attention, m, softcap=2.0), TypeError),
    "packed": (varlen, TypeError),
    "packed, a name": (lambda m: varlen(m, backend="cuda"), TypeError),
    "cache": (lambda m: step(m, k=m.make(1, 1, 3, 8), v=m.make(1, 1, 3, 8)), ValueError),
    "cache, read": (lambda m: step(m, softcap=-1.0), ValueError),
    "facade": (
        lambda m: flashtile.scaled_dot_product_attention(*(m.make(1, 2, 3, 600) for _ in range(3))),
        Unsupported,
    ),
    "facade with a mask": (
        lambda m: flashtile.scaled_dot_product_attention(*(m.make(1, 2, 3, 8) for _ in range(3)), m.make(7)),
        ValueError,
    ),
    "facade of flash_attn": (
        lambda m: flashtile.flash_attn_func(*(m.make(1, 3, 2, 600) for _ in range(3))),
        Unsupported,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_frees_its_tensors_with_the_exception(name: str, memory: Memory) -> None:
    call, kind = REFUSED[name]
    for _ in range(3):
        try:
            call(memory)
        except kind as error:
            found = error
        assert type(found) is kind, found
        del found
        assert memory.num_alive() == 0
    assert len(memory.buffers) > 0


def test_memory_that_ran_out_is_free_for_the_next_try(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python kernel raises a class of RuntimeError."""

    def run_out(*values: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(ops, "forward_by_python", run_out)
    native.clear_plans()
    for options in ({}, {"softcap": 2.0}):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            flashtile.attention(*(memory.make(1, 2, 3, 8) for _ in range(3)), **options)
        assert memory.num_alive() == 0


def test_an_error_has_the_traceback_of_the_kernel_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: Any) -> Any:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ZeroDivisionError("then") from error

    monkeypatch.setattr(ops, "forward_by_python", fail)
    native.clear_plans()
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ZeroDivisionError) as found:
        flashtile.attention(q, q, q, softcap=2.0)
    assert found.traceback[-1].name == "fail"
    assert type(found.value.__cause__) is type(found.value.__context__) is KeyError
    assert found.value.__cause__.__context__ is None


# The exception that is raised is that of the call


def direct(memory: Memory) -> str:
    """The text of a refusal by an op that nothing of flashtile has called."""
    q = memory.make(1, 2, 3, 600)
    try:
        torch.ops.flashtile.forward(*AttentionArgs(q, q, q))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_direct_call_of_an_op_raises_its_text_and_keeps_nothing(memory: Memory) -> None:
    assert direct(memory) == "q: got head_dim 600; accepted: 1 to 512."
    assert memory.num_alive() == 0
    assert native._raised.error is None


class Swallowing(TorchDispatchMode):
    """Calls every op, and raises another error where it fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            pass
        raise RuntimeError("of the mode")


class Passing(TorchDispatchMode):
    """A caller between: it makes refused calls of its own before and while it passes the exception on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrong = torch.zeros(1, 3, 5, 8)
        with pytest.raises(ValueError, match="k: got 2 heads"):
            flashtile.attention(wrong, wrong[:, :2], wrong[:, :2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["dense", "all arguments"])
def test_the_error_of_another_call_is_never_raised(options: dict[str, Any]) -> None:
    q = torch.randn(1, 2, 3, 600)
    with Swallowing(), pytest.raises(RuntimeError, match=r"^of the mode$"):
        flashtile.attention(q, q, q, **options)
    # torch itself refuses the next one
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        dense(q, q, q, "none", 0)  # type: ignore[arg-type]
    with Passing(), pytest.raises(Unsupported, match="q: got head_dim 600"):
        flashtile.attention(q, q, q, **options)
