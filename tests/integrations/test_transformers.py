"""transformers' models with attn_implementation="flashtile" against their own eager attention."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.masking_utils import create_chunked_causal_mask, sdpa_mask
from transformers.models.bert import BertConfig, BertForMaskedLM
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.llama4 import Llama4ForCausalLM, Llama4TextConfig
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.qwen2_moe import Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.models.t5 import T5Config, T5ForConditionalGeneration
from transformers.models.vit import ViTConfig, ViTForImageClassification
from transformers.models.whisper import WhisperConfig, WhisperForConditionalGeneration

import flashtile
from flashtile.integrations import transformers as ours

# Where it is missing, `generate` fails with chunks and a static cache
CHUNKED_MASKS_TAKE_BLOCKS = "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters
VOCABULARY, BATCH, ROWS, WINDOW = 96, 3, 21, 7
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**DECODER, sliding_window=WINDOW))


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, eos_token_id=None))


def bert() -> Any:
    sizes = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gemma2() -> Any:
    options = {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    return Gemma2ForCausalLM(Gemma2Config(**DECODER, **options))


def gpt_oss() -> Any:
    options = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW}
    model = GptOssForCausalLM(GptOssConfig(**DECODER, **options))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def llama4() -> Any:
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 8, "head_dim": 8}
    return Llama4ForCausalLM(Llama4TextConfig(**DECODER, **options, intermediate_size_mlp=48))


def qwen2_moe() -> Any:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**DECODER, **window, **experts, shared_expert_intermediate_size=16))


def t5() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, eos_token_id=None))


def whisper() -> Any:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens, vocab_size=VOCABULARY))


def vit() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=24, patch_size=8, num_labels=5))


DECODERS = {
    "llama": llama,
    "mistral": mistral,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "qwen2_moe": qwen2_moe,
}
MODELS = {**DECODERS, "bert": bert, "t5": t5, "whisper": whisper, "vit": vit}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    torch.manual_seed(0)
    ours.register()
    yield
    ours.unregister()


def made(build: Callable[[], Any]) -> Any:
    """A model whose logits depend on its attention: transformers' initial weights are too small for that. With the same
    weights on every device."""
    with torch.device("cpu"):
        model = build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name and "router" not in name:
                weight.mul_(4.0)
    return model.to(torch.get_default_device()).eval()


def padding(side: str) -> torch.Tensor | None:
    """(batch, rows); 1 = a token."""
    if side == "none":
        return None
    columns = torch.arange(ROWS)
    lengths = torch.tensor([ROWS, 13, 4])[:, None]
    return (columns < lengths if side == "right" else columns >= ROWS - lengths).long()


def inputs_of(name: str, side: str = "none") -> dict[str, torch.Tensor]:
    with torch.device("cpu"):
        given = host_inputs_of(name, padding(side))
    return {key: value.to(torch.get_default_device()) for key, value in given.items()}


def host_inputs_of(name: str, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (BATCH, ROWS))
    if name == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 24, 24)}
    if name == "whisper":
        return {"input_features": torch.randn(BATCH, 8, 40), "decoder_input_ids": ids[:, :9]}
    given = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    return {**given, "decoder_input_ids": ids[:, :9]} if name == "t5" else given


def use(model: Any, implementation: str) -> None:
    """In every part: T5 of older versions gives its encoder and its decoder configs of their own, which the model's
    `set_attn_implementation` does not reach."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(implementation)


