"""torch's flash attention operators with flashtile's kernels. The CUDA kernels are tried on the CPU too, where torch
has none of its own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flashtile
from flashtile.backends import native
from flashtile.integrations import torch_flash
from flashtile.testing import dropout_mask

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_the_cpu(test_device: None) -> None:
    """On every device: tests/gpu/test_integrations.py has the tests of CUDA tensors."""
    torch.set_default_device(None)


def restore() -> None:
    if hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        torch.nn.attention.restore_flash_attention_impl()
        return
    registry = torch.nn.attention._registry  # torch 2.10 has no function for it
    registry._FLASH_ATTENTION_HANDLES.pop("flashtile").remove()
    registry._FLASH_ATTENTION_ACTIVE = None


@pytest.fixture
def active() -> Iterator[None]:
    torch.manual_seed(0)
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flashtile")
    yield
    restore()


@pytest.fixture(params=["c++", "python"])
def cuda_kernels_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Without the extension all of them are Python functions."""
    torch.manual_seed(0)
    if request.param == "python":
        monkeypatch.setattr(native, "override_torch_flash", lambda key: None)
    elif native.missing_on_host() is not None:
        pytest.skip(f"no C++ kernels: {native.missing_on_host()}")
    handle = torch_flash.Handle(torch_flash.put_cuda_kernels_in_place("CPU"))
    yield request.param
    handle.remove()


def names_of(function) -> set[str]:
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor], **tolerance: float) -> None:
    weights = torch.randn_like(theirs)
    results = [[x, *torch.autograd.grad((x * weights).sum(), inputs)] for x in (ours, theirs)]
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


def test_the_registry() -> None:
    torch_flash.register()
    assert "flashtile" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None  # registering activates nothing
    q = torch.randn(1, 2, 5, 8)
    call = lambda: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    assert "flashtile::forward" not in names_of(call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.attention.activate_flash_attention_impl("flashtile")
    assert torch.nn.attention.current_flash_attention_impl() == "flashtile"
    assert "flashtile::forward" in names_of(call)
    restore()
    assert "flashtile::forward" not in names_of(call)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_on_the_cpu(is_causal: bool, dtype: torch.dtype) -> None:
    inputs = leaves((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), dtype=dtype)
    out = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=0.3)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*inputs, is_causal=is_causal, scale=0.3)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    assert_same(out, expected, inputs, **tolerance)


