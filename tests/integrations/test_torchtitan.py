"""torchtitan's attention modules on flashtile. Those of the package need Triton to be imported; `Recorded` does what
VarlenAttention of torchtitan 0.3.0 does, so that the door is tried without it too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan", exc_type=ImportError)
if not hasattr(torch.nn.attention, "current_flash_attention_impl"):
    pytest.skip("torchtitan needs a newer torch", allow_module_level=True)

from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.tools import utils

from flashtile.integrations import torchtitan as ours

LENGTHS = (5, 1, 12, 6)


class Recorded(torch.nn.Module):
    def __init__(self, window: tuple[int, int]) -> None:
        super().__init__()
        from torchtitan.tools.utils import get_cuda_flash_attention_impl

        self.window, name = window, get_cuda_flash_attention_impl()
        if name is not None and current_flash_attention_impl() != name:
            activate_flash_attention_impl(name)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, metadata: Any) -> Tensor:
        rows = [x.flatten(0, 1).to(torch.bfloat16) for x in (q, k, v)]
        splits: dict[str, Any] = {"num_splits": 1} if current_flash_attention_impl() in (None, "FA2") else {}
        out: Any = varlen_attn(*rows, *metadata[:4], window_size=self.window, enable_gqa=True, **splits)
        return out.view_as(q).to(q.dtype)


def packages() -> Any:
    try:
        from torchtitan.models.common import attention
    except ImportError as error:
        pytest.skip(f"torchtitan's models cannot be imported: {error}")
    return attention


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    ours.unregister()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "has_cuda_capability", lambda major, minor: major <= 9)


def documents() -> tuple[list[Tensor], Any]:
    inputs = [torch.randn(2, 12, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return inputs, (starts, starts, 12, 12)


def by_formula(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    document = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    place = torch.arange(24)
    distance = place - place[:, None]
    seen = (document == document[:, None]) & (distance <= window[1]) & ((distance >= -window[0]) | (window[0] < 0))
    q, k, v = (x.to(torch.bfloat16).to(torch.float32).flatten(0, 1) for x in (q, k, v))
    scores = torch.einsum("shd,thd->hst", q, k.repeat_interleave(2, 1)) / 4
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hst,thd->shd", weights, v.repeat_interleave(2, 1)).view(2, 12, 4, 16)


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
@pytest.mark.parametrize("kind", ["recorded", "torchtitan's"])
def test_packed_documents(kind: str, window: tuple[int, int], on_hopper: None) -> None:
    theirs = packages() if kind != "recorded" else None
    report = ours.register()
    report.clear()
    inputs, metadata = documents()
    if theirs is None:
        out = Recorded(window)(*inputs, metadata)
    else:
        module = theirs.VarlenAttention.Config(window_size=window).build()
        out = module(*inputs, attention_masks=theirs.VarlenMetadata(*metadata), enable_gqa=True)
    assert current_flash_attention_impl() is None
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    assert report.served == {"torch_attn::_varlen_attn": 1, "torch_attn::_varlen_attn_backward": 1}
    assert not report.left_to_torch
    expected = by_formula(*inputs, window)
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, inputs, grad)], strict=True):
        torch.testing.assert_close(one, other, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dense(is_causal: bool) -> None:
    module = packages().ScaledDotProductAttention.Config().build()
    inputs = [torch.randn(2, 12, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    expected = module(*inputs, is_causal=is_causal, enable_gqa=True)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, grad)
    report = ours.register()
    report.clear()
    out = module(*inputs, is_causal=is_causal, enable_gqa=True)
    for one, other in zip([out, *torch.autograd.grad(out, inputs, grad)], [expected, *gradients], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert report.share() == 1
    assert report.served.total() == 2


def test_the_names_that_torchtitan_asks_for(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    holder: Any = ModuleType("torchtitan.experiments.rl.models.attention")
    holder.get_cuda_flash_attention_impl = original = utils.get_cuda_flash_attention_impl
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    assert utils.get_cuda_flash_attention_impl() == "FA3"
    ours.register()
    ours.register()
    assert utils.get_cuda_flash_attention_impl() is None
    assert holder.get_cuda_flash_attention_impl() is None
    ours.unregister()
    assert utils.get_cuda_flash_attention_impl is original
    assert holder.get_cuda_flash_attention_impl is original
