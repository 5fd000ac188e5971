"""The Triton engine without a GPU: its refusals here, its kernels in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.backends import triton as backend
from flashtile.problem import Problem
from flashtile.testing import Case

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("chosen", ["each_option", "not each_option"])
def test_in_the_interpreter(chosen: str) -> None:
    done = run_python("-m", "pytest", "tests/interpreter", "-k", chosen, "-p", "no:xdist", "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_importing_flashtile_does_not_import_triton() -> None:
    code = "import sys, torch; had = 'triton' in sys.modules; import flashtile; assert had or 'triton' not in sys.modules"
    assert run_python("-c", code).returncode == 0


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._missing.cache_clear()
    try:
        reason = backend._missing(True)
    finally:
        backend._missing.cache_clear()
    assert reason is not None
    assert reason.startswith("triton cannot be imported: ")


def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    backend._missing.cache_clear()
    try:
        assert backend._missing(True) == "triton 3.5.1 is older than 3.6"
    finally:
        backend._missing.cache_clear()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(dtype=torch.float64), "float64 is not among its dtypes (float32, bfloat16, float16)"),
        (Case(head_dim=257), "head_dim 257 is over its 256"),
        (Case(kind="paged"), "paged keys are not among its features"),
    ],
    ids=["dtype", "head dim", "paged"],
)
def test_refusals(case: Case, reason: str) -> None:
    assert backend.TritonBackend().refuse(Problem.of(case.make(0).args)) == reason


def test_on_the_cpu_it_names_its_device() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(flashtile.Unsupported, match="backend: got 'triton', which refuses: it runs on cuda, and q is on cpu"):
        flashtile.attention(q, q, q, backend="triton")
