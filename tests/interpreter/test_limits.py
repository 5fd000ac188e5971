"""The Triton kernels on the CPU at the edge of float32 and of 32-bit positions. Runs only with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.backends import triton as backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import large_scores

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by the number of tiles."""
    monkeypatch.setattr(backend, "tile_config", lambda *_: backend.Config(64, 64, 4, 1))


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_the_smallest_number_in_every_key_is_no_mask(kind: str, seed: int) -> None:
    large_scores.check_the_smallest_number_everywhere("triton", "cpu", kind)


def test_biases_over_the_whole_range_are_told_apart(seed: int) -> None:
    large_scores.check_that_biases_are_told_apart("triton", "cpu")


@pytest.mark.parametrize(("sink", "has_bias"), [(2.4e38, False), (large_scores.LARGEST, True), (-2.4e38, False)])
def test_a_sink_of_any_size(sink: float, has_bias: bool, seed: int) -> None:
    large_scores.check_a_sink_of_any_size("triton", "cpu", sink, has_bias)


def test_alibi_slopes_of_any_size(seed: int) -> None:
    large_scores.check_alibi_slopes_of_any_size("triton", "cpu")


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_softcap_too_large_to_cap_anything(has_bias: bool, seed: int) -> None:
    large_scores.check_a_softcap_too_large_to_cap_anything("triton", "cpu", 3e38, has_bias)


@pytest.mark.parametrize("softcap", [1e-38, 1e-60])
def test_a_softcap_too_small_to_leave_anything(softcap: float, seed: int) -> None:
    large_scores.check_a_softcap_too_small_to_leave_anything("triton", "cpu", softcap)


@pytest.mark.parametrize("value", [133120.0, 2.0**50])
def test_queries_and_keys_that_are_all_alike(value: float, seed: int) -> None:
    large_scores.check_queries_and_keys_that_are_all_alike("triton", "cpu", value, torch.float32, seqlen=70)


def test_huge_logits(seed: int) -> None:
    large_scores.check_huge_logits("triton", "cpu", 1e11, seed)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-44, torch.float32), (1e-46, torch.float16), (1e-300, torch.float32)])
def test_a_scale_too_small_to_leave_anything(scale: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_scale_too_small_to_leave_anything("triton", "cpu", scale, dtype)


def test_a_denormal_scale(seed: int) -> None:
    large_scores.check_a_denormal_scale("triton", "cpu", torch.float32)


@pytest.mark.parametrize(("scale", "softcap"), [(1e20, 1e-25), (1e38, 0.5), (-1e20, 1e-25)])
def test_a_scale_over_the_softcap(scale: float, softcap: float, seed: int) -> None:
    large_scores.check_a_scale_over_the_softcap("triton", "cpu", scale, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_softcap_far_over_the_scale(dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_softcap_far_over_the_scale("triton", "cpu", dtype)


@pytest.mark.parametrize("dropout_p", [0.99, 0.99999])
def test_dropout_of_nearly_everything(dropout_p: float, seed: int) -> None:
    large_scores.check_dropout_of_nearly_everything("triton", "cpu", torch.float16, dropout_p)


def test_dropout_of_a_probability_of_1(seed: int) -> None:
    large_scores.check_dropout_of_a_probability_of_1("triton", "cpu", torch.float16)


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_the_widest_windows_hide_nothing(causal: bool | str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions plus such a window do not fit into 32 bits."""
    monkeypatch.setattr(backend, "tile_config", lambda *_: backend.Config(32, 32, 4, 1))
    q, k, v = (torch.randn(1, 1, rows, 16, requires_grad=True) for rows in (70, 40, 40))
    results = []
    for window in ((2**31 - 1, 2**31 - 1), (-1, -1)):
        out = flashtile.attention(q, k, v, causal=causal, window=window, backend="triton")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1])
