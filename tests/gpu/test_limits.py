"""Both GPU engines at the edge of float32 and of 32-bit positions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flashtile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import large_scores

BACKENDS = ["cuda", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", large_scores.SMALLEST)
def test_the_smallest_number_in_every_key_is_no_mask(backend: str, kind: str, seed: int) -> None:
    large_scores.check_the_smallest_number_everywhere(backend, "cuda", kind)


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_over_the_whole_range_are_told_apart(backend: str, seed: int) -> None:
    large_scores.check_that_biases_are_told_apart(backend, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", large_scores.SINKS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sink_of_any_size(backend: str, sink: float, has_bias: bool, seed: int) -> None:
    large_scores.check_a_sink_of_any_size(backend, "cuda", sink, has_bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_slopes_of_any_size(backend: str, seed: int) -> None:
    large_scores.check_alibi_slopes_of_any_size(backend, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", large_scores.LARGE_SOFTCAPS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_softcap_too_large_to_cap_anything(backend: str, softcap: float, has_bias: bool, seed: int) -> None:
    large_scores.check_a_softcap_too_large_to_cap_anything(backend, "cuda", softcap, has_bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", large_scores.SMALL_SOFTCAPS)
def test_a_softcap_too_small_to_leave_anything(backend: str, softcap: float, seed: int) -> None:
    large_scores.check_a_softcap_too_small_to_leave_anything(backend, "cuda", softcap)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", large_scores.LARGE_VALUES)
def test_queries_and_keys_that_are_all_alike(backend: str, value: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_queries_and_keys_that_are_all_alike(backend, "cuda", value, dtype)


@pytest.mark.parametrize("scale", [1e6, 1e11])
def test_huge_logits(scale: float, seed: int) -> None:
    large_scores.check_huge_logits("cuda", "cuda", scale, seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", large_scores.SMALL_SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_too_small_to_leave_anything(backend: str, scale: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_scale_too_small_to_leave_anything(backend, "cuda", scale, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_denormal_scale(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_denormal_scale(backend, "cuda", dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("scale", "softcap"), large_scores.SCALES_AND_SOFTCAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_over_the_softcap(backend: str, scale: float, softcap: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_scale_over_the_softcap(backend, "cuda", scale, softcap, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_softcap_far_over_the_scale(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_softcap_far_over_the_scale(backend, "cuda", dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout_p", large_scores.LARGE_DROPOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_nearly_everything(backend: str, dtype: torch.dtype, dropout_p: float, seed: int) -> None:
    large_scores.check_dropout_of_nearly_everything(backend, "cuda", dtype, dropout_p)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_a_probability_of_1(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_dropout_of_a_probability_of_1(backend, "cuda", dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_a_billion_keys(backend: str, seed: int) -> None:
    """Over 2^30 queries, one row in memory, and 64 keys: the window hides keys from the last queries alone."""
    num_keys, left = 64, 1 << 30
    num_queries = left + num_keys + 1
    q, k = torch.randn(1, 1, 1, 16, device="cuda"), torch.randn(1, 1, num_keys, 16, device="cuda")
    v = torch.randn(1, 1, num_keys, 1, device="cuda")
    long = q.expand(1, 1, num_queries, 16)
    options = {"causal": "top_left", "return_lse": True}
    out, lse = flashtile.attention(long, k, v, window=(left, 0), backend=backend, **options)
    # Query left + i of these sees what query num_keys + i of few sees through a short window
    few = q.expand(1, 1, 2 * num_keys + 1, 16).double()
    options |= {"window": (num_keys, 0), "backend": "reference"}
    ref, ref_lse = flashtile.attention(few, k.double(), v.double(), **options)
    # The first sees all keys, each other one fewer, the last none
    assert torch.equal(ref_lse[0, 0, num_keys:].isinf().nonzero().flatten(), torch.tensor([num_keys], device="cuda"))
    torch.testing.assert_close(out[:, :, left:].double(), ref[:, :, num_keys:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:, :, left:].double(), ref_lse[:, :, num_keys:], rtol=1e-5, atol=1e-5)
