"""The device headers: each compiles alone, by nvcc too; they include each other only, downward; what depends on the
architecture is in one file. And the folders of the families: each holds what is its own."""

from __future__ import annotations

import functools
import graphlib
import re
import shutil
import subprocess

import pytest

from flashtile import families
from flashtile.runtime.nvrtc import INCLUDE

HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.cuh"))
LAYERS = ("core", "ptx", "tile", "attn")  # of device/: each includes from its own and those before it
SHARED = {"simt", "sm90_f32", "steps"}  # folders of families/ that every family may use, and that use device/ alone
# The folders of other families that a family uses, in C++ or in Python
USES = {
    "bwd_sm80_f32": {"bwd_simt"},
    "bwd_sm80_wide": {"fwd_sm80_wide"},
    "bwd_sm90_f32": {"bwd_simt", "bwd_sm90_wide"},
    "bwd_sm90_wide": {"bwd_sm90"},
    "fwd_sm80_f32": {"fwd_sm80"},
    "fwd_sm80_wide": {"fwd_sm80"},
    "fwd_sm90_f32_direct": {"fwd_sm90_f32"},
    "fwd_sm90_wide": {"fwd_sm80", "fwd_sm90"},
}
NVCC = shutil.which("nvcc")


@functools.cache
def text(header):
    """The code without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", (INCLUDE / header).read_text(), flags=re.DOTALL)


def test_there_are_headers():
    assert {header.split("/")[0] for header in HEADERS} == {"device", "families"}
    assert {header.split("/")[1] for header in HEADERS if header.startswith("device/")} == set(LAYERS)


def test_each_family_has_a_folder():
    files = (INCLUDE / "families").glob("*/*")
    folders = {path.parent.name for path in files if path.suffix in (".py", ".cuh")}
    names = {family.name for family in families.all_families() if family.table == families.TABLE}
    assert folders == names | SHARED
    for family in families.all_families():
        if family.name in names:
            assert type(family).__module__ == f"flashtile.families.{family.name}.family"
            assert {str(kernel.header).split("/")[0] for kernel in family.kernel_types} == {family.name}
    assert set(USES) | set().union(*USES.values()) <= names


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


@functools.cache
def lines_of(header):
    return frozenset(includes(text(header)))


def forbidden(header, code):
    """The includes that a header may not have."""
    root, own, *_ = header.split("/")
    found = []
    for line in includes(code):
        other_root, other, *_ = line.strip('"').split("/")
        if root == "device":
            is_allowed = other_root == "device" and LAYERS.index(other) <= LAYERS.index(own)
        else:
            uses = {own} if own in SHARED else {own, *SHARED, *USES.get(own, ())}
            is_allowed = other_root == "device" or other in uses
        if not is_allowed:
            found.append(line)
    return found


@pytest.mark.parametrize("header", HEADERS)
def test_includes_go_downward(header):
    assert forbidden(header, text(header)) == []


@pytest.mark.parametrize(
    ("header", "other", "is_allowed"),
    [
        ("device/attn/merge.cuh", "device/core/math.cuh", True),
        ("device/tile/fragment.cuh", "device/attn/mask.cuh", False),
        ("device/attn/merge.cuh", "families/simt/gemm.cuh", False),
        ("families/simt/gemm.cuh", "device/attn/mask.cuh", True),
        ("families/simt/gemm.cuh", "families/steps/mask_bits.cuh", False),
        ("families/simt/gemm.cuh", "families/fwd_simt/fwd_simt.cuh", False),
        ("families/fwd_simt/fwd_simt.cuh", "families/simt/gemm.cuh", True),
        ("families/fwd_simt/fwd_simt.cuh", "families/fwd_sm80/config.cuh", False),
        ("families/fwd_sm80_f32/config.cuh", "families/fwd_sm80/config.cuh", True),
        ("families/fwd_sm80/config.cuh", "families/fwd_sm80_f32/config.cuh", False),
    ],
)
def test_an_include_from_above_or_from_another_family_is_found(header, other, is_allowed):
    code = f'#include "{other}"\n'
    assert forbidden(header, code) == ([] if is_allowed else [f'"{other}"'])


def test_each_family_uses_the_families_that_it_names():
    """No more, in C++ and Python, and no fewer."""
    found = {}
    for path in sorted((INCLUDE / "families").glob("*/*.*")):
        own = path.parent.name
        names = re.findall(r"\bfamilies[./](\w+)[./]", path.read_text()) if path.suffix != ".pyc" else []
        found.setdefault(own, set()).update(set(names) - {own} - (set() if own in SHARED else SHARED))
    assert {own: names for own, names in found.items() if names} == USES


@pytest.mark.parametrize("header", [header for header in HEADERS if re.search("device/(tile|attn)/", header)])
def test_shared_headers_are_shared(header):
    """A header that one family alone uses is in the folder of that family."""
    users, waiting = {header}, [header]
    while waiting:
        line = f'"{waiting.pop()}"'
        more = {other for other in HEADERS if line in lines_of(other)} - users
        users |= more
        waiting += more
    assert len({user.split("/")[1] for user in users if user.startswith("families/")}) > 1, users


def test_no_header_includes_itself_through_others():
    sorter = graphlib.TopologicalSorter(
        {header: [line.strip('"') for line in includes(text(header))] for header in HEADERS}
    )
    assert sorted(sorter.static_order()) == HEADERS  # raises CycleError


@pytest.mark.parametrize("header", HEADERS)
def test_includes_are_ours(header):
    lines = includes(text(header))
    assert all(re.fullmatch(r'"(device|families)/\w+/\w+\.cuh"', line) for line in lines), lines
    assert all(line.strip('"') in HEADERS for line in lines), lines
    assert text(header).lstrip().startswith("#pragma once")


def test_one_file_knows_each_compiler_macro():
    owners = {"__CUDA_ARCH__": "device/core/arch.cuh", "__CUDACC_RTC__": "device/core/types.cuh"}
    for macro, owner in owners.items():
        assert {header for header in HEADERS if macro in text(header)} <= {owner}