@pytest.mark.usefixtures("active")
def test_masks_on_the_cpu() -> None:
    inputs = leaves((2, 3, 7, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    for mask in (torch.randn(7, 9), torch.rand(2, 1, 7, 9) < 0.7):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        assert "flashtile::forward" in names_of(lambda mask=mask: F.scaled_dot_product_attention(*inputs, mask))
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
        assert_same(out, expected, inputs)


@pytest.mark.usefixtures("active")
def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    model = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    expected = model(x)
    compiled = torch.compile(model)
    assert_same(compiled(x), expected, list(model.parameters()), rtol=1e-3, atol=1e-4)
    names = names_of(lambda: compiled(x).sum().backward())
    assert {"flashtile::forward", "flashtile::backward"} <= names


@pytest.mark.usefixtures("cuda_kernels_on_the_cpu")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_sdpa_operator(is_causal: bool) -> None:
    inputs = leaves((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), dtype=torch.bfloat16)
    out, lse, *_, max_q, max_k, state, unused, mask = aten._scaled_dot_product_flash_attention(
        *inputs, 0.0, is_causal, scale=0.3
    )
    expected, expected_lse = flashtile.attention(
        *inputs, causal="top_left" if is_causal else False, scale=0.3, return_lse=True
    )
    torch.testing.assert_close(lse, expected_lse)
    assert (max_q, max_k, state.dtype, unused.dtype, mask.numel()) == (9, 9, torch.uint64, torch.uint64, 0)
    assert_same(out, expected, inputs)


@pytest.mark.usefixtures("cuda_kernels_on_the_cpu")
def test_dropout_is_drawn_once() -> None:
    inputs = leaves((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    out, *_, state, _, _ = aten._scaled_dot_product_flash_attention(*inputs, 0.4)
    rng_state = state.view(torch.int64)
    kept = dropout_mask(rng_state, 0.4, 2, 3, 9, 9)
    q, k, v = inputs
    scores = (q @ k.transpose(-1, -2) * 0.25).softmax(-1)
    assert not kept.all()
    torch.testing.assert_close(out, (scores * kept * (65536 / (65536 - round(0.4 * 65536)))) @ v)
    assert_same(out, flashtile.attention(*inputs, dropout_p=0.4, rng_state=rng_state), inputs)
    again = aten._scaled_dot_product_flash_attention(*inputs, 0.4)[0]
    assert not torch.equal(again, out)


def test_what_goes_through_python(cuda_kernels_on_the_cpu: str) -> None:
    """With the extension calls with dropout alone, and the first call of a kind."""
    inputs = leaves((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    for dropout_p in (0.0, 0.4):
        call = lambda p=dropout_p: aten._scaled_dot_product_flash_attention(*inputs, p)[0].sum().backward()  # noqa: E731
        call()
        names = {name for name in names_of(call) if name.startswith("flashtile::")}
        is_python = cuda_kernels_on_the_cpu == "python" or dropout_p > 0.0
        assert ({"flashtile::forward", "flashtile::backward"} <= names) == is_python
        assert bool(names) == is_python


def test_a_refusal(cuda_kernels_on_the_cpu: str) -> None:
    """In flashtile's words; C++ raises a RuntimeError, as every op of torch does."""
    q, k = torch.randn(2, 3, 9, 16), torch.randn(2, 2, 9, 16)
    for dropout_p in (0.0, 0.4):
        kind = RuntimeError if cuda_kernels_on_the_cpu == "c++" else ValueError
        with pytest.raises(kind, match=r"^k: got 2 heads"):
            aten._scaled_dot_product_flash_attention(q, k, k, dropout_p)


@pytest.mark.usefixtures("cuda_kernels_on_the_cpu")
@pytest.mark.parametrize("window", [(None, None), (-1, 0), (3, 2)], ids=str)
def test_the_flash_operator(window: tuple[int | None, int | None]) -> None:
    inputs = leaves((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out, lse, *_ = aten._flash_attention_forward(
        *inputs, None, None, 7, 9, 0.0, True, False, window_size_left=window[0], window_size_right=window[1]
    )
    expected, expected_lse = flashtile.attention(*inputs, causal=True, window=window, layout="bshd", return_lse=True)
    torch.testing.assert_close((out, lse), (expected, expected_lse))


@pytest.mark.usefixtures("cuda_kernels_on_the_cpu")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)], ids=str)
def test_varlen_attn(window: tuple[int, int]) -> None:
    q, k, v = inputs = leaves((14, 4, 16), (14, 4, 16), (14, 4, 16))
    lengths = torch.tensor([0, 5, 14], dtype=torch.int32)
    options: dict[str, Any] = {"window_size": window}
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        if window[0] != -1:
            pytest.skip("varlen_attn of this torch has no window")
        options = {"is_causal": window[1] == 0}
    out = varlen_attn(q, k, v, lengths, lengths, 9, 9, **options)
    expected = flashtile.attention_varlen(q, k, v, lengths, lengths, 9, 9, window=window)
    assert_same(out, expected, inputs)


@pytest.mark.skipif(
    not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="this torch has no such operator"
)
@pytest.mark.usefixtures("cuda_kernels_on_the_cpu")
def test_the_operator_that_writes_into_a_tensor() -> None:
    q = torch.randn(14, 4, 16)
    lengths, out = torch.tensor([0, 5, 14], dtype=torch.int32), torch.empty(14, 4, 16)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, lengths, lengths, 9, 9, 0.0, True, False)
    expected = flashtile.attention_varlen(q, q, q, lengths, lengths, 9, 9, causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
