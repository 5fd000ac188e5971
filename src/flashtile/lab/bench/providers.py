"""The providers: our backends by name, and the baselines.

To add a baseline, write a `build` function and add an entry to BASELINES. The grids options, float32, cpu and decode
have default sets of their own below: name it where it should run. `plots._STYLES` has its colour; without one it is
grey.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile import api, facades
from flashtile.backends import registry
from flashtile.errors import Unsupported, value_error
from flashtile.lab.bench import serving
from flashtile.lab.bench.options import PLAIN
from flashtile.lab.bench.points import Inputs, Plan, Point

Call = Callable[[Tensor, Tensor, Tensor], Tensor]

OPTION_PROVIDERS = "flashtile,sdpa-cudnn,sdpa-flash,sdpa-efficient,flex"  # the default set of --grid options
FLOAT32_PROVIDERS = "flashtile,flashtile-high,sdpa-efficient"  # the default set of --grid float32
CPU_PROVIDERS = "flashtile,sdpa"  # the default set of --grid cpu
DECODE_PROVIDERS = "flashtile,sdpa-cudnn,sdpa-flash,torch-varlen"  # the default set of --grid decode
SLOW_BACKENDS = ("tiled", "reference")  # plain PyTorch: grids include them only by name


@dataclass(frozen=True)
class Attend:
    """A provider's call at a point, ready to be timed: the function, the context it runs in, and what runs."""

    call: Call
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    detail: str = ""  # the kernel or the backend
    leaves: tuple[Tensor, ...] = ()  # tensors beside q, k and v whose gradients are taken
    arrange: Callable[[Inputs], Inputs] | None = None  # run once on each copy of the inputs, before timing


@dataclass(frozen=True)
class Provider:
    """One way to compute attention. `build` raises Unsupported, with the reason, if it cannot."""

    name: str
    is_baseline: bool
    build: Callable[[Point, Inputs], Attend]
    layout: str = "bhsd"
    is_fast: bool = True  # in the default set of a grid
    requires: tuple[str, ...] = ()  # modules of which one must be importable
    max_relative_error: float | None = None  # the largest that is accepted, in place of the error rule


def providers() -> list[Provider]:
    """Returns all providers that are pinned to a backend or a package, our backends first."""
    ours = [
        Provider(
            backend.name,
            is_baseline=False,
            build=partial(_ours, backend.name),
            is_fast=backend.is_automatic and backend.name not in SLOW_BACKENDS,
        )
        for backend in registry.BACKENDS
    ]
    return ours + BASELINES


def choose(text: str | None, is_grid: bool, option: str = "--backends") -> list[Provider]:
    """Returns the providers of a comma-separated list of names, `ours` and `baselines`; of None, the default set.
    Errors name the option of the command line."""
    known = providers()
    if text is None:
        return [provider for provider in known if provider.is_fast or not is_grid]
    groups = {"ours": [p for p in known if not p.is_baseline], "baselines": [p for p in known if p.is_baseline]}
    groups.update({provider.name: [provider] for provider in (*known, AUTOMATIC, HIGH)})
    chosen: dict[str, Provider] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in groups:
            raise value_error(option, repr(word), ", ".join(groups))
        chosen.update({provider.name: provider for provider in groups[word]})
    if not chosen:
        raise value_error(option, repr(text), "at least one of " + ", ".join(groups))
    return [provider for provider in (AUTOMATIC, HIGH, *known) if provider.name in chosen]


def check_ours(chosen: Sequence[Provider], plan: Plan, device: str) -> None:
    """Raises if our chosen providers refuse every point of the plan: only peers would be measured.

    No input is allocated: on a GPU they are meta tensors, on the CPU fake ones.
    """
    is_gpu = device == "cuda"
    ours = [provider for provider in chosen if not provider.is_baseline]
    reasons: dict[str, str] = {}
    for point in plan.points:
        for provider in ours:
            try:
                with nullcontext() if is_gpu else FakeTensorMode():
                    provider.build(point, point.make_empty("meta" if is_gpu else device))
            except (ValueError, Unsupported) as error:
                reasons.setdefault(provider.name, str(error))
            else:
                return
    if ours:
        same = len(set(reasons.values())) == 1
        text = next(iter(reasons.values())) if same else "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise Unsupported(f"Nothing of flashtile would be measured. {text}")


