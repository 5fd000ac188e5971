"""`attn_implementation="flashtile"` for the models of Hugging Face transformers.

    from flashtile.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flashtile")

transformers takes every name with "flash" in it for the flash_attn package or a kernel of its hub. The functions are
therefore registered as "ftile", through AttentionInterface and AttentionMaskInterface, and the methods that resolve
names are wrapped so that "flashtile" means "ftile". "ftile" can be asked for directly, too. Models whose attention does
not go through these interfaces, or needs its mask stored, are refused.

Inside `flashtile.distributed.context_parallel` every rank gives the model its rows of the sequence, and attention is
over all of them, within the documents that cu_seq_lens_q or `context_parallel(cu_seqlens=...)` names.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from flashtile import ops
from flashtile.api import attention, attention_varlen
from flashtile.errors import unsupported, value_error
from flashtile.problem import is_checking

current: Callable[[], Any] = lambda: None  # noqa: E731, without torch.distributed there are no ranks
if torch.distributed.is_available():
    from flashtile import distributed

    current = distributed.current

NAME = "flashtile"
# The same, for programs that take no other names than their own and those of the hub's kernels
HUB_NAME = "flashtile/flashtile"
# What a model's config says. Without "flash" in it
CONFIG_NAME = "ftile"

# These models build a window into their masks and do not hand it to the attention function
_MODELS_WITH_WINDOWS_IN_MASKS = ("doge", "moshi", "paligemma", "phimoe", "qwen2_moe", "unlimited_ocr_text")
# These modules say is_causal=True under masks that look both ways
_MODULES_WITHOUT_CAUSAL_MASKS = ("Phi4MultimodalVisionAttention",)
# With use_bidirectional_attention=True these say is_causal=False and make causal masks
_MODELS_WITH_CAUSAL_MASKS = ("gemma", "gemma2")
_NOT_GIVEN: Any = object()


def register() -> None:
    """Makes `attn_implementation="flashtile"` known to transformers. A second call changes nothing."""
    AttentionInterface.register(CONFIG_NAME, attention_forward)
    AttentionMaskInterface.register(CONFIG_NAME, attention_mask_for)
    for name, wrap in _WRAPPERS.items():
        method = getattr(PreTrainedModel, name)
        if not hasattr(method, "_flashtile_original"):
            wrapper: Any = functools.wraps(method)(wrap(method))
            wrapper._flashtile_original = method
            setattr(PreTrainedModel, name, wrapper)


def unregister() -> None:
    """Undoes `register`. Models that use it cannot be run until it is called again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(CONFIG_NAME, None)
    for name in _WRAPPERS:
        method = getattr(PreTrainedModel, name)
        setattr(PreTrainedModel, name, getattr(method, "_flashtile_original", method))


def _named(asked: Any) -> Any:
    """Returns what is asked for, of a model or by part, with the name of the config."""
    if isinstance(asked, dict):
        return {part: _named(name) for part, name in asked.items()}
    return CONFIG_NAME if asked in (NAME, HUB_NAME) else asked


def _adjusting(method: Callable[..., str]) -> Any:
    """Returns the patch of the method that takes names as users write them."""

    def adjust(self: Any, attn_implementation: str | None, *args: Any, **options: Any) -> str:
        return method(self, _named(attn_implementation), *args, **options)

    return adjust


