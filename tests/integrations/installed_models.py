"""Models written by others, run unmodified under `flashtile.install()` and without it, on the CPU, tiny and with random
weights: their calls of torch's attention operators, and the largest difference.

PYTHONPATH=src python tests/integrations/installed_models.py [name ...]

Prints the Markdown table of docs/integrations.md. A model whose package is not installed is left out and named.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import tiny_models
import torch
from torch import Tensor, nn

import flashtile
from flashtile.integrations import torch_ops

Inputs = dict[str, Any]
Case = Callable[[], tuple[nn.Module, Inputs]]


@dataclass
class Result:
    """Calls of the forward operators, by what became of them, and the largest difference of outputs and gradients."""

    served: int = 0
    left: Counter[str] = field(default_factory=Counter)
    difference: float = 0.0

    def share(self) -> float:
        calls = self.served + self.left.total()
        return self.served / calls if calls else 1.0


# transformers: the name of a model type

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "olmo2", "cohere", "starcoder2")
_DECODERS = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt2", "gpt_neox", "opt", "falcon")
_OTHERS = ("bert", "roberta", "distilbert", "modernbert", "bart", "t5", "whisper", "wav2vec2", "vit", "dinov2", "clip")
TRANSFORMERS = (*_LLAMA_LIKE, *_DECODERS, *_OTHERS, "siglip")
GENERATING = ("llama", "gpt2", "mistral", "bart")


def transformers_model(name: str) -> tuple[nn.Module, Inputs]:
    model = tiny_models.tiny_model(name, attn_implementation="sdpa")
    for inputs in tiny_models.inputs_of(model):
        try:
            with torch.no_grad():
                model(**copy.deepcopy(inputs))
        except Exception:  # the next ones may fit
            continue
        return model, inputs
    raise ValueError(f"no inputs for {name}")


# torch


def torch_encoder() -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    padding = torch.arange(12).expand(2, 12) >= torch.tensor([[12], [7]])
    return nn.TransformerEncoder(layer, 2), {"src": torch.randn(2, 12, 32), "src_key_padding_mask": padding}


def torch_transformer() -> tuple[nn.Module, Inputs]:
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    return model, {"src": torch.randn(2, 12, 32), "tgt": torch.randn(2, 9, 32), "tgt_mask": mask, "tgt_is_causal": True}


def torch_attention() -> tuple[nn.Module, Inputs]:
    x = torch.randn(2, 12, 32)
    model = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    return model, {"query": x, "key": x, "value": x, "need_weights": False}


# diffusers


def unet() -> tuple[nn.Module, Inputs]:
    model = importlib.import_module("diffusers").UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, {"sample": torch.randn(2, 4, 16, 16), "timestep": 3, "encoder_hidden_states": torch.randn(2, 7, 24)}


def dit() -> tuple[nn.Module, Inputs]:
    model = importlib.import_module("diffusers").DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )
    times = {"timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([3, 9])}
    return model, {"hidden_states": torch.randn(2, 4, 8, 8), **times}


def flux() -> tuple[nn.Module, Inputs]:
    model = importlib.import_module("diffusers").FluxTransformer2DModel(
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
    states = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 24)}
    positions = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(6, 3)}
    return model, {**states, **positions, "pooled_projections": torch.randn(1, 24), "timestep": torch.tensor([1.0])}


def stable_diffusion_3() -> tuple[nn.Module, Inputs]:
    model = importlib.import_module("diffusers").SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        out_channels=4,
    )
    states = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 24)}
    return model, {**states, "pooled_projections": torch.randn(2, 24), "timestep": torch.tensor([1.0, 5.0])}


def autoencoder() -> tuple[nn.Module, Inputs]:
    model = importlib.import_module("diffusers").AutoencoderKL(
        block_out_channels=(32,), norm_num_groups=8, latent_channels=4, sample_size=16
    )
    return model, {"sample": torch.randn(1, 3, 16, 16)}


# Others


def x_transformers(kind: str) -> tuple[nn.Module, Inputs]:
    package = importlib.import_module("x_transformers")
    layers = getattr(package, kind)(dim=32, depth=2, heads=4, attn_flash=True, attn_dropout=0.1)
    model = package.TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)
    return model, {"x": torch.randint(100, (2, 12))}


def x_transformers_vit() -> tuple[nn.Module, Inputs]:
    package = importlib.import_module("x_transformers")
    layers = package.Encoder(dim=32, depth=2, heads=4, attn_flash=True)
    model = package.ViTransformerWrapper(image_size=16, patch_size=4, num_classes=10, attn_layers=layers)
    return model, {"img": torch.randn(2, 3, 16, 16)}


def litgpt(**options: Any) -> tuple[nn.Module, Inputs]:
    module = importlib.import_module("litgpt.model")
    sizes = {"block_size": 32, "vocab_size": 128, "padded_vocab_size": 128, "n_layer": 2, "n_head": 4, "n_embd": 32}
    config = module.Config(**sizes, **options)
    return module.GPT(config), {"idx": torch.randint(100, (2, 12))}


def openai_whisper() -> tuple[nn.Module, Inputs]:
    module = importlib.import_module("whisper.model")
    model = module.Whisper(module.ModelDimensions(16, 12, 32, 4, 2, 100, 16, 32, 4, 2))
    return model, {"mel": torch.randn(2, 16, 24), "tokens": torch.randint(100, (2, 9))}


CASES: dict[str, tuple[str, Case]] = {
    **{name: ("transformers", lambda name=name: transformers_model(name)) for name in TRANSFORMERS},
    "nn.TransformerEncoder": ("torch", torch_encoder),
    "nn.Transformer": ("torch", torch_transformer),
    "nn.MultiheadAttention": ("torch", torch_attention),
    "Stable Diffusion's UNet": ("diffusers", unet),
    "DiT": ("diffusers", dit),
    "Flux": ("diffusers", flux),
    "Stable Diffusion 3": ("diffusers", stable_diffusion_3),
    "AutoencoderKL": ("diffusers", autoencoder),
    "Decoder": ("x-transformers", lambda: x_transformers("Decoder")),
    "Encoder": ("x-transformers", lambda: x_transformers("Encoder")),
    "ViTransformerWrapper": ("x-transformers", x_transformers_vit),
    "GPT, as Pythia": ("litgpt", lambda: litgpt(rotary_percentage=0.25)),
    "GPT, as Llama": ("litgpt", lambda: litgpt(n_query_groups=2, norm_class_name="RMSNorm", bias=False)),
    "Whisper": ("openai-whisper", openai_whisper),
}


def results_of(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Its outputs and the gradients of its weights."""
    torch.manual_seed(2)
    outputs = [tensor for _, tensor in tiny_models.tensors_of(model(**copy.deepcopy(inputs)))]
    loss = sum(
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum()
        for out in outputs
        if out.requires_grad
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return [out.detach() for out in outputs], [grad for grad in grads if grad is not None]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, as part of the largest value of its tensor, or of a hundredth of the largest of all: some
    gradients, such as that of a bias of all keys, are zero but for roundings."""
    least = max(other[other.isfinite()].abs().max().item() for other in expected if other.numel()) / 100
    worst = 0.0
    for mine, other in zip(found, expected, strict=True):
        known = other.isfinite()
        if not torch.equal(known, mine.isfinite()):
            return float("inf")
        if known.any():
            size = max(other[known].abs().max().item(), least)
            worst = max(worst, (mine - other)[known].abs().max().item() / size)
    return worst


def check(name: str) -> Result:
    """An evaluation with gradients, a step of training with dropout, and, of some, a generation."""
    torch.manual_seed(0)
    model, inputs = CASES[name][1]()
    tiny_models.sharpen(model)
    model.eval()
    expected = results_of(model, inputs)
    report, result = flashtile.install(), Result()
    report.clear()
    try:
        found = results_of(model, inputs)
        result.difference = max(difference(*pair) for pair in zip(found, expected, strict=True))
        model.train()
        results_of(model, inputs)
        model.eval()
        if name in GENERATING:
            model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    finally:
        flashtile.uninstall()
    result.served = sum(count for key, count in report.served.items() if not torch_ops.is_backward(key))
    for (key, reason), count in report.left_to_torch.items():
        if not torch_ops.is_backward(key):
            result.left[reason] += count
    return result


def rows(names: list[str]) -> Iterator[tuple[str, str, Result | str]]:
    for name in names:
        package = CASES[name][0]
        try:
            yield package, name, check(name)
        except ImportError as error:
            yield package, name, str(error)


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    results, absent = [], []
    print("| package | model | served | left | largest difference |\n|---|---|---:|---:|---:|")
    for package, name, result in rows(names):
        if isinstance(result, str):
            absent.append(f"{package}, {name}: {result}")
            continue
        results.append(result)
        left = f"{result.left.total()}: {'; '.join(result.left)}" if result.left else "0"
        print(f"| {package} | {name} | {result.served} | {left} | {result.difference:.0e} |", flush=True)
    served, left_calls = sum(r.served for r in results), sum(r.left.total() for r in results)
    worst = max(result.difference for result in results)
    packages = dict.fromkeys(CASES[name][0] for name in names)
    print(f"| | all {len(results)} | {served} | {left_calls} | {worst:.0e} |\n")
    print(
        f"{100 * served / (served + left_calls):.1f} % served; least of a model {min(r.share() for r in results):.0%}"
    )
    for package in packages:
        try:
            print(package, version(package))
        except ImportError:
            print(package, "is not installed")
    print("left out:", *absent, sep="\n  ")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