def missing(provider: Provider) -> str | None:
    """Returns why the provider's package cannot be used here, or None."""
    complaints = []
    for module in provider.requires:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken binary may raise anything
            complaints.append(f"{module} cannot be imported: {error}")
        else:
            return None
    return "; ".join(complaints) or None


# Our backends


def _ours(name: str | None, point: Point, inputs: Inputs) -> Attend:
    bias, leaves = _bias(point, inputs)
    inputs = replace(inputs, extras=replace(inputs.extras, bias=bias))
    extra, detail = point.extra, _detail(name, explained(name, point, inputs))
    if extra.entry == "serving":
        layout = serving.Layout(point, inputs.q.device)
        return Attend(serving.ours(layout, name), detail=detail, arrange=layout.arrange)
    if extra.entry == "packed":
        return Attend(serving.packed_ours(point, inputs.q.device, name), detail=detail)
    options = _options(name, point, inputs)
    if extra.entry == "sdpa":
        return Attend(facades.scaled_dot_product_attention, detail=detail)
    if extra.entry == "kvcache":
        new_k, new_v, length = inputs.k[:, :, -1:].clone(), inputs.v[:, :, -1:].clone(), point.seqlen_k - 1

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = api.attention_kvcache(q, k, v, k=new_k, v=new_v, cache_seqlens=length, layout="bhsd", backend=name)
            assert isinstance(out, Tensor)
            return out

        return Attend(step, detail=detail)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = api.attention(q, k, v, **options)
        assert isinstance(out, Tensor)
        return out

    return Attend(call, detail=detail, leaves=leaves)


def explained(name: str | None, point: Point, inputs: Inputs) -> registry.Explanation:
    """Explains what would run our call; of inputs that require gradients, both passes."""
    if point.extra.entry == "serving":
        return serving.explained(serving.Layout(point, inputs.q.device), name)
    if point.extra.entry == "packed":
        return serving.packed_explained(point, inputs, name)
    return api.explain(inputs.q, inputs.k, inputs.v, **_options(name, point, inputs))


def _options(name: str | None, point: Point, inputs: Inputs) -> dict[str, Any]:
    """Returns the arguments of flashtile.attention beside q, k and v."""
    extra, tensors, options = point.extra, inputs.extras, dict[str, Any](causal=point.is_causal, backend=name)
    if point.option:
        options.update(softcap=extra.softcap, dropout_p=extra.dropout_p, bias=tensors.bias, mask=tensors.mask)
        options.update(alibi_slopes=tensors.alibi_slopes)
        options.update(window=None if extra.window is None else (extra.window, 0))
    return options


def _detail(name: str | None, explanation: registry.Explanation) -> str:
    """Returns what runs, with the backend if it was not named, and without why others do not."""
    details = {"backend": explanation.backend} if name is None else {}
    details |= {key: value for key, value in explanation.details.items() if not key.startswith("not ")}
    return ", ".join(f"{key} {value}" for key, value in details.items())


