"""The Hopper family: what its instructions mean, bit by bit, and its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family_tests import (
    DTYPES,
    FEATURES,
    assert_accurate,
    assert_many_heads_are_right,
    feature_problems,
    jitter,
    needs_hopper,
)

import flashtile
from flashtile.backends import native
from flashtile.families import assemble
from flashtile.runtime import cache, driver
from flashtile.testing import Case

pytestmark = needs_hopper
PROOF = (Path(__file__).parent / "wgmma_proof.cuh").read_text()


def product(a: torch.Tensor, b: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """A B where B is transposed in shared memory and A in registers, else A B^T, by one warpgroup."""
    columns, slabs = (b.shape[1] if is_transposed else b.shape[0]), a.shape[1] // 64
    name = {torch.bfloat16: "bf16_t", torch.float16: "half_t"}[a.dtype]
    entry = f"flashtile::wgmma_proof_kernel<flashtile::{name}, {columns}, {slabs}, {str(is_transposed).lower()}>"
    compiled = cache.compile_cached(PROOF, "sm_90a", [entry])
    function = driver.load(compiled.cubin).function(compiled.symbols[entry])
    d = torch.full((64, columns), float("nan"), device="cuda")
    image = b""
    for tensor in (a, b):
        sizes, strides = (tensor.shape[1], tensor.shape[0], 1, 1), (2 * tensor.stride(0), 16, 16)
        tensor_map = driver.TensorMap(str(a.dtype).removeprefix("torch."), sizes, strides, (64, tensor.shape[0], 1, 1))
        image += tensor_map.encode(tensor.data_ptr())
    image = ctypes.create_string_buffer(image + d.data_ptr().to_bytes(8, "little"))
    slabs_b = -(-b.shape[1] // 64)
    shared_bytes = 2 * 64 * (64 * slabs + b.shape[0] * slabs_b) + 64
    function.set_shared_bytes(0, shared_bytes)
    function.launch(
        (1, 1, 1), (128, 1, 1), shared_bytes, torch.cuda.current_stream().cuda_stream, ctypes.addressof(image)
    )
    torch.cuda.synchronize()
    return d


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize("columns", [64, 80, 96, 128, 176, 192, 256])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_descriptors(dtype: torch.dtype, slabs: int, columns: int, is_transposed: bool) -> None:
    """Small integers: the product is exact, so that one wrong element is seen."""
    torch.manual_seed(slabs * columns)
    a = torch.randint(-4, 5, (64, 64 * slabs), device="cuda").to(dtype)
    b = torch.randint(-4, 5, (64 * slabs, columns) if is_transposed else (columns, 64 * slabs), device="cuda").to(dtype)
    expected = a.double() @ (b.double() if is_transposed else b.double().T)
    assert torch.equal(product(a, b, is_transposed).double(), expected)


# Kernels

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (8, 8), (40, 72), (136, 200))


@pytest.fixture(autouse=True)
def this_family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few queries take it, too."""
    monkeypatch.setenv("FLASHTILE_FAMILY", "fwd_sm90,fwd_simt,bwd_sm90,bwd_sm90_wide,bwd_simt")
    assemble.clear_plans()
    yield
    assemble.clear_plans()


@pytest.mark.long(35)
def test_error_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(feature_problems(FEATURES, HEAD_DIMS), "fwd_sm90_kernel", monkeypatch)


