"""Kernels of the package on the GPU: plain and causal calls run where there is no compiler; anything else says what is
missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashtile
from flashtile.backends import cuda, executor
from flashtile.cli.main import app
from flashtile.errors import Unsupported
from flashtile.runtime import cache, nvrtc, toolchain
from flashtile.testing import Case, assert_agrees, run


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the kernels of this GPU for d = 64 in float32 and bfloat16, an empty cache, and no NVRTC."""
    arch = cuda._arch(0)
    assert arch is not None
    folder = tmp_path / "embedded"
    options = [
        "--arch",
        arch.name,
        "--dtype",
        "float32",
        "--dtype",
        "bfloat16",
        "--head-dim",
        "64",
        "--embed",
        str(folder),
    ]
    assert CliRunner().invoke(app, ["compile", *options]).exit_code == 0
    monkeypatch.setattr(cache, "EMBEDDED", folder)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHTILE_NVRTC", str(tmp_path / "none"))
    cached = (cache.embedded_archs, cache._load_embedded, cuda._missing, toolchain.find)
    for function in cached:
        function.cache_clear()
    executor._functions.clear()
    with pytest.raises(Unsupported, match="which is no file"):
        toolchain.find()
    yield
    assert not list((tmp_path / "cache").glob("*"))
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
    executor._functions.clear()


@pytest.mark.long(60)
def test_plain_and_causal_calls_compile_nothing(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(nvrtc, "compile_source", compiled)
    for dtype in (torch.float32, torch.bfloat16):
        for causal in ("none", "top_left"):
            for seqlen in (300, 1500):  # splits and a small tile, and the tile of large grids
                sizes = {"batch": 8, "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": 64, "head_dim_v": 64}
                case = Case(dtype, backend="cuda", causal=causal, **sizes)
                inputs = case.make(0, "cuda")
                assert_agrees(run(inputs), inputs)
    assert "embedded kernels" in CliRunner().invoke(app, ["info"]).stdout


@pytest.mark.smoke
def test_a_call_with_options_says_that_the_compiler_is_missing(no_compiler: None) -> None:
    q = torch.randn(1, 2, 64, 64, device="cuda")
    with pytest.raises(Unsupported, match=r"FLASHTILE_NVRTC: got .*, which is no file"):
        flashtile.attention(q, q, q, softcap=3.0)
