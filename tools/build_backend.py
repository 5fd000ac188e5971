"""The build backend that pyproject.toml names: setuptools', which looks for torch and a compiler before anything else.

pip asks a backend what it needs, then downloads the dependencies, and builds at last. Without torch the build cannot
make the extension, and torch is the largest dependency: so the first question is where the build fails. Source
distributions need neither. setup.py takes its checks from here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    if has_extension():
        require_torch_and_compiler()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    if has_extension():
        require_torch_and_compiler()
    return build_meta.get_requires_for_build_editable(config_settings)


def has_extension() -> bool:
    """True unless FLASHTILE_EXTENSION=0 leaves the extension out."""
    wanted = os.environ.get("FLASHTILE_EXTENSION") or "1"
    if wanted not in ("0", "1"):
        sys.exit(f"flashtile: FLASHTILE_EXTENSION: got {wanted!r}; accepted: 0 or 1.")
    return wanted == "1"


def find_torch() -> Path | None:
    """The folder of the installed torch. Only its headers and libraries are needed; an isolated build cannot import
    it."""
    paths = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path, site.getusersitepackages()]
    for path in paths:
        torch = Path(path) / "torch"
        if (torch / "include" / "torch" / "csrc" / "stable" / "c" / "shim.h").is_file():
            return torch
    return None


def require_torch_and_compiler() -> Path:
    """The folder of torch. Ends the build with one message where something is missing."""
    if sys.platform == "win32":
        fail("it is not made for Windows")
    torch = find_torch()
    if torch is None:
        fail(
            "torch 2.10 or newer is not there, or an isolated build hides it. Install torch and setuptools 77 or newer "
            "first, then run `pip install --no-build-isolation .` or `uv pip install --no-build-isolation .`"
        )
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        fail(f"there is no C++ compiler ({compiler}). Install g++ or clang++, or name one with CXX")
    return torch


def fail(reason: str) -> NoReturn:
    way_out = "To install without the extension, which is slower, set FLASHTILE_EXTENSION=0"
    sys.exit(f"flashtile: the C++ extension cannot be built: {reason}. {way_out}.")
