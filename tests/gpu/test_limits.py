"""Both GPU engines at the edge of float32 and of 32-bit positions."""

from __future__ import annotations

import math
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
def test_a_window_of_a_billion_keys(backend: str, seed: int) -> None:
    """Of 1.5 * 2^30 keys, which are one row in memory. A mask keeps four: two that the window hides, and its first and
    last. The sum of all would have no digits left in float32."""
    num_keys, left = 3 << 29, 1 << 30
    q, k = torch.randn(1, 1, 1, 16, device="cuda"), torch.randn(1, 1, 1, 16, device="cuda")
    long, first = k.expand(1, 1, num_keys, 16), num_keys - 1 - left
    mask = torch.zeros(1, 1, 1, num_keys, dtype=torch.bool, device="cuda")
    mask[..., [0, first - 1, first, num_keys - 1]] = True
    options = {"mask": mask, "return_lse": True, "backend": backend}
    score = (q.double() * k.double()).sum().item() / 4
    for window, num_kept in (((left, 0), 2), ((left + 1, 0), 3), ((left - 1, 0), 1)):
        out, lse = flashtile.attention(q, long, long, window=window, **options)
        torch.testing.assert_close(out, k, rtol=1e-5, atol=1e-5)
        assert lse.item() == pytest.approx(score + math.log(num_kept), abs=1e-4)
