"""torch's attention operators under `flashtile.install()`. The kernels for CUDA are tried on the CPU, where torch has
none of its own, below torch's autograd formulas; tests/gpu/test_install.py has them on a GPU."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flashtile
from flashtile.integrations import sdpa, torch_kernels, torch_ops
from flashtile.testing import dropout_mask

aten = torch.ops.aten
PREFIX = "aten::_scaled_dot_product_"
CPU_FORWARD, CPU_BACKWARD = f"{PREFIX}flash_attention_for_cpu", f"{PREFIX}flash_attention_for_cpu_backward"
MATH = torch_ops.MATH


@pytest.fixture(autouse=True)
def on_the_cpu(test_device: None) -> Iterator[None]:
    torch.set_default_device(None)
    yield
    flashtile.uninstall()


@pytest.fixture
def report() -> torch_ops.Report:
    found = flashtile.install()
    found.clear()
    return found


@pytest.fixture
def cuda_report() -> Iterator[torch_ops.Report]:
    """The kernels for CUDA in the place of those for the CPU, which torch has not."""
    found = torch_ops.Report()
    libraries = torch_ops.override(found, ("CUDA",), cuda_key="CPU")
    yield found
    torch_ops.remove(libraries)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def sdpa_inputs(heads_kv: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As models make them: heads split off (batch, rows, heads * dim)."""
    q, k, v = leaves((2, 9, 4, 16), (2, 11, heads_kv, 16), (2, 11, heads_kv, 16), dtype=dtype)
    return [tensor.transpose(1, 2) for tensor in (q, k, v)]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return [out, *torch.autograd.grad((out * torch.randn(out.shape, dtype=out.dtype)).sum(), inputs)]


def assert_same(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


def by_math(inputs: list[Tensor], **options: Any) -> list[Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return gradients(F.scaled_dot_product_attention(*inputs, **options), inputs)


# The CPU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "bias", "bias, causal", "gqa"])
def test_the_cpu(report: torch_ops.Report, kind: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {
        "plain": {"scale": 0.3},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, 9, 11) < 0.7},
        "bias": {"attn_mask": torch.randn(9, 11, dtype=dtype)},
        "bias, causal": {"attn_mask": torch.randn(9, 11, dtype=dtype), "is_causal": True},
        "gqa": {"enable_gqa": True},
    }[kind]
    inputs = sdpa_inputs(2 if kind == "gqa" else 4, dtype)
    if kind == "bias, causal":  # which torch 2.15 takes in the operator alone
        out = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **options)[0]
    else:
        out = F.scaled_dot_product_attention(*inputs, **options)
    ours = gradients(out, inputs)
    assert report.served == {CPU_FORWARD: 1, CPU_BACKWARD: 1}
    assert not report.left_to_torch
    if kind == "bias, causal":
        seen = torch.ones(9, 11, dtype=torch.bool).tril()
        options = {"attn_mask": options["attn_mask"].masked_fill(~seen, float("-inf"))}
    assert_same(ours, by_math(inputs, **options), **({"rtol": 4e-2, "atol": 4e-2} if dtype.itemsize == 2 else {}))


def layouts() -> list[Tensor]:
    packed = torch.randn(2, 7, 3, 4, 16)
    rows_first, gaps = torch.randn(2, 7, 4, 16).transpose(1, 2), packed[:, :, 0].transpose(1, 2)
    expanded = [
        torch.randn(2, 1, 7, 16).expand(2, 4, 7, 16),
        torch.randn(2, 7, 1, 16).expand(2, 7, 4, 16).transpose(1, 2),
        torch.randn(1, 7, 4, 16).expand(2, 7, 4, 16).transpose(1, 2),
        torch.randn(2, 4, 1, 16).expand(2, 4, 7, 16),
        torch.randn(7, 1, 1, 16).expand(7, 1, 4, 16).permute(1, 2, 0, 3),  # ours is laid out otherwise, and copied
    ]
    ones = [torch.randn(2, 7, 1, 16).transpose(1, 2), torch.randn(2, 1, 4, 16).transpose(1, 2)]
    return [torch.randn(2, 4, 7, 16), rows_first, gaps, *expanded, *ones]


