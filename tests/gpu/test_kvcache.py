"""Appending to a cache on a GPU: the same bits as the operations in PyTorch, and nothing out of bounds whatever the
lengths say."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import kvcache, native
from flashtile.problem import AttentionArgs
from flashtile.runtime import extension

BATCH, CAPACITY, HEADS_KV, NEW = 3, 24, 2, 5


def tensors(dtype: torch.dtype, layout: str, page: int | None, head_dim: int = 40, head_dim_v: int = 24):
    """(k_cache, v_cache, k, v, block_table) on the GPU; the caches are slices of larger ones, so that neighbours can be
    looked at."""

    def make(rows: int, batch: int, dim: int) -> torch.Tensor:
        sizes = (batch, HEADS_KV, rows, dim) if layout == "bhsd" else (batch, rows, HEADS_KV, dim)
        return torch.randn(sizes, device="cuda").to(dtype)

    pages = BATCH if page is None else BATCH * (CAPACITY // page) + 2
    rows = CAPACITY if page is None else page
    caches = [make(rows, pages + 2, dim)[1:-1] for dim in (head_dim, head_dim_v)]
    table = (
        None
        if page is None
        else torch.randperm(pages, device="cuda").to(torch.int32)[: BATCH * (CAPACITY // page)].view(BATCH, -1)
    )
    return *caches, make(NEW, BATCH, head_dim), make(NEW, BATCH, head_dim_v), table


@pytest.mark.parametrize("rotary", [None, "own", "float32"])
@pytest.mark.parametrize("page", [None, 1, 8])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_bits_as_pytorch(dtype: torch.dtype, layout: str, page: int | None, rotary: str | None) -> None:
    k_cache, v_cache, k, v, table = tensors(dtype, layout, page)
    lengths = torch.tensor([0, 7, CAPACITY - NEW], dtype=torch.int32, device="cuda")
    cos = sin = None
    if rotary is not None:
        angles = torch.rand(CAPACITY, 16, device="cuda")
        cos, sin = (turn(angles).to(dtype if rotary == "own" else torch.float32) for turn in (torch.cos, torch.sin))
    for interleaved in (False, True):
        expected = k_cache.clone(), v_cache.clone()
        kvcache.append(kvcache.AppendArgs(*expected, k, v, lengths, table, cos, sin, interleaved, layout))
        ours = k_cache.clone(), v_cache.clone()
        torch.ops.flashtile.append_kv(*ours, k, v, lengths, table, cos, sin, interleaved, layout)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))
        assert not torch.equal(ours[0], k_cache)


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.smoke
def test_rows_without_room_are_dropped(page: int | None) -> None:
    """Lengths below 0, at the end and far behind it, and pages that do not exist: the rows that fit are written,
    nothing else changes."""
    k_cache, v_cache, k, v, table = tensors(torch.float32, "bshd", page)
    lengths = torch.tensor([-2, CAPACITY - 2, 2**31 - 3], dtype=torch.int32, device="cuda")
    if table is not None:
        table[0, 0] = 10**6
    olds = [(cache.clone(), cache._base.clone()) for cache in (k_cache, v_cache)]
    torch.ops.flashtile.append_kv(k_cache, v_cache, k, v, lengths, table, None, None, True, "bshd")
    torch.cuda.synchronize()
    for cache, new, (old, old_base) in zip((k_cache, v_cache), (k, v), olds, strict=True):
        expected = old.clone()
        for b, start in enumerate(lengths.tolist()):
            for i in range(NEW):
                position = start + i
                if not 0 <= position < CAPACITY or (page and b == 0 and position < page):
                    continue
                where = (b, position) if page is None else (int(table[b, position // page]), position % page)
                expected[where] = new[b, i]
        assert torch.equal(cache, expected)
        assert torch.equal(cache._base[0], old_base[0])
        assert torch.equal(cache._base[-1], old_base[-1])


@pytest.mark.smoke
def test_attention_over_a_growing_cache() -> None:
    """Token by token, as a decoder does, against attention over the plain rows."""
    q, k, v = (torch.randn(2, 9, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    k_cache = torch.full((2, 16, 2, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    v_cache = torch.full_like(k_cache, torch.nan)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    for i in range(9):
        step = slice(i, i + 1)
        out = flashtile.attention_kvcache(
            q[:, step], k_cache, v_cache, k=k[:, step], v=v[:, step], cache_seqlens=lengths, causal=True
        )
        expected = flashtile.attention(q[:, step], k[:, : i + 1], v[:, : i + 1], layout="bshd", backend="reference")
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        lengths += 1


def test_a_bad_length_is_named_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    k_cache, v_cache, k, v, _ = tensors(torch.float32, "bshd", None)
    with pytest.raises(ValueError, match=r"cache_seqlens.*23 for sequence 1"):
        flashtile.attention_kvcache(
            k, k_cache, v_cache, k=k, v=v, cache_seqlens=torch.tensor([0, 23, 1], dtype=torch.int32, device="cuda")
        )


# Steps in one call of the C++ executor

needs_executor = pytest.mark.skipif(native.missing() is not None, reason="needs the C++ executor")


def random_step(rng: random.Random) -> dict[str, Any]:
    """The arguments of a step that appends, with any other options."""
    batch, rows, new, heads_kv = rng.randint(1, 5), rng.choice([1, 1, 3]), rng.choice([1, 1, 4]), rng.randint(1, 3)
    dtype, layout = rng.choice([torch.float32, torch.bfloat16]), rng.choice(["bshd", "bhsd"])
    kind, page = rng.choice(["plain", "pages", "larger"]), rng.choice([1, 5, 16, 64])
    head_dim, head_dim_v = rng.choice([(128, 128), (40, 24)])
    per_sequence = -(-200 // page)
    sizes = {
        "plain": (batch, 200),
        "pages": (batch * per_sequence + 1, page),
        "larger": (batch + 2, 200),
    }
    lengths = [rng.randint(0, 200 - new) for _ in range(batch)]

    def make(*sizes: int) -> torch.Tensor:
        tensor = torch.randn(sizes, device="cuda").to(dtype)
        return tensor if layout == "bshd" else tensor.transpose(1, 2)

    step = {"q": make(batch, rows, rng.choice([1, 4]) * heads_kv, head_dim), "layout": layout, "backend": "cuda"}
    step |= {"k_cache": make(*sizes[kind], heads_kv, head_dim), "v_cache": make(*sizes[kind], heads_kv, head_dim_v)}
    step |= {"k": make(batch, new, heads_kv, head_dim), "v": make(batch, new, heads_kv, head_dim_v)}
    is_one = rng.random() < 0.3
    step["cache_seqlens"] = lengths[0] if is_one else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if kind == "pages":
        order = torch.randperm(batch * per_sequence + 1, device="cuda").to(torch.int32)
        step["block_table"] = order[1:].view(batch, per_sequence)
    elif kind == "larger":
        step["cache_batch_idx"] = torch.randperm(batch + 2, device="cuda").to(torch.int32)[:batch]
    if rng.random() < 0.3:
        most = lengths[0] if is_one else min(lengths)
        step["cache_leftpad"] = torch.randint(0, most + 1, (batch,), dtype=torch.int32, device="cuda")
    if rng.random() < 0.6:
        half = rng.choice([head_dim // 2, 8, 3])
        angles, angle_dtype = torch.rand(200, half, device="cuda"), rng.choice([dtype, torch.float32])
        step |= {"rotary_cos": angles.cos().to(angle_dtype), "rotary_sin": angles.sin().to(angle_dtype)}
        step["rotary_interleaved"] = rng.random() < 0.5
    step |= rng.choice([{}, {"causal": True}, {"causal": True}, {"window": (30, 0)}])
    return step | rng.choice([{}, {"scale": 0.3}, {"num_splits": 3}])


def by_pytorch(step: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """(out, lse) and the caches of a step whose append is PyTorch's."""
    caches = step["k_cache"].clone(), step["v_cache"].clone()
    q, layout, batch = step["q"], step["layout"], step["q"].shape[0]
    lengths, table = step["cache_seqlens"], step.get("block_table")
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device="cuda")
    if "cache_batch_idx" in step:
        table = step["cache_batch_idx"][:, None]
    rotary = step.get("rotary_cos"), step.get("rotary_sin"), step.get("rotary_interleaved", True)
    append = kvcache.AppendArgs(*caches, step["k"], step["v"], lengths, table, *rotary, layout)
    rotated, seqused = kvcache.append_step(append, q, "causal" in step or "window" in step)
    args = AttentionArgs(
        q if rotated is None else rotated, *caches, seqused_k=seqused, block_table=table, layout=layout
    )
    left, right = step.get("window", (-1, -1))
    args = args._replace(leftpad_k=step.get("cache_leftpad"), causal="bottom_right" if "causal" in step else "none")
    args = args._replace(window_left=left, window_right=right, num_splits=step.get("num_splits", 0), backend="cuda")
    return *ops.forward(*args._replace(scale=step.get("scale"))), *caches


