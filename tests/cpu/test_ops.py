"""The ops as torch sees them: opcheck, compile, export, strides, and the parts that ring attention stands on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import flashtile
from flashtile import api, ops
from flashtile.problem import CACHE_ARGUMENTS, DENSE_FIELDS, NUM_TENSORS, AttentionArgs, dense_schema, limits, schema
from flashtile.runtime import extension
from flashtile.testing import Case

CASES = {
    "plain": Case(),
    "options": Case(
        causal="bottom_right", window=(5, 5), bias="hqk", mask="qk", alibi="h", has_sinks=True, softcap=2.0, heads=4
    ),
    "bshd, swapped": Case(layout="bshd", memory="swapped", head_dim_v=5),
    "bhsd, swapped": Case(memory="swapped", head_dim_v=5, dtype=torch.bfloat16),
    "dropout": Case(dropout_p=0.3),
    "varlen": Case(kind="varlen", layout="bshd", batch=3),
    "paged": Case(kind="paged", batch=3),
}


def small(case: Case, **changes) -> Case:
    return dataclasses.replace(case, seqlen_q=7, seqlen_k=9, head_dim=8, **changes)


def with_grad(args: AttentionArgs) -> AttentionArgs:
    names = [name for name in ("q", "k", "v", "bias", "sinks") if getattr(args, name) is not None]
    return args._replace(**{name: getattr(args, name).nan_to_num(nan=0.0).requires_grad_() for name in names})


def test_cpp_has_the_same_list_of_arguments() -> None:
    tool = Path(__file__).resolve().parent.parent.parent / "tools" / "make_arguments.py"
    subprocess.run([sys.executable, str(tool), "--check"], check=True)
    if extension.missing() is None:
        assert ", ".join(extension.executor().ARGUMENTS) == ", ".join(
            [schema(), *dense_schema(), *(f"cache: {name}" for name in CACHE_ARGUMENTS), *limits()]
        )


def test_schema_and_arguments_agree() -> None:
    names = [argument.name for argument in ops.forward_op._schema.arguments]
    assert tuple(names) == AttentionArgs._fields
    kinds = [str(argument.type) for argument in ops.forward_op._schema.arguments]
    assert all(("Tensor" in kind) == (place < NUM_TENSORS) for place, kind in enumerate(kinds))
    assert [argument.name for argument in ops.backward_op._schema.arguments] == [
        "dout",
        "dlse",
        *names,
        "out",
        "lse",
        "needs",
    ]


@pytest.mark.parametrize("name", sorted(set(api._OPTIONS["attention"]) - {"scale", "causal", "layout", "backend"}))
def test_an_option_that_the_dense_overloads_lack_does_not_reach_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new option has a line in the condition at the head of `attention`: without it the short way would ignore it."""
    reached = []
    monkeypatch.setattr(api, "dense", lambda *_: reached.append(True))
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    flashtile.attention(q, k, v)
    assert reached.pop()
    with contextlib.suppress(Exception):  # the value of no option
        flashtile.attention(q, k, v, **{name: object()})
    assert not reached


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck_dense(needs_grad: bool) -> None:
    args = small(CASES["plain"]).make(0).args
    call = (args.q, args.k, args.v, 0.3, ops.dense_mode(causal="top_left", needs_grad=needs_grad))
    tests = ("test_schema", "test_faketensor")  # they stand below autograd
    opcheck(torch.ops.flashtile.forward.dense, call, test_utils=tests)
    out, lse = ops.forward(*args)
    opcheck(torch.ops.flashtile.backward.dense, (torch.randn_like(out), *call, out, lse), test_utils=tests)


def test_modes_of_the_dense_overloads() -> None:
    q, k, v = (torch.randn(1, 4, 4, 16) for _ in range(3))  # sizes that both layouts take
    for options in itertools.product(*DENSE_FIELDS.values()):
        named = dict(zip(DENSE_FIELDS, options, strict=True))
        mode = ops.dense_mode(**named)
        args = ops.dense_args(q, k, v, 0.3, mode)
        assert args == AttentionArgs(q, k, v, scale=0.3, **named)
        if args.backend != "cuda":
            out, lse = ops.forward(*args)
            for _ in range(2):  # with the extension the second call is C++'s
                found, found_lse = ops.dense_forward(q, k, v, 0.3, mode)
                assert torch.equal(found, out)
                assert torch.equal(found_lse, lse) if args.needs_grad else found_lse is None
    num_bits = sum((len(values) - 1).bit_length() for values in DENSE_FIELDS.values())
    for mode in (3, 3 << 3, -1, 1 << num_bits):
        with pytest.raises(RuntimeError, match=f"mode: got {mode} "):
            ops.dense_forward(q, k, v, None, mode)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_opcheck_forward(name: str, backend: str, seed: int) -> None:
    args = with_grad(small(CASES[name], backend=backend).make(0).args)
    opcheck(ops.forward_op, tuple(args))