def facts(results: tuple[Any, ...]) -> list[Any]:
    """Shapes, strides and dtypes. The stride of a dimension of one element says nothing."""
    found = list[Any](results)
    for place, value in enumerate(results):
        if isinstance(value, Tensor):
            strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
            found[place] = (value.shape, strides, value.dtype)
    return found


def test_results_are_laid_out_as_torchs_on_the_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for q in layouts():
            q = q.to(dtype)
            for mask in (None, torch.randn(q.shape[2], q.shape[2], dtype=dtype)):

                def call(q: Tensor = q, mask: Tensor | None = mask) -> list[Any]:
                    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)
                    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                        out, q, q, q, out, lse, 0.0, False, attn_mask=mask
                    )
                    return facts((out, lse, *grads))

                expected = call()
                flashtile.install()
                assert call() == expected
                flashtile.uninstall()


def test_each_library_reads_what_the_other_saved() -> None:
    """The logsumexp is the same number: torch's backward pass takes ours, and ours takes torch's."""
    inputs = sdpa_inputs()
    expected = by_math(inputs, is_causal=True)
    flashtile.install()
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    flashtile.uninstall()
    assert_same(gradients(out, inputs), expected)
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    flashtile.install()
    assert_same(gradients(out, inputs), expected)


def test_a_refused_call_goes_to_torch(report: torch_ops.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = leaves(*[(1, 2, 5, 600)] * 3)
    with pytest.warns(flashtile.SlowPathWarning) as caught:
        ours = gradients(F.scaled_dot_product_attention(*inputs), inputs)
    for warning, name in zip(caught, (CPU_FORWARD, CPU_BACKWARD), strict=True):
        assert str(warning.message).startswith(f"a call of {name} was left to torch: q: got head_dim 600")
    assert not report.served
    assert [name for name, _ in report.left_to_torch] == [CPU_FORWARD, CPU_BACKWARD]
    assert report.share() == 0.0
    assert "left to torch: 2" in str(report)
    assert "head_dim 600" in str(report)
    flashtile.uninstall()
    for mine, other in zip(ours, gradients(F.scaled_dot_product_attention(*inputs), inputs), strict=True):
        assert torch.equal(mine, other)
    flashtile.install()
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    with pytest.raises((flashtile.Unsupported, RuntimeError), match="FLASHTILE_STRICT=1"):
        F.scaled_dot_product_attention(*inputs)


def test_uninstall_restores_torch() -> None:
    names = [*torch_ops.CPU_KERNELS, *torch_ops.CUDA_KERNELS, *torch_ops.VARLEN_KERNELS, MATH]
    before = [torch._C._dispatch_dump(name) for name in names]
    report = flashtile.install()
    assert flashtile.install() is report  # a second call changes nothing
    installed = [torch._C._dispatch_dump(name) for name in names]
    assert all(a != b for a, b in zip(before, installed, strict=True))
    assert not report.not_overridden
    flashtile.uninstall()
    flashtile.uninstall()
    assert [torch._C._dispatch_dump(name) for name in names] == before


def test_nothing_is_imported_or_warned_of() -> None:
    code = """
import sys, flashtile, torch
assert not [name for name in sys.modules if name.startswith("flashtile.integrations")]
q = torch.randn(1, 2, 5, 8, requires_grad=True)
for _ in range(2):
    report = flashtile.install()
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    flashtile.uninstall()
assert report.served.total() == 4, report
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_operator_with_other_arguments_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(query: Tensor, value: Tensor, key: Tensor) -> None:
        raise AssertionError

    monkeypatch.setitem(torch_ops.CPU_KERNELS, CPU_FORWARD, other)
    monkeypatch.setitem(torch_ops.VARLEN_KERNELS, "torch_attn::_absent", other)
    report = flashtile.install()
    assert report.not_overridden[CPU_FORWARD].startswith("its arguments in torch")
    assert report.not_overridden["torch_attn::_absent"].endswith("does not have it")
    report.clear()
    inputs = sdpa_inputs()
    assert_same([F.scaled_dot_product_attention(*inputs)], by_math(inputs)[:1])
    assert CPU_FORWARD not in report.served


@pytest.mark.filterwarnings("ignore::flashtile.SlowPathWarning")
def test_errors_are_torchs(report: torch_ops.Report) -> None:
    q = torch.randn(1, 2, 5, 8)
    calls = [
        lambda: F.scaled_dot_product_attention(q, q.double(), q),
        lambda: F.scaled_dot_product_attention(q, q[..., :4], q),
        lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(3, 3)),
        lambda: F.scaled_dot_product_attention(q, q, q[..., :4], torch.zeros(5, 5), is_causal=True),
        lambda: F.scaled_dot_product_attention(q, q, q, torch.zeros(5, 5, dtype=torch.int64)),
        lambda: F.scaled_dot_product_attention(q.int(), q.int(), q.int()),
        lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=1.5),
    ]
    for call in calls:
        messages = []
        for place in (flashtile.install, flashtile.uninstall):
            place()
            with pytest.raises(RuntimeError) as caught:
                call()
            messages.append((caught.type, str(caught.value)))
        assert messages[0] == messages[1]


def test_a_second_derivative_is_refused_as_by_torch() -> None:
    for place in (flashtile.install, flashtile.uninstall):
        place()
        inputs = leaves(*[(1, 2, 5, 8)] * 3)
        out = F.scaled_dot_product_attention(*inputs)
        (dq,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match=r"derivative for aten::.*for_cpu_backward is not implemented"):
            dq.sum().backward()


# MATH


@pytest.mark.parametrize("kind", ["d_v", "bias with a gradient", "three dimensions", "no_grad"])
def test_math(report: torch_ops.Report, kind: str) -> None:
    q, k, v = leaves((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 8 if kind in ("d_v", "no_grad") else 16))
    options: dict[str, Any] = {}
    if kind == "bias with a gradient":
        options = {"attn_mask": torch.randn(9, 11, requires_grad=True)}
    elif kind == "three dimensions":
        q, k, v = (tensor[0] for tensor in (q, k, v))
    with torch.set_grad_enabled(kind != "no_grad"):
        out = F.scaled_dot_product_attention(q, k, v, **options)
    # torch 2.15 takes three dimensions elsewhere
    assert report.served == ({MATH: 1} if kind != "three dimensions" else report.served)
    assert report.served.total() == 1
    expected = by_math([q, k, v], **options)
    inputs = [q, k, v, *options.values()]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v, **options)
    if kind == "no_grad":
        torch.testing.assert_close(out, expected[0].detach())
    else:
        assert_same(gradients(out, inputs), gradients(theirs, inputs))


@pytest.mark.parametrize("dim", [3, 4])
def test_the_result_of_math_is_contiguous(report: torch_ops.Report, dim: int) -> None:
    """As torch's: a model may view it."""
    q, k, v = (tensor[(0,) * (4 - dim)] for tensor in sdpa_inputs())
    out = F.scaled_dot_product_attention(q, k, v[..., :8])
    assert report.served.total() == 1
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v[..., :8])
    assert out.stride() == theirs.stride()
    assert_same(gradients(out.view(-1, 9, 8), [q, k, v]), gradients(theirs.view(-1, 9, 8), [q, k, v]))


