"""The C++ executor against the Python one, without a GPU: a driver that writes down what is launched, and CPU tensors
in its calls."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fake_gpu
import pytest
import torch
from fake_gpu import MAP_ADDRESS, Recorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from flashtile import families, ops
from flashtile.backends import cuda, executor, native, registry
from flashtile.backends.executor import Launch
from flashtile.backends.kvcache import AppendArgs
from flashtile.families import assemble
from flashtile.families.decode_sm90.family import DecodeSm90Params
from flashtile.families.steps.append_kv import AppendParams
from flashtile.integrations import torch_flash
from flashtile.lab.check.draw import Drawer
from flashtile.plans import plan as plans
from flashtile.plans.params import Params
from flashtile.problem import DENSE_FIELDS, AttentionArgs, Problem, is_aligned16
from flashtile.runtime import driver, extension
from flashtile.testing import GRADS, Case

ROOT = Path(__file__).resolve().parents[2]
# Of the GPU that is pretended; with few, grids of few tiles are large
HEAD_DIMS = tuple(head_dim for head_dim, _ in families.find("fwd_simt").head_dims)
NUM_MULTIPROCESSORS = (fake_gpu.NUM_MULTIPROCESSORS, 16, 4, fake_gpu.NUM_MULTIPROCESSORS)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_gpu.build(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def recorder(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    yield fake_gpu.plug_in(library, monkeypatch.setattr)
    fake_gpu.unplug()


# Byte by byte


class Done(NamedTuple):
    """What a call has launched and returned."""

    launches: list[tuple[tuple[int, ...], bytearray]]
    results: tuple[Tensor | None, ...]


def by_python(recorder: Recorder, launch: Launch, results: tuple[Tensor | None, ...]) -> Done:
    recorder.reset(len(launch.plan.image))
    executor.execute(launch)
    return Done(recorder.launches(), results)


def num_fallbacks() -> int:
    return extension.executor().num_fallbacks()


def falls_back(call: Any) -> bool:
    """The call goes to Python, whatever that makes of it."""
    before = num_fallbacks()
    with suppress(ValueError, TypeError, NotImplementedError):
        call()
    return num_fallbacks() > before


def by_cpp(recorder: Recorder, op: Any, args: tuple[Any, ...], launch: Launch) -> Done | None:
    """None where C++ leaves the call to Python. The first call of a kind registers its plan."""
    with torch.no_grad():
        for _ in range(2):
            recorder.reset(len(launch.plan.image))
            before = num_fallbacks()
            results = op(*args)
            if num_fallbacks() == before:
                wanted = args[-1] if op is ops.backward else (True, True)
                named = zip(results or (), wanted, strict=False)
                return Done(recorder.launches(), tuple(tensor if is_wanted else None for tensor, is_wanted in named))
    return None


def differences(
    launch: Launch, one: Done, other: Done, names: tuple[str, ...], dout: Tensor | None = None
) -> list[str]:
    """What differs beside the addresses of what each has allocated. dout: the caller's; both copy it, or none does."""
    found = []
    for name, a, b in zip(names, one.results, other.results, strict=True):
        if (a is None) != (b is None):
            found.append(f"{name}: {a is None} and {b is None}")
        elif a is not None and b is not None:
            if (a.shape, a.stride(), a.dtype, a.device) != (b.shape, b.stride(), b.dtype, b.device):
                found.append(f"{name}: {a.shape} {a.stride()} {a.dtype} and {b.shape} {b.stride()} {b.dtype}")
            if plans.Memset(name) in launch.plan.steps and not (
                torch.equal(a, torch.zeros_like(a)) and torch.equal(a, b)
            ):
                found.append(f"{name}: not zeros")
    if [numbers for numbers, _ in one.launches] != [numbers for numbers, _ in other.launches]:
        return [*found, f"launches {[x for x, _ in one.launches]} and {[x for x, _ in other.launches]}"]
    pointers = [
        (patch.rule.name, patch.offset) for patch in launch.plan.patches if isinstance(patch.rule, plans.Pointer)
    ]
    pointers += [(patch.tensor, patch.offset + MAP_ADDRESS) for patch in launch.plan.maps]
    workspaces = {workspace.name for workspace in launch.plan.workspaces if not workspace.is_kept}
    scratch = {operand.name for operand in launch.plan.operands if operand.like or is_copied(operand, launch)}
    for (_, a), (_, b) in zip(one.launches, other.launches, strict=True):
        bases = None
        for name, offset in pointers:
            x, y = (int.from_bytes(image[offset : offset + 8], "little") for image in (a, b))
            if name in workspaces:
                is_same = (x == 0) == (y == 0) and (bases is None or x == 0 or x - bases[0] == y - bases[1])
                bases = bases or ((x, y) if x else None)
            elif name in scratch:
                is_same = x != 0 and y != 0
            elif name == "dout" and dout is not None:
                is_same = (x == dout.data_ptr()) == (y == dout.data_ptr()) and x != 0 and y != 0
            elif name in names:
                result, another = (done.results[names.index(name)] for done in (one, other))
                is_same = (
                    result is not None and another is not None and (x, y) == (result.data_ptr(), another.data_ptr())
                )
            else:
                continue  # compared with all the rest
            if not is_same:
                found.append(f"{name}: at {x:#x} and {y:#x}")
            a[offset : offset + 8] = b[offset : offset + 8] = bytes(8)
        if a != b:
            found.append(f"bytes {[place for place in range(len(a)) if a[place] != b[place]]}")
    return found


def is_copied(operand: plans.Operand, launch: Launch) -> bool:
    return not executor.is_fitting(operand, launch.tensors[operand.name])


def problems(seed: int) -> Iterator[tuple[Case, int, bool]]:
    for trial in Drawer(seed, "cpu", edges=sorted(families.tile_sizes()), reuse=8):
        if trial.case.dtype != torch.float64 and max(trial.case.head_dim, trial.case.head_dim_v) <= HEAD_DIMS[-1]:
            yield trial.case, trial.seed, trial.has_backward and trial.case.kind not in ("paged", "cache")


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_calls_are_launched_alike(part: int, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; what one executor has learned of one call serves many others."""
    monkeypatch.setattr(cuda, "_num_multiprocessors", lambda index: NUM_MULTIPROCESSORS[part])
    served, left, kernels, num_backward = 0, 0, set(), 0
    source = problems(part)
    while served < 250:
        case, seed, has_backward = next(source)
        inputs = case.make(seed)
        args = inputs.args
        out, lse = ops.empty_outputs(args)
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        if other is None:
            left += 1
            continue
        assert differences(launch, one, other, ("out", "lse")) == [], (case, seed)
        kernels |= {step.name for step in launch.plan.steps if isinstance(step, plans.Step)}
        served += 1
        if not has_backward:
            continue
        wanted = (True, seed % 3 != 0, seed % 5 != 0, args.bias is not None, args.sinks is not None)
        grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
        dlse = inputs.dlse if seed % 2 else None
        launch = cuda.backward_launch(args, inputs.dout, dlse, out, lse, grads)
        one = by_python(recorder, launch, tuple(grads))
        other = by_cpp(recorder, ops.backward, (inputs.dout, dlse, *args, out, lse, wanted), launch)
        if other is not None:
            assert differences(launch, one, other, GRADS, inputs.dout) == [], (case, seed)
            num_backward += 1
    assert left < 250
    assert num_backward > 20
    assert {"fwd_sm90_kernel", "fwd_simt_kernel"} <= kernels
    assert (
        extension.executor().num_plans() < served + left + num_backward - 20
    )  # the others met a plan of an earlier call


def test_cpp_describes_a_call_as_python_does(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, facts and length classes of calls that wait for a plan."""
    found: dict[str, int] = dict.fromkeys(("forward", "backward", "none"), 0)
    described = native.described

    def compared(kind: int, args: AttentionArgs) -> Problem | None:
        problem, expected = described(kind, args), Problem.of(args)
        if problem is None:
            found["none"] += 1
            return None
        assert problem.classes is not None
        op, numbers = problem.classes
        classes = families.length_classes(op)
        assert numbers == tuple(one.of(expected.shape, fake_gpu.NUM_MULTIPROCESSORS) for one in classes)
        if op == "backward":  # which reads and writes more rows
            assert problem.is_aligned16 <= expected.is_aligned16
            expected = dataclasses.replace(expected, is_aligned16=problem.is_aligned16)
        assert dataclasses.replace(problem, classes=None) == expected
        found[op] += 1
        return problem

    monkeypatch.setattr(native, "described", compared)
    source = problems(7)
    while found["forward"] < 150 or found["backward"] < 20:
        case, seed, has_backward = next(source)
        inputs = case.make(seed)
        args = inputs.args._replace(scale=(None, 0.0, -0.5, 2.0)[seed % 4], deterministic=(None, True, False)[seed % 3])
        assemble.clear_plans()
        ops.forward(*args)
        if has_backward:
            out, lse = ops.empty_outputs(args)
            wanted = (True, True, True, args.bias is not None, args.sinks is not None)
            ops.backward(inputs.dout, None, *args, out, lse, wanted)
    assert found["none"] < 100


@pytest.mark.parametrize("kind", ["dense", "varlen", "used", "padded"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_float32_on_hopper_is_launched_alike(kind: str, num_splits: int, recorder: Recorder) -> None:
    """Its workspaces are padded, and some are needed without splits, too."""
    case = Case(
        kind=kind, heads=4, heads_kv=2, seqlen_q=130, seqlen_k=700, head_dim=64, head_dim_v=96, num_splits=num_splits
    )
    inputs = case.make(num_splits)
    args = inputs.args
    out, lse = ops.empty_outputs(args)
    with families.forced("fwd_sm90_f32", "bwd_sm90_f32"):
        assemble.clear_plans()
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        assert "f32_split_kernel" in {step.name for step in launch.plan.steps}
        assert differences(launch, one, other, ("out", "lse")) == []
        wanted = (True, True, True, False, False)
        grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
        launch = cuda.backward_launch(args, inputs.dout, None, out, lse, grads)
        one = by_python(recorder, launch, tuple(grads))
        other = by_cpp(recorder, ops.backward, (inputs.dout, None, *args, out, lse, wanted), launch)
        assert other is not None
        assert differences(launch, one, other, GRADS) == []
    assemble.clear_plans()


PLAIN = Case(dtype=torch.bfloat16, head_dim=64, head_dim_v=64, seqlen_q=32, seqlen_k=640, batch=1, deterministic=False)
# Calls that differ in one thing from the plain one, or from their neighbour; each has a plan of its own or may not take
# another's
VARIATIONS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float32},
    {"dtype": torch.float16},
    {"is_out_float32": True},
    {"layout": "bshd"},
    {"memory": "offset"},
    {"memory": "swapped"},
    {"head_dim": 72},
    {"head_dim_v": 128},
    {"head_dim_v": 21},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"window": (5, -1)},
    {"window": (-1, 5)},
    {"window": (1 << 40, 3)},
    {"window": (3, 1 << 30)},
    {"softcap": 2.0},
    {"softcap": 3e38},
    {"softcap": 1e-60},
    {"softcap": 1e-25, "scale": 1e20},
    {"softcap": 1e30, "scale": 1e-10},
    {"softcap": 2.0, "scale": 0.0},
    {"scale": 1e-46},
    {"scale": -1e-46},
    {"scale": -0.5},
    {"scale": 0.5},
    {"dropout_p": 0.3},
    {"dropout_p": 0.3, "origin": (1000, 4096, 5, 40)},
    {"mask": "qk"},
    {"bias": "qk"},
    {"bias": "qk", "is_bias_float32": True},
    {"alibi": "h"},
    {"alibi": "bh"},
    {"has_sinks": True, "dtype": torch.float32},
    {"kind": "varlen"},
    {"kind": "varlen", "has_max_lengths": True},
    {"kind": "used"},
    {"kind": "padded"},
    {"kind": "paged"},
    {"kind": "cache"},
    {"num_splits": 1},
    {"num_splits": 5},
    {"deterministic": True},
    {"batch": 3, "heads": 6, "seqlen_q": 300, "seqlen_k": 40},
    {"batch": 3, "heads": 6, "heads_kv": 3, "seqlen_q": 1000, "seqlen_k": 30},
    # Classes of lengths: tiles of 192 rows with a map of out, tiles of 128; heads in one tile, heads in their own
    *({"head_dim": 128, "head_dim_v": 128, "seqlen_q": length} for length in (192, 128, 384, 200)),
    *({"heads": 8, "heads_kv": 2, "seqlen_q": length} for length in (3, 600, 16)),
    {"heads": 8, "heads_kv": 4, "seqlen_q": 3},
    {"heads": 8, "heads_kv": 2, "seqlen_q": 3, "memory": "expanded"},
]


