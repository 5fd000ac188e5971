"""The C++ executor on CPU tensors: the bits of the Python one, from the second call of a kind on, whatever its
lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flashtile
from flashtile import ops
from flashtile.backends import executor, native, registry
from flashtile.backends.base import GradNeeds, Grads
from flashtile.backends.call import backward_tensors
from flashtile.problem import AttentionArgs, Problem
from flashtile.runtime import extension
from flashtile.testing import Case, Inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS: dict[str, dict] = {
    "plain": {},
    "long": {"batch": 1, "seqlen_q": 500, "seqlen_k": 300},
    "causal": {"causal": "bottom_right", "seqlen_q": 70},
    "causal top left": {"causal": "top_left"},
    "window": {"window": (9, 3), "causal": "bottom_right"},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "mask": {"mask": "bhqk"},
    "bias": {"bias": "hqk"},
    "bias in float32": {"bias": "bk", "is_bias_float32": True},
    "alibi": {"alibi": "bh"},
    "sinks": {"has_sinks": True, "mask": "bq"},
    "dropout": {"dropout_p": 0.3},
    "gqa": {"heads": 6, "heads_kv": 2},
    "head dims 21 and 40": {"head_dim": 21, "head_dim_v": 40},
    "one query": {"seqlen_q": 1, "heads": 4, "heads_kv": 1},
    "output in float32": {"out_float32": True},
    "swapped memory": {"memory": "swapped", "heads": 4},
    "expanded memory": {"memory": "expanded", "heads": 4},
    "offset memory": {"memory": "offset"},
}


@pytest.fixture(autouse=True)
def on_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLASHTILE_CPU_ISA", raising=False)  # where it is set, every call is Python's
        assert extension.open_executor("host") is None
        yield


def by_python(args: AttentionArgs) -> tuple[Tensor, Tensor]:
    return ops.forward_by_python(args)


def num_fallbacks() -> int:
    return extension.executor().num_fallbacks()


def by_cpp(op: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """By C++, with the plan that the first call registers."""
    op(*args)
    before = num_fallbacks()
    found = op(*args)
    assert num_fallbacks() == before
    return found


def in_place(args: AttentionArgs) -> AttentionArgs:
    """With sinks and slopes in the dtype of the arithmetic; others are copied, in Python."""
    dtype = torch.float64 if args.q.dtype == torch.float64 else torch.float32
    sinks, slopes = (None if tensor is None else tensor.to(dtype) for tensor in (args.sinks, args.alibi_slopes))
    return args._replace(sinks=sinks, alibi_slopes=slopes)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_of_the_python_executor(option: str, dtype: torch.dtype, layout: str, seed: int) -> None:
    fields = dict(OPTIONS[option])
    is_wide = fields.pop("out_float32", False)
    args = (
        Case(dtype=dtype, layout=layout, **fields)
        .make(seed)
        .args._replace(out_dtype=torch.float32 if is_wide else None)
    )
    args = in_place(args)
    for ours, theirs in zip(by_cpp(ops.forward, *args), by_python(args), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)


def backward_by_python(inputs: Inputs, out: Tensor, lse: Tensor, needs: GradNeeds) -> Grads:
    backend, grads = registry.select(Problem.of(inputs.args), None), ops.empty_grads(inputs.args, needs)
    assert backend.name == "cpu"
    backend.backward(inputs.args, inputs.dout, inputs.dlse, out, lse, grads)
    return grads


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", [option for option, fields in OPTIONS.items() if "out_float32" not in fields])
def test_the_bits_of_its_backward_pass(
    option: str, dtype: torch.dtype, layout: str, num_threads: int, threads: None, seed: int
) -> None:
    """With four threads the keys of a head are dealt out to several tasks where there are few heads."""
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(num_threads)
    fields = {"batch": 1, "heads": 1, "heads_kv": 1, "seqlen_k": 600, **OPTIONS[option]}
    inputs = Case(dtype=dtype, layout=layout, **fields).make(seed)
    args = in_place(inputs.args)._replace(needs_grad=True, needs_bias_grad=inputs.args.bias is not None)
    inputs = inputs._replace(args=args)
    out, lse = by_python(args)
    for needs in (
        GradNeeds(True, True, True, args.bias is not None, args.sinks is not None),
        GradNeeds(False, True, False, False, False),
    ):
        theirs = backward_by_python(inputs, out, lse, needs)
        ours = by_cpp(ops.backward, inputs.dout, inputs.dlse, *args, out, lse, needs)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.numel() == 0) == (other is None)
            assert other is None or (
                torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
            )


def test_lengths_share_a_plan(seed: int) -> None:
    k, v, q = torch.randn(2, 4, 300, 32), torch.randn(2, 4, 300, 32), torch.randn(2, 8, 200, 32)
    flashtile.attention(q[:, :, :1], k[:, :, :7], v[:, :, :7])
    assert extension.executor().num_plans() == 1
    for rows, length in ((1, 1), (1, 8), (2, 129), (130, 300), (200, 300)):
        args = AttentionArgs(q[:, :, :rows], k[:, :, :length], v[:, :, :length])
        before = num_fallbacks()
        assert torch.equal(ops.forward(*args)[0], by_python(args)[0])
        assert num_fallbacks() == before
    assert extension.executor().num_plans() == 1


def test_public_functions_are_served(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 9, 16)
    expected = flashtile.attention(q, q, q, causal=True, return_lse=True)
    flashtile.attention(q, q, q, causal=True, backend="cpu")
    monkeypatch.setattr(ops, "forward_by_python", None)  # nobody asks it any more
    for one, other in zip(flashtile.attention(q, q, q, causal=True, return_lse=True), expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(flashtile.attention(q, q, q, causal=True), expected[0])
    assert torch.equal(flashtile.attention(q, q, q, causal=True, backend="cpu"), expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, seed: int) -> None:
    """The first call makes the plan, the second one takes it."""
    for turn in range(2):
        inputs = Case(dtype=dtype, bias="hqk", causal="bottom_right", dropout_p=0.1).make(seed + turn)
        args = inputs.args
        leaves = {name: getattr(args, name).detach().clone().requires_grad_() for name in ("q", "k", "v", "bias")}
        out = flashtile.attention(**leaves, causal=True, dropout_p=0.1, rng_state=args.rng_state, layout=args.layout)
        again = ops.forward(*args._replace(**leaves))[0]
        assert torch.equal(out, again)
        grads = (torch.autograd.grad(each, tuple(leaves.values()), inputs.dout) for each in (out, again))
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_nodes_have_the_gradients_of_the_python_executor(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"causal": "bottom_right", "has_sinks": True, "bias": "hqk"}
    for option, wants_lse in ((), True), (("bias",), False), (tuple(options), True):
        inputs = Case(**{name: options[name] for name in option}).make(seed)
        needs = GradNeeds(True, True, True, "bias" in option, "has_sinks" in option)
        names = ("q", "k", "v", *(name for name in ("bias", "sinks") if getattr(inputs.args, name) is not None))
        leaves = {name: getattr(inputs.args, name).clone().requires_grad_() for name in names}
        args = inputs.args._replace(**leaves)
        for turn in range(2):  # the second time it is C++ that autograd calls
            if turn == 1:
                monkeypatch.setattr(ops, "backward_by_python", None)
            out, lse = ops.attend(args, wants_lse)
            outputs, douts = ((out, lse), (inputs.dout, inputs.dlse)) if wants_lse else ((out,), (inputs.dout,))
            found = torch.autograd.grad(outputs, tuple(leaves.values()), douts)
        monkeypatch.undo()
        with torch.no_grad():
            expected = backward_by_python(
                inputs if wants_lse else inputs._replace(dlse=None), *by_python(inputs.args), needs
            )
        assert all(torch.equal(grad, getattr(expected, f"d{name}")) for name, grad in zip(leaves, found, strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_gradient_of_a_sum_is_served(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a stride of 0 along every axis."""
    qkv = [torch.randn(2, 9, 8, 16, requires_grad=True) for _ in range(3)]
    for turn in range(2):
        if turn == 1:
            monkeypatch.setattr(ops, "backward_by_python", None)
        found = torch.autograd.grad(flashtile.attention(*qkv, layout=layout).sum(), qkv)
        out, lse = flashtile.attention(*qkv, layout=layout, return_lse=True)
        both = torch.autograd.grad(out.sum() + lse.sum(), qkv)
    monkeypatch.undo()
    ones = torch.ones(out.shape), torch.ones(lse.shape)
    expected = torch.autograd.grad(flashtile.attention(*qkv, layout=layout), qkv, ones[:1])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    expected = torch.autograd.grad(flashtile.attention(*qkv, layout=layout, return_lse=True), qkv, ones)
    assert all(torch.equal(one, other) for one, other in zip(both, expected, strict=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_gradients_that_are_broadcast_over_rows_are_not_copied(layout: str, seed: int) -> None:
    q, k, v = (torch.randn(2, 9, 8, 16) for _ in range(3))
    args = AttentionArgs(q, k, v, layout=layout)
    out, lse = ops.forward(*args)
    needs = (True, True, True, False, False)
    for sizes in ((2, 1, 8, 16), (2, 9, 1, 16), (1, 9, 8, 16)):
        dout = torch.randn(sizes).expand(2, 9, 8, 16)
        grads = ops.empty_grads(args, GradNeeds(*needs))
        assert backward_tensors(args, dout, None, out, lse, grads, is_for_gpu=False)["dout"] is dout
        expected = ops.backward(dout.contiguous(), None, *args, out, lse, needs)
        for _ in range(2):
            found = ops.backward(dout, None, *args, out, lse, needs)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*has no second derivatives:flashtile.SlowPathWarning")
@pytest.mark.parametrize("is_known", [False, True], ids=["the first call", "served"])
def test_nodes_keep_the_rules_of_autograd(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
    dout, unpacked = torch.randn(1, 2, 9, 16), list[int]()
    if is_known:
        torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), dout)
        monkeypatch.setattr(ops, "backward_by_python", None)  # nobody asks Python any more

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = flashtile.attention(q, k, v)
    out.backward(dout)
    assert len(unpacked) == len(set(unpacked)) == 5
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(dout)
    changed = k.detach().clone().requires_grad_()
    out = flashtile.attention(q, changed, v)
    with torch.no_grad():
        changed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)
    # One of two results, which needs zeros for the other; through the gradient itself
    monkeypatch.undo()
    lse = flashtile.attention(q, k, v, return_lse=True)[1]
    expected = flashtile.attention(q, k, v, return_lse=True, backend="reference")[1]
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), (k,))[0] for each in (lse, expected)))
    second = []
    for backend in (None, "reference"):
        (dq,) = torch.autograd.grad(
            flashtile.attention(q, k, v, backend=backend).square().sum(), (q,), create_graph=True
        )
        second.append(torch.autograd.grad(dq.square().sum(), (k,))[0])
    torch.testing.assert_close(*second, rtol=0, atol=2e-5 * second[1].abs().max().item())  # 2.3e-6 at most in 300 draws


