"""Which calls are taken, and in what words the others are refused: the C++ executor against Python alone, as the ops
take them, on the CPU and on a GPU that is not there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
from torch import Tensor

from flashtile import ops
from flashtile.backends import native
from flashtile.backends.kvcache import AppendArgs
from flashtile.problem import DENSE_FIELDS, DENSE_SHIFTS, AttentionArgs
from flashtile.runtime import extension
from flashtile.testing import Case


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def gpu(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_gpu.plug_in(library, monkeypatch.setattr)
    yield
    fake_gpu.unplug()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHTILE_CPU_ISA", raising=False)  # where it is set, every call is Python's
    assert extension.open_executor("host") is None


def num_fallbacks() -> int:
    return extension.executor().num_fallbacks()


# Every right call with one thing changed, as the ops take it: what C++ lets pass by a plan, Python takes


def changed_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Each size less, more or 0; a rank less and more; other dtypes; other memory."""
    for axis, size in enumerate(tensor.shape):
        for other in {0, 1, size - 1, size + 1, 2 * size} - {size, -1}:
            shape = (*tensor.shape[:axis], other, *tensor.shape[axis + 1 :])
            yield f"shape {shape}", torch.zeros(shape, dtype=tensor.dtype)
        if size:
            yield f"axis {axis} expanded", tensor.narrow(axis, 0, 1).expand(tensor.shape)
        yield (
            f"axis {axis} strided",
            tensor.repeat_interleave(2, axis).narrow(axis, 0, 2 * size)[
                (*([slice(None)] * axis), slice(None, None, 2))
            ],
        )
    yield "a rank less", tensor[0] if tensor.dim() and len(tensor) else tensor
    yield "a rank more", tensor[None]
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int32,
        torch.int64,
        torch.bool,
    ):
        if dtype != tensor.dtype:
            yield f"{dtype}", tensor.to(dtype)
    yield "elsewhere", tensor.to("meta")


NUMBERS = (-(2**31), -2, -1, 0, 1, 7, 8, 2**31 - 1024, 2**31)
CHANGED_OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), (None, *NUMBERS)),
    **dict.fromkeys(("window_left", "window_right", "first_query", "first_key", "first_head"), NUMBERS),
    **dict.fromkeys(("total_heads", "num_splits"), NUMBERS),
    "scale": (None, 0.0, -1.0, 1e38, 2.0**128, float("inf"), float("nan")),
    "softcap": (-1.0, 0.0, 1.0, 1e39, float("inf"), float("nan")),
    "dropout_p": (-0.1, 0.0, 0.5, 1.0, float("nan")),
    "causal": ("none", "top_left", "bottom_right", "left"),
    "layout": ("bhsd", "bshd", "sbhd"),
    "backend": (None, "cuda", "nobody"),
    "out_dtype": (None, torch.float32, torch.float16, torch.int32),
}


def changed_calls(args: AttentionArgs) -> Iterator[tuple[str, AttentionArgs]]:
    for name, value in args._asdict().items():
        if isinstance(value, Tensor):
            for words, tensor in changed_tensors(value):
                yield f"{name}: {words}", args._replace(**{name: tensor})
            yield f"{name}: None", args._replace(**{name: None})
        for other in CHANGED_OPTIONS.get(name, ()):
            yield f"{name}: {other}", args._replace(**{name: other})


def words_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"


def outcome_of(op: Any, *values: Any) -> tuple[str, ...]:
    """The error in words, or what the results look like."""
    try:
        with torch.no_grad():
            results = op(*values)
    except Exception as error:
        return type(error).__name__, str(error).partition("\nException raised from")[0]
    return tuple(map(words_of, results or ()))


CHANGED_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"mask": "qk", "bias": "bhqk", "alibi": "bh", "has_sinks": True, "dropout_p": 0.3},
    "bshd": {"layout": "bshd", "heads": 4, "heads_kv": 2},
    "varlen": {"kind": "varlen"},
    "varlen with lengths": {"kind": "varlen", "has_max_lengths": True, "mask": "hqk"},
    "used": {"kind": "used"},
    "padded": {"kind": "padded"},
    "paged": {"kind": "paged"},
}


