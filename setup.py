"""Builds the C++ extension flashtile._C. Needs a C++ compiler, and torch 2.10 or newer where the build looks for it.

A build without the extension is slower everywhere, and no installer shows what a successful build prints. So a build
that cannot make it fails and says why. FLASHTILE_EXTENSION=0 leaves it out: the wheel is then pure Python.

FLASHTILE_SANITIZE=address or undefined builds the extension for that sanitizer. FLASHTILE_ARCHS=sm_80,sm_90 puts
compiled CUDA kernels for those architectures into the package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit(f"flashtile: building needs setuptools 77 or newer, and this is {setuptools.__version__}. Upgrade it.")
sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from build_backend import fail, has_extension, require_torch_and_compiler

CSRC = Path("src/flashtile/csrc")
SOURCES = {
    "module.cpp": [],
    "old_symbols.cpp": [],
    "exec/attention.cpp": [],
    "exec/driver.cpp": [],
    "exec/executor.cpp": [],
    "exec/kept.cpp": [],
    "exec/new_rows.cpp": [],
    "exec/ops.cpp": [],
    "exec/plan.cpp": [],
    "exec/python.cpp": [],
    "exec/tensor.cpp": [],
    "exec/torch_flash.cpp": [],
    "cpu/run.cpp": [],
    "cpu/engine_baseline.cpp": [],
    "cpu/engine_baseline_f64.cpp": [],
}
if sysconfig.get_platform().endswith(("-x86_64", "-amd64")):  # the build's target, where that is another machine
    # Chosen at run time: nothing else may be compiled with these
    avx2 = ["-mavx2", "-mfma", "-mf16c"]
    avx512 = [*avx2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
    SOURCES |= {f"cpu/engine_avx2{arithmetic}.cpp": avx2 for arithmetic in ("", "_f64")}
    SOURCES |= {f"cpu/engine_avx512{arithmetic}.cpp": avx512 for arithmetic in ("", "_f64")}
FLAGS = [
    *("-std=c++17", "-O2", "-ftree-vectorize", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=fast", "-fno-math-errno"),  # products and sums are fused where the processor can
    "-Wno-psabi",  # GCC's note on how it passes vectors: ours are passed within one file alone
    "-Wno-maybe-uninitialized",  # of GCC's own AVX-512 headers, which leave values undefined on purpose
]
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10
PYTHON_TAG = "cp310"  # with the limited API of that version


class BuildExtension(build_ext):
    """Compiles each source with its own flags, side by side."""

    def build_extension(self, ext: Extension) -> None:
        torch = require_torch_and_compiler()
        try:
            self._build(ext, torch)
        except (CompileError, LinkError) as error:
            fail(f"{error}; the compiler's own words stand above")

    def _build(self, ext: Extension, torch: Path) -> None:
        compiler, include = self.compiler, [*ext.include_dirs, *self.compiler.include_dirs]
        sanitizer = os.environ.get("FLASHTILE_SANITIZE")
        extra = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1"] if sanitizer else []
        is_gcc = "clang" not in " ".join(compiler.compiler_so_cxx)
        cost = ["-fvect-cost-model=dynamic"] if is_gcc else []  # else -O2 leaves most loops alone

        def compile_one(source: str) -> list[str]:
            flags = [
                *FLAGS,
                *cost,
                *("-isystem", str(torch / "include")),  # its headers have warnings of their own
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
            library_dirs=[str(torch / "lib")],
            extra_postargs=extra,
            target_lang="c++",
        )


class BuildPython(build_py):
    """Adds CUDA kernels where they are asked for, made by `flashtile compile` with the torch and NVRTC that are
    installed."""

    def run(self) -> None:
        if self.distribution.ext_modules:
            require_torch_and_compiler()  # before the list of everything that is copied
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


class Wheel(bdist_wheel):
    """With the extension: for one platform and every Python from PYTHON_TAG on. Without: for all."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        return (PYTHON_TAG, "abi3", plat) if self.distribution.ext_modules else (python, abi, plat)


def extensions() -> list[Extension]:
    if not has_extension():
        return []
    extension = Extension(
        "flashtile._C",
        [str(CSRC / name) for name in SOURCES],
        depends=[
            str(path)
            for path in [
                *CSRC.rglob("*.h"),
                *CSRC.rglob("*.inc"),
                Path("src/flashtile/device/attn/params.cuh"),
            ]
        ],
        include_dirs=["src/flashtile"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        libraries=["torch_cpu"],
        language="c++",
        py_limited_api=True,
    )
    return [extension]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtension, "build_py": BuildPython, "bdist_wheel": Wheel})
