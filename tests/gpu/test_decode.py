"""Few queries and paged keys on Hopper: the decode family, and pages in the forward family."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from conftest import check
from family_tests import assert_accurate, jitter, needs_hopper
from torch import Tensor

import flashtile
from flashtile.backends import native
from flashtile.families import assemble
from flashtile.testing import Case

pytestmark = needs_hopper
FAMILIES = ("decode_sm90", "fwd_sm90")
HEAD_DIMS = ((128, 128), (64, 64), (96, 96), (192, 128), (192, 192), (256, 256), (80, 72))
PAGE_SIZES = (1, 16, 64, 256, 7, 48, 8)
SIZES = (
    (1, 8, 2, 700, 3),
    (4, 8, 2, 1500, 2),
    (1, 3, 3, 333, 5),
    (8, 8, 1, 900, 2),
    (1, 32, 8, 3000, 1),
    (7, 6, 2, 130, 40),
    (1, 65, 1, 700, 3),  # more heads than a tile has rows
    (1, 258, 2, 900, 2),
)
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"causal": "bottom_right"},
    {"causal": "bottom_right", "window": (100, -1), "has_sinks": True},
    {"softcap": 15.0, "alibi": "bh"},
    {"num_splits": 1, "values": "huge"},
    {"is_out_float32": True, "values": "rising"},
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls take this family."""
    force(request.param, monkeypatch)
    return str(request.param)


def force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_FAMILY", name)
    assemble.clear_plans()


@pytest.fixture
def splits_keys() -> None:
    """As by default. Tests poison memory by torch's switch for deterministic algorithms, under which keys are not split
    and the decode family has nothing to join."""
    torch.use_deterministic_algorithms(False)


