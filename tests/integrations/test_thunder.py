"""Lightning Thunder: a small GPT with flashtile's executor against PyTorch, and the checker both ways."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

try:
    import thunder
except Exception as error:  # with a torch that is too new for it, importing it fails in many ways
    pytest.skip(f"thunder cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)

import flashtile
from flashtile.integrations.thunder import flashtile_ex, why_not


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, rows, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).reshape(batch, rows, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))


def jit(function: Any) -> Any:
    return thunder.jit(function, executors=[flashtile_ex, *thunder.get_default_executors()])


def names_in(trace: Any) -> list[str]:
    return [symbol.sym.name for symbol in trace.bound_symbols]


def test_gpt() -> None:
    torch.manual_seed(0)
    model, ids = Gpt(), torch.randint(0, 50, (2, 12))
    weights = list(model.parameters())
    expected = model(ids)
    expected_grads = torch.autograd.grad(expected.square().sum(), weights)
    jitted = jit(model)
    out = jitted(ids)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    for weight, grad in zip(weights, expected_grads, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-3, atol=1e-4)
    assert names_in(thunder.last_traces(jitted)[-1]).count("flashtile_forward") == 2
    assert names_in(thunder.last_backward_traces(jitted)[-1]).count("flashtile_backward") == 2


def test_inference() -> None:
    model, ids = Gpt(), torch.randint(0, 50, (2, 12))
    jitted = jit(model)
    with torch.no_grad():
        torch.testing.assert_close(jitted(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert "flashtile_forward" in names_in(thunder.last_traces(jitted)[-1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "scale", "bool", "float", "rows"])
def test_what_is_taken(kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and torch.get_default_device().type == "cuda":
        pytest.skip("float64 is left to the other executors on a GPU")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in (7, 9, 9))
    masks = {"bool": torch.rand(7, 9) < 0.7, "float": torch.randn(2, 1, 7, 9, dtype=dtype)}
    masks["rows"] = torch.randn(9, dtype=dtype)
    mask = masks.get(kind)
    inputs = [q, k, v]
    if mask is not None and mask.is_floating_point():
        inputs.append(mask.requires_grad_())
    scale = 0.3 if kind == "scale" else None

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    jitted = jit(attend)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    out, expected = jitted(q, k, v, mask), flashtile.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    torch.testing.assert_close(out, expected, **tolerance)
    grad = torch.randn_like(out)
    for mine, other in zip(*(torch.autograd.grad(x, inputs, grad) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other, **tolerance)
    assert "flashtile_forward" in names_in(thunder.last_traces(jitted)[-1])


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.5}, "dropout"),
    "head_dim": ({"dim": 600}, "query has a head_dim outside of 1 to 512"),
    "dimensions": ({"shape": (3, 7, 8)}, "query has 3 dimensions, not 4"),
    "broadcast": ({"key_batch": 1}, "shapes that have to be broadcast"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused(name: str) -> None:
    options, reason = dict(REFUSALS[name][0]), REFUSALS[name][1]
    shape = options.pop("shape", (2, 3, 7, options.pop("dim", 8)))
    q, k = torch.randn(shape), torch.randn(options.pop("key_batch", shape[0]), *shape[1:])
    seen = []

    def attend(q: Any, k: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, k, **options)

    class Spy:
        def __call__(self, *args: Any, **kwargs: Any) -> bool:
            seen.append(why_not(*args, **kwargs))
            return not seen[-1]

    implementation = flashtile_ex.implmap["torch.nn.functional.scaled_dot_product_attention"]
    original = implementation.checker
    implementation.checker = Spy()
    try:
        jitted = jit(attend)
        out = jitted(q, k)
        assert "flashtile_forward" not in names_in(thunder.last_traces(jitted)[-1])
    finally:
        implementation.checker = original
    assert seen
    assert all(re.search(reason, text) for text in seen)
    if name != "dropout":  # PyTorch would draw another mask
        torch.testing.assert_close(out, attend(q, k), rtol=1e-4, atol=1e-5)


def proxy(*shape: int, dtype: str = "float32", device: str = "cpu") -> Any:
    kinds = {"dtype": getattr(thunder.dtypes, dtype), "device": thunder.core.devices.Device(device)}
    return SimpleNamespace(shape=shape, **kinds)


def test_what_thunder_would_refuse_too() -> None:
    q = proxy(2, 3, 7, 8)
    assert why_not(q, q, q) == ""
    assert why_not(q, q, q, proxy(7, 7, dtype="bool8")) == ""
    assert why_not(q, q, q, proxy(7, 7, dtype="float64")).startswith("attn_mask is")
    assert why_not(q, q, q, proxy(7, 7), is_causal=True) == "attn_mask with is_causal"
    assert why_not(q, q, q, proxy(7, 5)) == "attn_mask cannot be broadcast to the scores"
    assert why_not(q, q, proxy(2, 3, 7, 8, dtype="bfloat16")) == "value has another dtype or device than query"
    assert why_not(*[proxy(2, 3, 7, 8, device="meta")] * 3).startswith("query is on")
    assert why_not(*[proxy(2, 3, 7, 8, dtype="float64")] * 3) == ""
    assert why_not(*[proxy(2, 3, 7, 8, dtype="float64", device="cuda")] * 3).startswith("query is float64")
    assert why_not(*[proxy(2, 3, 7, 8, device="cuda")] * 3) == ""
    assert why_not(*[proxy(2, 3, 7, 8, dtype="complex64")] * 3).startswith("query is")