def test_lengths_around_a_tile_under_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile is the one with fewer queries: its consumers may have none, or some."""
    lengths = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 321, 385, 449)
    features = ("causal", "top left", "window and causal", "varlen", "window", "gqa")
    problems = []
    for place, seqlen in enumerate(lengths):
        for number, head_dim in enumerate((64, 96, 128, 256), start=place):
            sizes = {
                "seqlen_q": seqlen,
                "seqlen_k": (seqlen, 300, 700)[number % 3],
                "head_dim": head_dim,
                "head_dim_v": head_dim,
            }
            options = FEATURES[features[(number + place) % len(features)]]
            problems.append(
                (
                    Case(
                        dtype=DTYPES[number % 2], layout=("bhsd", "bshd")[place % 2], backend="cuda", **sizes | options
                    ),
                    number,
                )
            )
    assert_accurate(problems, "fwd_sm90_kernel", monkeypatch)


def packed_cases() -> list[tuple[Case, int]]:
    """Few queries of heads that share a KV head, with every feature; groups that do and do not divide a tile take
    turns."""
    found = []
    for number, feature in enumerate(name for name in FEATURES if name not in ("gqa", "swapped", "expanded")):
        heads, heads_kv = ((8, 2), (3, 1), (32, 8), (14, 2), (64, 1))[number % 5]
        seqlen_q, seqlen_k = ((1, 700), (5, 333), (16, 64), (40, 1025))[number % 4]
        head_dim, head_dim_v = HEAD_DIMS[number % len(HEAD_DIMS)]
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim_v}
        options = FEATURES[feature] | {"heads": heads, "heads_kv": heads_kv}
        found.append(
            (
                Case(
                    dtype=DTYPES[number % 2],
                    layout=("bhsd", "bshd")[number // 2 % 2],
                    backend="cuda",
                    **sizes | options,
                ),
                number,
            )
        )
    return found


@pytest.mark.smoke
def test_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_accurate(packed_cases(), "false, true>, flashtile::Mask", monkeypatch)


def test_p_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that keep P there, and send O from there where its rows have no neighbours: dense, used lengths, other
    head dims, GQA."""
    features = ("plain", "causal", "window", "used keys", "padded", "sinks", "swapped", "expanded")
    problems = []
    for number, (feature, head_dim) in enumerate(
        (feature, head_dim) for feature in features for head_dim in (96, 72, 128, 120)
    ):
        sizes = {
            "seqlen_q": (170, 370, 700, 1340)[number % 4],
            "seqlen_k": (700, 333, 1)[number % 3],
            "heads": 4,
            "heads_kv": 2,
        }
        sizes |= {"head_dim": head_dim, "head_dim_v": head_dim - 8 * (number % 2)}
        layout = ("bhsd", "bshd")[number // 2 % 2]
        problems.append(
            (Case(dtype=DTYPES[number % 2], layout=layout, backend="cuda", **FEATURES[feature] | sizes), number)
        )
    assert_accurate(problems, "192, 128, 2, true, true, true, false>", monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_many_heads(head_dim: int, causal: bool) -> None:
    """More tiles than blocks, so that each block takes several: against float64 on a few heads."""
    assert_many_heads_are_right(head_dim, causal)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_jitter_changes_nothing(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of random length before every barrier, copy and product: the same bits over 200 runs, dense and packed."""
    # Several tiles of work for each block, so that orders and stages are used again
    q, k, v = (torch.randn(4, 64, 300, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    packed = [x.transpose(1, 2).reshape(1200, 64, head_dim) for x in (q, k, v)]
    cu = torch.tensor([0, 333, 340, 1200], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 0, 300, 1200], dtype=torch.int32, device="cuda")  # queries without keys

    def results() -> list[torch.Tensor]:
        dense = [flashtile.attention(q, k, v, causal=causal) for causal in (False, True)]
        return [*dense, *(flashtile.attention_varlen(*packed, cu, keys, causal=True) for keys in (cu, cu_k))]

    expected = results()
    functions = jitter(monkeypatch)
    with native.python_only():
        for _ in range(200):
            assert all(torch.equal(one, other) for one, other in zip(results(), expected, strict=True))
    assert functions


@pytest.mark.smoke
def test_nothing_behind_the_tails_is_read() -> None:
    """Rows around q, k and v are NaN."""
    for head_dim, seqlen_q, seqlen_k in ((64, 100, 130), (128, 257, 300), (256, 65, 81)):
        tensors = []
        for seqlen in (seqlen_q, seqlen_k, seqlen_k):
            around = torch.full((2, 3, seqlen + 70, head_dim), float("nan"), device="cuda", dtype=torch.bfloat16)
            tensors.append(around[:, :, 35:-35].normal_())
        assert torch.isfinite(flashtile.attention(*tensors, causal=True, backend="cuda")).all()


@pytest.mark.smoke
def test_refusals_name_their_reason() -> None:
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert "fwd_sm90_kernel: tile" in str(flashtile.explain(q, k, v))
    queries = torch.randn(1, 8, 3, 64, device="cuda", dtype=torch.bfloat16)
    assert "tile 64 queries x 128 keys, 8 warps, the queries of 4 heads of a KV head in one tile" in str(
        flashtile.explain(queries, k, v)
    )
    assert "not fwd_sm90: a scale that is not positive" in str(flashtile.explain(q, k, v, scale=-1.0))
    assert "not fwd_sm90: float32 is not among its dtypes" in str(flashtile.explain(q.float(), k.float(), v.float()))
    odd = [torch.randn(1, 2, 64, 63, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    assert "not fwd_sm90: rows that are not multiples of 16 bytes" in str(flashtile.explain(*odd))
