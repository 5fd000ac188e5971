"""Loads cubins and launches kernels through the CUDA driver, opened on first use. Device indices are torch's.

A library is loaded once for all devices and is never unloaded. Launches use the current context of the calling thread,
which torch's device guards set; a thread without one gets the primary context of torch's current device.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p

import torch

from flashtile.errors import unsupported

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_ARGUMENTS: dict[str, tuple[type, ...] | None] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamGetId": (c_void_p, POINTER(c_uint64)),
    "cuStreamGetCaptureInfo_v2": (c_void_p, POINTER(c_int), POINTER(c_uint64), c_void_p, c_void_p, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelGetFunction": (POINTER(c_void_p), c_void_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), c_void_p, c_int, c_size_t),
    # Declared argument types would cost 1.5 us per launch; the calls below pass pointers as c_void_p instead
    "cuLaunchKernel": None,
    "cuLaunchKernelEx": None,
    "cuTensorMapEncodeTiled": None,
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}
TENSOR_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion. TMA moves float8 as bytes
_MAP_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "float8_e4m3fn": 0, "float8_e5m2": 0}
_MAP_SWIZZLE_128 = 3
_MAP_PROMOTIONS = (0, 64, 128, 256)  # bytes, in the order of CUtensorMapL2promotion
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

# CUdevice_attribute
_ATTRIBUTES = {
    "max_shared_bytes_per_block": 8,
    "multiprocessor_count": 16,
    "l2_bytes": 38,
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "max_shared_bytes_per_multiprocessor": 81,
    "max_registers_per_multiprocessor": 82,
    "max_shared_bytes_per_block_optin": 97,
}


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value here is a number."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint),
    )


_STARTS_EARLY = _LaunchAttribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(RuntimeError):
    """A call into the CUDA driver failed. The message names the call and the error."""


class Library:
    """A loaded cubin."""

    def __init__(self, handle: c_void_p) -> None:
        self._handle = handle

    def function(self, symbol: str) -> Function:
        handle = c_void_p()
        with _relaxed_capture():
            _call("cuLibraryGetKernel", byref(handle), self._handle, symbol.encode())
        return Function(symbol, handle)


class Function:
    """A kernel of a loaded cubin, on every device."""

    def __init__(self, symbol: str, handle: c_void_p) -> None:
        self.symbol = symbol
        self._handle = handle
        self._launch: Callable[..., int] = _driver().cuLaunchKernel
        self._shared_bytes: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._lock = threading.Lock()

    def set_shared_bytes(self, device_index: int, num_bytes: int) -> int:
        """Allows launches with this much dynamic shared memory. The device must be current. Call it before launching.
        Returns the per-device CUfunction, which launches 0.7 us faster than the CUkernel."""
        if self._shared_bytes.get(device_index, -1) >= num_bytes:
            return self._addresses[device_index]
        with self._lock, _relaxed_capture():
            _ensure_context()
            # The driver loads a cubin onto a device on first use. Do it here, where a graph capture allows it
            function = c_void_p()
            _call("cuKernelGetFunction", byref(function), self._handle)
            self._addresses[device_index] = function.value or 0
            if self._shared_bytes.get(device_index, -1) < num_bytes:
                _call(
                    "cuKernelSetAttribute",
                    _MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    num_bytes,
                    self._handle,
                    _device(device_index),
                )
                self._shared_bytes[device_index] = num_bytes
        return self._addresses[device_index]

    def blocks_per_multiprocessor(self, num_threads: int, shared_bytes: int) -> int:
        """Resident blocks per multiprocessor of the current device, by the driver. Call `set_shared_bytes` first."""
        found = c_int()
        _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(found), self._handle, num_threads, shared_bytes)
        return found.value

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure | int,
        starts_early: bool = False,
    ) -> None:
        """Launches on a stream of the current device.

        `params`, a structure or its address, is the kernel's only argument, passed by value. A kernel that starts early
        waits itself for the one before it.
        """
        pointer = byref(c_void_p(params if isinstance(params, int) else ctypes.addressof(params)))
        name, launch, given = "cuLaunchKernel", self._launch, (*grid, *block, shared_bytes, c_void_p(stream))
        arguments: tuple[object, ...] = (self._handle, *given, pointer, None)
        if starts_early:
            config = _LaunchConfig(grid, block, shared_bytes, stream, ctypes.pointer(_STARTS_EARLY), 1)
            name, launch = "cuLaunchKernelEx", _driver().cuLaunchKernelEx
            arguments = (byref(config), self._handle, pointer, None)
        status = launch(*arguments)
        if status != 0:
            if _ensure_context():
                status = launch(*arguments)
            check(status, f"{name} of {self.symbol}, grid {grid}, block {block}, {shared_bytes} bytes shared")


class TensorMap:
    """A TMA tensor map without the address.

    Sizes and box are in elements, fastest axis first. Strides are those of the other axes, in bytes, multiples of 16.
    Boxes are 128-byte swizzled in shared memory; elements outside the tensor are loaded as zeros. A miss of L2 brings
    l2_bytes.
    """

    def __init__(
        self, dtype: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], l2_bytes: int = 256
    ) -> None:
        if dtype not in _MAP_TYPES:
            raise unsupported("tensor map", dtype, ", ".join(_MAP_TYPES))
        rank = len(sizes)
        self._encode: Callable[..., int] = _driver().cuTensorMapEncodeTiled
        self._kind = _MAP_TYPES[dtype], rank
        arrays = (
            (c_uint64 * rank)(*sizes),
            (c_uint64 * (rank - 1))(*strides),
            (c_uint32 * rank)(*box),
            (c_uint32 * rank)(*(1,) * rank),
        )
        self._layout = *arrays, 0, _MAP_SWIZZLE_128, _MAP_PROMOTIONS.index(l2_bytes), 0
        self._text = f"sizes {tuple(sizes)}, strides {tuple(strides)}, box {tuple(box)}"

    def encode(self, address: int) -> bytes:
        """The map of a tensor at the address, a multiple of 16."""
        buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _MAP_ALIGNMENT)
        offset = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
        arguments = c_void_p(ctypes.addressof(buffer) + offset), *self._kind, c_void_p(address), *self._layout
        status = self._encode(*arguments)
        # A backward pass may run in a thread of torch's that has no context yet
        if status != 0 and _ensure_context():
            status = self._encode(*arguments)
        check(status, f"cuTensorMapEncodeTiled of {self._text}, address {address:#x}")
        return buffer.raw[offset : offset + TENSOR_MAP_BYTES]


def load(cubin: bytes) -> Library:
    """Loads a cubin for all devices. May be called while the thread captures a graph."""
    handle = c_void_p()
    with _relaxed_capture():
        _call("cuLibraryLoadData", byref(handle), cubin, None, None, 0, None, None, 0)
    return Library(handle)


def version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports."""
    number = c_int()
    _call("cuDriverGetVersion", byref(number))
    return number.value // 1000, number.value % 1000 // 10