@pytest.mark.parametrize("name", CHANGED_CASES)
def test_a_plan_serves_no_call_that_python_refuses(name: str, gpu: None) -> None:
    fields = {"dtype": torch.bfloat16, "batch": 3, "heads": 2, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 33}
    case = Case(**{**fields, "head_dim": 32, "head_dim_v": 32, **CHANGED_CASES[name]})
    inputs = case.make(0)
    args = inputs.args
    if args.sinks is not None:
        args = args._replace(sinks=args.sinks.float())
    ops.forward(*args)
    before = num_fallbacks()
    ops.forward(*args)
    assert num_fallbacks() == before
    num_refused = num_served = 0
    for words, changed in changed_calls(args):
        before = num_fallbacks()
        found = [outcome_of(ops.forward, *changed) for _ in range(2)]
        num_served += num_fallbacks() < before + 2
        with native.python_only():
            expected = outcome_of(ops.forward, *changed)
        assert found == [expected, expected], words
        num_refused += expected[0].endswith("Error") or expected[0] == "Unsupported"
    assert num_refused > 40
    assert num_served > 40
    if name == "paged":
        return
    out, lse = ops.empty_outputs(args)
    saved = {"dout": torch.zeros_like(out), "dlse": torch.zeros_like(lse), "out": out, "lse": lse}
    needs = (True, True, True, args.bias is not None, args.sinks is not None)
    for which, tensor in saved.items():
        for words, other in (("", tensor), *changed_tensors(tensor)):
            given = saved | {which: other}
            values = (given["dout"], given["dlse"], *args, given["out"], given["lse"], needs)
            found = [outcome_of(ops.backward, *values) for _ in range(2)]
            with native.python_only():
                expected = outcome_of(ops.backward, *values)
            assert found == [expected, expected], (which, words)


# Calls of every op, drawn: right ones with up to three of their arguments changed

OPS = {
    "forward": ops.forward_op,
    "forward.dense": torch.ops.flashtile.forward.dense,
    "backward": ops.backward_op,
    "backward.dense": torch.ops.flashtile.backward.dense,
    "append_kv": ops.append_op,
    "append_kv.step": ops.append_step_op,
}
CASES: tuple[dict[str, Any], ...] = (
    *CHANGED_CASES.values(),
    {"kind": "varlen", "bias": "qk", "layout": "bshd"},
    {"kind": "cache", "alibi": "h"},
    {"kind": "paged", "layout": "bshd"},
    {"dropout_p": 0.3, "seqlen_q": 1},
    {"bias": "k", "is_bias_float32": True, "is_out_float32": True},
    {"causal": "top_left", "memory": "offset", "head_dim": 40},
)


@ops.waits_for_errors
def typed(op: Any, *values: Any) -> Any:
    """A call whose errors are those that a public function raises."""
    try:
        return op(*values)
    except RuntimeError as error:
        ops.reraise(error)


