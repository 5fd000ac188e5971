"""Trains a small GPT with flashtile's attention and with SDPA's, on the same data from the same start, and compares.

    python examples/train_gpt.py                 # on a GPU: 12 layers, width 2048, 4096 tokens, bfloat16, 50 steps
    python examples/train_gpt.py --compile       # the same under torch.compile
    python examples/train_gpt.py --device cpu    # 2 layers, width 128, 512 tokens, 10 steps

Each line of the table is one attention: the mean loss of the last ten steps, and the median time of a step. Losses
differ in the last digits, as those of two SDPA kernels do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
VOCABULARY = 256


def by_flashtile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashtile.attention(q, k, v, causal=True)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# Name -> the call, and the SDPA kernel that it is pinned to
ATTENTIONS: dict[str, tuple[Attend, SDPBackend | None]] = {
    "flashtile": (by_flashtile, None),
    "sdpa": (by_sdpa, None),
    "sdpa-flash": (by_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": (by_sdpa, SDPBackend.CUDNN_ATTENTION),
}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, options: argparse.Namespace, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, options.width)
        self.positions = nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads, attend) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def batches(options: argparse.Namespace) -> list[Tensor]:
    """Text of a random Markov chain: each token has eight likely successors, so there is something to learn."""
    generator = torch.Generator().manual_seed(options.seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 8), generator=generator)
    choices = torch.randint(8, (options.steps, options.batch, options.length + 1), generator=generator)
    state, columns = torch.zeros(options.steps, options.batch, dtype=torch.long), []
    for choice in choices.unbind(-1):
        state = successors[state, choice]
        columns.append(state)
    return list(torch.stack(columns, -1).to(options.device))


def train(name: str, options: argparse.Namespace, data: list[Tensor]) -> tuple[list[float], list[float]]:
    """(loss, seconds) of every step."""
    attend, backend = ATTENTIONS[name]
    torch.manual_seed(options.seed)
    model = Gpt(options, attend).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run = torch.compile(model) if options.compile else model
    losses, seconds = [], []
    with nullcontext() if backend is None else sdpa_kernel(backend):
        for batch in data:
            begin = time.perf_counter()
            with torch.autocast(options.device, torch.bfloat16):
                logits = run(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the step
            seconds.append(time.perf_counter() - begin)
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", default=None, help="names, separated by commas; default: all for the device")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    large = {"layers": 12, "width": 2048, "heads": 16, "length": 4096, "batch": 2, "steps": 50, "seed": 0}
    small = {"layers": 2, "width": 128, "heads": 4, "length": 512, "batch": 2, "steps": 10, "seed": 0}
    for size in large:
        parser.add_argument(f"--{size}", type=int, help=f"default: {large[size]} on a GPU, {small[size]} on a CPU")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; accepted: cpu, since torch finds no GPU here")
    for size, default in (small if options.device == "cpu" else large).items():
        if getattr(options, size) is None:
            setattr(options, size, default)
        if size != "seed" and getattr(options, size) < 1:
            parser.error(f"--{size}: got {getattr(options, size)}; accepted: 1 or more")
    if options.width % options.heads:
        parser.error(f"--width: got {options.width}; accepted: multiples of --heads, {options.heads}")
    here = ("flashtile", "sdpa") if options.device == "cpu" else tuple(ATTENTIONS)
    names = options.attentions.split(",") if options.attentions else here
    if unknown := [name for name in names if name not in ATTENTIONS]:
        parser.error(f"--attentions: got {', '.join(unknown)}; accepted: {', '.join(ATTENTIONS)}")
    data = batches(options)
    print(f"{'attention':12} {'loss, last 10':>14} {'ms per step':>12}")
    for name in names:
        losses, seconds = train(name, options, data)
        warm = seconds[len(seconds) // 5 :] or seconds  # the first steps compile
        print(f"{name:12} {statistics.fmean(losses[-10:]):14.4f} {1e3 * statistics.median(warm):12.1f}", flush=True)


if __name__ == "__main__":
    main()
