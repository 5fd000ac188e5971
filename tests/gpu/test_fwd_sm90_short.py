"""The Hopper forward for short sequences: every tile by the error rule, every option that it takes, lengths around its
tiles, more items than blocks, and pauses."""

from __future__ import annotations

import pytest
import torch
from family_tests import FEATURES, assert_accurate, forced, jitter, needs_hopper, problem

import flashtile
from flashtile import families
from flashtile.backends import native
from flashtile.families.assemble import clear_plans
from flashtile.lab.check import mutants
from flashtile.testing import Case

pytestmark = needs_hopper
forced_families = forced("fwd_sm90_short")
HEAD_DIMS = ((64, 64), (32, 32), (8, 8), (40, 64), (64, 24), (128, 128), (104, 128))
TAKEN = ("plain", "causal", "top left", "window", "window and causal", "gqa", "sinks", "swapped")
VALUES: dict[str, dict] = {
    "huge": {"values": "huge", "causal": "bottom_right"},
    "huge, one tile": {"values": "huge"},
    "rising": {"values": "rising"},
    "dominant": {"values": "dominant"},
    "no keys": {"seqlen_k": 0},
}


def option_problems() -> list[tuple[Case, int]]:
    """Sequences of several key tiles and of one; head dims and dtypes take turns."""
    lengths = ((150, 300), (700, 513), (1, 1000), (370, 1024), (300, 260), (65, 77), (197, 197), (64, 49))
    options = {name: FEATURES[name] for name in TAKEN} | VALUES
    problems = []
    for start, changes in enumerate(options.values()):
        for place, size in enumerate(lengths):
            if place % 3 == start % 3:
                head_dims = HEAD_DIMS[(place // 3 + start) % len(HEAD_DIMS)]
                problems.append(problem(place + start, head_dims, size, **changes))
    return problems


def length_problems() -> list[tuple[Case, int]]:
    """Every tile that holds all keys, full and with one key."""
    found = []
    for number, keys in enumerate(
        (1, 63, 64, 65, 80, 81, 96, 97, 112, 113, 128, 129, 144, 145, 160, 161, 176, 177, 208)
    ):
        found.append(problem(number, ((64, 64), (32, 32))[number % 2], (70, keys), heads=4, heads_kv=2))
    return found


def bias_problems() -> list[tuple[Case, int]]:
    """A bias of every broadcast shape, with keys of one tile."""
    lengths = ((65, 77), (197, 197), (64, 49), (300, 208), (130, 100))
    found = []
    for number, bias in enumerate(("hqk", "bhqk", "qk", "bk", "hqk", "bhqk")):
        options = {"bias": bias, "has_sinks": number % 2 == 1, "heads": 4, "heads_kv": 2, "batch": 3}
        found.append(problem(number, HEAD_DIMS[number % 5], lengths[number % 5], **options))
    return found


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(option_problems(), "fwd_sm90_short_kernel", monkeypatch)


def test_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(length_problems(), "fwd_sm90_short_kernel", monkeypatch)


def test_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(bias_problems(), "fwd_sm90_short_kernel", monkeypatch)


Result = tuple[torch.Tensor, torch.Tensor]  # out, lse


def compute(queries: int, keys: int, head_dim: int, option: str) -> tuple[Result, Result]:
    """By the kernel and in float64. Two heads share a KV head. There are more items than blocks, whose shares begin and
    end inside a head."""
    batch = 400 if queries < 100 else 23
    shapes = ((batch, 12, queries, head_dim), (batch, 6, keys, head_dim), (batch, 6, keys, head_dim))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    if option == "rising":  # by more than the kernel leaves to the probabilities
        k *= torch.linspace(0.05, 8.0, keys, device="cuda", dtype=k.dtype)[:, None]
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * head_dim**-0.5
    bias = None
    if option == "bias":
        bias = torch.randn(1, 12, queries, keys, device="cuda", dtype=torch.bfloat16)
        bias[:, 3, :, ::3] = bias[:, 4, 5] = float("-inf")
        scores += bias.double()
    if option == "causal":
        hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    found = flashtile.attention(q, k, v, bias=bias, causal=option == "causal", return_lse=True, backend="cuda")
    expected = scores.softmax(-1).nan_to_num() @ v.double().repeat_interleave(2, 1)
    return found, (expected, scores.logsumexp(-1))


def is_close(found: Result, expected: Result) -> bool:
    out, lse = (
        torch.isclose(found[0].double(), expected[0], rtol=2e-2, atol=1e-2),
        torch.isclose(found[1].double(), expected[1], rtol=1e-5, atol=1e-4),
    )
    return bool(out.all()) and bool(lse.all())


@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "option"),
    [
        (49, 49, 32, ""),
        (64, 64, 32, "bias"),
        (197, 197, 64, ""),
        (197, 197, 64, "bias"),
        (300, 77, 64, ""),
        (128, 100, 64, ""),
        (512, 512, 64, ""),
        (500, 500, 64, "causal"),
        (700, 700, 64, "causal"),
        (300, 500, 128, "causal"),
    ],
)
def test_many_items(queries: int, keys: int, head_dim: int, option: str) -> None:
    assert is_close(*compute(queries, keys, head_dim, option))