def counted(function: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """The result, and how often each operator ran."""
    with torch.profiler.profile() as profile:
        result = function()
    return result, Counter({event.key: event.count for event in profile.key_averages()})


def run(model: Any, implementation: str, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    use(model, implementation)
    return model(**inputs, **options).logits


def differentiated(
    model: Any, implementation: str, inputs: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    """Logits of tokens and the gradients of all weights."""
    model.zero_grad()
    logits = run(model, implementation, inputs, **options)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape == logits.shape[:2]:
        logits = logits[mask.bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    (logits * weights.to(logits.device)).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-3, atol=1e-4 * max(1.0, value.abs().max().item()), msg=name
        )


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradients(name: str, side: str) -> None:
    if side != "none" and name in ("vit", "whisper"):
        pytest.skip("this model has no padding")
    model, inputs = made(MODELS[name]), inputs_of(name, side)
    results, counts = counted(lambda: differentiated(model, "flashtile", inputs))
    assert counts["flashtile::forward"] == counts["flashtile::backward"] == 2 * (3 if name in ("t5", "whisper") else 1)
    expected = differentiated(model, "eager", inputs)
    assert_equal(results, expected)
    if name == "gpt_oss":
        assert results["model.layers.0.self_attn.sinks"].abs().max() > 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_generate(name: str, cache: str) -> None:
    if (name, cache) == ("llama4", "static") and not CHUNKED_MASKS_TAKE_BLOCKS:
        pytest.skip("this transformers cannot do it, whatever the attention")
    model, inputs = made(MODELS[name]), inputs_of(name, "left")
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    use(model, "flashtile")
    tokens, counts = counted(lambda: model.generate(**inputs, **options))
    assert counts["flashtile::forward"] >= 2 * 12
    use(model, "eager")
    expected = model.generate(**inputs, **options)
    assert torch.equal(tokens, expected)
    assert len(expected.unique()) > 2  # or else nothing would be seen


@pytest.mark.parametrize("name", MODELS)
def test_compile(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = made(MODELS[name]), inputs_of(name)
    if name in ("gpt_oss", "qwen2_moe"):
        model.set_experts_implementation("batched_mm")  # the default's backward pass cannot be traced on the CPU
    # Making a cache copies the config, which torch before 2.13 cannot trace
    options = {"use_cache": False} if name in ("t5", "whisper") else {}
    expected = differentiated(model, "eager", inputs, **options)
    whole = name != "llama4"  # its complex rotary embedding and experts break the graph without us too
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=whole)
    assert_equal(differentiated(model, "flashtile", inputs, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_compiled_with_a_static_cache(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = made(MODELS[name]), inputs_of(name, "left")
    model.set_attn_implementation("eager")
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    model.set_attn_implementation("flashtile")
    cache = StaticCache(config=model.config, max_cache_len=32)
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(**inputs, position_ids=positions, past_key_values=cache).logits
    for _ in range(6):
        token = logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, token], 1), torch.cat([mask, mask.new_ones(BATCH, 1)], 1)
        positions = mask.cumsum(1)[:, -1:] - 1
        logits = step(input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_prefill_in_parts(name: str) -> None:
    """A second part sees the cache of the first: more keys than queries, and more than one query."""
    model, inputs = made(MODELS[name]), inputs_of(name)
    expected = run(model, "eager", inputs)
    model.set_attn_implementation("flashtile")
    cache, parts = DynamicCache(config=model.config), []
    for part in inputs["input_ids"].split([9, 1, 11], dim=1):
        parts.append(model(input_ids=part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-4)


def test_prefill_of_an_empty_static_cache() -> None:
    """No mask comes and there are more keys than queries: causal from the top left."""
    model, inputs = made(llama), inputs_of("llama")
    expected = run(model, "eager", inputs)
    cache = StaticCache(config=model.config, max_cache_len=40)
    masks = []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    torch.testing.assert_close(run(model, "flashtile", inputs, past_key_values=cache), expected, rtol=1e-3, atol=1e-4)
    hook.remove()
    assert masks == [None]


LENGTHS = (5, 9, 7)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("way", ["position_ids", "cu_seq_lens"])
def test_packed_sequences(way: str, name: str) -> None:
    if (way, name) == ("position_ids", "gpt_oss"):
        pytest.skip("GPT-OSS makes its masks without position_ids, whatever the attention")
    model = made(MODELS[name])
    sequences = [torch.randint(3, VOCABULARY, (1, length)) for length in LENGTHS]
    expected = torch.cat([run(model, "eager", {"input_ids": ids}) for ids in sequences], 1)
    packed = {"input_ids": torch.cat(sequences, 1), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if way == "cu_seq_lens":
        lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
        packed |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 9, "max_length_k": 9}
    results = run(model, "flashtile", packed, use_cache=False)  # with a cache transformers does not look for sequences
    torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_train_without_a_stored_mask(
    name: str, is_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(MODELS[name]).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    ids, positions = torch.randint(3, VOCABULARY, (1, 21)), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    lengths = torch.tensor([0, *LENGTHS]).cumsum(0)
    bounds = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 9, "max_length_k": 9}
    made_masks = []
    monkeypatch.setattr(ours, "sdpa_mask", lambda **options: made_masks.append(sdpa_mask(**options)) or made_masks[-1])
    given = {"input_ids": ids, "position_ids": positions}
    results = {}
    for way, more in (("bounds", bounds), ("positions", {})):
        results[way] = differentiated(model, "flashtile", given | more, use_cache=False)
        assert len(made_masks) == (way == "positions")
    assert_equal(results["bounds"], results["positions"])


def test_a_mask_that_is_made_when_it_is_read() -> None:
    def make() -> Any:
        options = {"batch_size": 1, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
        return ours.attention_mask_for(**options, config=None)

    expected = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    mask = make()
    assert type(mask) is not torch.Tensor
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    assert torch.equal(mask[:, :, 1:], expected[:, :, 1:])
    assert type(mask[:, :, 1:]) is torch.Tensor
    assert torch.equal(torch.where(make(), 0.0, 1.0), (~expected).float())
    assert torch.equal(copy.deepcopy(make()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(make())), expected)
    mask &= torch.zeros(5, dtype=torch.bool)
    assert not mask.any()


def test_float_masks_are_added() -> None:
    model, inputs = made(llama), inputs_of("llama")
    mask = torch.full((ROWS, ROWS), torch.finfo(torch.float32).min).triu(1).expand(BATCH, 1, ROWS, ROWS)
    inputs["attention_mask"] = mask + torch.randn(ROWS) * mask.eq(0)
    torch.testing.assert_close(run(model, "flashtile", inputs), run(model, "eager", inputs), rtol=1e-3, atol=1e-4)


def test_bfloat16_and_dropout() -> None:
    model, inputs = made(llama).to(torch.bfloat16), inputs_of("llama")
    ours_, theirs = run(model, "flashtile", inputs), run(model, "eager", inputs)
    assert ours_.dtype == torch.bfloat16
    assert (ours_ - theirs).float().norm() < 0.1 * theirs.float().norm()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    assert not torch.equal(run(model, "flashtile", inputs), run(model, "flashtile", inputs))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_needs_no_stored_mask(name: str) -> None:
    model, inputs = made(MODELS[name]), inputs_of(name)
    config = model.config
    sizes = {"batch_size": BATCH, "q_length": ROWS, "kv_length": ROWS, "local_size": WINDOW, "config": config}
    assert ours.attention_mask_for(**sizes) is None
    assert ours.attention_mask_for(**sizes, attention_mask=torch.ones(BATCH, ROWS, dtype=torch.bool)) is None
    assert ours.attention_mask_for(**sizes, attention_mask=padding("left").bool()).shape == (BATCH, 1, ROWS, ROWS)
    torch.testing.assert_close(run(model, "flashtile", inputs), run(model, "eager", inputs), rtol=1e-3, atol=1e-4)


def test_a_window_that_is_not_handed_over_is_refused() -> None:
    model = made(mistral)
    q = torch.randn(1, 4, ROWS, 8)
    module = model.model.layers[0].self_attn
    with pytest.raises(flashtile.Unsupported, match="sliding_window: got nothing from MistralAttention"):
        ours.attention_forward(module, q, q, q, None)


# The name


def test_the_name_in_every_way_of_asking() -> None:
    config = LlamaConfig(**DECODER)
    assert (
        AutoModelForCausalLM.from_config(config, attn_implementation="flashtile").config._attn_implementation == "ftile"
    )
    config._attn_implementation = "flashtile"
    assert LlamaForCausalLM(config).config._attn_implementation == "ftile"
    model = llama()
    for name in ("flashtile", "ftile", {"": "flashtile"}):
        model.set_attn_implementation("eager")
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == "ftile"


def test_models_with_kernels_of_their_own_are_not_redirected() -> None:
    model = gpt_oss()
    model.set_attn_implementation("flashtile")
    assert model.config._attn_implementation == "ftile"


def test_a_saved_model_does_not_depend_on_it(tmp_path: Any) -> None:
    model = made(llama)
    model.set_attn_implementation("flashtile")
    model.save_pretrained(tmp_path)
    ours.unregister()
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
    ours.register()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="flashtile").eval()
    inputs = inputs_of("llama")
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_register_twice_and_undo() -> None:
    ours.register()
    ours.register()
    ours.unregister()
    with pytest.raises((ValueError, ImportError)):
        llama().set_attn_implementation("flashtile")
    with pytest.raises(ValueError, match="ftile"):
        llama().set_attn_implementation("ftile")


def test_the_name_for_programs_that_take_hub_kernels_alone() -> None:
    """It needs no hub and no `kernels`."""
    config = llama().config
    model = LlamaForCausalLM._from_config(config, attn_implementation=ours.HUB_NAME)
    assert model.config._attn_implementation == "ftile"
    model.set_attn_implementation("eager")
    model.set_attn_implementation({"": ours.HUB_NAME})
    assert model.config._attn_implementation == "ftile"
