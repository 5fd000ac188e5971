"""Every option, dtype and backend against fp64 by the error rule: one option at a time, then all of them together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashtile.testing import (
    GRADS,
    OUTPUTS,
    Case,
    Expected,
    Inputs,
    Result,
    assert_agrees,
    disagreement,
    disagreements,
    expect,
    oracle,
    run,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("cpu", "tiled", "reference")
PAIRS = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES if (backend, dtype) != ("cpu", torch.float64)]

# Lengths around the tiles of the backends (128 x 128, 128 x 256), so that every loop has a tail
LONG = {"batch": 1, "seqlen_q": 150, "seqlen_k": 300}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "long": LONG,
    "queries of several tasks of the CPU engine": {"batch": 1, "seqlen_q": 800, "seqlen_k": 60, "causal": "top_left"},
    "causal bottom right": {"causal": "bottom_right", **LONG},
    "causal top left": {"causal": "top_left", **LONG},
    "causal, more queries than keys": {"causal": "bottom_right", "seqlen_q": 90, "seqlen_k": 40},
    "window": {"window": (40, 7), **LONG},
    "window to the left only": {"window": (9, -1)},
    "window with causal": {"window": (20, 30), "causal": "bottom_right", **LONG},
    "window of one key": {"window": (0, 0)},
    "scale": {"scale": 0.05},
    "negative scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5, **LONG},
    "mask": {"mask": "bhqk", **LONG},
    "key mask": {"mask": "bk"},
    "query mask": {"mask": "q"},
    **{f"bias {axes}": {"bias": axes} for axes in ("bhqk", "hqk", "qk", "bqk", "bk", "hk", "k", "q", "h", "b", "1")},
    "bias in float32": {"bias": "hqk", "is_bias_float32": True, **LONG},
    "alibi per head": {"alibi": "h", **LONG},
    "alibi per batch": {"alibi": "bh", "causal": "top_left"},
    "sinks": {"has_sinks": True, **LONG},
    "sinks with masked rows": {"has_sinks": True, "mask": "bq"},
    "dropout": {"dropout_p": 0.2, **LONG},
    "gqa": {"heads": 6, "heads_kv": 2},
    "mqa": {"heads": 3, "heads_kv": 1, "bias": "hqk"},
    "head dims 21 and 40": {"head_dim": 21, "head_dim_v": 40},
    "head dims 1": {"head_dim": 1, "head_dim_v": 1},
    "head dim 256": {"head_dim": 256, "head_dim_v": 8, "seqlen_q": 20},
    "head dim 512": {"head_dim": 512, "head_dim_v": 512, "seqlen_q": 9, "seqlen_k": 9},
    "one query": {"seqlen_q": 1},
    "one key": {"seqlen_k": 1},
    "no query": {"seqlen_q": 0},
    "no query, gqa": {"seqlen_q": 0, "heads": 4, "heads_kv": 2},
    "no key": {"seqlen_k": 0},
    "no key, sinks": {"seqlen_k": 0, "has_sinks": True},
    "no batch": {"batch": 0},
    **{f"{memory} memory": {"memory": memory, "heads": 4} for memory in ("swapped", "sliced", "expanded", "offset")},
    "varlen": {"kind": "varlen", "batch": 5, "causal": "bottom_right", "seqlen_q": 140, "seqlen_k": 140},
    "varlen with bias": {"kind": "varlen", "batch": 4, "bias": "bhqk", "mask": "hqk", "alibi": "bh", "has_sinks": True},
    "varlen with dropout": {"kind": "varlen", "batch": 4, "dropout_p": 0.3},
    "used keys": {"kind": "used", "batch": 4, "causal": "bottom_right"},
    "paged": {"kind": "paged", "batch": 4, "window": (20, 3)},
    "paged, odd size": {"kind": "paged", "batch": 3, "page_size": 7, "bias": "bhqk"},
    "paged, one key to a page": {"kind": "paged", "page_size": 1},
    "padded": {"kind": "padded", "batch": 4, "causal": "bottom_right"},
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("backend", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(option: str, dtype: torch.dtype, backend: str, layout: str, seed: int) -> None:
    inputs = Case(dtype=dtype, layout=layout, backend=backend, **OPTIONS[option]).make(seed)
    assert_agrees(run(inputs), inputs)


AXES = st.lists(st.sampled_from("bhqk"), unique=True, max_size=4).map("".join)
LENGTHS = st.one_of(st.integers(0, 20), st.integers(0, 300), st.sampled_from([1, 127, 128, 129, 255, 256, 257]))
CASES = st.builds(
    # Logits of a few units: with larger ones a handful of rows is too small a sample to judge a factor of two by
    lambda groups, scaling, **fields: Case(
        heads=fields["heads_kv"] * groups,
        scale=None if scaling is None else scaling / fields["head_dim"] ** 0.5,
        **fields,
    ),
    groups=st.integers(1, 3),
    scaling=st.one_of(st.none(), st.floats(-2, 2)),
    heads_kv=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["bhsd", "bshd"]),
    kind=st.sampled_from(["dense", "dense", "varlen", "used", "paged", "padded"]),
    memory=st.sampled_from(["contiguous", "swapped", "sliced", "expanded", "offset"]),
    batch=st.integers(0, 3),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128])),
    head_dim_v=st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128])),
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    window=st.tuples(st.integers(-1, 80), st.integers(-1, 80)),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    mask=st.one_of(st.none(), AXES),
    bias=st.one_of(st.none(), AXES),
    is_bias_float32=st.booleans(),
    alibi=st.sampled_from([None, "h", "bh"]),
    has_sinks=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    page_size=st.integers(1, 40),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120)
@given(case=CASES, seed=st.integers(0, 2**31))
def test_options_together(backend: str, case: Case, seed: int) -> None:
    assume((backend, case.dtype) in PAIRS)
    inputs = dataclasses.replace(case, backend=backend).make(seed)
    assert_agrees(run(inputs), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(backend: str, seed: int) -> None:
    inputs = Case(dtype=torch.float16, backend=backend, causal="bottom_right", **LONG).make(seed)
    inputs = inputs._replace(args=inputs.args._replace(q=inputs.args.q * 30, k=inputs.args.k * 30))
    assert_agrees(run(inputs), inputs)


def spoil(name: str, inputs: Inputs, result: Result) -> Result:
    """The result with one row of one tensor wrong by a little more than rounding."""
    tensor = getattr(result, name).clone()
    row = tensor[0, 0, 3] if tensor.dim() > 1 else tensor[:1]
    row += 0.2 * row.abs().max() + 0.05
    return result._replace(**{name: tensor})


@pytest.mark.parametrize("name", ["out", "lse", *GRADS])
@pytest.mark.filterwarnings("ignore:.*float64 is not among its dtypes:flashtile.SlowPathWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rule_sees_one_wrong_row(name: str, dtype: torch.dtype, seed: int) -> None:
    inputs = Case(dtype=dtype, bias="hqk", has_sinks=True).make(seed)
    result = run(inputs)
    assert disagreements(result, inputs) == []
    (found,) = disagreements(spoil(name, inputs, result), inputs)
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"causal": "top_left"},
        {"window": (30, 20)},
        {"softcap": 2.0},
        {"scale": 0.2},
        {"has_sinks": True},
        {"alibi": "h"},
        {"dropout_p": 0.1},
    ],
    ids=str,
)
def test_the_rule_sees_a_wrong_option(wrong: dict, seed: int) -> None:
    case = Case(causal="bottom_right", seqlen_q=50, seqlen_k=60, dtype=torch.bfloat16)
    inputs = case.make(seed)
    other = dataclasses.replace(case, **wrong).make(seed)
    mistaken = Inputs(other.args._replace(q=inputs.args.q, k=inputs.args.k, v=inputs.args.v), inputs.dout, inputs.dlse)
    assert disagreements(run(mistaken)._replace(dsinks=None), inputs) != []


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_rule_does_not_judge_by_a_broken_yardstick(broken: float) -> None:
    ones = torch.ones(1, 1, 3, 4)
    low = ones.clone()
    low[0, 0, 0, 0] = broken
    assert "nothing can be judged" in disagreement("out", ones, ones, low, torch.float32)
    assert "nothing can be judged" in disagreement("out", ones, torch.full_like(ones, torch.nan), ones, torch.float32)
    assert disagreement("out", ones, ones, ones, torch.float32) is None


def test_the_floor_judges_where_the_yardstick_overflows(seed: int) -> None:
    """q k^T is 300 / scale, more than float16 holds, though the scores are about 300."""
    case = Case(dtype=torch.float16, head_dim=128, head_dim_v=128, scale=0.003, values="huge", seqlen_k=40)
    inputs = case.make(seed)
    expected = expect(inputs)
    assert not torch.isfinite(expected.low.lse).all()
    right = run(inputs)
    assert disagreements(right, inputs, expected) == []
    for name in ("out", "lse", "dq", "dk", "dv"):
        wrong = getattr(right, name).clone()
        wrong.view(-1)[wrong.abs().argmax()] *= 1.5
        assert expected.disagreement(name, wrong) is not None, name


@pytest.mark.parametrize("axes", ["1", "h", "k", "q"])
def test_the_rule_sees_a_wrong_sum(axes: str, seed: int) -> None:
    """Gradients that are summed over many elements: the slack must not grow with their number."""
    inputs = Case(dtype=torch.bfloat16, bias=axes, seqlen_q=200, seqlen_k=200).make(seed)
    result, expected = run(inputs), expect(inputs)
    assert disagreements(result, inputs, expected) == []
    right, low = expected.ref.dbias, expected.low.dbias
    wrong = right + 3 * (low - right).abs().max() + 0.3 * right.abs().max() + 0.3
    assert disagreements(result._replace(dbias=wrong), inputs, expected) != []


# The floor

BY_FLOOR = {
    "plain": {},
    "bias and sinks": {"bias": "hqk", "has_sinks": True},
    "a bias that all share": {"bias": "1", "causal": "bottom_right"},
    "softcap and ALiBi": {"softcap": 2.0, "alibi": "h"},
    "dropout": {"dropout_p": 0.2, "bias": "q"},
    "one key and dropout": {"seqlen_k": 1, "dropout_p": 0.5, "bias": "bhqk"},
    "heads that are the same": {"memory": "expanded", "heads": 6, "heads_kv": 2},
    "packed": {"kind": "varlen", "batch": 4, "has_sinks": True},
    "paged": {"kind": "paged", "batch": 3, "bias": "k"},
    "large logits": {"scale": 3.0},
}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("option", BY_FLOOR)
def test_a_lucky_yardstick_fails_nothing(option: str, dtype: torch.dtype, seed: int) -> None:
    """The yardstick is exact here, and no result is wrong by less than the floor."""
    for backend in BACKENDS:
        inputs = Case(dtype=dtype, backend=backend, **BY_FLOOR[option]).make(seed)
        ref = oracle(inputs)
        assert disagreements(run(inputs), inputs, Expected(inputs, ref, ref)) == []


@pytest.mark.parametrize("name", ["out", "lse", *GRADS])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_floor_hides_no_wrong_row(name: str, dtype: torch.dtype, seed: int) -> None:
    inputs = Case(dtype=dtype, bias="hqk", has_sinks=True).make(seed)
    result, ref = run(inputs), oracle(inputs)
    (found,) = disagreements(spoil(name, inputs, result), inputs, Expected(inputs, ref, ref))
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_floor_is_low(dtype: torch.dtype, seed: int) -> None:
    """For an ordinary problem: most of it far below what the yardstick allows."""
    inputs = Case(dtype=dtype, bias="hqk", seqlen_q=200, seqlen_k=200, head_dim=64, head_dim_v=64).make(seed)
    expected = expect(inputs)
    for name in ("out", "dq", "dk", "dv", "dbias"):
        ref, low, floor = (getattr(result, name) for result in (expected.ref, expected.low, expected.floor))
        slack = 1e-5 * max(1.0, ref.abs().max().item()) if name in GRADS else 1e-6
        allowed = 2 * (low.double() - ref).abs().max() + 2 * torch.finfo(dtype).eps * ref.abs().max() + slack
        assert floor.median() < 0.5 * allowed, name
        assert floor.max() < 4 * allowed, name


def test_the_floor_knows_what_cancels(seed: int) -> None:
    """One visible key: whatever its score, P is 1, and out is v rounded once."""
    inputs = Case(seqlen_k=1, scale=100.0).make(seed)
    ref = oracle(inputs)
    floor = Expected(inputs, ref, ref).floor
    assert (floor.out <= 8 * torch.finfo(torch.float32).eps * ref.out.abs()).all()
    assert floor.lse.min() > torch.finfo(torch.float32).eps
    assert all(getattr(floor, name).isfinite().all() for name in (*OUTPUTS, "dq", "dk", "dv"))


def test_the_floor_knows_of_columns_that_cancel_at_the_end() -> None:
    """Rows that are alike add up to large columns, whose sum is small."""
    case = Case(
        batch=3,
        heads=1,
        heads_kv=1,
        seqlen_q=129,
        seqlen_k=48,
        head_dim=128,
        head_dim_v=64,
        bias="h",
        alibi="bh",
        values="wide",
        backend="cpu",
    )
    inputs = case.make(2078409351)
    assert disagreements(run(inputs), inputs, is_relative=True) == []


def test_the_floor_knows_that_tensor_cores_truncate() -> None:
    """All products of q and k have one sign. The error of lse is that of a GPU kernel."""
    case = Case(
        layout="bshd",
        kind="used",
        memory="sliced",
        batch=1,
        heads=1,
        heads_kv=1,
        seqlen_q=193,
        seqlen_k=191,
        head_dim=128,
        head_dim_v=128,
        scale=0.0273703668300378,
        values="wide",
        has_max_lengths=True,
    )
    inputs = case.make(791248026)
    expected = expect(inputs, has_backward=False)
    for error, is_fine in ((2.492e-5, True), (2e-4, False)):
        lse = expected.ref.lse.float()
        lse[0, 18] += error
        assert (expected.disagreement("lse", lse) is None) == is_fine


def test_the_floor_knows_that_equal_terms_are_rounded_alike() -> None:
    """All 256 products of dO and v are equal, and so are those of dO and out. The error of dK is that of a correct
    backend."""
    case = Case(
        dout="number",
        batch=8,
        heads=1,
        heads_kv=1,
        seqlen_q=2,
        seqlen_k=1,
        head_dim=1,
        head_dim_v=256,
        mask="k",
        values="constant",
    )
    inputs = case.make(1076137259)
    expected = expect(inputs)
    assert expected.ref.dk is not None
    for error, is_fine in ((1.658e-4, True), (4e-3, False)):
        dk = expected.ref.dk.float()
        dk[1, 0, 0, 0] += error
        assert (expected.disagreement("dk", dk) is None) == is_fine


def test_without_deterministic_algorithms(seed: int) -> None:
    torch.use_deterministic_algorithms(False)
    inputs = Case(kind="paged", batch=3, bias="hqk", dropout_p=0.1).make(seed)
    assert_agrees(run(inputs), inputs)


def test_memory_is_poisoned() -> None:
    assert torch.empty(7).isnan().all()
    assert torch.ones(3).new_empty(7).isnan().all()
