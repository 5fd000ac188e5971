"""The device headers: each compiles alone, by nvcc too; they include each other only; what depends on the architecture
is in one file."""

from __future__ import annotations

import graphlib
import re
import shutil
import subprocess

import pytest

from flashtile.runtime.nvrtc import INCLUDE

HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.cuh"))
LAYERS = ("core", "ptx", "tile", "attn", "kernels")  # each includes from its own and those before it
NVCC = shutil.which("nvcc")


def text(header):
    """The code without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", (INCLUDE / header).read_text(), flags=re.DOTALL)


def test_there_are_headers():
    assert {header.split("/")[1] for header in HEADERS} >= {"core", "attn", "kernels"}
    assert sorted(path for path in INCLUDE.rglob("*") if path.is_file()) == sorted(
        INCLUDE / header for header in HEADERS
    )


@pytest.mark.skipif(NVCC is None, reason="no nvcc on PATH")
@pytest.mark.parametrize("header", HEADERS)
def test_nvcc_compiles_it_alone(header, tmp_path):
    unit = tmp_path / "unit.cu"
    unit.write_text(f'#include "{header}"\n')
    command = [
        NVCC,
        "-std=c++17",
        "-arch=sm_90",
        "--ptx",
        "-Werror",
        "all-warnings",
        f"-I{INCLUDE}",
        "-o",
        str(tmp_path / "unit.ptx"),
        str(unit),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def includes(code):
    return re.findall(r"^\s*#\s*include\s*(.*?)\s*$", code, flags=re.MULTILINE)


def upward(header, code):
    """The includes of a layer above the header's own."""
    own = LAYERS.index(header.split("/")[1])
    return [line for line in includes(code) if LAYERS.index(line.strip('"').split("/")[1]) > own]


@pytest.mark.parametrize("header", HEADERS)
def test_includes_go_downward(header):
    assert upward(header, text(header)) == []


def test_an_include_of_a_layer_above_is_found():
    code = '#include "flashtile/attn/mask.cuh"\n#include "flashtile/core/math.cuh"\n'
    assert upward("flashtile/tile/copy.cuh", code) == ['"flashtile/attn/mask.cuh"']
    assert upward("flashtile/attn/merge.cuh", code) == []


def test_no_header_includes_itself_through_others():
    sorter = graphlib.TopologicalSorter(
        {header: [line.strip('"') for line in includes(text(header))] for header in HEADERS}
    )
    assert sorted(sorter.static_order()) == HEADERS  # raises CycleError


@pytest.mark.parametrize("header", HEADERS)
def test_includes_are_ours(header):
    lines = includes(text(header))
    assert all(re.fullmatch(r'"flashtile/[a-z]+/\w+\.cuh"', line) for line in lines), lines
    assert all(line.strip('"') in HEADERS for line in lines), lines
    assert text(header).lstrip().startswith("#pragma once")


def test_one_file_knows_each_compiler_macro():
    owners = {"__CUDA_ARCH__": "flashtile/core/arch.cuh", "__CUDACC_RTC__": "flashtile/core/types.cuh"}
    for macro, owner in owners.items():
        assert {header for header in HEADERS if macro in text(header)} <= {owner}
