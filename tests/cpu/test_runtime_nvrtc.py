"""Compiling: cubins for exact architectures, symbols, resources, warnings, and errors that show the log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashtile import Unsupported
from flashtile.runtime import nvrtc, toolchain
from flashtile.runtime.nvrtc import CompileError, Resources, compile_source, parse_log
from flashtile.runtime.toolchain import Toolchain

SCALE = """
namespace test {
template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N * FACTOR; }
__global__ void shared(float* x) {
  __shared__ float s[32];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[31 - threadIdx.x];
}
}
"""
# 200 values live across a barrier, with 32 registers
SPILL = """
__global__ void __launch_bounds__(1024, 2) spill(float* x) {
  float r[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) r[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = r[199 - i] * r[i];
}
"""


def compiled(source, arch="sm_90", names=(), defines=()):
    return compile_source(toolchain.find(), source, arch, names, defines)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_cubin_symbols_and_resources(arch):
    names = ["test::scale<4>", "test::shared"]
    unit = compiled(SCALE, arch, names, ["FACTOR=2"])
    assert unit.arch == arch
    assert unit.cubin[:4] == b"\x7fELF"
    assert all(unit.symbols[name].encode() in unit.cubin for name in names)
    plain, shared = (unit.resources(name) for name in names)
    assert plain.registers > 0
    assert (plain.spill_store_bytes, plain.spill_load_bytes, plain.stack_bytes, plain.static_shared_bytes) == (
        0,
        0,
        0,
        0,
    )
    assert shared.static_shared_bytes == 128
    assert unit.warnings == []


class Recorder:
    """An NVRTC that writes down its options."""

    def __init__(self, library):
        self.library, self.options = library, []

    def __getattr__(self, name):
        return getattr(self.library, name)

    def nvrtcCompileProgram(self, program, count, options):  # noqa: N802, its name there
        self.options += [option.decode() for option in options]
        return self.library.nvrtcCompileProgram(program, count, options)


@pytest.mark.parametrize(("version", "expected"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_takes_nothing_from_its_own_cache(version, expected):
    """What comes from there has an empty log: neither registers nor spills would be known."""
    library = Recorder(toolchain.find().library)
    found = SimpleNamespace(library=library, version=version)
    unit = compile_source(found, SCALE, "sm_90", ["test::shared"], ["FACTOR=2"])
    assert ("--no-cache" in library.options) is expected
    assert unit.resources("test::shared").registers > 0


def test_spills_are_seen():
    resources = compiled(SPILL, names=["spill"]).resources("spill")
    assert resources.registers <= 32
    assert resources.spill_store_bytes > 0
    assert resources.spill_load_bytes > 0
    assert resources.stack_bytes > 0


def test_headers_are_found_below_the_include_folder(tmp_path, monkeypatch):
    (tmp_path / "part.cuh").write_text("#define FACTOR 3\n")
    monkeypatch.setattr(nvrtc, "INCLUDE", tmp_path)
    assert compiled('#include "part.cuh"\n' + SCALE, names=["test::scale<1>"]).symbols


def test_headers_in_the_working_directory_are_not_taken(tmp_path, monkeypatch):
    for folder, content in (("ours", "#define FACTOR 3\n"), ("theirs", "#error wrong header\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.cuh").write_text(content)
    monkeypatch.setattr(nvrtc, "INCLUDE", tmp_path / "ours")
    monkeypatch.chdir(tmp_path / "theirs")
    assert compiled('#include "part.cuh"\n' + SCALE, names=["test::scale<1>"]).symbols


def test_an_error_shows_the_whole_log():
    with pytest.raises(CompileError) as caught:
        compiled("__global__ void f() { first_mistake(); }\n__global__ void g() { second_mistake(); }")
    for words in (
        "sm_90",
        "NVRTC",
        "flashtile.cu(1)",
        "first_mistake",
        "flashtile.cu(2)",
        "second_mistake",
        "2 errors",
    ):
        assert words in str(caught.value)


def test_a_name_that_is_not_in_the_source():
    with pytest.raises(CompileError, match="test::absent"):
        compiled(SCALE, names=["test::absent"], defines=["FACTOR=1"])


def test_an_architecture_the_compiler_does_not_know():
    with pytest.raises(CompileError, match="sm_999"):
        compiled(SCALE, "sm_999")


@pytest.mark.parametrize("arch", ["compute_90", "90", "", "sm_90 -G"])
def test_only_an_exact_architecture(arch):
    with pytest.raises(ValueError, match=r'arch: got .*; accepted: an exact architecture such as "sm_80" or "sm_90a"'):
        compiled(SCALE, arch)


def test_a_library_that_does_not_load(tmp_path):
    (tmp_path / "libnvrtc.so.13").write_text("not a library")
    with pytest.raises(Unsupported, match="does not load"):
        compile_source(Toolchain(str(tmp_path / "libnvrtc.so.13")), SCALE, "sm_90", [])


def test_warnings():
    unit = compiled("__global__ void f() { int unused_value; }", names=["f"])
    assert len(unit.warnings) == 1
    assert "unused_value" in unit.warnings[0]


def test_the_serialisation_notes_of_ptxas_count_as_warnings():
    note = (
        "ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions are serialized "
        "in function 'f'"
    )
    others = (
        "nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated\nptxas info    : "
        "Compiling entry function 'my_warning'\n"
    )
    unit = nvrtc.Compiled("sm_90a", b"", {}, f"{others}{note}\n")
    assert unit.warnings == [note]


def test_functions_that_were_not_inlined_count_as_their_kernels():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90'
ptxas info    : Function properties for _Z1fPf
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _Z4workf
ptxas         .     32 bytes stack frame, 40 bytes spill stores, 80 bytes spill loads
ptxas info    : Compiling entry function '_Z1gPf' for 'sm_90'
ptxas info    : Function properties for _Z1gPf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
    assert parse_log(log) == {"_Z1fPf": Resources(32, 44, 88, 48, 128), "_Z1gPf": Resources(10, 0, 0, 0, 0)}