def cases(kinds: tuple[str, ...]) -> list[tuple[Case, int]]:
    """Every page size meets every kind; sizes, head dims and options take turns."""
    found = []
    for kind in kinds:
        for page_size in PAGE_SIZES:
            for step in range(3):
                number = len(found) + step
                seqlen_q, heads, heads_kv, seqlen_k, batch = SIZES[number % len(SIZES)]
                head_dim, head_dim_v = HEAD_DIMS[number // 2 % len(HEAD_DIMS)]
                case = Case(
                    dtype=(torch.bfloat16, torch.float16)[number % 2],
                    layout=("bshd", "bhsd")[number % 2],
                    kind=kind,
                    page_size=page_size,
                    batch=batch,
                    heads=heads,
                    heads_kv=heads_kv,
                    seqlen_q=seqlen_q,
                    seqlen_k=seqlen_k,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    has_max_lengths=kind in ("paged", "varlen"),
                    backend="cuda",
                    deterministic=False,  # keys may be split
                    **OPTIONS[number % len(OPTIONS)],  # type: ignore[arg-type]
                )
                found.append((case, number))
    return found


@pytest.mark.long(40)
def test_error_rule(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = cases(("paged", "cache", "padded", "varlen", "dense"))
    assert_accurate(problems, f"{family}_kernel", monkeypatch)


def test_chunks_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many queries over pages."""
    force("fwd_sm90", monkeypatch)
    problems = [
        (
            Case(
                dtype=torch.bfloat16,
                layout="bshd",
                kind="paged",
                page_size=page_size,
                batch=3,
                heads=4,
                heads_kv=2,
                seqlen_q=300,
                seqlen_k=900,
                head_dim=head_dim,
                head_dim_v=head_dim,
                causal=causal,
                has_max_lengths=True,
                backend="cuda",
            ),
            page_size,
        )
        for page_size in PAGE_SIZES
        for head_dim in (64, 128, 256)
        for causal in ("none", "bottom_right")
    ]
    assert_accurate(problems, "fwd_sm90_kernel", monkeypatch)


class Cache:
    """Keys as pages in random order, and the same keys dense."""

    def __init__(self, page_size: int, lengths: list[int], heads_kv: int = 2, head_dim: int = 128) -> None:
        batch, per_sequence = len(lengths), -(-max(lengths) // page_size)
        pool = (batch * per_sequence + 3, page_size, heads_kv, head_dim)
        self.k, self.v = (torch.randn(pool, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        order = torch.randperm(pool[0], device="cuda")[: batch * per_sequence]
        self.table = order.view(batch, per_sequence).to(torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.page_size = page_size

    def dense(self) -> tuple[Tensor, Tensor]:
        batch, rows = self.table.shape[0], self.table.shape[1] * self.page_size
        k, v = (pages[self.table.long()].reshape(batch, rows, *pages.shape[2:]) for pages in (self.k, self.v))
        return k, v

    def queries(self, seqlen_q: int, heads: int) -> Tensor:
        sizes = (self.table.shape[0], seqlen_q, heads, self.k.shape[-1])
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_pages_give_the_bits_of_dense_keys(page_size: int, is_split: bool, family: str) -> None:
    """Also where unused entries of the table are garbage, with keys split over blocks or not."""
    torch.use_deterministic_algorithms(not is_split)
    cache = Cache(page_size, [1000, 1, 77, 640])
    q = cache.queries(3, 8)
    expected = flashtile.attention_kvcache(q, *cache.dense(), cache_seqlens=cache.lengths, causal=True, backend="cuda")
    is_unused = torch.arange(cache.table.shape[1], device="cuda") * page_size >= cache.lengths[:, None]
    junk = torch.randint(-(2**31), 2**31 - 1, cache.table.shape, device="cuda").to(torch.int32)
    table = torch.where(is_unused, junk, cache.table)
    out = flashtile.attention_kvcache(
        q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=table, causal=True, backend="cuda"
    )
    # For pages the forward family may take another tile, whose keys are split elsewhere
    if family == "decode_sm90":
        assert torch.equal(out, expected)
    else:
        torch.testing.assert_close(out, expected, atol=0.01, rtol=0.01)


def test_a_graph_serves_growing_lengths(family: str) -> None:
    """One capture; lengths and table change between replays."""
    cache = Cache(16, [4096] + [512] * 5)
    q, most = cache.queries(1, 8), cache.lengths.clone()

    def step() -> Tensor:
        return flashtile.attention_kvcache(
            q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, causal=True, backend="cuda"
        )

    step(), step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for share in (1.0, 0.01, 0.5, 0.0, 0.9):
        cache.lengths.copy_((most * share).to(torch.int32))
        graph.replay()
        assert torch.equal(out, step()), share


@pytest.mark.usefixtures("splits_keys")
def test_streams_do_not_share_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins of launches that run at the same time."""
    force("decode_sm90", monkeypatch)
    caches = [Cache(64, lengths) for lengths in ([20000], [300] * 12, [5000, 10, 9000])]
    queries = [cache.queries(1, 8) for cache in caches]

    def steps(index: int) -> Tensor:
        cache = caches[index]
        return flashtile.attention_kvcache(
            queries[index], cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, backend="cuda"
        )

    expected = [steps(index) for index in range(3)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in caches]
    results: list[list[Tensor]] = [[] for _ in caches]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(steps(index))
    torch.cuda.synchronize()
    for found, one in zip(results, expected, strict=True):
        assert all(torch.equal(out, one) for out in found)


def test_a_step_sees_the_rows_appended_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel starts while the append still runs, and must wait for it. Steps without a pause between them."""
    force("decode_sm90", monkeypatch)
    cache = Cache(16, [900] * 64)
    queries, k, v = (torch.randn(40, 64, 1, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    lengths = [torch.full_like(cache.lengths, 200 + 17 * number) for number in range(40)]
    pages = cache.k.clone(), cache.v.clone()

    def steps(k_cache: Tensor, v_cache: Tensor, has_pauses: bool) -> list[Tensor]:
        found = []
        for number, length in enumerate(lengths):
            where = {"cache_seqlens": length, "block_table": cache.table, "causal": True}
            if has_pauses:
                flashtile.attention_kvcache(queries[number], k_cache, v_cache, k=k[number], v=v[number], **where)
                torch.cuda.synchronize()
                where["cache_seqlens"] = length + 1
                found.append(flashtile.attention_kvcache(queries[number], k_cache, v_cache, **where))
                torch.cuda.synchronize()
                continue
            found.append(
                flashtile.attention_kvcache(queries[number], k_cache, v_cache, k=k[number], v=v[number], **where)
            )
        return found

    expected = steps(cache.k, cache.v, True)
    for _ in range(5):
        found = steps(*(pool.clone() for pool in pages), False)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("splits_keys")
def test_launches_that_overlap_share_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in one stream whose parts have the same memory; each may start while the one before it joins."""
    force("decode_sm90", monkeypatch)
    caches = [Cache(64, lengths) for lengths in ([20000], [9000, 30])]
    queries = [cache.queries(1, 8) for cache in caches]

    def step(index: int) -> Tensor:
        cache = caches[index]
        return flashtile.attention_kvcache(
            queries[index], cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, backend="cuda"
        )

    expected = [step(index) for index in range(2)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step(number % 2) for number in range(20)]
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[number % 2]) for number, out in enumerate(found))


