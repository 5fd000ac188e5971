"""The CUDA engine against fp64: every option, every row of the table, random problems; then memory, determinism,
streams and graphs."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch
from conftest import SEED, check, covered, drawn, precompile

import flashtile
from flashtile import families
from flashtile.backends import cuda
from flashtile.families import assemble
from flashtile.testing import Case

SIMT_HEAD_DIMS = tuple(head_dim for head_dim, _ in families.find("fwd_simt").head_dims)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (1, 21, 32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)

LONG = {"batch": 1, "seqlen_q": 150, "seqlen_k": 300}
OPTIONS: dict[str, dict] = {
    "plain": LONG,
    "causal": {"causal": "bottom_right", **LONG},
    "top left": {"causal": "top_left", **LONG},
    "more queries than keys": {"causal": "bottom_right", "seqlen_q": 190, "seqlen_k": 70},
    "window": {"window": (40, 7), **LONG},
    "window and causal": {"window": (20, 30), "causal": "bottom_right", **LONG},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5, **LONG},
    "mask": {"mask": "bhqk", **LONG},
    "query mask": {"mask": "q"},
    **{
        f"bias {axes}": {"bias": axes, "seqlen_q": 90, "seqlen_k": 140}
        for axes in ("bhqk", "hqk", "qk", "bk", "hk", "k", "q", "h", "1")
    },
    "bias in float32": {"bias": "hqk", "is_bias_float32": True, **LONG},
    "alibi": {"alibi": "bh", **LONG},
    "sinks": {"has_sinks": True, "mask": "bq", **LONG},
    "dropout": {"dropout_p": 0.2, **LONG},
    "dropout of a part": {"dropout_p": 0.2, "origin": (1000, 4096, 5, 40), **LONG},
    "gqa": {"heads": 6, "heads_kv": 2, "causal": "bottom_right"},
    "different head dims": {"head_dim": 72, "head_dim_v": 40},
    "one query": {"seqlen_q": 1, "seqlen_k": 700},
    "one key": {"seqlen_k": 1},
    "no query": {"seqlen_q": 0},
    "no key": {"seqlen_k": 0, "has_sinks": True},
    "no batch": {"batch": 0},
    **{f"{memory} memory": {"memory": memory, "heads": 4} for memory in ("swapped", "sliced", "expanded", "offset")},
    "varlen": {"kind": "varlen", "batch": 5, "causal": "bottom_right", "seqlen_q": 140, "seqlen_k": 140},
    "varlen with options": {
        "kind": "varlen",
        "batch": 4,
        "bias": "bhqk",
        "mask": "hqk",
        "alibi": "bh",
        "has_sinks": True,
        "dropout_p": 0.1,
    },
    "used keys": {"kind": "used", "batch": 4, "causal": "bottom_right"},
    "paged": {"kind": "paged", "batch": 4, "window": (20, 3)},
    "paged, odd size": {"kind": "paged", "batch": 3, "page_size": 7, "bias": "bhqk", "softcap": 3.0},
    "padded": {"kind": "padded", "batch": 4, "causal": "bottom_right"},
}


def option_problems(dtype: torch.dtype) -> list[tuple[Case, int]]:
    return [
        (Case(dtype=dtype, layout=layout, backend="cuda", **options), SEED % 1000 + place)
        for place, options in enumerate(OPTIONS.values())
        for layout in ("bhsd", "bshd")
    ]


def random_problems(count: int) -> list[tuple[Case, int]]:
    pick = random.Random(SEED)
    lengths = (1, 7, 63, 64, 65, 127, 129, 300)
    problems = []
    for number in range(count):
        heads_kv, head_dim = pick.choice([1, 2]), HEAD_DIMS[number % len(HEAD_DIMS)]
        case = Case(
            dtype=pick.choice(DTYPES),
            backend="cuda",
            layout=pick.choice(["bhsd", "bshd"]),
            kind=pick.choice(["dense", "dense", "varlen", "used", "padded", "paged"]),
            memory=pick.choice(["contiguous", "swapped", "sliced", "expanded", "offset"]),
            batch=pick.choice([1, 2, 3]),
            heads=heads_kv * pick.choice([1, 2, 3]),
            heads_kv=heads_kv,
            seqlen_q=pick.choice(lengths),
            seqlen_k=pick.choice(lengths),
            head_dim=head_dim,
            head_dim_v=pick.choice([head_dim, head_dim, 40]),
            causal=pick.choice(["none", "top_left", "bottom_right"]),
            window=pick.choice([(-1, -1), (-1, -1), (40, 7)]),
            softcap=pick.choice([0.0, 0.0, 2.0]),
            mask=pick.choice([None, None, "bhqk"]),
            bias=pick.choice([None, None, "bhqk", "hqk", "k"]),
            is_bias_float32=pick.random() < 0.5,
            alibi=pick.choice([None, None, "h"]),
            has_sinks=pick.random() < 0.3,
            dropout_p=pick.choice([0.0, 0.0, 0.2]),
        )
        problems.append((case, number))
    return problems


@pytest.fixture(autouse=True)
def record_features(monkeypatch: pytest.MonkeyPatch):
    real = cuda._key

    def key(args, tensors, grads=None):
        found = real(args, tensors, grads)
        covered["features"].update(f"{field}={value}" for field, value in dataclasses.asdict(found.features).items())
        covered["kernels"].update(step.entry for step in assemble.kernels(found))
        return found

    monkeypatch.setattr(cuda, "_key", key)


def failures(problems: list[tuple[Case, int]]) -> list[str]:
    found = []
    for case, seed in problems:
        try:
            check(case, seed)
        except AssertionError as error:
            found.append(f"{case}.make({seed}): {error}")
    return found


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=pytest.mark.smoke), DTYPES[2]], ids=str)
def test_every_option(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = drawn(option_problems(dtype))
    precompile(problems, monkeypatch)
    assert failures(problems) == []


@pytest.mark.long(35)
@pytest.mark.parametrize("share", range(4))
def test_random_problems(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = random_problems(32)[share::4]
    precompile(problems, monkeypatch)
    assert failures(problems) == []


@pytest.mark.parametrize("head_dim", SIMT_HEAD_DIMS)
def test_tiles(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the simt families, those for other GPUs too, by making them choose it: two in a run, others in each."""
    found, arch = [], cuda._arch(0)
    assert arch is not None
    simt = [family for family in families.all_families() if "simt" in family.name]
    kernels = [(kernel, family) for family in simt for kernel in family.kernels]
    most = max(
        sum(row.kernel == kernel and row.head_dim == head_dim for row in family.every_row("float32"))
        for kernel, family in kernels
    )
    for index, _ in drawn([(place, head_dim) for place in range(most)], at_least=2):
        with families.forced("fwd_simt", "bwd_simt"), families.forced_rows({kernel: index for kernel, _ in kernels}):
            assemble.clear_plans()
            # A bias in every other: half as many kernels
            problems = [
                (
                    Case(
                        dtype=dtype,
                        backend="cuda",
                        head_dim=head_dim,
                        head_dim_v=head_dim,
                        causal="bottom_right",
                        bias=(None, "hqk")[(index + number) % 2],
                        **LONG,
                    ),
                    index,
                )
                for number, dtype in enumerate((torch.float32, torch.bfloat16))
            ]
            precompile(problems, monkeypatch)
            found += failures(problems)
    assemble.clear_plans()
    assert found == []


