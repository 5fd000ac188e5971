"""Fine-tunes a Hugging Face model by LoRA on packed documents, beside the same documents padded, and compares.

    python examples/finetune_lora.py                              # a small Llama with random weights, no download
    python examples/finetune_lora.py --model Qwen/Qwen2.5-0.5B    # any causal language model of the hub
    python examples/finetune_lora.py --peft                       # adapters of the peft package, not those below

It needs transformers. "padded" gives the model every document as a row as long as the longest, and torch's attention a
mask. "packed" puts the documents one behind the other in one row; flashtile's attention keeps each to itself, and
nothing is computed for padding. Both checkpoint activations, start from the same weights and take turns. The weights
are bfloat16 on a GPU, float32 on a CPU; adapters are float32. The table has tokens of documents in a second and the
time of a step, medians over the steps; the most memory that tensors of a step take beyond weights and optimizer; and
losses. Exits 1 if the losses of a step differ by more than BOUND, as part of the loss.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig

from flashtile.integrations.transformers import register
from flashtile.lab.bench.memory import peak_bytes

BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class LoRA(nn.Module):
    """A linear layer that stays as it is, and beside it the product of two thin matrices, which is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, device=base.weight.device) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x.float(), self.down), self.up).to(x.dtype)


def add_adapters(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """Freezes the model and gives its attention layers adapters."""
    torch.manual_seed(options.seed)
    if options.peft:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=list(TARGETS)))
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in TARGETS:
                setattr(parent, name, LoRA(child, options.rank))
    return model


def build(attention: str, options: argparse.Namespace) -> Any:
    chosen = {"attn_implementation": attention, "dtype": options.dtype}
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, **chosen).to(options.device)
    torch.manual_seed(options.seed)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=options.layers, vocab_size=256)
    return AutoModelForCausalLM.from_config(config, **chosen).to(options.device)


def padded(documents: list[Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Returns what the model gets, and the label of each of its rows; -100 where there is none."""
    tokens = pad_sequence(documents, batch_first=True)
    keep = pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
    labels = pad_sequence([F.pad(document[1:], (0, 1), value=-100) for document in documents], True, -100)
    return {"input_ids": tokens, "attention_mask": keep}, labels


def packed(documents: list[Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Returns the same for one row."""
    tokens, lengths = torch.cat(documents)[None], torch.tensor([0, *map(len, documents)], device=documents[0].device)
    starts, longest = lengths.cumsum(0, dtype=torch.int32), max(map(len, documents))
    positions = torch.cat([torch.arange(len(document), device=tokens.device) for document in documents])[None]
    ends = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    labels = torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in documents])[None]
    return {"input_ids": tokens, "position_ids": positions, **ends}, labels


class Run:
    """A model of its own with adapters, and what was measured of it."""

    def __init__(self, attention: str, arrange: Any, options: argparse.Namespace) -> None:
        self.model, self.arrange, self.options = add_adapters(build(attention, options), options), arrange, options
        self.model.train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-2)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.rows = 0

    def step(self, documents: list[Tensor]) -> None:
        begin = time.perf_counter()
        inputs, labels = self.arrange(documents)
        logits = self.model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the step
        self.seconds.append(time.perf_counter() - begin)
        self.rows += labels.numel()


def draw(options: argparse.Namespace) -> list[list[Tensor]]:
    """Returns the documents of every step: most are short. Each token has four likely successors."""
    generator = torch.Generator().manual_seed(options.seed)
    successors, steps = torch.randint(256, (256, 4), generator=generator), []
    for _ in range(options.steps):
        shares = torch.rand(options.documents, generator=generator) ** 2
        shares[0] = 1  # one is as long as a document may be
        lengths = (2 + shares * (options.length - 2)).int().tolist()
        choices = torch.randint(4, (options.documents, options.length), generator=generator)
        columns = [torch.randint(256, (options.documents,), generator=generator)]
        for choice in choices[:, 1:].unbind(1):
            columns.append(successors[columns[-1], choice])
        rows = torch.stack(columns, 1).to(options.device)
        steps.append([row[:length] for row, length in zip(rows, lengths, strict=True)])
    return steps


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder for from_pretrained; default: a Llama with random weights")
    parser.add_argument("--peft", action="store_true", help="adapters of the peft package")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    sizes = {"layers": 4, "rank": 8, "documents": 8, "length": 512, "steps": 6, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    for name in sizes:
        least = {"seed": 0, "length": 2}.get(name, 1)
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}; accepted: {least} or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; accepted: cpu, since torch finds no GPU here")
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    register()
    runs = {"padded, sdpa": Run("sdpa", padded, options), "packed, flashtile": Run("flashtile", packed, options)}
    data = draw(options)
    for documents in data:
        for run in runs.values():
            run.step(documents)
    table = Table("documents")
    for column in ("rows", "tokens/s", "step ms", "step MiB", "first loss", "last loss"):
        table.add_column(column, justify="right")
    counts = [sum(map(len, documents)) for documents in data]
    for name, run in runs.items():
        speed = statistics.median(count / s for count, s in zip(counts, run.seconds, strict=True))
        cells = (f"{run.rows}", f"{speed:.0f}", f"{1e3 * statistics.median(run.seconds):.0f}")
        losses = (f"{run.losses[0]:.5f}", f"{run.losses[-1]:.5f}")
        peak = peak_bytes(lambda run=run: run.step(data[0]), options.device)
        table.add_row(name, *cells, f"{peak / 2**20:.0f}", *losses)
    Console().print(table)
    losses = [run.losses[: options.steps] for run in runs.values()]
    difference = max(abs(one - other) / one for one, other in zip(*losses, strict=True))
    print(f"{sum(counts)} tokens in documents; losses of a step differ by {difference:.1e} of the loss at most")
    return 0 if difference <= BOUND[options.dtype] else 1


if __name__ == "__main__":
    sys.exit(main())