def test_dropout_that_torch_sends_to_math(report: torch_ops.Report) -> None:
    q, k, v = leaves((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16))
    torch.manual_seed(3)
    ours = gradients(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), [q, k, v])
    torch.manual_seed(3)
    expected = gradients(flashtile.attention(q, k, v, dropout_p=0.3), [q, k, v])
    assert report.served == {MATH: 1}
    for mine, other in zip(ours, expected, strict=True):
        assert torch.equal(mine, other)


def test_what_of_math_is_left(report: torch_ops.Report) -> None:
    q = torch.randn(1, 2, 5, 8)
    v = q[..., :4]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, q, v)
    assert report.left_to_torch == {(MATH, torch_ops._PINNED): 1}
    report.clear()
    compiled = torch.compile(lambda q, v: F.scaled_dot_product_attention(q, q, v), backend="aot_eager")
    torch.testing.assert_close(compiled(q, v), expected)
    out = torch.func.vmap(lambda q: F.scaled_dot_product_attention(q, q, q[..., :4]))(q)
    torch.testing.assert_close(out, expected)
    torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q[..., :4]).sum())(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        out = F.scaled_dot_product_attention(dual, dual, dual[..., :4])
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
    assert not report.served
    assert {reason for _, reason in report.left_to_torch} == {torch_ops._TRACED}


def test_the_probabilities_of_math_are_nan(report: torch_ops.Report) -> None:
    q = torch.randn(1, 2, 5, 8)
    out, probabilities = aten._scaled_dot_product_attention_math(q, q, q)
    assert report.served == {MATH: 1}
    assert probabilities.shape == (1, 2, 5, 5)
    assert probabilities.isnan().all()
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_autocast_casts_the_function_and_not_the_operator(
    report: torch_ops.Report, dtype: torch.dtype, needs_grad: bool
) -> None:
    q = torch.randn(1, 2, 5, 8, dtype=dtype, requires_grad=needs_grad)
    with torch.autocast("cpu", dtype=torch.float16):
        out = aten._scaled_dot_product_attention_math(q, q, q)[0]
        assert F.scaled_dot_product_attention(q, q, q[..., :4]).dtype == torch.float16
    assert report.served == {MATH: 2}
    assert out.dtype == dtype
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


# Ways to the operators


def test_a_compiled_graph(report: torch_ops.Report) -> None:
    torch._dynamo.reset()
    for causal in (False, True):
        inputs = sdpa_inputs()
        compiled = torch.compile(
            lambda q, k, v, causal=causal: F.scaled_dot_product_attention(q, k, v, None, 0.0, causal)
        )
        report.clear()
        ours = [gradients(compiled(*inputs), inputs) for _ in range(2)]
        assert report.served == {CPU_FORWARD: 2, CPU_BACKWARD: 2}
        expected = by_math(inputs, is_causal=causal)
        for results in ours:
            assert_same(results, expected)
    flashtile.uninstall()
    report.clear()
    assert_same(gradients(compiled(*inputs), inputs), expected)  # the same graph, on torch's kernels
    assert not report.served


def test_a_graph_that_is_traced_after_uninstall_has_gradients() -> None:
    """torch's tracers keep which kernels an operator has."""
    q, k, v = sdpa_inputs()
    inputs = [q, k, v, *leaves((9, 11))]  # torch sends a mask that requires grad to MATH
    expected = by_math(inputs)
    for change in (flashtile.install, flashtile.uninstall, flashtile.install):
        change()
        torch._dynamo.reset()
        compiled = torch.compile(lambda *inputs: F.scaled_dot_product_attention(*inputs), backend="aot_eager")
        assert_same(gradients(compiled(*inputs), inputs), expected)


def test_autocast(report: torch_ops.Report) -> None:
    inputs = sdpa_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(*inputs)
    assert out.dtype == torch.bfloat16
    assert report.served == {CPU_FORWARD: 1}
    assert_same(gradients(out.float(), inputs), by_math(inputs), rtol=4e-2, atol=4e-2)


def test_transforms(report: torch_ops.Report) -> None:
    q, k, v = (torch.randn(3, 2, 4, 9, 16) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no batching rule for the CPU's operator
        out = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
    assert report.served[CPU_FORWARD] == 3
    grad = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k[0], v[0]).square().sum())(q[0])
    assert report.served[CPU_BACKWARD] == 1
    flashtile.uninstall()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    expected = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k[0], v[0]).square().sum())(q[0])
    torch.testing.assert_close(grad, expected)


