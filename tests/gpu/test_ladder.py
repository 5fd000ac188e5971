"""The ladder on a GPU: every rung by the error rule with guard zones, kernels that go wrong in a process of their own,
and Numba."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.backends import numba
from flashtile.lab.bench.points import DTYPES
from flashtile.lab.ladder import launcher, probe, rungs
from flashtile.lab.ladder.probe import KernelFault
from flashtile.lab.ladder.rungs import Variables
from flashtile.lab.profile import gpu
from flashtile.testing import Case, assert_agrees, run

HEAD_DIMS = (64, 128, 33, 40, 96, 1)
RUNGS = [
    rung
    for rung in rungs.rungs()
    if torch.cuda.is_available() and rung.min_arch <= gpu.current_arch().number <= rung.max_arch
]
LIMITS = {"fp32": 1e-5, "bf16": 0.05}  # of the largest error; the error rule is stricter
IDS = [rung.name for rung in RUNGS]
IN_PROCESS = [rung for rung in RUNGS if not rung.has_maps]  # the others may hang
OWN = """// own: a kernel that goes wrong.
// launch: block_m=1 block_n=1 threads=32 shared=0 arch=61
struct Params { const float *q, *k, *v; float* o; int seqlen, head_dim; float scale_log2; int is_causal; };
extern "C" __global__ void own_kernel(const Params p) {
  long long size = (long long)gridDim.x * p.head_dim, first = (long long)blockIdx.x * p.head_dim;
  for (int c = threadIdx.x; c < p.head_dim; c += 32) p.o[first + c] = 1.0f;
  MISTAKE
}
"""


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything side by side, ahead."""
    jobs = [(rung, head_dim) for rung in RUNGS for head_dim in head_dims(rung)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: launcher.compile_rung(*job, gpu.current_arch(), Variables()), jobs))


def head_dims(rung):
    """A rung that loads by TMA takes rows of 16 bytes alone."""
    return [head_dim for head_dim in HEAD_DIMS if not rung.has_maps or head_dim % 8 == 0]


@pytest.mark.parametrize("rung", IN_PROCESS, ids=lambda rung: rung.name)
@pytest.mark.smoke
def test_every_rung(rung):
    for head_dim in HEAD_DIMS:
        assert probe.check(rung, head_dim, Variables()) < LIMITS[rung.dtype]


@pytest.mark.parametrize("rung", IN_PROCESS, ids=lambda rung: rung.name)
def test_long_rows(rung, monkeypatch):
    """Stages are used again and again."""
    monkeypatch.setattr(probe, "SEQLENS", (127, 1000))
    probe.check(rung, 64, Variables())


CHILD = """
import torch
from flashtile.lab.ladder import launcher, probe, rungs
from flashtile.lab.ladder.rungs import Variables

for rung in (rung for rung in rungs.rungs() if rung.has_maps):
    print(rung.name, flush=True)
    probe.SEQLENS = (1, 77, 200)
    for head_dim in (64, 128, 40, 96):
        probe.check(rung, head_dim, Variables())
    probe.SEQLENS = (127, 128, 129, 1000)
    probe.check(rung, 64, Variables())
    # Persistent blocks take several tiles
    q, k, v = (torch.randn(3, 100, 700, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for is_causal in (False, True):
        out = launcher.kernel_for(rung, q, k, v, Variables())(q, k, v, is_causal)
        want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=is_causal)
        assert (out - want).abs().max() < 0.03, is_causal
print("done")
"""


def test_rungs_by_tma():
    """In a process of its own, with a limit: a barrier that never completes must not stop the other tests."""
    if not any(rung.has_maps for rung in RUNGS):
        pytest.skip("rungs by TMA need Hopper")
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            capture_output=True,
            text=True,
            timeout=90,
            env=Variables().child_environment(),
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"did not end within 90 s; the last of these hangs: {late.stdout!r}")
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.parametrize("rung", IN_PROCESS, ids=lambda rung: rung.name)
def test_every_tile_of_a_rung(rung):
    names = {"d": 64, "arch": gpu.current_arch().number}
    for block_n in (rungs.evaluate(text, names) for text in dict(rung.launch)["block_n"].split("|")):
        assert probe.check(rung, 64, Variables(block_n=block_n)) < LIMITS[rung.dtype]


@pytest.mark.parametrize("rung", RUNGS, ids=IDS)
def test_tensors_that_are_not_aligned(rung):
    dtype = DTYPES[rung.dtype]
    q, k, v = (torch.randn(2 * 77 * 64 + 1, device="cuda").to(dtype)[1:].view(1, 2, 77, 64) for _ in range(3))
    if rung.has_maps:
        with pytest.raises(flashtile.Unsupported, match="rows on 16-byte boundaries"):
            launcher.kernel_for(rung, q, k, v, Variables())
        return
    out = launcher.kernel_for(rung, q, k, v, Variables())(q, k, v, True)
    want = flashtile.attention(q, k, v, causal=True, backend="reference")
    assert (out - want).abs().max() < LIMITS[rung.dtype]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("", "wrong numbers"),
        (
            "if (first + p.head_dim == size) p.o[size + threadIdx.x] = 0.0f;",
            "it wrote out of bounds, 32 elements behind its output",
        ),
        (
            "if (blockIdx.x == 0) p.o[-1 - (int)threadIdx.x] = 0.0f;",
            "it wrote out of bounds, 32 elements before its output",
        ),
        ("p.o[(1ll << 40) + threadIdx.x] = 0.0f;", "the kernel failed: .*illegal"),
    ],
)
def test_a_kernel_that_goes_wrong_harms_nobody(tmp_path, mistake, words):
    path = Path(tmp_path / "own.cu")
    path.write_text(OWN.replace("MISTAKE", mistake))
    variables = Variables(source=path)
    rung = rungs.own(variables)
    assert rung is not None
    with pytest.raises(KernelFault, match=words):
        probe.check_apart(rung, 64, variables)
    assert probe.check(RUNGS[0], 64, Variables()) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, heads=4, heads_kv=2, seqlen_q=19, seqlen_k=35, head_dim=20, head_dim_v=9, causal="bottom_right"),
        Case(seqlen_q=133, seqlen_k=67, head_dim=64, head_dim_v=64, causal="bottom_right", layout="bshd"),
        Case(seqlen_q=100, seqlen_k=100, head_dim=64, head_dim_v=64, window=(30, 5), memory="sliced"),
        Case(kind="varlen", seqlen_q=200, seqlen_k=200, head_dim=128, head_dim_v=128),
        Case(batch=1, seqlen_q=5, seqlen_k=64000, head_dim=64, head_dim_v=64, values="rising"),
    ],
)
def test_numba(case, seed):
    if (reason := numba.missing("cuda")) is not None:
        pytest.skip(reason)
    inputs = Case(**{**vars(case), "backend": "numba"}).make(seed, "cuda")
    assert_agrees(run(inputs, has_backward=False), inputs)
