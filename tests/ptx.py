"""PTX of a unit by NVRTC, without ptxas, and copies of the headers to change: tests/cpu and tests/gpu use it."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from flashtile.runtime import nvrtc, toolchain


def copy_headers(target: Path) -> None:
    """Copies every header to an include root of a test's own."""
    for header in nvrtc.INCLUDE.rglob("*.cuh"):
        copy = target / header.relative_to(nvrtc.INCLUDE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, copy)


def ptx_of(unit: str, entry: str, arch: str) -> tuple[bytes, str]:
    """(the PTX of a unit, the name of its kernel there). The architecture is a virtual one, such as compute_80."""
    library, program, lowered = toolchain.find().library, ctypes.c_void_p(), ctypes.c_char_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), unit.encode(), b"flashtile.cu", 0, None, None) == 0
    try:
        assert library.nvrtcAddNameExpression(program, entry.encode()) == 0
        others = [text for text in nvrtc.options("sm_80")[1:] if "ptxas" not in text]
        texts = [f"--include-path={nvrtc.INCLUDE}", f"--gpu-architecture={arch}", *others]
        arguments = (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))
        assert library.nvrtcCompileProgram(program, len(texts), arguments) == 0
        assert library.nvrtcGetLoweredName(program, entry.encode(), ctypes.byref(lowered)) == 0
        name, size = (lowered.value or b"").decode(), ctypes.c_size_t()
        assert library.nvrtcGetPTXSize(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert library.nvrtcGetPTX(program, text) == 0
        return text.raw, name
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