@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "head_dim", "option"),
    [
        (64, 12, 197, 197, 64, ""),  # ViT
        (64, 12, 197, 197, 64, "bias"),  # BEiT
        (256, 6, 49, 49, 32, "bias"),  # Swin
        (256, 6, 64, 64, 32, ""),
        (4, 10, 2048, 77, 64, ""),  # cross attention
        (16, 12, 512, 512, 64, ""),  # BERT
        (8, 16, 512, 512, 128, "causal"),
    ],
)
def test_calls_take_it_by_default(batch: int, heads: int, queries: int, keys: int, head_dim: int, option: str) -> None:
    """backend=None: right, and bit for bit what the family gives by name."""
    q, k, v = (
        torch.randn(batch, heads, rows, head_dim, device="cuda", dtype=torch.bfloat16) for rows in (queries, keys, keys)
    )
    bias = torch.randn(1, heads, queries, keys, device="cuda", dtype=torch.bfloat16) if option == "bias" else None
    # Deterministic calls take fwd_sm90: a row must not depend on the batch
    options = {"bias": bias, "causal": option == "causal", "deterministic": False}
    with families.forced():
        assert "fwd_sm90_short_kernel" in str(flashtile.explain(q, k, v, **options))
        found = flashtile.attention(q, k, v, return_lse=True, **options)
    clear_plans()
    by_name = flashtile.attention(q, k, v, return_lse=True, backend="cuda", **options)
    assert all(torch.equal(one, other) for one, other in zip(found, by_name, strict=True))
    scores = q.double() @ k.double().transpose(-1, -2) * head_dim**-0.5
    scores += 0.0 if bias is None else bias.double()
    if option == "causal":
        hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    assert is_close(found, (scores.softmax(-1) @ v.double(), scores.logsumexp(-1)))


@pytest.mark.parametrize(
    ("name", "queries", "keys", "head_dim", "option"),
    [
        ("fwd_sm90_short_rescale", 300, 400, 64, "rising"),
        ("fwd_sm90_short_tail", 197, 197, 64, ""),
        ("fwd_sm90_short_mask_offset", 300, 300, 64, "causal"),
        ("fwd_sm90_short_gqa_head", 49, 49, 32, ""),
        ("fwd_sm90_short_item", 130, 100, 64, ""),
        ("fwd_sm90_short_bias_row", 64, 64, 32, "bias"),
    ],
)
def test_faults_are_seen(name: str, queries: int, keys: int, head_dim: int, option: str) -> None:
    with mutants.broken(name):
        assert not is_close(*compute(queries, keys, head_dim, option))


@pytest.mark.parametrize(("keys", "head_dim"), [(60, 32), (200, 64), (400, 64)])
def test_jitter_changes_nothing(keys: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product: the same bits over 50 runs."""
    q, k, v = (torch.randn(4, 64, keys, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    short = q[:, :, : keys // 3]

    def results() -> list[torch.Tensor]:
        return [flashtile.attention(queries, k, v, causal=keys > 208, backend="cuda") for queries in (q, short)]

    expected = results()
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(50):
            assert all(torch.equal(one, other) for one, other in zip(results(), expected, strict=True))
    assert functions


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k, causal in ((64, 100, 197, False), (32, 49, 49, False), (64, 257, 300, True)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            tensors.append(around[:, :, 35:-35].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=causal, backend="cuda")).all()


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    long = [torch.randn(1, 2, 1100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    clear_plans()
    with families.forced():
        assert "not fwd_sm90_short: over 1024 keys" in str(flashtile.explain(*long))
        assert "not fwd_sm90_short: softcap" in str(flashtile.explain(q, k, v, softcap=1.0))
        mask = torch.ones(300, 300, dtype=torch.bool, device="cuda")
        assert "not fwd_sm90_short: boolean masks" in str(flashtile.explain(q, k, v, mask=mask))
