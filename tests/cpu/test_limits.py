"""The edges of the number formats: biases and softcaps to the ends of float32, huge logits, lengths and windows to the
ends of 32 bits, index tensors that change after their check."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import ops
from flashtile.backends import cpu
from flashtile.backends.call import scalars_of
from flashtile.problem import MAX_LENGTH, AttentionArgs
from flashtile.runtime import extension
from flashtile.testing import Case

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import large_scores

ISAS = extension.instruction_sets() if extension.missing() is None else ("none",)
BACKENDS = [*(f"cpu {isa}" for isa in ISAS), "tiled", "reference"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, isa = request.param.partition(" ")
    if isa:
        monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    return name


# Large scores


@pytest.mark.parametrize("kind", large_scores.SMALLEST)
def test_the_smallest_number_in_every_key_is_no_mask(backend: str, kind: str, seed: int) -> None:
    large_scores.check_the_smallest_number_everywhere(backend, "cpu", kind)


def test_biases_over_the_whole_range_are_told_apart(backend: str, seed: int) -> None:
    large_scores.check_that_biases_are_told_apart(backend, "cpu")


@pytest.mark.parametrize("sink", large_scores.SINKS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sink_of_any_size(backend: str, sink: float, has_bias: bool, seed: int) -> None:
    large_scores.check_a_sink_of_any_size(backend, "cpu", sink, has_bias)


def test_alibi_slopes_of_any_size(backend: str, seed: int) -> None:
    large_scores.check_alibi_slopes_of_any_size(backend, "cpu")


@pytest.mark.parametrize("softcap", large_scores.LARGE_SOFTCAPS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_softcap_too_large_to_cap_anything(backend: str, softcap: float, has_bias: bool, seed: int) -> None:
    large_scores.check_a_softcap_too_large_to_cap_anything(backend, "cpu", softcap, has_bias)


@pytest.mark.parametrize("softcap", large_scores.SMALL_SOFTCAPS)
def test_a_softcap_too_small_to_leave_anything(backend: str, softcap: float, seed: int) -> None:
    large_scores.check_a_softcap_too_small_to_leave_anything(backend, "cpu", softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", large_scores.LARGE_VALUES)
def test_queries_and_keys_that_are_all_alike(backend: str, value: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_queries_and_keys_that_are_all_alike(backend, "cpu", value, dtype)


@pytest.mark.parametrize("scale", [1e6, 1e11])
def test_huge_logits(backend: str, scale: float, seed: int) -> None:
    large_scores.check_huge_logits(backend, "cpu", scale, seed)


@pytest.mark.parametrize("scale", large_scores.SMALL_SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_too_small_to_leave_anything(backend: str, scale: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_scale_too_small_to_leave_anything(backend, "cpu", scale, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_denormal_scale(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_denormal_scale(backend, "cpu", dtype)


@pytest.mark.parametrize(("scale", "softcap"), large_scores.SCALES_AND_SOFTCAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_scale_over_the_softcap(backend: str, scale: float, softcap: float, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_scale_over_the_softcap(backend, "cpu", scale, softcap, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_softcap_far_over_the_scale(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_a_softcap_far_over_the_scale(backend, "cpu", dtype)


@pytest.mark.parametrize("dropout_p", large_scores.LARGE_DROPOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_nearly_everything(backend: str, dtype: torch.dtype, dropout_p: float, seed: int) -> None:
    large_scores.check_dropout_of_nearly_everything(backend, "cpu", dtype, dropout_p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_of_a_probability_of_1(backend: str, dtype: torch.dtype, seed: int) -> None:
    large_scores.check_dropout_of_a_probability_of_1(backend, "cpu", dtype)


# Long sequences: keys that are one row in memory


def long_keys(length: int) -> torch.Tensor:
    return torch.randn(1, 1, 1, 16).expand(1, 1, length, 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [MAX_LENGTH, MAX_LENGTH - 100])
def test_the_last_keys_of_the_longest_sequence(
    isa: str, length: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window leaves the last six keys to the only query: the rest must cost nothing, and no position overflow."""
    monkeypatch.setenv("FLASHTILE_CPU_ISA", isa)
    q, k = torch.randn(1, 1, 1, 16), long_keys(length)
    out, lse = flashtile.attention(q, k, k, window=(5, 0), return_lse=True, backend="cpu")
    expected = flashtile.attention(q, k[:, :, -6:], k[:, :, -6:], return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), expected)


@pytest.mark.parametrize(
    ("reach", "expected"), [(2**30, 2**30), (2**31 - 1, 2**31 - 1), (2**31, -1), (2**40, -1), (-1, -1), (0, 0)]
)
def test_a_wide_window_is_dropped_only_where_it_hides_nothing(reach: int, expected: int) -> None:
    """Sequences of 1.5 * 2^30 keys exist, so a window of 2^30 must reach the kernels."""
    short = torch.zeros(1, 1, 1, 16)
    scalars = scalars_of(AttentionArgs(short, short, short, window_left=reach, window_right=reach))
    assert (scalars["window_left"], scalars["window_right"]) == (expected, expected)


@pytest.mark.parametrize("name", ["q", "k"])
def test_a_sequence_that_is_too_long(name: str) -> None:
    short, long = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 1).expand(1, 1, MAX_LENGTH + 1, 16)
    q, k = (long, short) if name == "q" else (short, long)
    for window in ((-1, -1), (5, 0)):
        with pytest.raises(flashtile.Unsupported, match=rf"{name}: got shape .*; accepted: sizes up to {MAX_LENGTH}"):
            flashtile.attention(q[..., :1], k[..., :1], k[..., :1], window=window)


def test_pages_for_too_many_keys() -> None:
    q, pages = torch.randn(1, 1, 1, 16), torch.randn(2, 2**16, 1, 16)
    table, used = torch.zeros(1, 2**15, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(flashtile.Unsupported, match=r"block_table: got 32768 pages of 65536 keys per sequence"):
        flashtile.attention_kvcache(q, pages, pages, cache_seqlens=used, block_table=table)
    flashtile.attention_kvcache(q, pages, pages, cache_seqlens=used, block_table=table[:, :100])


# Index tensors


@pytest.mark.parametrize("page", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_block_table_that_changes_after_its_check(page: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread. The result is that of some page; nothing is read or written outside."""
    inputs = Case(kind="paged", batch=3, page_size=7, backend="cpu").make(seed)
    table, check = inputs.args.block_table, cpu.check_values
    assert table is not None

    def check_and_change(args):  # type: ignore[no-untyped-def]
        spans = check(args)
        table.fill_(page)
        return spans

    monkeypatch.setattr(cpu, "check_values", check_and_change)
    kept, args = table.clone(), inputs.args
    out, lse = ops.forward(*args)
    table.copy_(kept)
    ops.backward(inputs.dout, inputs.dlse, *args, out, lse, [True, True, True, False, False])
    assert (table == page).all()
