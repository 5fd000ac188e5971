"""Core attention of Megatron-Core against its own DotProductAttention, which is moved to the CPU by the fixture."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile.distributed.launch import on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Apex and TransformerEngine, which are not there
    pytest.importorskip("megatron.core", exc_type=ImportError)
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import dot_product_attention as theirs
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import GlobalMemoryBuffer, get_batch_on_this_cp_rank

    from flashtile.integrations import megatron as ours

SEED = int(os.environ.get("FLASHTILE_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
# One rank
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = SimpleNamespace(tp=ALONE, cp=ALONE)


def config(**options: Any) -> Any:
    given = {"num_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "attention_dropout": 0.0}
    return TransformerConfig(**{**given, "use_cpu_initialization": True, **options})


def module(
    mask_type: AttnMaskType = AttnMaskType.causal, layer: int = 1, cls: Any = ours.DotProductAttention, **more: Any
) -> Any:
    options = {
        name: more.pop(name)
        for name in ("softmax_scale", "attention_dropout", "k_channels", "cp_comm_type")
        if name in more
    }
    groups = more.pop("groups", GROUPS)
    return cls(config(**more), layer, mask_type, "self", pg_collection=groups, **options)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's class makes masks and buffers on CUDA."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    tracker = SimpleNamespace(fork=contextlib.nullcontext)
    monkeypatch.setattr(theirs.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)

    def causal(rows: int) -> Tensor:
        return torch.ones(rows, rows, dtype=torch.bool).triu(1)

    def windowed(rows: int, keys: int, window: tuple[int, int]) -> Tensor:
        distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        return (distance < -window[0]) | (distance > window[1])

    monkeypatch.setattr(fused_softmax, "get_default_causal_mask", causal)
    monkeypatch.setattr(fused_softmax, "get_sliding_window_causal_mask", windowed)


def tensors(
    draw: random.Random, rows: int, keys: int, batch: int, heads: int, groups: int, dim: int, dim_v: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    shapes = (rows, batch, heads, dim), (keys, batch, groups, dim), (keys, batch, groups, dim_v)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def run(attend: Any, inputs: list[Tensor], grad: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    out = attend(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)], grad


def assert_same(found: list[Tensor], expected: list[Tensor], what: Any = "") -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-5, atol=2e-5, msg=lambda text: f"{text}\n{what}\nFLASHTILE_SEED={SEED}"
        )


@pytest.mark.parametrize("case", range(24))
def test_random_configurations(case: int, on_cpu: None) -> None:
    draw = random.Random(SEED + case)
    heads = draw.choice([2, 4, 6])
    groups = draw.choice([size for size in (1, 2, 3, heads) if heads % size == 0])
    dim, batch = draw.choice([8, 24, 64]), draw.choice([1, 2, 3])
    softmax_type = draw.choice(["vanilla", "off-by-one", "learnable"])
    kind = draw.choice(["causal", "causal and mask", "padding", "arbitrary", "no_mask", "one query"])
    layer = draw.choice([1, 2])
    # Megatron's windows are in the place of every other mask
    windows = {"causal": [None, (5, 0)], "no_mask": [None, (5, 0), (3, 2)], "one query": [None, (5, 0)]}.get(
        kind, [None]
    )
    window = draw.choice(windows)
    skip = draw.choice([None, 2, [0, 1]]) if window else None
    options: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": dim,
        "softmax_type": softmax_type,
        "window_size": window,
        "window_attn_skip_freq": skip,
        "hidden_size": heads * dim,
        "apply_query_key_layer_scaling": draw.choice([True, False]),
        "softmax_scale": draw.choice([None, 0.3]),
    }
    rows = keys = draw.randrange(2, 40)
    mask = None
    if kind == "one query":
        rows = 1
    elif kind in ("padding", "arbitrary", "no_mask"):
        rows = draw.randrange(1, keys + 1 if window else 40)  # Megatron returns the mean where every key is hidden
    generator = torch.Generator().manual_seed(SEED + case)
    mask_type = AttnMaskType[{"causal and mask": "causal", "one query": "causal"}.get(kind, kind)]
    if kind == "padding":
        mask = torch.rand(batch, 1, 1, keys, generator=generator) < 0.3
    elif kind == "arbitrary":
        mask = torch.rand(draw.choice([1, batch]), draw.choice([1, heads]), rows, keys, generator=generator) < 0.3
    elif kind == "causal and mask":
        mask = (torch.rand(batch, 1, rows, keys, generator=generator) < 0.3) | torch.ones(rows, keys).triu(1).bool()
    if mask is not None:
        mask[..., 0] = False
    own = module(mask_type, layer, **options)
    reference = module(mask_type, layer, theirs.DotProductAttention, **options)
    inputs = tensors(draw, rows, keys, batch, heads, groups, dim, dim)
    for one in (own, reference):
        if softmax_type == "learnable":
            with torch.no_grad():
                one.softmax_offset.copy_(torch.linspace(-1, 1, heads))
            inputs_of = [*inputs, one.softmax_offset]
        else:
            inputs_of = inputs
        attend = lambda q, k, v, *_: one(q, k, v, mask)  # noqa: B023, E731
        if one is own:
            found, grad = run(attend, inputs_of)
        else:
            expected, _ = run(attend, inputs_of, grad)
    assert found[0].shape == (rows, batch, heads * dim)
    assert_same(found, expected, (kind, options, rows, keys, batch))
    assert list(own.state_dict()) == list(reference.state_dict())


def test_every_mask_type_is_handled_or_refused() -> None:
    assert set(ours._MASK_TYPES) == {member.name for member in AttnMaskType}
    with pytest.raises(flashtile.Unsupported, match=r"attn_mask_type: got None .*accepted: no_mask, padding"):
        module(None)  # type: ignore[arg-type]
    q, k, v = tensors(random.Random(1), 3, 5, 1, 4, 4, 8, 8)
    own = module()
    for type_name in ("causal", "padding_causal"):
        with pytest.raises(ValueError, match=r"3 queries and 5 keys.*Use causal_bottom_right"):
            own(q, k, v, None, AttnMaskType[type_name])
    with pytest.raises(ValueError, match=r"attention_mask: got None.*arbitrary"):
        own(q, k, v, None, AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match=r"attention_mask: got shape.*no_mask"):
        own(q, k, v, torch.zeros(1, 1, 3, 5).bool(), AttnMaskType.no_mask)
    with pytest.raises(TypeError, match=r"attention_mask: .*True = hidden"):
        own(q, k, v, torch.zeros(1, 1, 3, 5), AttnMaskType.arbitrary)
    with pytest.raises(ValueError, match=r"^attention_mask: got"):
        own(q, k, v, torch.zeros(1, 1, 4, 5).bool(), AttnMaskType.arbitrary)


def naive(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, bias: Any = 0.0) -> Tensor:
    """(s, b, h, d) by the formula; rows that see no key are 0."""
    heads = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(heads, 2), v.repeat_interleave(heads, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * scale + bias
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


def test_what_megatrons_own_class_lacks() -> None:
    draw = random.Random(SEED)
    own = module(k_channels=8, num_query_groups=2, kv_channels=16)
    _q, _k, _v = inputs = tensors(draw, 7, 9, 2, 4, 2, 8, 24)
    causal = torch.ones(7, 9).triu(3).bool()
    bias = torch.randn(1, 4, 7, 9, requires_grad=True)
    found, grad = run(lambda q, k, v, b: own(q, k, v, None, AttnMaskType.causal_bottom_right, b), [*inputs, bias])
    expected, _ = run(lambda q, k, v, b: naive(q, k, v, causal, 8**-0.5, b), [*inputs, bias], grad)
    assert_same(found, expected)
    # Cross-attention: the padding of queries and of keys
    of_queries, of_keys = (
        torch.arange(7) >= torch.tensor([7, 4])[:, None],
        torch.arange(9) >= torch.tensor([5, 9])[:, None],
    )
    pair = of_queries[:, None, None], of_keys[:, None, None]
    found, grad = run(lambda q, k, v: own(q, k, v, pair, AttnMaskType.padding), inputs)
    hidden = of_queries[:, None, :, None] | of_keys[:, None, None]
    expected, _ = run(lambda q, k, v: naive(q, k, v, hidden, 8**-0.5), inputs, grad)
    assert_same(found, expected)
    # A padding mask and a causal one together
    inputs = tensors(draw, 9, 9, 2, 4, 2, 8, 24)
    found, grad = run(lambda q, k, v: own(q, k, v, pair[1], AttnMaskType.padding_causal), inputs)
    hidden = of_keys[:, None, None] | torch.ones(9, 9).triu(1).bool()
    assert_same(found, run(lambda q, k, v: naive(q, k, v, hidden, 8**-0.5), inputs, grad)[0])


@pytest.mark.parametrize("window", [None, (4, 0)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_packed(is_padded: bool, window: tuple[int, int] | None) -> None:
    """Each sequence as if it were alone; the rows behind it are 0, and nothing of them is seen."""
    lengths, gaps = [5, 1, 9, 6], [2, 0, 3, 1] if is_padded else [0] * 4
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    padded = torch.tensor([0, *(torch.tensor(lengths) + torch.tensor(gaps)).cumsum(0)], dtype=torch.int32)
    total = int(padded[-1])
    given: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    if is_padded:
        given |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    packed = PackedSeqParams(qkv_format="thd", **given)
    for mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.padding, AttnMaskType.no_mask):
        own = module(mask_type, num_query_groups=2, window_size=window)
        inputs = [x[:, 0].detach().requires_grad_() for x in tensors(random.Random(SEED), total, total, 1, 4, 2, 8, 8)]
        found, grad = run(lambda q, k, v: own(q, k, v, None, packed_seq_params=packed), inputs)  # noqa: B023
        assert found[0].shape == (total, 32)
        expected = [torch.zeros_like(one) for one in found]
        for first, length in zip(padded.tolist(), lengths, strict=False):
            part = slice(first, first + length)
            pieces = [x.detach()[part, None].requires_grad_() for x in inputs]
            hidden = torch.zeros(length, length).bool()
            if mask_type.name.endswith("causal"):
                hidden |= torch.ones(length, length).triu(1).bool()
            if window is not None:
                hidden |= torch.ones(length, length).triu(1).bool() | torch.ones(length, length).tril(-5).bool()
            alone, _ = run(lambda q, k, v: naive(q, k, v, hidden, 8**-0.5), pieces, grad[part, None])  # noqa: B023
            for whole, piece in zip(expected, alone, strict=True):
                whole[part] = piece[:, 0]
        assert_same(found, expected, mask_type)


def test_what_is_refused_of_packed_sequences() -> None:
    starts = torch.tensor([0, 4], dtype=torch.int32)
    q = torch.randn(4, 4, 8)
    own = module()
    padded = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "cu_seqlens_q_padded": starts}

    def call(mask: Any = None, bias: Any = None, kind: Any = None, which: Any = own, **fields: Any) -> None:
        packed = PackedSeqParams(**{"qkv_format": "thd", **padded, **fields})
        with pytest.raises(flashtile.Unsupported) as caught:
            which(q, q, q, mask, kind, bias, packed)
        found.append(str(caught.value).partition(":")[0])

    found: list[str] = []
    call(qkv_format="sbhd")
    call(mask=torch.zeros(1, 1, 4, 4).bool())
    call(bias=torch.zeros(1, 1, 4, 4))
    call(kind=AttnMaskType.arbitrary)
    call(kind=AttnMaskType.causal_bottom_right)
    call(kind=AttnMaskType.padding, which=module(window_size=(2, 2)))
    call(cp_group=SimpleNamespace(size=lambda: 2))
    assert found == [
        "packed_seq_params.qkv_format",
        "attention_mask",
        "attention_bias",
        "attn_mask_type",
        "attn_mask_type",
        "config.window_size",
        "packed_seq_params",
    ]


@pytest.mark.parametrize(
    "name", ["qk_clip", "log_max_attention_logit", "batch_invariant_mode", "fp8_dot_product_attention"]
)
def test_what_is_refused_of_the_config(name: str) -> None:
    given = config()
    setattr(given, name, True)
    with pytest.raises(flashtile.Unsupported, match=rf"^config\.{name}: got True; accepted: False"):
        ours.DotProductAttention(given, 1, AttnMaskType.causal, "self", pg_collection=GROUPS)
    with pytest.raises(flashtile.Unsupported, match=r"^cp_comm_type: got a2a\+p2p; accepted: p2p, all_gather, a2a"):
        module(cp_comm_type="a2a+p2p")


def test_dropout_is_flashtiles_and_off_in_evaluation() -> None:
    own = module(attention_dropout=0.4)
    q, k, v = tensors(random.Random(SEED), 30, 30, 2, 4, 4, 8, 8)
    torch.manual_seed(5)
    found = own(q, k, v, None)
    torch.manual_seed(5)
    dense = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    expected: Any = flashtile.attention(*dense, causal=True, dropout_p=0.4)
    assert torch.equal(found, expected.permute(2, 0, 1, 3).flatten(2))
    assert not torch.equal(found, own(q, k, v, None))
    own.eval()
    assert_same([own(q, k, v, None)], [module()(q, k, v, None)])


def test_specs() -> None:
    spec = get_gpt_layer_local_spec()
    before = spec.submodules.self_attention.submodules.core_attention
    changed = ours.with_flashtile(spec)
    assert changed.submodules.self_attention.submodules.core_attention is ours.DotProductAttention
    assert spec.submodules.self_attention.submodules.core_attention is before
    assert changed.submodules.mlp is not None
    assert changed.module is spec.module
    block = dataclasses.make_dataclass("Block", [("layer_specs", list)])([spec, spec])
    for layer in ours.with_flashtile(block).layer_specs:
        assert layer.submodules.self_attention.submodules.core_attention is ours.DotProductAttention
    other = dataclasses.make_dataclass("Parts", [("core_attention", Any)])(torch.nn.Linear)
    with pytest.raises(flashtile.Unsupported, match="core_attention: got Linear; accepted: DotProductAttention or"):
        ours.with_flashtile(ModuleSpec(torch.nn.Linear, submodules=other))
    wrapped = dataclasses.make_dataclass("Parts", [("core_attention", Any)])(ModuleSpec(before))
    assert ours.with_flashtile(wrapped).core_attention == ModuleSpec(ours.DotProductAttention)
    with pytest.raises(ValueError, match=r"^spec: got"):
        ours.with_flashtile(ModuleSpec(torch.nn.Linear))
    for provider in (ours.FlashtileSpecProvider(), ours.FlashtileLocalSpecProvider()):
        assert provider.core_attention() is ours.DotProductAttention
    assert ours.FlashtileLocalSpecProvider().column_parallel_linear().__module__.startswith("megatron")


def on_context_ranks(group: Any, seed: int, comm: str, options: dict[str, Any], with_mask: bool) -> None:
    """Every rank's rows, cut by Megatron, against one rank with all of them."""
    size = dist.get_world_size(group)
    rows, heads = 4 * size * 3, 4
    whole = tensors(random.Random(seed), rows, rows, 2, heads, 2, 8, 8)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(rows, 2, heads * 8, generator=generator)
    offset = torch.linspace(-1, 1, heads)
    mask = (torch.rand(2, 1, rows, rows, generator=generator) < 0.2) if with_mask else None
    given = {"num_query_groups": 2, "softmax_type": "learnable", **options}
    alone = module(**given)
    with torch.no_grad():
        alone.softmax_offset.copy_(offset)
    expected, _ = run(lambda q, k, v, _: alone(q, k, v, mask), [*whole, alone.softmax_offset], grad)

    groups = SimpleNamespace(tp=ALONE, cp=group)
    own = module(
        cp_comm_type=comm, groups=groups, context_parallel_size=size, bf16=True, params_dtype=torch.float32, **given
    )
    with torch.no_grad():
        own.softmax_offset.copy_(offset)
    # Megatron cuts dimension 1
    named = {
        name: x.transpose(0, 1) for name, x in zip("qkvogdef", [*whole, expected[0], grad, *expected[1:4]], strict=True)
    }
    cut = get_batch_on_this_cp_rank({**named, "attention_mask": mask}, group)
    mine = {name: x.transpose(0, 1) for name, x in cut.items() if name != "attention_mask"}
    inputs = [mine[name].detach().requires_grad_() for name in "qkv"]
    found, _ = run(lambda q, k, v, _: own(q, k, v, cut["attention_mask"]), [*inputs, own.softmax_offset], mine["g"])
    dist.all_reduce(found[4], group=group)
    assert_same(found, [*(mine[name] for name in "odef"), expected[4]])


