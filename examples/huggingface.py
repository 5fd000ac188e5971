"""Generates and trains with a Hugging Face model on torch's attention and on flashtile's, and compares.

    python examples/huggingface.py                              # a small Llama with random weights: nothing to download
    python examples/huggingface.py --model Qwen/Qwen2.5-0.5B    # any causal language model of the hub
    python examples/huggingface.py --device cuda --length 4096  # bfloat16 on a GPU, float32 on a CPU

It needs transformers. The ways are:

    sdpa        attn_implementation="sdpa", transformers' default
    flashtile   attn_implementation="flashtile", after flashtile.integrations.transformers.register()
    install()   the model of "sdpa" as it is, after flashtile.install(); it has not run on a GPU yet

Each has a model of its own with the same weights, and they take turns. The table has the tokens generated in a second
and the time of a step of training, medians over the rounds; the most memory that tensors of a step take beyond weights
and optimizer; the last loss; the largest difference of the logits from those of "sdpa", before training, as part of the
largest logit; and how many generated tokens are those of "sdpa". Exits 1 if logits differ by more than BOUND, or if
install() left a call to torch. In bfloat16 two nearly equal logits may change places, and with them all tokens behind:
different tokens alone are no error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import flashtile
from flashtile.integrations.transformers import register
from flashtile.lab.bench.memory import peak_bytes

BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def build(attention: str, options: argparse.Namespace) -> Any:
    chosen = {"attn_implementation": attention, "dtype": options.dtype}
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, **chosen).to(options.device)
    torch.manual_seed(options.seed)
    heads = max(options.width // 64, 2)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=4096,
        initializer_range=0.05,  # with 0.02 every generated token would be the same, whatever attention does
    )
    return AutoModelForCausalLM.from_config(config, **chosen).to(options.device)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Way:
    """A model of its own, and what was measured of it."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        self.model = build("flashtile" if name == "flashtile" else "sdpa", options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        rows, generator = (options.batch, options.length), torch.Generator().manual_seed(options.seed)
        tokens = torch.randint(self.model.config.vocab_size, rows, generator=generator)
        self.tokens = tokens.to(options.device)
        self.generate_s: list[float] = []
        self.step_s: list[float] = []
        self.losses: list[float] = []

    @contextmanager
    def attention(self) -> Iterator[None]:
        if self.name == "install()":
            flashtile.install()
        try:
            yield
        finally:
            flashtile.uninstall()  # does nothing where nothing is installed

    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.model.eval()(self.tokens[:1]).logits.float()

    def generate(self) -> Tensor:
        """Returns the new tokens, without the prompt."""
        count, prompt = self.options.new, {"input_ids": self.tokens, "attention_mask": torch.ones_like(self.tokens)}
        self.model.eval()
        begin = now(self.options.device)
        found = self.model.generate(
            **prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        self.generate_s.append(now(self.options.device) - begin)
        return found[:, self.options.length :]

    def step(self) -> None:
        self.model.train()
        begin = now(self.options.device)
        loss = self.model(self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step_s.append(now(self.options.device) - begin)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder for from_pretrained; default: a Llama with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    sizes = {"layers": 4, "width": 256, "batch": 2, "length": 512, "new": 32, "rounds": 3, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    for name in sizes:
        if name != "seed" and getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}; accepted: 1 or more")
    if options.width % 128:
        parser.error(f"--width: got {options.width}; accepted: multiples of 128")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; accepted: cpu, since torch finds no GPU here")
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    register()
    flashtile.install().clear()  # its counts begin at zero
    flashtile.uninstall()
    ways = [Way(name, options) for name in ("sdpa", "flashtile", "install()")]
    logits, tokens, peaks = [], [], []
    for way in ways:
        with way.attention():
            logits.append(way.logits())
            tokens.append(way.generate())
            way.step()  # the first calls of a kind compile kernels
            peaks.append(peak_bytes(way.step, options.device))
        way.generate_s.clear()
        way.step_s.clear()
    for _ in range(options.rounds):  # in turns: what else runs on the machine slows all of them
        for way in ways:
            with way.attention():
                way.generate()
                way.step()

    table, differences = Table("attention"), []
    for column in ("tokens/s", "step ms", "step MiB", "loss", "logits differ", "same tokens"):
        table.add_column(column, justify="right")
    for place, way in enumerate(ways):
        difference = ((logits[place] - logits[0]).abs().max() / logits[0].abs().max()).item()
        same = f"{int((tokens[place] == tokens[0]).sum())} of {tokens[0].numel()}"
        speed = f"{tokens[0].numel() / statistics.median(way.generate_s):.0f}"
        times = (speed, f"{1e3 * statistics.median(way.step_s):.0f}", f"{peaks[place] / 2**20:.0f}")
        table.add_row(way.name, *times, f"{way.losses[-1]:.5f}", f"{difference:.1e}", same)
        differences.append(difference)
    Console().print(table)
    report = flashtile.install()
    flashtile.uninstall()
    left = report.left_to_torch.total()
    print(report if left else f"install(): {report.served.total()} calls served, none left to torch")
    return int(not max(differences) <= BOUND[options.dtype] or left > 0)


if __name__ == "__main__":
    sys.exit(main())
