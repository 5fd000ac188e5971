"""What a call holds, and for how long: a refused or failed call frees its tensors with its exception, whatever torch
made of that, and the C++ executor outlives Python, threads and forks."""

from __future__ import annotations

import array
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from fake_gpu import Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import ops
from flashtile.api import dense
from flashtile.backends import native
from flashtile.errors import Unsupported
from flashtile.integrations import torch_flash
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


@needs_cpp
def test_a_fallback_that_anybody_else_calls_raises_at_once() -> None:
    """It leaves nothing behind that the next fallback of the thread would raise."""
    native.clear_plans()
    q, wrong = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 600)
    with pytest.raises(Unsupported, match="got head_dim 600"):
        torch.ops.flashtile.forward_fallback(*AttentionArgs(wrong, wrong, wrong))
    assert flashtile.attention(q, q, q).shape == q.shape


# C++ kernels own their arguments


@pytest.fixture
def recorder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    yield fake_gpu.plug_in(fake_gpu.build(tmp_path_factory.mktemp("fake")), monkeypatch.setattr)
    fake_gpu.unplug()


def dense_pass(m: Memory) -> None:
    flashtile.attention(*(m.make(1, 2, 16, 64) for _ in range(3)))


def whole_pass(m: Memory) -> None:
    flashtile.attention(*(m.make(1, 2, 16, 64) for _ in range(3)), softcap=2.0, bias=m.make(16, 16))


def dense_gradients(m: Memory) -> None:
    q, k, v, out, dout = (m.make(1, 2, 16, 64) for _ in range(5))
    mode = ops.dense_mode(needs_grad=True)
    ops.dense_backward(dout, q, k, v, None, mode, out, m.make(1, 2, 16))


def whole_gradients(m: Memory) -> None:
    q, k, v, out, dout = (m.make(1, 2, 16, 64) for _ in range(5))
    args = AttentionArgs(q, k, v, needs_grad=True)
    ops.backward(dout, m.make(1, 2, 16), *args, out, m.make(1, 2, 16), [True, False, True, False, False])


def append(m: Memory) -> None:
    cache, new = [m.make(1, 16, 2, 64) for _ in range(2)], [m.make(1, 1, 2, 64) for _ in range(2)]
    lengths = torch.tensor([3], dtype=torch.int32)
    ops.append_kv(*cache, *new, lengths, None, m.make(20, 16), m.make(20, 16), True, "bshd")


def append_and_attend(m: Memory) -> None:
    cache, new = [m.make(1, 16, 2, 64) for _ in range(2)], [m.make(1, 1, 2, 64) for _ in range(2)]
    lengths = torch.tensor([3], dtype=torch.int32)
    flashtile.attention_kvcache(m.make(1, 1, 2, 64), *cache, k=new[0], v=new[1], cache_seqlens=lengths)


def torchs_pass(m: Memory) -> None:
    torch.ops.aten._scaled_dot_product_flash_attention(*(m.make(1, 2, 16, 64) for _ in range(3)), scale=0.3)


def torchs_gradients(m: Memory) -> None:
    q, k, v, out, dout = (m.make(1, 2, 16, 64) for _ in range(5))
    states = [m.make(2) for _ in range(2)]
    torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, m.make(1, 2, 16), None, None, 16, 16, 0.0, False, *states, scale=0.3
    )


LAUNCHES = (
    *(dense_pass, whole_pass, dense_gradients, whole_gradients),
    *(append, append_and_attend, torchs_pass, torchs_gradients),
)


@pytest.fixture
def torchs_operators() -> Iterator[None]:
    undo = torch_flash.put_cuda_kernels_in_place("CPU")
    yield
    for step in undo:
        step()


@needs_cpp
@pytest.mark.usefixtures("torchs_operators")
@pytest.mark.parametrize("call", LAUNCHES, ids=lambda call: call.__name__)
def test_a_launch_that_fails_frees_its_tensors(call: Callable[[Memory], None], recorder: Recorder) -> None:
    memory = Memory()
    with torch.no_grad():
        for _ in range(2):
            call(memory)  # its plan is known
        assert memory.num_alive() == 0
        for _ in range(3):
            recorder.library.fake_fail_next(700)
            with pytest.raises(RuntimeError, match="failed: CUDA_ERROR_FAKE"):
                call(memory)
            gc.collect()  # what pytest keeps
            assert memory.num_alive() == 0
        call(memory)