def _correcting(method: Callable[..., str]) -> Any:
    """Returns the patch of the method that checks a name for a model and for each of its parts."""

    def correct(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == CONFIG_NAME:
            _check_fits(type(self))
        return method(self, requested_attention, *args, **options)

    return correct


def _setting(method: Callable[..., None]) -> Any:
    """Returns the patch of `set_attn_implementation`, which leaves models without the interface alone and warns."""

    def set_implementation(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        name = _named(attn_implementation)
        if name == CONFIG_NAME:
            for part in self.modules():
                if isinstance(part, PreTrainedModel):
                    _check_fits(type(part))
        elif isinstance(name, dict) and name.get("") == CONFIG_NAME:
            _check_fits(type(self))
        method(self, name, *args, **options)

    return set_implementation


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "_check_and_adjust_attn_implementation": _adjusting,
    "get_correct_attn_implementation": _correcting,
    "set_attn_implementation": _setting,
}


def _check_fits(model: type[PreTrainedModel]) -> None:
    """Raises for a model whose attention would not be served, or without its mask."""
    reason = _why_not(model)
    if reason is not None:
        raise value_error(
            "attn_implementation",
            f"{NAME!r} for {model.__name__}, whose attention {reason}",
            "models that transformers serves by position, as with 'sdpa'",
            "Use attn_implementation='eager', or a dict with a name for each part of a model",
        )


def _why_not(model: type[PreTrainedModel]) -> str | None:
    """Returns why a model does not fit, or None. The promise of "sdpa" is what is needed here: without a mask the
    attention is causal where the module says so. The other promise of that kind is that of flash attention or
    FlexAttention together with attention backends of others; "sdpa" lacks sinks and softcap."""
    names = vars(sys.modules.get(model.__module__, sys))
    masks_by_position = model._supports_sdpa or (
        model._supports_attention_backend and (model._supports_flash_attn or model._supports_flex_attn)
    )
    for name, value in names.items():
        # As in SAM_VISION_ATTENTION_CLASSES, of SamVisionModel
        owner = re.fullmatch(r"(.+?)(_SELF)?_ATTENTION_CLASSES", name)
        if owner and CONFIG_NAME not in value and model.__name__.upper().startswith(owner[1].replace("_", "")):
            return "is one of its own classes, chosen by name"
    if "ALL_ATTENTION_FUNCTIONS" in names:
        return None if masks_by_position else "needs a stored mask"
    has_parts = bool(getattr(model.config_class, "sub_configs", None))
    if (
        has_parts and (model._supports_sdpa or model._supports_attention_backend)
    ) or model._can_set_attn_implementation():
        return None  # no attention of its own; its parts are asked, too
    return "does not call transformers' AttentionInterface"


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """Makes a mask as transformers' `sdpa_mask` does: (batch, 1, queries, keys), True = attend, or None where the
    attention function masks by itself. None also for causal windows and under torch.compile, where `sdpa_mask` stores
    the whole mask. One row of the batch may hold packed sequences: its mask is stored when it is read."""
    if current() is not None:
        _check_over_ranks(attention_mask, q_length, kv_length)
        return None
    if getattr(config, "use_bidirectional_attention", False):
        allow_is_causal_skip = False  # its modules say is_causal=False: PaliGemma's, without token types
    if (
        allow_is_causal_skip
        and not (isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor))
        and q_offset == 0
        and kv_offset == 0
        and q_length == kv_length
        and (local_size is None or kv_length < local_size or _hands_over_window(config, local_size))
        and _hides_nothing(attention_mask, kv_length)
    ):
        return None
    make = functools.partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        config=config,
        **options,
    )
    may_be_packed = batch_size == 1 and attention_mask is None and not allow_is_causal_skip
    may_wait = may_be_packed and not options.get("allow_is_bidirectional_skip")
    if not may_wait or is_compiling() or torch._C._get_tracing_state() is not None or ops.num_dispatch_modes():
        mask: Tensor | None = make()
        return mask
    return _UnreadMask((1, 1, q_length, kv_length), options.get("device"), make)


class _UnreadMask(Tensor):
    """A mask that is made when something reads it. The attention function does not where it gets the bounds of packed
    sequences, and the mask of many rows would take more memory than all else."""

    make: Callable[[], Tensor]
    made: Tensor | None

    @staticmethod
    def __new__(cls, sizes: tuple[int, ...], device: Any, make: Callable[[], Tensor]) -> _UnreadMask:
        device = torch.get_default_device() if device is None else device
        mask: _UnreadMask = Tensor._make_wrapper_subclass(cls, sizes, dtype=torch.bool, device=device)
        mask.make, mask.made = make, None
        return mask

    def read(self) -> Tensor:
        """Returns the mask as a plain tensor, made once."""
        if self.made is None:
            self.made = self.make()
        return self.made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if operator is torch.ops.aten.detach.default:  # as checkpoints of activations do
            return cls(args[0].shape, args[0].device, args[0].read)
        return operator(*tree_map_only(cls, cls.read, args), **tree_map_only(cls, cls.read, kwargs or {}))


def _check_over_ranks(padding: Tensor | None, q_length: int, kv_length: int) -> None:
    """Checks a call over several ranks. The attention function masks the rows of all ranks by itself; a rank knows the
    padding of its own rows only."""
    if q_length != kv_length or not _hides_nothing(padding, kv_length):
        raise unsupported(
            "attention_mask", "padding or a cache inside context_parallel", "whole sequences without padding"
        )


def _hands_over_window(config: Any, local_size: int) -> bool:
    """The attention function gets this window as `sliding_window`. It never gets the chunks of chunked attention."""
    if getattr(config, "model_type", None) in _MODELS_WITH_WINDOWS_IN_MASKS:
        return False
    return local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)


