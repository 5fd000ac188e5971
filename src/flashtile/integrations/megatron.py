"""flashtile as the core attention of Megatron-Core: the constructor, the call and the checkpoint of its
DotProductAttention, and those of TransformerEngine's.

    from flashtile.integrations.megatron import with_flashtile
    model = GPTModel(config, with_flashtile(get_gpt_layer_with_transformer_engine_spec()), ...)

`with_flashtile` takes a spec of any model; `FlashtileSpecProvider` and `FlashtileLocalSpecProvider` serve code that
takes a provider. In Megatron's masks True hides a key. A row that sees no key is 0; Megatron's own class, which fills
with -10000, returns the mean of the values there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import Any, TypeVar

import torch
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor

from flashtile.api import attention, attention_varlen, call_as
from flashtile.errors import type_error, unsupported, value_error

Spec = TypeVar("Spec")

# Classes of which `with_flashtile` knows that they compute what is computed here
_REPLACED = ("DotProductAttention", "TEDotProductAttention")
# What the arguments of attention are called here
_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attention_mask", "bias": "attention_bias"}
_PACKED_NAMES = {
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_k": "max_seqlen_kv",
    "q": "query",
    "k": "key",
    "v": "value",
}
# What each mask type means here: whether the mask is looked at, and the corner at which causal masks stand
_MASK_TYPES: dict[str, tuple[bool, str]] = {
    "no_mask": (False, "none"),
    "padding": (True, "none"),
    "arbitrary": (True, "none"),
    "causal": (True, "top_left"),
    "padding_causal": (True, "top_left"),
    "causal_bottom_right": (True, "bottom_right"),
}
# What the communication of context parallelism is called here
_CP_COMM_TYPES: dict[str, dict[str, str]] = {
    "p2p": {"strategy": "ring", "transport": "p2p"},
    "all_gather": {"strategy": "ring", "transport": "gather"},
    "a2a": {"strategy": "ulysses"},
}
# Fields of TransformerConfig that ask for what is not here
_REFUSED_CONFIG = {
    "qk_clip": "the largest score of each head is not an output of the kernels",
    "log_max_attention_logit": "the largest score of each head is not an output of the kernels",
    "batch_invariant_mode": "the bits of a row may depend on the batch",
    "fp8_dot_product_attention": "there is no attention in 8 bits",
    "fp8_multi_head_attention": "there is no attention in 8 bits",
}


class DotProductAttention(MegatronModule):
    """Core attention with Megatron-Core's interface: query (s, b, h, d), key and value (s, b, groups, d) to (s, b, h *
    d), or packed (t, h, d) to (t, h * d)."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        """k_channels gives the default scale; v_channels is read from value. num_splits is accepted: flashtile chooses
        how keys are split."""
        super().__init__(config=config)
        for name, reason in _REFUSED_CONFIG.items():
            if getattr(config, name, False):
                raise unsupported(f"config.{name}", "True", "False", f"Here {reason}")
        self.layer_number = max(1, layer_number)
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        _mask_type(attn_mask_type)
        is_parallel = config.context_parallel_size > 1
        if pg_collection is None:
            names = ["tp", "cp"] if is_parallel else ["tp"]
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=names)
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp if is_parallel else None
        self.cp_options = _cp_options(cp_comm_type)
        self.num_attention_heads_per_partition = divide(config.num_attention_heads, self.tp_group.size())
        self.softmax_scale = 1 / math.sqrt(k_channels or config.kv_channels) if softmax_scale is None else softmax_scale
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window: tuple[int, int] | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = tuple(config.window_size)
        self.softmax_offset = self._make_offset()

    def _make_offset(self) -> Tensor | torch.nn.Parameter | None:
        """Returns the logit of each head that joins the denominator only."""
        config, heads = self.config, self.num_attention_heads_per_partition
        if config.softmax_type == "vanilla":
            return None
        device = "cpu" if config.use_cpu_initialization or not torch.cuda.is_available() else "cuda"
        values = torch.zeros(heads, dtype=config.params_dtype, device=device)
        if config.softmax_type == "off-by-one":
            return values
        if config.softmax_type != "learnable":
            raise value_error("config.softmax_type", config.softmax_type, "vanilla, off-by-one or learnable")
        offset = torch.nn.Parameter(values)
        if config.perform_initialization:
            config.init_method(offset)
        return offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Masks are boolean and broadcastable to (b, h, rows of query, rows of key), True = hidden, or for "padding" a
        pair of them, of queries and of keys. They apply together with a causal mask and a window, and rows of query are
        those of this rank. attention_bias is added to the scaled scores."""
        type_name = _mask_type(self.attn_mask_type if attn_mask_type is None else attn_mask_type)
        options: dict[str, Any] = {
            "window": self.window,
            "scale": self.softmax_scale,
            "sinks": self._sinks(query),
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "deterministic": True if self.config.deterministic_mode else None,
        }
        with self._random_numbers(query, options["dropout_p"]):
            if packed_seq_params is not None:
                return self._packed(
                    query, key, value, attention_mask, type_name, attention_bias, packed_seq_params, options
                )
            return self._dense(query, key, value, attention_mask, type_name, attention_bias, options)

    def _sinks(self, query: Tensor) -> Tensor | None:
        offset = self.softmax_offset
        if offset is None:
            return None
        dtype = offset.dtype if offset.dtype in (query.dtype, torch.float32) else torch.float32
        return offset.to(query.device, dtype)

    def _random_numbers(self, query: Tensor, dropout_p: float) -> Any:
        """Megatron's generator of this model-parallel rank, for calls with dropout."""
        if dropout_p == 0.0 or self.config.sequence_parallel or not query.is_cuda:
            return contextlib.nullcontext()
        tracker = get_cuda_rng_tracker()
        return tracker.fork() if tracker.is_initialized() else contextlib.nullcontext()

    def _dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        type_name: str,
        attention_bias: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        uses_mask, causal = _MASK_TYPES[type_name]
        rows, keys = q.shape[2], k.shape[2]
        if causal == "top_left":
            if rows == 1 and self.cp_group is None:
                causal = "none"  # a step of generation sees the whole cache
            elif rows != keys:
                got = f"{type_name} with {rows} queries and {keys} keys"
                raise value_error("attn_mask_type", got, "as many queries as keys", "Use causal_bottom_right")
        if type_name == "arbitrary" and attention_mask is None:
            raise value_error("attention_mask", None, "a mask, since attn_mask_type is arbitrary")
        if not uses_mask and attention_mask is not None:
            raise value_error(
                "attention_mask", attention_mask, "None, since attn_mask_type is no_mask", "Use arbitrary"
            )
        mask = None if attention_mask is None else ~_hidden(attention_mask)
        attend: Any = attention
        if self.cp_group is not None:
            # Where torch has no torch.distributed, Megatron has no ranks
            from flashtile.distributed import context_attention

            attend, options = context_attention, {**options, "group": self.cp_group, **self.cp_options}
        corner: Any = False if causal == "none" else causal
        out: Tensor = call_as(_NAMES, attend, q, k, v, causal=corner, mask=mask, bias=attention_bias, **options)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        type_name: str,
        attention_bias: Tensor | None,
        packed: Any,
        options: dict[str, Any],
    ) -> Tensor:
        """Sequences one behind the other. Causal masks stand at the top left, as TransformerEngine's do."""
        if packed.qkv_format != "thd":
            raise unsupported("packed_seq_params.qkv_format", packed.qkv_format, "thd")
        for name, tensor in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if tensor is not None:
                raise unsupported(name, "it with packed_seq_params", "None: the sequences are what hides keys")
        if type_name == "arbitrary":
            raise unsupported("attn_mask_type", "arbitrary with packed_seq_params", "a causal type, padding or no_mask")
        if self._ranks_of(packed) > 1:
            raise unsupported(
                "packed_seq_params",
                "packed sequences with context parallelism, which Megatron cuts one by one",
                "one of the two",
                "flashtile.distributed.context_attention(cu_seqlens=...) cuts the whole pack",
            )
        corner = _MASK_TYPES[type_name][1]
        causal: Any = False if corner == "none" else corner
        starts_q = packed.cu_seqlens_q
        starts_k = starts_q if packed.cu_seqlens_kv is None else packed.cu_seqlens_kv
        padded_q, padded_k = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
        has_padding = padded_q is not None or padded_k is not None
        padded_q = starts_q if padded_q is None else padded_q
        padded_k = starts_k if padded_k is None else padded_k
        if has_padding:
            # A query's place counts from the start of its sequence, whatever padding is behind the last one
            if causal == "bottom_right":
                raise unsupported("attn_mask_type", "causal_bottom_right with cu_seqlens_q_padded", "padding_causal")
            if causal is False and self.window is not None:
                if self.window[1] != 0:
                    raise unsupported("config.window_size", "(left, right) with cu_seqlens_q_padded", "(left, 0)")
                causal = "top_left"
        # max_seqlen_* bound the sequences, not those with padding
        bounds = (None, None) if has_padding else (packed.max_seqlen_q, packed.max_seqlen_kv)
        out: Any = call_as(
            *(_PACKED_NAMES, attention_varlen, query, key, value, padded_q, padded_k, *bounds),
            seqused_k=starts_k.diff() if has_padding else None,
            causal=causal,
            **options,
        )
        if has_padding:
            out = out.masked_fill(_padding_rows(starts_q, padded_q, query.shape[0])[:, None, None], 0.0)
        return out.flatten(1)

    def _ranks_of(self, packed: Any) -> int:
        """The number of context-parallel ranks: a batch may bring its own group, or switch it off."""
        group, size = getattr(packed, "cp_group", None), getattr(packed, "local_cp_size", None)
        if group is None and size is not None:
            return int(size)
        group = self.cp_group if group is None else group
        return 1 if group is None else int(group.size())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The learnable softmax_offset, cut over tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True) if self.config.softmax_type == "learnable" else {}
        # Without them Megatron takes those of its parallel_state
        groups = {} if metadata is None else {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def _mask_type(mask_type: AttnMaskType) -> str:
    name = getattr(mask_type, "name", None)
    if name not in _MASK_TYPES:
        raise unsupported("attn_mask_type", mask_type, ", ".join(_MASK_TYPES))
    return str(name)


def _cp_options(cp_comm_type: str | None) -> dict[str, str]:
    name = "p2p" if cp_comm_type is None else cp_comm_type
    if name not in _CP_COMM_TYPES:
        raise unsupported("cp_comm_type", name, ", ".join(_CP_COMM_TYPES))
    return _CP_COMM_TYPES[name]


def _hidden(attention_mask: Any) -> Tensor:
    """Megatron's mask, True = hidden; a pair is the padding of the queries and of the keys, (b, 1, 1, rows) each."""
    is_pair = isinstance(attention_mask, tuple | list)
    for mask in attention_mask if is_pair else (attention_mask,):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise type_error(
                "attention_mask", mask, "a boolean tensor, True = hidden", "Numbers to add are attention_bias"
            )
    if not is_pair:
        return attention_mask
    of_queries, of_keys = attention_mask
    return of_queries.transpose(-1, -2) | of_keys


def _padding_rows(starts: Tensor, padded_starts: Tensor, total: int) -> Tensor:
    """True for the rows behind the last one of their sequence. Reads nothing on the host."""
    rows = torch.arange(total, device=starts.device, dtype=starts.dtype)
    sequence = torch.searchsorted(padded_starts[1:].contiguous(), rows, right=True).clamp_(max=starts.shape[0] - 2)
    return rows - padded_starts[sequence] >= starts.diff()[sequence]


class FlashtileSpecProvider(TESpecProvider):
    """TransformerEngine's modules with flashtile's core attention."""

    def core_attention(self) -> type:
        return DotProductAttention


class FlashtileLocalSpecProvider(LocalSpecProvider):
    """Megatron's own modules with flashtile's core attention."""

    def core_attention(self) -> type:
        return DotProductAttention


def with_flashtile(spec: Spec) -> Spec:
    """Returns a copy of a spec of layers, blocks or models in which every dot-product core_attention is flashtile's."""
    replaced = [0]
    changed = _replace(spec, replaced)
    if not replaced[0]:
        raise value_error("spec", spec, "a ModuleSpec or submodules with a core_attention")
    return changed


def _replace(part: Any, replaced: list[int]) -> Any:
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, submodules=_replace(part.submodules, replaced))
    if type(part) in (list, tuple):
        return type(part)(_replace(item, replaced) for item in part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    part = copy.copy(part)
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name != "core_attention":
            setattr(part, field.name, _replace(value, replaced))
        elif value is not None and value is not IdentityOp:
            setattr(part, field.name, _core_attention(value))
            replaced[0] += 1
    return part


def _core_attention(given: Any) -> Any:
    """flashtile's in the place of dot-product attention; other kinds of attention are not ours to replace."""
    module = given.module if isinstance(given, ModuleSpec) else given
    name = module[1] if isinstance(module, tuple) else getattr(module, "__name__", None)
    if name not in _REPLACED:
        raise unsupported("core_attention", name, " or ".join(_REPLACED))
    if isinstance(given, ModuleSpec):
        return dataclasses.replace(given, module=DotProductAttention)
    return DotProductAttention
