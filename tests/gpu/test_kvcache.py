"""Appending to a cache on a GPU: the same bits as the operations in PyTorch, and nothing out of bounds whatever the
lengths say."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.backends import kvcache

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