def test_calls_that_differ_in_one_thing(recorder: Recorder) -> None:
    """Each twice, among all the others: a plan that serves the wrong one shows in what is launched."""
    for turn in range(2):
        for changes in VARIATIONS:
            case = Case(**{**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}, **changes})
            args = case.make(turn).args
            out, lse = ops.empty_outputs(args)
            launch = cuda.forward_launch(args, out, lse)
            one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
            assert other is not None, changes
            assert differences(launch, one, other, ("out", "lse")) == [], changes


def test_options_that_a_case_gives_together(recorder: Recorder) -> None:
    """Either bound of the lengths alone; dropout bits without dropout."""
    plain = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}
    packed, dropping = (
        Case(**{**plain, **changes}).make(0).args for changes in ({"kind": "varlen", "batch": 3}, {"dropout_p": 0.3})
    )
    rows, keys = packed.q.shape[-2] - 1, packed.k.shape[-2] - 1  # of the same class as what stands in for a bound
    bounds = ((None, None), (rows, None), (None, keys), (rows, keys))
    calls = [packed._replace(max_seqlen_q=bound, max_seqlen_k=other) for bound, other in bounds]
    for args in 2 * [*calls, dropping, dropping._replace(dropout_p=0.0)]:
        out, lse = ops.empty_outputs(args)
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        assert differences(launch, one, other, ("out", "lse")) == [], args[13:]


def test_values_that_lie_in_the_keys(recorder: Recorder) -> None:
    """The same launches, but a plan of their own: a family may ask for it."""
    q, k = (torch.randn(2, 4, 40, 128, dtype=torch.bfloat16) for _ in range(2))
    for v in (k[..., :64], k[..., :64].clone()):
        args = AttentionArgs(q, k, v)
        out, lse = ops.empty_outputs(args)
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        assert differences(launch, one, other, ("out", "lse")) == []
    assert extension.executor().num_plans() == 2