def _bias(point: Point, inputs: Inputs) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Returns the bias of the call, as a new autograd leaf if its gradient is taken, and a tuple of that leaf."""
    bias = inputs.extras.bias
    if bias is None or not point.extra.has_bias_grad or point.direction == "fwd":
        return bias, ()
    bias = bias.detach().requires_grad_()
    return bias, (bias,)


def _ours_high(point: Point, inputs: Inputs) -> Attend:
    if point.dtype != "fp32":
        raise Unsupported(f"torch.set_float32_matmul_precision is for float32, and this is {point.dtype}")
    with _high_precision():
        attend = _ours(None, point, inputs)
    return replace(attend, context=_high_precision)


@contextmanager
def _high_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


AUTOMATIC = Provider(
    "flashtile", is_baseline=False, build=partial(_ours, None)
)  # our choice of a backend for each call
# The same with products of TF32's precision; its bound is that of docs/float32.md
HIGH = Provider("flashtile-high", is_baseline=False, build=_ours_high, max_relative_error=1e-3)


# torch


def _sdpa(pinned: SDPBackend | None, point: Point, inputs: Inputs) -> Attend:
    extra = point.extra
    if extra.page_size is not None or extra.short_keys is not None or extra.is_packed:
        raise Unsupported("scaled_dot_product_attention has neither pages nor lengths")
    options: dict[str, Any] = {"is_causal": point.is_causal}
    if point.is_causal and point.seqlen_q != point.seqlen_k:
        options = {"attn_mask": _lower_right(pinned, point, inputs)}
    if point.heads != point.heads_kv:
        options["enable_gqa"] = True
    bias, bias_leaves = _bias(point, inputs)
    for name, is_used in (("softcap", extra.softcap), ("window", extra.window), ("ALiBi slopes", extra.has_alibi)):
        if is_used:
            raise Unsupported(f"scaled_dot_product_attention has no {name}")
    if extra.dropout_p:
        options["dropout_p"] = extra.dropout_p
    if extra.mask or extra.has_bias:
        options["attn_mask"] = inputs.extras.mask if extra.mask else bias
    context = nullcontext if pinned is None else partial(sdpa_kernel, pinned)
    if extra.entry == "kvcache":
        return Attend(_step(inputs, point.seqlen_k - 1), context)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    if pinned is not None:
        return Attend(call, context, leaves=bias_leaves)
    leaves = inputs.leaves("bhsd", point.direction != "fwd")
    chosen = SDPBackend(torch._fused_sdp_choice(leaves.q, leaves.k, leaves.v, **options))
    return Attend(call, detail=f"takes {chosen.name.lower()}", leaves=bias_leaves)


def _lower_right(pinned: SDPBackend | None, point: Point, inputs: Inputs) -> Tensor:
    """Returns the causal mask of a point with more keys than queries: torch's own type, for which it has kernels. cuDNN
    has none, and torch would make the mask anew in every call: it gets one made ahead."""
    if pinned == SDPBackend.CUDNN_ATTENTION:
        sizes = (point.seqlen_q, point.seqlen_k)
        return torch.ones(sizes, dtype=torch.bool, device=inputs.q.device).tril(point.seqlen_k - point.seqlen_q)
    from torch.nn.attention.bias import causal_lower_right  # imports Dynamo, which takes seconds

    return causal_lower_right(point.seqlen_q, point.seqlen_k)


def _step(inputs: Inputs, length: int) -> Call:
    """Returns a step of generation: it writes a row of keys and of values, and attends to all rows up to it."""
    new_k, new_v = inputs.k[:, :, -1:].clone(), inputs.v[:, :, -1:].clone()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k[:, :, length : length + 1] = new_k
        v[:, :, length : length + 1] = new_v
        return F.scaled_dot_product_attention(q, k[:, :, : length + 1], v[:, :, : length + 1])

    return call


def _refuse_options(point: Point) -> None:
    if point.extra != PLAIN:
        raise Unsupported(f"measured without options; the call has: {point.option}")


def eager(is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes product, softmax and product in the dtype of the inputs, and stores the scores. A causal mask lets the
    last query see the last key, as everywhere."""
    batch, heads, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    grouped = (q * head_dim**-0.5).reshape(batch, heads_kv, heads // heads_kv * seqlen_q, head_dim)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, heads, seqlen_q, seqlen_k)
    if is_causal:
        is_hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).triu(1 + seqlen_k - seqlen_q)
        scores = scores.masked_fill(is_hidden, -torch.inf)
    weights = torch.softmax(scores, -1).view(batch, heads_kv, -1, seqlen_k)
    return (weights @ v).view(batch, heads, seqlen_q, v.shape[-1])


def _eager(point: Point, inputs: Inputs) -> Attend:
    _refuse_options(point)
    return Attend(partial(eager, point.is_causal))


def _compile(function: Callable[..., Any], point: Point, is_dynamic: bool) -> tuple[Callable[..., Any], str]:
    """Returns the function compiled for this point only, or once for all lengths, and a word on it.

    Raises torch's limits of recompilation, and may turn donated buffers off, for the rest of the process.
    """
    config = importlib.import_module("torch._dynamo.config")
    # Beyond these limits torch would silently run the uncompiled function
    config.recompile_limit, config.accumulated_recompile_limit = 1024, 4096  # type: ignore[attr-defined]
    if point.direction != "fwd":
        # Lets the backward pass run again on the same graph
        importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore[attr-defined]
    compiled = torch.compile(function, dynamic=is_dynamic, fullgraph=True)
    return compiled, "dynamic shapes" if is_dynamic else "static shapes"


