"""An attention backend for vLLM's V1 engine: paged keys, queries of any lengths, windows, softcap, ALiBi, sinks.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds `register` by the entry point "flashtile" of vllm.general_plugins. Where another package has taken CUSTOM
already, it is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from flashtile.api import attention_varlen
from flashtile.errors import unsupported
from flashtile.problem import MAX_HEAD_DIM

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def register() -> None:
    """Makes `--attention-backend CUSTOM` mean flashtile, unless it means something else already."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.FlashtileBackend")


class FlashtileBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashtileImpl]:
        return FlashtileImpl

    @staticmethod
    def get_builder_cls() -> type[FlashtileMetadataBuilder]:
        return FlashtileMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@dataclass
class FlashtileMetadata(AttentionMetadata):
    """Metadata of one batch; the tensors stay where vLLM keeps them."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # (requests + 1,) int32
    seq_lens: Tensor  # (requests,) int32: keys, those of this batch among them
    block_table: Tensor  # (requests, blocks) int32
    slot_mapping: Tensor  # (tokens,): block * block_size + row, or -1
    causal: bool


class FlashtileMetadataBuilder(AttentionMetadataBuilder[FlashtileMetadata]):
    # Captured graphs have not been tried
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashtileMetadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise unsupported("causal", "a tensor, one value for each request", "True or False")
        return FlashtileMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )


class FlashtileImpl(AttentionImpl[FlashtileMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in FlashtileBackend.supported_kv_cache_dtypes:
            accepted = ", ".join(FlashtileBackend.supported_kv_cache_dtypes)
            raise unsupported("kv_cache_dtype", kv_cache_dtype, accepted)
        if not FlashtileBackend.supports_attn_type(attn_type):
            raise unsupported("attn_type", attn_type, "decoder, encoder or encoder_only")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.attn_type, self.kv_cache_dtype, self.sinks = attn_type, kv_cache_dtype, sinks
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window: tuple[int, int] | None = None
        if sliding_window is not None:
            reach = sliding_window - 1
            self.window = (reach, reach if attn_type in _ENCODERS else 0)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlashtileMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query (tokens, heads, head_size), key and value (tokens, heads_kv, head_size), kv_cache (blocks, heads_kv,
        block_size, 2 * head_size) with any strides. Writes keys and values into the cache, and the result into
        output."""
        if output_scale is not None or output_block_scale is not None:
            raise unsupported("output_scale", "a quantized output", "None")
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        meta, tokens = attn_metadata, attn_metadata.num_actual_tokens
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        options: dict[str, Any] = {
            "max_seqlen_q": meta.max_query_len,
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "layout": "bhsd",
        }
        rows = query[:tokens].transpose(0, 1)
        out: Any
        if self.attn_type in _ENCODERS:
            if key is None or value is None:
                raise unsupported("key", "None", "keys and values of an encoder")
            k, v = key[:tokens].transpose(0, 1), value[:tokens].transpose(0, 1)
            starts = meta.query_start_loc
            out = attention_varlen(rows, k, v, starts, starts, max_seqlen_k=meta.max_query_len, **options)
        else:
            k, v = kv_cache.split(self.head_size, dim=-1)
            if key is not None and value is not None and not self.shares_cache:
                _store(key[:tokens], value[:tokens], (k, v), meta.slot_mapping[:tokens])
            out = attention_varlen(
                *(rows, k, v),
                cu_seqlens_q=meta.query_start_loc,
                cu_seqlens_k=None,
                max_seqlen_k=meta.max_seq_len,
                seqused_k=meta.seq_lens,
                block_table=meta.block_table,
                causal=meta.causal,
                **options,
            )
        output[:tokens].view(tokens, self.num_heads, -1).copy_(out.transpose(0, 1))
        return output


def _store(key: Tensor, value: Tensor, pages: tuple[Tensor, ...], slots: Tensor) -> None:
    """Writes rows into their slots, without reading a slot on the host. A slot of -1 is padding: it repeats the first
    row's write."""
    if slots.shape[0] == 0:
        return
    is_used = slots >= 0
    first = is_used.to(torch.int32).argmax()
    source = torch.where(is_used, torch.arange(slots.shape[0], device=slots.device), first)
    target = slots[source]
    is_used = target >= 0  # none at all: row 0 of block 0 keeps what it has
    target = torch.where(is_used, target, 0)
    block_size = pages[0].shape[2]
    block, row = target // block_size, target % block_size
    for rows, page in ((key, pages[0]), (value, pages[1])):
        kept = torch.where(is_used[:, None, None], rows[source], page[block, :, row])
        page[block, :, row] = kept.to(page.dtype)