@pytest.mark.parametrize("names", ["k", "v", "kv"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_operand_has_a_map_of_its_own_dtype(
    dtype: torch.dtype, names: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan of a family that would take such a call."""
    plain = AttentionArgs(*(torch.randn(2, 4, 256, 128).to(torch.bfloat16) for _ in range(3)))
    args = plain._replace(**{name: getattr(plain, name).to(dtype) for name in names})
    out, lse = ops.empty_outputs(args)
    launch = cuda.forward_launch(plain, out, lse)
    launch = launch._replace(tensors=cuda.tensors_of(args) | {"out": out, "lse": lse})
    assert {"k", "v"} <= {tensor_map.tensor for tensor_map in launch.plan.maps}
    one = by_python(recorder, launch, (out, lse))

    def planned(args: AttentionArgs) -> tuple[None, None]:
        native.introduce(0, fake_gpu.NUM_MULTIPROCESSORS)
        assert native.register_plan(native.FORWARD, launch.plan, fake_gpu.NUM_MULTIPROCESSORS, launch.arch)
        return None, None

    monkeypatch.setattr(ops, "forward_by_python", planned)
    other = by_cpp(recorder, ops.forward, args, launch)
    assert other is not None
    assert differences(launch, one, other, ("out", "lse")) == []


def test_a_dtype_without_a_map_is_an_error(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AttentionArgs(*(torch.randn(2, 4, 256, 128).to(torch.bfloat16) for _ in range(3)))
    args = plain._replace(k=plain.k.double())
    launch = cuda.forward_launch(plain, *ops.empty_outputs(plain))
    with pytest.raises(flashtile.Unsupported, match="tensor map: got float64; accepted: float16, float32, bfloat16"):
        executor.execute(launch._replace(tensors=launch.tensors | {"k": args.k}))
    monkeypatch.setattr(
        ops,
        "forward_by_python",
        lambda args: (native.register_plan(native.FORWARD, launch.plan, 132, launch.arch) and None, None),
    )
    native.introduce(0, 132)
    with pytest.raises(driver.DriverError, match="cuTensorMapEncodeTiled of a tensor whose dtype has no map"):
        ops.forward(*args)


def test_rows_that_overlap_and_gradients_of_odd_memory(recorder: Recorder) -> None:
    rows = torch.randn(1, 2, 40, 64, dtype=torch.bfloat16)
    overlapping = torch.randn(6400, dtype=torch.bfloat16).as_strided((1, 2, 40, 64), (5000, 2560, 32, 1))
    packed = torch.randn(2, 7, 3, 4, 64, dtype=torch.bfloat16)  # (batch, rows, q k v, heads, dim)
    sequences = [
        (rows, rows, rows),
        (overlapping, rows, rows),
        (rows, overlapping, rows),
        tuple(packed[:, :, place].transpose(1, 2) for place in range(3)),
        (rows.expand(3, 2, 40, 64), rows.expand(3, 2, 40, 64), rows.expand(3, 2, 40, 64)),
        (torch.randn(40, 1, 2, 64).permute(1, 2, 0, 3), rows.float(), rows.float()),
        (torch.randn(2, 1, 64, 1).transpose(1, 3).transpose(1, 2)[..., :1],) * 3,
    ]
    for q, k, v in sequences:
        args = AttentionArgs(q, k, v)
        out, lse = ops.empty_outputs(args)
        launch = cuda.forward_launch(args, out, lse)
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        assert differences(launch, one, other, ("out", "lse")) == []
        for wanted in (
            (True, True, True, False, False),
            (False, True, False, False, False),
            (False, False, True, False, False),
        ):
            grads, dout = ops.empty_grads(args, ops.GradNeeds(*wanted)), torch.randn(out.shape).to(out.dtype)
            launch = cuda.backward_launch(args, dout, None, out, lse, grads)
            one = by_python(recorder, launch, tuple(grads))
            other = by_cpp(recorder, ops.backward, (dout, None, *args, out, lse, wanted), launch)
            assert other is not None
            assert differences(launch, one, other, GRADS) == [], (q.stride(), wanted)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", [(1, 4, 40, 64), (3, 1, 40, 64), (1, 1, 40, 64)], ids=["batch", "heads", "both"])
def test_a_gradient_that_is_broadcast_over_heads_is_read_in_place(
    sizes: tuple[int, ...], layout: str, recorder: Recorder
) -> None:
    swap = (lambda tensor: tensor.transpose(1, 2)) if layout == "bshd" else (lambda tensor: tensor)
    q = swap(torch.randn(3, 4, 40, 64, dtype=torch.bfloat16))
    args = AttentionArgs(q, q, q, layout=layout)
    out, lse = ops.empty_outputs(args)
    dout = swap(torch.randn(sizes, dtype=torch.bfloat16).expand(3, 4, 40, 64))
    wanted = (True, True, True, False, False)
    grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
    launch = cuda.backward_launch(args, dout, None, out, lse, grads)
    assert launch.tensors["dout"] is dout
    one = by_python(recorder, launch, tuple(grads))
    other = by_cpp(recorder, ops.backward, (dout, None, *args, out, lse, wanted), launch)
    assert other is not None
    assert differences(launch, one, other, GRADS) == []  # the address of dout among them


# Rows that are not aligned


LONG = Case(
    dtype=torch.bfloat16, batch=1, heads=2, heads_kv=1, seqlen_q=1030, seqlen_k=1100, head_dim=64, head_dim_v=64
)
UNALIGNED: list[dict[str, Any]] = [
    {"memory": "offset"},
    {"memory": "sliced"},
    {"memory": "offset", "layout": "bshd", "dtype": torch.float16},
    {"memory": "expanded", "heads": 4, "heads_kv": 4, "head_dim": 30, "head_dim_v": 30},
    {"head_dim": 65, "head_dim_v": 65, "batch": 2},
    {"head_dim": 127, "head_dim_v": 101, "layout": "bshd"},
    {"head_dim": 255, "head_dim_v": 255, "seqlen_q": 1024, "seqlen_k": 1024},
    {"head_dim": 96, "head_dim_v": 90, "memory": "swapped"},
    {"head_dim": 33, "head_dim_v": 33, "bias": "qk", "has_sinks": True},
]


@pytest.mark.parametrize("changes", UNALIGNED, ids=lambda changes: ", ".join(map(str, changes.values())))
def test_rows_that_are_not_aligned_are_copied(changes: dict[str, Any], recorder: Recorder) -> None:
    """Long calls take the kernels for aligned rows, on copies; by both executors."""
    inputs = Case(**{**{name: getattr(LONG, name) for name in LONG.__dataclass_fields__}, **changes}).make(0)
    args = inputs.args
    sinks = {} if args.sinks is None else {"sinks": args.sinks.float()}
    args = args._replace(**sinks)
    out, lse = ops.empty_outputs(args)
    launch = cuda.forward_launch(args, out, lse)
    assert {step.name for step in launch.plan.steps} & {"fwd_sm90_kernel"}
    copied = {operand.name for operand in launch.plan.operands if is_copied(operand, launch)}
    assert copied == {name for name in ("q", "k", "v", "out") if not is_aligned16(launch.tensors[name])} != set()
    one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
    assert other is not None
    assert differences(launch, one, other, ("out", "lse")) == []
    wanted = (True, True, args.layout == "bhsd", args.bias is not None, False)
    grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
    launch = cuda.backward_launch(args, inputs.dout, None, out, lse, grads)
    assert {step.name for step in launch.plan.steps} & {"bwd_sm90_kernel", "bwd_sm90_dkdv_kernel"}
    one = by_python(recorder, launch, tuple(grads))
    other = by_cpp(recorder, ops.backward, (inputs.dout, None, *args, out, lse, wanted), launch)
    assert other is not None
    assert differences(launch, one, other, GRADS) == []


@pytest.mark.parametrize("head_dim", [36, 64, 98, 100, 101])
def test_rows_of_an_output_in_float32_hold_what_kernels_write(head_dim: int, recorder: Recorder) -> None:
    """A row of 16-bit elements may be padded by more columns than one of float32."""
    larger = torch.randn(3, 1, 2, 2048, head_dim + 1, dtype=torch.bfloat16)
    args = AttentionArgs(*larger[..., 1:].unbind(), out_dtype=torch.float32)
    out, lse = ops.empty_outputs(args)
    launch = cuda.forward_launch(args, out, lse)
    written = Params.from_buffer_copy(launch.plan.image).head_dim_v
    assert executor.prepare(launch.plan, launch.tensors)["out"].stride(-2) >= written
    one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
    assert other is not None
    assert differences(launch, one, other, ("out", "lse")) == []


@pytest.mark.parametrize("wanted", [(True, True, True, False, False), (False, False, True, False, False)])
def test_gradients_of_unowned_keys_are_zeros_through_copies(wanted: tuple[bool, ...], recorder: Recorder) -> None:
    """Zeros go to the copy that kernels write, which then overwrites the result."""
    q, k, v = (torch.randn(4, total, 65, dtype=torch.bfloat16) for total in (2100, 2200, 2200))
    cu = [torch.tensor(bounds, dtype=torch.int32) for bounds in ((0, 1000, 2100), (0, 1200, 2200))]
    args = AttentionArgs(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=1100, max_seqlen_k=1200)
    out, lse = ops.empty_outputs(args)
    dout = torch.randn(out.shape).to(out.dtype)
    grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
    launch = cuda.backward_launch(args, dout, None, out, lse, grads)
    assert plans.Memset("dv") in launch.plan.steps
    one = by_python(recorder, launch, tuple(grads))
    other = by_cpp(recorder, ops.backward, (dout, None, *args, out, lse, wanted), launch)
    assert other is not None
    assert differences(launch, one, other, GRADS) == []


@pytest.mark.parametrize("head_dim", [64, 65])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_copies_have_the_elements_and_zeros_behind_them(name: str, head_dim: int, recorder: Recorder) -> None:
    def tensor(heads: int) -> Tensor:
        larger = torch.randn(2, 1024, heads, head_dim + 2, dtype=torch.bfloat16)
        return larger[..., 1:-1].transpose(1, 2)

    args = AttentionArgs(tensor(3), tensor(1).expand(2, 3, 1024, head_dim), tensor(3))
    given = getattr(args, name)
    out, lse = ops.empty_outputs(args)
    launch = cuda.forward_launch(args, out, lse)
    rows = given[:, :1] if name == "k" else given  # heads that are one in memory stay one
    padding = 72 if head_dim == 65 else 64
    expected = torch.zeros(*rows.shape[:-1], padding, dtype=rows.dtype)
    expected[..., :head_dim] = rows
    (offset,) = (patch.offset for patch in launch.plan.patches if patch.rule == plans.Pointer(name))
    with recorder.watch(offset, expected.numel() * 2) as watched:
        found = []
        by_python(recorder, launch, (out, lse))
        found.append(watched())
        assert by_cpp(recorder, ops.forward, args, launch) is not None
        found.append(watched())
    for memory in found:
        assert torch.equal(torch.frombuffer(bytearray(memory), dtype=rows.dtype), expected.flatten())


@pytest.mark.parametrize("is_copied_now", [False, True])
def test_a_bias_off_4_bytes_is_copied(is_copied_now: bool, recorder: Recorder) -> None:
    """Element by element it takes 16 times as long in a backward pass."""
    columns = 49 if is_copied_now else 50
    q, k, v = (torch.randn(3, 2, length, 64, dtype=torch.bfloat16) for length in (300, columns, columns))
    shapes = ((1, 2, 300, columns), (3, 2, 300, columns))
    biases = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    biases += [biases[0].expand(shapes[1]), torch.randn(1, 2, columns, 300, dtype=torch.bfloat16).transpose(2, 3)]
    for place, bias in enumerate(biases):
        args = AttentionArgs(q, k, v, bias)
        out, lse = ops.empty_outputs(args)
        with families.forced("fwd_sm90", "bwd_sm90"):
            assemble.clear_plans()
            launch = cuda.forward_launch(args, out, lse)
            copied = {operand.name for operand in launch.plan.operands if is_copied(operand, launch)}
            assert copied == ({"bias"} if is_copied_now or place == 3 else set())
            (offset,) = (patch.offset for patch in launch.plan.patches if patch.rule == plans.Pointer("bias"))
            rows = bias[:1] if place == 2 else bias
            with recorder.watch(offset, 2 * columns) as watched:
                for _ in range(2):
                    one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
                    found = torch.frombuffer(bytearray(watched()), dtype=bias.dtype)
                    assert place == 3 or torch.equal(found, rows[0, 0, 0])
            assert other is not None
            assert differences(launch, one, other, ("out", "lse")) == []
            if place == 3:  # whose gradient is no tensor that kernels write
                continue
            wanted = (True, True, True, True, False)
            grads, dout = ops.empty_grads(args, ops.GradNeeds(*wanted)), torch.randn(out.shape).to(out.dtype)
            launch = cuda.backward_launch(args, dout, None, out, lse, grads)
            one = by_python(recorder, launch, tuple(grads))
            other = by_cpp(recorder, ops.backward, (dout, None, *args, out, lse, wanted), launch)
            assert other is not None
            assert differences(launch, one, other, GRADS) == []
        assemble.clear_plans()
    for bias in (torch.randn(3, 1, 1, 49).bfloat16(), torch.randn(1, 2, 300, 49), torch.randn(3, 1, 300, 1).bfloat16()):
        assert executor.has_pairs(bias)  # one row in memory; float32; one column


@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_whose_rows_overlap_is_read_in_place(batch: int, recorder: Recorder) -> None:
    """A bias by relative position as a view of its table: a copy would be as large as all scores."""
    q, k, v = (torch.randn(2, 3, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    table = torch.randn(3, 599, dtype=torch.bfloat16)
    bias = table.unfold(-1, 300, 1).expand(batch, 3, 300, 300)
    args = AttentionArgs(q, k, v, bias)
    out, lse = ops.empty_outputs(args)
    with families.forced("fwd_sm90"):
        assemble.clear_plans()
        launch = cuda.forward_launch(args, out, lse)
        assert executor.prepare(launch.plan, launch.tensors)["bias"] is bias
        one, other = by_python(recorder, launch, (out, lse)), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        assert differences(launch, one, other, ("out", "lse")) == []
    assemble.clear_plans()


def test_short_calls_and_caches_are_read_where_they_are() -> None:
    plain = {name: getattr(LONG, name) for name in LONG.__dataclass_fields__} | {"head_dim": 65, "head_dim_v": 65}
    found = {}
    for name, changes in {
        "long": {},
        "short": {"seqlen_q": 1000},
        "few queries": {"seqlen_q": 1},
        "few keys": {"seqlen_k": 77},
        "cache": {"kind": "cache"},
        "used": {"kind": "used"},
        "paged": {"kind": "paged"},
        "float32": {"dtype": torch.float32},  # whose kernels take any rows
    }.items():
        problem = dataclasses.replace(Problem.of(Case(**{**plain, **changes}).make(0).args), arch="sm_90")
        found[name] = cuda.problem_key(problem, "forward").copies_rows
        assert ("copies" in cuda.CudaBackend().details(problem)) == found[name]
    assert found == {name: name == "long" for name in found}


@pytest.mark.parametrize("seqlen", [5, 300])
def test_a_gradient_off_16_bytes_takes_the_kernels_of_aligned_ones(seqlen: int, recorder: Recorder) -> None:
    q, k, v = (torch.randn(1, 2, seqlen, 64, dtype=torch.bfloat16) for _ in range(3))
    args = AttentionArgs(q, k, v)
    out, lse = ops.empty_outputs(args)
    wanted = (True, True, True, False, False)
    names = []
    for dout in (torch.randn(out.shape).to(out.dtype), torch.randn(out.numel() + 1).to(out.dtype)[1:].view(out.shape)):
        grads = ops.empty_grads(args, ops.GradNeeds(*wanted))
        launch = cuda.backward_launch(args, dout, None, out, lse, grads)
        names.append([step.name for step in launch.plan.steps])
        one = by_python(recorder, launch, tuple(grads))
        other = by_cpp(recorder, ops.backward, (dout, None, *args, out, lse, wanted), launch)
        assert other is not None
        (offset,) = (patch.offset for patch in launch.plan.patches if patch.rule == plans.Pointer("dout"))
        for done in (one, other):
            for _, image in done.launches:
                assert int.from_bytes(image[offset : offset + 8], "little") % 16 == 0
    assert names[0] == names[1]


def test_lse_that_nobody_wants_has_room_of_its_own(recorder: Recorder) -> None:
    for changes in ({}, {"deterministic": True}):
        args = Case(**{**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}, **changes}).make(0).args
        launch = cuda.forward_launch(args, *ops.empty_outputs(args))
        one, other = by_python(recorder, launch, ()), by_cpp(recorder, ops.forward, args, launch)
        assert other is not None
        recorder.reset(len(launch.plan.image))
        with torch.no_grad():
            mode = ops.dense_mode(**{name: getattr(args, name) or values[0] for name, values in DENSE_FIELDS.items()})
            out, lse = ops.dense_forward(args.q, args.k, args.v, args.scale, mode)
        assert lse is None
        offsets = {
            patch.rule.name: patch.offset for patch in launch.plan.patches if isinstance(patch.rule, plans.Pointer)
        }
        allocated = [
            name
            for name in offsets
            if name in ("out", "lse") or name in [workspace.name for workspace in launch.plan.workspaces]
        ]
        for (_, image), (_, expected) in zip(recorder.launches(), one.launches, strict=True):
            addresses = [int.from_bytes(image[offsets[name] : offsets[name] + 8], "little") for name in allocated]
            assert len(set(addresses) - {0}) == (2 if changes else len(allocated))
            assert addresses[allocated.index("out")] == out.data_ptr()
            for name in allocated:
                image[offsets[name] : offsets[name] + 8] = expected[offsets[name] : offsets[name] + 8] = bytes(8)
            assert image == expected


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("rotary", [None, torch.float32, torch.bfloat16])
def test_appends_are_launched_alike(
    rotary: torch.dtype | None, is_paged: bool, layout: str, recorder: Recorder
) -> None:
    def tensor(batch: int, rows: int) -> Tensor:
        shape = (batch, rows, 2, 64) if layout == "bshd" else (batch, 2, rows, 64)
        return torch.randn(shape).to(torch.bfloat16)

    table_of_pages = torch.zeros(3, 2, dtype=torch.int32) if is_paged else None
    for new in (1, 5):
        angles = None if rotary is None else torch.rand(50, 8).to(rotary)
        lengths = torch.zeros(3, dtype=torch.int32)
        caches = [tensor(7 if is_paged else 3, 16) for _ in range(2)]
        args = AppendArgs(
            *caches, tensor(3, new), tensor(3, new), lengths, table_of_pages, angles, angles, new == 5, layout
        )
        launch = cuda.append_launch(args)
        one, other = by_python(recorder, launch, ()), by_cpp(recorder, ops.append_kv, args, launch)
        assert other is not None
        assert differences(launch, one, other, ()) == []
    assert extension.executor().num_plans() == 1


# Steps of a cache: one call of C++ launches what the general path launches


def make_step(is_paged: bool, layout: str, rotary: bool, rows: int, new: int) -> dict[str, Any]:
    def tensor(batch: int, rows: int, heads: int) -> Tensor:
        made = torch.randn(batch, rows, heads, 64).to(torch.bfloat16)
        return made if layout == "bshd" else made.transpose(1, 2)

    pages = (7, 16) if is_paged else (3, 32)
    step = {"q": tensor(3, rows, 4), "k_cache": tensor(*pages, 2), "v_cache": tensor(*pages, 2), "layout": layout}
    step |= {"k": tensor(3, new, 2), "v": tensor(3, new, 2), "backend": "cuda"}
    if is_paged:
        step["block_table"] = torch.tensor([[1, 0], [2, 5], [4, 3]], dtype=torch.int32)
    if rotary:
        step |= {"rotary_cos": torch.rand(50, 16), "rotary_sin": torch.rand(50, 16)}
    return step


def pointers_at(image: bytearray, struct: Any, *names: str) -> list[int]:
    return [int.from_bytes(image[(at := getattr(struct, name).offset) : at + 8], "little") for name in names]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_launches_what_the_general_path_does(
    rotary: bool, is_paged: bool, layout: str, served: list[str], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, step_op = ctypes.sizeof(AppendParams), ops.append_step
    for rows, new, lengths in ((1, 1, torch.tensor([3, 0, 9], dtype=torch.int32)), (3, 2, 5), (2, 4, 7)):
        step = make_step(is_paged, layout, rotary, rows, new) | {"cache_seqlens": lengths, "causal": rows > 1}
        with native.python_only():
            recorder.reset(size)
            flashtile.attention_kvcache(**step)
            expected = recorder.launches()
        flashtile.attention_kvcache(**step)  # registers the plans
        count, before = len(served), num_fallbacks()
        monkeypatch.setattr(ops, "append_step", None)
        recorder.reset(size)
        out, lse = flashtile.attention_kvcache(**step, return_lse=True)
        monkeypatch.setattr(ops, "append_step", step_op)
        assert (len(served), num_fallbacks()) == (count, before)
        launches = recorder.launches()
        assert [numbers for numbers, _ in launches] == [numbers for numbers, _ in expected]
        assert len(launches) == 2
        (_, append), (_, read) = launches
        rotated, used = pointers_at(append, AppendParams, "rotated_q", "seqused_k")
        q, seqused = pointers_at(read, Params, "q", "seqused_k")
        assert seqused == used
        assert q == (rotated if rotary else step["q"].data_ptr())
        assert pointers_at(read, Params, "out", "lse") == [out.data_ptr(), lse.data_ptr()]
        # All but what each way has allocated, and a length that the general path makes a tensor
        changing = {"rotated_q", "seqused_k", *(() if isinstance(lengths, Tensor) else ("cache_seqlens",))}
        for struct, names, image, other in (
            (AppendParams, changing, append, expected[0][1]),
            (Params, {"q", "out", "lse", "seqused_k", "partial_out", "partial_stats"}, read, expected[1][1]),
        ):
            for name in names:
                at = getattr(struct, name).offset
                image[at : at + 8] = other[at : at + 8] = bytes(8)
            if not isinstance(lengths, Tensor) and struct is AppendParams:
                at = AppendParams.length.offset
                assert int.from_bytes(image[at : at + 4], "little") == lengths
                image[at : at + 4] = other[at : at + 4] = bytes(4)
            assert image == other


def test_one_length_without_an_append_is_written_to_the_device(served: list[str], recorder: Recorder) -> None:
    step = make_step(False, "bshd", False, 1, 1) | {"cache_seqlens": 11}
    step |= {"k": None, "v": None}
    flashtile.attention_kvcache(**step)
    before = num_fallbacks()
    recorder.reset(ctypes.sizeof(AppendParams))
    flashtile.attention_kvcache(**step)
    assert num_fallbacks() == before
    ((_, read),) = recorder.launches()
    (address,) = pointers_at(read, Params, "seqused_k")
    assert address != 0


def test_a_step_that_must_not_write_is_left_to_python(served: list[str], recorder: Recorder) -> None:
    """New rows that are part of a cache are copied first, and caches that share memory are refused, when plans for
    plain steps are known."""
    step = make_step(False, "bshd", False, 1, 1) | {"cache_seqlens": torch.tensor([3, 0, 9], dtype=torch.int32)}
    for _ in range(2):
        flashtile.attention_kvcache(**step)
    recorder.reset(ctypes.sizeof(AppendParams))
    flashtile.attention_kvcache(**step | {"k": step["k_cache"][:, 20:21]})
    (_, append), _ = recorder.launches()
    (k,) = pointers_at(append, AppendParams, "k")
    assert not 0 <= k - step["k_cache"].data_ptr() < step["k_cache"].nbytes
    recorder.reset(0)
    with pytest.raises(ValueError, match="v_cache: got the memory of k_cache"):
        flashtile.attention_kvcache(**step | {"v_cache": step["k_cache"]})
    for name, wrong in (
        ("k", step["k"][:2]),
        ("k", step["k"].float()),
        ("cache_seqlens", step["cache_seqlens"].long()),
        ("cache_seqlens", step["cache_seqlens"][:2]),
        ("rotary_cos", torch.rand(50, 16)),
    ):
        with pytest.raises((ValueError, TypeError), match="got"):
            flashtile.attention_kvcache(**step | {name: wrong})
    assert recorder.launches() == []


def test_angles_of_two_dtypes_are_read_as_one(recorder: Recorder) -> None:
    cache, new = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    angles, lengths = torch.rand(50, 8), torch.zeros(1, dtype=torch.int32)
    for cos, sin in ((angles, angles.bfloat16()), (angles.bfloat16(), angles)):
        args = AppendArgs(cache, cache, new, new, lengths, None, cos, sin, True, "bshd")
        launch = cuda.append_launch(args)
        tensors = executor.prepare(launch.plan, launch.tensors)
        assert tensors["rotary_cos"].dtype == tensors["rotary_sin"].dtype == torch.float32
        assert ", float," in launch.plan.steps[0].entry  # type: ignore[union-attr]
        assert by_cpp(recorder, ops.append_kv, args, launch) is not None


def set_at(index: int, number: int) -> Callable[[list[int]], list[int]]:
    """A change of one number of a serialized plan."""

    def change(numbers: list[int]) -> list[int]:
        changed = list(numbers)
        changed[index] = number
        return changed

    return change


# The last step of the plan is a kernel: (value, divisor) of its grid, threads, shared bytes, is_for_splits, max_blocks,
# cluster, starts_early
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda numbers: numbers[:-1], "a plan ends too early"),
        (lambda numbers: [*numbers, 0], "a plan does not end where it should"),
        (set_at(4, 99), "number 4 of a plan: got 99; accepted: 0 to 47"),
        (set_at(-2, 0), "cluster of a plan's step: got 0; accepted: 1 to 16"),
        (set_at(-2, 17), "cluster of a plan's step: got 17; accepted: 1 to 16"),
        (set_at(-6, 0), "threads of a plan's step: got 0; accepted: 1 to 1024"),
        (set_at(-8, 0), "divisor of a plan's grid: got 0; accepted: 1 to 2147483647"),
        (set_at(2, 0), "keys of a plan's split: got 0; accepted: 1 to 2147483647"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]], message: str
) -> None:
    args, serialize = PLAIN.make(0).args, native.serialize

    def changed(*values: Any) -> tuple[list[int], list[str]]:
        numbers, names = serialize(*values)
        return change(numbers), names

    monkeypatch.setattr(native, "serialize", changed)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ops.forward(*args)
    assert extension.executor().num_plans() == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cluster": 0}, "cluster: got 0 (int); accepted: 1 to 16."),
        ({"cluster": 17}, "cluster: got 17 (int); accepted: 1 to 16."),
        ({"cluster": 2, "max_blocks": 1}, "cluster: got 2 (int); accepted: 1 in a persistent grid."),
    ],
)
def test_a_step_with_a_wrong_cluster_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plans.Step("", "kernel", (("batch", 1),), 64, 64, 128, 0, **fields)


def test_a_plan_belongs_to_the_call_that_fell_back(recorder: Recorder) -> None:
    args = PLAIN.make(0).args
    launch = cuda.forward_launch(args, *ops.empty_outputs(args))
    native.introduce(0, 132)
    assert native.described(native.FORWARD, args) is None
    assert not native.register_plan(native.FORWARD, launch.plan, 132, launch.arch)
    with pytest.raises(RuntimeError, match="no call waits for a plan"):
        extension.executor().register_plan(native.FORWARD, ())
    assert extension.executor().num_plans() == 0


# As the public functions call it


@pytest.fixture
def served(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that Python has planned or run, as the steps of their plans."""
    names: list[str] = []
    execute, register_plan = executor.execute, native.register_plan

    def note(plan: plans.LaunchPlan) -> None:
        names.append("+".join(step.name for step in plan.steps if isinstance(step, plans.Step)))

    def executed(call: Launch) -> None:
        note(call.plan)
        execute(call)

    def planned(kind: int, plan: plans.LaunchPlan, *more: Any) -> bool:
        is_registered = register_plan(kind, plan, *more)
        if is_registered:
            note(plan)
        return is_registered

    monkeypatch.setattr(executor, "execute", executed)
    monkeypatch.setattr(native, "register_plan", planned)
    torch.use_deterministic_algorithms(False)
    return names


def make(*shape: int, **options: Any) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.bfloat16, **options) for _ in range(3)]


def test_python_plans_the_first_call_only(served: list[str], recorder: Recorder) -> None:
    q, k, v = make(2, 4, 100, 64)
    first = flashtile.attention(q, k, v, causal=True)
    assert len(served) == 1
    recorder.reset(0)
    again, lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    assert len(served) == 1
    assert len(recorder.launches()) == 1
    assert (again.shape, again.dtype, lse.shape, lse.dtype) == (first.shape, first.dtype, (2, 4, 100), torch.float32)
    # Lengths that were never seen before, of the same length class
    for length in range(101, 113):
        flashtile.attention(q, *(torch.randn(2, 4, length, 64, dtype=torch.bfloat16) for _ in range(2)), causal=True)
    assert len(served) == 1


@pytest.mark.parametrize("changes", VARIATIONS, ids=str)
def test_cpp_runs_the_first_call(changes: dict[str, Any], recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that Python has got as well: duplicates of all of them."""
    case = Case(**{**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}, **changes})
    inputs = case.make(0)
    args, execute = inputs.args, executor.execute
    if args.sinks is not None:
        args = args._replace(sinks=args.sinks.float())  # else copied, in Python
    out, lse = ops.empty_outputs(args)
    launch = cuda.forward_launch(args, out, lse)
    one = by_python(recorder, launch, (out, lse))
    monkeypatch.setattr(executor, "execute", None)
    with torch.no_grad():
        recorder.reset(len(launch.plan.image))
        before = num_fallbacks()
        results = ops.forward(*args)
        other = Done(recorder.launches(), results)
        assert num_fallbacks() == before + 1
        assert differences(launch, one, other, ("out", "lse")) == []
        if case.kind in ("paged", "cache"):
            return
        wanted = (True, True, True, args.bias is not None, args.sinks is not None)
        grads, dlse = ops.empty_grads(args, ops.GradNeeds(*wanted)), torch.randn_like(lse)
        launch = cuda.backward_launch(args, inputs.dout, dlse, out, lse, grads)
        monkeypatch.setattr(executor, "execute", execute)
        one = by_python(recorder, launch, tuple(grads))
        monkeypatch.setattr(executor, "execute", None)
        recorder.reset(len(launch.plan.image))
        results = ops.backward(inputs.dout, dlse, *args, out, lse, wanted)
        named = zip(results, wanted, strict=True)
        other = Done(recorder.launches(), tuple(grad if is_wanted else None for grad, is_wanted in named))
        assert differences(launch, one, other, GRADS) == []


def test_python_runs_what_cpp_could_not_after_all(
    served: list[str], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ has a plan and lacks memory for it."""
    q, k, v = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16), *make(1, 2, 4000, 64)[1:]
    monkeypatch.setattr(extension.executor(), "add_kept_zeros", lambda *region: None)
    for turn in range(1, 3):
        recorder.reset(0)
        flashtile.attention(q, k, v)
        assert len(served) == 2 * turn  # planned, and executed
        assert len(recorder.launches()) == 1


def test_python_only_is_nested() -> None:
    with native.python_only():
        with native.python_only():
            pass
        assert extension.executor().is_python_only()
    assert not extension.executor().is_python_only()


def test_a_cold_call_goes_to_python_once(recorder: Recorder) -> None:
    """And enters no more of it than it needs: tools/count_calls.py."""
    text = subprocess.run(
        [sys.executable, "tools/count_calls.py"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    found = {line[:24].strip(): [int(number) for number in line[24:].split()] for line in text.splitlines()[1:]}
    assert {name: numbers[-1] for name, numbers in found.items()} == {
        name: int(name.startswith("cold")) for name in found
    }
    most = {"hot forward": 3, "hot forward with grad": 5, "hot backward": 1, "first forward with grad": 8}
    most |= {"cold forward": 152, "cold backward": 152, "cold forward, window": 75}
    assert {name: found[name][1] for name, limit in most.items() if found[name][1] > limit} == {}


def test_a_kernel_that_was_not_needed_yet_is_made_when_it_is(served: list[str]) -> None:
    q, k, v = make(1, 1, 2, 64)
    flashtile.attention(q, k, v)
    flashtile.attention(q, k, v)
    assert len(served) == 1
    longer = torch.randn(1, 1, 4000, 64, dtype=torch.bfloat16)  # split, and combined
    flashtile.attention(q, longer, longer)
    assert len(served) == 2
    flashtile.attention(q, longer, longer)
    flashtile.attention(q, k, v)
    assert len(served) == 2


def test_cpp_copies_small_tensors(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "execute", None)
    q, k, v = make(1, 2, 3, 64, requires_grad=True)
    sinks = torch.rand(2, 2, dtype=torch.bfloat16)[:, 0].requires_grad_()
    for turn in range(2):
        before = native._module().num_fallbacks()
        out = flashtile.attention(q, k, v, alibi_slopes=torch.rand(4)[::2], sinks=sinks)
        *_, dsinks = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        assert (dsinks.shape, dsinks.dtype, len(served)) == ((2,), torch.bfloat16, 2), turn
        assert native._module().num_fallbacks() - before == (0 if turn else 2)
    with pytest.raises(TypeError, match="sinks: got int32"):
        flashtile.attention(q, k, v, sinks=torch.ones(4, dtype=torch.int32)[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_small_tensors_of_any_form_on_the_cpu(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 9, 16, dtype=dtype) for _ in range(3))
    dout = torch.randn_like(q)
    results = []
    for form in (lambda x: x, lambda x: x.repeat_interleave(2)[::2], lambda x: x.to(q.dtype), lambda x: x):
        slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 1]), torch.tensor([1.0, -1, 0.5, 2])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)] + [form(sinks).requires_grad_()]
        for _ in range(2):
            out = flashtile.attention(*leaves[:3], alibi_slopes=form(slopes), sinks=leaves[3], backend="cpu")
            grads = torch.autograd.grad(out, leaves, dout)
        assert grads[3].dtype == leaves[3].dtype
        results.append((out, *grads[:3], grads[3].to(q.dtype)))
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            torch.testing.assert_close(one, other)


