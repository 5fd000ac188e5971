"""vLLM's backend interface: its registry, checks, metadata and classes are vLLM's own; the engine around them is this
file's: it hands out blocks and slots, and runs requests in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

try:
    from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
except Exception as error:
    pytest.skip(f"vllm cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)

import flashtile
from flashtile.integrations import vllm as ours

HEADS, HEADS_KV, DIM, BLOCK = 4, 2, 32, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0]},
}


class Engine:
    """Requests whose keys lie in blocks of one cache."""

    def __init__(self, lengths: list[int], order: tuple[int, ...]) -> None:
        num_blocks = sum(-(-n // BLOCK) for n in lengths) + 2
        sizes = (num_blocks, HEADS_KV, BLOCK, 2 * DIM)
        memory = torch.full([sizes[axis] for axis in order], torch.nan)
        self.kv_cache = memory.permute([order.index(axis) for axis in range(4)])
        free = torch.randperm(num_blocks).tolist()
        self.blocks = [[free.pop() for _ in range(-(-n // BLOCK))] for n in lengths]
        self.done = [0] * len(lengths)
        width = max(len(blocks) for blocks in self.blocks)
        self.table = torch.tensor(
            [[*blocks, *[0] * (width - len(blocks))] for blocks in self.blocks], dtype=torch.int32
        )

    def metadata(self, chunks: list[int], num_padding: int = 0) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
        slots = [
            self.blocks[r][p // BLOCK] * BLOCK + p % BLOCK
            for r, n in enumerate(chunks)
            for p in range(self.done[r], self.done[r] + n)
        ]
        self.done = [done + n for done, n in zip(self.done, chunks, strict=True)]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.done, dtype=torch.int32),
            num_reqs=len(chunks),
            num_actual_tokens=sum(chunks) + num_padding,
            max_query_len=max(chunks),
            max_seq_len=max(self.done),
            block_table_tensor=self.table,
            slot_mapping=torch.tensor(slots + [-1] * num_padding),
        )


def built(common: CommonAttentionMetadata) -> Any:
    builder = ours.FlashtileBackend.get_builder_cls()(None, ["layer"], None, torch.get_default_device())
    return builder.build(0, common)


def impl(**options: Any) -> Any:
    return ours.FlashtileBackend.get_impl_cls()(HEADS, DIM, 0.2, HEADS_KV, **options)


def test_the_registry_finds_it() -> None:
    with pytest.raises(ValueError, match="must be registered"):
        AttentionBackendEnum.CUSTOM.get_class()
    try:
        ours.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is ours.FlashtileBackend
        ours.register()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_another_plug_in_is_left_alone() -> None:
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
    try:
        ours.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, 0),
        ({"head_size": 80}, 0),
        ({"has_sink": True, "has_sliding_window": True}, 0),
        ({"head_size": 576}, 1),
        ({"kv_cache_dtype": "fp8"}, 1),
        ({"use_mla": True}, 1),
        ({"block_size": 8}, 1),
    ],
    ids=str,
)
def test_vllms_own_checks(changes: dict[str, Any], reasons: int) -> None:
    asked: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    flags = ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")
    asked |= dict.fromkeys(flags, False) | {"device_capability": None, "attn_type": AttentionType.DECODER}
    assert len(ours.FlashtileBackend.validate_configuration(**(asked | changes))) == reasons


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "rows first"])
@pytest.mark.parametrize("name", OPTIONS)
def test_requests_in_chunks(name: str, order: tuple[int, ...]) -> None:
    """Prefill in two parts, then decoding, of three requests at once; the whole of each request is the reference."""
    torch.manual_seed(0)
    lengths, options = [37, 18, 50], dict(OPTIONS[name])
    if name == "sinks":
        options["sinks"] = torch.tensor(options["sinks"])
    engine, attention = Engine(lengths, order), impl(**options)
    whole = [[torch.randn(n, h, DIM) for h in (HEADS, HEADS_KV, HEADS_KV)] for n in lengths]
    results: list[list[torch.Tensor]] = [[] for _ in lengths]
    for step, chunks in enumerate(([20, 9, 33], [16, 8, 16], [1, 1, 1])):
        before = list(engine.done)
        padding = 2 if step == 2 else 0
        meta = built(engine.metadata(chunks, 0))
        parts = [
            torch.cat([t[part][b : b + n] for t, b, n in zip(whole, before, chunks, strict=True)]) for part in range(3)
        ]
        output = torch.full((sum(chunks) + padding, HEADS, DIM), torch.nan)
        assert attention.forward(None, *parts, engine.kv_cache, meta, output) is output
        for result, rows in zip(results, output[: sum(chunks)].split(chunks), strict=True):
            result.append(rows)
    window = None if name != "window" else (19, 0)
    slopes = torch.tensor(options["alibi_slopes"]) if name == "alibi" else None
    for (q, k, v), result in zip(whole, results, strict=True):
        expected = flashtile.attention(
            *(t[None] for t in (q, k, v)),
            causal=True,
            window=window,
            scale=0.2,
            softcap=options.get("logits_soft_cap", 0.0),
            alibi_slopes=slopes,
            sinks=options.get("sinks"),
            layout="bshd",
        )
        torch.testing.assert_close(torch.cat(result), expected[0])


def test_padding_writes_nothing() -> None:
    torch.manual_seed(0)
    engine = Engine([5], (0, 1, 2, 3))
    meta = built(engine.metadata([5], num_padding=3))
    k, v = torch.randn(8, HEADS_KV, DIM), torch.randn(8, HEADS_KV, DIM)
    ours._store(k, v, engine.kv_cache.split(DIM, -1), meta.slot_mapping)
    block = engine.blocks[0][0]
    torch.testing.assert_close(engine.kv_cache[block, :, :5, :DIM], k[:5].transpose(0, 1))
    torch.testing.assert_close(engine.kv_cache[block, :, :5, DIM:], v[:5].transpose(0, 1))
    written = ~engine.kv_cache.isnan().all(-1).all(1)
    assert written.sum() == 5
    before = engine.kv_cache.clone()
    ours._store(k, v, engine.kv_cache.split(DIM, -1), torch.full((8,), -1))
    torch.testing.assert_close(engine.kv_cache, before, equal_nan=True)


def test_encoders_and_memory_runs() -> None:
    q, k, v = (torch.randn(12, h, DIM) for h in (HEADS, HEADS_KV, HEADS_KV))
    engine = Engine([7, 5], (0, 1, 2, 3))
    meta = built(engine.metadata([7, 5]))
    output = torch.empty(12, HEADS * DIM)
    impl(attn_type=AttentionType.ENCODER_ONLY).forward(None, q, k, v, engine.kv_cache, meta, output)
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    expected = flashtile.attention_varlen(q, k, v, starts, starts, scale=0.2)
    torch.testing.assert_close(output.view(12, HEADS, DIM), expected)
    assert not impl().forward(None, q, k, v, engine.kv_cache, None, output).any()


def test_refusals() -> None:
    with pytest.raises(flashtile.Unsupported, match="kv_cache_dtype: got"):
        impl(kv_cache_dtype="fp8")
    with pytest.raises(flashtile.Unsupported, match="attn_type: got"):
        impl(attn_type=AttentionType.ENCODER_DECODER)
    common = Engine([5], (0, 1, 2, 3)).metadata([5])
    common.causal = torch.tensor([True])
    with pytest.raises(flashtile.Unsupported, match="causal: got a tensor"):
        built(common)
