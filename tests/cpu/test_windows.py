"""The pure-Python package on Windows, as far as Linux can show it: a process in which the platform is said to be
Windows, what Windows lacks is gone, and the libraries are fakes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashtile import Unsupported
from flashtile.runtime import toolchain
from flashtile.runtime.cache import KernelCache
from flashtile.runtime.toolchain import Toolchain
from tests.cpu.test_runtime_toolchain import fresh, install, nowhere  # noqa: F401, a fixture

ROOT = Path(__file__).resolve().parents[2]
AS_WINDOWS = """
import ctypes, os, sys
import torch, numpy, typer, rich.console, torch.distributed  # what belongs to others behaves as on this platform
missing = "fcntl grp posix pty pwd resource termios".split()
sys.modules |= dict.fromkeys([*missing, "flashtile._C", "triton"])
for name in ("geteuid", "getuid", "fork", "uname", "sched_getaffinity"):
    vars(os).pop(name, None)
sys.platform = "win32"
asked = []

class Fake:
    def __init__(self, name, *more, **options):
        asked.append(name)
        if name != "nvcuda.dll":
            raise FileNotFoundError(name)

    def __getattr__(self, name):
        def function(*arguments):
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = 13010
            return 0
        return function

ctypes.CDLL = Fake
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_WINDOWS + script],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": "src"}, capture_output=True, text=True,
    )  # fmt: skip


def test_a_call_and_the_command_line() -> None:
    script = """
import flashtile, importlib, warnings
from flashtile.runtime import extension
warnings.simplefilter("ignore", flashtile.SlowPathWarning)
assert "not made for Windows" in extension.missing(), extension.missing()
q = torch.randn(1, 2, 8, 16)
out = flashtile.attention(q, q, q, causal=True)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
from flashtile.cli import main
for name in ("bench", "ladder", "profile", "report", "tiles"):
    importlib.import_module(f"flashtile.lab.{name}.command")
importlib.import_module("flashtile.lab.check.runner")
assert not asked, asked
"""
    done = run(script)
    assert done.returncode == 0, done.stderr


def test_the_driver_is_nvcuda() -> None:
    done = run("from flashtile.runtime import driver; print(driver.version(), asked)")
    assert done.stdout.strip() == "(13, 1) ['nvcuda.dll']", done.stderr


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    nowhere(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    return tmp_path


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("package", "library"),
    [
        ("nvidia-cuda-nvrtc", "nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll"),
        ("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/bin/nvrtc64_120_0.dll"),
    ],
)
def test_nvrtc_of_a_package(windows: Path, package: str, library: str) -> None:
    installed = install(windows, package, library)
    assert toolchain.find().path == str(installed)


def test_nvrtc_of_torch(windows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", str(windows / "torch" / "__init__.py"))
    in_toolkit = touch(windows / "toolkit" / "bin" / "nvrtc64_130_0.dll")
    monkeypatch.setenv("CUDA_PATH", str(windows / "toolkit"))
    assert toolchain.find().path == str(in_toolkit)
    toolchain.find.cache_clear()
    of_torch = touch(windows / "torch" / "lib" / "nvrtc64_120_0.dll")
    assert toolchain.find().path == str(of_torch)


@pytest.mark.parametrize("folder", ["bin", "bin/x64"])
def test_nvrtc_of_a_toolkit(windows: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    library = touch(windows / folder / "nvrtc64_130_0.dll")
    monkeypatch.setenv("CUDA_PATH", str(windows))
    assert toolchain.find().path == str(library)


def test_no_nvrtc(windows: Path) -> None:
    with pytest.raises(
        Unsupported, match=r"none of nvrtc64_130_0\.dll, nvrtc64_120_0\.dll .*bin/x64 or bin of CUDA_HOME"
    ):
        toolchain.find()


def test_builtins_are_opened_without_the_alternative_ones(windows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def library(path: str) -> SimpleNamespace:
        opened.append(Path(path).name)
        return SimpleNamespace(nvrtcGetErrorString=SimpleNamespace())

    monkeypatch.setattr(ctypes, "CDLL", library)
    for name in ("nvrtc-builtins64_129.dll", "nvrtc-builtins64_129.alt.dll", "nvrtc64_120_0.dll"):
        touch(windows / name)
    assert Toolchain(str(windows / "nvrtc64_120_0.dll")).library is not None
    assert opened == ["nvrtc-builtins64_129.dll", "nvrtc64_120_0.dll"]


def test_the_file_behind_a_bare_name(windows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = r"C:\CUDA\bin\nvrtc64_130_0.dll"

    class Kernel32:
        @staticmethod
        def GetModuleFileNameW(handle: ctypes.c_void_p, buffer: ctypes.Array[ctypes.c_wchar], size: int) -> int:  # noqa: N802
            assert handle.value == 7
            buffer.value = path
            return len(path)

    libraries = {"nvrtc64_130_0.dll": SimpleNamespace(_handle=7, nvrtcVersion=None), "kernel32": Kernel32()}
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    assert toolchain._on_loader_path("nvrtc64_130_0.dll") == path


def test_the_cache_asks_for_no_owner_and_no_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashtile.runtime.nvrtc import Compiled

    kernel = Compiled("sm_90a", b"\x7fELF", {"name": "symbol"}, "")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "geteuid")
    tmp_path.chmod(0o777)
    cache, key = KernelCache(tmp_path), KernelCache.key(["kernel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.store(key, kernel)
        assert cache.load(key) == kernel
