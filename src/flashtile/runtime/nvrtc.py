"""Compiles CUDA C++ source to a cubin for one exact architecture and parses the compiler's log."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashtile.errors import value_error
from flashtile.runtime.toolchain import Toolchain

INCLUDE = Path(__file__).resolve().parents[1]  # the package: headers are device/... and families/...
# Without --no-source-include a header in the working directory would be found before ours
BASE_OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--device-as-default-execution-space", "--no-source-include")
# From this version on NVRTC keeps results in the driver's cache where there is a driver; the log of a result from there
# is empty
_FIRST_WITH_CACHE = (12, 9)
# Environment variables that NVRTC reads, such as NVRTC_APPEND_FLAGS, begin with these
_VARIABLES = ("NVRTC", "NVVM", "NV_NVVM", "LIBNVVM")
# Warnings about the code. "nvrtc: warning" is about the options, such as a deprecated architecture
_WARNING = re.compile(r"(?<!nvrtc: )\bwarning\s*[#:]|\bC75\d\d\b", re.IGNORECASE)


class CompileError(RuntimeError):
    """Compilation failed. The message contains the whole log."""


@dataclass(frozen=True)
class Resources:
    """Resource usage of one kernel, as reported by ptxas."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


@dataclass(frozen=True)
class Compiled:
    """A cubin, the symbol of each name expression, and the compiler's log."""

    arch: str
    cubin: bytes
    symbols: dict[str, str]
    log: str

    def resources(self, name: str) -> Resources:
        """Resource usage of the kernel that the name expression denotes."""
        return parse_log(self.log)[self.symbols[name]]

    @property
    def warnings(self) -> list[str]:
        """Warnings about the code, and ptxas notes on lost performance (C75xx)."""
        return [line for line in self.log.splitlines() if _WARNING.search(line)]


def variables() -> list[str]:
    """Returns what the environment says to NVRTC, which may change the machine code: part of the cache key."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES))


def options(arch: str, defines: Sequence[str] = ()) -> list[str]:
    """All compiler options except the include path. NVRTC makes a cubin only for an exact architecture."""
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise value_error("arch", arch, 'an exact architecture such as "sm_80" or "sm_90a"')
    return [f"--gpu-architecture={arch}", *BASE_OPTIONS, *(f"-D{define}" for define in defines)]


def compile_source(
    toolchain: Toolchain, source: str, arch: str, names: Sequence[str], defines: Sequence[str] = ()
) -> Compiled:
    """Compiles one unit. `names`: C++ expressions of the kernels, such as "flashtile::fwd_kernel<Config>"."""
    nvrtc = toolchain.library
    program = ctypes.c_void_p()
    _check(toolchain, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"flashtile.cu", 0, None, None))
    try:
        for name in names:
            _check(toolchain, nvrtc.nvrtcAddNameExpression(program, name.encode()))
        no_cache = ["--no-cache"] if toolchain.version >= _FIRST_WITH_CACHE else []
        given = [f"--include-path={INCLUDE}", *no_cache, *options(arch, defines)]
        arguments = [option.encode() for option in given]
        status = nvrtc.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        log = _text(toolchain, program, "nvrtcGetProgramLog")
        if status != 0:
            raise CompileError(
                f"NVRTC {toolchain.version[0]}.{toolchain.version[1]} refused the kernel for {arch}:\n{log}"
            )
        symbols = {}
        for name in names:
            lowered = ctypes.c_char_p()
            _check(toolchain, nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)))
            symbols[name] = (lowered.value or b"").decode()
        return Compiled(arch, _bytes(toolchain, program, "nvrtcGetCUBIN"), symbols, log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def parse_log(log: str) -> dict[str, Resources]:
    """Resources by symbol, from the output of ptxas -v. Functions that were not inlined count towards their kernel."""
    found: dict[str, Resources] = {}
    for section in re.split(r"Compiling entry function ", log)[1:]:
        symbol = re.match(r"'([^']+)'", section)
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section)
        used = re.search(r"Used (\d+) registers.*", section)
        if symbol and used:
            stack, stores, loads = (
                (sum(map(int, column)) for column in zip(*frames, strict=True)) if frames else (0, 0, 0)
            )
            shared = re.search(r"(\d+) bytes smem", used[0])
            found[symbol[1]] = Resources(int(used[1]), stores, loads, stack, int(shared[1]) if shared else 0)
    return found


def _bytes(toolchain: Toolchain, program: ctypes.c_void_p, function: str) -> bytes:
    size = ctypes.c_size_t()
    _check(toolchain, getattr(toolchain.library, function + "Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(toolchain, getattr(toolchain.library, function)(program, buffer))
    return buffer.raw


def _text(toolchain: Toolchain, program: ctypes.c_void_p, function: str) -> str:
    return _bytes(toolchain, program, function).rstrip(b"\0").decode(errors="replace")


def _check(toolchain: Toolchain, status: int) -> None:
    if status != 0:
        raise CompileError(f"NVRTC failed: {(toolchain.library.nvrtcGetErrorString(status) or b'?').decode()}")
