"""`flashtile compile` and what `flashtile info` says about compiling. The kernels themselves are compiled in
test_kernels.py."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from flashtile import families
from flashtile.backends import numba, registry
from flashtile.cli import compile as compile_command
from flashtile.cli import info as info_command
from flashtile.cli import kernel_jobs
from flashtile.cli.main import app
from flashtile.errors import unsupported
from flashtile.plans.arch import ARCHS, Arch
from flashtile.plans.spec import DTYPES, Features
from flashtile.runtime import cache, toolchain
from flashtile.runtime.nvrtc import Compiled, CompileError
from flashtile.runtime.toolchain import Toolchain

HEAD_DIMS = tuple(head_dim for head_dim, _ in families.find("fwd_simt").head_dims)
LOG = """ptxas info    : Compiling entry function 'symbol' for 'sm_90'
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem
"""


def run(*options):
    return CliRunner().invoke(app, ["compile", *options])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that gives every kernel the resources named here."""
    facts = {"stack": 0, "stores": 0, "loads": 0, "registers": 128, "shared": 0, "note": ""}
    called = []

    def compile_cached(source, arch, names, defines=()):
        called.append((source, arch))
        return Compiled(arch, b"", dict.fromkeys(names, "symbol"), LOG.format(**facts) + facts["note"])

    monkeypatch.setattr(cache, "compile_cached", compile_cached)
    facts["called"] = called
    return facts


def test_asks_for_an_arch():
    result = run()
    assert result.exit_code == 2
    assert "--arch: got none, and no GPU to take it from" in result.output
    assert "--arch sm_90" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arch", "hopper"], "--arch: got hopper; accepted: sm_61, sm_75"),
        (["--arch", "sm_61"], "no longer knows sm_61"),
        (["--arch", "sm_90", "--dtype", "float64"], "--dtype: got 'float64'; accepted: fp32, bf16, fp16, float32,"),
        (["--arch", "sm_90", "--head-dim", "0"], "--head-dim: got 0; accepted: 1 to"),
        (["--arch", "sm_90", "--head-dim", "5000"], "--head-dim: got 5000"),
        (["--arch", "sm_90", "--jobs", "0"], "--jobs: got 0"),
    ],
)
def test_refusals(options, words, monkeypatch):
    monkeypatch.setattr(Toolchain, "archs", property(lambda self: frozenset(ARCHS) - {61}))
    result = run(*options)
    assert result.exit_code == 2
    assert words in result.output


def test_takes_the_arch_of_the_gpu(monkeypatch, compiler):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert run("--dtype", "float32", "--head-dim", "64").exit_code == 0
    assert {arch for _, arch in compiler["called"]} == {"sm_90a"}


def test_the_table_says_which_kernel_takes_any_head_dim(compiler):
    result = run("--arch", "sm_90", "--dtype", "float32", "--head-dim", "64")
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in result.output.splitlines() if "│" in line]
    assert {row[4] for row in rows if row[1] == "append_kv"} == {"any"}
    assert {row[4] for row in rows if row[1] != "append_kv"} == {"64"}


@pytest.mark.parametrize("dtype", ["float32", "fp32"])
def test_json(compiler, dtype):
    result = run("--arch", "sm_90", "--dtype", dtype, "--head-dim", "60", "--json")
    assert result.exit_code == 0
    kernels = json.loads(result.stdout)["kernels"]
    assert {kernel["dtype"] for kernel in kernels} == {"float32"}
    assert {kernel["head_dim"] for kernel in kernels} == {64, 0}  # 0: append_kv, which takes any
    assert {kernel["kernel"] for kernel in kernels} >= {
        name for family in families.all_families() for name in family.kernels if "float32" in family.dtypes
    }
    assert all(kernel["registers"] == 128 and kernel["problems"] == [] for kernel in kernels)