def test_flags_of_a_join_are_kept_zeros_of_one_stream_and_capture(served: list[str], recorder: Recorder) -> None:
    q, k, v = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16), *make(1, 2, 4000, 64)[1:]
    offset, size = DecodeSm90Params.part_flags.offset, ctypes.sizeof(DecodeSm90Params)

    def address() -> int:
        recorder.reset(size)
        flashtile.attention(q, k, v)
        ((_, image),) = recorder.launches()
        return int.from_bytes(image[offset : offset + 8], "little")

    eager = address()
    assert (ctypes.c_uint32 * (2 * fake_gpu.NUM_MULTIPROCESSORS)).from_address(eager)[:] == [0] * 264
    assert address() == eager
    assert len(served) == 1
    # What a graph has captured may run beside the stream: it has zeros of its own, from its first call on
    recorder.library.fake_capture(7)
    captured = address()
    assert len(served) == 2
    assert captured != eager
    assert address() == captured
    recorder.library.fake_capture(8)
    assert address() not in (eager, captured)
    recorder.library.fake_capture(0)
    assert address() == eager
    assert len(served) == 3


@pytest.mark.parametrize(("refused", "captured", "emptied"), [(1, False, 1), (2, False, 1), (1, True, 0)])
def test_torchs_cache_is_emptied_where_it_holds_all_memory(
    refused: int, captured: bool, emptied: int, served: list[str], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16), *make(1, 2, 4000, 64)[1:]
    empties: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: empties.append(True))
    recorder.library.fake_capture(7 if captured else 0)
    recorder.library.fake_refuse_memory(refused)
    try:
        if refused > emptied:
            with pytest.raises(driver.DriverError, match="cuMemAlloc_v2 of 4096 bytes failed"):
                flashtile.attention(q, k, v)
        else:
            flashtile.attention(q, k, v)
            assert len(recorder.launches()) == 1
    finally:
        recorder.library.fake_capture(0)
        recorder.library.fake_refuse_memory(0)
    assert len(empties) == emptied


