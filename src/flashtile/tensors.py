"""Tensors that kernels can read, and what becomes of other objects.

Kernels read a tensor's memory. That is wrong for a subclass whose memory does not hold its values, such as torch's
CausalBias. torch's dispatcher calls a subclass with `__torch_dispatch__` instead of a kernel, so such a subclass
decides for itself. A subclass with `__torch_function__` alone is above the dispatcher and cannot be told from a plain
tensor below it: it is refused here, by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashtile.errors import quoted, type_error, unsupported, value_error
from flashtile.problem import row_axis

# What a class has that changes nothing about its functions: torch.Tensor's own, and that of torch.nn.Parameter
_INERT_FUNCTIONS = (getattr(Tensor.__torch_function__, "__func__", None), torch._C._disabled_torch_function_impl)


def is_plain(value: Any) -> bool:
    """A tensor of no subclass whose elements lie in memory at strides."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested and not value.is_quantized


def require_readable(name: str, value: Any, accepted: str) -> None:
    """Refuses what is no tensor, what has no strides, and subclasses that hide their values."""
    if not isinstance(value, Tensor):
        hint = f"Call torch.as_tensor({name})" if isinstance(value, list) or hasattr(value, "__array__") else ""
        raise type_error(name, quoted(value), accepted, hint)
    if value.is_nested:
        hint = "Pass its values() and its offsets().int() to attention_varlen"
        raise unsupported(name, "a nested tensor", "tensors with strides", hint)
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.").removeprefix("_")
        raise unsupported(name, f"a tensor of layout {kind}", "tensors with strides", f"Call {name}.to_dense()")
    if value.is_quantized:
        raise unsupported(name, f"a quantized tensor ({value.dtype})", "floating point", f"Call {name}.dequantize()")
    if not _is_understood(type(value)):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise unsupported(
            name,
            f"a tensor of the subclass {kind}, whose memory may not hold its values",
            accepted,
            f"Where it does, pass {name}.as_subclass(torch.Tensor)",
        )


def _is_understood(kind: type) -> bool:
    """True if the memory of such a tensor holds its values, or torch's dispatcher calls it in place of a kernel."""
    function = kind.__torch_function__  # type: ignore[attr-defined]
    if getattr(function, "__func__", function) in _INERT_FUNCTIONS:
        return True
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def has_strides(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested


def is_causal_bias(value: Any) -> bool:
    """torch.nn.attention.bias.CausalBias. Its module takes a second to import, so it is known by its name."""
    kind = type(value)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def corner_of(name: str, bias: Any, causal: bool | str, seqlen_q: int, seqlen_k: int) -> str:
    """Returns what torch's CausalBias means as `causal`."""
    if causal != 0:
        raise value_error(name, f"a CausalBias with causal={causal!r}", "one of the two")
    if not is_compiling() and (bias.seq_len_q, bias.seq_len_kv) != (seqlen_q, seqlen_k):
        came = f"a CausalBias of shape {(bias.seq_len_q, bias.seq_len_kv)}"
        raise value_error(name, came, f"{(seqlen_q, seqlen_k)}, the numbers of queries and keys")
    return {"UPPER_LEFT": "top_left", "LOWER_RIGHT": "bottom_right"}[bias.variant.name]


def without_causal_bias(
    q: Tensor, k: Tensor, causal: bool | str, mask: Any, bias: Any, layout: str, has_positions: bool, is_packed: bool
) -> tuple[bool | str, Tensor | None, Tensor | None]:
    """(causal, mask, bias), where torch's CausalBias has become a value of `causal`. It becomes a tensor of its values
    where a value of `causal` would also move the window or ALiBi, or would be counted within each packed sequence."""
    name, given = ("mask", mask) if is_causal_bias(mask) else ("bias", bias)
    row = row_axis(layout)
    if is_packed or q.dim() != 4 or k.dim() != 4:
        sizes = given.seq_len_q, given.seq_len_kv
    else:
        sizes = q.shape[row], k.shape[row]
    corner = corner_of(name, given, causal, *sizes)
    if is_causal_bias(mask) and is_causal_bias(bias):
        raise value_error("bias", "a CausalBias beside one as mask", "one of the two")
    if not (has_positions if corner == "top_left" else is_packed):
        return corner, None if name == "mask" else mask, None if name == "bias" else bias
    kept = torch.ones(given.seq_len_q, given.seq_len_kv, dtype=torch.bool, device=q.device)
    kept = kept.tril(0 if corner == "top_left" else given.seq_len_kv - given.seq_len_q)
    if name == "mask":
        return causal, kept, bias
    return causal, mask, torch.zeros(kept.shape, dtype=q.dtype, device=q.device).masked_fill(~kept, -torch.inf)


def recorders(*values: Any) -> tuple[Any, ...]:
    """Objects that are no tensors and take part in torch's function protocol, as the proxies of torch.fx do: they
    record a call instead of running it."""
    found = []
    for value in values:
        if value is None or type(value) is Tensor or isinstance(value, Tensor):
            continue
        if hasattr(type(value), "__torch_function__"):
            found.append(value)
    return tuple(found)