def right_call(rng: random.Random, op: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of a call by their names."""
    seed = rng.randrange(2**20)
    if op.startswith("append_kv"):
        return right_append(rng, op, dtype)
    changes = rng.choice(CASES[:1] if op.endswith("dense") else CASES)
    fields = {"dtype": dtype, "batch": 3, "heads": 2, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 33}
    inputs = Case(**{**fields, "head_dim": 32, "head_dim_v": 32, **changes}).make(seed)
    args = inputs.args._replace(num_splits=rng.choice((0, 0, 1)))
    given = args._asdict()
    if op.endswith("dense"):
        given = {name: given[name] for name in ("q", "k", "v", "scale")} | {"mode": rng.choice((0, ops.NEEDS_GRAD))}
    if op.startswith("backward"):
        out, lse = ops.empty_outputs(args)
        saved = {"out": out, "lse": lse}
        if op == "backward":
            needs = [rng.random() < 0.8 for _ in range(3)] + [args.bias is not None, args.sinks is not None]
            given = {"dlse": rng.choice((None, torch.zeros_like(lse)))} | given
            saved["needs"] = needs
        given = {"dout": torch.zeros_like(out)} | given | saved
    return given


def right_append(rng: random.Random, op: str, dtype: torch.dtype) -> dict[str, Any]:
    is_paged, layout, new = rng.random() < 0.5, rng.choice(("bhsd", "bshd")), rng.choice((1, 3))

    def tensor(batch: int, rows: int, heads: int = 2) -> Tensor:
        return torch.zeros((batch, rows, heads, 32) if layout == "bshd" else (batch, heads, rows, 32), dtype=dtype)

    caches = [tensor(*((5, 16) if is_paged else (3, 32))) for _ in range(2)]
    table = torch.tensor([[0, 1], [2, 3], [4, 4]], dtype=torch.int32) if is_paged else None
    angles = rng.choice((None, torch.zeros(40, 8), torch.zeros(40, 8, dtype=dtype)))
    lengths, is_interleaved = torch.tensor([1, 2, 3], dtype=torch.int32), rng.random() < 0.5
    others = lengths, table, angles, angles, is_interleaved, layout
    given = AppendArgs(*caches, tensor(3, new), tensor(3, new), *others)._asdict()
    return given | {"q": tensor(3, new, 4), "is_ordered": rng.random() < 0.5} if op.endswith("step") else given


def changed_mode(rng: random.Random) -> int:
    """Fields that there are, or any number."""
    if rng.random() < 0.5:
        return rng.choice((-1, 2**31, 2**63 - 1, -(2**63), rng.randrange(2**12)))
    return sum(rng.randrange(len(DENSE_FIELDS[name]) + 1) << shift for name, shift in DENSE_SHIFTS.items())


def changed_value(rng: random.Random, name: str, given: dict[str, Any]) -> Any:
    value, tensors = given[name], [one for one in given.values() if isinstance(one, Tensor)]
    if name == "mode":
        return changed_mode(rng)
    if name == "needs":
        return [rng.random() < 0.5 for _ in range(rng.choice((0, 4, 5, 5, 6)))]
    if name in CHANGED_OPTIONS:
        return rng.choice(CHANGED_OPTIONS[name])
    if isinstance(value, bool):
        return not value
    if isinstance(value, Tensor) and rng.random() < 0.85:
        return rng.choice(list(changed_tensors(value)))[1]
    return rng.choice((None, *tensors))


def draw_and_compare(seed: int, dtypes: tuple[torch.dtype, ...], is_on_gpu: bool, count: int = 60) -> None:
    rng, refused, by_cpp = random.Random(seed), dict.fromkeys(OPS, 0), dict.fromkeys(OPS, 0)
    torch.use_deterministic_algorithms(False)
    for turn in range(count * len(OPS)):
        op = list(OPS)[turn % len(OPS)]
        given = right_call(rng, op, rng.choice(dtypes))
        changes = {
            name: changed_value(rng, name, given) for name in rng.sample(sorted(given), rng.choice((0, 1, 1, 1, 2, 3)))
        }
        values = (given | changes).values()
        before = num_fallbacks()
        found = [outcome_of(typed, OPS[op], *values) for _ in range(2)]
        by_cpp[op] += num_fallbacks() < before + 2
        with native.python_only():
            expected = outcome_of(typed, OPS[op], *values)
        assert found == [expected, expected], (op, {name: words_of(value) for name, value in (given | changes).items()})
        refused[op] += bool(expected) and "Error" in expected[0]
    assert min(refused.values()) > count // 10
    assert min(by_cpp[op] for op in OPS if is_on_gpu or not op.startswith("append")) > 0


def changes_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every other value of an argument."""
    if isinstance(value, Tensor):
        yield from changed_tensors(value)
    if name == "needs":
        yield from ((str(count), [True] * count) for count in (0, 4, 6))
        yield "none", [False] * 5
    numbers = (-1, 2**31, *(1 << bit for bit in range(14))) if name == "mode" else ()
    bools = (not value,) if isinstance(value, bool) else ()
    yield from ((words_of(other), other) for other in (None, *numbers, *bools, *CHANGED_OPTIONS.get(name, ())))


@pytest.mark.parametrize("op", [op for op in OPS if op != "forward"])
def test_calls_with_one_change_are_taken_and_refused_alike(op: str, gpu: None) -> None:
    torch.use_deterministic_algorithms(False)
    given, num_refused = right_call(random.Random(7), op, torch.bfloat16), 0
    for name, value in given.items():
        for words, other in changes_of(name, value):
            values = (given | {name: other}).values()
            found = [outcome_of(typed, OPS[op], *values) for _ in range(2)]
            with native.python_only():
                expected = outcome_of(typed, OPS[op], *values)
            assert found == [expected, expected], (name, words)
            num_refused += bool(expected) and "Error" in expected[0]
    assert num_refused > 40


@pytest.mark.parametrize("seed", range(4))
def test_drawn_calls_are_taken_and_refused_alike(seed: int, gpu: None) -> None:
    draw_and_compare(seed, (torch.bfloat16, torch.float32), is_on_gpu=True)


@pytest.mark.parametrize("seed", range(2))
def test_drawn_calls_on_the_cpu_are_taken_and_refused_alike(seed: int, host: None) -> None:
    draw_and_compare(seed, (torch.float32, torch.bfloat16, torch.float64), is_on_gpu=False)
