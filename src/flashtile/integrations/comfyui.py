"""flashtile as an attention function of ComfyUI, every mask included.

    from flashtile.integrations import comfyui
    comfyui.register()  # comfy's get_attention_function("flashtile")
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = comfyui.override  # every call of one model

examples/comfyui_flashtile/ is a custom node that does both. This module imports nothing of ComfyUI before `register`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashtile import facades
from flashtile.api import call_as
from flashtile.arguments import integer
from flashtile.backends import registry
from flashtile.errors import Unsupported, value_error

NAME = "flashtile"
# What the facade of torch's function calls its arguments
_NAMES = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unused: Any,
) -> Tensor:
    """Attention with the signature of ComfyUI's functions: (batch, rows, heads * dim), or (batch, heads, rows, dim)
    with skip_reshape, to (batch, rows, heads * dim), or (batch, heads, rows, dim) with skip_output_reshape.

    mask has 2 (rows, keys), 3 (batch, rows, keys) or 4 dimensions; it is boolean, True = attend, or added to the
    scores. attn_precision is accepted: scores of 16-bit inputs are computed in float32 whatever it says. What else
    ComfyUI passes, its transformer_options among them, is not about the result.
    """
    if not skip_reshape:
        if integer("heads", heads, "a number of heads") < 1:
            raise value_error("heads", heads, "a number of heads, at least 1")
        dim = q.shape[-1] // heads
        key_heads = k.shape[-1] // dim if enable_gqa else heads
        q, k, v = (
            _apart(x, name, count) for x, name, count in ((q, "q", heads), (k, "k", key_heads), (v, "v", key_heads))
        )
    if mask is not None:
        while mask.dim() < 4:
            mask = mask[None] if mask.dim() == 2 else mask[:, None]
        if mask.is_floating_point() and mask.dtype != q.dtype:
            mask = mask.float()
    out: Tensor = call_as(
        _NAMES, facades.scaled_dot_product_attention, q, k, v, mask, scale=scale, enable_gqa=bool(enable_gqa)
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def _apart(tensor: Tensor, name: str, heads: int) -> Tensor:
    """(batch, rows, heads * dim) as (batch, heads, rows, dim), in place."""
    if tensor.shape[-1] % heads:
        raise value_error(name, tensor, f"a last dimension that is a multiple of {heads} heads")
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def override(function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """An "optimized_attention_override": flashtile in the place of ComfyUI's function, which gets the calls that
    flashtile refuses, with one warning for each reason."""
    try:
        return attention(*args, **options)
    except (Unsupported, ValueError, TypeError) as error:
        registry.announce_slow_path(f"a call of attention was left to ComfyUI: {error}")
    return function(*args, **options)


def register() -> None:
    """Registers `attention` as "flashtile" among ComfyUI's functions. A second call changes nothing."""
    theirs = importlib.import_module("comfy.ldm.modules.attention")
    if NAME not in theirs.REGISTERED_ATTENTION_FUNCTIONS:
        theirs.register_attention_function(NAME, theirs.wrap_attn(attention))


class FlashtileAttention:
    """A node of ComfyUI: the model that comes in, with its attention by flashtile."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "advanced/model"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802, ComfyUI's name
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        patched.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
        return (patched,)


NODE_CLASS_MAPPINGS = {"FlashtileAttention": FlashtileAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"FlashtileAttention": "Flashtile Attention"}
