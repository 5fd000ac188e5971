"""Shared parts of the tests of kernel families: features and problems, how they are judged, and kernels with pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import check, drawn, precompile

import flashtile
from flashtile import families
from flashtile.backends import cuda, executor, native
from flashtile.families.assemble import clear_plans
from flashtile.plans.arch import arch_named
from flashtile.plans.plan import Step
from flashtile.plans.spec import Features, PlanKey
from flashtile.runtime import cache, driver
from flashtile.testing import Case

needs_ampere = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0")
needs_hopper = pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)
DTYPES = (torch.bfloat16, torch.float16)
LENGTHS = ((1, 1), (1, 700), (150, 300), (200, 64), (193, 1025), (1000, 513), (370, 700))
FEATURES: dict[str, dict] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top left": {"causal": "top_left"},
    "window": {"window": (70, 30)},
    "window and causal": {"window": (150, 0), "causal": "bottom_right"},
    "gqa": {"heads": 6, "heads_kv": 2, "causal": "bottom_right"},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
    "mask": {"mask": "bhqk"},
    "bias": {"bias": "hqk", "causal": "bottom_right"},
    "bias in float32": {"bias": "bk", "is_bias_float32": True},
    "alibi": {"alibi": "bh", "causal": "bottom_right"},
    "sinks": {"has_sinks": True, "window": (20, 0)},
    "dropout": {"dropout_p": 0.2, "causal": "bottom_right"},
    "varlen": {"kind": "varlen", "batch": 5, "causal": "bottom_right"},
    "varlen without a band": {"kind": "varlen", "batch": 3, "heads": 4},
    "used keys": {"kind": "used", "batch": 4, "causal": "bottom_right"},
    "padded": {"kind": "padded", "batch": 4},
    "everything": {
        "kind": "varlen",
        "batch": 3,
        "bias": "bhqk",
        "mask": "hqk",
        "alibi": "bh",
        "has_sinks": True,
        "dropout_p": 0.1,
        "softcap": 3.0,
    },
    "swapped": {"memory": "swapped", "heads": 4},
    "expanded": {"memory": "expanded", "heads": 4},
}
PAGED: dict[str, dict] = {
    "paged": {"kind": "paged", "batch": 3, "causal": "bottom_right"},
    "single rows as pages": {"kind": "paged", "batch": 3, "page_size": 1},
    "pages of 48": {"kind": "cache", "batch": 4, "page_size": 48, "window": (90, 0)},
    "paged with options": {"kind": "paged", "page_size": 64, "alibi": "h", "softcap": 2.0, "has_sinks": True},
}
ALL_FEATURES = FEATURES | PAGED
OTHERS: dict[str, dict] = {
    "negative scale": {"scale": -0.3, "causal": "bottom_right"},
    "scale of zero": {"scale": 0.0, "window": (40, 0)},
    "negative scale, softcap": {"scale": -0.2, "softcap": 2.0},
    "float32 results": {"is_out_float32": True, "causal": "bottom_right"},
    "splits": {"num_splits": 3, "causal": "bottom_right"},
    "splits with sinks": {"num_splits": 5, "has_sinks": True},
    "splits with a bias": {"num_splits": 4, "bias": "hqk"},
    "huge": {"values": "huge", "causal": "bottom_right"},
    "rising": {"values": "rising"},
    "dominant": {"values": "dominant"},
    "hidden keys": {"values": "masked_keys", "mask": "bk"},
    "sliced": {"memory": "sliced"},
    "offset": {"memory": "offset", "causal": "bottom_right"},
}


def forced(*names: str) -> Any:
    """A fixture for the tests of a file: calls take these families, whatever their speed."""

    @pytest.fixture(autouse=True, name="forced")
    def fixture() -> Iterator[None]:
        with families.forced(*names):
            yield

    return fixture


def problem(number: int, head_dims: tuple[int, int], lengths: tuple[int, int], **options: object) -> tuple[Case, int]:
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    layout = ("bhsd", "bshd")[number // 2 % 2]
    case = Case(dtype=DTYPES[number % 2], layout=layout, backend="cuda", **sizes | options)  # type: ignore[arg-type]
    return case, number


def feature_problems(
    features: Iterable[str], head_dims: Sequence[tuple[int, int]], **options: object
) -> list[tuple[Case, int]]:
    """The common features meet every pair of head dims, others a third of them; lengths, dtypes and layouts take
    turns."""
    found = []
    for start, feature in enumerate(features):
        for place, dims in enumerate(head_dims):
            if feature in ("plain", "causal", "varlen") or place % 3 == start % 3:
                number = place + start
                found.append(problem(number, dims, LENGTHS[number % len(LENGTHS)], **FEATURES[feature] | options))
    return found


def taken_by(
    family: families.Family, arch: str, head_dims: Iterable[tuple[int, int]], grads: tuple[str, ...] | None = None
) -> list[tuple[int, int]]:
    """Returns those of these head dims that the family has a tile for, within the shared memory of an architecture."""
    named = arch_named(arch)
    assert named is not None
    keys = {dims: PlanKey("float16", "float16", *dims, Features(), named, grads) for dims in head_dims}
    return [dims for dims, key in keys.items() if family.refuse(key) is None]


def taken_for(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Takes the GPU for one of that architecture from here on."""
    monkeypatch.setenv("FLASHTILE_ARCH", arch)
    cuda._arch.cache_clear()
    clear_plans()


