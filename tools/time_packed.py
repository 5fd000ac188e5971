"""Packed sequences without max_seqlen beside the same call with it: forward passes, decode steps, backward passes and
gradients of a bias, of equal lengths, of lengths drawn log-uniformly, and of one long sequence among single tokens.
bfloat16, GPU time by graphs, in random order. Needs a GPU.

PYTHONPATH=src python tools/time_packed.py [FOLDER]      writes packed_bf16.csv there, or to results/<device>
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measuring import compile_ahead, results_file
from torch import Tensor

import flashtile
from flashtile.lab.bench import device as facts
from flashtile.lab.bench.rows import Environment, Writer
from flashtile.lab.bench.timing import capture, median_ms, once

BATCHES = (1, 2, 16, 128, 1024, 4096)
LENGTHS = ("equal", "log-uniform", "one long")
PASSES = ("prefill", "decode", "backward", "dbias")
TOTAL = 32768  # tokens of all sequences
LONG = 16384
HEADS, HEADS_KV, HEAD_DIM = 16, 4, 128
ROUNDS, CALLS = 12, 5
SLOW_MS, SLOW_ROUNDS = 5.0, 5  # calls that take longer are timed one at a time


@dataclass(frozen=True)
class PackedRow:
    direction: str  # one of PASSES
    lengths: str
    batch: int
    longest: int
    with_us: float
    without_us: float
    ratio: float
    env: Environment


def lengths_of(kind: str, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if kind == "equal":
        return torch.full((batch,), TOTAL // batch)
    if kind == "one long":
        lengths = torch.ones(batch, dtype=torch.int64)
        lengths[int(torch.randint(batch, (), generator=generator))] = LONG
        return lengths
    sizes = (torch.rand(batch, generator=generator) * 6).exp()
    return (sizes * (TOTAL / sizes.sum())).long().clamp_min(1)


def cumulative(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)


def make_call(direction: str, kind: str, batch: int) -> Callable[[bool], Callable[[], Any]]:
    """Returns a function from whether max_seqlen is given to the call."""
    lengths = lengths_of(kind, batch)
    keys, longest_k = cumulative(lengths), int(lengths.max())
    queries, longest_q = (keys, longest_k)
    if direction == "decode":
        queries, longest_q = cumulative(torch.ones_like(lengths)), 1
    total_q, total_k = int(queries[-1]), int(keys[-1])

    def draw(total: int, heads: int) -> Tensor:
        return torch.randn(total, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    q, k, v = draw(total_q, HEADS), draw(total_k, HEADS_KV), draw(total_k, HEADS_KV)
    bias = None
    if direction == "dbias":
        bias = torch.randn(1, 1, longest_q, longest_k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    if direction in ("backward", "dbias"):
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    dout = torch.randn_like(q, requires_grad=False)

    def call(is_given: bool) -> Callable[[], Any]:
        most = (longest_q, longest_k) if is_given else (None, None)

        def attend() -> Any:
            return flashtile.attention_varlen(q, k, v, queries, keys, *most, causal=True, bias=bias)

        if direction in ("prefill", "decode"):
            return attend
        out = attend()
        inputs = [q, k, v] if bias is None else [q, k, v, bias]
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return call


def compare(graphs: Mapping[bool, Callable[[], Any]], rounds: int) -> tuple[float, float, float]:
    """Median milliseconds with and without, and the median of the ratios of rounds: the clock of a GPU moves from round
    to round. Each round has an order of its own."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for is_given in random.sample(list(graphs), 2):
            times[is_given].append(median_ms({"": graphs[is_given]}, 1, calls=1)[""])
    ratios = [left_out / given for given, left_out in zip(times[True], times[False], strict=True)]
    return statistics.median(times[True]), statistics.median(times[False]), statistics.median(ratios)


def points() -> Iterator[tuple[str, str, int]]:
    for direction in PASSES:
        for kind in LENGTHS:
            for batch in BATCHES:
                if not (direction == "dbias" and batch == 1):  # a bias of 2 GiB
                    yield direction, kind, batch


def main() -> None:
    env = facts.environment("cuda", sys.argv[1:], "python tools/time_packed.py")
    path = results_file("packed_bf16.csv", *sys.argv[1:2])
    stream, worst = torch.cuda.Stream(), 0.0
    # A backward pass runs on the stream of its forward pass: all on the one that graphs capture
    makes = (make_call(*point) for point in points())
    compile_ahead((make(is_given) for make in makes for is_given in (True, False)), stream)
    with Writer(path, PackedRow) as writer:
        for direction, kind, batch in points():
            make = make_call(direction, kind, batch)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                calls = {is_given: make(is_given) for is_given in (True, False)}
                for call in calls.values():
                    call()
                is_slow = once(calls[True], "cuda")[1] > SLOW_MS / 1000
            count = 1 if is_slow else CALLS
            graphs = {is_given: capture([calls[is_given]] * count, stream) for is_given in (True, False)}
            given, left_out, ratio = compare(graphs, SLOW_ROUNDS if is_slow else ROUNDS)
            given, left_out = (1000 * ms / count for ms in (given, left_out))
            worst = max(worst, ratio)
            longest = int(lengths_of(kind, batch).max())
            writer.add([PackedRow(direction, kind, batch, longest, given, left_out, ratio, env)])
            print(f"{direction:9} {kind:12} {batch:5} {given:9.1f} {left_out:9.1f} us {ratio:6.3f}", flush=True)
            del graphs, calls, make
            torch.cuda.empty_cache()
    print(f"worst ratio {worst:.3f}")


if __name__ == "__main__":
    main()
