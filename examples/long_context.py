"""Trains a small language model on one long sequence, first on one rank, then with its rows spread over several, and
compares losses and memory.

    python examples/long_context.py                     # 16,384 tokens over 4 CPU processes
    python examples/long_context.py --tokens 65536      # some minutes
    python examples/long_context.py --device cuda --tokens 262144

The model knows nothing of ranks: it calls torch's scaled_dot_product_attention. On several ranks each has its rows of
the tokens, the labels and the positions; `context_parallel` makes attention look at all of them; gradients are summed.

Of each rank a table has its rows, the bytes of K and V of these rows in a layer, and the most memory in use: on a GPU
that of torch's allocator, on a CPU the resident set of its process, with Python and torch, as Linux tells it before and
after training. With a GPU for each rank messages go by NCCL; ranks that share one use gloo. Exits 1 if losses differ by
more than 1e-4.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from flashtile.distributed import context_parallel, position_ids, shard
from flashtile.distributed.launch import on_ranks

VOCABULARY, WIDTH, HEADS = 64, 64, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        wide = 2 * WIDTH
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.kv_bytes = k.nbytes + v.nbytes
        out = nn.functional.scaled_dot_product_attention(rotated(q, angles), rotated(k, angles), v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        half = WIDTH // HEADS // 2
        angles = positions[:, None] * 10000 ** (-torch.arange(half, device=positions.device) / half)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(x)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def data(count: int) -> tuple[Tensor, Tensor]:
    """Tokens that repeat what stood a quarter of the sequence before, and what follows each."""
    part = torch.randint(0, VOCABULARY, (-(-(count + 1) // 4),), generator=torch.Generator().manual_seed(1))
    tokens = part.repeat(4)[None, : count + 1]
    return tokens[:, :-1], tokens[:, 1:]


class Rank(NamedTuple):
    """The rows of a rank and its memory in bytes; peaks are 0 where they cannot be told."""

    rows: int
    kv: int
    peak_before: int
    peak: int


def peak_memory(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def train(group: Any, options: argparse.Namespace) -> tuple[list[float], list[Rank], float]:
    """Runs on every rank. Returns the losses, what each rank needed, and the seconds of the steps."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // group.size()))
    torch.manual_seed(0)
    model, count = Model(options.layers).to(options.device), options.tokens
    tokens, labels = (tensor.to(options.device) for tensor in data(count))
    positions = torch.arange(count, device=options.device)
    place: Any = nullcontext()
    if group.size() > 1:
        tokens, labels, positions = shard(tokens, 1), shard(labels, 1), position_ids(count, device=options.device)
        place = context_parallel(seqlen=count, strategy=options.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses, before, begin = [], peak_memory(options.device), time.perf_counter()
    with place:
        for _ in range(options.steps):
            logits = model(tokens, positions)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
            total = loss.detach()
            for tensor in (total, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(tensor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    seconds = time.perf_counter() - begin
    mine = Rank(tokens.shape[1], model.layers[0].kv_bytes, before, peak_memory(options.device))
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, mine)
    return losses, ranks, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="default: 16384")
    parser.add_argument("--ranks", type=int, default=4, help="default: 4")
    parser.add_argument("--steps", type=int, default=2, help="default: 2")
    parser.add_argument("--layers", type=int, default=1, help="default: 1")
    parser.add_argument("--strategy", default="auto", choices=("auto", "ring", "ulysses"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    for name in ("tokens", "ranks", "steps", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}; accepted: 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda; accepted: cpu, since torch finds no GPU here")

    has_a_gpu_each = options.device == "cuda" and torch.cuda.device_count() >= options.ranks
    place = {"device": options.device, "backend": "nccl" if has_a_gpu_each else "gloo"}
    alone, one, alone_s = on_ranks(train, 1, options, **place)
    spread, several, spread_s = on_ranks(train, options.ranks, options, **place)
    print(f"{options.tokens:,} tokens: {alone_s:.1f} s on one rank, {spread_s:.1f} s on {options.ranks}")
    table = Table("rank")
    peak = "allocated" if options.device == "cuda" else "resident"
    for column in ("rows", "K and V, KiB", f"{peak} before, MiB", f"most {peak}, MiB", "more, MiB"):
        table.add_column(column, justify="right")
    for name, rank in [("alone", one[0]), *((str(index), rank) for index, rank in enumerate(several))]:
        memory = (rank.peak_before, rank.peak, rank.peak - rank.peak_before)
        cells = (f"{size / 2**20:.1f}" if rank.peak else "not told" for size in memory)
        table.add_row(name, f"{rank.rows:,}", f"{rank.kv / 2**10:.0f}", *cells)
    losses = Table("step", "one rank", f"{options.ranks} ranks", "difference")
    for step, (ours, theirs) in enumerate(zip(spread, alone, strict=True)):
        losses.add_row(str(step), f"{theirs:.6f}", f"{ours:.6f}", f"{ours - theirs:.1e}")
    Console().print(table, losses)
    return int(not max(abs(ours - theirs) for ours, theirs in zip(spread, alone, strict=True)) <= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