@pytest.mark.parametrize("name", CASES)
def test_opcheck_backward(name: str, seed: int) -> None:
    inputs = small(CASES[name], head_dim_v=8).make(0)
    out, lse = ops.forward(*inputs.args)
    needs = [True, False, True, inputs.args.bias is not None, inputs.args.sinks is not None]
    opcheck(ops.backward_op, (inputs.dout, inputs.dlse, *inputs.args, out, lse, needs))
    opcheck(ops.backward_op, (inputs.dout, None, *inputs.args, out, lse, [False] * 5))


@pytest.mark.parametrize("is_paged", [False, True])
def test_opcheck_append_kv(is_paged: bool) -> None:
    k_cache, v_cache = torch.randn(4, 6, 2, 8), torch.randn(4, 6, 2, 8)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32) if is_paged else None
    batch = 2 if is_paged else 4
    k, v = torch.randn(batch, 2, 2, 8), torch.randn(batch, 2, 2, 8)
    lengths, angle = torch.arange(batch, dtype=torch.int32), torch.rand(12, 3)
    opcheck(ops.append_op, (k_cache, v_cache, k, v, lengths, table, angle.cos(), angle.sin(), True, "bshd"))


def test_gradients_that_are_not_needed_are_empty(seed: int) -> None:
    inputs = small(CASES["options"]).make(seed)
    out, lse = ops.forward(*inputs.args)
    grads = ops.backward(
        inputs.dout[..., : out.shape[-1]], None, *inputs.args, out, lse, [False, True, False, False, False]
    )
    assert [grad.numel() > 0 for grad in grads] == [False, True, False, False, False]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("memory", ["contiguous", "swapped"])
def test_output_and_gradients_lie_in_memory_as_the_inputs(memory: str, layout: str, seed: int) -> None:
    inputs = Case(layout=layout, memory=memory, seqlen_q=5, seqlen_k=7).make(seed)
    args = with_grad(inputs.args._replace(q=inputs.args.q, k=inputs.args.k, v=inputs.args.v))
    out, lse = ops.forward(*args)
    assert out.stride() == inputs.args.q.stride()
    assert lse.is_contiguous()
    grads = torch.autograd.grad(out.sum(), (args.q, args.k, args.v))
    for grad, tensor in zip(grads, inputs.args[:3], strict=True):
        assert grad.stride() == tensor.stride()


def attend(q, k, v, bias, slopes):
    return flashtile.attention(
        q, k, v, causal=True, window=(20, -1), bias=bias, alibi_slopes=slopes, softcap=5.0, return_lse=True
    )


def leaves(batch: int, seqlen_q: int, seqlen_k: int):
    q = torch.randn(batch, 4, seqlen_q, 16, requires_grad=True)
    k, v = (torch.randn(batch, 2, seqlen_k, 16, requires_grad=True) for _ in range(2))
    return q, k, v, torch.randn(4, seqlen_q, seqlen_k, requires_grad=True), torch.rand(4)