@pytest.mark.smoke
def test_fifty_repeats_are_bit_equal() -> None:
    torch.use_deterministic_algorithms(True)
    q, k, v = (torch.randn(2, 4, 700, 64, device="cuda", requires_grad=True) for _ in range(3))
    bias, sinks = (
        torch.randn(4, 1, 700, device="cuda", requires_grad=True),
        torch.randn(4, device="cuda", requires_grad=True),
    )
    dout, first = torch.randn(2, 4, 700, 64, device="cuda"), None
    for _ in range(50):
        out, lse = flashtile.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)
        results = (out, lse, *torch.autograd.grad(out, [q, k, v, bias, sinks], dout))
        first = first or results
        assert all(torch.equal(one, other) for one, other in zip(first, results, strict=True))


def test_deterministic_rows_do_not_depend_on_the_batch() -> None:
    q, k, v = (torch.randn(3, 2, 500, 64, device="cuda") for _ in range(3))
    whole = flashtile.attention(q, k, v, deterministic=True)
    assert torch.equal(whole[1:2], flashtile.attention(q[1:2], k[1:2], v[1:2], deterministic=True))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_splits_agree(num_splits: int) -> None:
    q, cache = torch.randn(2, 3, 4, 64, device="cuda"), torch.randn(2, 900, 2, 64, device="cuda")
    sinks = torch.randn(4, device="cuda")
    options = {
        "cache_seqlens": torch.tensor([870, 3], dtype=torch.int32, device="cuda"),
        "causal": True,
        "sinks": sinks,
        "return_lse": True,
    }
    expected = flashtile.attention_kvcache(q, cache, cache, backend="reference", **options)
    torch.testing.assert_close(
        flashtile.attention_kvcache(q, cache, cache, num_splits=num_splits, **options), expected, rtol=1e-5, atol=1e-5
    )


