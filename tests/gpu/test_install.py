"""torch's attention operators on a GPU under `flashtile.install()`: each backend pinned by name, against the same call
in float64. tests/integrations/test_torch_ops.py has the rest, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flashtile
from flashtile.integrations import torch_ops
from flashtile.testing import dropout_mask

PREFIX = "aten::_scaled_dot_product_"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SHAPES = [(2, 4, 300, 64), (2, 4, 200, 64), (2, 4, 200, 64)]


@pytest.fixture(autouse=True)
def default_kernels() -> None:
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


@pytest.fixture
def report() -> Iterator[torch_ops.Report]:
    found = flashtile.install()
    found.clear()
    yield found
    flashtile.uninstall()


def leaves(dtype: torch.dtype = torch.bfloat16, shapes: list[tuple[int, ...]] | None = None) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes or SHAPES]


def doubles(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x if x.dtype is torch.bool else x.detach().double() for x in tensors]


def exact(inputs: list[Tensor], bias: Tensor | None, wanted: int, weights: Tensor, **options: Any) -> list[Tensor]:
    values = doubles(*inputs, bias)
    for value in values[:wanted]:
        value.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*values[:3], values[3], **options)
    return [out.detach(), *torch.autograd.grad(out, values[:wanted], weights.double())]


def assert_close(ours: list[Tensor], expected: list[Tensor], tolerance: float = 0.02) -> None:
    """By the norm of each tensor: rounding to bfloat16 is far below, a wrong mask or scale far above."""
    for mine, other in zip(ours, expected, strict=True):
        error = (mine.double() - other).norm() / other.norm()
        assert error.item() <= tolerance


def pinned(name: str, call: Callable[[], Tensor]) -> Tensor:
    """Inside this backend, or skipped where torch does not take the call."""
    with sdpa_kernel(BACKENDS[name]):
        try:
            return call()
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            pytest.skip(f"torch takes no such call with {name} on this GPU")


KINDS = {
    "flash": ("plain", "causal", "gqa", "d 60"),
    "efficient": ("plain", "causal", "float32", "bool", "bias", "dbias", "d_v", "no_grad"),
    "cudnn": ("plain", "causal", "gqa", "bool", "no_grad"),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_a_backend(report: torch_ops.Report, name: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    shapes = [list(shape) for shape in SHAPES]
    if kind == "gqa":
        shapes[1][1] = shapes[2][1] = 2
    if kind == "d_v":
        shapes[2][3] = 32
    if kind == "d 60":
        shapes = [[*shape[:3], 60] for shape in shapes]
    inputs = leaves(dtype, [tuple(shape) for shape in shapes])
    bias = None
    if kind == "bool":
        bias = torch.rand(2, 1, 300, 200, device="cuda") < 0.7
    elif kind in ("bias", "dbias"):
        bias = torch.randn(2, 4, 300, 200, dtype=dtype, device="cuda", requires_grad=kind == "dbias")
    options = {"is_causal": kind == "causal", "enable_gqa": kind == "gqa"}
    with torch.set_grad_enabled(kind != "no_grad"):
        out = pinned(name, lambda: F.scaled_dot_product_attention(*inputs, bias, **options))
    assert report.served == {f"{PREFIX}{name}_attention": 1}
    wanted = [*inputs, bias] if kind == "dbias" and bias is not None else inputs
    weights = torch.randn(out.shape, device="cuda").to(dtype)
    found = [out.detach()]
    if kind != "no_grad":
        found += torch.autograd.grad(out, wanted, weights)
        assert report.served[f"{PREFIX}{name}_attention_backward"] == 1
    assert not report.left_to_torch
    assert_close(found, exact(inputs, bias, len(wanted), weights, **options)[: len(found)])


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout(report: torch_ops.Report, name: str) -> None:
    """The backward pass drops what the forward pass dropped."""
    inputs = leaves()
    torch.manual_seed(5)  # of the state, which the call draws
    out = pinned(name, lambda: F.scaled_dot_product_attention(*inputs, dropout_p=0.4))
    torch.manual_seed(5)
    state = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cuda")
    kept = dropout_mask(state, 0.4, 2, 4, 300, 200).to("cuda")
    q, k, v = (x.requires_grad_() for x in doubles(*inputs))
    exact_out = ((q @ k.transpose(-1, -2) / 8).softmax(-1) * kept / (1 - round(0.4 * 65536) / 65536)) @ v
    weights = torch.randn(out.shape, device="cuda").bfloat16()
    found = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
    assert_close(found, [exact_out.detach(), *torch.autograd.grad(exact_out, [q, k, v], weights.double())])
    assert not report.left_to_torch


@pytest.mark.parametrize("name", BACKENDS)
def test_each_library_reads_what_the_other_saved(name: str) -> None:
    """Shapes, strides, dtypes and values: a pass of torch takes what ours returned, and the other way round."""
    for ours_first in (True, False):
        inputs = leaves()
        steps = [flashtile.install, flashtile.uninstall]
        first, second = steps if ours_first else reversed(steps)
        first()
        out = pinned(name, lambda inputs=inputs: F.scaled_dot_product_attention(*inputs))
        weights = torch.randn(out.shape, device="cuda").bfloat16()
        second()
        found = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
        flashtile.uninstall()
        assert_close(found, exact(inputs, None, 3, weights))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_compiled_graph(report: torch_ops.Report, name: str) -> None:
    torch._dynamo.reset()
    inputs = leaves()
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    for _ in range(2):
        out = pinned(name, lambda: compiled(*inputs))
        weights = torch.randn(out.shape, device="cuda").bfloat16()
        found = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
        assert_close(found, exact(inputs, None, 3, weights, is_causal=True))
    assert report.served == {f"{PREFIX}{name}_attention": 2, f"{PREFIX}{name}_attention_backward": 2}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_graph(report: torch_ops.Report, name: str) -> None:
    """Nothing synchronises: the call is captured and replayed."""
    q, k, v = (x.detach() for x in leaves())
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pinned(name, call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with sdpa_kernel(BACKENDS[name]), torch.cuda.graph(graph):
        out = call()
    assert report.share() == 1.0
    q.normal_()
    graph.replay()
    assert_close([out], exact([q, k, v], None, 3, torch.zeros_like(out))[:1])


@pytest.mark.filterwarnings("ignore::flashtile.SlowPathWarning")
def test_refused_calls_go_to_torch(report: torch_ops.Report) -> None:
    inputs = leaves(torch.float32, [(1, 2, 64, 640)] * 3)
    with pytest.warns(flashtile.SlowPathWarning):
        out = F.scaled_dot_product_attention(*inputs)
    grads = torch.autograd.grad(out.sum(), inputs)
    assert not report.served
    assert report.left_to_torch
    assert_close([out.detach(), *grads], exact(inputs, None, 3, torch.ones_like(out)), 1e-2)


def test_what_torch_sends_to_math(report: torch_ops.Report) -> None:
    """float64 has no other backend on a GPU."""
    inputs = leaves(torch.float64)
    out = F.scaled_dot_product_attention(*inputs)
    assert report.served == {torch_ops.MATH: 1}
    assert_close([out.detach()], exact(inputs, None, 3, torch.zeros_like(out))[:1], 1e-9)


def test_varlen_attn(report: torch_ops.Report) -> None:
    inputs = leaves(shapes=[(300, 4, 64)] * 3)
    ends = torch.tensor([0, 120, 300], dtype=torch.int32, device="cuda")
    has_windows = "window_size" in inspect.signature(varlen_attn).parameters  # torch 2.10 has not
    options = {"window_size": (-1, 0)} if has_windows else {"is_causal": True}
    out = varlen_attn(*inputs, ends, ends, 180, 180, **options)
    assert report.served == {"torch_attn::_varlen_attn": 1}
    weights = torch.randn(out.shape, device="cuda").bfloat16()
    found = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
    assert report.served["torch_attn::_varlen_attn_backward"] == 1
    parts = []
    for start, end in ((0, 120), (120, 300)):
        one = [x[start:end].transpose(0, 1)[None] for x in inputs]
        w = weights[start:end].transpose(0, 1)[None]
        parts.append([x[0].transpose(0, 1) for x in exact(one, None, 3, w, is_causal=True)])
    assert_close(found, [torch.cat(list(pieces)) for pieces in zip(*parts, strict=True)])


def test_a_layer(report: torch_ops.Report) -> None:
    """nn.TransformerEncoderLayer without gradients calls the operators too."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(2, 50, 256, device="cuda", dtype=torch.bfloat16)
    padding = torch.arange(50, device="cuda").expand(2, 50) >= torch.tensor([[30], [50]], device="cuda")
    with torch.no_grad():
        ours = layer(x, src_key_padding_mask=padding)
        assert report.served.total() == 1
        theirs = layer.double()(x.double(), src_key_padding_mask=padding)
    assert_close([ours[~padding]], [theirs[~padding]])
