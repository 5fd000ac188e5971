"""Builds the C++ extension flashtile._C where torch's headers and a C++ compiler are there; without them flashtile is
pure Python.

FLASHTILE_EXTENSION=0 leaves the extension out; 1 makes it an error if it cannot be built. FLASHTILE_SANITIZE=address or
undefined builds it for that sanitizer. FLASHTILE_ARCHS=sm_80,sm_90 puts compiled CUDA kernels for those architectures
into the package.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

CSRC = Path("src/flashtile/csrc")
SOURCES = {
    "module.cpp": [],
    "exec/attention.cpp": [],
    "exec/driver.cpp": [],
    "exec/executor.cpp": [],
    "exec/ops.cpp": [],
    "exec/plan.cpp": [],
    "exec/python.cpp": [],
    "exec/tensor.cpp": [],
    "cpu/run.cpp": [],
    "cpu/engine_baseline.cpp": [],
}
if platform.machine().lower() in ("x86_64", "amd64"):
    # Chosen at run time: nothing else may be compiled with these
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    SOURCES["cpu/engine_avx2.cpp"] = avx2
    SOURCES["cpu/engine_avx512.cpp"] = [
        *avx2,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mprefer-vector-width=512",
    ]
FLAGS = [
    *("-std=c++17", "-O2", "-ftree-vectorize", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # products and sums are fused where the processor can
    "-Wno-maybe-uninitialized",  # of GCC's own AVX-512 headers, which leave values undefined on purpose
]
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10
PYTHON_TAG = "cp310"  # with the limited API of that version


def find_torch() -> Path | None:
    """The folder of the installed torch. Only its headers and libraries are needed; an isolated build cannot import
    it."""
    paths = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path, site.getusersitepackages()]
    for path in paths:
        torch = Path(path) / "torch"
        if (torch / "include" / "torch" / "csrc" / "stable" / "c" / "shim.h").is_file():
            return torch
    return None


class BuildExtension(build_ext):
    """Compiles each source with its own flags, side by side."""

    def build_extension(self, ext: Extension) -> None:
        compiler, include = self.compiler, [*ext.include_dirs, *self.compiler.include_dirs]
        sanitizer = os.environ.get("FLASHTILE_SANITIZE")
        extra = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitizer else []
        is_gcc = "clang" not in " ".join(compiler.compiler_so_cxx)
        cost = ["-fvect-cost-model=dynamic"] if is_gcc else []  # else -O2 leaves most loops alone

        def compile_one(source: str) -> list[str]:
            flags = [
                *FLAGS,
                *cost,
                *ext.extra_compile_args,
                *SOURCES[Path(source).relative_to(CSRC).as_posix()],
                *extra,
            ]
            return compiler.compile([source], self.build_temp, ext.define_macros, include, extra_postargs=flags)

        with ThreadPoolExecutor() as pool:
            objects = [one for found in pool.map(compile_one, ext.sources) for one in found]
        target = self.get_ext_fullpath(ext.name)
        compiler.link_shared_object(
            objects,
            target,
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            extra_postargs=extra,
            target_lang="c++",
        )


class BuildPython(build_py):
    """Adds CUDA kernels where they are asked for, made by `flashtile compile` with the torch and NVRTC that are
    installed."""

    def run(self) -> None:
        super().run()
        target = Path("src" if self.editable_mode else self.build_lib, "flashtile", "embedded").resolve()
        shutil.rmtree(target, ignore_errors=True)
        archs = re.findall(r"[^\s,;]+", os.environ.get("FLASHTILE_ARCHS", ""))
        if archs:
            # An isolated build hides torch by its PYTHONPATH
            command = [
                sys.executable,
                "-m",
                "flashtile",
                "compile",
                "--embed",
                str(target),
                *(f"--arch={arch}" for arch in archs),
            ]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(Path("src").resolve())})


class Abi3Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        return (PYTHON_TAG, "abi3", plat) if self.distribution.ext_modules else (python, abi, plat)


def extensions() -> list[Extension]:
    wanted = os.environ.get("FLASHTILE_EXTENSION")
    torch = find_torch()
    if wanted == "0" or (torch is None and wanted != "1"):
        print(
            "flashtile: building without the C++ extension:",
            "FLASHTILE_EXTENSION=0" if wanted == "0" else "no torch 2.10 or newer found",
        )
        return []
    if torch is None:
        sys.exit("flashtile: FLASHTILE_EXTENSION=1, and no torch 2.10 or newer was found")
    extension = Extension(
        "flashtile._C",
        [str(CSRC / name) for name in SOURCES],
        depends=[
            str(path)
            for path in [
                *CSRC.rglob("*.h"),
                *CSRC.rglob("*.inc"),
                Path("src/flashtile/include/flashtile/attn/params.cuh"),
            ]
        ],
        include_dirs=["src/flashtile/include"],
        extra_compile_args=["-isystem", str(torch / "include")],  # its headers have warnings of their own
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        language="c++",
        py_limited_api=True,
        optional=wanted != "1",
    )
    return [extension]


setup(
    ext_modules=extensions(), cmdclass={"build_ext": BuildExtension, "build_py": BuildPython, "bdist_wheel": Abi3Wheel}
)
