"""The providers: our backends by name, and the baselines. A new one is one table entry."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile import api
from flashtile.backends import registry
from flashtile.bench.points import Inputs, Point
from flashtile.errors import Unsupported, value_error

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

SLOW_BACKENDS = ("tiled", "reference")  # plain PyTorch: grids include them only by name


@dataclass(frozen=True)
class Attend:
    """What a provider builds for a point: the call, its context, and the kernel or backend that runs."""

    call: Call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    detail: str = ""


@dataclass(frozen=True)
class Provider:
    """One way to compute attention. `build` raises Unsupported, with the reason, if it cannot."""

    name: str
    is_baseline: bool
    build: Callable[[Point, Inputs], Attend]
    layout: str = "bhsd"
    is_fast: bool = True  # in the default set of a grid
    requires: str = ""  # the module that must be importable


def providers() -> list[Provider]:
    """All providers, our backends first."""
    ours = [
        Provider(
            backend.name,
            False,
            partial(_ours, backend.name),
            is_fast=backend.is_automatic and backend.name not in SLOW_BACKENDS,
        )
        for backend in registry.BACKENDS
    ]
    return ours + BASELINES


def choose(text: str | None, is_grid: bool) -> list[Provider]:
    """The providers of a comma-separated list of names, `ours` and `baselines`. None: the default set."""
    known = providers()
    if text is None:
        return [provider for provider in known if provider.is_fast or not is_grid]
    groups = {"ours": [p for p in known if not p.is_baseline], "baselines": [p for p in known if p.is_baseline]}
    groups.update({provider.name: [provider] for provider in known})
    chosen: dict[str, Provider] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in groups:
            raise value_error("--backends", repr(word), ", ".join(groups))
        chosen.update({provider.name: provider for provider in groups[word]})
    if not chosen:
        raise value_error("--backends", repr(text), "at least one of " + ", ".join(groups))
    return [provider for provider in known if provider.name in chosen]


def missing(provider: Provider) -> str | None:
    """Why the provider's package cannot be used here, or None."""
    if not provider.requires:
        return None
    try:
        importlib.import_module(provider.requires)
    except Exception as error:  # a broken binary may raise anything
        return f"{provider.requires} cannot be imported: {error}"
    return None


# Our backends


def _ours(name: str, point: Point, inputs: Inputs) -> Attend:
    explanation = api.explain(inputs.q, inputs.k, inputs.v, causal=point.is_causal, backend=name)
    detail = ", ".join(f"{key} {value}" for key, value in explanation.details.items())

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = api.attention(q, k, v, causal=point.is_causal, backend=name)
        assert isinstance(out, Tensor)
        return out

    return Attend(call, detail=detail)


# torch


def _sdpa(pinned: SDPBackend | None, point: Point, inputs: Inputs) -> Attend:
    options: dict[str, Any] = {"is_causal": point.is_causal}
    if point.heads != point.heads_kv:
        options["enable_gqa"] = True

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    if pinned is not None:
        return Attend(call, partial(sdpa_kernel, pinned))
    leaves = inputs.leaves("bhsd", point.direction != "fwd")
    chosen = SDPBackend(torch._fused_sdp_choice(leaves.q, leaves.k, leaves.v, **options))
    return Attend(call, detail=f"takes {chosen.name.lower()}")