@needs_executor
@pytest.mark.long(85)
@pytest.mark.smoke
def test_a_step_has_the_bits_of_an_append_by_pytorch(seed: int) -> None:
    """By Python in the first call of a kind, by C++ in the second."""
    rng, num_steps, num_handled = random.Random(seed), 40, 0
    for _ in range(num_steps):
        step = random_step(rng)
        expected = by_pytorch(step)
        for turn in range(2):
            given = step | {name: step[name].clone() for name in ("k_cache", "v_cache")}
            before = extension.executor().num_fallbacks()
            out, lse = flashtile.attention_kvcache(**given, return_lse=True)
            num_handled += turn == 1 and extension.executor().num_fallbacks() == before
            found = out, lse, given["k_cache"], given["v_cache"]
            for name, ours, same in zip(("out", "lse", "k_cache", "v_cache"), found, expected, strict=True):
                assert torch.equal(ours, same), (name, turn, {k: getattr(v, "shape", v) for k, v in step.items()})
    assert num_handled > 0.85 * num_steps  # angles of another dtype than float32 and q's, and odd strides, need copies


@needs_executor
def test_one_length_without_an_append(seed: int) -> None:
    q, k, v = (torch.randn(2, *sizes, 64, device="cuda").bfloat16() for sizes in ((1, 4), (300, 2), (300, 2)))
    for length in (7, 299, 300):
        lengths = torch.full((2,), length, dtype=torch.int32, device="cuda")
        expected = flashtile.attention_kvcache(q, k, v, cache_seqlens=lengths)
        for _ in range(2):
            assert torch.equal(flashtile.attention_kvcache(q, k, v, cache_seqlens=length), expected)


