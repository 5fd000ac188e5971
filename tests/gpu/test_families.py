"""Families on a GPU: one from outside the package is right, other cards' rows are right, and the fastest backend is
taken for each pass."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import check

import flashtile
from flashtile import families
from flashtile.backends import cuda
from flashtile.families import assemble
from flashtile.plans.arch import ARCHS
from flashtile.testing import Case

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy_family"))
from toy import FwdToy


@pytest.fixture
def toy() -> Iterator[None]:
    family = FwdToy()
    families.register(family)
    try:
        with families.forced("fwd_toy"):
            assemble.clear_plans()
            yield
    finally:
        families.unregister(family)
        assemble.clear_plans()


@pytest.mark.smoke
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (9, 3)}, {"kind": "varlen"}], ids=str)
def test_a_toy_family_is_right(toy: None, options: dict[str, object]) -> None:
    case = Case(backend="cuda", heads=4, heads_kv=2, seqlen_q=130, seqlen_k=77, head_dim=24, head_dim_v=32, **options)
    check(case, 0, is_forward=True)


@pytest.mark.parametrize("name", ["sm_61", "sm_75", "sm_80", "sm_86", "sm_120"])
def test_other_cards_rows_are_right_within_their_shared_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_ARCH", name)
    cuda._arch.cache_clear()
    assemble.clear_plans()
    try:
        arch = cuda._arch(0)
        assert arch is not None
        assert arch.shared_bytes == ARCHS[int(name.removeprefix("sm_"))].shared_bytes
        for head_dim in (64, 128):
            case = Case(
                backend="cuda",
                dtype=torch.bfloat16,
                head_dim=head_dim,
                head_dim_v=head_dim,
                seqlen_q=150,
                seqlen_k=300,
                bias="hqk",
            )
            inputs = case.make(0, "cuda")
            details = flashtile.explain(inputs.args.q, inputs.args.k, inputs.args.v, backend="cuda").details
            assert "fwd_simt_kernel" in details
            check(case, 0)
    finally:
        cuda._arch.cache_clear()
        assemble.clear_plans()


@pytest.mark.smoke
def test_each_pass_takes_the_fastest() -> None:
    """Of a large bfloat16 call on Hopper both passes are wgmma's; Triton agrees with them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the table has times of sm_90 alone")
    large, small = (
        [torch.randn(2, 16, length, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
        for length in (2048, 64)
    )
    answer = flashtile.explain(*large)
    assert answer.backend == answer.details["backward"] == "cuda"
    assert {"fwd_sm90_kernel", "bwd_sm90_kernel"} <= set(answer.details)
    assert answer.slow_paths == ()
    assert flashtile.explain(*small).details["backward"] == "cuda"  # where launches count
    out = flashtile.attention(*large, causal=True)
    ours = torch.autograd.grad(out, large, torch.ones_like(out))
    expected = flashtile.attention(*large, causal=True, backend="triton")
    theirs = torch.autograd.grad(expected, large, torch.ones_like(out))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).float().norm() <= 0.01 * other.float().norm()
