"""The Numba backend: its kernel in Numba's simulator, its refusals, and a Numba that cannot be imported."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys

import pytest
import torch

import flashtile
from flashtile.backends import numba, registry
from flashtile.backends.numba import NumbaBackend

# Odd lengths, more queries than keys (fully masked rows), several heads, both layouts, packed sequences
SIMULATED = """
import sys
from flashtile.testing import Case, assert_agrees, run
small = {"batch": 1, "heads": 1, "heads_kv": 1, "head_dim": 4, "head_dim_v": 4, "backend": "numba"}
for options in (
    {"heads": 2, "seqlen_q": 17, "seqlen_k": 19, "head_dim": 18, "head_dim_v": 5},
    {"seqlen_q": 18, "seqlen_k": 3, "causal": "bottom_right", "layout": "bshd"},
    {"seqlen_q": 17, "seqlen_k": 17, "window": (3, 1), "memory": "sliced"},
    {"kind": "varlen", "batch": 2, "seqlen_q": 9, "seqlen_k": 9, "causal": "top_left"},
):
    case = Case(**{**small, **options})
    inputs = case.make(int(sys.argv[1]))
    assert_agrees(run(inputs, has_backward=False), inputs)
print("agrees")
"""


@pytest.fixture(autouse=True)
def forget():
    numba.missing.cache_clear()
    yield
    numba.missing.cache_clear()


def qkv(*size, **options):
    return [torch.randn(size or (1, 2, 8, 4), **options) for _ in range(3)]


def test_in_the_simulator(seed):
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", SIMULATED, str(seed)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "agrees"


def test_only_taken_by_name():
    backend = registry.find("numba")
    assert isinstance(backend, NumbaBackend)
    assert not backend.is_automatic
    answer = flashtile.explain(*qkv())
    assert answer.backend != "numba"
    assert "numba" in answer.refusals


def test_the_cpu_needs_the_simulator():
    with pytest.raises(
        flashtile.Unsupported,
        match=r"'numba', which refuses: on the CPU it runs in Numba's simulator only; set NUMBA_ENABLE_CUDASIM=1",
    ):
        flashtile.attention(*qkv(), backend="numba")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "it does not know softcap"),
        ({"mask": torch.ones(8, 8, dtype=torch.bool), "dropout_p": 0.5}, "it does not know a mask and dropout"),
        (
            {"alibi_slopes": torch.ones(2), "sinks": torch.ones(2), "bias": torch.ones(8, 8)},
            "it does not know a bias and ALiBi and sinks",
        ),
    ],
)
def test_options_it_does_not_know(options, reason):
    with pytest.raises(flashtile.Unsupported, match=f"backend: got 'numba', which refuses: {reason}"):
        flashtile.attention(*qkv(), backend="numba", **options)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (lambda: qkv(dtype=torch.float16), "it computes and stores float32, and this is float16 to float16"),
        (lambda: qkv(requires_grad=True), "it has no backward pass"),
        (lambda: qkv(1, 1, 2, 129), "head_dim 129 is over its 128"),
    ],
)
def test_tensors_it_does_not_take(tensors, reason):
    with pytest.raises(flashtile.Unsupported, match=reason):
        flashtile.attention(*tensors(), backend="numba")


def test_a_numba_that_cannot_be_imported(monkeypatch):
    real = builtins.__import__

    def refusing(name, *arguments):
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.4 or less.\nGot NumPy 2.5.")
        return real(name, *arguments)

    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(
        flashtile.Unsupported,
        match=r"numba cannot be imported beside numpy [\d.]+: Numba needs NumPy 2.4 or less. Got NumPy 2.5.",
    ):
        flashtile.attention(*qkv(), backend="numba")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AttributeError("module 'numpy' has no attribute 'row_stack'"), "numba cannot compile beside numpy"),
        (RuntimeError("no NVVM for\nthis GPU"), "Numba cannot compile here: no NVVM for this GPU"),
    ],
)
def test_a_numba_that_cannot_compile(error, words, monkeypatch):
    cuda = pytest.importorskip("numba.cuda")

    def failing(*_):
        raise error

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "compile_ptx_for_current_device", failing)
    assert words in numba.missing("cuda")
    assert ("pip install" in numba.missing("cuda")) == isinstance(error, AttributeError)