def context_ranks(group: Any, seed: int) -> None:
    warnings.simplefilter("ignore")
    for comm in ("p2p", "all_gather", "a2a"):
        for options in ({}, {"window_size": (9, 0)}):
            on_context_ranks(group, seed, comm, options, with_mask=False)
    on_context_ranks(group, seed, "p2p", {}, with_mask=True)
    on_context_ranks(group, seed, "all_gather", {"window_size": (9, 0)}, with_mask=True)
    on_model_ranks(group)
    q = torch.randn(12, 4, 8)
    own = module(
        groups=SimpleNamespace(tp=ALONE, cp=group), context_parallel_size=2, bf16=True, params_dtype=torch.float32
    )
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    with pytest.raises(
        flashtile.Unsupported, match=r"^packed_seq_params: got packed sequences with context parallelism"
    ):
        own(q, q, q, None, packed_seq_params=PackedSeqParams(**given))
    # A batch may switch its ranks off
    out = own(q, q, q, None, packed_seq_params=PackedSeqParams(**given, local_cp_size=1))
    assert out.shape == (12, 32)
    mask = torch.zeros(1, 1, 12, 24).bool()
    own = module(cp_comm_type="a2a", groups=SimpleNamespace(tp=ALONE, cp=group), context_parallel_size=2, bf16=True)
    with pytest.raises(flashtile.Unsupported, match=r"^attention_mask: got a tensor"):
        own(*(torch.randn(12, 1, 4, 8) for _ in "qkv"), mask)


