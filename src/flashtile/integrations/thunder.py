"""An executor for Lightning Thunder that takes `scaled_dot_product_attention` and its gradient.

    from flashtile.integrations.thunder import flashtile_ex
    model = thunder.jit(model, executors=[flashtile_ex, *thunder.get_default_executors()])

`why_not` says why the checker leaves a call to the other executors. Bool and float masks are served, a float mask with
its gradient. Dropout is not: Thunder may compute an operation a second time, and the mask would be drawn anew.
"""

from __future__ import annotations

from typing import Any

import thunder
import torch
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from flashtile import ops
from flashtile.arguments import attention_args
from flashtile.problem import DTYPES, MAX_HEAD_DIM, AttentionArgs
from flashtile.version import __version__

flashtile_ex = OperatorExecutor("flashtile", version=__version__)
register_executor(flashtile_ex)

_DEVICES = ("cpu", "cuda")
_THUNDER_DTYPES = {thunder.dtypes.to_dtype(dtype) for dtype in DTYPES}


def _args(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> AttentionArgs:
    is_bool = mask is not None and mask.dtype == torch.bool
    return attention_args(
        *(q, k, v),
        causal="top_left" if is_causal else False,
        window=None,
        scale=scale,
        mask=mask if is_bool else None,
        bias=None if is_bool else mask,
        alibi_slopes=None,
        softcap=0.0,
        sinks=None,
        dropout_p=0.0,
        rng_state=None,
        deterministic=None,
        layout="bhsd",
        backend=None,
    )


def _forward_meta(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None) -> tuple[Any, Any]:
    out = thunder.TensorProxy(like=q, shape=(*q.shape[:3], v.shape[3]))
    lse = thunder.dtypes.float64 if q.dtype == thunder.dtypes.float64 else thunder.dtypes.float32
    return out, thunder.TensorProxy(like=q, shape=tuple(q.shape[:3]), dtype=lse)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = ops.forward(*_args(q, k, v, mask, is_causal, scale)._replace(needs_grad=True))
    return result


def _backward_meta(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float | None, out: Any, lse: Any
) -> tuple[Any, ...]:
    grads = [thunder.TensorProxy(like=tensor) for tensor in (q, k, v)]
    return (*grads, thunder.TensorProxy(like=mask)) if _has_gradient(mask) else tuple(grads)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, ...]:
    has_bias = mask is not None and mask.dtype != torch.bool
    args = _args(q, k, v, mask, is_causal, scale)._replace(needs_grad=True, needs_bias_grad=has_bias)
    dq, dk, dv, dbias, _ = ops.backward(dout, None, *args, out, lse, (True, True, True, has_bias, False))
    return (dq, dk, dv, dbias.reshape_as(mask)) if has_bias and mask is not None else (dq, dk, dv)


flashtile_forward = flashtile_ex.register_operator("flashtile_forward", meta=_forward_meta, fn=_forward)
flashtile_backward = flashtile_ex.register_operator("flashtile_backward", meta=_backward_meta, fn=_backward)


def _has_gradient(mask: Any) -> bool:
    return mask is not None and thunder.dtypes.is_float_dtype(mask.dtype)


def why_not(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> str:
    """Returns why the executor leaves a call to the others, or ""."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 4:
            return f"{name} has {len(tensor.shape)} dimensions, not 4"
        if tensor.dtype not in _THUNDER_DTYPES:
            return f"{name} is {tensor.dtype}"
        if tensor.dtype != query.dtype or tensor.device != query.device:
            return f"{name} has another dtype or device than query"
        if not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
            return f"{name} has a head_dim outside of 1 to {MAX_HEAD_DIM}"
    device = query.device.devicetype.name.lower()
    if device not in _DEVICES:
        return f"query is on {query.device}"
    if device == "cuda" and query.dtype == thunder.dtypes.float64:
        return "query is float64, for which there is no kernel on a GPU"
    if key.shape[:2] != query.shape[:2] or value.shape[:3] != key.shape[:3] or query.shape[3] != key.shape[3]:
        return "shapes that have to be broadcast"
    if dropout_p != 0.0:
        return "dropout"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask with is_causal"
        whole = (*query.shape[:3], key.shape[2])
        given = (1,) * (4 - len(attn_mask.shape)) + tuple(attn_mask.shape)
        if len(given) > 4 or any(size not in (1, full) for size, full in zip(given, whole, strict=True)):
            return "attn_mask cannot be broadcast to the scores"
        if not (thunder.dtypes.is_boolean_dtype(attn_mask.dtype) or attn_mask.dtype == query.dtype):
            return f"attn_mask is {attn_mask.dtype}, query is {query.dtype}"
    return ""


def checker(*args: Any, **options: Any) -> bool:
    return not why_not(*args, **options)


def _execution_transform(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    return flashtile_forward(query, key, value, attn_mask, is_causal, scale)[0]


def _grad_transform(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse = flashtile_forward(query, key, value, attn_mask, is_causal, scale)
    grads = flashtile_backward(get_grad(out), query, key, value, attn_mask, is_causal, scale, out, lse)
    put_grads((query, key, value), grads[:3])
    if _has_gradient(attn_mask):
        put_grad(attn_mask, grads[3])
    return out


flashtile_ex.register_implementation(
    thunder.torch.scaled_dot_product_attention,
    checker=checker,
    execution_transform=_execution_transform,
    grad_transform=_grad_transform,
)
