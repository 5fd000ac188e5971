"""Kernels in the package: taken without a compiler, only where nothing they were made from differs, and listed by
info."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashtile import families
from flashtile.backends import cuda
from flashtile.cli import kernel_jobs
from flashtile.cli.main import app
from flashtile.errors import Unsupported
from flashtile.families import assemble
from flashtile.plans.arch import ARCHS
from flashtile.plans.spec import DTYPES, Features, PlanKey
from flashtile.runtime import cache, nvrtc, toolchain

HOPPER = ARCHS[90].name
SOURCE = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }'


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of embedded kernels, and no other cache."""
    forget()
    monkeypatch.setattr(cache, "EMBEDDED", tmp_path / "embedded")
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("FLASHTILE_CACHE", "0")
    yield tmp_path / "embedded"
    forget()


def forget() -> None:
    cache.embedded_archs.cache_clear()
    cache._load_embedded.cache_clear()


@pytest.fixture
def no_compiler(package: Path, monkeypatch: pytest.MonkeyPatch) -> nvrtc.Compiled:
    """One kernel is embedded, then the compiler goes. Returns that kernel."""
    cache.embed(package, SOURCE, HOPPER, ["add_one"])
    compiled = cache.compile_cached(SOURCE, HOPPER, ["add_one"])
    cache._memory.clear()
    forget()
    monkeypatch.setattr(toolchain, "find", nothing)
    return compiled


def nothing() -> toolchain.Toolchain:
    raise Unsupported("NVRTC: none here")


def test_an_embedded_kernel_needs_no_compiler(no_compiler: nvrtc.Compiled) -> None:
    assert cache.compile_cached(SOURCE, HOPPER, ["add_one"]) == no_compiler
    assert cache.embedded_archs() == {HOPPER: 1}


@pytest.mark.parametrize(
    ("source", "arch", "defines"),
    [(SOURCE + " ", HOPPER, ()), (SOURCE, "sm_80", ()), (SOURCE, HOPPER, ("FT_X=1",))],
    ids=str,
)
def test_anything_else_is_compiled(
    source: str, arch: str, defines: tuple[str, ...], no_compiler: nvrtc.Compiled
) -> None:
    with pytest.raises(Unsupported, match="none here"):
        cache.compile_cached(source, arch, ["add_one"], defines)


def test_other_headers_are_another_kernel(no_compiler: nvrtc.Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_known_headers", lambda folder, names: "of headers that were edited")
    with pytest.raises(Unsupported, match="none here"):
        cache.compile_cached(SOURCE, HOPPER, ["add_one"])


def test_a_damaged_file_costs_a_compilation(package: Path) -> None:
    cache.embed(package, SOURCE, HOPPER, ["add_one"])
    forget()
    (path,) = package.glob(f"{HOPPER}-*.kernel")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(cache.CacheWarning, match="not usable .corrupted or truncated.; the kernel is compiled instead"):
        assert cache.compile_cached(SOURCE, HOPPER, ["add_one"]).cubin


def test_the_backend_works_without_a_compiler_for_embedded_architectures(
    no_compiler: nvrtc.Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, reason in ((90, None), (80, "NVRTC: none here")):
        monkeypatch.setattr(cuda, "_arch", lambda index, number=number: ARCHS[number])
        assert cuda._missing.__wrapped__(0) == reason


def test_plain_and_causal_calls_need_nothing_else(seed: int) -> None:
    """Of any size, deterministic or not: selection looks at both. 200 classes of lengths for each call, drawn anew in
    each run."""
    embedded = {job.identity for job in kernel_jobs.embedded_jobs([ARCHS[90]])}
    pick = random.Random(seed)
    dims = (8, 64, 72, 128, 200, 256)
    for dtype, dim, has_band, grads in itertools.product(DTYPES, dims, (False, True), (None, ("dq", "dk", "dv"))):
        plain = PlanKey(dtype, dtype, dim, dim, Features(has_band=has_band), ARCHS[90], grads)
        classes = families.length_classes(plain.op)
        for _ in range(200):
            lengths = tuple((one, pick.choice(one.values)) for one in classes)
            key = replace(plain, classes=lengths, is_deterministic=pick.random() < 0.5)
            for step in assemble.kernels(key):
                assert (step.unit, step.entry, HOPPER) in embedded, (step.entry, key)


def test_compile_embeds_and_info_lists(package: Path) -> None:
    options = ["--arch", "sm_90", "--dtype", "float32", "--head-dim", "32", "--embed", str(package), "--json"]
    result = CliRunner().invoke(app, ["compile", *options])
    assert result.exit_code == 0
    count = len(json.loads(result.stdout)["kernels"])
    forget()
    assert json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)["embedded"] == {HOPPER: count}
    assert f"{count} for {HOPPER}" in CliRunner().invoke(app, ["info"]).stdout


def test_variables_of_the_compiler_keep_embedded_kernels_out(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may change the machine code: with one set, no kernel is embedded, and no embedded one is used."""
    cache.embed(package, SOURCE, HOPPER, ["add_one"])
    forget()
    cache._memory.clear()
    monkeypatch.setenv("NVRTC_APPEND_FLAGS", "-DX")
    with pytest.raises(ValueError, match="environment: got NVRTC_APPEND_FLAGS=-DX; accepted: none of these"):
        cache.embed(package, SOURCE, HOPPER, ["add_one"])
    monkeypatch.setattr(toolchain, "find", nothing)
    with pytest.raises(Unsupported, match="NVRTC: none here"):
        cache.compile_cached(SOURCE, HOPPER, ["add_one"])
    monkeypatch.delenv("NVRTC_APPEND_FLAGS")
    assert cache.compile_cached(SOURCE, HOPPER, ["add_one"]).arch == HOPPER