def test_an_interrupt_shows_the_kernels_that_are_done(compiler, monkeypatch, tmp_path):
    compile_job, done = compile_command.compile_job, []

    def interrupted(job):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(compile_job(job))
        return done[-1]

    monkeypatch.setattr(compile_command, "compile_job", interrupted)
    options = ("--arch", "sm_90", "--dtype", "bf16", "--head-dim", "64", "--jobs", "1")
    result = run(*options, "--embed", str(tmp_path / "embedded"))
    assert result.exit_code == 130
    assert "what each kernel takes" in result.output
    assert all(one.job.kernel in result.output for one in done)
    assert "Interrupted: 2 of " in result.output
    assert not list((tmp_path / "embedded").iterdir())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"stores": 12, "loads": 8}, "spills registers: 12 bytes stored, 8 loaded"),
        ({"stack": 24}, "keeps a stack frame of 24 bytes"),
        ({"shared": 230 * 1024}, "of shared memory; a block of sm_90a has 232448"),
        ({"note": "ptxas info : (C7519) Potential Performance Loss"}, "C7519"),
    ],
)
def test_a_bad_kernel_fails_with_the_reason(compiler, facts, words):
    compiler.update(facts)
    result = run("--arch", "sm_90", "--dtype", "float32", "--head-dim", "64")
    assert result.exit_code == 1
    assert words in result.output


def test_a_refused_kernel_shows_the_log(monkeypatch):
    def refuse(*arguments):
        raise CompileError("line 7: error: no such thing")

    monkeypatch.setattr(cache, "compile_cached", refuse)
    result = run("--arch", "sm_90", "--dtype", "float32", "--head-dim", "64")
    assert result.exit_code == 1
    assert "line 7: error: no such thing" in result.output


def test_all_skips_what_the_compiler_does_not_know(monkeypatch, compiler):
    monkeypatch.setattr(Toolchain, "archs", property(lambda self: frozenset({80, 90})))
    result = run("--all", "--dtype", "float32", "--head-dim", "64")
    assert result.exit_code == 0
    assert {arch for _, arch in compiler["called"]} == {"sm_80", "sm_90a"}
    assert "no longer knows sm_61" in result.output
    assert "does not know sm_120" in result.output
    assert len(compiler["called"]) == len(set(compiler["called"]))


def test_pairwise_covers_every_pair():
    factors = {"a": (0, 1), "b": (0, 1), "c": ("x", "y", "z"), "d": (0, 1), "e": (False,)}
    chosen = kernel_jobs.pairwise(factors)
    assert chosen == kernel_jobs.pairwise(factors)
    for (one, ones), (other, others) in itertools.combinations(factors.items(), 2):
        assert {(choice[one], choice[other]) for choice in chosen} == set(itertools.product(ones, others))
    assert len(chosen) < 10


def test_covering_meets_every_feature():
    jobs = kernel_jobs.covering_jobs([ARCHS[80], ARCHS[90]])
    hopper = [job.key.features for job in jobs if job.kernel == "fwd_sm90"]
    for field in dataclasses.fields(Features):
        assert (len({getattr(features, field.name) for features in hopper}) >= 2) is (
            field.name not in ("is_paged", "is_aligned16")
        ), field.name
    keys = [job.key for job in jobs if job.kernel == "fwd_simt" and job.key.arch == ARCHS[80]]
    for field in dataclasses.fields(Features):
        assert len({getattr(key.features, field.name) for key in keys}) >= 2, field.name
    assert {(key.head_dim, key.dtype) for key in keys} == set(itertools.product(HEAD_DIMS, DTYPES))


def test_edges_of_a_dtype_with_two_kernels():
    kernels = {job.kernel for job in kernel_jobs.edge_jobs([ARCHS[90]], ["bfloat16"])}
    assert {"fwd_sm90", "bwd_dq_simt", "bwd_dkdv_simt"} <= kernels


def test_blocks_per_multiprocessor():
    blocks = Arch.blocks_per_multiprocessor
    assert blocks(ARCHS[90], 128, 32, 0) == 16  # 64 warps
    assert blocks(ARCHS[75], 128, 32, 0) == 8  # 32 warps
    assert blocks(ARCHS[86], 128, 32, 0) == 12  # 48 warps
    assert blocks(ARCHS[90], 32, 16, 0) == 32  # the limit of blocks
    assert blocks(ARCHS[90], 128, 255, 0) == 2  # 8192 registers a warp
    assert blocks(ARCHS[90], 128, 168, 0) == 3
    assert blocks(ARCHS[90], 128, 64, 104 * 1024) == 2
    assert blocks(ARCHS[90], 128, 64, 114 * 1024) == 1  # 1 KB of each block is the system's
    assert blocks(ARCHS[80], 128, 64, 164 * 1024) == 0


