"""Finding NVRTC: search order, error messages, and how the library is opened."""

from __future__ import annotations

import ctypes.util
import sys
from pathlib import Path

import pytest

from flashtile import Unsupported
from flashtile.runtime import toolchain
from flashtile.runtime.toolchain import Toolchain


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("FLASHTILE_NVRTC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


def nowhere(monkeypatch, tmp_path):
    """No wheel, no toolkit, and nothing on the loader's path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(toolchain, "_on_loader_path", lambda name: None)
    monkeypatch.setattr(Path, "is_file", lambda path: tmp_path in path.parents and path.exists())


def install(folder: Path, package: str, library: str) -> Path:
    """A package with the library, and the metadata that an installer leaves."""
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    (folder / library).touch()
    info = folder / f"{package.replace('-', '_')}-13.0.88.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 13.0.88\n")
    (info / "RECORD").write_text(f"{library},,\n{info.name}/RECORD,,\n")
    return folder / library


def test_the_installed_wheel_is_found_without_being_opened():
    found = toolchain.find()
    assert Path(found.path).is_file()
    assert "library" not in vars(found)
    assert found.version >= (12, 0)
    assert len(found.digest) == 64


def test_missing_says_what_was_looked_for_and_what_to_install(monkeypatch, tmp_path):
    nowhere(monkeypatch, tmp_path)
    with pytest.raises(Unsupported) as caught:
        toolchain.find()
    for words in (
        "libnvrtc.so.13",
        "CUDA_HOME",
        "/usr/local/cuda",
        "nvidia-cuda-nvrtc",
        "FLASHTILE_NVRTC",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("package", "library"),
    [
        ("nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13"),
        ("nvidia-cuda-nvrtc-cu12", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
    ],
)
def test_installed_packages_are_found_on_sys_path(monkeypatch, tmp_path, package, library):
    nowhere(monkeypatch, tmp_path)
    installed = install(tmp_path, package, library)
    assert toolchain.find().path == str(installed)


def test_a_library_without_a_package_is_not_loaded(monkeypatch, tmp_path):
    nowhere(monkeypatch, tmp_path)
    planted = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    planted.parent.mkdir(parents=True)
    planted.touch()
    with pytest.raises(Unsupported, match=r"none of libnvrtc\.so\.13"):
        toolchain.find()


@pytest.mark.parametrize("entry", ["", ".", "absolute"])
def test_a_package_in_the_current_directory_is_not_loaded(monkeypatch, tmp_path, entry):
    nowhere(monkeypatch, tmp_path)
    install(tmp_path, "nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if entry == "absolute" else entry])
    with pytest.raises(Unsupported, match=r"none of libnvrtc\.so\.13"):
        toolchain.find()


def test_what_is_installed_beside_torch_comes_before_sys_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    install(tmp_path, "nvidia-cuda-nvrtc", "nvidia/cu13/lib/libnvrtc.so.13")
    assert not Path(toolchain.find().path).is_relative_to(tmp_path)


def test_a_current_directory_that_was_removed_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert Path(toolchain.find().path).is_file()


def test_the_home_directory_is_expanded(monkeypatch, tmp_path):
    (tmp_path / "libnvrtc.so.13").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHTILE_NVRTC", "~/libnvrtc.so.13")
    assert toolchain.find().path == str(tmp_path / "libnvrtc.so.13")


def test_a_toolkit_is_found_by_cuda_home(monkeypatch, tmp_path):
    nowhere(monkeypatch, tmp_path)
    library = tmp_path / "toolkit" / "lib64" / "libnvrtc.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert toolchain.find().path == str(library)


def test_flashtile_nvrtc_comes_first(monkeypatch, tmp_path):
    library = tmp_path / "libnvrtc.so.13"
    library.touch()
    monkeypatch.setenv("FLASHTILE_NVRTC", str(library))
    assert toolchain.find().path == str(library)


def test_flashtile_nvrtc_that_names_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHTILE_NVRTC", str(tmp_path / "gone.so"))
    with pytest.raises(
        Unsupported, match=r"FLASHTILE_NVRTC: got .*gone\.so, which is no file; accepted: .*nvidia-cuda-nvrtc"
    ):
        toolchain.find()


def test_flashtile_nvrtc_that_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "libnvrtc.so.13").write_text("not a library")
    monkeypatch.setenv("FLASHTILE_NVRTC", str(tmp_path / "libnvrtc.so.13"))
    with pytest.raises(
        Unsupported, match=r"which does not load .*accepted: NVRTC of CUDA 12 or 13\. Install .*FLASHTILE_NVRTC"
    ):
        _ = toolchain.find().library


def test_a_library_that_is_another_one(monkeypatch):
    with pytest.raises(Unsupported, match=r"which does not load .*nvrtcGetErrorString"):
        _ = Toolchain(ctypes.util.find_library("c") or "libc.so.6").library


def test_builtins_are_opened_first_and_once(monkeypatch, tmp_path):
    opened = []

    class Library:
        def __init__(self, path):
            opened.append(Path(path).name)
            self.nvrtcGetErrorString = lambda status: b""

    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0.88"):
        (tmp_path / name).touch()
    (tmp_path / "libnvrtc-builtins.so.13.0").symlink_to("libnvrtc-builtins.so.13.0.88")
    monkeypatch.setattr(toolchain.ctypes, "CDLL", Library)
    _ = Toolchain(str(tmp_path / "libnvrtc.so.13")).library
    assert opened == ["libnvrtc-builtins.so.13.0.88", "libnvrtc.so.13"]


def test_the_digest_follows_every_file(tmp_path):
    library, builtins = tmp_path / "libnvrtc.so.13", tmp_path / "libnvrtc-builtins.so.13.0"
    library.write_bytes(b"one")
    builtins.write_bytes(b"two")
    digests = {Toolchain(str(library)).digest}
    library.write_bytes(b"uno")
    digests.add(Toolchain(str(library)).digest)
    builtins.write_bytes(b"due")
    digests.add(Toolchain(str(library)).digest)
    assert len(digests) == 3


def test_the_file_behind_a_bare_name(monkeypatch):
    path = toolchain.find().path
    _ = toolchain.find().library
    # The loader finds an open library by its bare name
    assert toolchain._on_loader_path(Path(path).name) == str(Path(path).resolve())
    assert toolchain._on_loader_path("libnvrtc-that-is-not-there.so") is None
