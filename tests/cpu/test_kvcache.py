"""The key-value cache: append, rotary, pages, batch indices, left padding, each against attention over the plain
rows."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile.backends import native
from flashtile.runtime import extension

B, CAPACITY, HEADS, HEADS_KV, D = 3, 24, 4, 2, 8
LENGTHS = torch.tensor([5, 0, 17], dtype=torch.int32)


def caches(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*sizes, HEADS_KV, D), torch.randn(*sizes, HEADS_KV, D)


def rows_attention(q, k, v, **options):
    """One sequence: q (rows, heads, dim) over k and v (keys, heads_kv, dim)."""
    return flashtile.attention(
        q[None], k[None], v[None], layout="bshd", return_lse=True, backend="reference", **options
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_append_and_attend(new: int, causal: bool, layout: str, seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, k, v = torch.randn(B, 2, HEADS, D), torch.randn(B, new, HEADS_KV, D), torch.randn(B, new, HEADS_KV, D)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    for b in range(B):  # rows behind the new ones hold NaN: nobody may read them
        k_cache[b, LENGTHS[b] + new :] = v_cache[b, LENGTHS[b] + new :] = torch.nan
    out, lse = flashtile.attention_kvcache(
        *(swap(q), swap(k_cache), swap(v_cache)),
        k=swap(k),
        v=swap(v),
        cache_seqlens=LENGTHS,
        causal=causal,
        return_lse=True,
        layout=layout,
    )
    for b, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(k_cache[b, :length], k_before[b, :length])
        assert torch.equal(v_cache[b, :length], v_before[b, :length])
        assert torch.equal(k_cache[b, length : length + new], k[b])
        assert torch.equal(v_cache[b, length : length + new], v[b])
        expected, expected_lse = rows_attention(
            q[b], k_cache[b, : length + new], v_cache[b, : length + new], causal=causal
        )
        torch.testing.assert_close(swap(out)[b], expected[0])
        torch.testing.assert_close(lse[b], expected_lse[0])


def test_read_only(seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q = torch.randn(B, 1, HEADS, D)
    whole = flashtile.attention_kvcache(q, k_cache, v_cache)
    torch.testing.assert_close(whole, flashtile.attention(q, k_cache, v_cache, layout="bshd"))
    some = flashtile.attention_kvcache(q, k_cache, v_cache, cache_seqlens=9)
    torch.testing.assert_close(some, flashtile.attention(q, k_cache[:, :9], v_cache[:, :9], layout="bshd"))


@pytest.mark.parametrize("page", [1, 4, 8, 24])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_paged_is_bit_equal_to_dense(page: int, layout: str, seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, k, v = torch.randn(B, 3, HEADS, D), torch.randn(B, 3, HEADS_KV, D), torch.randn(B, 3, HEADS_KV, D)
    per_sequence = CAPACITY // page
    table = torch.randperm(B * per_sequence + 2)[: B * per_sequence].to(torch.int32).view(B, per_sequence)
    k_pages, v_pages = (torch.full((B * per_sequence + 2, page, HEADS_KV, D), torch.nan) for _ in range(2))
    k_pages[table.long()] = k_cache.unflatten(1, (per_sequence, page))
    v_pages[table.long()] = v_cache.unflatten(1, (per_sequence, page))
    table[1, -(-3 // page) :] = -99  # entries behind a sequence's last key may hold anything
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    options = {"k": swap(k), "v": swap(v), "cache_seqlens": LENGTHS, "causal": True, "window": (6, 0), "layout": layout}
    paged = flashtile.attention_kvcache(swap(q), swap(k_pages), swap(v_pages), block_table=table, **options)
    dense = flashtile.attention_kvcache(swap(q), swap(k_cache), swap(v_cache), **options)
    assert torch.equal(paged, dense)
    for b, length in enumerate(LENGTHS.tolist()):
        for row in range(length, length + 3):
            assert torch.equal(k_pages[table[b, row // page], row % page], k[b, row - length])


def test_batch_indices(seed: int) -> None:
    k_cache, v_cache = caches(7, CAPACITY)
    rows = torch.tensor([6, 2, 0], dtype=torch.int32)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    q, k, v = torch.randn(B, 2, HEADS, D), torch.randn(B, 2, HEADS_KV, D), torch.randn(B, 2, HEADS_KV, D)
    out = flashtile.attention_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, cache_batch_idx=rows, causal=True
    )
    k_rows, v_rows = k_before[rows.long()], v_before[rows.long()]
    expected = flashtile.attention_kvcache(q, k_rows, v_rows, k=k, v=v, cache_seqlens=LENGTHS, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(k_cache[rows.long()], k_rows)
    others = [1, 3, 4, 5]
    assert torch.equal(k_cache[others], k_before[others])
    assert torch.equal(v_cache[others], v_before[others])


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding(causal: bool, seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    leftpad = torch.tensor([2, 0, 17], dtype=torch.int32)
    for b in range(B):
        k_cache[b, : leftpad[b]] = v_cache[b, : leftpad[b]] = torch.nan
    q, k, v = torch.randn(B, 2, HEADS, D), torch.randn(B, 2, HEADS_KV, D), torch.randn(B, 2, HEADS_KV, D)
    slopes = torch.rand(HEADS)
    out = flashtile.attention_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=LENGTHS, cache_leftpad=leftpad, causal=causal, alibi_slopes=slopes
    )
    for b in range(B):
        kept = slice(int(leftpad[b]), int(LENGTHS[b]) + 2)
        expected, _ = rows_attention(q[b], k_cache[b, kept], v_cache[b, kept], causal=causal, alibi_slopes=slopes)
        torch.testing.assert_close(out[b], expected[0])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: int, interleaved: bool) -> torch.Tensor:
    """One row (heads, dim) by complex multiplication."""
    half = cos.shape[1]
    turn = torch.complex(cos[position], sin[position])
    head, rest = x[:, : 2 * half], x[:, 2 * half :]
    if interleaved:
        turned = torch.view_as_real(torch.view_as_complex(head.reshape(len(x), half, 2)) * turn).flatten(1)
    else:
        product = torch.complex(head[:, :half], head[:, half:]) * turn
        turned = torch.cat([product.real, product.imag], dim=1)
    return torch.cat([turned, rest], dim=1)


@pytest.mark.parametrize("rotary_dim", [2, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (4, 4))])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rotary(layout: str, causal: bool, window, interleaved: bool, rotary_dim: int, seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, k, v = torch.randn(B, 3, HEADS, D), torch.randn(B, 3, HEADS_KV, D), torch.randn(B, 3, HEADS_KV, D)
    angle = torch.rand(CAPACITY, rotary_dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    options = {"cache_seqlens": LENGTHS, "causal": causal, "window": window, "layout": layout}
    k_plain, v_plain = k_cache.clone(), v_cache.clone()
    out = flashtile.attention_kvcache(
        *(swap(q), swap(k_cache), swap(v_cache)),
        k=swap(k),
        v=swap(v),
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        **options,
    )
    for b, length in enumerate(LENGTHS.tolist()):
        for i in range(3):
            k[b, i] = rotated(k[b, i], cos, sin, length + i, interleaved)
            is_ordered = causal or window is not None
            q[b, i] = rotated(q[b, i], cos, sin, length + (i if is_ordered else 0), interleaved)
    expected = flashtile.attention_kvcache(swap(q), swap(k_plain), swap(v_plain), k=swap(k), v=swap(v), **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(k_cache, k_plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, seed: int) -> None:
    k_cache, v_cache = (cache.to(dtype) for cache in caches(B, CAPACITY))
    q, k = torch.randn(B, 1, HEADS, D, dtype=dtype), torch.randn(B, 1, HEADS_KV, D, dtype=dtype)
    out = flashtile.attention_kvcache(q, k_cache, v_cache, k=k, v=k, cache_seqlens=LENGTHS)
    wide = flashtile.attention_kvcache(
        q.double(), k_cache.double(), v_cache.double(), cache_seqlens=LENGTHS + 1, backend="tiled"
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wide, rtol=2e-2, atol=2e-2)


def test_decoding_step_by_step_equals_prefill(seed: int) -> None:
    steps = 10
    q, k, v = torch.randn(1, steps, HEADS, D), torch.randn(1, steps, HEADS_KV, D), torch.randn(1, steps, HEADS_KV, D)
    prefill = flashtile.attention(q, k, v, causal=True, layout="bshd")
    k_cache, v_cache = torch.full((1, steps, HEADS_KV, D), torch.nan), torch.full((1, steps, HEADS_KV, D), torch.nan)
    for i in range(steps):
        row = slice(i, i + 1)
        out = flashtile.attention_kvcache(
            q[:, row], k_cache, v_cache, k=k[:, row], v=v[:, row], cache_seqlens=i, causal=True
        )
        torch.testing.assert_close(out, prefill[:, row])


def test_facade(seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, k = torch.randn(B, 1, HEADS, D, requires_grad=True), torch.randn(B, 1, HEADS_KV, D)
    out, lse = flashtile.flash_attn_with_kvcache(
        q,
        k_cache.clone(),
        v_cache.clone(),
        k,
        k,
        cache_seqlens=LENGTHS,
        softmax_scale=0.3,
        window_size=(4, 4),
        return_softmax_lse=True,
    )
    with torch.no_grad():
        expected = flashtile.attention_kvcache(
            q, k_cache, v_cache, k=k, v=k, cache_seqlens=LENGTHS, scale=0.3, window=(4, 4), return_lse=True
        )
    torch.testing.assert_close((out, lse), expected)
    assert not out.requires_grad


def test_num_splits_changes_nothing_here(seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q = torch.randn(B, 1, HEADS, D)
    assert torch.equal(
        flashtile.attention_kvcache(q, k_cache, v_cache, num_splits=3), flashtile.attention_kvcache(q, k_cache, v_cache)
    )


# Steps of one length: the rows in use are a slice


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": "top_left", "scale": 0.3},
        {"window": (4, 0)},
        {"window": (-1, -1)},
        {"softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("new", [0, 1, 4])
def test_one_length_is_the_same_as_lengths(new: int, options: dict, dtype: torch.dtype, layout: str, seed: int) -> None:
    """Left padding of 0 changes nothing, and takes the general path."""
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    k_cache, v_cache = (tensor.to(dtype) for tensor in caches(B, CAPACITY))
    q, k, v = (
        torch.randn(B, rows, heads, D).to(dtype) for rows, heads in ((2, HEADS), (new, HEADS_KV), (new, HEADS_KV))
    )
    k_cache[:, 9 + new :] = v_cache[:, 9 + new :] = torch.nan
    results = []
    for lengths in (9, torch.full((B,), 9, dtype=torch.int32), None):
        cached = k_cache.clone(), v_cache.clone()
        general = {} if lengths is not None else {"cache_leftpad": torch.zeros(B, dtype=torch.int32)}
        out = flashtile.attention_kvcache(
            *(swap(tensor) for tensor in (q, *cached)),
            k=swap(k),
            v=swap(v),
            cache_seqlens=9 if lengths is None else lengths,
            return_lse=True,
            layout=layout,
            **options,
            **general,
        )
        results.append((*out, *cached))
    for other in results[1:]:
        for ours, same in zip(results[0], other, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), same.nan_to_num(7.0))


# Steps in one call of the C++ executor: those whose kind has been served before

needs_extension = pytest.mark.skipif(extension.missing() is not None, reason="needs the C++ extension")


def random_step(rng: random.Random) -> dict[str, Any]:
    """The arguments of a step with any options that C++ takes."""
    batch, rows, new, capacity, heads_kv = (
        rng.randint(1, 4),
        rng.randint(1, 3),
        rng.randint(0, 4),
        24,
        rng.randint(1, 2),
    )
    dtype, layout = rng.choice([torch.float32, torch.float64, torch.bfloat16]), rng.choice(["bshd", "bhsd"])
    kind, page = rng.choice(["plain", "pages", "rows of a larger cache"]), rng.choice([1, 5, 8])
    sizes = {"plain": (batch, capacity), "pages": (batch * 5, page), "rows of a larger cache": (batch + 2, capacity)}[
        kind
    ]
    room = capacity if kind != "pages" else 5 * page
    new = min(new, room)
    lengths = [rng.randint(0, room - new) for _ in range(batch)]

    def make(*sizes: int) -> torch.Tensor:
        tensor = torch.randn(sizes).to(dtype)
        return tensor if layout == "bshd" else tensor.transpose(1, 2)

    step = {"q": make(batch, rows, 2 * heads_kv, 8), "layout": layout}
    step |= {"k_cache": make(*sizes, heads_kv, 8), "v_cache": make(*sizes, heads_kv, 16)}
    step["cache_seqlens"] = lengths[0] if rng.random() < 0.3 else torch.tensor(lengths, dtype=torch.int32)
    if new:
        step |= {"k": make(batch, new, heads_kv, 8), "v": make(batch, new, heads_kv, 16)}
    if kind == "pages":
        step["block_table"] = torch.randperm(batch * 5, dtype=torch.int32).view(batch, 5)
    elif kind == "rows of a larger cache":
        step["cache_batch_idx"] = torch.randperm(batch + 2, dtype=torch.int32)[:batch]
    if rng.random() < 0.3:
        shortest = min(lengths) if isinstance(step["cache_seqlens"], torch.Tensor) else lengths[0]
        step["cache_leftpad"] = torch.randint(0, shortest + 1, (batch,), dtype=torch.int32)
    step |= rng.choice([{}, {"causal": True}, {"causal": "top_left"}, {"window": (3, 0)}, {"window": (-1, -1)}])
    step |= rng.choice([{}, {"softcap": 2.0}, {"scale": 0.3}, {"return_lse": True}, {"backend": "cpu"}])
    wide = torch.float64 if dtype == torch.float64 else torch.float32  # others would be copied first
    if rng.random() < 0.2:
        sizes = rng.choice([(2 * heads_kv,), (batch, 2 * heads_kv)])
        step["alibi_slopes"] = torch.rand(sizes, dtype=wide)
    if rng.random() < 0.2:
        step["sinks"] = torch.randn(2 * heads_kv, dtype=wide)
    return step


def results_of(step: dict[str, Any]) -> list[torch.Tensor]:
    """What it returns, and the caches after it."""
    step = step | {name: step[name].clone() for name in ("k_cache", "v_cache")}
    out = flashtile.attention_kvcache(**step)
    return [*(out if isinstance(out, tuple) else (out,)), step["k_cache"], step["v_cache"]]


@needs_extension
def test_a_step_by_the_executor_is_the_same_as_by_python(seed: int) -> None:
    rng, num_handled = random.Random(seed), 0
    for _ in range(300):
        step = random_step(rng)
        with native.python_only():
            expected = results_of(step)
        results_of(step)  # registers its plan
        before = extension.executor().num_fallbacks()
        for ours, same in zip(results_of(step), expected, strict=True):
            assert torch.equal(ours, same), step
        num_handled += extension.executor().num_fallbacks() == before
    assert num_handled == 300


WRONG_STEPS = {
    "too long": ({"cache_seqlens": torch.tensor([3, 8], dtype=torch.int32)}, "cache_seqlens: got 8 for sequence 1"),
    "negative": ({"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}, "cache_seqlens: got -1 for sequence 0"),
    "too long, one length": ({"cache_seqlens": 8}, "cache_seqlens: got 8 for sequence 0"),
    "of 64 bits": ({"cache_seqlens": torch.tensor([3, 3])}, "cache_seqlens: got int64; accepted: int32"),
    "of three": ({"cache_seqlens": torch.tensor([3, 3, 3], dtype=torch.int32)}, "cache_seqlens: got 3 rows"),
    "heads": ({"k": torch.ones(2, 1, 1, D)}, "k: got shape"),
    "batch": ({"k": torch.ones(1, 1, 2, D), "v": torch.ones(1, 1, 2, D)}, "k: got shape"),
    "dtype": ({"v": torch.ones(2, 1, 2, D).double()}, "v: got float64"),
    "k alone": ({"v": None}, "v: got None"),
    "rows": ({"v": torch.ones(2, 2, 2, D)}, "v: got 2 x 2 new rows"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens: got None"),
    "left padding": ({"cache_leftpad": torch.tensor([0, 5], dtype=torch.int32)}, "cache_leftpad: got 5 for sequence 1"),
    "left padding with the new row": (
        {"cache_leftpad": torch.tensor([0, 4], dtype=torch.int32)},
        "cache_leftpad: got 4 for sequence 1",
    ),
    "page": ({"block_table": torch.tensor([[0], [2]], dtype=torch.int32)}, "block_table: got page 2 at"),
    "row": ({"cache_batch_idx": torch.tensor([0, -1], dtype=torch.int32)}, "cache_batch_idx: got row -1 at"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused_behind_right_ones(name: str) -> None:
    changes, text = WRONG_STEPS[name]
    new, zeros = torch.ones(2, 1, 2, D), torch.zeros(2, dtype=torch.int32)
    rows = torch.arange(2, dtype=torch.int32)
    right = {"k": new, "v": new, "cache_seqlens": 3}
    for more in ({}, {"cache_leftpad": zeros}, {"cache_batch_idx": rows}, {"block_table": rows[:, None]}):
        for _ in range(2):
            flashtile.attention_kvcache(new, torch.zeros(2, 8, 2, D), torch.zeros(2, 8, 2, D), **right, **more)
    k_cache, v_cache = torch.zeros(2, 8, 2, D), torch.zeros(2, 8, 2, D)
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        flashtile.attention_kvcache(new, k_cache, v_cache, **right | changes)
    assert not torch.count_nonzero(k_cache)
    assert not torch.count_nonzero(v_cache)


@needs_extension
def test_a_step_counts_as_a_change_of_the_caches(seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, new = torch.randn(B, 1, HEADS, D), torch.randn(B, 1, HEADS_KV, D)
    for _ in range(2):
        leaf = q.clone().requires_grad_()
        out = flashtile.attention(leaf, k_cache, v_cache, layout="bshd")
        flashtile.attention_kvcache(q, k_cache, v_cache, k=new, v=new, cache_seqlens=3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@needs_extension
def test_a_step_is_visible(seed: int) -> None:
    k_cache, v_cache = caches(B, CAPACITY)
    q, new = torch.randn(B, 1, HEADS, D), torch.randn(B, 1, HEADS_KV, D)
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            flashtile.attention_kvcache(q, k_cache, v_cache, k=new, v=new, cache_seqlens=3)
        assert counter.get_total_flops() == B * 4 * HEADS * 4 * D
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            flashtile.attention_kvcache(q, k_cache, v_cache, k=new, v=new, cache_seqlens=3)
        assert "flashtile::forward" in {event.name for event in profile.events()}


# New rows and queries that are parts of the cache are read before anything is written


@pytest.mark.parametrize(
    "general", [{}, {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}], ids=["slice", "general"]
)
@pytest.mark.parametrize("which", ["v of v_cache", "k of k_cache", "swapped", "shifted", "q of k_cache"])
def test_new_rows_out_of_the_cache(which: str, general: dict, seed: int) -> None:
    k_cache, v_cache = torch.randn(2, 8, 2, D), torch.randn(2, 8, 2, D)
    q, k, v = torch.randn(2, 2, 2, D), torch.randn(2, 2, 2, D), torch.randn(2, 2, 2, D)
    if which == "v of v_cache":
        v = v_cache[:, 3:5]
    elif which == "k of k_cache":
        k = k_cache[:, 3:5]
    elif which == "swapped":
        k, v = v_cache[:, 3:5], k_cache[:, 3:5]
    elif which == "shifted":
        k, v = k_cache[:, 2:4], v_cache[:, 4:6]
    else:
        q = k_cache[:, 3:5]
    copies = [tensor.clone() for tensor in (q, k_cache, v_cache, k, v)]
    expected = flashtile.attention_kvcache(*copies[:3], k=copies[3], v=copies[4], cache_seqlens=3, **general)
    out = flashtile.attention_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=3, **general)
    assert torch.equal(k_cache, copies[1])
    assert torch.equal(v_cache, copies[2])
    assert torch.equal(out, expected)


def inference(*sizes: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(sizes)


REFUSED = {
    "k_cache of inference": ({"k_cache": inference(2, 8, 2, D)}, "k_cache: got an inference tensor"),
    "v_cache of inference": ({"v_cache": inference(2, 8, 2, D)}, "v_cache: got an inference tensor"),
    "one memory": ({"k_cache": None}, "v_cache: got the memory of k_cache; accepted: memory of its own"),
    "overlap": (
        {"v_cache": torch.zeros(400).as_strided((2, 8, 2, D), (64, 8, 8, 1))},
        r"v_cache: got strides \(64, 8, 8, 1\); accepted: memory of its own for every row",
    ),
    "repeated row": (
        {"cache_batch_idx": torch.tensor([1, 1], dtype=torch.int32)},
        r"cache_batch_idx: got row 1 at \[0, 0\] and at \[1, 0\]; accepted: each row appended to by one sequence only",
    ),
    "repeated page": (
        {"block_table": torch.tensor([[0], [0]], dtype=torch.int32)},
        r"block_table: got page 0 at \[0, 0\] and at \[1, 0\]; accepted: each page appended to by one sequence",
    ),
}


@pytest.mark.parametrize(
    "general", [{}, {"cache_leftpad": torch.zeros(2, dtype=torch.int32)}], ids=["slice", "general"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_append_writes_neither_cache(name: str, general: dict) -> None:
    changes, text = REFUSED[name]
    given = {"k_cache": torch.zeros(2, 8, 2, D), "v_cache": torch.zeros(2, 8, 2, D)} | changes
    if given["k_cache"] is None:
        given["k_cache"] = given["v_cache"]
    new = torch.ones(2, 1, 2, D)
    with pytest.raises(ValueError, match=f"^{text}"):
        flashtile.attention_kvcache(torch.ones(2, 1, 2, D), **given, k=new, v=new, cache_seqlens=3, **general)
    assert not torch.count_nonzero(given["k_cache"])
    assert not torch.count_nonzero(given["v_cache"])


def test_pages_may_be_shared_where_nothing_is_added(seed: int) -> None:
    k_pages, v_pages = torch.randn(5, 4, HEADS_KV, D), torch.randn(5, 4, HEADS_KV, D)
    table = torch.tensor([[3, 0], [3, 1]], dtype=torch.int32)
    q, k = torch.randn(2, 1, HEADS, D), torch.randn(2, 1, HEADS_KV, D)
    lengths = torch.tensor([4, 5], dtype=torch.int32)
    flashtile.attention_kvcache(q, k_pages, v_pages, k=k, v=k, cache_seqlens=lengths, block_table=table)
    assert torch.equal(k_pages[0, 0], k[0, 0])
    assert torch.equal(k_pages[1, 1], k[1, 0])


def test_caches_of_inference_are_written_in_inference_mode() -> None:
    k_cache, v_cache = inference(2, 8, 2, D), inference(2, 8, 2, D)
    new = torch.ones(2, 1, 2, D)
    with torch.inference_mode():
        for length in (3, 4):  # the second by the C++ executor, where there is one
            flashtile.attention_kvcache(new, k_cache, v_cache, k=new, v=new, cache_seqlens=length)
    assert k_cache[:, 3:5].eq(1).all()
    assert v_cache[:, 3:5].eq(1).all()
    with pytest.raises(ValueError, match="k_cache: got an inference tensor"):
        flashtile.attention_kvcache(new, k_cache, v_cache, k=new, v=new, cache_seqlens=5)
    assert k_cache[:, 5].eq(0).all()


def test_without_the_extension() -> None:
    """A package without C++ serves steps too."""
    lines = (
        "import sys; sys.modules['flashtile._C'] = None",
        "import torch, flashtile",
        "from flashtile.runtime import extension",
        "assert extension.missing() is not None",
        "cache, new = torch.zeros(2, 8, 2, 16), torch.ones(2, 1, 2, 16)",
        "out = flashtile.attention_kvcache(new, cache, cache.clone(), k=new, v=new, cache_seqlens=0)",
        "assert torch.equal(out, new) and torch.equal(cache[:, :1], new)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_unordered_queries_need_the_angles_of_one_position(seed: int) -> None:
    """Without causal and window all queries are turned at cache_seqlens, however many there are."""
    q, cos, sin = torch.randn(1, 9, 2, 8), torch.randn(20, 4), torch.randn(20, 4)
    new = {"k": torch.randn(1, 3, 2, 8), "v": torch.randn(1, 3, 2, 8), "cache_seqlens": 5}
    caches = torch.randn(1, 16, 2, 8), torch.randn(1, 16, 2, 8)

    def step(positions: int, **options) -> torch.Tensor:
        angles = {"rotary_cos": cos[:positions], "rotary_sin": sin[:positions]}
        return flashtile.attention_kvcache(q, *(cache.clone() for cache in caches), **new, **angles, **options)

    assert torch.equal(step(8), step(20))
    with pytest.raises(ValueError, match="rotary_cos: got 7 positions; accepted: at least 8"):
        step(7)
    with pytest.raises(ValueError, match="rotary_cos: got 8 positions; accepted: at least 14"):
        step(8, causal=True)