def peak(function) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("seqlen", [8192, 65536])
def test_memory_is_linear(seqlen: int) -> None:
    """Beyond inputs and outputs: lse alone in the forward pass (keys not split), two more numbers for each row in the
    backward pass; on Hopper split operands, at most twice the inputs."""
    q, k, v = (torch.randn(1, 1, seqlen, 64, device="cuda", requires_grad=True) for _ in range(3))
    dout, rows, stats, slack = torch.randn(1, 1, seqlen, 64, device="cuda"), 4 * seqlen * 64, 4 * seqlen, 4096
    parts = 2 * rows if torch.cuda.get_device_capability() == (9, 0) else 0  # of one input
    with torch.no_grad():
        flashtile.attention(q, k, v, deterministic=True)
        found = peak(lambda: flashtile.attention(q, k, v, deterministic=True, return_lse=True))
        assert found <= rows + stats + 3 * parts + slack
    out = flashtile.attention(q, k, v)
    found = peak(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    assert found <= 3 * rows + 2 * stats + 4 * parts + slack


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="other GPUs split the keys of one head")
@pytest.mark.parametrize("seqlen", [512, 1024, 4096, 16384])
def test_one_head_takes_the_memory_of_its_output(seqlen: int) -> None:
    """At most 1.2 times what torch's memory-efficient kernel takes, which is the output."""
    q, k, v = (torch.randn(1, 1, seqlen, 64, device="cuda") for _ in range(3))
    flashtile.attention(q, k, v, deterministic=False)
    assert peak(lambda: flashtile.attention(q, k, v, deterministic=False)) <= 1.2 * q.nbytes