def test_a_caller_in_cpp(report: torch_ops.Report) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    inputs = sdpa_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(attend)
    assert_same(gradients(scripted(*inputs), inputs), by_math(inputs))
    assert report.served == {CPU_FORWARD: 1, CPU_BACKWARD: 1}


def test_nested_tensors_are_left_alone(report: torch_ops.Report) -> None:
    parts = [torch.randn(4, 3, 8), torch.randn(6, 3, 8)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    ours = F.scaled_dot_product_attention(q, q, q)
    assert not report.served
    flashtile.uninstall()
    assert torch.equal(ours.values(), F.scaled_dot_product_attention(q, q, q).values())


def test_the_fast_path(report: torch_ops.Report) -> None:
    """torch computes the attention of nn.MultiheadAttention itself there; it is off while something is installed."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5).expand(2, 5) >= torch.tensor([[3], [5]])
    with torch.no_grad():
        ours = layer(x, src_key_padding_mask=padding)
        assert report.served == {CPU_FORWARD: 1}
        with sdpa.replaced():
            flashtile.uninstall()
            assert not torch.backends.mha.get_fastpath_enabled()
            flashtile.install()
        assert not torch.backends.mha.get_fastpath_enabled()
        flashtile.uninstall()
        assert torch.backends.mha.get_fastpath_enabled()
        torch.testing.assert_close(ours[~padding], layer(x, src_key_padding_mask=padding)[~padding])


def test_threads(report: torch_ops.Report) -> None:
    q = torch.randn(1, 2, 5, 8)
    work = lambda: [F.scaled_dot_product_attention(q, q, q) for _ in range(200)]  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert report.served == {CPU_FORWARD: 800}


def test_varlen_attn(report: torch_ops.Report) -> None:
    """On the CPU torch has no kernel for it."""
    q, k, v = leaves((12, 4, 16), (14, 4, 16), (14, 4, 16))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 12], [0, 6, 14]))
    has_windows = "window_size" in inspect.signature(varlen_attn).parameters  # torch 2.10 has not
    out = varlen_attn(q, k, v, cu_q, cu_k, 7, 8, **({"window_size": (-1, 0)} if has_windows else {"is_causal": True}))
    assert report.served == {"torch_attn::_varlen_attn": 1}
    parts = []
    for (start, end), (k_start, k_end) in zip([(0, 5), (5, 12)], [(0, 6), (6, 14)], strict=True):
        one = [x[None].transpose(1, 2) for x in (q[start:end], k[k_start:k_end], v[k_start:k_end])]
        seen = torch.ones(end - start, k_end - k_start, dtype=torch.bool).tril(k_end - k_start - end + start)
        with sdpa_kernel(SDPBackend.MATH):
            parts.append(F.scaled_dot_product_attention(*one, attn_mask=seen)[0].transpose(0, 1))
    assert_same(gradients(out, [q, k, v]), gradients(torch.cat(parts), [q, k, v]))
    assert report.served["torch_attn::_varlen_attn_backward"] == 1


# The operators for CUDA, below torch's autograd formulas


def call_cuda(name: str, inputs: list[Tensor], bias: Tensor | None, needs_grad: bool = True, **options: Any) -> Tensor:
    op = getattr(aten, f"_scaled_dot_product_{name}_attention")
    return op(*inputs, **options)[0] if name == "flash" else op(*inputs, bias, needs_grad, **options)[0]


CUDA_CALLS = [
    *(("flash", kind) for kind in ("plain", "causal", "gqa")),
    *(("efficient", kind) for kind in ("plain", "causal", "d_v", "bias", "dbias", "no_grad")),
    *(("cudnn", kind) for kind in ("plain", "causal", "gqa", "bias", "no_grad")),
]


@pytest.mark.parametrize(("name", "kind"), CUDA_CALLS)
def test_the_operators_for_cuda(cuda_report: torch_ops.Report, name: str, kind: str) -> None:
    heads_kv = 2 if kind == "gqa" else 4
    inputs = leaves((2, 4, 9, 16), (2, heads_kv, 11, 16), (2, heads_kv, 11, 24 if kind == "d_v" else 16))
    bias = torch.randn(2, 4, 9, 11, requires_grad=kind == "dbias") if "bias" in kind else None
    with torch.set_grad_enabled(kind != "no_grad"):
        ours = call_cuda(name, inputs, bias, kind != "no_grad", is_causal=kind == "causal", scale=0.3)
    full = f"{PREFIX}{name}_attention"
    assert cuda_report.served == {full: 1}
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(
            *inputs, bias, is_causal=kind == "causal", scale=0.3, enable_gqa=kind == "gqa"
        )
    if kind == "no_grad":
        torch.testing.assert_close(ours, theirs.detach())
        return
    wanted = [*inputs, bias] if kind == "dbias" and bias is not None else inputs
    assert_same(gradients(ours, wanted), gradients(theirs, wanted))
    assert cuda_report.served == {full: 1, f"{full}_backward": 1}


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_dropout_of_the_operators_for_cuda(cuda_report: torch_ops.Report, name: str) -> None:
    """torch's formulas hand seed and offset to the backward pass."""
    q, k, v = leaves((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 16))
    bias = None if name == "flash" else torch.randn(2, 4, 9, 11)
    torch.manual_seed(5)
    out = call_cuda(name, [q, k, v], bias, dropout_p=0.4, is_causal=True)
    torch.manual_seed(5)
    state = torch.randint(-(2**63), 2**63 - 1, (2,))
    kept = dropout_mask(state, 0.4, 2, 4, 9, 11)
    scores = q @ k.transpose(-1, -2) / math.sqrt(16) + (0.0 if bias is None else bias)
    scores = scores.masked_fill(~torch.ones(9, 11, dtype=torch.bool).tril(), float("-inf"))
    expected = (scores.softmax(-1) * kept / (1 - round(0.4 * 65536) / 65536)) @ v
    assert_same(gradients(out, [q, k, v]), gradients(expected, [q, k, v]))
    assert not cuda_report.left_to_torch


def test_dropout_is_of_one_library(cuda_report: torch_ops.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """What selection takes cannot go to torch later, whose random numbers are others."""
    wide = torch.randn(1, 2, 5, 600)
    with pytest.warns(flashtile.SlowPathWarning), pytest.raises(flashtile.Unsupported, match="head_dim 600"):
        aten._scaled_dot_product_flash_attention(wide, wide, wide, 0.5)
    assert cuda_report.left_to_torch.total() == 1

    def refuse(*args: Any) -> None:
        raise flashtile.Unsupported("a reason")

    monkeypatch.setattr(torch_kernels.ops, "forward", refuse)
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=r"has chosen to serve this call with dropout, and cannot: a reason"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    assert cuda_report.left_to_torch.total() == 1


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_results_are_laid_out_as_torchs_fakes_say(cuda_report: torch_ops.Report, name: str) -> None:
    """Compiled graphs rely on them."""
    op, backward = (getattr(aten, f"_scaled_dot_product_{name}_attention{end}") for end in ("", "_backward"))
    for q in layouts():
        q = q.half()
        rows = q.shape[2]
        for bias in (None,) if name == "flash" else (None, torch.randn(*q.shape[:2], rows, rows).half()):
            for dropout_p in (0.0, 0.25):
                values: Any = (q, q, q, dropout_p) if name == "flash" else (q, q, q, bias, True, dropout_p)
                found, on_meta = op(*values), [x.to("meta") if isinstance(x, Tensor) else x for x in values]
                assert facts(found) == facts(op(*on_meta))
                if name == "efficient":
                    assert facts(op(*values[:4], False)) == facts(op(*on_meta[:4], False))
                out, lse = found[:2]
                if name == "efficient":
                    arguments: Any = (
                        out,
                        q,
                        q,
                        q,
                        bias,
                        out,
                        lse,
                        *found[2:],
                        dropout_p,
                        [True] * 3 + [bias is not None],
                    )
                elif name == "cudnn":
                    arguments = (out, q, q, q, out, lse, *found[6:8], bias, None, None, rows, rows, dropout_p, False)
                else:
                    arguments = (out, q, q, q, out, lse, None, None, rows, rows, dropout_p, False, *found[6:8])
                on_meta = [x.to("meta") if isinstance(x, Tensor) else x for x in arguments]
                assert facts(backward(*arguments)) == facts(backward(*on_meta))


def test_what_the_operators_for_cuda_refuse(cuda_report: torch_ops.Report) -> None:
    """Without a kernel of torch's the reason is the error."""
    q = torch.randn(1, 2, 5, 8)
    for call in (
        lambda: aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True),
        lambda: aten._scaled_dot_product_cudnn_attention(q, q, q, None, True, 0.0, False, True),
    ):
        with pytest.warns(flashtile.SlowPathWarning), pytest.raises(flashtile.Unsupported, match="return_debug_mask"):
            call()
        torch_ops.registry._warned.clear()
    assert cuda_report.left_to_torch.total() == 2
