"""The Triton engine against fp64: every option and dtype, random problems; then what a GPU alone can show.

Compiling is most of the work, so problems are spread over processes; Triton keeps what they compile on disk.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from conftest import SEED, check, covered
from test_cuda import DTYPES, OPTIONS, random_problems

import flashtile
from flashtile import ops
from flashtile.backends import registry
from flashtile.backends.base import GradNeeds
from flashtile.testing import Case, assert_agrees, run

pytest.importorskip("triton")
# Beside other tests the cores have work enough, and a process takes seconds of one to start
PROCESSES = max(1, min(5 if "PYTEST_XDIST_WORKER" in os.environ else 14, (os.cpu_count() or 2) - 1))


def failure(problem: tuple[Case, int]) -> str | None:
    case, seed = problem
    try:
        check(case, seed)
    except Exception as error:
        return f"{case}.make({seed}): {type(error).__name__}: {error}"
    return None


def failures(problems: list[tuple[Case, int]]) -> list[str]:
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(failure, problems))
    covered["problems"].update(f"{case} {seed}" for case, seed in problems)
    return [text for text in found if text is not None]


@pytest.mark.long(120)
def test_every_option() -> None:
    problems = [
        (
            Case(dtype=dtype, layout=("bhsd", "bshd")[(place + number) % 2], backend="triton", **options),
            SEED % 1000 + place,
        )
        for place, options in enumerate(OPTIONS.values())
        if options.get("kind") != "paged"
        for number, dtype in enumerate(DTYPES)
        # Its compiler takes seconds for a kernel: plain and causal calls in every dtype, others in one
        if place < 2 or place % 3 == number
    ]
    assert failures(problems) == []


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.smoke
def test_no_queries_of_heads_that_share_keys(causal: str) -> None:
    check(
        Case(dtype=torch.bfloat16, heads=6, heads_kv=2, seqlen_q=0, seqlen_k=140, causal=causal, backend="triton"), SEED
    )


@pytest.mark.long(150)
def test_random_problems() -> None:
    problems = [
        (dataclasses.replace(case, backend="triton"), seed)
        for case, seed in random_problems(25)
        if case.kind != "paged"
    ]
    assert failures(problems) == []


@pytest.mark.long(110)
def test_dropout_in_tiles_whose_threads_outnumber_its_words() -> None:
    """Float32 over head dim 128: Triton 3.6 handed out wrong words there while keys shared them."""
    options = [
        {},
        {"mask": "bhqk"},
        {"causal": "bottom_right"},
        {"bias": "hqk", "softcap": 20.0},
        {"kind": "varlen"},
        {"heads_kv": 1},
    ]
    dims = [(160, 160), (40, 160), (256, 64), (129, 200)]
    problems = [
        (
            Case(
                head_dim=dims[place % 4][0],
                head_dim_v=dims[place % 4][1],
                seqlen_q=queries,
                seqlen_k=190,
                dropout_p=0.3,
                backend="triton",
                **option,
            ),
            SEED + place,
        )
        for place, option in enumerate(options)
        for queries in (10, 150)
    ]
    assert failures(problems) == []


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_precision_follows_torch(precision: str) -> None:
    q, k, v = (torch.randn(2, 4, 600, 64, device="cuda") for _ in range(3))
    exact = flashtile.attention(q.double(), k.double(), v.double(), backend="reference")
    torch.set_float32_matmul_precision(precision)
    try:
        errors = [(flashtile.attention(q, k, v, backend="triton") - exact).abs().max().item() for _ in range(4)]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (
        all(error < 4e-6 for error in errors)
        if precision == "highest"
        else all(1e-5 < error < 1e-2 for error in errors)
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_maximum_that_rises_with_every_tile(head_dim: int) -> None:
    case = Case(
        batch=1, seqlen_q=5, seqlen_k=64000, head_dim=head_dim, head_dim_v=head_dim, values="rising", backend="triton"
    )
    check(case, seed=3, is_forward=True)


@pytest.mark.smoke
def test_repeats_are_bit_equal() -> None:
    q, k, v = (torch.randn(2, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias, sinks = (
        torch.randn(4, 1, 700, device="cuda", requires_grad=True),
        torch.randn(4, device="cuda", requires_grad=True),
    )
    dout, first = torch.randn_like(q), None
    for _ in range(20):
        out, lse = flashtile.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True, backend="triton")
        results = (out, lse, *torch.autograd.grad(out, [q, k, v, bias, sinks], dout))
        first = first or results
        assert all(torch.equal(one, other) for one, other in zip(first, results, strict=True))


def test_no_length_compiles_anew() -> None:
    kernels = __import__("flashtile.backends.triton_kernels", fromlist=["fwd_triton_kernel"])

    def num_compiled() -> int:
        return sum(len(cache[0]) for cache in kernels.fwd_triton_kernel.device_caches.values())

    counts = set()
    for seqlen in (128, 130, 257, 300, 1000, 1024):
        q, k, v = (torch.randn(1, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        flashtile.attention(q, k, v, causal=True, backend="triton")
        counts.add(num_compiled())
    assert len(counts) == 1


@pytest.mark.parametrize(
    "options", [{}, {"head_dim": 20, "head_dim_v": 33, "bias": "hqk", "causal": "bottom_right"}, {"kind": "varlen"}]
)
def test_what_is_compiled_ahead_is_what_runs(options: dict) -> None:
    kernels = __import__("flashtile.backends.triton_kernels", fromlist=["fwd_triton_kernel"])
    functions = [value for name, value in vars(kernels).items() if name.endswith("_triton_kernel")]
    inputs = Case(dtype=torch.float16, backend="triton", softcap=7.0, **options).make(SEED, "cuda")
    grads = ops.empty_grads(inputs.args, GradNeeds(True, True, True, inputs.args.bias is not None, False))
    backend = registry.find("triton")
    jobs = backend.compile_jobs(inputs.args, inputs.dout, inputs.dlse, *ops.empty_outputs(inputs.args), grads)
    for job in jobs.values():
        job()
    compiled = [sum(len(cache[0]) for cache in function.device_caches.values()) for function in functions]
    assert_agrees(run(inputs), inputs)
    assert [sum(len(cache[0]) for cache in function.device_caches.values()) for function in functions] == compiled


def test_memory_is_linear() -> None:
    q, k, v = (torch.randn(1, 1, 32768, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout, rows, stats, slack = torch.randn_like(q), 2 * 32768 * 64, 4 * 32768, 4096

    def peak(function) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = function()
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: flashtile.attention(q, k, v, backend="triton")) <= rows + stats + slack
    out = flashtile.attention(q, k, v, backend="triton")
    assert peak(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)) <= 3 * rows + 2 * stats + slack


def test_offsets_beyond_31_bits() -> None:
    keys = torch.zeros(1, 1, 33_600_000, 64, device="cuda", dtype=torch.bfloat16)
    assert keys.numel() > 2**31
    # Each query sees its own key, at the far end, and hardly anything else: sums over so many keys have no digits to
    # spare
    own = keys[:, :, -70:].normal_()
    torch.testing.assert_close(flashtile.attention(8 * own, keys, keys, backend="triton"), own, rtol=2e-2, atol=2e-3)


def test_rows_far_apart() -> None:
    """A tile of rows that spans more than 2**31 elements."""
    wide = torch.zeros(100, 2**25, device="cuda", dtype=torch.bfloat16)
    q = wide[:, :64].normal_()[None, None]
    torch.testing.assert_close(
        flashtile.attention(q, q, q, backend="triton"),
        flashtile.attention(*[q.contiguous()] * 3, backend="triton"),
        rtol=0,
        atol=0,
    )


def test_nothing_waits_for_the_gpu() -> None:
    q, k, v = (torch.randn(300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    flashtile.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashtile.attention_varlen(q, k, v, cu, cu, causal=True, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_lengths_do_not_lead_out_of_bounds() -> None:
    q = torch.randn(300, 4, 64, device="cuda")
    for values in ([0, 10_000, 20_000], [-5, 200, 100], [0, 2**31 - 1, 5]):
        cu = torch.tensor(values, dtype=torch.int32, device="cuda")
        flashtile.attention_varlen(q, q, q, cu, cu, backend="triton")
    torch.cuda.synchronize()


def test_graphs() -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    options = {"causal": True, "dropout_p": 0.5, "backend": "triton"}
    flashtile.attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, **options)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert first.isfinite().all()
    assert not torch.equal(first, out)


def test_compiled_and_checked_by_torch() -> None:
    q, k, v = (torch.randn(2, 2, 70, 64, device="cuda", requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return flashtile.attention(q, k, v, causal=True, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    grads = [torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v)) for function in (compiled, attend)]
    torch.testing.assert_close(grads[0], grads[1])


def test_dropout_bits_are_those_of_the_cuda_engine() -> None:
    case = Case(seqlen_q=100, seqlen_k=200, dropout_p=0.3)
    results = [run(dataclasses.replace(case, backend=backend).make(SEED, "cuda")) for backend in ("cuda", "triton")]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_explain_prewarm_and_refusals() -> None:
    q, k, v = (torch.randn(2, 4, 500, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    answer = flashtile.prewarm(q, k, v, causal=True, softcap=11.0, backend="triton")
    assert "fwd_triton_kernel: tile" in str(answer)
    assert flashtile.explain(q, k, v).refusals["triton"] == "'cuda' is faster"
    with pytest.raises(flashtile.Unsupported, match="float64 is not among its dtypes"):
        flashtile.attention(q.double(), k.double(), v.double(), backend="triton")
    pages, table = torch.randn(3, 16, 4, 64, device="cuda"), torch.tensor([[0, 1]], dtype=torch.int32, device="cuda")
    with pytest.raises(flashtile.Unsupported, match="paged keys are not among its features"):
        flashtile.attention_kvcache(
            torch.randn(1, 1, 4, 64, device="cuda"), pages, pages, block_table=table, cache_seqlens=30, backend="triton"
        )