@pytest.mark.usefixtures("splits_keys")
@pytest.mark.parametrize("number", [1, 2, -1, 0x9D3F5A17C2E84B61 - (1 << 64)])
def test_a_join_trusts_no_memory_that_held_other_numbers(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force("decode_sm90", monkeypatch)
    for dtype in (torch.int32, torch.int64):
        cache = Cache(64, [20000])
        q = cache.queries(1, 8)
        torch.cuda.synchronize()
        expected = flashtile.attention_kvcache(
            q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, num_splits=1
        )
        for _ in range(5):
            torch.cuda.empty_cache()
            # Of every size that the allocator could give to the next call
            bits = number if dtype == torch.int64 else (number + 2**31) % 2**32 - 2**31
            filled = [torch.full((1 << size,), bits, dtype=dtype, device="cuda") for size in range(8, 24)]
            torch.cuda.synchronize()
            del filled
            out = flashtile.attention_kvcache(
                q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, backend="cuda"
            )
            torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("splits_keys")
def test_a_graph_on_two_streams_beside_the_stream_that_it_was_captured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    force("decode_sm90", monkeypatch)
    caches = [Cache(64, lengths) for lengths in ([20000], [9000, 30])]
    queries = [cache.queries(1, 8) for cache in caches]
    own, other = torch.cuda.Stream(), torch.cuda.Stream()

    def step(index: int) -> Tensor:
        cache = caches[index]
        return flashtile.attention_kvcache(
            queries[index], cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, backend="cuda"
        )

    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        expected = [step(index) for index in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=own):
        found = [step(number % 2) for number in range(6)]
    for _ in range(30):
        for stream in (own, other):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(own):
            eager = [step(index) for index in range(2)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, one) for out, one in zip(eager, expected, strict=True))
    assert all(torch.equal(out, expected[number % 2]) for number, out in enumerate(found))


def assert_steady(cache: Cache, seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits over 100 runs with pauses of random length before every barrier, copy and product."""
    q = cache.queries(seqlen_q, 8)

    def step() -> Tensor:
        return flashtile.attention_kvcache(
            q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, causal=True, backend="cuda"
        )

    expected = step()
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(100):
            assert torch.equal(step(), expected)
    assert functions


@pytest.mark.usefixtures("splits_keys")
@pytest.mark.parametrize("page_size", [1, 16])
def test_jitter_changes_nothing(page_size: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_steady(Cache(page_size, [700, 64, 1, 3000] * 12), 2, monkeypatch)


@pytest.mark.usefixtures("splits_keys")
def test_jitter_in_joins_of_full_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four warps of a join write to the memory that K had: 64 rows, pauses of random length, the same bits."""
    force("decode_sm90", monkeypatch)
    assert_steady(Cache(64, [3000, 700]), 16, monkeypatch)


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_what_shared_memory_held_changes_no_bits(seqlen_q: int, family: str) -> None:
    """Rows of a tile that no query fills: 4 and 20 of 64 are filled. Before each call a full tile of another call is in
    their place, whose rows would vote for other maxima."""
    cache = Cache(16, [1000, 130, 700])
    q, full = cache.queries(seqlen_q, 8), cache.queries(16, 8)

    def results() -> list[Tensor]:
        found = []
        for scale in (0.0, 1000.0, 1.0):
            for queries in (full * scale, q):
                out = flashtile.attention_kvcache(
                    queries, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, backend="cuda"
                )
            found.append(out)
        return found

    first, *others = results()
    assert all(torch.equal(first, other) for other in others)


def test_sequences_without_keys(family: str) -> None:
    """A row without keys is 0, its lse -inf."""
    cache = Cache(16, [0, 5, 0])
    out, lse = flashtile.attention_kvcache(
        cache.queries(1, 4),
        cache.k,
        cache.v,
        cache_seqlens=cache.lengths,
        block_table=cache.table,
        return_lse=True,
        backend="cuda",
    )
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -torch.inf).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[1]).all()


@pytest.mark.parametrize("batch", [31, 33, 1024, 1025, 5000])
@pytest.mark.parametrize("kind", ["cache", "varlen"])
def test_many_short_sequences(kind: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a warp looks at in one step, of any lengths, none among them."""
    force("decode_sm90", monkeypatch)
    sizes = {"heads": 4, "heads_kv": 2, "seqlen_q": 3, "seqlen_k": 90, "head_dim": 64, "head_dim_v": 64}
    case = Case(
        dtype=torch.bfloat16, kind=kind, batch=batch, has_max_lengths=True, backend="cuda", deterministic=False, **sizes
    )
    check(case, batch, is_forward=True)


def test_the_decode_family_by_the_error_rule_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that fill a row tile, and groups that do not divide one."""
    force("decode_sm90", monkeypatch)
    for heads, heads_kv, seqlen_q in ((3, 1, 21), (14, 2, 9), (64, 1, 1), (5, 5, 64), (24, 8, 20)):
        case = Case(
            dtype=torch.float16,
            kind="cache",
            heads=heads,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=500,
            head_dim=64,
            head_dim_v=64,
            causal="bottom_right",
            backend="cuda",
        )
        check(case, heads, True)


@pytest.mark.parametrize("page_size", ["1", "16"])
def test_served_tokens_are_those_of_a_dense_cache(page_size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/serve.py, by the families that calls take without being told."""
    monkeypatch.delenv("FLASHTILE_FAMILY", raising=False)
    assemble.clear_plans()
    path = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    assert spec is not None
    assert spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve", serve)
    spec.loader.exec_module(serve)
    sizes = (
        "--layers 2 --width 512 --heads 4 --heads-kv 2 --vocabulary 1000 --slots 8 --requests 20 --prompt 150 --new 40"
    )
    assert serve.main([*sizes.split(), "--page-size", page_size]) == 0