def _compiled(point: Point, inputs: Inputs) -> Attend:
    _refuse_options(point)
    call, detail = _compile(partial(eager, point.is_causal), point, is_dynamic=True)
    return Attend(call, detail=detail)


def _varlen(point: Point, inputs: Inputs) -> Attend:
    if not point.extra.is_packed:
        raise Unsupported("measured with packed sequences alone")
    if point.extra.entry == "packed":
        return Attend(serving.packed_torch(point, inputs.q.device))
    layout = serving.Layout(point, inputs.q.device)
    return Attend(serving.torch_varlen(layout), arrange=layout.arrange)


def _flex(point: Point, inputs: Inputs) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if point.direction != "fwd" and inputs.q.device.type == "cpu":
        raise Unsupported("FlexAttention has no backward pass on the CPU")
    extra, offset = point.extra, point.seqlen_k - point.seqlen_q
    bias, leaves = _bias(point, inputs)
    if extra.dropout_p:
        raise Unsupported("FlexAttention has no dropout")
    if point.option and not extra.changes_scores:
        raise Unsupported("left out: FlexAttention is measured where it has a mask or a score to change")
    options: dict[str, Any] = {"enable_gqa": point.heads != point.heads_kv}
    if point.is_causal or extra.mask:
        batch, heads = point.batch if extra.mask else None, point.heads if extra.mask == "heads" else None
        is_seen = _causal(offset, extra.window)
        is_seen = _mask_of(inputs.extras.mask) if inputs.extras.mask is not None else is_seen
        options["block_mask"] = create_block_mask(
            is_seen, batch, heads, point.seqlen_q, point.seqlen_k, device=inputs.q.device.type
        )
    if (change := _score_mod(extra.softcap, bias, inputs.extras.alibi_slopes, offset)) is not None:
        options["score_mod"] = change
    # Static shapes are faster, but on the CPU each compilation takes half a minute. Options and the offset of a causal
    # mask need them: with dynamic shapes torch cannot compile a captured number or tensor for the CPU
    captures = bool(point.option) or (point.is_causal and offset != 0)
    is_dynamic = (inputs.q.device.type == "cpu" and not captures) or point.has_growing_keys
    compiled, detail = _compile(flex_attention, point, is_dynamic)
    return Attend(lambda q, k, v: compiled(q, k, v, **options), detail=detail, leaves=leaves)


def _causal(offset: int, left: int | None) -> Callable[..., Tensor]:
    """Returns FlexAttention's form of a causal mask, or of a causal window of `left` keys. Query i stands at key
    i + offset."""
    if left is not None:
        return lambda b, h, i, j: (i + offset >= j) & (i + offset - j <= left)
    if offset:
        return lambda b, h, i, j: i + offset >= j
    return lambda b, h, i, j: i >= j


def _mask_of(mask: Tensor) -> Callable[..., Tensor]:
    """Returns FlexAttention's form of a mask (batch, 1 or heads, 1 or seqlen_q, seqlen_k)."""
    if mask.shape[1] != 1:
        return lambda b, h, i, j: mask[b, h, i, j]
    if mask.shape[2] == 1:
        return lambda b, h, i, j: mask[b, 0, 0, j]
    return lambda b, h, i, j: mask[b, 0, i, j]


def _score_mod(softcap: float, bias: Tensor | None, slopes: Tensor | None, offset: int) -> Callable[..., Tensor] | None:
    """Returns FlexAttention's form of a change of the scores, or None. Raises if there is more than one: no measured
    call has two."""
    changes: list[Callable[..., Tensor]] = []
    if softcap:
        changes.append(lambda score, b, h, i, j: softcap * torch.tanh(score / softcap))
    if bias is not None and bias.shape[0] == 1:
        changes.append(lambda score, b, h, i, j: score + bias[0, h, i, j])
    elif bias is not None:
        changes.append(lambda score, b, h, i, j: score + bias[b, h, i, j])
    if slopes is not None:
        changes.append(lambda score, b, h, i, j: score - slopes[h] * (i + offset - j).abs())
    if len(changes) > 1:
        raise Unsupported("FlexAttention is measured with one change of the scores at a time")
    return changes[0] if changes else None


# Peers


def _flash_attn(module: str, point: Point, inputs: Inputs) -> Attend:
    _refuse_options(point)
    function = importlib.import_module(module).flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=point.is_causal)
        return out[0] if isinstance(out, tuple) else out

    return Attend(call)


