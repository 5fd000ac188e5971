"""flashtile in the place of torch's scaled_dot_product_attention: torch's own modules and diffusers' models."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.vit import ViTConfig, ViTForImageClassification

import flashtile
from flashtile.integrations import sdpa

TORCH = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    torch.manual_seed(0)
    sdpa.reset_report()
    yield
    assert F.scaled_dot_product_attention is TORCH
    assert torch.backends.mha.get_fastpath_enabled()


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def encoder() -> tuple[nn.Module, dict[str, Any], int]:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    padding = torch.arange(9) >= torch.tensor([9, 5])[:, None]
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, {"src": torch.randn(2, 9, 32), "src_key_padding_mask": padding}, 2


def transformer() -> tuple[nn.Module, dict[str, Any], int]:
    model = nn.Transformer(32, 4, 1, 1, 48, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return model, {"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 7, 32), "tgt_mask": mask}, 3


def vit() -> tuple[nn.Module, dict[str, Any], int]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=24, patch_size=8, attn_implementation="sdpa")
    return ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 24, 24)}, 2


def unet() -> tuple[nn.Module, dict[str, Any], int]:
    """Stable Diffusion's: self-attention over pixels, cross-attention to a text."""
    model = pytest.importorskip("diffusers").UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return (
        model,
        {"sample": torch.randn(2, 4, 16, 16), "timestep": 3, "encoder_hidden_states": torch.randn(2, 7, 24)},
        8,
    )


def dit() -> tuple[nn.Module, dict[str, Any], int]:
    model = pytest.importorskip("diffusers").DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 5])}
    return model, {**inputs, "class_labels": torch.tensor([3, 9])}, 2


def flux() -> tuple[nn.Module, dict[str, Any], int]:
    """Calls diffusers' attention dispatcher."""
    model = pytest.importorskip("diffusers").FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=24,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 24)}
    positions = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(6, 3)}
    return model, {**inputs, **positions, "pooled_projections": torch.randn(1, 24), "timestep": torch.tensor([1.0])}, 2


MODELS = {"encoder": encoder, "transformer": transformer, "vit": vit, "unet": unet, "dit": dit, "flux": flux}


def randomized(model: nn.Module) -> nn.Module:
    """Without dropout. Diffusion models start with zeros where attention enters."""
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():
                weight.normal_(std=0.1)
    return model.eval()


