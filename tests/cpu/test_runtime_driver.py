"""Loading and launching with a fake driver: the calls, their order, and error messages."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from flashtile import Unsupported
from flashtile.runtime import driver
from flashtile.runtime.driver import DriverError

ERRORS = {
    1: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    100: (b"CUDA_ERROR_NO_DEVICE", b"no CUDA-capable device is detected"),
    201: (b"CUDA_ERROR_INVALID_CONTEXT", b"invalid device context"),
    209: (b"CUDA_ERROR_NO_BINARY_FOR_GPU", b"no kernel image is available for execution on the device"),
    500: (b"CUDA_ERROR_NOT_FOUND", b"named symbol not found"),
}
GLOBAL, RELAXED = 0, 2
GRID, BLOCK = (7, 5, 3), (128, 2, 1)


class Params(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("scale", ctypes.c_float))


class FakeDriver:
    """Two devices with contexts 1000 and 1001; capture mode and current context are per thread."""

    def __init__(self):
        self.calls, self.fail, self.state = [], {}, threading.local()
        for name in driver._ARGUMENTS:
            setattr(self, name, self.call(name))

    def call(self, name):
        # A function, not a method, because ctypes functions accept attributes
        def call(*arguments):
            self.calls.append(name)
            return self.fail.get(name) or (getattr(type(self), "do_" + name)(self, *arguments) or 0)

        return call

    @property
    def mode(self):
        return getattr(self.state, "mode", GLOBAL)

    @property
    def context(self):
        return getattr(self.state, "context", None)

    def do_cuInit(self, flags):  # noqa: N802
        assert flags == 0

    def do_cuDriverGetVersion(self, out):  # noqa: N802
        out._obj.value = 13000

    def do_cuDeviceGet(self, out, index):  # noqa: N802
        out._obj.value = index
        return 0 if index < 2 else 1

    def do_cuDeviceGetAttribute(self, out, attribute, device):  # noqa: N802
        out._obj.value = {75: 9, 76: device, 16: 132, 97: 232448, 38: 62914560}[attribute]

    def do_cuDevicePrimaryCtxRetain(self, out, device):  # noqa: N802
        out._obj.value = 1000 + device

    def do_cuCtxGetCurrent(self, out):  # noqa: N802
        out._obj.value = self.context

    def do_cuCtxSetCurrent(self, context):  # noqa: N802
        self.state.context = context.value

    def do_cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        mode._obj.value, self.state.mode = self.mode, mode._obj.value

    def do_cuLibraryLoadData(self, out, code, *options):  # noqa: N802
        assert self.mode == RELAXED
        assert options == (None, None, 0, None, None, 0)
        if code != b"\x7fELF\0cubin":
            return 209
        out._obj.value = 77

    def do_cuLibraryGetKernel(self, out, library, symbol):  # noqa: N802
        assert library.value == 77
        if symbol != b"kernel":
            return 500
        out._obj.value = 88

    def do_cuKernelGetFunction(self, out, kernel):  # noqa: N802
        assert self.mode == RELAXED
        assert kernel.value == 88
        return 0 if self.context else 201

    def do_cuKernelSetAttribute(self, attribute, value, kernel, device):  # noqa: N802
        assert self.mode == RELAXED
        assert (attribute, kernel.value) == (8, 88)
        self.shared = (device, value)

    def do_cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out, kernel, num_threads, shared):  # noqa: N802
        assert kernel.value == 88
        out._obj.value = (num_threads, shared) == (128, 1000) and 3

    def do_cuLaunchKernel(self, kernel, gx, gy, gz, bx, by, bz, shared, stream, params, extra):  # noqa: N802
        if not self.context:
            return 201
        image = Params.from_address(params._obj.value)
        self.launched = (
            kernel.value,
            (gx, gy, gz),
            (bx, by, bz),
            shared,
            stream.value,
            image.pointer,
            image.scale,
            extra,
            self.context,
        )

    def do_cuLaunchKernelEx(self, config, kernel, params, extra):  # noqa: N802
        given = config._obj
        assert given.num_attributes == 1
        self.attribute = (given.attributes[0].id, given.attributes[0].value)
        shared = (given.shared_bytes, ctypes.c_void_p(given.stream))
        return self.do_cuLaunchKernel(kernel, *given.grid, *given.block, *shared, params, extra)

    def do_cuGetErrorName(self, status, out):  # noqa: N802
        out._obj.value = ERRORS.get(status, (None, None))[0]

    def do_cuGetErrorString(self, status, out):  # noqa: N802
        out._obj.value = ERRORS.get(status, (None, None))[1]


@pytest.fixture(autouse=True)
def fresh():
    driver._driver.cache_clear()
    driver.attribute.cache_clear()
    yield
    driver._driver.cache_clear()
    driver.attribute.cache_clear()


@pytest.fixture
def fake(monkeypatch):
    made = FakeDriver()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    made.state.context = 1000
    return made


@pytest.fixture
def function(fake):
    return driver.load(b"\x7fELF\0cubin").function("kernel")


def test_the_driver_counts_blocks(fake, function):
    assert function.blocks_per_multiprocessor(128, 1000) == 3
    fake.fail["cuOccupancyMaxActiveBlocksPerMultiprocessor"] = 1
    with pytest.raises(
        DriverError, match="cuOccupancyMaxActiveBlocksPerMultiprocessor failed: CUDA_ERROR_INVALID_VALUE"
    ):
        function.blocks_per_multiprocessor(128, 1000)


def test_missing_driver(monkeypatch):
    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(
        Unsupported,
        match=r"CUDA driver: got no usable libcuda-that-is-not-there\.so\.1 .*accepted: .*CUDA 12.*Install an NVIDIA",
    ):
        driver.load(b"")


def test_driver_too_old(fake):
    del fake.cuLibraryLoadData
    with pytest.raises(
        Unsupported, match=r"no usable libcuda.*cuLibraryLoadData.*Install an NVIDIA driver of version 525"
    ):
        driver.version()


def test_no_device(fake):
    fake.fail["cuInit"] = 100
    with pytest.raises(
        Unsupported, match=r"CUDA_ERROR_NO_DEVICE \(100\), no CUDA-capable device is detected from cuInit"
    ):
        driver.version()


def test_attributes(fake):
    assert driver.version() == (13, 0)
    assert driver.compute_capability(0) == (9, 0)
    assert driver.compute_capability(1) == (9, 1)
    assert driver.multiprocessor_count(0) == 132
    assert driver.attribute(0, "max_shared_bytes_per_block_optin") == 232448
    assert driver.l2_bytes(0) == 60 << 20
    with pytest.raises(DriverError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_VALUE \(1\), invalid argument"):
        driver.compute_capability(2)


def test_loading_relaxes_the_capture_mode_and_puts_it_back(fake, function):
    assert function.symbol == "kernel"
    assert fake.mode == GLOBAL
    with pytest.raises(
        DriverError, match=r"cuLibraryLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU \(209\), no kernel image"
    ):
        driver.load(b"for another GPU")
    assert fake.mode == GLOBAL
    with pytest.raises(DriverError, match="cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND"):
        driver.load(b"\x7fELF\0cubin").function("absent")
    assert fake.mode == GLOBAL


@pytest.mark.parametrize("by_address", [False, True])
def test_launch(fake, function, by_address):
    params = Params(0x7F0012345678, 0.5)
    stream = 0x7F00DEADBEEF
    function.launch(GRID, BLOCK, 1024, stream, ctypes.addressof(params) if by_address else params)
    assert fake.launched == (88, GRID, BLOCK, 1024, stream, 0x7F0012345678, 0.5, None, 1000)


def test_a_kernel_that_starts_early(fake, function):
    params, stream = Params(0x7F0012345678, 0.5), 0x7F00DEADBEEF
    function.launch(GRID, BLOCK, 1024, stream, params, starts_early=True)
    assert fake.launched == (88, GRID, BLOCK, 1024, stream, 0x7F0012345678, 0.5, None, 1000)
    assert fake.attribute == (6, 1)  # programmatic stream serialization
    fake.fail["cuLaunchKernelEx"] = 1
    with pytest.raises(DriverError, match=r"cuLaunchKernelEx of kernel, grid \(7, 5, 3\).* CUDA_ERROR_INVALID_VALUE"):
        function.launch(GRID, BLOCK, 1024, stream, params, starts_early=True)


@pytest.mark.parametrize(("version", "expected"), [((12, 2), False), ((12, 3), True), ((13, 0), True)])
def test_which_drivers_start_kernels_early(version, expected, monkeypatch):
    monkeypatch.setattr(driver, "version", lambda: version)
    driver.can_start_early.cache_clear()
    try:
        assert driver.can_start_early() is expected
    finally:
        driver.can_start_early.cache_clear()


def test_a_failed_launch_names_kernel_and_geometry(fake, function):
    fake.fail["cuLaunchKernel"] = 1
    words = (
        r"cuLaunchKernel of kernel, grid \(7, 5, 3\), block \(128, 2, 1\), 1024 bytes shared failed: "
        r"CUDA_ERROR_INVALID_VALUE"
    )
    with pytest.raises(DriverError, match=words):
        function.launch(GRID, BLOCK, 1024, 0, Params())
    assert fake.calls.count("cuLaunchKernel") == 1


def test_an_error_the_driver_has_no_name_for(fake, function):
    fake.fail["cuLaunchKernel"] = 4242
    with pytest.raises(DriverError, match=r"unknown error \(4242\), no description"):
        function.launch(GRID, BLOCK, 0, 0, Params())


def test_a_thread_without_a_context_gets_that_of_torchs_current_device(fake, function):
    seen = []

    def work():
        function.launch(GRID, BLOCK, 0, 0, Params())
        seen.append(fake.launched[-1])
        function.launch(GRID, BLOCK, 0, 0, Params())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1001]
    assert fake.calls.count("cuLaunchKernel") == 3
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 1
    # The context of this thread is unchanged
    function.launch(GRID, BLOCK, 0, 0, Params())
    assert fake.launched[-1] == 1000


def test_shared_bytes_are_set_once_per_device_and_never_lowered(fake, function):
    function.set_shared_bytes(0, 65536)
    assert fake.shared == (0, 65536)
    function.set_shared_bytes(0, 65536)
    function.set_shared_bytes(0, 1024)
    assert fake.calls.count("cuKernelSetAttribute") == 1
    function.set_shared_bytes(1, 65536)
    assert fake.shared == (1, 65536)
    function.set_shared_bytes(0, 131072)
    assert fake.shared == (0, 131072)
    assert fake.mode == GLOBAL


def test_shared_bytes_the_device_does_not_have(fake, function):
    fake.fail["cuKernelSetAttribute"] = 1
    for _ in range(2):
        with pytest.raises(DriverError, match="cuKernelSetAttribute failed: CUDA_ERROR_INVALID_VALUE"):
            function.set_shared_bytes(0, 1 << 20)
    assert fake.mode == GLOBAL


def test_shared_bytes_in_a_thread_without_a_context(fake, function):
    thread = threading.Thread(target=function.set_shared_bytes, args=(1, 4096))
    thread.start()
    thread.join()
    assert fake.shared == (1, 4096)
