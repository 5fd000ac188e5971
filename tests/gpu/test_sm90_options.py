"""Masks, biases, ALiBi and softcap in the Hopper forward: every broadcast shape, and masks whose tiles are all true,
all false or mixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import check, drawn, precompile
from family_tests import forced, needs_hopper
from torch import Tensor

from flashtile.testing import Case, assert_agrees, run

pytestmark = needs_hopper
forced_families = forced("fwd_sm90")
LENGTHS = ((256, 384), (197, 197), (700, 1000), (130, 4500), (64, 64), (49, 49), (5, 600))
AXES = ("bhqk", "hqk", "bqk", "qk", "bhk", "bk", "k", "hq", "q", "b", "")
HEAD_DIMS = (128, 64, 32, 96, 256, 192)


def cases(head_dim: int) -> list[Case]:
    """Every pair of options that meet in a kernel; axes and lengths take turns."""
    options: list[dict] = [{"mask": axes} for axes in AXES] + [{"bias": axes} for axes in AXES]
    options += [{"bias": axes, "is_bias_float32": True} for axes in AXES[::3]]
    options += [{"mask": axes, "causal": "bottom_right"} for axes in AXES[::3]]
    options += [
        {"mask": "bqk", "window": (70, 30)},
        {"bias": "hqk", "mask": "bk"},
        {"bias": "hqk", "causal": "top_left"},
    ]
    options += [{"alibi": "bh"}, {"alibi": "h", "causal": "bottom_right"}, {"alibi": "h", "mask": "bqk"}]
    options += [{"softcap": cap, "causal": "bottom_right"} for cap in (1.5, 30.0, 1000.0)]
    options += [{"softcap": 3.0, "alibi": "h", "bias": "bhqk", "mask": "hqk", "dropout_p": 0.1}]
    found = []
    for place, option in enumerate(options):
        seqlen_q, seqlen_k = LENGTHS[place % len(LENGTHS)]
        heads = {"heads": 4, "heads_kv": 2 if place % 2 else 4}
        dtype = torch.bfloat16 if place % 3 else torch.float16
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim, "batch": 2}
        found.append(Case(dtype=dtype, backend="cuda", **(sizes | heads | option)))
    return found


@pytest.mark.long(55)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_of_mask_and_bias(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = drawn([(case, seed) for seed, case in enumerate(cases(head_dim))])
    precompile(problems, monkeypatch, is_forward=True)
    found = []
    for case, seed in problems:
        try:
            check(case, seed, True)
        except AssertionError as error:
            found.append(f"{case}.make({seed}): {error}")
    assert found == []


def random_lengths(batch: int, seqlen_k: int) -> Tensor:
    """Padding: a prefix of the keys of each sequence, perhaps none."""
    lengths = torch.randint(0, seqlen_k + 1, (batch, 1, 1, 1), device="cuda")
    return torch.arange(seqlen_k, device="cuda") < lengths


def documents(batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Block-diagonal: queries and keys of the same document."""
    of_q = torch.randint(0, 5, (batch, 1, seqlen_q, 1), device="cuda").sort(dim=2)[0]
    return of_q == torch.randint(0, 5, (batch, 1, 1, seqlen_k), device="cuda").sort(dim=3)[0]


MASKS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "padding": lambda batch, _, __, seqlen_k: random_lengths(batch, seqlen_k),
    "expanded padding": lambda b, h, q, k: random_lengths(b, k).expand(b, h, q, k),
    "left padding": lambda batch, _, __, seqlen_k: random_lengths(batch, seqlen_k).flip(3),
    "documents": lambda batch, _, seqlen_q, seqlen_k: documents(batch, seqlen_q, seqlen_k),
    "transposed": lambda batch, _, seqlen_q, seqlen_k: documents(batch, seqlen_k, seqlen_q).transpose(2, 3),
    "nothing": lambda *_: torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cuda"),
    "everything": lambda b, _, q, k: torch.ones(b, 1, q, k, dtype=torch.bool, device="cuda"),
    "one key": lambda b, h, q, k: torch.arange(k, device="cuda").expand(b, h, q, k) == k // 2,
    "sliced": lambda b, h, q, k: (torch.rand(b, h, q, k + 3, device="cuda") < 0.5)[..., 3:],
}


@pytest.mark.long(30)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_tiles_that_are_all_true_all_false_or_mixed(head_dim: int, causal: str, seed: int) -> None:
    found = []
    for place, (name, make) in enumerate(MASKS.items()):
        for seqlen_q, seqlen_k in (LENGTHS * 2)[place % len(LENGTHS) :][:3]:  # they take turns
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": head_dim, "head_dim_v": head_dim}
            case = Case(dtype=torch.bfloat16, backend="cuda", batch=2, heads=4, heads_kv=2, causal=causal, **sizes)
            inputs = case.make(seed, "cuda")
            mask = make(2, 4, seqlen_q, seqlen_k)
            inputs = inputs._replace(args=inputs.args._replace(mask=mask))
            try:
                assert_agrees(run(inputs, has_backward=False), inputs)
            except AssertionError as error:
                found.append(f"{name}, {seqlen_q} x {seqlen_k}: {error}")
    assert found == []
