"""ComfyUI's attention function, override and node. ComfyUI is not on the package index: where it cannot be imported,
the interface recorded from its sources stands for it (version 0.3.64, commit a125cd84b054, and commit 82997188568a,
which brings scale, enable_gqa and containers). A checkout on PYTHONPATH is tried instead."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.integrations import comfyui

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "comfyui_flashtile" / "__init__.py"
NAME = "comfy.ldm.modules.attention"


def recorded() -> ModuleType:
    module: Any = ModuleType(NAME)
    module.REGISTERED_ATTENTION_FUNCTIONS = functions = {}

    def register_attention_function(name: str, func: Any) -> None:
        functions.setdefault(name, func)

    def wrap_attn(func: Any) -> Any:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if "_inside_attn_wrapper" not in kwargs:
                kwargs["_inside_attn_wrapper"] = True
                override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
                if override is not None:
                    return override(func, *args, **kwargs)
            return func(*args, **kwargs)

        wrapper.container_function = None  # type: ignore[attr-defined]
        return wrapper

    def attention_pytorch(
        q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, attn_precision: Any = None,
        skip_reshape: bool = False, skip_output_reshape: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if not skip_reshape:
            dim = q.shape[-1] // heads
            q, k, v = (x.view(*x.shape[:2], -1, dim).transpose(1, 2) for x in (q, k, v))
        if mask is not None:
            mask = mask[None] if mask.dim() == 2 else mask
            mask = mask[:, None] if mask.dim() == 3 else mask
        given = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **given)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    module.register_attention_function, module.wrap_attn = register_attention_function, wrap_attn
    module.get_attention_function = lambda name: functions[name]
    module.attention_pytorch = wrap_attn(attention_pytorch)
    return module


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if importlib.util.find_spec("comfy") is not None:
        with monkeypatch.context() as during:
            during.setattr(sys, "argv", ["comfyui", "--cpu"])
            importlib.import_module("comfy.options").enable_args_parsing()
            module = importlib.import_module(NAME)
        monkeypatch.setattr(module, "REGISTERED_ATTENTION_FUNCTIONS", dict(module.REGISTERED_ATTENTION_FUNCTIONS))
    else:
        module = recorded()
        for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, NAME, module)
    return module


MASKS = {
    "none": lambda: None,
    "rows, keys": lambda: torch.rand(9, 11) < 0.7,
    "batch, rows, keys": lambda: torch.rand(2, 9, 11) < 0.7,
    "batch, 1, 1, keys": lambda: torch.rand(2, 1, 1, 11) < 0.7,
    "batch, heads, rows, keys": lambda: torch.rand(2, 4, 9, 11) < 0.7,
    "rows, keys, added": lambda: torch.randn(9, 11),
    "batch, rows, keys, added": lambda: torch.randn(2, 9, 11),
    "batch, heads, rows, keys, added": lambda: torch.randn(2, 4, 9, 11),
    "-inf": lambda: torch.zeros(2, 9, 11).masked_fill(torch.rand(2, 9, 11) < 0.3, float("-inf")),
}


@pytest.mark.parametrize("skips", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", MASKS)
def test_against_comfyuis_own(kind: str, skips: tuple[bool, bool], theirs: Any) -> None:
    shape = (lambda rows: (2, 4, rows, 16)) if skips[0] else (lambda rows: (2, rows, 64))
    inputs = [torch.randn(shape(rows), requires_grad=True) for rows in (9, 11, 11)]
    mask = MASKS[kind]()
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    options = {"skip_reshape": skips[0], "skip_output_reshape": skips[1]}
    comfyui.register()
    comfyui.register()
    own = theirs.get_attention_function("flashtile")
    found = own(*inputs, 4, mask, attn_precision=torch.float32, transformer_options={}, **options)
    expected = theirs.attention_pytorch(*inputs, 4, mask=mask, **options)
    grad = torch.randn_like(expected)
    for one, other in zip(
        [found, *torch.autograd.grad(found, inputs, grad)],
        [expected, *torch.autograd.grad(expected, inputs, grad)],
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("skip", [False, True])
def test_scale_shared_heads_and_types(skip: bool) -> None:
    q, k, v = (torch.randn(2, rows, heads, 16) for rows, heads in ((9, 4), (11, 2), (11, 2)))
    mask = torch.randn(9, 11)
    expected: Any = flashtile.attention(q, k, v, bias=mask, scale=0.1, layout="bshd")
    given = [x.transpose(1, 2) if skip else x.flatten(2) for x in (q, k, v)]
    options = {"scale": 0.1, "enable_gqa": True, "skip_reshape": skip, "low_precision_attention": False}
    torch.testing.assert_close(comfyui.attention(*given, 4, mask, **options), expected.flatten(2))
    half = comfyui.attention(*(x.bfloat16() for x in given), 4, mask.half(), **options)
    torch.testing.assert_close(half, expected.flatten(2).bfloat16(), rtol=0.05, atol=0.05)


def test_refusals_name_comfyuis_arguments() -> None:
    x = torch.randn(1, 3, 10)
    with pytest.raises(ValueError, match=r"^q: got shape \(1, 3, 10\).*multiple of 3 heads"):
        comfyui.attention(x, x, x, 3)
    for heads, error in ((0, ValueError), (-2, ValueError), ("2", TypeError)):
        with pytest.raises(error, match=r"^heads: got"):
            comfyui.attention(torch.zeros(1, 3, 10), torch.zeros(1, 3, 10), torch.zeros(1, 3, 10), heads=heads)
    with pytest.raises(ValueError, match=r"^mask: got"):
        comfyui.attention(x, x, x, 2, torch.ones(4, 4).bool())


def test_override(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        comfyui.facades, "scaled_dot_product_attention", counted(calls, comfyui.facades.scaled_dot_product_attention)
    )
    q = torch.randn(1, 5, 32)
    options = {"optimized_attention_override": comfyui.override}
    found = theirs.attention_pytorch(q, q, q, 4, transformer_options=options)
    assert len(calls) == 1
    torch.testing.assert_close(found, theirs.attention_pytorch(q, q, q, 4), rtol=1e-5, atol=1e-5)
    # A head dim that flashtile does not serve
    wide = torch.randn(1, 3, 600)
    with pytest.warns(flashtile.SlowPathWarning, match="left to ComfyUI: q: got head_dim 600"):
        found = theirs.attention_pytorch(wide, wide, wide, 1, transformer_options=options)
    assert torch.equal(found, theirs.attention_pytorch(wide, wide, wide, 1))
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    with pytest.raises(flashtile.Unsupported, match="FLASHTILE_STRICT"):
        theirs.attention_pytorch(wide, wide, wide, 1, transformer_options=options)


def counted(calls: list[Any], function: Any) -> Any:
    def count(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return function(*args, **options)

    return count


class Model:
    """The part of ComfyUI's ModelPatcher that a node uses."""

    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> Model:
        return copy.deepcopy(self)


def test_custom_node(theirs: Any) -> None:
    spec = importlib.util.spec_from_file_location("comfyui_flashtile", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    node = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec.loader.exec_module(node)
    assert "flashtile" in theirs.REGISTERED_ATTENTION_FUNCTIONS
    assert node.NODE_CLASS_MAPPINGS.keys() == node.NODE_DISPLAY_NAME_MAPPINGS.keys()
    (kind,) = node.NODE_CLASS_MAPPINGS.values()
    assert kind.INPUT_TYPES() == {"required": {"model": ("MODEL",)}}
    assert kind.RETURN_TYPES == ("MODEL",)
    model = Model()
    (patched,) = getattr(kind(), kind.FUNCTION)(model)
    assert model.model_options == {"transformer_options": {}}
    q = torch.randn(1, 5, 32)
    out = theirs.attention_pytorch(q, q, q, 4, **patched.model_options)
    assert torch.equal(out, comfyui.attention(q, q, q, 4))