def test_what_is_left_to_python(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, lengths = torch.randn(2, 2, 9, 16), torch.tensor([4, 9], dtype=torch.int32)
    args = AttentionArgs(q, q, q)

    def falls_back(call: AttentionArgs) -> bool:
        before = num_fallbacks()
        with suppress(NotImplementedError):
            ops.forward(*call)
        return num_fallbacks() > before

    assert falls_back(args)  # no plan yet
    assert not falls_back(args)
    doubled = AttentionArgs(*(tensor.double() for tensor in (q, q, q)), backend="tiled")
    assert falls_back(args._replace(seqused_k=lengths))
    assert not falls_back(args._replace(seqused_k=lengths.flip(0)))
    packed = {name: q.flatten(0, 1) for name in ("q", "k", "v")}
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    others = (packed, {"backend": "cuda"}, {"backend": "tiled"}, {"q": q[:, :, :0]})
    for call in (*(args._replace(**change) for change in others), doubled):
        assert falls_back(call)
        assert falls_back(call)
    for name, value in (("FLASHTILE_CPU_ISA", "baseline"), ("FLASHTILE_CHECK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert falls_back(args)
            torch.testing.assert_close(flashtile.attention(q, q, q), flashtile.attention(q, q, q, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_small_tensors_are_copied_for_cpp(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "execute_on_host", None)
    q = torch.randn(1, 2, 9, 16, dtype=dtype, requires_grad=True)
    for made in (torch.randn(2), torch.randn(2, 2)[:, 0], torch.randn(2, dtype=dtype)):
        sinks = made.requires_grad_()
        out, expected = (flashtile.attention(q, q, q, sinks=sinks, backend=name) for name in ("cpu", "reference"))
        torch.testing.assert_close(out, expected)
        grads, like = (torch.autograd.grad(one.sum(), (q, sinks)) for one in (out, expected))
        torch.testing.assert_close(grads, like)


@pytest.mark.parametrize("is_handled", [False, True])
def test_tracing_before_the_dispatcher_records_the_op(is_handled: bool) -> None:
    q, other = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    with nullcontext() if is_handled else native.python_only():
        for _ in range(2):
            expected = flashtile.attention(other, other, other)
        for x in (q, q.clone().requires_grad_()):
            traced = make_fx(lambda x: flashtile.attention(x, x, x), pre_dispatch=True)(x)
            assert "flashtile.forward" in traced.code
            assert torch.equal(traced(other), expected)


def test_wrong_calls_are_refused_in_the_same_words(seed: int) -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    wrong = [
        {"q": torch.randn(2, 3, 9, 16)},
        {"k": torch.randn(2, 2, 9, 8)},
        {"v": torch.randn(2, 2, 8, 16)},
        {"q": torch.randn(1, 4, 9, 16)},
        {"mask": torch.ones(2, 1, 9, 8, dtype=torch.bool)},
        {"bias": torch.randn(2, 3, 9, 9)},
        {"softcap": -1.0},
        {"scale": float("nan")},
        {"v": torch.randn(2, 2, 9, 32)[..., ::2]},
        {"k": torch.randn(2, 2, 9, 16, dtype=torch.bfloat16)},
    ]
    right = {"q": q, "k": k, "v": k}

    def words(options: dict) -> str:
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as found:
            flashtile.attention(**{**right, **options})
        return str(found.value)

    before = [words(options) for options in wrong]
    mask, bias = torch.ones(2, 1, 9, 9, dtype=torch.bool), torch.randn(2, 4, 9, 9)
    for options in ({}, {"mask": mask}, {"bias": bias}, {"softcap": 1.0}, {"scale": 0.5}):
        for _ in range(2):
            flashtile.attention(**right, **options)
    assert [words(options) for options in wrong] == before


def test_threads(seed: int) -> None:
    tensors = [torch.randn(1, 2, 50 + n, 32) for n in range(8)]
    expected = [flashtile.attention(tensor, tensor, tensor) for tensor in tensors]
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.no_grad() if n % 2 else nullcontext():
            for _ in range(100):
                if not torch.equal(flashtile.attention(tensors[n], tensors[n], tensors[n]), expected[n]):
                    wrong.append(n)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert wrong == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_what_a_signal_raises_is_not_lost(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a switch of torch that C++ reads, and in a Python kernel."""
    qkv = [torch.randn(1, 2, 9, 16) for _ in range(3)]
    leaves, coming = [tensor.clone().requires_grad_() for tensor in qkv], [error]

    def interrupted(*args: Any) -> bool:
        if coming:
            raise coming.pop()
        return False

    ops.forward(*AttentionArgs(*qkv))
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_get_deterministic_algorithms", interrupted)
        assert extension.open_executor("host") is None
        with pytest.raises(error):
            ops.forward(*AttentionArgs(*qkv))
        assert not coming
        ops.forward(*AttentionArgs(*qkv))
    assert extension.open_executor("host") is None
    out = flashtile.attention(*leaves, causal=True)
    native.clear_plans()
    for name, call in {
        "forward_by_python": lambda: flashtile.attention(*qkv),
        "backward_by_python": lambda: torch.autograd.grad(out.sum(), leaves),
    }.items():
        coming[:] = [error]
        with monkeypatch.context() as patch:
            patch.setattr(ops, name, interrupted)
            with pytest.raises(error):
                call()


def test_a_direct_call_of_an_op_raises_a_runtime_error() -> None:
    q = torch.randn(1, 2, 9, 16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^v: got 1 heads"):
            torch.ops.flashtile.forward(*AttentionArgs(q, q, q[:, :1]))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_views_with_a_pending_negation(name: str) -> None:
    """torch resolves them before a kernel sees them, in every call; ZeroTensors too."""
    plain = {each: torch.randn(1, 2, 9, 16) for each in ("q", "k", "v")}
    views = [torch._neg_view(torch.randn(1, 2, 9, 16))]
    if name == "bias":  # any strides will do
        parts = torch.randn(3, 2, 9, 9, dtype=torch.complex64)
        odd = torch.randn(1, 2, 9, 9, 3, dtype=torch.float32)[..., 1]
        views = [parts[:1].conj().imag, torch._neg_view(odd), torch._efficientzerotensor(1, 2, 9, 9)]
    for view in views:
        value = torch.zeros(view.shape).add(view)
        expected = flashtile.attention(**{**plain, name: value})
        for _ in range(3):
            assert torch.equal(flashtile.attention(**{**plain, name: view}), expected)


def test_gradients_with_a_pending_negation() -> None:
    leaves, dout = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)], torch.randn(1, 2, 9, 16)
    expected = torch.autograd.grad(flashtile.attention(*leaves), leaves, -dout)
    for _ in range(3):
        found = torch.autograd.grad(flashtile.attention(*leaves), leaves, torch._neg_view(dout))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_call_without_memory_is_refused_by_torch_at_once() -> None:
    """C++ tries, and Python once more, whose error is torch's."""
    q, k = torch.ones(1, 1, 1, 64), torch.ones(1, 1, 3, 64)
    module = extension.executor()

    def call(batch: int, heads: int) -> Tensor:
        return flashtile.attention(*(tensor.expand(batch, heads, -1, -1) for tensor in (q, k, k)), backend="cpu")

    for _ in range(2):
        call(2, 3)
    before, plans = module.num_fallbacks(), module.num_plans()
    for turn in range(1, 3):
        with pytest.raises(RuntimeError, match="allocate memory"):
            call(2**30, 2**20)
        assert (module.num_fallbacks(), module.num_plans()) == (before + turn, plans)