def test_a_long_sequence_is_right() -> None:
    q, k, v = (torch.randn(1, 1, 65536, 64, device="cuda") for _ in range(3))
    out = flashtile.attention(q, k, v)
    rows = torch.tensor([0, 1, 40000, 65535], device="cuda")
    expected = torch.softmax(q[0, 0, rows].double() @ k[0, 0].double().T / 8, -1) @ v[0, 0].double()
    torch.testing.assert_close(out[0, 0, rows].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_maximum_that_rises_with_every_tile(head_dim: int) -> None:
    """What is scaled down 1000 or 2000 times must not gather as many errors: lse was off by 1e-5 and 2e-5, of 4e-6
    allowed."""
    case = Case(
        batch=1,
        seqlen_q=5,
        seqlen_k=64000,
        head_dim=head_dim,
        head_dim_v=head_dim,
        values="rising",
        num_splits=1,
        backend="cuda",
    )
    check(case, seed=3, is_forward=True)


def test_offsets_beyond_31_bits() -> None:
    """The keys are split: tensor cores truncate their sums, and over so many keys in one chain that adds up
    (docs/sm90.md)."""
    keys = torch.randn(1, 1, 33_600_000, 64, device="cuda", dtype=torch.bfloat16)
    assert keys.numel() > 2**31
    out = flashtile.attention(keys[:, :, -70:], keys, keys, deterministic=False)
    weights = torch.softmax(keys[0, 0, -3:].float() @ keys[0, 0].float().T / 8, -1)
    torch.testing.assert_close(out[0, 0, -3:].float(), weights @ keys[0, 0].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.smoke
def test_nothing_waits_for_the_gpu() -> None:
    q, k, v = (torch.randn(300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    flashtile.attention_varlen(q, k, v, cu, cu, causal=True).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashtile.attention_varlen(q, k, v, cu, cu, causal=True).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.smoke
def test_bad_lengths_do_not_lead_out_of_bounds() -> None:
    q, k = torch.randn(300, 4, 64, device="cuda"), torch.randn(300, 4, 64, device="cuda")
    for values in ([0, 10_000, 20_000], [-5, 200, 100], [0, 2**31 - 1, 5]):
        cu = torch.tensor(values, dtype=torch.int32, device="cuda")
        flashtile.attention_varlen(q, k, k, cu, cu)
    pages, table_of_pages = (
        torch.randn(3, 16, 4, 64, device="cuda"),
        torch.tensor([[99, -7]], dtype=torch.int32, device="cuda"),
    )
    flashtile.attention_kvcache(q[None, :1], pages, pages, block_table=table_of_pages, cache_seqlens=30)
    torch.cuda.synchronize()


def test_streams_and_threads() -> None:
    q, k, v = (torch.randn(2, 4, 400, 64, device="cuda") for _ in range(3))
    expected = flashtile.attention(q, k, v, softcap=9.0)
    torch.cuda.synchronize()
    results: list[torch.Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                out = flashtile.attention(q, k, v, softcap=9.0)
        stream.synchronize()
        results.append(out)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(out, expected) for out in results)


@pytest.mark.smoke
def test_first_use_inside_a_graph_capture() -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda") for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    options = {"window": (37, 11), "softcap": 7.25, "mask": torch.rand(300, 300, device="cuda") < 0.7}
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, **options)
    for _ in range(2):
        q.normal_()
        graph.replay()
        assert torch.equal(out, flashtile.attention(q, k, v, **options))


def test_a_captured_draw_is_drawn_anew() -> None:
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda") for _ in range(3))
    flashtile.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtile.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)


def test_compiled_and_checked_by_torch() -> None:
    q, k, v = (torch.randn(2, 2, 70, 64, device="cuda", requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        return flashtile.attention(q, k, v, causal=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    grads = [torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v)) for function in (compiled, attend)]
    torch.testing.assert_close(grads[0], grads[1])
    inputs = Case(backend="cuda", bias="hqk", has_sinks=True).make(0, "cuda")
    torch.library.opcheck(flashtile.ops.forward_op, tuple(inputs.args))


@pytest.mark.smoke
def test_explain_and_prewarm() -> None:
    q, k, v = (torch.randn(2, 4, 500, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    answer = flashtile.prewarm(q, k, v, causal=True, softcap=11.0)
    assert answer.backend == "cuda"
    arch = cuda._arch(0)
    assert arch is not None
    assert f"fwd_{'sm90' if arch.has_wgmma else 'simt'}_kernel: tile" in str(answer)


def test_what_it_refuses_lands_on_tiled() -> None:
    q = torch.randn(1, 2, 30, 300, device="cuda")
    with pytest.warns(flashtile.SlowPathWarning, match="head_dim 300 is over its 256"):
        out = flashtile.attention(q, q, q)
    torch.testing.assert_close(out, flashtile.attention(q, q, q, backend="reference"), rtol=1e-4, atol=1e-5)
