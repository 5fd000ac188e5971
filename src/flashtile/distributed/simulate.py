"""Predictions for many ranks and long sequences, by the cost model, and runs of a few ranks over a slow link to compare
them with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flashtile import ops
from flashtile.distributed import ulysses
from flashtile.distributed.attention import ring_attention
from flashtile.distributed.cost import (
    LINKS,
    PASSES,
    Device,
    Estimate,
    Link,
    Work,
    estimate_ring,
    estimate_ulysses,
    ring_steps,
    ring_times,
)
from flashtile.distributed.launch import on_ranks
from flashtile.distributed.transport import slow_link
from flashtile.problem import AttentionArgs

_GRADS = (True, True, True, False, False)


@dataclass(frozen=True)
class Point:
    """One prediction: a forward and a backward pass of one layer."""

    num_ranks: int
    seqlen: int
    link: str
    strategy: str
    total_s: float
    compute_s: float
    message_s: float
    overlap: float
    sent_bytes: int
    memory_bytes: int  # of one rank: q, k, v, out, their gradients and what the strategy adds


def work(seqlen: int, heads: int, heads_kv: int, head_dim: int, is_causal: bool = True, element_bytes: int = 2) -> Work:
    right = 0 if is_causal else -1
    return Work(1, heads, heads_kv, seqlen, seqlen, head_dim, head_dim, element_bytes, right=right)


def predict(one: Work, num_ranks: int, link: Link, device: Device) -> list[Point]:
    """Every strategy that takes the problem."""
    estimates = [estimate_ring(one, num_ranks, device, link)]
    if ulysses.refusal(one.heads, one.heads_kv, num_ranks) is None:
        estimates.append(estimate_ulysses(one, num_ranks, device, link))
    return [_point(one, num_ranks, link, estimate) for estimate in estimates]


def _point(one: Work, num_ranks: int, link: Link, estimate: Estimate) -> Point:
    rows = -(-one.seqlen_q // num_ranks)
    of_heads = one.heads + one.heads_kv
    plain = 2 * rows * one.batch * of_heads * (one.head_dim + one.head_dim_v) * one.element_bytes
    return Point(
        num_ranks,
        one.seqlen_q,
        link.name,
        estimate.strategy,
        estimate.total_s,
        estimate.compute_s,
        estimate.message_s,
        estimate.overlap,
        estimate.sent_bytes,
        plain + estimate.extra_bytes,
    )


def sweep(
    ranks: Sequence[int],
    rows: Sequence[int],
    links: Sequence[str],
    device: Device,
    heads: int,
    heads_kv: int,
    head_dim: int,
    is_causal: bool = True,
) -> list[Point]:
    """Over numbers of ranks, rows of each, and links."""
    return [
        point
        for link in links
        for size in ranks
        for own in rows
        for point in predict(work(own * size, heads, heads_kv, head_dim, is_causal), size, LINKS[link], device)
    ]


# Measured


@dataclass(frozen=True)
class Comparison:
    """A pass over a slow link: what was measured and what the model says."""

    op: str
    num_ranks: int
    rows: int
    megabytes_per_s: float
    measured_s: float
    predicted_s: float
    compute_s: float  # as predicted

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s


def compare_with_runs(
    num_ranks: int = 2, rows: int = 512, speeds: Sequence[float] = (5e6, 20e6, 80e6, 1e9), rounds: int = 5
) -> list[Comparison]:
    """Runs ring attention on this CPU, one thread to a rank, over links of these bytes a second, and predicts it from
    the time of one local call."""
    return on_ranks(_measure, num_ranks, rows, tuple(speeds), rounds)


def _measure(group: Any, rows: int, speeds: tuple[float, ...], rounds: int) -> list[Comparison]:
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    heads, dim = 4, 64
    q, k, v = (torch.randn(1, heads, rows, dim) for _ in range(3))
    one = dataclasses.replace(work(rows * num_ranks, heads, heads, dim, element_bytes=4), right=-1)
    found = []
    for speed in speeds:
        link = Link("slow", speed, 1e-3)
        times: dict[str, list[float]] = {name: [] for name in ("local forward", "local backward", *PASSES)}
        for _ in range(rounds + 1):
            _time_local(AttentionArgs(q, k, v, backend="cpu"), times)
            with slow_link(link.bytes_per_s, link.latency_s):
                leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
                dist.barrier()
                start = time.perf_counter()
                out: Any = ring_attention(*leaves, transport="p2p", backend="cpu")
                times["forward"].append(time.perf_counter() - start)
                dist.barrier()
                start = time.perf_counter()
                out.backward(torch.ones_like(out))
                times["backward"].append(time.perf_counter() - start)
        # The fastest of interleaved rounds: what else runs on this machine slows both
        best = {name: min(values[1:]) for name, values in times.items()}
        flops = one.score_flops(rows * rows)
        rates = [flops * factor / best[f"local {op}"] for op, factor in PASSES.items()]
        device = Device("this CPU", rates[0], rates[1], 0.5e-3)
        for op in PASSES:
            compute, _, total = ring_times(one, ring_steps(one, num_ranks, rank), device, link, op)
            found.append(Comparison(op, num_ranks, rows, speed / 1e6, best[op], total, compute))
    return found


def _time_local(args: AttentionArgs, times: dict[str, list[float]]) -> None:
    """Of a call on one rank's rows, while the other ranks do the same."""
    args = args._replace(out_dtype=torch.float32)
    dist.barrier()
    start = time.perf_counter()
    out, lse = ops.forward(*args)
    times["local forward"].append(time.perf_counter() - start)
    dist.barrier()
    start = time.perf_counter()
    ops.backward(torch.ones_like(out), None, *args._replace(needs_grad=True), out, lse, _GRADS)
    times["local backward"].append(time.perf_counter() - start)
