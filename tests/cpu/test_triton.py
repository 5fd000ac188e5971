"""The Triton engine without a GPU: its refusals, and its kernels in Triton's interpreter (in other processes)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import triton as backend
from flashtile.backends.base import GradNeeds
from flashtile.problem import Problem, shape_of
from flashtile.testing import Case

ROOT = Path(__file__).resolve().parents[2]
DROPOUT_SHAPES = [(dim, dim_v, queries) for dim in (40, 64, 100, 200) for dim_v in (40, 200) for queries in (10, 100)]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


@pytest.mark.parametrize("selection", ["each_option", "not each_option"])
def test_in_the_interpreter(selection: str) -> None:
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("Triton 3.6 makes numbers of arrays, which NumPy 2.4 refuses")
    options = ("-k", selection, "-p", "no:xdist", "-p", "no:cacheprovider")
    done = run_python("-m", "pytest", "tests/interpreter", *options, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_importing_flashtile_does_not_import_triton() -> None:
    code = (
        "import sys, torch; had = 'triton' in sys.modules; import flashtile; assert had or 'triton' not in sys.modules"
    )
    assert run_python("-c", code).returncode == 0


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._missing.cache_clear()
    try:
        reason = backend._missing(True, 0)
    finally:
        backend._missing.cache_clear()
    assert reason is not None
    assert reason.startswith("triton cannot be imported: ")


def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    backend._missing.cache_clear()
    try:
        assert backend._missing(True, 0) == "triton 3.5.1 is older than 3.6"
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
    with pytest.raises(
        flashtile.Unsupported, match="backend: got 'triton', which refuses: it runs on cuda, and q is on cpu"
    ):
        flashtile.attention(q, q, q, backend="triton")


def jobs(has_backward: bool = True, **options) -> dict:
    inputs = Case(**options).make(0)
    grads = (
        ops.empty_grads(inputs.args, GradNeeds(True, True, True, inputs.args.bias is not None, False))
        if has_backward
        else None
    )
    return backend.TritonBackend().compile_jobs(
        inputs.args, inputs.dout, inputs.dlse, *ops.empty_outputs(inputs.args), grads
    )


def test_compile_jobs_cover_every_kernel_and_can_be_pickled() -> None:
    pytest.importorskip("triton")
    found = jobs(bias="hqk", dropout_p=0.1)
    assert sorted(key[0] for key in found) == ["bwd_dbias", "bwd_dkdv", "bwd_dq", "bwd_preprocess", "fwd"]
    assert [pickle.loads(pickle.dumps(job)).args == job.args for job in found.values()] == [True] * 5
    assert [key[0] for key in jobs(has_backward=False)] == ["fwd"]
    assert jobs(seqlen_q=0, seqlen_k=0) == {}


def test_tiles_that_share_philox_words_have_a_call_for_each_thread() -> None:
    """Triton 3.6 returns wrong words when a tile has more threads than Philox calls (one for eight keys)."""
    kernels = pytest.importorskip("flashtile.backends.triton_kernels")
    found = [
        backend.tile_config(kernel, dtype, shape_of(case.make(0).args), torch.device("cpu"), False, is_aligned16)
        for kernel in backend.CONFIGS
        for dtype in backend.DTYPES
        for is_aligned16 in (False, True)
        for case in (Case(head_dim=dim, head_dim_v=dim_v, seqlen_q=queries) for dim, dim_v, queries in DROPOUT_SHAPES)
    ]
    found += [
        config
        for by_bytes in backend.SMALL_CONFIGS.values()
        for by_dim in by_bytes.values()
        for config in by_dim.values()
    ]
    sharing = [config for config in found if config.block_m * config.block_n >= kernels.MIN_SHARED_PHILOX_TILE.value]
    assert all(config.block_m * config.block_n // 8 >= 32 * config.num_warps for config in sharing)
    assert len(sharing) < len(found)


@pytest.mark.parametrize("head_dim", [20, 64])
def test_sizes_do_not_select_a_variant(head_dim: int) -> None:
    pytest.importorskip("triton")
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    sizes = [
        {},
        {"batch": 1},
        {"heads": 1, "heads_kv": 1},
        {"seqlen_q": 33, "seqlen_k": 129},
        {"memory": "swapped", "heads": 3, "heads_kv": 3},
    ]
    assert len({frozenset(jobs(**dims, **size)) for size in sizes}) == 1
    others = [
        {"memory": "offset"},
        {"dtype": torch.bfloat16},
        {"causal": "top_left"},
        {"heads": 4},
        {"head_dim_v": 100},
    ]
    assert len({frozenset(jobs(**{**dims, **other})) for other in [{}, *others]}) == 1 + len(others)
