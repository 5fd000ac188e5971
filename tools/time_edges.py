"""Calls beside the points that kernels are tuned at, each next to the call at the point: more query heads to a key head
than a tile of 64 rows holds, tensors off 16 bytes, small training steps, very many tiny sequences. bfloat16, GPU time
by graphs, in random order. Needs a Hopper GPU.

PYTHONPATH=src python tools/time_edges.py [FOLDER]      writes edges_bf16.csv there, or to results/<device>
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from measuring import compile_ahead, results_file
from torch import Tensor

import flashtile
from flashtile import families
from flashtile.families.assemble import clear_plans
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.rows import Environment, Writer
from flashtile.lab.bench.timing import capture, median_ms

ROUNDS, CALLS = 7, 5
HEADS = (65, 96, 128)
DECODE = ((1, 8192), (8, 4096), (64, 2048))  # sequences, keys
ALIGNMENT = ((4, 16, 512, 64), (2, 16, 2048, 64), (1, 16, 4096, 128), (4, 8, 1024, 128), (8, 12, 300, 64))
SMALL = ((1, 6, 577, 48), (4, 10, 256, 128), (2, 12, 197, 64), (1, 16, 384, 64), (8, 12, 256, 64))
NUM_TINY, TINY = 200_000, 4
Thunk = Callable[[], Any]
Make = Callable[[], Thunk]


@dataclass(frozen=True)
class EdgeRow:
    what: str
    point: str
    base_us: float
    edge_us: float
    ratio: float
    more_us: float
    env: Environment


@dataclass(frozen=True)
class Pair:
    what: str
    point: str
    base: Make
    edge: Make


def draw(*sizes: int, offset: int = 0) -> Tensor:
    """bfloat16 numbers, so many elements behind an aligned address."""
    count = 1
    for size in sizes:
        count *= size
    return torch.randn(count + offset, dtype=torch.bfloat16, device="cuda")[offset:].view(sizes)


def decode(batch: int, heads: int, num_keys: int) -> Thunk:
    q, k, v = draw(batch, heads, 1, 128), draw(batch, 1, num_keys, 128), draw(batch, 1, num_keys, 128)
    return lambda: flashtile.attention(q, k, v)


def backward(sizes: tuple[int, int, int, int], offset: int = 0, dout_offset: int = 0) -> Thunk:
    q, k, v = (draw(*sizes, offset=offset).requires_grad_() for _ in range(3))
    out = flashtile.attention(q, k, v, causal=True)
    dout = draw(*sizes, offset=dout_offset)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def step(sizes: tuple[int, int, int, int], *names: str) -> Thunk:
    q, k, v = (draw(*sizes).requires_grad_() for _ in range(3))
    dout = draw(*sizes)

    def run() -> Any:
        with families.forced(*names) if names else nullcontext():
            clear_plans()
            return torch.autograd.grad(flashtile.attention(q, k, v), (q, k, v), dout)

    return run


def tiny(is_packed: bool) -> Thunk:
    q, k, v = draw(NUM_TINY, 1, 8, 64), draw(NUM_TINY, TINY, 1, 64), draw(NUM_TINY, TINY, 1, 64)
    if not is_packed:
        return lambda: flashtile.attention(q, k, v, layout="bshd")
    queries = torch.arange(NUM_TINY + 1, dtype=torch.int32, device="cuda")
    flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
    return lambda: flashtile.attention_varlen(*flat, queries, TINY * queries)


def pairs() -> Iterator[Pair]:
    for batch, num_keys in DECODE:
        for heads in HEADS:
            point = f"B{batch} S{num_keys} d128, {heads} heads for 64"
            yield Pair(
                "heads of a key head",
                point,
                lambda batch=batch, num_keys=num_keys: decode(batch, 64, num_keys),  # type: ignore[misc]
                lambda batch=batch, num_keys=num_keys, heads=heads: decode(batch, heads, num_keys),  # type: ignore[misc]
            )
    for sizes in ALIGNMENT:
        for name, offsets in {"dO": (0, 1), "q, k, v": (1, 0)}.items():
            yield Pair(
                "backward off 16 bytes",
                f"{name}: B{sizes[0]} H{sizes[1]} S{sizes[2]} d{sizes[3]}",
                lambda sizes=sizes: backward(sizes),  # type: ignore[misc]
                lambda sizes=sizes, offsets=offsets: backward(sizes, *offsets),  # type: ignore[misc]
            )
    for sizes in SMALL:
        yield Pair(
            "small steps beside the Hopper kernels by name",
            f"B{sizes[0]} H{sizes[1]} S{sizes[2]} d{sizes[3]}",
            lambda sizes=sizes: step(sizes, "fwd_sm90_short", "fwd_sm90", "bwd_sm90"),  # type: ignore[misc]
            lambda sizes=sizes: step(sizes),  # type: ignore[misc]
        )
    yield Pair(
        "tiny sequences, packed instead of dense", f"{NUM_TINY} of {TINY} keys", lambda: tiny(False), lambda: tiny(True)
    )


def main() -> None:
    env = facts.environment("cuda", sys.argv[1:], "python tools/time_edges.py")
    path = results_file("edges_bf16.csv", *sys.argv[1:2])
    stream, all_pairs = torch.cuda.Stream(), list(pairs())
    compile_ahead((make() for pair in all_pairs for make in (pair.base, pair.edge)), stream)
    with Writer(path, EdgeRow) as writer:
        for pair in all_pairs:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                calls = {"base": pair.base(), "edge": pair.edge()}
                for call in calls.values():
                    call()
            # A graph keeps the kernels that its capture took
            graphs = {name: capture([calls[name]] * CALLS, stream) for name in random.sample(list(calls), 2)}
            found = median_ms(graphs, ROUNDS)
            base, edge = (1000 * found[name] / CALLS for name in ("base", "edge"))
            writer.add([EdgeRow(pair.what, pair.point, base, edge, edge / base, edge - base, env)])
            print(f"{pair.what:45} {pair.point:35} {base:9.1f} {edge:9.1f} us {edge / base:6.3f}", flush=True)
            del graphs, calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