def results_of(model: Callable[..., Any], inputs: dict[str, Any], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Its output and the gradients of its weights."""
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else next(iter(out.values()))
    weighting = torch.randn(out.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    loss = (out * weighting.to(out.device)).sum()
    return [out.detach(), *(g for g in torch.autograd.grad(loss, weights, allow_unused=True) if g is not None)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model, inputs, num_calls = MODELS[name]()
    weights = list(randomized(model).parameters())
    expected = results_of(model, inputs, weights)
    with sdpa.replaced() as report:
        assert_equal(results_of(model, inputs, weights), expected)
        assert (report.served, report.left_to_torch) == (num_calls, {})
        with torch.no_grad():
            model(**inputs)
        assert report.served == 2 * num_calls


@pytest.mark.parametrize("name", MODELS)
def test_compiled_models(name: str) -> None:
    torch._dynamo.reset()
    model, inputs, _ = MODELS[name]()
    weights = list(randomized(model).parameters())
    expected = results_of(model, inputs, weights)
    with sdpa.replaced() as report:
        compiled = torch.compile(model, backend="aot_eager")
        assert_equal(results_of(compiled, inputs, weights), expected)
        before = report.served
        assert before > 0
        assert_equal(results_of(compiled, inputs, weights), expected)
        assert report.served == before  # traced once: counts are no guards
        assert not report.left_to_torch


def test_process() -> None:
    q = torch.randn(1, 2, 5, 8)
    report = sdpa.install()
    assert sdpa.install() is report
    try:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        thread.start()
        thread.join()
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert report.served == 2
    finally:
        sdpa.uninstall()
    F.scaled_dot_product_attention(q, q, q)
    assert report.served == 2


def test_one_module() -> None:
    model, other, x = Attend(), Attend(), torch.randn(2, 9, 32)
    expected = model(x), other(x)
    report = sdpa.install(model)
    sdpa.install(model)
    try:
        torch.testing.assert_close((model(x), other(x)), expected)
        assert report.served == 1
        model.inner(x, x, x, need_weights=False)
        assert report.served == 2
        with pytest.raises(AssertionError, match="embedding dimension"):
            model(x[..., :3])
        other(x)
        assert report.served == 2  # an error leaves nothing behind
    finally:
        sdpa.uninstall(model)
    model(x)
    assert report.served == 2


def test_one_module_can_be_saved(tmp_path: Path) -> None:
    model, inputs, _ = encoder()
    report = sdpa.install(model)
    expected = model(**inputs)
    torch.save(model, tmp_path / "model.pt")
    copies = [torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)]
    sdpa.uninstall(model)
    for other in copies:  # as any other model: not served until it is asked for
        sdpa.reset_report()
        torch.testing.assert_close(other(**inputs), expected)
        assert report.served == 0
        sdpa.install(other)
        torch.testing.assert_close(other(**inputs), expected)
        assert report.served > 0
        sdpa.uninstall(other)
        assert F.scaled_dot_product_attention is TORCH


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_one_module_with_checkpoints(use_reentrant: bool) -> None:
    """Checkpointing runs parts of the module again after the module has returned."""
    parts = nn.ModuleList([Attend(), Attend()])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=use_reentrant)
            return x

    model, x = Model(), torch.randn(2, 9, 32, requires_grad=True)
    weights = list(model.parameters())
    expected = torch.autograd.grad(parts[1](parts[0](x)).square().sum(), weights)
    report = sdpa.install(model)
    try:
        model(x).square().sum().backward()
    finally:
        sdpa.uninstall(model)
    assert report.served == 4
    for weight, grad in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-3, atol=1e-4)


def test_continuous_batching() -> None:
    """transformers refuses every other name than "sdpa" there."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=100, attn_implementation="sdpa")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() > 1 else 1.0)  # or else attention would not matter
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [11, 12]]
    alone = [model.generate(torch.tensor([prompt]), generation_config=config)[0] for prompt in prompts]
    with sdpa.replaced() as report:
        together = model.generate_batch(inputs=prompts, generation_config=config)
    assert report.served > 0
    assert not report.left_to_torch
    expected = {tuple(prompt): row[len(prompt) :].tolist() for prompt, row in zip(prompts, alone, strict=True)}
    assert {tuple(result.prompt_ids): result.generated_tokens for result in together.values()} == expected


def test_what_is_left_to_torch_is_said() -> None:
    q = torch.randn(1, 2, 3, 600)
    with sdpa.replaced() as report:
        with pytest.warns(flashtile.SlowPathWarning, match="left to torch: query: got head_dim 600"):
            out = F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q[..., :8], q[..., :8], q[..., :8])
        with pytest.warns(flashtile.SlowPathWarning, match="left to torch: dropout_p"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q))
    text = str(report)
    assert text.startswith("served by flashtile: 1\nleft to torch: 2\n")
    assert "1 x query: got head_dim 600; accepted: 1 to 512." in text


def test_what_is_left_to_torch_in_a_graph() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 3, 600)
    function = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager", fullgraph=True)
    with sdpa.replaced() as report, pytest.warns(flashtile.SlowPathWarning, match="a head_dim outside of 1 to 512"):
        torch.testing.assert_close(function(q), TORCH(q, q, q))
    assert report.left_to_torch.total() == 1


def test_errors_are_torchs() -> None:
    q = torch.randn(1, 2, 3, 8)
    with sdpa.replaced(), pytest.warns(flashtile.SlowPathWarning), pytest.raises(RuntimeError, match="Expected size"):
        F.scaled_dot_product_attention(q, q[..., :4], q)


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTILE_STRICT", "1")
    q = torch.randn(1, 2, 3, 600)
    with sdpa.replaced(), pytest.raises(flashtile.Unsupported, match="left to torch"):
        F.scaled_dot_product_attention(q, q, q)


def test_a_mask_beside_is_causal_is_served() -> None:
    q, mask = torch.randn(1, 2, 5, 8), torch.rand(5, 5) < 0.7
    with sdpa.replaced() as report:
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
    assert (report.served, report.left_to_torch.total()) == (1, 0)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, attn_mask=mask.tril()))