_VLLM_FA3 = "vllm.vllm_flash_attn._vllm_fa3_C"


def _flash_attn_3(point: Point, inputs: Inputs) -> Attend:
    """Prepares FlashAttention-3's own package; without it, for the forward pass, the library inside vLLM's wheel."""
    try:
        return replace(_flash_attn("flash_attn_interface", point, inputs), detail="flash_attn_interface")
    except ImportError:
        importlib.import_module(_VLLM_FA3)
    if point.direction != "fwd":
        raise Unsupported("vLLM's build of FlashAttention-3 has no backward pass")
    operator = torch.ops._vllm_fa3_C.fwd.default
    starts = torch.arange(point.batch + 1, dtype=torch.int32, device=inputs.q.device)
    # In the order of the operator: what it writes beside q, k and v, which sequences, pages, positions, FP8 scales
    packed: list[Any] = [None] * 4 + [starts * point.seqlen_q, starts * point.seqlen_k] + [None] * 3
    packed += [point.seqlen_q, point.seqlen_k] + [None] * 9
    # Window, softcap, interleaved rotation, schedule, splits, packed heads, spared multiprocessors
    rest = (point.head_dim**-0.5, point.is_causal, -1, -1, 0.0, True, None, 0, None, 0)
    # Newer versions add sinks and context parallelism
    added = (None, 1, 0, None)[: len(operator._schema.arguments) - 3 - len(packed) - len(rest)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (tensor.flatten(0, 1) for tensor in (q, k, v))
        out: Tensor = operator(*rows, *packed, *rest, *added)[0]
        return out.view(*q.shape[:-1], v.shape[-1])

    return Attend(call, detail="vLLM's build")


def _xformers(point: Point, inputs: Inputs) -> Attend:
    _refuse_options(point)
    if point.heads != point.heads_kv:
        raise Unsupported("xformers takes grouped heads in another shape")
    if point.is_causal and point.seqlen_q != point.seqlen_k:
        raise Unsupported("xformers' LowerTriangularMask lets the first query see the first key, and no more")
    ops = importlib.import_module("xformers.ops")
    bias = ops.LowerTriangularMask() if point.is_causal else None
    return Attend(lambda q, k, v: ops.memory_efficient_attention(q, k, v, attn_bias=bias))


def _flashinfer(point: Point, inputs: Inputs) -> Attend:
    _refuse_options(point)
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
    Provider("sdpa", is_baseline=True, build=partial(_sdpa, None)),
    Provider("sdpa-flash", is_baseline=True, build=partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Provider("sdpa-cudnn", is_baseline=True, build=partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Provider("sdpa-efficient", is_baseline=True, build=partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    Provider("sdpa-math", is_baseline=True, build=partial(_sdpa, SDPBackend.MATH), is_fast=False),
    Provider("eager", is_baseline=True, build=_eager, is_fast=False),
    Provider("compiled", is_baseline=True, build=_compiled),
    Provider("flex", is_baseline=True, build=_flex),
    Provider("torch-varlen", is_baseline=True, build=_varlen, is_fast=False),
    Provider(
        "flash-attn-2",
        is_baseline=True,
        build=partial(_flash_attn, "flash_attn.flash_attn_interface"),
        layout="bshd",
        requires=("flash_attn.flash_attn_interface",),
    ),
    Provider(
        "flash-attn-3",
        is_baseline=True,
        build=_flash_attn_3,
        layout="bshd",
        requires=("flash_attn_interface", _VLLM_FA3),
    ),
    Provider(
        "flash-attn-4",
        is_baseline=True,
        build=partial(_flash_attn, "flash_attn.cute"),
        layout="bshd",
        requires=("flash_attn.cute",),
    ),
    Provider("xformers", is_baseline=True, build=_xformers, layout="bshd", requires=("xformers.ops",)),
    Provider("flashinfer", is_baseline=True, build=_flashinfer, layout="bshd", requires=("flashinfer",)),
]


def by_name(name: str, among: Sequence[Provider] | None = None) -> Provider:
    """Returns the provider of that name, of all or of those given."""
    known = among or [AUTOMATIC, HIGH, *providers()]
    for provider in known:
        if provider.name == name:
            return provider
    raise value_error("provider", repr(name), ", ".join(provider.name for provider in known))