def on_model_ranks(group: Any) -> None:
    """A whole model by its spec, with the ranks of Megatron's parallel_state, against one rank."""
    size = dist.get_world_size(group)
    options = {"softmax_type": "learnable", "hidden_dropout": 0.0, "num_query_groups": 2}
    spec, ids = (
        ours.with_flashtile(get_gpt_layer_local_spec()),
        torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)),
    )
    batch = {"input_ids": ids, "position_ids": torch.arange(16).expand(2, -1), "labels": ids.roll(-1, 1)}
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    found = []
    for ranks in (1, size):
        torch.manual_seed(0)
        more = {"context_parallel_size": ranks, "bf16": ranks > 1, "params_dtype": torch.float32}
        model = GPTModel(config(**options, **more), spec, vocab_size=64, max_sequence_length=16)
        cut = get_batch_on_this_cp_rank(dict(batch), group) if ranks > 1 else batch
        loss = model(**cut, attention_mask=None).sum()
        loss.backward()
        results = [loss.detach(), *(x.grad for x in model.parameters())]
        if ranks > 1:
            for tensor in results:
                dist.all_reduce(tensor, group=group)
        found.append(results)
    assert_same(found[1], found[0])
    offset = model.decoder.layers[0].self_attention.core_attention.softmax_offset
    assert offset.std() > 0  # drawn by config.init_method
    saved = model.sharded_state_dict()["decoder.layers.0.self_attention.core_attention.softmax_offset"]
    assert torch.equal(saved.data, offset)


def test_context_parallel() -> None:
    on_ranks(context_ranks, 2, SEED)