# flashtile info


def test_info_shows_the_compiler_and_the_cache(monkeypatch, tmp_path):
    facts = info_command.collect()
    assert facts["nvrtc"]["version"] or facts["nvrtc"]["reason"]
    assert facts["cache"]["directory"] == str(tmp_path / "kernels")
    assert facts["cache"]["status"].startswith("not there yet")
    assert not (tmp_path / "kernels").exists()
    assert set(facts["archs"]) == {arch.name for arch in ARCHS.values()}
    assert {"FLASHTILE_NVRTC", "FLASHTILE_CACHE_DIR", "FLASHTILE_CACHE", "FLASHTILE_COMMIT"} <= set(facts["switches"])
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "kernels" / "some.kernel").write_bytes(b"x" * 10)
    assert info_command.collect()["cache"] == {
        "directory": str(tmp_path / "kernels"),
        "status": "usable",
        "files": 1,
        "bytes": 10,
    }
    (tmp_path / "kernels").chmod(0o755)
    assert "its mode 0755 lets others in" in info_command.collect()["cache"]["status"]
    monkeypatch.setenv("FLASHTILE_CACHE", "0")
    assert info_command.collect()["cache"]["status"] == "off: FLASHTILE_CACHE=0"


def test_info_asks_every_backend_whether_it_works(monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-DX")
    numba.missing.cache_clear()
    facts = info_command.collect()
    assert facts["backends"]["tiled"]["cpu"] == facts["backends"]["reference"]["cpu"] == "works"
    assert facts["backends"]["numba"]["cpu"].startswith("no: on the CPU it runs in Numba's simulator only")
    assert facts["nvrtc"]["variables"] == ["NVRTC_APPEND_FLAGS=-DX"]
    monkeypatch.setattr(registry.find("cpu"), "refuse", lambda problem, op="forward": "it is not built")
    assert info_command.collect()["backends"]["cpu"]["cpu"] == "no: it is not built"


def test_an_unwritable_folder_is_refused_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_command, "compile_jobs", lambda *_: pytest.fail("it compiled"))
    (tmp_path / "file").touch()
    result = run("--arch", "sm_90", "--embed", str(tmp_path / "file" / "embedded"))
    assert result.exit_code == 2
    assert "--embed: got " in result.output
    assert "accepted: a folder that can be written" in result.output


def test_kernels_are_not_embedded_with_variables_of_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_command, "compile_jobs", lambda *_: pytest.fail("it compiled"))
    monkeypatch.setenv("NVRTC_PREPEND_FLAGS", "--use_fast_math")
    result = run("--arch", "sm_90", "--embed", str(tmp_path))
    assert result.exit_code == 2
    assert "environment: got NVRTC_PREPEND_FLAGS=--use_fast_math" in result.output


def test_a_disk_that_fills_up_is_no_traceback(monkeypatch, tmp_path, compiler):
    def fill_up(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "embed", fill_up)
    result = run("--arch", "sm_90", "--dtype", "float32", "--head-dim", "16", "--embed", str(tmp_path))
    assert result.exit_code == 2
    assert "A result could not be written: [Errno 28] No space left on device" in result.output


@pytest.mark.parametrize("jobs", ["0", "100000"])
def test_a_number_of_jobs_that_makes_no_sense_is_refused(jobs):
    result = run("--arch", "sm_90", "--jobs", jobs)
    assert result.exit_code == 2
    assert f"--jobs: got {jobs}; accepted: 1 to" in result.output


def test_info_without_a_compiler(monkeypatch):
    def find():
        raise unsupported("NVRTC", "none", "libnvrtc of CUDA 12 or 13")

    monkeypatch.setattr(toolchain, "find", find)
    facts = info_command.collect()
    assert facts["nvrtc"]["reason"].startswith("NVRTC: got none")
    assert all(status.startswith("no: without NVRTC") for status in facts["archs"].values())
    result = run("--arch", "sm_90")
    assert result.exit_code == 2
    assert "NVRTC: got none" in result.output
