"""A GPU that is not there, for the host's part of a call: a driver that writes down what is launched, and CPU tensors
in its calls."""

from __future__ import annotations

import ctypes
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from flashtile.backends import cuda, executor, native
from flashtile.families import assemble
from flashtile.plans.arch import ARCHS
from flashtile.runtime import cache, driver, extension, kept

NUM_MULTIPROCESSORS = 132
MAP_ADDRESS = 88  # where fake_cuda.c puts the address into a tensor map
NUMBERS = 10  # of a launch, before its parameters


def build(folder: Path) -> Path:
    """The driver as a library in that folder."""
    library, source = folder / "libfake_cuda.so", Path(__file__).with_name("fake_cuda.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)], check=True
    )
    return library


class Recorder:
    """The fake driver's own functions."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_log.restype = ctypes.c_void_p
        self.library.fake_log_end.restype = ctypes.c_uint64
        self.library.fake_reset.argtypes = [ctypes.c_uint64]
        self.library.fake_watch.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.library.fake_watched.restype = ctypes.c_void_p

    def reset(self, image_bytes: int) -> None:
        self.image_bytes = image_bytes
        self.library.fake_reset(image_bytes)

    @contextmanager
    def watch(self, offset: int, num_bytes: int) -> Iterator[Callable[[], bytes]]:
        """Inside, each launch notes these bytes behind the address at an offset of its parameters; the function gives
        those of the last one."""
        self.library.fake_watch(offset, num_bytes)
        try:
            yield lambda: ctypes.string_at(self.library.fake_watched(), num_bytes)
        finally:
            self.library.fake_watch(0, 0)

    def launches(self) -> list[tuple[tuple[int, ...], bytearray]]:
        """(numbers, parameters) of each launch."""
        log = ctypes.string_at(self.library.fake_log(), self.library.fake_log_end())
        size = 8 * NUMBERS + self.image_bytes
        parts = [log[start : start + size] for start in range(0, len(log), size)]
        return [(tuple(memoryview(part[: 8 * NUMBERS]).cast("Q")), bytearray(part[8 * NUMBERS :])) for part in parts]


def plug_in(library: Path, patch: Callable[[object, str, object], None]) -> Recorder:
    """Makes both executors take CPU tensors for tensors on this GPU; kernels cost nothing to compile, and nothing is
    computed. `patch` is setattr, or one that can be undone."""
    patch(driver, "_LIBRARY", str(library))
    patch(torch.cuda, "current_device", lambda: 0)
    patch(cuda, "_arch", lambda index: ARCHS[90])
    patch(cuda, "_num_multiprocessors", lambda index: NUM_MULTIPROCESSORS)
    patch(cuda, "_missing", lambda index: None)
    patch(cuda.CudaBackend, "devices", ("cuda", "cpu"))
    patch(cuda.CudaBackend, "time_us", lambda self, problem, op: 0.0)  # the fastest on a CPU, too
    patch(executor, "current_stream", lambda index: 0)
    patch(executor, "on_device", lambda index: nullcontext())
    patch(
        cache,
        "compile_cached",
        lambda unit, arch, names, defines=(): types.SimpleNamespace(cubin=b"", symbols={name: name for name in names}),
    )
    patch(native, "missing", lambda: None)
    clear()
    reason = extension.open_executor("cpu")
    if reason is not None:
        raise RuntimeError(reason)
    recorder = Recorder(library)
    recorder.reset(0)
    return recorder


def unplug() -> None:
    extension.executor().close_executor()
    clear()


def clear() -> None:
    executor._functions.clear()
    driver._driver.cache_clear()
    kept.clear()
    assemble.clear_plans()
