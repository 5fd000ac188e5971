"""Finds NVRTC, NVIDIA's compiler library. No CUDA toolkit and no host compiler are needed.

Search order: the file that FLASHTILE_NVRTC names; the files of an installed package of _PACKAGES, by its metadata; on
Windows, torch's own lib folder; a toolkit in CUDA_HOME, CUDA_PATH or /usr/local/cuda; the search path of the dynamic
loader. Only the last one opens the library: a process whose kernels are cached never loads the compiler.

Packages are looked for beside torch, in site-packages, then in the other folders of sys.path. The current directory,
which Python puts there for `python -m`, does not count: a file that lies there by chance is never loaded as a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from flashtile.errors import Unsupported, unsupported


@dataclass(frozen=True)
class _Files:
    """What the files of NVRTC are called on one platform, preferred names first, and where a toolkit has them."""

    names: tuple[str, ...]
    builtins: str
    folders: tuple[str, ...]


_LINUX = _Files(("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"), "libnvrtc-builtins.so*", ("lib64",))
# A package may hold builtins of another kind, *.alt.dll, which this NVRTC does not open
_WINDOWS = _Files(("nvrtc64_130_0.dll", "nvrtc64_120_0.dll"), "nvrtc-builtins64_*[0-9].dll", ("bin/x64", "bin"))
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
_ACCEPTED = "NVRTC of CUDA 12 or 13"
_HINT = "Install the package nvidia-cuda-nvrtc, or set FLASHTILE_NVRTC to the library file"


@dataclass(frozen=True)
class Toolchain:
    """One NVRTC library. Cache keys contain its digest, because its version number has no patch level."""

    path: str

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        """The builtins libraries and the library itself, each file once, in the order to open them."""
        path = Path(self.path)
        return (*sorted({builtins.resolve() for builtins in path.parent.glob(_platform().builtins)}), path)

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """The library, opened after its builtins, which NVRTC opens by bare name."""
        try:
            opened = [ctypes.CDLL(str(path)) for path in self.files][-1]
            opened.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise unsupported("NVRTC", f"{self.path}, which does not load ({error})", _ACCEPTED, _HINT) from error
        return opened

    @functools.cached_property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    @functools.cached_property
    def archs(self) -> frozenset[int]:
        """Numbers of the architectures that it compiles for, such as 90."""
        count = ctypes.c_int()
        self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self.library.nvrtcGetSupportedArchs(numbers)
        return frozenset(numbers)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over every file of the compiler. Reads about 100 MB; `KernelCache.toolchain_digest` caches it."""
        total = hashlib.sha256()
        try:
            for path in self.files:
                with path.open("rb") as file:
                    content = hashlib.sha256()
                    while block := file.read(1 << 20):
                        content.update(block)
                total.update(content.digest())
        except OSError as error:
            raise unsupported("NVRTC", f"{self.path}, which cannot be read ({error})", _ACCEPTED, _HINT) from error
        return total.hexdigest()


def _platform() -> _Files:
    return _WINDOWS if sys.platform == "win32" else _LINUX


def candidates() -> Iterator[Path]:
    """Every path that the library may have, preferred ones first."""
    platform = _platform()
    for folder in _package_folders():
        for package in _PACKAGES:
            for found in metadata.distributions(name=package, path=[folder]):
                files = {file.name: found.locate_file(file) for file in found.files or ()}
                yield from (Path(str(files[name])) for name in platform.names if name in files)
    if platform is _WINDOWS:
        yield from (Path(torch.__file__).parent / "lib" / name for name in platform.names)
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if root:
            folders = [Path(os.path.expanduser(root)) / folder for folder in platform.folders]
            yield from (folder / name for folder in folders for name in platform.names)


def _package_folders() -> list[str]:
    """The folders in which packages are installed: torch's own first."""
    beside_torch, paths = str(Path(torch.__file__).parent.parent), sysconfig.get_paths()
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    installed = [beside_torch, paths["platlib"], paths["purelib"], *site.getsitepackages(), *user]
    others = [folder for folder in sys.path if os.path.isabs(folder) and not _is_current(folder)]
    return list(dict.fromkeys([*installed, *others]))


def _is_current(folder: str) -> bool:
    """The folder is the current directory."""
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:  # one of them is not there
        return False


def named_file() -> Path | None:
    """What FLASHTILE_NVRTC names, if anything."""
    asked = os.path.expanduser(os.environ.get("FLASHTILE_NVRTC", ""))
    if asked and not Path(asked).is_file():
        raise unsupported("FLASHTILE_NVRTC", f"{asked}, which is no file", f"the path of a {_ACCEPTED}", _HINT)
    return Path(asked) if asked else None


@functools.cache
def find() -> Toolchain:
    """The NVRTC to compile with. Raises Unsupported, listing the places searched, if there is none."""
    asked = named_file()
    if asked is not None:
        return Toolchain(str(asked.absolute()))
    for path in candidates():
        if path.is_file():
            return Toolchain(str(path.absolute()))
    for name in _platform().names:
        if path_found := _on_loader_path(name):
            return Toolchain(path_found)
    raise _missing()


def _missing() -> Unsupported:
    got = (
        f"none of {', '.join(_platform().names)} in an installed package ({', '.join(_PACKAGES)}), "
        f"in {' or '.join(_platform().folders)} of CUDA_HOME, CUDA_PATH or /usr/local/cuda, or on the loader's path"
    )
    return unsupported("NVRTC", got, _ACCEPTED, _HINT)


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _on_loader_path(name: str) -> str | None:
    """The file that the dynamic loader finds for a bare library name. Opens the library."""
    try:
        library = ctypes.CDLL(name)
        function = library.nvrtcVersion
        if sys.platform == "win32":
            return _file_of_module(library._handle)
        info = _DlInfo()
        found = ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    except (OSError, AttributeError):
        return None
    return os.path.realpath(os.fsdecode(info.file)) if found and info.file else None


def _file_of_module(handle: int) -> str | None:
    """The file of a library that Windows has loaded."""
    buffer = ctypes.create_unicode_buffer(1 << 15)
    length = ctypes.CDLL("kernel32").GetModuleFileNameW(ctypes.c_void_p(handle), buffer, len(buffer))
    return buffer.value if 0 < length < len(buffer) else None