def test_a_plan_that_replaces_another_has_its_kernels(recorder: Recorder) -> None:
    """A kernel that the new plan's first call does not need is there for the next one."""
    args = Case(dtype=torch.bfloat16, batch=1, heads=1, heads_kv=1, seqlen_q=200, seqlen_k=4000).make(0).args
    ops.forward(*args._replace(num_splits=4))
    assemble.clear_plans()
    ops.forward(*args._replace(num_splits=1))
    before = num_fallbacks()
    recorder.reset(0)
    ops.forward(*args._replace(num_splits=4))
    assert (num_fallbacks(), len(recorder.launches())) == (before, 2)


def test_flags_of_a_join_lie_on_the_device_of_the_call(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the current device is: its default stream is not that of the call's."""
    current, asked = [1], list[int]()

    @contextmanager
    def on_device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    find = driver.stream_and_capture
    monkeypatch.setattr(executor, "on_device", on_device)
    monkeypatch.setattr(driver, "stream_and_capture", lambda stream: asked.append(current[-1]) or find(stream))
    q, cache = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(1, 4000, 4, 64).bfloat16()
    flashtile.attention_kvcache(q, cache, cache)
    assert len(served) == 1
    assert asked
    assert set(asked) == {0}


def test_more_tiles_than_32_bits_number_are_refused(served: list[str]) -> None:
    """Where a plan is known, too. Only the results would take memory."""

    def call(batch: int, heads: int) -> Tensor:
        q, k = (torch.zeros(1, 1, length, 8, dtype=torch.bfloat16) for length in (1, 1 << 16))
        q = q.expand(batch, heads, -1, -1)
        k = k.expand(batch, heads, -1, -1)
        with families.forced("fwd_sm90"):
            return flashtile.attention(q, k, k, backend="cuda")

    call(1 << 13, 8)
    call(1 << 14, 8)
    assert len(served) == 1
    with pytest.raises(flashtile.Unsupported, match="more tiles of queries than kernels number in 32 bits"):
        call(1 << 27, 8)


def test_what_is_returned_belongs_to_the_caller_alone(served: list[str]) -> None:
    q, k, v = make(2, 4, 64, 64)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    alone, dout = torch.empty(1)._use_count(), torch.randn(2, 4, 64, 64, dtype=torch.bfloat16)
    for _ in range(2):
        with torch.no_grad():
            out, lse = flashtile.attention(q, k, v, return_lse=True)
            without = flashtile.attention(q, k, v)
        grads = torch.autograd.grad(flashtile.attention(*leaves), leaves, dout)
    assert len(served) == 2
    assert [tensor._use_count() for tensor in (out, lse, without, *grads)] == [alone] * 6


def test_both_passes(served: list[str]) -> None:
    q, k, v = make(2, 4, 64, 64, requires_grad=True)
    dout = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16)
    for _ in range(3):
        out = flashtile.attention(q, k, v)
        assert out.requires_grad
        grads = torch.autograd.grad(out, (q, k, v), dout)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert len(served) == 2  # one of each pass
    # Of k alone; then through lse alone
    out = flashtile.attention(q.detach(), k, v.detach())
    assert torch.autograd.grad(out, (k,), dout)[0].shape == k.shape
    assert torch.autograd.grad(flashtile.attention(q, k, v, return_lse=True)[1].sum(), (q,))[0].shape == q.shape
    parameter = torch.nn.Parameter(torch.randn(2, 4, 64, 64, dtype=torch.bfloat16))
    flashtile.attention(parameter, k, v).backward(dout)
    assert parameter.grad is not None
    with torch.no_grad():
        count = len(served)
        assert not flashtile.attention(parameter, k, v).requires_grad
        assert len(served) == count  # the plan of a forward pass serves calls without gradients too


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}], ids=str)  # the dense overload, and the full one
def test_a_forward_pass_with_gradients_plans_nothing_anew(
    options: dict[str, Any], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make(2, 4, 64, 64)
    flashtile.attention(q, k, v, **options)
    functions = len(executor._functions)
    monkeypatch.setattr(registry, "select", None)  # a call that is planned asks it
    q.requires_grad_()
    for leaves in ((q, k, v), (q, k.requires_grad_(), v.requires_grad_())):
        assert flashtile.attention(*leaves, **options).requires_grad
    assert (len(served), len(executor._functions)) == (1, functions)


def test_a_named_backend_must_take_the_backward_pass_too(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = cuda.CudaBackend.refuse
    monkeypatch.setattr(
        cuda.CudaBackend,
        "refuse",
        lambda self, problem, op="forward": "not here" if op == "backward" else refuse(self, problem, op),
    )
    q, k, v = make(2, 4, 64, 64)
    for _ in range(2):
        flashtile.attention(q, k, v, backend="cuda")
    with pytest.raises(flashtile.Unsupported, match="'cuda', which refuses: not here"):
        flashtile.attention(q.requires_grad_(), k, v, backend="cuda")


def test_an_append_is_launched_once(served: list[str], recorder: Recorder) -> None:
    caches, new = torch.zeros(2, 3, 16, 2, 64), torch.randn(2, 3, 1, 2, 64)
    for turn in range(3):
        recorder.reset(0)
        ops.append_kv(*caches, *new, torch.zeros(3, dtype=torch.int32), None, None, None, True, "bshd")
        assert len(recorder.launches()) == 1
        assert len(served) == 1, turn


def test_an_append_counts_as_a_change_of_the_caches(served: list[str], recorder: Recorder) -> None:
    k_cache, v_cache, new = torch.zeros(3, 16, 2, 64), torch.zeros(3, 16, 2, 64), torch.randn(3, 1, 2, 64)
    for _ in range(3):
        before = k_cache._version, v_cache._version
        flashtile.attention_kvcache(new, k_cache, v_cache, k=new, v=new, cache_seqlens=3, backend="cuda")
        assert k_cache._version > before[0]
        assert v_cache._version > before[1]


def test_an_append_to_caches_that_differ_is_refused(served: list[str], recorder: Recorder) -> None:
    cache, new, lengths = torch.zeros(3, 16, 2, 64), torch.randn(3, 1, 2, 64), torch.zeros(3, dtype=torch.int32)
    table_of_pages = torch.zeros(3, 1, dtype=torch.int32)
    wrong = [(cache[:, :15], new, None), (cache[:, :, :1], new[:, :, :1], None), (cache[:2], new, table_of_pages)]
    for _ in range(2):
        for v_cache, v, pages in wrong:
            recorder.reset(0)
            with pytest.raises(ValueError, match="v_cache: got shape"):
                ops.append_kv(cache, v_cache, new, v, lengths, pages, None, None, True, "bshd")
            assert recorder.launches() == []
        with pytest.raises(TypeError, match="v_cache: got float16; accepted: float32, as k_cache"):
            ops.append_kv(cache, cache.half(), new, new.half(), lengths, None, None, None, True, "bshd")
        for pages in (None, table_of_pages):
            ops.append_kv(cache, cache.clone(), new, new, lengths, pages, None, None, True, "bshd")


def test_sizes_are_checked_where_a_plan_is_known(served: list[str]) -> None:
    """What the public functions cannot get wrong: sizes of an append, and of what a backward pass is given."""
    cache, new, lengths = torch.zeros(3, 16, 2, 64), torch.randn(3, 1, 2, 64), torch.zeros(3, dtype=torch.int32)
    pages, angles = torch.zeros(3, 1, dtype=torch.int32), torch.rand(50, 8)
    dense = AppendArgs(cache, cache.clone(), new, new, lengths, None, angles, angles, True, "bshd")
    paged = dense._replace(block_table=pages)
    expanded = cache[:1].expand(3, 16, 2, 64)
    appends = [
        *(dense._replace(**{name: expanded}) for name in ("k_cache", "v_cache")),
        *(
            dense._replace(**{name: wrong})
            for name in ("k", "v")
            for wrong in (new[:2], new[:, :, :1], new[..., :32], new[:, :0])
        ),
        dense._replace(k=new.expand(3, 2, 2, 64)),
        dense._replace(k=new[:2], v=new[:2], cache_seqlens=lengths[:2]),
        dense._replace(cache_seqlens=lengths[:2]),
        *(paged._replace(block_table=wrong) for wrong in (pages[:2], pages[:, :0])),
        dense._replace(rotary_sin=angles[:49]),
        dense._replace(rotary_cos=torch.rand(50, 33), rotary_sin=torch.rand(50, 33)),
    ]
    q, k, v = make(1, 2, 16, 64)
    lse, needs = torch.randn(1, 2, 16), (True, True, True, False, False)
    args = tuple(AttentionArgs(q, k, v))
    with torch.no_grad():
        for append in (dense, paged):
            ops.append_kv(*append)
            assert not falls_back(lambda append=append: ops.append_kv(*append))
        for append in appends:
            assert falls_back(lambda append=append: ops.append_kv(*append))
        ops.backward(q, lse, *args, q, lse, needs)
        assert not falls_back(lambda: ops.backward(q, lse, *args, q, lse, needs))
        for dout, dlse, out, stats in (
            (q[:, :, :15], lse, q, lse),
            (q, torch.randn(1, 2, 15), q, lse),
            (q, lse, q[..., :32], lse),
            (q, lse, q, lse[:, :1]),
        ):
            with pytest.raises(ValueError, match="accepted: shape"):
                ops.backward(dout, dlse, *args, out, stats, needs)


def test_a_backward_pass_that_is_differentiated_is_left_to_python(served: list[str]) -> None:
    q, k, v = make(1, 2, 16, 64, requires_grad=True)
    dout = torch.randn(1, 2, 16, 64, dtype=torch.bfloat16)
    for _ in range(2):
        torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), dout)
    out = flashtile.attention(q, k, v)
    with pytest.warns(flashtile.SlowPathWarning, match="no second derivatives"):
        grads = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    assert all(grad.requires_grad for grad in grads)