def assert_accurate(
    problems: list[tuple[Case, int]], kernel: str, monkeypatch: pytest.MonkeyPatch, is_forward: bool = True
) -> None:
    """The problems that are drawn, by the error rule, and by a kernel whose name has these words."""
    problems = drawn(problems)
    precompile(problems, monkeypatch, is_forward)
    launched, found, real = [], [], executor.launch

    def launch(step: Step, *rest: object) -> None:
        launched.append(step.entry)
        real(step, *rest)

    monkeypatch.setattr(executor, "launch", launch)
    with native.python_only():
        for case, seed in problems:
            launched.clear()
            try:
                check(case, seed, is_forward)
            except AssertionError as error:
                found.append(f"{case}.make({seed}): {error}")
            assert any(kernel in entry for entry in launched), (case, launched)
    assert found == []


def random_tensors(seqlen_q: int, seqlen_k: int, head_dim: int, heads_kv: int = 4) -> list[torch.Tensor]:
    """q, k, v and the gradient of out."""
    sizes = ((4, seqlen_q), (heads_kv, seqlen_k), (heads_kv, seqlen_k), (4, seqlen_q))
    return [torch.randn(2, heads, rows, head_dim, device="cuda", dtype=torch.bfloat16) for heads, rows in sizes]


def views(seqlen_q: int, seqlen_k: int, make: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mask or bias of (2, 4, seqlen_q, seqlen_k) in every way that memory may hold it."""
    return {
        "whole": make(2, 4, seqlen_q, seqlen_k),
        "all heads": make(2, 1, seqlen_q, seqlen_k),
        "all batches": make(1, 4, seqlen_q, seqlen_k),
        "padding": make(2, 1, 1, seqlen_k),
        "keys": make(1, 1, 1, seqlen_k),
        "heads and keys": make(1, 4, 1, seqlen_k),
        "queries": make(2, 1, seqlen_q, 1),
        "one": make(1, 1, 1, 1),
        "every other key": make(1, 4, seqlen_q, 2 * seqlen_k)[..., ::2],
        "transposed": make(2, 1, seqlen_k, seqlen_q).transpose(-1, -2),
        "rows apart": make(1, 2, seqlen_q, seqlen_k + 24)[:, :1, :, :seqlen_k],
        "not on a boundary": make(1, 1, seqlen_q, seqlen_k + 1)[..., 1:],
        "heads of stride 0": make(2, 1, seqlen_q, seqlen_k).expand(2, 4, seqlen_q, seqlen_k),
    }


def masks_by_tiles(seqlen_q: int, seqlen_k: int) -> dict[str, torch.Tensor]:
    """Masks whose tiles are all true, all false or mixed; hidden rows, keys, and blocks of keys."""
    i, j = torch.arange(seqlen_q, device="cuda")[:, None], torch.arange(seqlen_k, device="cuda")
    masks = {
        "all": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda"),
        "none": torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda"),
        "blocks": (i // 64 + j // 64) % 2 == 0,
        "documents": i // 100 == j // 130,
        "rows": (i % 3 != 0) & (i < 200),
        "keys": (j % 128 < 64) & (j != 17),
        "half of the keys": j < seqlen_k // 2,
        "one key": j == 300,
    }
    return {
        name: mask.expand(1, 1, *torch.broadcast_shapes(mask.shape[-2:], (1, seqlen_k))) for name, mask in masks.items()
    }


def bias_that_masks(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Returns a bias of (1, 4, seqlen_q, seqlen_k): -inf in places, in rows, in blocks of keys; large finite values."""
    bias = torch.randn(1, 4, seqlen_q, seqlen_k, device="cuda")
    bias.masked_fill_(torch.rand_like(bias) < 0.3, float("-inf"))
    bias[..., 128:256] = float("-inf")
    bias[:, 1, 70:140] = float("-inf")
    bias[:, 2] *= 1000.0
    bias[:, 3, :, 5] = -1e38
    return bias


def assert_many_heads_are_right(head_dim: int, causal: bool) -> None:
    """More tiles than fit the GPU at a time: against float64 on a few heads."""
    q, k, v = (torch.randn(3, 40, 1500, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = flashtile.attention(q, k, v, causal=causal, return_lse=True, backend="cuda")
    for batch, head in ((0, 0), (1, 17), (2, 39)):
        scores = q[batch, head].double() @ k[batch, head].double().T * head_dim**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        torch.testing.assert_close(lse[batch, head].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            out[batch, head].double(), scores.softmax(-1) @ v[batch, head].double(), rtol=2e-2, atol=1e-2
        )


def jitter(monkeypatch: pytest.MonkeyPatch) -> dict[str, driver.Function]:
    """Makes kernels pause for a random time before every barrier, copy and product. Returns those that ran."""
    functions: dict[str, driver.Function] = {}

    def jittered(unit: str, entry: str, arch: str) -> driver.Function:
        if unit not in functions:
            compiled = cache.compile_cached(unit, arch, [entry], ["FT_JITTER"])
            functions[unit] = driver.load(compiled.cubin).function(compiled.symbols[entry])
        return functions[unit]

    monkeypatch.setattr(executor, "function", jittered)
    return functions
