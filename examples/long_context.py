"""Trains a small language model on one long sequence, first on one rank, then with its rows spread over several, and
compares the losses.

    python examples/long_context.py                          # 65,536 tokens over 4 CPU processes: some minutes
    python examples/long_context.py --tokens 2048 --ranks 2  # seconds

The model knows nothing of ranks: it calls torch's scaled_dot_product_attention. On several ranks each has its rows of
the tokens, the labels and the positions; `context_parallel` makes attention look at all of them; gradients are summed.
"""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from flashtile.distributed import context_parallel, position_ids, shard

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
        angles = positions[:, None] * 10000 ** (-torch.arange(half) / half)
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


def train(options: argparse.Namespace, over_ranks: bool) -> list[float]:
    torch.manual_seed(0)
    model, count = Model(options.layers), options.tokens
    tokens, labels = data(count)
    positions = torch.arange(count)
    place: Any = nullcontext()
    if over_ranks:
        tokens, labels, positions = shard(tokens, 1), shard(labels, 1), position_ids(count)
        place = context_parallel(seqlen=count, strategy=options.strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    with place:
        for _ in range(options.steps):
            logits = model(tokens, positions)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
            loss.backward()
            total = loss.detach()
            if over_ranks:
                for tensor in (total, *(parameter.grad for parameter in model.parameters())):
                    dist.all_reduce(tensor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    return losses


def worker(rank: int, options: argparse.Namespace, port: int, queue: Any) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    store = dist.TCPStore("127.0.0.1", port, options.ranks, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    losses = train(options, over_ranks=True)
    if rank == 0:
        queue.put(losses)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--strategy", default="auto", choices=("auto", "ring", "ulysses"))
    options = parser.parse_args()
    for name in ("tokens", "ranks", "steps", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}; accepted: 1 or more")
    start = time.perf_counter()
    alone = train(options, over_ranks=False)
    middle = time.perf_counter()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    processes = mp.start_processes(worker, (options, port, queue), options.ranks, join=False, start_method="spawn")
    assert processes is not None
    while not processes.join():  # raises what a worker raised
        pass
    spread = queue.get()
    end = time.perf_counter()
    print(f"{options.tokens:,} tokens: {middle - start:.0f} s on one rank, {end - middle:.0f} s on {options.ranks}")
    print(f"{'step':>4}{'one rank':>12}{options.ranks:>7} ranks{'difference':>13}")
    for step, (one, many) in enumerate(zip(alone, spread, strict=True)):
        print(f"{step:4}{one:12.6f}{many:13.6f}{many - one:13.1e}")
    if max(abs(one - many) for one, many in zip(alone, spread, strict=True)) > 1e-4:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