def wrong_calls() -> list[tuple[str, Any]]:
    q, k, v = make(2, 4, 16, 64)
    bias, mask, sinks = torch.randn(2, 4, 16, 16), torch.ones(2, 4, 16, 16, dtype=torch.bool), torch.randn(4)
    rng, cu = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 7, 16], dtype=torch.int32)
    packed = torch.randn(16, 4, 64, dtype=torch.bfloat16)
    pages, lengths = torch.randn(5, 8, 4, 64, dtype=torch.bfloat16), torch.tensor([3, 4], dtype=torch.int32)
    block_table, slopes = torch.zeros(2, 2, dtype=torch.int32), torch.rand(2, 4)
    attention, varlen, kvcache = flashtile.attention, flashtile.attention_varlen, flashtile.attention_kvcache

    def cached(**changes: Any) -> Tensor:
        options = {"cache_seqlens": lengths, "block_table": block_table, **changes}
        return kvcache(q.transpose(1, 2), pages, pages, **options)  # type: ignore[return-value]

    # The first of each group is right
    return [
        ("plain", lambda: attention(q, k, v)),
        ("rows of v", lambda: attention(q, k, v[:, :, :15])),
        ("heads of k", lambda: attention(q, k[:, :3], v[:, :3])),
        ("heads of v", lambda: attention(q, k, v[:, :2])),
        ("batch of k and v", lambda: attention(q, k[:1], v[:1])),
        ("head_dim of k", lambda: attention(q, k[..., :56], v)),
        ("rows of stride 2", lambda: attention(q, k, torch.randn(2, 4, 16, 128, dtype=torch.bfloat16)[..., ::2])),
        ("dtype of v", lambda: attention(q, k, v.half())),
        ("8 bits of k", lambda: attention(q, k.to(torch.float8_e4m3fn), v)),
        ("8 bits of v", lambda: attention(q, k, v.to(torch.float8_e5m2))),
        ("8 bits", lambda: attention(*(tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)))),
        ("dtype of q", lambda: attention(q.long(), k.long(), v.long())),
        ("three dimensions", lambda: attention(q[0], k[0], v[0])),
        ("another device", lambda: attention(q, k.to("meta"), v)),
        ("no heads", lambda: attention(q[:, :0], k, v)),
        ("window", lambda: attention(q, k, v, window=(-7, 0))),
        ("scale", lambda: attention(q, k, v, scale=float("inf"))),
        ("softcap", lambda: attention(q, k, v, softcap=-1.0)),
        ("dropout_p", lambda: attention(q, k, v, dropout_p=1.0, rng_state=rng)),
        ("layout", lambda: attention(q, k, v, layout="sbhd")),
        ("causal", lambda: attention(q, k, v, causal="left")),
        ("backend", lambda: attention(q, k, v, backend="cudnn")),
        ("no tensor", lambda: attention(q, k, 1.0)),
        ("bias", lambda: attention(q, k, v, bias=bias)),
        ("columns of bias", lambda: attention(q, k, v, bias=bias[..., :15])),
        ("heads of bias", lambda: attention(q, k, v, bias=bias[:, :2])),
        ("mask", lambda: attention(q, k, v, mask=mask)),
        ("rows of mask", lambda: attention(q, k, v, mask=mask[:, :, :9])),
        ("sinks", lambda: attention(q, k, v, sinks=sinks)),
        ("number of sinks", lambda: attention(q, k, v, sinks=sinks[:3])),
        ("slopes", lambda: attention(q, k, v, alibi_slopes=slopes)),
        ("batch of slopes", lambda: attention(q, k, v, alibi_slopes=slopes[:1])),
        ("dropout", lambda: attention(q, k, v, dropout_p=0.5, rng_state=rng)),
        ("rng_state", lambda: attention(q, k, v, dropout_p=0.5, rng_state=torch.zeros(3, dtype=torch.int64))),
        ("varlen", lambda: varlen(packed, packed, packed, cu, cu)),
        ("cu_seqlens_k", lambda: varlen(packed, packed, packed, cu, cu[:2])),
        ("cu_seqlens_q of nothing", lambda: varlen(packed, packed, packed, cu[:0], cu)),
        ("max_seqlen_q", lambda: varlen(packed, packed, packed, cu, cu, -5, 9)),
        ("paged", cached),
        ("rows of block_table", lambda: cached(block_table=block_table[:1])),
        ("cache_seqlens", lambda: cached(cache_seqlens=lengths[:1])),
        ("num_splits", lambda: cached(num_splits=-1)),
    ]