def _hides_nothing(padding: Tensor | None, kv_length: int) -> bool:
    """A compiled graph cannot depend on values of the mask."""
    if padding is None:
        return True
    return not is_compiling() and padding.shape[-1] == kv_length and bool(padding.all())


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' AttentionInterface: (batch, heads, rows, dim) to (batch, rows, heads,
    dim). Attention weights are never stored, so the second result is None."""
    is_decoder = _is_causal(module) if is_causal is None else is_causal
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    shared: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
    if current() is not None:
        masks = attention_mask, position_bias
        return _over_ranks(module, query, key, value, sliding_window, is_decoder, masks, options, shared)
    lengths = [options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if all(isinstance(length, Tensor) for length in lengths) and query.shape[0] == 1:
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise unsupported("attention_mask", "numbers to add with cu_seq_lens_q", "one of the two")
        return _packed(
            module, query, key, value, lengths, options, sliding_window, is_decoder, position_bias, shared
        ), None

    if isinstance(attention_mask, _UnreadMask):
        attention_mask = attention_mask.read()
    # Without a mask a decoder is causal from the top left: rows of a static cache behind the queries are empty. A
    # single query sees every key
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_causal = bool(attention_mask is None and is_decoder and num_queries > 1)
    window = None
    if is_causal and num_queries == num_keys:
        window = _window(module, sliding_window, is_decoder, num_keys, is_masked=True)
    mask, bias = attention_mask, position_bias
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        mask, bias = None, attention_mask if position_bias is None else attention_mask + position_bias
    out = attention(
        *(query, key, value),
        causal="top_left" if is_causal else False,
        window=window,
        mask=mask,
        bias=bias,
        **shared,
    )
    return out.transpose(1, 2), None  # type: ignore[union-attr]


def _is_causal(module: torch.nn.Module) -> bool:
    return getattr(module, "is_causal", True) and type(module).__name__ not in _MODULES_WITHOUT_CAUSAL_MASKS


def _window(
    module: Any, sliding_window: Any, is_decoder: bool, num_keys: int, is_masked: bool
) -> tuple[int, int] | None:
    """is_masked: what the model keeps in its mask needs no window here, since the mask is used."""
    if sliding_window is not _NOT_GIVEN and sliding_window is not None:
        return sliding_window - 1, 0 if is_decoder else sliding_window - 1
    config = getattr(module, "config", None)
    size = getattr(config, "sliding_window", None) if sliding_window is _NOT_GIVEN else None
    chunk = None if is_masked else getattr(config, "attention_chunk_size", None)
    for name, limit in (("sliding_window", size), ("attention_chunk_size", chunk)):
        if limit and num_keys >= limit and not (is_masked and not _hands_over_window(config, limit)):
            raise unsupported(
                name,
                f"nothing from {type(module).__name__}, whose config has {name}={limit}",
                "models that hand it to the attention function",
                'Use attn_implementation="sdpa" for this model',
            )
    return None


def _over_ranks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sliding_window: Any,
    is_decoder: bool,
    masks: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
    shared: dict[str, Any],
) -> tuple[Tensor, None]:
    """Inside `context_parallel`: query, key and value are this rank's rows; cu_seq_lens_q has the documents of the
    whole sequence, or is a tuple of those of each row of the batch."""
    for name, tensor in zip(("attention_mask", "position_bias"), masks, strict=True):
        if tensor is not None:
            raise unsupported(name, "a tensor inside context_parallel", "None")
    context = current()
    assert context is not None
    documents, of_keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if documents is None and context.cu_seqlens is None:
        _check_one_document(options.get("position_ids"))
    if isinstance(documents, Tensor):
        if isinstance(of_keys, Tensor) and of_keys is not documents and not torch.equal(of_keys, documents):
            raise unsupported("cu_seq_lens_k", "other bounds than cu_seq_lens_q inside context_parallel", "the same")
        documents = documents.to(torch.int32)
    window = _window(module, sliding_window, is_decoder, context.seqlen or sys.maxsize, is_masked=False)
    causal = "top_left" if is_decoder else False
    out = context.attend(query, key, value, causal=causal, window=window, cu_seqlens=documents, **shared)
    return out.transpose(1, 2), None


def _check_one_document(positions: Any) -> None:
    """Raises where the positions of this rank's rows do not rise: they are those of several documents, which would
    attend to each other. Positions on a GPU are read under FLASHTILE_CHECK=1 alone."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or is_compiling():
        return
    if (positions.device.type == "cpu" or is_checking()) and bool((positions.diff() <= 0).any()):
        raise unsupported(
            "position_ids",
            "positions that start again, without the bounds of the documents, inside context_parallel",
            "the bounds too: cu_seq_lens_q and cu_seq_lens_k, or context_parallel(cu_seqlens=...)",
            "Where the rows are one document, pass context_parallel(cu_seqlens=())",
        )


def _packed(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[Any],
    options: dict[str, Any],
    sliding_window: Any,
    is_decoder: bool,
    position_bias: Tensor | None,
    shared: dict[str, Any],
) -> Tensor:
    """Sequences packed into one row of the batch, with their cumulative lengths: what transformers hands to flash_attn.
    The mask is made from the same positions and is not needed."""
    if position_bias is not None:
        raise unsupported("position_bias", "it with cu_seq_lens_q", "one of the two")
    config = getattr(module, "config", None)
    if not is_decoder and getattr(config, "model_type", None) in _MODELS_WITH_CAUSAL_MASKS:
        raise unsupported(
            "cu_seq_lens_q", "it with use_bidirectional_attention=True", "models whose masks agree with it"
        )
    longest = options.get("max_length_k")
    num_keys = longest if isinstance(longest, int) else key.shape[2]
    window = _window(module, sliding_window, is_decoder, num_keys, is_masked=False)
    out = attention_varlen(
        *(query[0], key[0], value[0]),
        cu_seqlens_q=lengths[0].to(torch.int32),
        cu_seqlens_k=lengths[1].to(torch.int32),
        max_seqlen_q=options.get("max_length_q"),
        max_seqlen_k=longest,
        causal=bool(is_decoder),
        window=window,
        layout="bhsd",
        **shared,
    )
    return out.transpose(0, 1)[None]  # type: ignore[union-attr]