@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_graph_replays_growing_lengths(page: int | None, rotary: bool, seed: int) -> None:
    """One capture of a step serves every later one: lengths, pages and new rows are read on the device."""
    batch, capacity, steps = 3, 128, 40
    k_cache = torch.full((batch, capacity, 2, 64), torch.nan, device="cuda", dtype=torch.bfloat16)
    v_cache, table = torch.full_like(k_cache, torch.nan), None
    if page is not None:
        k_cache, v_cache = (cache.view(-1, page, 2, 64) for cache in (k_cache, v_cache))
        table = torch.randperm(len(k_cache), device="cuda").to(torch.int32).view(batch, -1)
    starts = torch.tensor([0, 17, 80], dtype=torch.int32, device="cuda")
    angles = torch.rand(capacity, 32, device="cuda") if rotary else None
    options: dict[str, Any] = {"block_table": table, "causal": True, "backend": "cuda"}
    if angles is not None:
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    tokens = torch.randn(3, steps, batch, 1, 4, 64, device="cuda").bfloat16()
    prompts = torch.randn(2, batch, 80, 2, 64, device="cuda").bfloat16()
    plain = [torch.zeros(batch, capacity, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    zeros = torch.zeros(batch, dtype=torch.int32, device="cuda")
    first = torch.zeros(batch, 80, 4, 64, device="cuda", dtype=torch.bfloat16)
    for caches, pages in (((k_cache, v_cache), table), (plain, None)):
        flashtile.attention_kvcache(
            first, *caches, k=prompts[0], v=prompts[1], cache_seqlens=zeros, **(options | {"block_table": pages})
        )
    lengths = starts.clone()
    q, k, v = (torch.zeros(batch, 1, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))

    def step() -> torch.Tensor:
        return flashtile.attention_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, **options)

    step(), step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
        lengths += 1
    lengths.copy_(starts)
    for i in range(steps):
        q.copy_(tokens[0, i]), k.copy_(tokens[1, i, :, :, :2]), v.copy_(tokens[2, i, :, :, :2])
        graph.replay()
        expected = flashtile.attention_kvcache(
            q, *plain, k=k, v=v, cache_seqlens=starts + i, **(options | {"block_table": None})
        )
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        assert not out.isnan().any()