def test_bad_input_is_refused_in_the_same_words(served: list[str]) -> None:
    """After calls that are right, so that there is a plan to take by mistake."""

    def outcome(call: Any) -> tuple[str, str]:
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    calls = wrong_calls()
    for _ in range(2):
        found = {name: outcome(call) for name, call in calls}
    with native.python_only():
        expected = {name: outcome(call) for name, call in calls}
    assert found == expected
    right = {"plain", "bias", "mask", "sinks", "slopes", "dropout", "varlen", "paged"}
    assert {name for name, (kind, _) in found.items() if not kind} == right


def test_checking_reads_lengths_in_every_call(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, cu = torch.randn(16, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 7, 16], dtype=torch.int32)
    bad = torch.tensor([0, 9, 5], dtype=torch.int32)
    for lengths in (cu, cu, bad):  # kernels clamp what nobody has checked
        flashtile.attention_varlen(packed, packed, packed, lengths, lengths)
    assert len(served) == 1
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    monkeypatch.setattr(executor, "execute", None)  # C++ runs what has been checked
    for _ in range(2):
        flashtile.attention_varlen(packed, packed, packed, cu, cu)
    with pytest.raises(ValueError, match="never decrease"):
        flashtile.attention_varlen(packed, packed, packed, bad, bad)
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    flashtile.attention_varlen(packed, packed, packed, bad, bad)


