"""Packed sequences without max_seqlen: counts of tiles and blocks stay below 2^31 whatever the number of sequences, and
masks, biases and pages bound the lengths. All on Hopper but for what every GPU has."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from conftest import check
from torch import Tensor

import flashtile
from flashtile.testing import Case


class Packed(NamedTuple):
    """Equal sequences."""

    batch: int
    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = {}  # noqa: RUF012
    has_backward: bool = False


# As (sequences) x (tiles of the total) x heads these have 2^31 blocks or tiles and more
MANY = {
    "fwd_sm90": Packed(16384, 32, 64, 64),
    "fwd_sm90 under a band": Packed(16384, 32, 64, 64, options={"causal": True}),
    "bwd_sm90": Packed(5000, 100, 64, 64, has_backward=True),
    "fwd_sm90_wide": Packed(33000, 64, 8, 320),
    "fwd_sm90_wide, 2^31": Packed(16384, 64, 8, 320),
    "fwd_sm90_f32": Packed(16384, 64, 32, 64, torch.float32),
}


def room() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@pytest.mark.long(20)
@pytest.mark.parametrize("name", MANY)
def test_more_sequences_than_32_bits_could_count_as_the_total(name: str, seed: int) -> None:
    """A few sequences are checked against float64, each alone."""
    batch, length, heads, head_dim, dtype, options, has_backward = MANY[name]
    num_bytes = batch * length * heads * head_dim * dtype.itemsize
    if room() < (10 if has_backward else 5) * num_bytes:
        pytest.skip("needs more memory")
    q = torch.randn(batch * length, heads, head_dim, dtype=dtype, device="cuda", requires_grad=has_backward)
    k, v = (torch.randn(batch * length, 1, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    k, v = k.requires_grad_(has_backward), v.requires_grad_(has_backward)
    starts = torch.arange(0, batch + 1, dtype=torch.int32, device="cuda") * length
    out = flashtile.attention_varlen(q, k, v, starts, starts, **options)
    grads: tuple[Tensor, ...] = ()
    if has_backward:
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
    for b in (0, 1, batch // 3, batch - 2, batch - 1, *torch.randint(batch, (3,)).tolist()):
        rows = slice(b * length, (b + 1) * length)
        alone = [x.detach()[rows].transpose(0, 1)[None].double().requires_grad_(has_backward) for x in (q, k, v)]
        ref = flashtile.attention(*alone, backend="reference", **options)
        assert isinstance(ref, Tensor)
        torch.testing.assert_close(out.detach()[rows].double(), ref[0].transpose(0, 1).detach(), **tolerance)
        if has_backward:
            ref_grads = torch.autograd.grad(ref, alone, dout[rows].transpose(0, 1)[None].double())
            for ours, expected in zip(grads, ref_grads, strict=True):
                # Sums over all heads grow with their number
                size = expected.abs().max().item()
                torch.testing.assert_close(
                    ours[rows].double(), expected[0].transpose(0, 1), rtol=2e-2, atol=2e-2 * max(size, 1.0)
                )


OPTIONS: tuple[dict[str, Any], ...] = (
    {"mask": "bhqk"},
    {"mask": "k", "causal": "bottom_right"},
    {"bias": "hqk"},
    {"bias": "qk", "mask": "bk"},
    {"bias": "q", "is_bias_float32": True},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_and_biases_bound_the_lengths(options: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    """Their sizes are those of the longest sequence, not of the total."""
    for head_dim in (64, 160):
        check(
            Case(
                dtype=dtype,
                kind="varlen",
                batch=24,
                heads=4,
                heads_kv=2,
                seqlen_q=200,
                seqlen_k=260,
                head_dim=head_dim,
                head_dim_v=head_dim,
                backend="cuda",
                **options,
            ),
            seed,
        )


@pytest.mark.parametrize("longest", [None, 64, 1 << 20])
def test_a_table_of_pages_bounds_the_keys(longest: int | None, seed: int) -> None:
    """max_seqlen_k beyond the capacity of the table, and lengths beyond it, read no page that is not there."""
    page_size, columns, batch = 16, 4, 8
    q = torch.randn(batch, 8, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch * columns, page_size, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.randperm(batch * columns, device="cuda").to(torch.int32).view(batch, columns)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    full = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * page_size * columns

    def attend(ends: Tensor, most: int | None) -> Tensor:
        out = flashtile.attention_varlen(q, k, v, starts, ends, 1, most, block_table=table)
        assert isinstance(out, Tensor)
        return out

    expected = attend(full, page_size * columns)
    assert torch.equal(attend(full, longest), expected) or torch.allclose(attend(full, longest), expected, atol=2e-2)
    beyond = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * 4096
    torch.testing.assert_close(attend(beyond, longest), expected, rtol=2e-2, atol=2e-2)