@needs_cpp
@pytest.mark.usefixtures("torchs_operators")
@pytest.mark.parametrize(
    "call", [whole_pass, whole_gradients, torchs_pass, torchs_gradients], ids=lambda call: call.__name__
)
def test_a_switch_that_cannot_be_read_frees_the_tensors(
    call: Callable[[Memory], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ asks torch for its switches; what a signal handler raises then ends the call."""
    memory, num_asked = Memory(), 0

    def interrupted() -> bool:
        nonlocal num_asked
        num_asked += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", interrupted)
    assert extension.open_executor("host") is None
    try:
        with suppress(KeyboardInterrupt, RuntimeError), torch.no_grad():
            call(memory)
    finally:
        monkeypatch.undo()
        assert extension.open_executor("host") is None
    assert num_asked == 1
    gc.collect()
    assert memory.num_alive() == 0


# The C++ executor outlives Python, threads and forks


LATE_CALL = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int32_t (*Call)(const char*, const char*, uint64_t*, uint64_t);
static Call call;
static const char *op, *overload;
static uint64_t stack[16], version;

static void run(void) { printf("status %d\\n", call(op, overload, stack, version)), fflush(stdout); }

// Makes the call when the process ends, after Python has.
void call_late(Call function, const char* name, const char* more, const uint64_t* values, int count, uint64_t target) {
  call = function, op = name, overload = more, version = target;
  for (int index = 0; index < count; ++index) stack[index] = values[index];
}
void arm(void) { atexit(run); }
"""

AT_EXIT = """
import ctypes, sys, weakref
import torch

late, torchs = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")
late.arm()  # before flashtile: what it destroys at exit would be gone
import flashtile
from flashtile import ops
from flashtile.integrations import torch_flash

q = torch.zeros(1, 2, 3, 8)
flashtile.attention(q, q.clone(), q.clone())  # its plan is known
torch_flash.put_cuda_kernels_in_place("CPU")
# torch takes ops that Python has defined back when Python ends
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False
ctypes.pythonapi.Py_IncRef(ctypes.py_object(ops._library.m))

def tensor():
    handle, four = ctypes.c_void_p(), ctypes.c_int64 * 4
    assert torchs.aoti_torch_empty_strided(
        ctypes.c_int64(4), four(1, 2, 3, 8), four(48, 24, 8, 1), torchs.aoti_torch_dtype_float32(), 0, 0,
        ctypes.byref(handle)) == 0
    return handle.value

qkv = [tensor() for _ in range(3)]
name, overload, values = {
    "plan": ("flashtile::forward", "dense", [*qkv, 0, 0]),
    "switch": ("aten::_scaled_dot_product_flash_attention", "", [*qkv, 0, 0, 0, 0]),
    "fallback": ("flashtile::forward", "dense", [*qkv, 0, 1 << 60]),
}[sys.argv[2]]
names = name.encode(), overload.encode()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(names))
late.call_late(torchs.torch_call_dispatcher, *names, (ctypes.c_uint64 * len(values))(*values), len(values),
               ctypes.c_uint64(0x020A000000000000))
"""


@needs_cpp
@pytest.mark.parametrize(("call", "status"), [("plan", 0), ("switch", 1), ("fallback", 1)])
def test_a_call_after_the_end_of_python(call: str, status: int, tmp_path: Path) -> None:
    """As one of autograd's threads may make it: it is done without Python, or fails; the process ends in peace."""
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE_CALL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    run = subprocess.run([sys.executable, "-c", AT_EXIT, str(library), call], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"status {status}\n"), run.stderr


FORKS = """
import os, signal, threading
import torch
torch.set_num_threads(1)
import flashtile

q = torch.zeros(1, 1, 1, 1)
for _ in range(2):
    flashtile.attention(q, q, q)  # torch's own operators lock themselves in their first call

def work():
    while True:
        flashtile.attention(q, q, q)

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
statuses = []
while len(statuses) < 40 and not any(statuses):
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # of a child that hangs
        flashtile.attention(q, q, q)
        os._exit(0)
    statuses.append(os.waitpid(child, 0)[1])
print(sum(statuses), flush=True)
os._exit(0)
"""


@needs_cpp
def test_a_fork_while_other_threads_make_calls() -> None:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