def test_checking_makes_a_plan_once(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    q, k, v = make(1, 2, 3, 64, requires_grad=True)
    longer = torch.randn(1, 2, 4000, 64, dtype=q.dtype)
    for turn in range(3):
        out = flashtile.attention(q, k, v, backend="cuda")
        torch.autograd.grad(out.sum(), (q, k, v))
        assert len(served) == 2, turn
    flashtile.attention(q, longer, longer, backend="cuda")  # other kernels of the same plan, or another plan
    found = len(served)
    flashtile.attention(q, longer, longer, backend="cuda")
    assert len(served) == found


@pytest.mark.parametrize("odd", ["out", "dout"])
def test_checking_looks_at_the_memory_of_every_row(
    odd: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the results, too: a checked call takes the plan that an unchecked one takes."""
    args, found, register_plan = AttentionArgs(*make(2, 2, 300, 64)), list[plans.LaunchPlan](), native.register_plan

    def registered(kind: int, plan: plans.LaunchPlan, *more: Any) -> bool:
        found.append(plan)
        return register_plan(kind, plan, *more)

    monkeypatch.setattr(native, "register_plan", registered)
    given = {name: torch.randn(2, 2, 300, 64, dtype=torch.bfloat16) for name in ("out", "dout")}
    given[odd] = torch.randn(given[odd].numel() + 1, dtype=torch.bfloat16)[1:].view(2, 2, 300, 64)  # two bytes off
    for checking in ("0", "1"):
        monkeypatch.setenv("FLASHTILE_CHECK", checking)
        native.clear_plans()
        ops.backward(given["dout"], None, *args, given["out"], torch.randn(2, 2, 300), (True, True, True, False, False))
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_call_of_too_many_key_tiles_takes_no_decode_kernel(served: list[str]) -> None:
    """In C++ and in Python: keys that are expanded over the batch."""
    k = torch.empty(1, 1, 2**19, 64, dtype=torch.bfloat16)
    for batch, is_decode in ((8, True), (2**18, False)):
        q, keys = torch.empty(batch, 1, 1, 64, dtype=torch.bfloat16), k.expand(batch, 1, 2**19, 64)
        flashtile.attention(q, keys, keys, backend="cuda")
        assert ("decode" in served[-1]) == is_decode, served
        assert len(served) == (1 if is_decode else 2)
        with native.python_only():
            flashtile.attention(q, keys, keys, backend="cuda")
        assert served.pop() == served[-1]


def test_the_deterministic_switch_counts_in_every_call(served: list[str], recorder: Recorder) -> None:
    q, k, v = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 4000, 64), torch.randn(1, 1, 4000, 64)
    found = []
    for is_deterministic in (False, True, False, True):
        torch.use_deterministic_algorithms(is_deterministic)
        flashtile.attention(q, k, v)
        recorder.reset(0)
        flashtile.attention(q, k, v)
        found.append([numbers[1] for numbers, _ in recorder.launches()])
    torch.use_deterministic_algorithms(False)
    assert found[0] == found[2] != found[1] == found[3]
    assert len(found[0]) == 2  # split, and combined
    assert found[1] == [1]


class Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Sub(Tensor):
    pass


def test_whoever_listens_hears_the_op(served: list[str]) -> None:
    q, k, v = make(2, 4, 16, 64)
    for _ in range(2):
        flashtile.attention(q, k, v)
    with Sees() as mode:
        flashtile.attention(q, k, v)
    assert "flashtile.forward.default" in mode.names
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    for _ in range(2):
        flashtile.attention(*leaves).sum().backward()
    with Sees() as mode:
        flashtile.attention(*leaves).sum().backward()
    assert {"flashtile.forward.default", "flashtile.backward.default"} <= set(mode.names)
    with Sees() as mode:
        flashtile.attention(*leaves, softcap=1.0).sum().backward()
    assert {"flashtile.forward.default", "flashtile.backward.default"} <= set(mode.names)
    with Sees() as mode:
        torch.func.grad(lambda x: flashtile.attention(x, k, v).sum())(q)
    assert {"flashtile.forward.default", "flashtile.backward.default"} <= set(mode.names)
    with torch.autograd.forward_ad.dual_level(), pytest.warns(flashtile.SlowPathWarning, match="forward-mode"):
        flashtile.attention(torch.autograd.forward_ad.make_dual(q, k), k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashtile.attention(q.float(), k.float(), v.float()).dtype == torch.bfloat16
    assert type(flashtile.attention(q, k, v.as_subclass(Sub))) is Sub


def test_tracing_goes_through_the_op(served: list[str]) -> None:
    q, k, v = make(2, 4, 16, 64)
    flashtile.attention(q, k, v)
    exported = torch.export.export(Attends(), (q, k, v))
    assert "flashtile.forward.default" in [str(node.target) for node in exported.graph.nodes]
    compiled = torch.compile(Attends(), fullgraph=True, backend="aot_eager")
    assert compiled(q, k, v).shape == q.shape


class Attends(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flashtile.attention(q, k, v, causal=True)


def test_a_failed_launch_names_its_kernel(served: list[str], recorder: Recorder) -> None:
    q, k, v = make(2, 4, 16, 64)
    flashtile.attention(q, k, v, deterministic=True)
    recorder.library.fake_fail_next(700)
    words = r"cuLaunchKernel of .*fwd_sm90_kernel.*, grid \(\d+, 1, 1\).* failed: CUDA_ERROR_FAKE \(700\)"
    with pytest.raises(driver.DriverError, match=words):
        flashtile.attention(q, k, v, deterministic=True)
    flashtile.attention(q, k, v, deterministic=True)
    assert len(served) == 1


def test_forgetting(served: list[str]) -> None:
    q, k, v = make(2, 4, 16, 64)
    for _ in range(2):
        flashtile.attention(q, k, v)
    assemble.clear_plans()
    assert extension.executor().num_plans() == 0
    flashtile.attention(q, k, v)
    assert len(served) == 2


def test_threads(served: list[str], recorder: Recorder) -> None:
    """Each begins without a context of its own; plans come and go meanwhile."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                q, k, v = make(1, 2, 16 + (number + turn) % 5, 64)
                out = flashtile.attention(q, k, v, causal=bool(turn % 2), deterministic=True)
                assert out.shape == q.shape  # type: ignore[union-attr]
                recorder.library.fake_reset(0)
                if turn % 20 == number:
                    assemble.clear_plans()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_python_executor_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_EXECUTOR", "python")
    assert native.missing.__wrapped__() == "FLASHTILE_EXECUTOR=python"
    monkeypatch.setenv("FLASHTILE_EXECUTOR", "rust")
    with pytest.raises(ValueError, match=r"FLASHTILE_EXECUTOR: got 'rust'.*accepted: c\+\+ or python"):
        native.missing.__wrapped__()


def test_a_torch_that_lacks_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_float32_matmul_precision")
    assert extension.open_executor("cpu") == f"torch {torch.__version__} has no _get_float32_matmul_precision"


# torch's flash attention operators


@pytest.fixture
def torch_operators(served: list[str]) -> Iterator[None]:
    handle = torch_flash.Handle(torch_flash.put_cuda_kernels_in_place("CPU"))
    yield
    handle.remove()


@pytest.mark.usefixtures("torch_operators")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_torch_operators_launch_what_ours_do(is_deterministic: bool, is_causal: bool, recorder: Recorder) -> None:
    """Splits depend on the deterministic switch, and are without it more than one."""
    q, k, v = (torch.randn(1, 1, rows, 64, dtype=torch.bfloat16) for rows in (2, 4000, 4000))
    options = {"scale": 0.3, "causal": "top_left" if is_causal else "none", "deterministic": is_deterministic}
    args = AttentionArgs(q, k, v, needs_grad=True, **options)
    out, lse = ops.empty_outputs(args)
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

    def compare(launch: Launch, results: tuple[Any, ...], names: tuple[str, ...], call: Callable[[], Any]) -> Any:
        one = by_python(recorder, launch, results)
        torch.use_deterministic_algorithms(is_deterministic)
        for _ in range(2):  # the first call of a kind registers its plan
            recorder.reset(len(launch.plan.image))
            before = num_fallbacks()
            found = call()
        torch.use_deterministic_algorithms(False)
        assert num_fallbacks() == before
        assert differences(launch, one, Done(recorder.launches(), found[: len(names)]), names) == []
        return found

    out, lse, *more = compare(
        cuda.forward_launch(args, out, lse),
        (out, lse),
        ("out", "lse"),
        lambda: forward(q, k, v, 0.0, is_causal, scale=0.3),
    )
    lengths, (state, unused, mask) = more[:4], more[4:]
    assert lengths == [None, None, 2, 4000]
    described = [(x.dtype, x.shape) for x in (state, unused, mask)]
    assert described == [(torch.uint64, (2,)), (torch.uint64, ()), (torch.bfloat16, (0,))]
    grads = ops.empty_grads(args, ops.GradNeeds(True, True, True, False, False))
    dout = torch.randn_like(out)
    compare(
        cuda.backward_launch(args, dout, None, out, lse, grads),
        tuple(grads[:3]),
        GRADS[:3],
        lambda: backward(dout, q, k, v, out, lse, *lengths, 0.0, is_causal, state, unused, scale=0.3),
    )