@torch._dynamo.config.patch(error_on_recompile=True)  # the first call compiles; a second compilation raises
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_once_for_all_shapes(compiler: str, seed: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=compiler)
    # Sizes that differ from one another: dynamo ties together what is equal on the first call
    for batch, seqlen_q, seqlen_k in ((3, 9, 12), (5, 30, 40), (7, 17, 170), (3, 33, 200)):
        results = []
        for function in (attend, compiled):
            torch.manual_seed(seed)
            inputs = leaves(batch, seqlen_q, seqlen_k)
            outputs = function(*inputs)
            results.append(
                (*outputs, *torch.autograd.grad(outputs, inputs[:4], [output.detach().sin() for output in outputs]))
            )
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["varlen", "kvcache", "sdpa", "flash", "dropout"])
def test_every_function_compiles_whole(name: str, seed: int) -> None:
    torch._dynamo.reset()
    cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    new = torch.randn(2, 1, 2, 8)
    angle = torch.rand(16, 4)

    def varlen(q):
        return flashtile.attention_varlen(q[0], q[0], q[0], cu, cu, causal=True, return_lse=True)

    def kvcache(q):
        caches = k_cache.clone(), v_cache.clone()
        lengths = torch.tensor([4, 9], dtype=torch.int32)
        out = flashtile.attention_kvcache(
            q[:, :1], *caches, k=new, v=new, cache_seqlens=lengths, rotary_cos=angle.cos(), rotary_sin=angle.sin()
        )
        return out, *caches

    def sdpa(q):
        return flashtile.scaled_dot_product_attention(q, q, q, is_causal=True)

    def flash(q):
        return flashtile.flash_attn_func(q, q, q, window_size=(3, 3), return_attn_probs=True)

    def dropout(q):
        return flashtile.attention(q, q, q, dropout_p=0.5, rng_state=torch.tensor([1, 2]))

    function = {"varlen": varlen, "kvcache": kvcache, "sdpa": sdpa, "flash": flash, "dropout": dropout}[name]
    q = torch.randn(2, 10, 2, 8)
    torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(q), function(q))


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("name", ["sdpa 3-D", "sdpa 5-D", "flash", "varlen", "kvcache"])
def test_facades_and_lengths_compile_once(name: str, seed: int) -> None:
    torch._dynamo.reset()

    def call(q, k_cache, v_cache, lengths, cu):
        if name == "sdpa 3-D":
            return flashtile.scaled_dot_product_attention(
                q.flatten(0, 1), q.flatten(0, 1), q.flatten(0, 1), is_causal=True
            )
        if name == "sdpa 5-D":
            return flashtile.scaled_dot_product_attention(q[None], q[None], q[None])
        if name == "flash":
            return flashtile.flash_attn_func(q, q, q, window_size=(3, 0))
        if name == "varlen":
            return flashtile.attention_varlen(q[0], q[0], q[0], cu, cu)
        return flashtile.attention_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, rows, capacity in ((5, 7, 20), (6, 11, 31), (9, 13, 40)):
        q, caches = torch.randn(batch, rows, 4, 16), [torch.randn(batch, capacity, 2, 16) for _ in range(2)]
        inputs = q, *caches, torch.full((batch,), 15, dtype=torch.int32), torch.tensor([0, 2, rows], dtype=torch.int32)
        torch.testing.assert_close(compiled(*inputs), call(*inputs))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.parametrize("kind", ["bounds", "longest", "bias"])
def test_packed_sequences_whose_number_is_data_compile(kind: str, seed: int) -> None:
    """As where positions that start anew tell documents apart: no check may ask how many there are."""
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 64, 2, 16).unbind()
    bias = torch.randn(1, 2, 40, 40) if kind == "bias" else None

    def call(q, k, v, positions):
        starts = torch.nonzero(positions == 0).flatten()
        bounds = torch.cat([starts, starts.new_full((1,), positions.shape[0])]).to(torch.int32)
        longest = None
        if kind == "longest":
            longest = (positions.max() + 1).item()
            torch._check(longest >= 0)
            torch._check(longest <= 64)
        return flashtile.attention_varlen(q, k, v, bounds, bounds, longest, longest, causal=True, bias=bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in ((20, 30, 14), (40, 24), (8,) * 8):
        positions = torch.cat([torch.arange(length) for length in lengths])
        results = []
        for function in (call, compiled):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = function(*inputs, positions)
            results.append((out, *torch.autograd.grad(out.sum(), inputs)))
        torch.testing.assert_close(*results)


def test_export(seed: int) -> None:
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return flashtile.attention(q, k, v, causal=True, return_lse=True)

    batch, rows, keys = torch.export.Dim("batch"), torch.export.Dim("rows"), torch.export.Dim("keys")
    example = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    shapes = {"q": {0: batch, 2: rows}, "k": {0: batch, 2: keys}, "v": {0: batch, 2: keys}}
    program = torch.export.export(Module(), example, dynamic_shapes=shapes)
    assert sum(node.target is ops.forward_op for node in program.graph.nodes) == 1
    other = torch.randn(3, 4, 20, 16), torch.randn(3, 2, 31, 16), torch.randn(3, 2, 31, 16)
    torch.testing.assert_close(program.module()(*other), Module()(*other))


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
def test_parts_merge_into_the_whole(backend: str, seed: int) -> None:
    """Split the keys, attend to each part in float32, merge by lse; the backward of each part takes the whole's out and
    lse."""
    inputs = Case(dtype=torch.bfloat16, seqlen_q=20, seqlen_k=50, backend=backend, softcap=3.0).make(seed)
    whole, cuts = inputs.args._replace(out_dtype=torch.float32), ((0, 17), (17, 50))
    out, lse = ops.forward(*whole)
    parts = [whole._replace(k=whole.k[:, :, a:b], v=whole.v[:, :, a:b]) for a, b in cuts]
    results = [ops.forward(*part) for part in parts]
    assert out.dtype == results[0][0].dtype == torch.float32
    merged_lse = torch.logaddexp(results[0][1], results[1][1])
    merged = sum(part_out * (part_lse - merged_lse).exp()[..., None] for part_out, part_lse in results)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-5)
    dout, needs = inputs.dout.float(), [True, True, True, False, False]
    dq, dk, dv, *_ = ops.backward(dout, inputs.dlse, *whole, out, lse, needs)
    grads = [ops.backward(dout, inputs.dlse, *part, out, lse, needs) for part in parts]
    torch.testing.assert_close(grads[0][0].float() + grads[1][0].float(), dq.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], dim=2), dk)
    torch.testing.assert_close(torch.cat([grads[0][2], grads[1][2]], dim=2), dv)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_gradient_through_lse_alone(backend: str, seed: int) -> None:
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = flashtile.attention(q, k, v, return_lse=True, backend=backend)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    expected = torch.autograd.grad(torch.logsumexp(q @ k.transpose(-1, -2) / 8**0.5, -1).sum(), (q, k))
    torch.testing.assert_close((dq, dk), expected)
    assert (dv == 0).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_sees_the_op(seed: int) -> None:
    """A repeated call goes past the dispatcher, but not while somebody records."""
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    for _ in range(3):
        flashtile.attention(q, k, v, causal=True)
    traced = torch.jit.trace(lambda q, k, v: flashtile.attention(q, k, v, causal=True), (q, k, v), check_trace=False)
    torch.testing.assert_close(traced(2 * q, k, v), flashtile.attention(2 * q, k, v, causal=True))


