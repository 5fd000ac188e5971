"""The mma.sync family: every row by the error rule, every option, lengths around its tiles, and rows that are aligned
to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from test_sm90 import FEATURES, assert_accurate

import flashtile
from flashtile.backends import cuda
from flashtile.kernels import families
from flashtile.kernels.arch import arch_named
from flashtile.kernels.assemble import clear_plans
from flashtile.kernels.families.fwd_sm80 import FwdSm80
from flashtile.kernels.spec import Features, PlanKey
from flashtile.testing import Case

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0")
DTYPES = (torch.bfloat16, torch.float16)
KERNEL = "fwd_sm80_kernel"
HEAD_DIMS = (*FwdSm80.head_dims, (8, 8), (40, 72), (136, 200), (192, 40))
ODD_HEAD_DIMS = ((1, 1), (33, 33), (50, 50), (63, 65), (100, 100), (127, 31), (130, 250), (255, 255))
LENGTHS = ((1, 1), (1, 700), (150, 300), (200, 64), (193, 1025), (1000, 513), (370, 700))
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


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    clear_plans()
    with families.forced("fwd_sm80"):
        yield
    cuda._arch.cache_clear()
    clear_plans()


def problem(number: int, head_dims: tuple[int, int], lengths: tuple[int, int], **options: object) -> tuple[Case, int]:
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    layout = ("bhsd", "bshd")[number // 2 % 2]
    case = Case(dtype=DTYPES[number % 2], layout=layout, backend="cuda", **sizes | options)  # type: ignore[arg-type]
    return case, number


@pytest.mark.parametrize("part", range(4))
def test_error_rule(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask meets every pair of head dims, each other feature one of them; lengths and dtypes take turns."""
    problems = []
    for start, (feature, options) in enumerate(ALL_FEATURES.items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if feature == "causal" or place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::4], KERNEL, monkeypatch)


@pytest.mark.smoke
@pytest.mark.parametrize("part", range(4))
def test_unaligned_rows(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head dims that are no multiples of 8, odd or even: rows of 2-byte and of 4-byte alignment."""
    problems = []
    for start, (_, options) in enumerate((ALL_FEATURES | OTHERS).items()):
        for place, head_dims in enumerate(ODD_HEAD_DIMS):
            if place == start % len(ODD_HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems[part::4], KERNEL, monkeypatch)


@pytest.mark.smoke
def test_scales_splits_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for start, (_, options) in enumerate(OTHERS.items()):
        for place, head_dims in enumerate(HEAD_DIMS):
            if place == start % len(HEAD_DIMS):
                problems.append(problem(place + start, head_dims, LENGTHS[(place + start) % len(LENGTHS)], **options))
    assert_accurate(problems, KERNEL, monkeypatch)


def test_lengths_around_a_tile_under_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is the one with fewer queries: some of its warps may have none."""
    lengths = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 320, 385)
    features = ("causal", "top left", "window and causal", "varlen", "window", "gqa")
    problems = []
    for place, seqlen in enumerate(lengths):
        for number, dim in enumerate((64, 128, 256), start=place):
            options = FEATURES[features[(number + place) % len(features)]]
            problems.append(problem(number, (dim, dim), (seqlen, (seqlen, 300, 700)[number % 3]), **options))
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.smoke
def test_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries of heads that share a KV head, with every feature; groups that do and do not divide a tile."""
    problems = []
    for number, feature in enumerate(name for name in ALL_FEATURES if name not in ("gqa", "swapped", "expanded")):
        heads, heads_kv = ((8, 2), (3, 1), (32, 8), (14, 2), (64, 1))[number % 5]
        lengths = ((1, 700), (5, 333), (16, 64), (40, 1025))[number % 4]
        options = ALL_FEATURES[feature] | {"heads": heads, "heads_kv": heads_kv}
        problems.append(problem(number, HEAD_DIMS[number % len(HEAD_DIMS)], lengths, **options))
    assert_accurate(problems, KERNEL, monkeypatch)


def taken_by(
    family: families.Family, arch: str, head_dims: Iterable[tuple[int, int]], grads: tuple[str, ...] | None = None
) -> list[tuple[int, int]]:
    """Of these head dims those that the family has a tile for, within the shared memory of an architecture."""
    named = arch_named(arch)
    assert named is not None
    keys = {dims: PlanKey("float16", "float16", *dims, Features(), named, grads) for dims in head_dims}
    return [dims for dims, key in keys.items() if family.refuse(key) is None]


def taken_for(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """From here on the GPU is taken for one of that architecture."""
    monkeypatch.setenv("FLASHTILE_ARCH", arch)
    cuda._arch.cache_clear()
    clear_plans()


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_120"])
def test_rows_of_other_architectures(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles, within their shared memory, compiled for the GPU at hand."""
    head_dims = taken_by(FwdSm80(), arch, HEAD_DIMS)
    taken_for(monkeypatch, arch)
    problems = []
    for start, feature in enumerate(("causal", "varlen", "everything", "paged")):
        for place, dims in enumerate(head_dims):
            if feature == "causal" or place % 5 == start:
                number = 2 * (place + start) + 1 if arch == "sm_75" else place + start  # Turing: float16 alone
                lengths = LENGTHS[(place + start) % len(LENGTHS)]
                problems.append(problem(number, dims, lengths, **ALL_FEATURES[feature]))
    assert_accurate(problems, KERNEL, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_many_heads(head_dim: int, causal: bool) -> None:
    """More blocks than fit the GPU at a time: against float64 on a few heads."""
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


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows and columns around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (256, 65, 81), (50, 77, 99), (33, 20, 65)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim + 40), float("nan"), device="cuda", dtype=torch.bfloat16)
            tensors.append(around[:, :, 35:-35, 20:-20].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=True, backend="cuda")).all()