def eager(is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Product, softmax, product in the dtype of the inputs; stores the scores."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    grouped = (q * head_dim**-0.5).reshape(batch, heads_kv, heads // heads_kv * seqlen_q, head_dim)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, heads, seqlen_q, seqlen_k)
    if is_causal:
        is_hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(is_hidden, -torch.inf)
    weights = torch.softmax(scores, -1).view(batch, heads_kv, -1, seqlen_k)
    return (weights @ v).view(batch, heads, seqlen_q, v.shape[-1])


def _eager(point: Point, inputs: Inputs) -> Attend:
    return Attend(partial(eager, point.is_causal))


def _compile(function: Callable[..., Any], point: Point, is_dynamic: bool) -> tuple[Callable[..., Any], str]:
    """Compiles for this point only, or once for all lengths."""
    config = importlib.import_module("torch._dynamo.config")
    # Beyond these limits torch would silently run the uncompiled function
    config.recompile_limit, config.accumulated_recompile_limit = 1024, 4096  # type: ignore[attr-defined]
    if point.direction != "fwd":
        # Lets the backward pass run again on the same graph
        importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore[attr-defined]
    compiled = torch.compile(function, dynamic=is_dynamic, fullgraph=True)
    return compiled, "dynamic shapes" if is_dynamic else "static shapes"


def _compiled(point: Point, inputs: Inputs) -> Attend:
    call, detail = _compile(partial(eager, point.is_causal), point, is_dynamic=True)
    return Attend(call, detail=detail)


def _flex(point: Point, inputs: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if point.direction != "fwd" and inputs.q.device.type == "cpu":
        raise Unsupported("FlexAttention has no backward pass on the CPU")
    options: dict[str, Any] = {"enable_gqa": point.heads != point.heads_kv}
    if point.is_causal:
        options["block_mask"] = create_block_mask(
            _is_seen, None, None, point.seqlen_q, point.seqlen_k, device=inputs.q.device.type
        )
    # Static shapes are faster, but on the CPU each compilation takes half a minute
    is_dynamic = inputs.q.device.type == "cpu" or point.has_growing_keys
    compiled, detail = _compile(flex_attention, point, is_dynamic)
    return Attend(lambda q, k, v: compiled(q, k, v, **options), detail=detail)


def _is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


# Peers


def _flash_attn(module: str, point: Point, inputs: Inputs) -> Attend:
    function = importlib.import_module(module).flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=point.is_causal)
        return out[0] if isinstance(out, tuple) else out

    return Attend(call)


def _xformers(point: Point, inputs: Inputs) -> Attend:
    if point.heads != point.heads_kv:
        raise Unsupported("xformers takes grouped heads in another shape")
    ops = importlib.import_module("xformers.ops")
    bias = ops.LowerTriangularMask() if point.is_causal else None
    return Attend(lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias))


def _flashinfer(point: Point, inputs: Inputs) -> Attend:
    if point.direction != "fwd":
        raise Unsupported("flashinfer has no backward pass")
    flashinfer = importlib.import_module("flashinfer")
    device = inputs.q.device
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(point.batch + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        starts * point.seqlen_q,
        starts * point.seqlen_k,
        point.heads,
        point.heads_kv,
        point.head_dim,
        head_dim_vo=point.head_dim_v,
        causal=point.is_causal,
        q_data_type=inputs.q.dtype,
    )
    return Attend(
        lambda q, k, v: wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).view(*q.shape[:-1], v.shape[-1])
    )


BASELINES: list[Provider] = [
    Provider("sdpa", True, partial(_sdpa, None)),
    Provider("sdpa-flash", True, partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Provider("sdpa-cudnn", True, partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Provider("sdpa-efficient", True, partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    Provider("sdpa-math", True, partial(_sdpa, SDPBackend.MATH), is_fast=False),
    Provider("eager", True, _eager, is_fast=False),
    Provider("compiled", True, _compiled),
    Provider("flex", True, _flex),
    Provider(
        "flash-attn-2",
        True,
        partial(_flash_attn, "flash_attn.flash_attn_interface"),
        "bshd",
        requires="flash_attn.flash_attn_interface",
    ),
    Provider(
        "flash-attn-3", True, partial(_flash_attn, "flash_attn_interface"), "bshd", requires="flash_attn_interface"
    ),
    Provider("flash-attn-4", True, partial(_flash_attn, "flash_attn.cute"), "bshd", requires="flash_attn.cute"),
    Provider("xformers", True, _xformers, "bshd", requires="xformers.ops"),
    Provider("flashinfer", True, _flashinfer, "bshd", requires="flashinfer"),
]


def by_name(name: str, among: Sequence[Provider] | None = None) -> Provider:
    for provider in among or providers():
        if provider.name == name:
            return provider
    raise value_error("provider", repr(name), ", ".join(provider.name for provider in among or providers()))