TRACERS: dict[str, Callable[..., Any]] = {
    "jit": torch.jit.trace,
    "make_fx": lambda function, inputs: make_fx(function)(*inputs),
    "make_fx, pre_dispatch": lambda function, inputs: make_fx(function, pre_dispatch=True)(*inputs),
    "make_fx, fake": lambda function, inputs: make_fx(function, tracing_mode="fake")(*inputs),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("is_traced_with_grad", [False, True])
@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_calls_have_gradients(tracer: str, is_traced_with_grad: bool, seed: int) -> None:
    """Beside a path around attention, whose gradient would hide that the other is missing."""
    functions = (
        lambda q, k, v: q + flashtile.attention(q, k, v),
        lambda q, k, v: q + flashtile.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: q + flashtile.attention(q, k, v, softcap=1.0),
    )
    example = tuple(torch.randn(1, 2, 9, 8, requires_grad=is_traced_with_grad) for _ in range(3))
    inputs = tuple(torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    for function in functions:
        traced = TRACERS[tracer](function, example)
        expected = torch.autograd.grad(function(*inputs).square().sum(), inputs)
        torch.testing.assert_close(torch.autograd.grad(traced(*inputs).square().sum(), inputs), expected)


def test_a_traced_gradient_has_gradients() -> None:
    def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(flashtile.attention(q, k, v).sum(), q)[0]

    example = tuple(torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    assert "flashtile.backward.default" in make_fx(gradient)(*example).code


def test_tensors_whose_memory_does_not_hold_their_values() -> None:
    """A negation that is yet to be done, and zeros that have no memory."""
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    bias = torch.randn(1, 2, 8, 8, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    torch.testing.assert_close(
        flashtile.attention(q, k, v, bias=bias), flashtile.attention(q, k, v, bias=bias.resolve_neg())
    )
    zeros = torch._efficientzerotensor(1, 2, 8, 16)
    with pytest.raises(ValueError, match="v: got stride 0 in the last dimension"):  # as torch makes them real
        flashtile.attention(q, k, zeros)
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(flashtile.attention(leaf, k, v), leaf, zeros)
    torch.testing.assert_close(grad, torch.zeros(1, 2, 8, 16))


def test_nothing_is_saved_without_grad(seed: int) -> None:
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.no_grad():
        assert flashtile.attention(q, q, q).grad_fn is None
    assert flashtile.attention(q.detach(), q.detach(), q.detach()).grad_fn is None
    assert flashtile.attention(q, q.detach(), q.detach()).grad_fn is not None
    with torch.inference_mode():
        assert flashtile.attention(q, q, q).is_inference()


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (
        torch.empty(2, 4, 7, 16, device="meta"),
        torch.empty(2, 2, 9, 16, device="meta"),
        torch.empty(2, 2, 9, 5, device="meta"),
    )
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 7, 5)
    assert lse.shape == (2, 4, 7)