def stream_and_capture(stream: int) -> tuple[int, int]:
    """(identifier of a stream of the current device, 0), or, while a graph captures the stream, (its handle, identifier
    of the capture). No two streams of a process ever have one identifier; handles are used again."""
    _ensure_context()
    status, number = c_int(), c_uint64()
    _call("cuStreamGetCaptureInfo_v2", stream, byref(status), byref(number), None, None, None)
    if status.value:
        return stream, number.value  # cuStreamGetId would end the capture
    _call("cuStreamGetId", stream, byref(number))
    return number.value, 0


def allocate_zeros(num_bytes: int, is_captured: bool = False) -> int:
    """Memory of the current device, filled with zeros, for the life of the process. May be called while the thread
    captures a graph. Where torch's allocator holds all that is free, it is asked to give back what nobody uses, unless
    a graph is captured, whose memory must stay."""
    _ensure_context()
    address, stream = c_uint64(), c_void_p()
    with _relaxed_capture():
        status = _driver().cuMemAlloc_v2(byref(address), num_bytes)
        if status == _OUT_OF_MEMORY and not is_captured:
            with suppress(RuntimeError):  # torch's, where another thread captures
                torch.cuda.empty_cache()
            status = _driver().cuMemAlloc_v2(byref(address), num_bytes)
        check(status, f"cuMemAlloc_v2 of {num_bytes} bytes")
        # On a stream of its own: the default one would wait for others, and may be captured
        _call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        try:
            _call("cuMemsetD8Async", address, 0, num_bytes, stream)
            _call("cuStreamSynchronize", stream)
        finally:
            _call("cuStreamDestroy_v2", stream)
    return address.value


@functools.cache
def can_start_early() -> bool:
    """Graphs of older drivers have no edge for a kernel that starts while the one before it ends."""
    return version() >= (12, 3)


@functools.cache
def attribute(device_index: int, name: str) -> int:
    """One property of a device; the names are those of `_ATTRIBUTES`."""
    value = c_int()
    _call("cuDeviceGetAttribute", byref(value), _ATTRIBUTES[name], _device(device_index))
    return value.value


def compute_capability(device_index: int) -> tuple[int, int]:
    return attribute(device_index, "compute_capability_major"), attribute(device_index, "compute_capability_minor")


def multiprocessor_count(device_index: int) -> int:
    return attribute(device_index, "multiprocessor_count")


def l2_bytes(device_index: int) -> int:
    return attribute(device_index, "l2_bytes")


def library() -> str:
    """File name of the driver library."""
    return _LIBRARY


@functools.cache
def _driver() -> ctypes.CDLL:
    hint = "Install an NVIDIA driver of version 525 or newer"
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, arguments in _ARGUMENTS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise unsupported(
            "CUDA driver", f"no usable {_LIBRARY} ({error})", "a driver that supports CUDA 12 or newer", hint
        ) from error
    status = library.cuInit(0)
    if status != 0:
        raise unsupported(
            "CUDA driver", f"{_describe(library, status)} from cuInit", "a driver with at least one usable GPU"
        )
    return library


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        check(status, name)


def check(status: int, what: str) -> None:
    """Raises DriverError if a driver call returned a nonzero status; `what` names the call."""
    if status != 0:
        raise DriverError(f"{what} failed: {_describe(_driver(), status)}")


def _describe(library: ctypes.CDLL, status: int) -> str:
    """Name and text of a status. The driver has neither for a status newer than itself."""
    name, text = c_char_p(), c_char_p()
    library.cuGetErrorName(status, byref(name))
    library.cuGetErrorString(status, byref(text))
    return f"{(name.value or b'unknown error').decode()} ({status}), {(text.value or b'no description').decode()}"


def _device(index: int) -> int:
    device = c_int()
    _call("cuDeviceGet", byref(device), index)
    return device.value


def _ensure_context() -> bool:
    """Makes the primary context of torch's current device current if the thread has none. True if it had none."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    if context.value is not None:
        return False
    # Retained for the life of the process, as torch does
    _call("cuDevicePrimaryCtxRetain", byref(context), _device(torch.cuda.current_device()))
    _call("cuCtxSetCurrent", context)
    return True


@contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets the thread make driver calls that a graph capture in progress would refuse."""
    mode = c_int(_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", byref(mode))
